"""``pipemem explain`` and ``pipemem trace``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measured_steps import as_measured, report
from refusals import check_refusal

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule

PIPELINE = ("pp=4", "dp=2")


@pytest.fixture
def run(tmp_path):
    """``run(key=value)``: the folder of a run whose last step is like this."""

    def write(**changes):
        (tmp_path / "report.json").write_text(json.dumps(report(**changes)))
        return tmp_path

    return write


def test_what_costs_most_comes_first(pipemem, run):
    told = pipemem("explain", run())
    assert told.exit_code == 0, told.stderr
    lines = told.stdout.splitlines()
    assert "570 ms" in lines[0] and lines[0].endswith(f" {1 - 480 / 570:.1%}"), "stage 3 works 480 ms"
    assert "uneven stages, " in lines[1] and "Stage 3 takes 1.60 times as long as the mean" in lines[1]
    assert "pipemem layout" in lines[1], "each cause has its remedy"
    assert lines[3].startswith("outside the pipeline, a step takes 100 ms more")
    assert told.stdout == pipemem("explain", run() / "report.json").stdout


def test_a_cause_that_is_equal_on_all_ranks_has_no_column(pipemem, run):
    step = as_measured(build_schedule("1f1b", num_devices=4, num_microbatches=8), Costs(0.01, 0.01, 0.01))
    told = pipemem("explain", run(spans=[" ".join(f"{start}-{end}" for start, end in spans) for spans in step.spans]))
    heading = next(line for line in told.stdout.splitlines() if line.startswith(" rank "))
    assert heading.split() == ["rank", "computes", "idles"]
    assert "on every rank, warm-up and drain 90" in told.stdout, "(p - 1) (F + B)"


def test_with_the_run_it_advises_at_the_measured_times(pipemem, pipemem_json, refuses, run):
    """``explain REPORT RUN`` is ``advise RUN --costs REPORT``."""
    of_llama = run(layers=[8] * 4)
    answer = pipemem_json("explain", of_llama, "configs/runs/llama3-8b-8xh100.yaml", *PIPELINE)
    alone = pipemem_json("advise", "configs/runs/llama3-8b-8xh100.yaml", *PIPELINE, "--costs", of_llama / "report.json")
    assert answer["advice"] == alone and answer["peak"] == answer["bytes_of_1f1b"] == 4 << 20
    told = pipemem("explain", of_llama, "configs/runs/llama3-8b-8xh100.yaml", *PIPELINE)
    assert "other schedule" in told.stdout, "the report is of 1f1b, and the run has v-half"
    assert "by measured prices" in told.stdout and told.stdout.splitlines()[0] in pipemem("explain", of_llama).stdout
    same = pipemem("explain", of_llama, "configs/runs/llama3-8b-8xh100.yaml", *PIPELINE, "schedule=1f1b")
    assert "averaged" in same.stdout, "stage 3, which takes 1.6 times as long, is averaged away"
    assert "averaged" not in told.stdout
    wrong = refuses("explain", of_llama, "configs/runs/llama3-8b-8xh100.yaml", *PIPELINE, "pp=2")
    check_refusal(wrong, "other-model", "pipeline ranks")
    other = refuses("explain", run(layers=[2] * 4), "configs/runs/llama3-8b-8xh100.yaml", *PIPELINE)
    check_refusal(other, "other-model", "8 layers", "32")


def test_json_says_the_same_and_adds_up(pipemem_json, run):
    facts = pipemem_json("explain", run())
    assert facts["seconds"] == pytest.approx(0.57)
    assert facts["bubble_rate"] == pytest.approx(1 - 480 / 570), "of the same step as in the text"
    for rank in facts["idle"]:
        assert rank["work_ns"] + rank["idle_ns"] == round(facts["seconds"] * 1e9)
        assert sum(rank["causes_ns"].values()) == rank["idle_ns"]


def test_a_step_of_slices_is_read_with_bytes_of_each(pipemem, pipemem_json, run):
    schedule = build_schedule("seq1f1b", num_devices=4, num_microbatches=8, slices=2)
    step = as_measured(schedule, Costs((0.01, 0.02) * 4, 0.01, 0.01))
    told = {
        "schedule": "seq1f1b",
        "orders": schedule.to_csv(),
        "spans": [" ".join(f"{start}-{end}" for start, end in spans) for spans in step.spans],
    }
    answer = pipemem_json("explain", run(**told, memory={"F": [3 << 20, 1 << 20] * 4, "B": [-3 << 20, -1 << 20] * 4}))
    assert answer["peak"] == 11 << 20, "slices 0 to 4 of the first rank"
    assert answer["stages"] == pytest.approx([0.05] * 4)
    wrong = pipemem("explain", run(**told, memory={"F": [1 << 20] * 4}))
    check_refusal(wrong.stderr, "wrong-file", "4 stages", "2 slices")


@pytest.mark.parametrize("told", [{"plans": []}, report() | {"last_step": None}])
def test_a_report_of_an_earlier_version_gets_one_sentence(refuses, tmp_path, told):
    (tmp_path / "report.json").write_text(json.dumps(told))
    check_refusal(refuses("explain", tmp_path), "wrong-file", "--pipemem-report")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spans": ["1-2"] * 4}, ("wrong-file", "[1, 1, 1, 1]", "[16, 16, 16, 16]")),
        ({"spans": 3}, ("wrong-file", "'int'")),
        ({"orders": "x"}, ("wrong-file", "line 1, column 1", "'x'")),
        ({"layers": [1]}, ("wrong-file", "layers", "4 stages")),
        ({"memory": {"F": ["much"] * 4}}, ("wrong-file",)),
        ({"memory": {"F": [1e300] * 4}}, ("wrong-file",)),
        ({"held": [[1] * 15] * 4, "peaks": [1] * 4}, ("wrong-file", "held", "4 devices")),
        ({"held": [[1] * 16] * 4}, ("wrong-file", "peaks")),
        ({"layers": [10**9] * 4}, ("wrong-file",)),
        ({"layers": [-1] * 4}, ("wrong-file",)),
        ({"report": {"plans": []}}, ("wrong-file",)),
        ({"report": {"bytes_of_1f1b": "many"}}, ("wrong-file",)),
    ],
)
def test_what_is_no_report_is_refused(refuses, tmp_path, changes, says):
    of_report = changes.pop("report", {})
    (tmp_path / "report.json").write_text(json.dumps(report(**changes) | of_report))
    check_refusal(refuses("explain", tmp_path), *says)


def test_plan_and_run_in_one_file_for_perfetto(pipemem, pipemem_json, run, tmp_path):
    written = pipemem("trace", run())
    assert written.stdout.strip() == str(tmp_path / "trace.json"), written.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(names) == 2 and "planned with the run's times" in names[0] and "as it ran" in names[1]
    ends = [max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == process) for process in (0, 1)]
    assert ends == pytest.approx([570_000, 570_000])
    facts = pipemem_json("trace", run(), "--output", tmp_path / "both.html")
    assert Path(facts["output"]).is_file() and facts["measured_seconds"] == pytest.approx(facts["planned_seconds"])
    page = (tmp_path / "both.html").read_text()
    assert page.count('peak 4 MiB (1 of 1F1B\'s)","facts"') == 2 and "0.75 of 1F1B" not in page
    counted = run(held=[[3 << 20] * 16] * 4, peaks=[3 << 20] * 4)
    assert pipemem("trace", counted, "--output", tmp_path / "both.html").exit_code == 0
    assert (tmp_path / "both.html").read_text().count('peak 3 MiB (0.75 of 1F1B\'s)","facts"') == 2
