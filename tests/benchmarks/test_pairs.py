"""Pairs on devices with two lanes: runtimes keep to their orders and memory, and exchanges run beside computing. No times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = {"zbv", "zbv, pairs", "dualpipe-v", "dualpipe-v, pairs", "auto 1.25, pairs", "auto 1.5, pairs"}
STOCK = {"1f1b", "interleaved", "interleaved, pairs", "interleaved, pairs, late W"}


@pytest.fixture(scope="module")
def compared(benchmark, tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("pairs") / "result.json"
    sizes = "--quick --devices 2 --microbatches 4 --layers 1 --step-ms 8".split()
    benchmark("pairs.py", *sizes, "--output", output)
    (result,) = json.loads(output.read_text())
    return result


def test_every_runtime_keeps_to_its_plan(compared):
    rows = {(row["runtime"], row["schedule"]): row for row in compared["rows"]}
    assert rows.keys() == {("pipemem", name) for name in OURS} | {("megatron", name) for name in STOCK}
    assert rows["megatron", "interleaved, pairs"]["peak"] == 1.5
    assert rows["pipemem", "auto 1.25, pairs"]["peak"] <= 1.25
    for (_, name), row in rows.items():
        # Stock's weight gradients that come late hide exchanges outside of pairs too.
        assert row["seconds"] >= row["simulated"] * (1 - 1e-9) or name.endswith("late W")
        # Both passes of a pair last as long as the pair.
        assert row["pass_error"] > (0.05 if "pairs" in name else -1e-9)


def test_gains_are_those_of_the_fastest_in_the_same_memory(compared):
    ours, stock = ([row for row in compared["rows"] if row["runtime"] == engine] for engine in ("pipemem", "megatron"))
    named = {row["schedule"]: row for row in ours}
    assert {gain["schedule"] for gain in compared["gains"]} == {name for name in OURS if "pairs" in name}
    for gain in compared["gains"]:
        row = named[gain["schedule"]]
        assert gain["peak"] == row["peak"]
        for key, others in (("plain", ours), ("stock", stock)):
            fit = [other for other in others if other["peak"] <= row["peak"] + 1e-9]
            fit = [other for other in fit if key == "stock" or "pairs" not in other["schedule"]]
            best = min(fit, key=lambda other: other["seconds"])
            assert gain[key] == pytest.approx([best[name] / row[name] for name in ("simulated", "seconds")])


def test_lanes_run_beside_each_other_and_wait_for_events(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from emulated.lanes import Lane, LaneEvent

    computing, exchanging, event = Lane(), Lane(), LaneEvent()
    first, second = computing.run(3.0), computing.run(1.0)
    assert second == (first[1], first[1] + 1.0)
    beside = exchanging.run(1.0)
    assert beside[1] < first[1]
    event.record(computing)
    event.wait(exchanging)
    assert exchanging.run(1.0)[0] == second[1]
