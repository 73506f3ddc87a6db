"""What is known of a step that nobody has waited for: its norm, its losses, and the signals that ask the run to end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from refusals import refused
from streams import Group, Streams, Work

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.overlap_steps.megatron import snapshot
from megatron_pipemem.features.overlap_steps.megatron.optimizer import MARGIN, LateNorm, LateSum, OverlappedOptimizer
from megatron_pipemem.features.overlap_steps.megatron.snapshot import Snapshot
from megatron_pipemem.features.overlap_steps.megatron.steps import ForwardTraces, TrainingLoop


def late(value: float, group) -> LateSum:
    return LateSum(torch.tensor([value]), group)


def norm(value: float, group, copies: int = 1) -> LateNorm:
    square = value * value
    return LateNorm(late(square, group), late(copies * square, group), copies)


def test_a_norm_reads_as_the_number_that_it_becomes(world):
    total_norm = norm(3.0, world)
    assert (float(total_norm), f"{total_norm:.1f}", total_norm > 2, total_norm == 3.0, repr(total_norm)) == (
        3.0,
        "3.0",
        True,
        True,
        "3.0",
    )
    third = LateNorm(late(0.1, world), late(0.1, world), 1)
    assert float(third.in_single()) == torch.tensor(float(third)).item() != float(third)


def test_a_norm_is_not_read_before_its_sum(monkeypatch):
    post = lambda tensor, group, async_op: group.post([], [tensor], "all_reduce")  # noqa: E731
    monkeypatch.setattr(torch.distributed, "all_reduce", post)
    with Streams() as gpu:
        own = torch.ones(1)
        total = LateSum(own, Group("norm"))
        own.mul_(2)  # the gradients of the next step
        total.result() * 2
    assert not gpu.findings
    monkeypatch.setattr(Work, "wait", lambda work: None)
    with Streams() as gpu:
        LateSum(torch.ones(1), Group("norm")).result() * 2
    assert gpu.kinds() == {"race"}


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("value", "is_below"),
    [(0.5, True), (1.0, False), (1 - MARGIN / 2, False), (1 - 2 * MARGIN, True), (math.inf, False), (math.nan, False)],
)
def test_a_norm_near_the_limit_is_not_below_it(world, value, is_below, copies):
    assert norm(value, world, copies).is_below(1.0) is is_below


def test_all_ranks_hear_of_a_signal_one_step_later(world):
    optimizer = SimpleNamespace(overlaps=True, total=lambda own: late(own, world))
    loop, handler = TrainingLoop(optimizer), SimpleNamespace(_signal_received=False)
    told = []
    for received in (False, True, True):
        handler._signal_received = received
        told.append(any(loop._signals_received(lambda handler: pytest.fail("asked everybody"), handler)))
    assert told == [False, False, True]
    loop.finish()
    optimizer.overlaps = False
    assert loop._signals_received(lambda handler: [handler], handler) == [handler]


def test_without_an_optimizer_of_megatrons_nothing_can_overlap(world):
    with refused("enabled-too-late", "get_megatron_optimizer", kind=UnsupportedError):
        OverlappedOptimizer().require()


def test_a_snapshot_that_the_device_has_no_room_for_is_refused(monkeypatch):
    parameter = mock.Mock(nbytes=1 << 30, device=torch.device("cuda"))
    parameter.detach.return_value = parameter
    inner = SimpleNamespace(param_groups=[{"params": [parameter]}], state={})
    part = object.__new__(FP32Optimizer)
    part.optimizer, part.is_stub_optimizer = inner, False
    monkeypatch.setattr(snapshot, "_free_bytes", lambda device: (3 << 30) - 1)
    with pytest.raises(UnsupportedError) as refused:
        Snapshot(part)
    assert "3.00GiB" in str(refused.value) and "--clip-grad 0" in str(refused.value)
    monkeypatch.setattr(snapshot, "_free_bytes", lambda device: 3 << 30)
    assert Snapshot(part).nbytes == 0


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
