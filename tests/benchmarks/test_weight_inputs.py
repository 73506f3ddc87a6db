"""Shares of 1F1B's bytes with shards waiting for W: those of benchmarks/notes/weight-inputs.md, and of the papers."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "weight_inputs.py"))
MOST = {"zb-h1": 1.05, "zbv": 1.05, "v-half": 0.655, "v-min": 0.55}
WAITING_HEAD = 1.06  # with the gradients of logits that wait for W, relative to without


@pytest.mark.parametrize("schedule", MOST)
def test_eight_devices_hold_what_the_schedule_promises(schedule):
    _, gathered, shards, with_early_head, _ = BENCHMARK["shares"](schedule, 8)
    assert with_early_head <= MOST[schedule] < gathered
    assert with_early_head <= shards <= MOST[schedule] * WAITING_HEAD


def test_the_documents_tables_are_what_the_command_prints():
    shown = (ROOT / "benchmarks" / "notes" / "weight-inputs.md").read_text(encoding="utf-8").splitlines()
    rows = [BENCHMARK["COLUMNS"], *BENCHMARK["rows"]()]
    rows += [BENCHMARK["EARLY_BYTES"], *BENCHMARK["early_bytes"]()]
    rows += [BENCHMARK["EARLY_SHARES"], *BENCHMARK["early_shares"]()]
    rows += [BENCHMARK["HEAD"], *BENCHMARK["head_rows"](), BENCHMARK["COMPARED"], *BENCHMARK["way_rows"]()]
    for cells in rows:
        assert f"| {' | '.join(cells)} |" in shown


def test_zb_h1_holds_no_more_bytes_than_1f1b_for_any_model():
    """And to move W takes no longer than the head's weight gradient in I, which does not suffice."""
    assert len(BENCHMARK["of_all_models"]()) == 39
    for sizes in BENCHMARK["of_all_models"]().values():
        assert all(held["W earlier"].share <= 1 + 1e-9 for held in sizes.values())
    _, head, earlier = BENCHMARK["way_rows"]()
    assert float(head[2]) > 1.03 and earlier[2] == "1.00" and earlier[3:] < head[3:]
