"""The comparison of context parallelism and slices, on a small model: both are planned, and cells say what was found."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from lanes import nightly

ROOT = Path(__file__).parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "long_sequences.py"))
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


def test_a_job_is_planned_in_every_way_with_slices_that_are_long_enough():
    """At 16K tokens two ranks have 4096 tokens of each of two slices, and at 8K they have too few."""
    name, whole, plain, sliced, both = Job("llama3-8b", 2**14, 1, 4).row().strip("| ").split(" | ")
    assert name == "llama3-8b 4 x 16K, 8 GPUs" and " cp" in whole and " cp" not in plain + sliced
    assert "n=" not in whole + plain and sliced.endswith("n=4") and " cp2 " in both and both.endswith("n=2")
    assert Job("llama3-8b", 2**13, 1, 4).row().endswith("n=2 | too short |")


def table() -> list[str]:
    """Return the documented table of typical jobs."""
    note = (ROOT / "benchmarks" / "notes" / "long-sequences.md").read_text(encoding="utf-8")
    return [line for line in note.split("## Typical jobs")[1].split("## ")[0].splitlines() if line.startswith("|")]


def test_the_table_has_every_job():
    head, line, *rows = table()
    assert (head, line) == BENCHMARK["JOB_HEADER"]
    assert [row.strip("| ").split(" | ")[0] for row in rows] == [str(job) for job in BENCHMARK["JOBS"]]


@nightly("the table has every job; test_a_job_is_planned_in_every_way_with_slices_that_are_long_enough")
@pytest.mark.parametrize("number", range(len(BENCHMARK["JOBS"])))
def test_the_table_is_current(number: int):
    assert BENCHMARK["JOBS"][number].row() == table()[2 + number]
