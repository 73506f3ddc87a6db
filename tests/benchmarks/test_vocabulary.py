"""The paper's ratios at the size that was profiled. Heads on sleeping devices: right losses, right order, no times."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from lanes import nightly

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_pipemem import Costs, build_schedule, simulate

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "vocabulary.py"
DEVICES, MICROBATCHES, UNIT_MS, HEAD = 2, 4, 4.0, 2.0
METHODS = ["head on the last stage", "layers redistributed", "Algorithm 1", "Algorithm 2"]
INTERLACED = ("1f1b", "interlaced")
# Of two devices' layers and a head as long as both: all on the last device, or two shares each.
SHARES = {"head on the last stage": (1, 1 + HEAD), "layers redistributed": (2, HEAD)}
BARRIERS = {"Algorithm 1": 2, "Algorithm 2": 1}

emulated = nightly("the simulated comparison below runs the program; end_to_end/test_vocabulary.py runs the heads")


@pytest.fixture(scope="module")
def rows(benchmark, tmp_path_factory) -> dict[tuple[str, str], dict]:
    output = tmp_path_factory.mktemp("heads") / "result.json"
    sizes = f"--devices {DEVICES} --microbatches {MICROBATCHES} --head {HEAD} --step-ms {UNIT_MS}".split()
    # A rank whose losses are not those of the whole head, or whose order is another, fails the run.
    benchmark(PROGRAM.name, "--emulated", "--quick", *sizes, "--output", output)
    result = json.loads(output.read_text())
    assert (result["devices"], result["microbatches"], result["head"]) == (DEVICES, MICROBATCHES, [HEAD])
    return {(row["family"], row["method"]): row for row in result["rows"]}


@emulated
def test_every_method_ran_no_faster_than_its_plan(rows):
    of_families = [[(family, method) for method in METHODS] for family in ("1f1b", "v-half")]
    assert list(rows) == [*of_families[0], INTERLACED, *of_families[1]]
    for (family, _), row in rows.items():
        assert len(row["measured"]) == 1
        # A sleep never ends early, so no run beats its plan; one that does has skipped some waiting.
        assert row["seconds"] >= row["simulated"] * (1 - 1e-9)
        baseline = rows[family, "head on the last stage"]
        assert row["measured_speedup"] == pytest.approx(baseline["seconds"] / row["seconds"])
        assert row["simulated_speedup"] == pytest.approx(baseline["simulated"] / row["simulated"])


@emulated
@pytest.mark.parametrize("method", SHARES)
def test_uncut_heads_take_what_their_device_has(rows, method):
    unit = UNIT_MS / 1e3
    prices = tuple(share * unit for share in SHARES[method])
    base = build_schedule("1f1b", num_devices=DEVICES, num_microbatches=MICROBATCHES)
    assert rows["1f1b", method]["simulated"] == pytest.approx(simulate(base, Costs(prices, prices, prices)).makespan)


@emulated
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_that_of_the_barriers(rows, method):
    base = build_schedule("v-half", num_devices=DEVICES, num_microbatches=MICROBATCHES)
    more = BARRIERS.get(method, 0)
    assert rows["1f1b", method]["peak"] == pytest.approx((DEVICES + more) / DEVICES)
    assert rows["v-half", method]["peak"] == pytest.approx(simulate(base).peak + 2 * more / (2 * DEVICES))


@emulated
def test_interlacing_holds_half_as_much_again_as_1f1b(rows):
    assert rows[INTERLACED]["peak"] == pytest.approx(1.5)


@pytest.fixture
def simulated(monkeypatch, tmp_path, capsys):
    """Runs the comparison in this process; its exit status, its rows and what it prints."""

    def run(**changes) -> tuple[int, list[dict], str]:
        output = tmp_path / "rows.json"
        monkeypatch.syspath_prepend(PROGRAM.parent)
        program = runpy.run_path(str(PROGRAM))
        program["main"].__globals__.update(changes)
        monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--quick", "--microbatches", "64", "--output", str(output)])
        with pytest.raises(SystemExit) as stopped:
            program["main"]()
        return stopped.value.code, json.loads(output.read_text()), capsys.readouterr().out

    return run


def test_the_profiled_size_has_the_papers_ratios(simulated):
    status, rows, _ = simulated()
    assert status == 0 and len(rows) == 32
    assert all(abs(row["off"]) <= 0.05 for row in rows)
