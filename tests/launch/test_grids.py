"""The grids of the repository: every point is a run that its cluster can start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch import feasibility
from megatron_pipemem.tools.launch.grid.points import load_points

POINTS = {
    "controllable-memory-figure-7": 23,
    "controllable-memory-table-3": 12,
    "eight-nodes-64xh100": 18,
    "one-node-8xh100": 13,
    "pipeoffload-figure-11": 8,
    "tiny-cpu": 10,
    "vocabulary-table-5": 72,
    "vocabulary-table-5-redistributed": 16,
    "vocabulary-table-6": 45,
}
GRIDS = sorted((Path(__file__).parents[2] / "configs" / "grids").glob("*.yaml"))


def test_every_grid_is_known():
    assert {path.stem for path in GRIDS} == set(POINTS)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda path: path.stem)
def test_every_point_starts(grid, monkeypatch):
    """All are runs with a command. One of each schedule and cut is judged whole, in a step of as few microbatches as it
    takes: longer ones take long to look at, and `pipemem grid GRID --launcher print` looks at them.
    """
    monkeypatch.setattr(feasibility, "_CHECKS", feasibility._CHECKS[:-1])
    points = load_points(grid, any_size=True)
    monkeypatch.undo()
    assert len(points) == POINTS[grid.stem] and [point.reason for point in points if point.reason] == []
    kinds: dict[object, Run] = {}
    for point in points:
        cut, choice = point.run.parallelism, point.run.schedule
        asked = (choice.name, choice.vocab_cut, choice.recompute, choice.offload)
        fewest = cut.pp if choice.name == STOCK else family(choice.name).fewest_microbatches(cut.pp)
        short = replace(cut, global_batch=fewest * cut.micro_batch * cut.dp)
        kinds.setdefault((short, *asked, repr(point.run.flags)), replace(point.run, parallelism=short))
    assert {feasibility.feasible(run, any_size=True) for run in kinds.values()} == {None}
