"""Predicted bytes per parameter are those that Megatron's real optimizers hold, counted for the same flags."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import packages
import pytest

from megatron_pipemem.flags import values_by_flag
from megatron_pipemem.tools.planner.parameter_bytes import parameter_bytes

pytest.importorskip("megatron.core", reason="needs the [megatron] extra")

AWARE = "--use-distributed-optimizer --use-precision-aware-optimizer"
ON_HOST = f"--bf16 {AWARE} --optimizer-cpu-offload"
RUNS = (
    "",
    "--use-distributed-optimizer",
    "--bf16",
    "--fp16",
    "--fp16 --accumulate-allreduce-grads-in-fp32 --use-distributed-optimizer",
    "--bf16 --grad-reduce-in-bf16",
    "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
    "--bf16 --optimizer sgd",
    f"--bf16 {AWARE}",
    f"--fp16 {AWARE}",
    f"--bf16 {AWARE} --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    f"--bf16 {AWARE} --main-params-dtype fp16 --exp-avg-dtype fp16",
    ON_HOST,
)
GRADIENT_ON_HOST = 4
"""Bytes of a parameter's gradient in fp32, which Megatron copies only from a GPU."""


def test_bytes_are_those_of_megatrons_own_optimizers():
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("optimizer_bytes.py")), *RUNS],
        env=packages.environment(packages.NEWEST),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    counted = json.loads(process.stdout[process.stdout.rindex('{"": ') :])
    predicted = {}
    for flags in RUNS:
        named = values_by_flag(flags.split())
        precision = next((name for name in ("bf16", "fp16") if name in named), "fp32")
        of = parameter_bytes(precision, named)
        state = of.host - GRADIENT_ON_HOST if flags == ON_HOST else of.optimizer
        predicted[flags] = {"gradient": of.gradient, "state": state}
    assert predicted == counted
