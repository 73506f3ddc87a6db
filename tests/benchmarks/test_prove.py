"""The one-GPU proof, rehearsed on CPU: every experiment ends, claims what it claims, and is not repeated."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lanes import nightly

from megatron_pipemem.schedule.registry import families

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu" / "prove.py"
# A has a test of its own, tests/runtime/test_offload_benchmark.py. H, I and J are in test_speed.py.
EXPERIMENTS = {
    "B": "solo_rank",
    "C": "four_ranks-families",
    "D": "split_cost",
    "E": "head_passes",
    "F": "device_waits",
    "G": "waiting_hosts",
}

# The whole program takes minutes. Its parts without ranks are tested below in the full lane.
rehearsed = nightly("tests/end_to_end trains and counts; schedule/test_waits.py and runtime/test_streams.py play hosts")


def prove(folder: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), "--rehearse", "--output", str(folder), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Modules of the experiments, and the play that the model of hosts is tested against."""
    monkeypatch.syspath_prepend(PROGRAM.parent)
    names = ("proof", "four_ranks", "waiting_hosts", "host_oracle")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def proved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prove")
    done = prove(folder, "--only", *EXPERIMENTS, "--minutes", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| holds |") == sum(len(rows(folder, path.stem)) for path in folder.glob("*.json"))
    return folder


def rows(folder: Path, program: str) -> list[dict]:
    data = json.loads((folder / f"{program}.json").read_text())
    assert data["complete"] and data["rehearsal"]
    return data["rows"]


@rehearsed
def test_a_played_rank_holds_what_was_predicted(proved):
    solo_rows = rows(proved, "solo_rank")
    few, many = {"1f1b", "zbv", "v-half", "po-f"}, {"1f1b", "zb-h1", "zbv", "v-half", "v-min"}
    played = {("GPT", name, "rank 0 of 4") for name in few}
    played |= {("Llama", name, f"rank {rank} of 2") for name in many for rank in (0, 1)}
    assert {tuple(row["case"].split(", ")[:3]) for row in solo_rows} == played
    for row in solo_rows:
        assert 0 < row["values"]["predicted_bytes"] == row["values"]["counted_bytes"]
        assert not row["missed"]


@rehearsed
def test_four_ranks_train_as_stock(proved):
    parts = {"families": 6, "passes": 2, "timers": 4, "usual-order": 2}
    rows_of_parts = {part: rows(proved, f"four_ranks-{part}") for part in parts}
    assert {part: len(rank_rows) for part, rank_rows in rows_of_parts.items()} == parts
    rank_rows = [row for rows_of_part in rows_of_parts.values() for row in rows_of_part]
    assert all(row["values"]["last_loss"] > 0 and not row["missed"] for row in rank_rows)


@rehearsed
def test_the_parts_of_a_split_backward_are_timed(proved):
    for row in rows(proved, "split_cost"):
        assert all(value > 0 for value in row["values"].values())


@rehearsed
def test_the_passes_of_the_head_are_counted_timed_and_precise(proved):
    one, two, times, errors = (row["values"] for row in rows(proved, "head_passes"))
    for phase, eager, fused in (("S", 44, 4), ("T", 36, 4)):
        assert one[f"{phase}_eager_bytes_per_logit"] == pytest.approx(eager, abs=0.1)
        assert one[f"{phase}_one_pass_bytes_per_logit"] == pytest.approx(fused, abs=0.1)
    assert two["S_one_pass_bytes_per_logit"] < one["S_one_pass_bytes_per_logit"]
    assert all(value > 0 for value in times.values())
    assert errors["added_product_error"] < 1e-6


@rehearsed
def test_a_played_rank_is_timed_with_counting_and_without(proved):
    for row in rows(proved, "solo_rank"):
        assert row["values"]["step_seconds"] > 0
        assert row["values"]["step_seconds_counting"] > 0


@rehearsed
def test_a_wait_for_the_device_hangs_where_the_model_says_so(proved):
    hanging, others, shipped = (row["values"] for row in rows(proved, "waiting_hosts"))
    assert hanging["hangs"]
    assert others["steps_ended"] >= 4 and shipped["steps_ended"] >= 4


@rehearsed
def test_operations_are_told_apart_by_whether_they_wait(proved):
    assert {row["case"]: row["values"]["waits"] for row in rows(proved, "device_waits")} == {
        "synchronize()": True,
        "a kernel that is loaded": False,
    }


@rehearsed
def test_what_came_to_its_end_is_not_repeated(proved):
    again = prove(proved, "--only", "D")
    assert again.returncode == 0
    assert "done already" in again.stdout


@rehearsed
def test_rows_that_are_there_are_not_measured_again(proved, tmp_path):
    """What an earlier call has measured stays to the digit, and only the missing row is new."""
    data = json.loads((proved / "head_passes.json").read_text())
    kept = data["rows"][:3]
    (tmp_path / "head_passes.json").write_text(json.dumps(data | {"complete": False, "rows": kept}))
    done = prove(tmp_path, "--only", "E")
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(tmp_path, "head_passes")[:3] == kept and len(rows(tmp_path, "head_passes")) == 4
    assert done.stdout.count("done already") == 3


def test_rows_of_another_machine_are_measured_again(gpu, tmp_path):
    path = tmp_path / "rows.json"
    report = gpu.proof.Report(path, rehearsal=True)
    report.add("a", {"n": 1})
    assert gpu.proof.Report(path, rehearsal=True).has("a")
    path.write_text(path.read_text().replace("CPU", "another GPU"))
    assert not gpu.proof.Report(path, rehearsal=True).has("a")


def test_time_that_is_over_is_no_failure(tmp_path):
    """The experiment is stopped, and the status says that another call goes on."""
    done = prove(tmp_path, "--only", "D", "E", "--minutes", "0.01")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "stopped after" in done.stdout and not (tmp_path / "head_passes.json").exists()


def test_every_case_of_four_ranks_has_a_name_and_four_start_in_fresh_ranks(gpu):
    cases = gpu.four_ranks.cases("families", rehearse=False)
    assert len({*map(str, cases)}) == len(cases)
    fresh = [case.schedule for case in cases if case.fresh and not case.graph]
    assert sorted(fresh) == ["1f1b", "dualpipe", "gis", "v-half"]
    assert cases[0].schedule == "stock" and all(case.fresh for case in cases[1:5])


def test_one_connection_runs_the_usual_order_of_every_family(gpu):
    (setting,) = gpu.four_ranks.settings("usual-order", rehearse=False)
    rows_of_part = gpu.four_ranks.cases("usual-order", rehearse=False)
    names = {family.name for family in families() if not (family.offloads or family.slices > 1 or family.asynchronous)}
    assert (
        setting.connections == 1
        and setting.usual_order
        and {case.schedule for case in rows_of_part} == {"stock", *names}
    )
    assert len({*map(str, rows_of_part)}) == len(rows_of_part) == len(names) + 3, (
        "v-half has two cases with a cut vocabulary"
    )


def test_a_call_that_goes_on_runs_stock_again_only_to_compare(gpu, tmp_path):
    case, setting = gpu.four_ranks.Case, gpu.four_ranks.Setting(1, bound=False)
    every = [case("stock"), case("1f1b"), case("zb-h1"), case("stock", pipelines=2), case("1f1b", pipelines=2)]
    report = gpu.proof.Report(tmp_path / "rows.json", rehearsal=True)
    for measured_case in (every[0], every[1], every[3], every[4]):
        report.add(f"{measured_case}, {setting}", {})
    assert gpu.four_ranks.missing(every, setting, report) == [every[0], every[2]]


@pytest.mark.parametrize(("name", "hanging"), [("v-half", 1), ("gpipe", 3)])
def test_the_places_that_must_hang_are_those_of_an_independent_play(gpu, name, hanging):
    program = gpu.waiting_hosts.program_of(name, early=True)
    computing = {
        (device, position)
        for device, actions in enumerate(program.actions)
        for position, action in enumerate(actions)
        if action.kind.value in ("F", "I", "W", "B")
    }
    model, unsafe = gpu.waiting_hosts.predict(program), gpu.host_oracle.unsafe(program) & computing
    assert {*model.hanging} == unsafe and len(unsafe) == hanging
    assert {*model.safe} == computing - unsafe
    shipped = gpu.waiting_hosts.program_of(name, early=False)
    assert gpu.waiting_hosts.predict(shipped).hanging == () and gpu.host_oracle.unsafe(shipped) == set()
