"""Slices on sleeping devices: they run in the order that is planned, hold what is simulated, and share keys and values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lanes import nightly

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_pipemem import Costs, build_schedule, simulate
from megatron_pipemem.features.slices.prices import slice_costs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "long_sequences.py"
DEVICES, MICROBATCHES, SLICES, UNIT_MS = 2, 2, 4, 8.0
SLICED = ["seq1f1b", "interleaved", "zbv", "v-half"]

pytestmark = nightly("test_long_sequences.py runs the program; end_to_end/test_slices.py runs the orders")


@pytest.fixture(scope="module")
def emulated(benchmark, tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("emulated") / "result.json"
    sizes = f"--devices {DEVICES} --microbatches {MICROBATCHES} --slices {SLICES} --step-ms {UNIT_MS} --repeats 1"
    benchmark(BENCHMARK.name, "--emulated", *sizes.split(), "--output", output)
    (result,) = json.loads(output.read_text())
    return result


@pytest.mark.parametrize("name", SLICED)
def test_slices_hold_what_the_simulator_says(emulated, name):
    (row,) = (row for row in emulated["rows"] if row["schedule"] == f"{name} / {SLICES}")
    schedule = build_schedule(name, num_devices=DEVICES, num_microbatches=MICROBATCHES, slices=SLICES)
    timeline = simulate(schedule, slice_costs(Costs(), schedule.placement, (1,) * SLICES, 0.25, 0.05))
    # Gradients of keys and values are simulated for all slices, and the last one's are never kept.
    assert timeline.peak * 0.98 <= row["peak"] <= timeline.peak * (1 + 1e-9)
    assert row["simulated"] == pytest.approx(timeline.makespan * UNIT_MS / 1e3)
    assert row["seconds"] >= row["simulated"] * (1 - 1e-9)


def test_every_schedule_of_whole_microbatches_meets_the_best_with_slices(emulated):
    rows = {(row["runtime"], row["schedule"]): row for row in emulated["rows"]}
    whole = {name for _, name in rows if "/" not in name}
    assert whole == {"1f1b", "interleaved", "zbv"} and len(rows) == len(SLICED) + 3 + 2
    assert len(emulated["at_equal_memory"]) == 5
    for gain in emulated["at_equal_memory"]:
        runtime, _, name = gain["whole"].rpartition(" ")
        against, best = rows[runtime or "pipemem", name], rows["pipemem", gain["sliced"]]
        assert gain["measured"] == pytest.approx(against["seconds"] / best["seconds"])
        assert gain["simulated"] == pytest.approx(against["simulated"] / best["simulated"])
        assert gain["memory"] == pytest.approx(best["peak"] / against["peak"])
        assert gain["simulated"] > 1 and gain["memory"] <= 1 + 1e-9
