"""What forwards add to logged losses is taken back with them."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pipemem.features.overlap_steps.megatron.traces import ForwardTraces


def test_forwards_that_run_again_are_counted_once(monkeypatch):
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", None)
    depths = {"loss_values": torch.tensor([1.0, 2.0]), "reduce_group": None}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", depths)
    experts = moe_logging.get_moe_metrics_tracker()
    experts.record("aux", torch.tensor(3.0), layer_number=2, num_layers=2)
    traces = ForwardTraces()
    for name in ("aux", "z"):
        experts.record(name, torch.tensor(5.0), layer_number=1, num_layers=2)
    depths["loss_values"] += 7
    depths["total_values"] = torch.tensor([4.0])
    traces.restore()
    assert {name: entry.values.tolist() for name, entry in experts.metrics.items()} == {"aux": [0, 3], "z": [0, 0]}
    assert (depths["loss_values"].tolist(), depths["total_values"].tolist()) == ([1, 2], [0])
