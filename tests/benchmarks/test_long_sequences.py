"""The comparison of context parallelism and slices, on a small model: both are planned, and cells say what was found."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "long_sequences.py"))
Way, COLUMNS = BENCHMARK["Way"], BENCHMARK["COLUMNS"]
SMALL = {"model": "llama3-8b", "tp": 4}


@pytest.mark.parametrize("cut", [{"cp": 2}, {"slices": 4}, {"slices": 4, "slice_cut": "flops"}])
def test_a_way_is_planned_as_it_says(cut: dict[str, int]):
    way = Way(32768, **cut)
    found = way.best(4, **SMALL)
    run = found.run
    assert run.parallelism.ranks == 32
    assert run.parallelism.microbatches * run.parallelism.dp * 32768 == BENCHMARK["TOKENS"]
    assert (run.parallelism.cp, run.schedule.slices or 1) == (way.cp, way.slices)
    cells = dict(zip(COLUMNS, BENCHMARK["row"](way, found), strict=True))
    assert cells["tokens"] == "32K"
    assert cells["cut"] == str(way)
    assert float(cells["peak GiB"]) < run.cluster.memory_gib
    assert float(cells["s/step"]) == pytest.approx(found.seconds, abs=0.05)


def test_what_fits_nowhere_says_so():
    cells = dict(zip(COLUMNS, BENCHMARK["row"](Way(2**19), None), strict=True))
    assert cells["binds"] == "nothing fits"


def test_both_are_tried_in_every_number():
    tried = list(BENCHMARK["ways"](2**15, (1, 2, 4)))
    whole, cut = [(1, 1), (2, 1), (4, 1)], [(1, 2), (1, 4)]
    assert [(way.cp, way.slices) for way in tried] == [*whole, *cut, *cut]
    assert [str(way) for way in tried[-3:]] == ["4 slices", "2 slices by FLOPs", "4 slices by FLOPs"]
