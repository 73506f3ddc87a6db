"""What profiling a model with fake tensors says predicts, to the byte, what the ranks of a real run hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_pipemem.schedule.action_prices import held_after
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule

COUNT = """
import json, sys
from pathlib import Path
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run
from megatron_pipemem.cpu import activate
activate()
from megatron_pipemem.mcore.profiling import profile
run = load("tiny-cpu", Run)
Path(sys.argv[1]).write_text(json.dumps(profile(run.model, run.execution, run.cluster, 1).to_json()))
"""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> Costs:
    """In a process of its own, which sets Megatron up for the CPU."""
    costs = tmp_path_factory.mktemp("profiled") / "costs.json"
    done = subprocess.run([sys.executable, "-c", COUNT, str(costs)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Costs.from_json(costs)


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_peaks_of_real_ranks_follow_from_fake_tensors(train, profiled, name):
    schedule = build_schedule(name, num_devices=4, num_microbatches=6)
    changes = profiled.memory_changes(schedule.placement)
    foretold = [max(held_after(actions, changes)) for actions in lower(schedule).actions]
    run = train(name, "--untie-embeddings-and-output-weights")
    assert foretold == run.counted_peaks
    assert len(set(foretold)) > 1, "ranks that all hold the same would not tell one stage from another"
