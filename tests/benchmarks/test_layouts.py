"""Layouts of ``pipemem layout`` are no worse than those of recipes, and benchmarks/notes/layouts.md has the numbers."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from megatron_pipemem.tools.planner.balance import balance

ROOT = Path(__file__).parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "layouts.py"))


@pytest.mark.parametrize(
    "recipe", BENCHMARK["RECIPES"], ids=lambda recipe: f"{recipe.model}-{recipe.pp}x{recipe.chunks}"
)
def test_at_least_as_balanced_as_by_hand(recipe):
    layouts = balance(recipe.run(), recipe.by_hand)
    assert layouts.best.slowest <= layouts.own.slowest * (1 + 1e-9)
    assert layouts.best.seconds <= layouts.own.seconds * (1 + 1e-9)
    shown = (ROOT / "benchmarks" / "notes" / "layouts.md").read_text(encoding="utf-8").splitlines()
    cells = (cell.replace("|", r"\|") for cell in BENCHMARK["row"](recipe, layouts))
    assert f"| {' | '.join(cells)} |" in shown
    assert f"| {' | '.join(BENCHMARK['COLUMNS'])} |" in shown
