"""The comparison of context parallelism and slices, on a small model: both are planned, and cells say what was found."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "long_sequences.py"))
Way, Job, COLUMNS = BENCHMARK["Way"], BENCHMARK["Job"], BENCHMARK["COLUMNS"]
SMALL = {"model": "llama3-8b", "tp": 4}


@pytest.mark.parametrize("cut", [{"cp": 2}, {"slices": 4}, {"slices": 4, "slice_cut": "flops"}])
def test_a_way_is_planned_as_it_says(cut: dict[str, int]):
    way = Way(32768, **cut)
    best_plan = way.best(4, **SMALL)
    run = best_plan.run
    assert run.parallelism.ranks == 32
    assert run.parallelism.microbatches * run.parallelism.dp * 32768 == BENCHMARK["TOKENS"]
    assert (run.parallelism.cp, run.schedule.slices or 1) == (way.cp, way.slices)
    cells = dict(zip(COLUMNS, BENCHMARK["row"](way, best_plan), strict=True))
    assert cells["tokens"] == "32K"
    assert cells["cut"] == str(way)
    assert float(cells["peak GiB"]) < run.cluster.memory_gib
    assert float(cells["s/step"]) == pytest.approx(best_plan.seconds, abs=0.05)


def test_a_job_is_planned_without_slices_and_in_slices_that_are_long_enough():
    name, whole, plain, sliced = Job("llama3-8b", 2**13, 1, 4).row().strip("| ").split(" | ")
    assert name == "llama3-8b 4 x 8K, 8 GPUs" and " cp" not in plain
    assert "n=" not in whole + plain and sliced.endswith("n=2")
