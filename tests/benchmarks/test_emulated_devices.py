"""The comparison on sleeping devices: every runtime runs every pass, and what it reports is what ran. No times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lanes import nightly

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_pipemem import build_schedule, simulate
from megatron_pipemem.schedule.action import Action, Kind

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEVICES, MICROBATCHES, UNIT_MS = 2, 4, 4.0
OURS = ["1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "1f1b-v"]
# Peak of every peer, p devices and enough microbatches: 1F1B's warm-up of p, interleaved's 3p - 1 chunks, the V's 2p
# chunks and DualPipeV's one more.
PEERS = {
    ("torch", "1f1b"): 1.0,
    ("torch", "interleaved"): (3 * DEVICES - 1) / (2 * DEVICES),
    ("torch", "zbv"): 1.0,
    ("torch", "dualpipe-v"): (2 * DEVICES + 1) / (2 * DEVICES),
    ("megatron", "1f1b"): 1.0,
    ("megatron", "interleaved"): (3 * DEVICES - 1) / (2 * DEVICES),
}


@pytest.fixture(scope="module")
def comparison(benchmark, tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("emulated") / "result.json"
    sizes = f"--devices {DEVICES} --microbatches {MICROBATCHES} --costs 1,1,1 --step-ms {UNIT_MS} --repeats 1".split()
    benchmark("emulated_devices.py", *sizes, "--output", output)
    (result,) = json.loads(output.read_text())
    return result


@pytest.mark.parametrize("name", OURS)
def test_ours_holds_what_the_simulator_says(comparison, name):
    (row,) = (row for row in comparison["rows"] if (row["runtime"], row["schedule"]) == ("pipemem", name))
    timeline = simulate(build_schedule(name, num_devices=DEVICES, num_microbatches=MICROBATCHES))
    assert row["peak"] == pytest.approx(timeline.peak)
    assert row["simulated"] == pytest.approx(timeline.makespan * UNIT_MS / 1e3)
    # A sleep never ends early, so no run beats its plan; one that does has skipped some waiting.
    assert row["seconds"] >= row["simulated"] * (1 - 1e-9)


@pytest.mark.parametrize("cap", [0.5, 0.625, 0.75, 1.0])
def test_searched_schedules_hold_no_more_than_their_cap(comparison, cap):
    (row,) = (row for row in comparison["rows"] if row["schedule"] == f"search {cap:g}")
    assert 0 < row["peak"] <= cap
    assert row["seconds"] >= row["simulated"] * (1 - 1e-9)


def test_every_peer_ran_and_met_the_fastest_of_ours_within_its_memory(comparison):
    rows = {(row["runtime"], row["schedule"]): row for row in comparison["rows"]}
    assert {key: rows[key]["peak"] for key in rows if key[0] != "pipemem"} == pytest.approx(PEERS)
    assert len(comparison["at_equal_memory"]) == len(PEERS)
    for duel in comparison["at_equal_memory"]:
        rivals = [r for (runtime, _), r in rows.items() if runtime == "pipemem" and r["peak"] <= duel["peer_peak"]]
        assert duel["our_seconds"] == min(row["seconds"] for row in rivals)
        peer = rows[tuple(duel["peer"].split(" "))]
        assert duel["speedup"] == pytest.approx(peer["seconds"] / duel["our_seconds"])


def test_a_run_in_another_order_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from emulated.measure import check_order

    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=2)
    first = [Action(kind, 0, mb) for kind, mb in zip("FFIWIW", (0, 1, 0, 0, 1, 1), strict=True)]
    last = [Action(Kind(kind), 1, mb) for mb in (0, 1) for kind in "FIW"]
    check_order(schedule, [first, last])
    with pytest.raises(RuntimeError) as raised:
        check_order(schedule, [first, last[3:] + last[:3]])
    assert "device 1 " in str(raised.value)


@nightly("the comparison above runs the program; end_to_end/test_overlapping.py runs such steps")
def test_steps_follow_each_other_without_a_barrier(benchmark, tmp_path):
    output = tmp_path / "steps.json"
    sizes = "--devices 2 --microbatches 4 --costs 1,1,1 --step-ms 4 --repeats 1 --steps 3".split()
    benchmark("emulated_devices.py", *sizes, "--output", output)
    (result,) = json.loads(output.read_text())
    rows = {(row["runtime"], row["schedule"], row["way"]): row for row in result["rows"]}
    assert len(rows) == 3 * 3 + 2
    # The plan is for endless steps, and few of them may be a little faster; a dropped step repeats forwards.
    for name in ("1f1b", "zb-h2", "zbv"):
        waits, free = (rows["pipemem", name, way] for way in ("waits", "none"))
        assert free["planned"] * (1 - 1e-9) <= waits["planned"] <= waits["seconds"] * (1 + 1e-9)
        assert min(free["seconds"], rows["pipemem", name, "all dropped"]["seconds"]) >= free["planned"] * (1 - 1e-9)
    gains = {row["schedule"]: row["planned"] for row in result["without_barrier"]}
    assert gains == pytest.approx({"1f1b": 1, "zb-h2": 1 + 1 / 12, "zbv": 1 + 1 / 24})
