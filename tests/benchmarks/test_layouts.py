"""Layouts of ``pipemem layout`` are no worse than those of recipes, and docs/stock-megatron.md has the numbers."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from megatron_pipemem.tools.planner.balance import balance

ROOT = Path(__file__).parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "layouts.py"))


@pytest.mark.parametrize("recipe", BENCHMARK["RECIPES"], ids=lambda each: f"{each.model}-{each.pp}x{each.chunks}")
def test_at_least_as_balanced_as_by_hand(recipe):
    found = balance(recipe.run(), recipe.by_hand)
    assert found.best.slowest <= found.own.slowest * (1 + 1e-9)
    assert found.best.seconds <= found.own.seconds * (1 + 1e-9)
    shown = (ROOT / "docs" / "stock-megatron.md").read_text(encoding="utf-8").splitlines()
    cells = (each.replace("|", r"\|") for each in BENCHMARK["row"](recipe, found))
    assert f"| {' | '.join(cells)} |" in shown
    assert f"| {' | '.join(BENCHMARK['COLUMNS'])} |" in shown
