"""NVIDIA's own training script of hybrid models, unmodified, on CPU ranks, with layers that need neither a GPU nor packages.

The package index does not have it: ``MEGATRON_LM`` names the folder of a Megatron-LM checkout (branch ``core_r0.19.0``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launching import TOY_MODEL

SCRIPT = Path(os.environ.get("MEGATRON_LM", "")) / "pretrain_hybrid.py"


@pytest.mark.skipif(not SCRIPT.is_file(), reason="MEGATRON_LM does not name a folder with pretrain_hybrid.py")
def test_pretrain_hybrid_trains_alike_under_stock_and_a_v(torchrun, tmp_path):
    losses = {}
    for schedule in ("stock", "v-half"):
        report = tmp_path / f"{schedule}.json"
        result = torchrun(
            2,
            SCRIPT,
            *TOY_MODEL,
            *("--spec", "megatron_pipemem.tools.cpu.hybrid_layers", "hybrid_stack_spec", "--mock-data"),
            *("--vocab-size", "99", "--clip-grad", "1000"),
            *("--hybrid-layer-pattern", "*-*|-*-" if schedule == "stock" else "*-*-*-"),
            *("--pipemem-schedule", schedule, "--pipemem-rng", "layerwise", "--pipemem-report", str(report)),
        )
        assert result.returncode == 0, result.stdout
        losses[schedule] = json.loads(report.read_text())["losses"]
    assert losses["v-half"] == losses["stock"] and len(set(losses["stock"])) == 3


@pytest.mark.parametrize("kind", ["gdn_layer", "dsa_layer"])
def test_layers_without_a_local_form_are_refused_with_the_way_out(lane, kind):
    told = lane(f"""
from megatron.core.transformer.spec_utils import build_module
from megatron_pipemem.tools.cpu.hybrid_layers import hybrid_stack_spec
from megatron_pipemem.errors import UnsupportedError
try:
    result = build_module(hybrid_stack_spec.submodules.{kind}, config=None, layer_number=1)
except UnsupportedError as error:
    result = str(error)
""")
    assert (
        "no local layers" in told and "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec" in told
    )
