"""Replayed steps with current scaling, MXFP8 and NVFP4 equal steps without graphs to the bit; planted faults are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import packages
from lanes import nightly

NAMES = (
    *("zb-h1, tensorwise, kept copies", "zb-h1, mxfp8, weights in 8 bits, two depths"),
    "v-half, tensorwise, weights in 8 bits, two depths",
    *("v-half, tensorwise, hybridep, two depths", "v-half, nvfp4, hybridep, two depths"),
)
OTHERS = (
    *("v-half, mxfp8, kept copies", "v-half, mxfp8, weights in 8 bits", "v-half, tensorwise, kept copies"),
    *("zb-h1, mxfp8, kept copies", "zb-h1, tensorwise, weights in 8 bits"),
    *("1f1b, tensorwise, kept copies", "1f1b, mxfp8, weights in 8 bits, two depths"),
    *("v-half, mxfp8, weights in 8 bits, two depths", "zb-h1, tensorwise, kept copies, two depths"),
    *("zb-h1, tensorwise, experts", "v-half, tensorwise, experts in 8 bits", "1f1b, mxfp8, hybridep"),
    *("zb-h1, none, repeated depth", "v-half, mxfp8, repeated depth in 8 bits"),
    *("zb-h1, nvfp4", "1f1b, nvfp4, two depths", "zb-h1, mxfp8, experts in 8 bits"),
)


def printed_for(*names: str, program: str = "graph_fp8.py") -> dict:
    environment = packages.environment(packages.NEWEST)
    folders = [str(Path(__file__).parents[1] / folder) for folder in ("mcore", "runtime")]
    environment["PYTHONPATH"] = os.pathsep.join((*folders, packages.MAMBA, environment["PYTHONPATH"]))
    command = [sys.executable, str(Path(__file__).with_name(program)), *names]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(ran.stdout.splitlines()[-1])


def test_replayed_steps_equal_plain_steps_and_faults_are_found():
    shown = printed_for(*NAMES, "faults")
    assert shown["models"] == dict.fromkeys(NAMES, 0)
    faults = shown["faults"]
    assert faults.pop("copies are not updated") > 0 < faults.pop("weights in 8 bits move, unnoticed")
    assert faults.pop("experts compute in 16 bits") > 0 < faults.pop("gradients are rounded alike")
    assert faults == dict.fromkeys(("copies are replaced", "weights in 8 bits move"), "graph-model")
    assert len({*shown["losses"].values()}) == 4, "values are not rounded to 8 or 4 bits"


@nightly("other layers in graphs above, and gated delta nets without graphs in end_to_end/test_transformer_engine.py")
def test_gated_delta_nets_with_experts_and_a_depth():
    names = [f"{schedule}, {recipe}, delta net" for schedule in ("zb-h1", "v-half") for recipe in ("none", "mxfp8")]
    assert printed_for(*names)["models"] == dict.fromkeys(names, 0)


@nightly("five other cases")
def test_all_recipes_and_schedules():
    assert printed_for(*OTHERS)["models"] == dict.fromkeys(OTHERS, 0)
