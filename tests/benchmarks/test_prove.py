"""The one-GPU proof, rehearsed on CPU: every experiment ends, claims what it claims, and is not repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu" / "prove.py"
# Experiment A has a test of its own: tests/runtime/test_offload_benchmark.py.
EXPERIMENTS = {"B": "solo_rank", "C": "four_ranks", "D": "split_cost", "E": "head_passes"}


def prove(folder: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), "--rehearse", "--output", str(folder), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def proved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prove")
    done = prove(folder, "--only", *EXPERIMENTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| holds |") == sum(len(rows(folder, name)) for name in EXPERIMENTS.values())
    return folder


def rows(folder: Path, program: str) -> list[dict]:
    data = json.loads((folder / f"{program}.json").read_text())
    assert data["complete"] and data["rehearsal"]
    return data["rows"]


def test_a_played_rank_holds_what_was_predicted(proved):
    found = rows(proved, "solo_rank")
    assert {row["case"].split(",")[0] for row in found} == {"1f1b", "zbv", "v-half", "po-f"}
    for row in found:
        assert 0 < row["values"]["predicted_bytes"] == row["values"]["counted_bytes"]
        assert not row["missed"]


def test_four_ranks_train_as_stock(proved):
    found = rows(proved, "four_ranks")
    assert len(found) == 4
    assert all(row["values"]["last_loss"] > 0 and not row["missed"] for row in found)


def test_the_parts_of_a_split_backward_are_timed(proved):
    for row in rows(proved, "split_cost"):
        assert all(value > 0 for value in row["values"].values())


def test_the_passes_of_the_head_are_counted_timed_and_precise(proved):
    one, two, times, errors = (row["values"] for row in rows(proved, "head_passes"))
    for phase, eager, fused in (("S", 44, 4), ("T", 36, 4)):
        assert one[f"{phase}_eager_bytes_per_logit"] == pytest.approx(eager, abs=0.1)
        assert one[f"{phase}_one_pass_bytes_per_logit"] == pytest.approx(fused, abs=0.1)
    assert two["S_one_pass_bytes_per_logit"] < one["S_one_pass_bytes_per_logit"]
    assert all(value > 0 for value in times.values())
    assert errors["added_product_error"] < 1e-6


def test_what_came_to_its_end_is_not_repeated(proved):
    again = prove(proved, "--only", "D")
    assert again.returncode == 0
    assert "done already" in again.stdout
