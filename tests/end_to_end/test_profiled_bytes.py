"""What `pipemem profile --fake` says of a model foretells, to the byte, what the ranks of a real run hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.held import held_after
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule

RUN = """
model: tiny-gpt
cluster: cpu
precision: fp32
parallelism: {{pp: 4, global_batch: 6}}
schedule: {{name: {schedule}}}
"""


def profiled(schedule: str, folder) -> Costs:
    """By the command, in a process of its own: it sets Megatron up for the CPU."""
    run, costs = folder / "run.yaml", folder / "costs.json"
    run.write_text(RUN.format(schedule=schedule))
    command = [sys.executable, "-m", "megatron_pipemem", "profile", str(run), "--fake", "--output", str(costs)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Costs.from_json(costs)


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_peaks_of_real_ranks_follow_from_fake_tensors(train, tmp_path, name):
    schedule = build_schedule(name, num_devices=4, num_microbatches=6)
    changes = profiled(name, tmp_path).memory_changes(schedule.placement)
    foretold = [max(held_after(actions, changes)) for actions in lower(schedule).actions]
    run = train(name, "--untie-embeddings-and-output-weights")
    assert foretold == run.counted_peaks
    assert len(set(foretold)) > 1, "ranks that all hold the same would not tell one stage from another"
