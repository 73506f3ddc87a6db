"""What profiling a model with fake tensors says predicts, to the byte, what the ranks of a real run hold."""

from __future__ import annotations

import profiled_costs
import pytest

from megatron_pipemem.part_costs import read_costs
from megatron_pipemem.schedule.action_prices import held_after
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.tools.cpu.ranks import start_ranks


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> dict[int, Costs]:
    """Costs by the number of context-parallel ranks, from a process of its own."""
    folder = tmp_path_factory.mktemp("profiled")
    (process,) = start_ranks(profiled_costs.write, [(str(folder),)], [folder / "log"])
    process.join()
    assert process.exitcode == 0, (folder / "log").read_text()
    return {cp: read_costs(folder / f"{cp}.json") for cp in (1, 2)}


@pytest.mark.parametrize(("name", "pp", "cp"), [("1f1b", 4, 1), ("v-half", 2, 2)])
def test_peaks_of_real_ranks_follow_from_fake_tensors(train, profiled, name, pp, cp):
    schedule = build_schedule(name, num_devices=pp, num_microbatches=6)
    changes = profiled[cp].memory_changes(schedule.placement)
    predicted = [max(held_after(actions, changes)) for actions in lower(schedule).actions]
    cut = ("--pipeline-model-parallel-size", str(pp), "--context-parallel-size", str(cp))
    run = train(name, "--untie-embeddings-and-output-weights", *cut)
    assert [peak for peak in predicted for _ in range(cp)] == run.counted_peaks
    assert len(set(predicted)) > 1, "ranks that all hold the same would not tell one stage from another"
