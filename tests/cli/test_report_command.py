"""``pipemem report`` of one run."""

from __future__ import annotations

import json

import pytest
from refusals import check_refusal

PLAN = {
    "schedule": "v-half",
    "devices": 2,
    "chunks": 2,
    "microbatches": 4,
    "measured_makespan": 0.125,
}
RANK = {
    "rank": 0,
    "predicted_peak_bytes": 3 << 20,
    "counted_peak_bytes": 3 << 20,
    "predicted_bubble_rate": 0.1,
    "measured_bubble_rate": 0.2,
    "failure": None,
}
REPORT = {
    "steps": 3,
    "losses": [3.0, None, 1.5],
    "timelines": None,
    "bytes_of_1f1b": 4 << 20,
    "plans": [PLAN],
    "ranks": [RANK, RANK | {"rank": 1, "counted_peak_bytes": 1 << 20, "predicted_peak_bytes": 1 << 20}],
}


@pytest.fixture
def run(tmp_path):
    """``run(key=value)``: the folder of a run whose report says so."""

    def write(**changes):
        (tmp_path / "report.json").write_text(json.dumps(REPORT | changes))
        return tmp_path

    return write


def test_a_run_is_told_from_its_folder_and_from_its_report(pipemem, run, tmp_path):
    told = pipemem("report", run())
    assert told.exit_code == 0 and told.stdout == pipemem("report", tmp_path / "report.json").stdout
    assert told.stdout.splitlines()[:4] == [
        "v-half, 2 pipeline ranks with 2 chunks each, 4 microbatches: 3 steps measured",
        "peak activations 3 MiB on the fullest rank, predicted = counted on every rank; 0.75 of 1F1B's bytes",
        "bubble (idle share of the rank that idles least): 10.0% planned with the run's costs, 20.0% measured; a step takes "
        "0.125 s from its first pass to its last (medians of all steps but the first)",
        "loss 3 in the first step, 1.5 in the last of 3",
    ]
    assert ["1", "1", "1", "10.0%", "20.0%"] in [line.split() for line in told.stdout.splitlines()]


def test_the_costs_of_a_planned_bubble_are_named(pipemem, run):
    told = " ".join(pipemem("report", run(plans=[PLAN | {"priced_by": "unit"}])).stdout.split())
    assert "10.0% planned with F = I = W" in told


OVERLAP = {"steps_ahead": 2, "steps_taken_back": 1, "rollback_bytes": 3 << 20}
LAST = {"rank": 1, "rollback_bytes": 0, "waiting_gradient_bytes": 1 << 20}
FAILED = {"rank": 1, "counted_peak_bytes": 4 << 20, "failure": "no losses: TypeError: much"}
UNEVEN = {"predicted_least_peak_bytes": 2 << 20, "counted_peak_bytes": 5 << 19, "expert_load": 1.625}


@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        ([OVERLAP, OVERLAP | LAST], ["2 of 3 steps", "1 of them", "3 MiB of the device", "1 MiB of the device"]),
        ([{}, FAILED], ["rank 1 most: 3 MiB predicted, 4 counted", "rank 1: no losses: TypeError: much"]),
        ([UNEVEN], ["experts of rank 0 got 1.62 times", "2.5 MiB on the fullest rank", "2 to 3"]),
        ([UNEVEN | {"counted_peak_bytes": 4 << 20}], ["rank 0 most: 2 to 3 MiB predicted, 4 counted"]),
        ([{"predicted_peak_bytes": None}], ["nothing was predicted"]),
        ([dict.fromkeys(RANK) | {"rank": 0}], []),
    ],
)
def test_ranks_are_told_with_the_values_of_the_report(pipemem, run, ranks, values):
    is_measured = ranks[0].get("counted_peak_bytes", 1) is not None
    rest = {} if is_measured else {"plans": [], "losses": []}
    shown = pipemem("report", run(ranks=[RANK | rank for rank in ranks], **rest))
    assert shown.exit_code == 0 and [value for value in values if value not in shown.stdout] == []


def test_the_page_of_its_last_step_is_named(pipemem, run, tmp_path):
    page = tmp_path / "timelines" / "run.html"
    page.parent.mkdir()
    page.write_text("")
    assert str(page) in pipemem("report", run(timelines=str(page.parent))).stdout


def test_json_is_the_report(pipemem_json, run):
    assert pipemem_json("report", run()) == REPORT


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", ("not-json", "line 1, column 2")),
        ("[]", ("wrong-file", "list")),
        ("{}", ("wrong-file", "'plans'")),
        (json.dumps(REPORT | {"ranks": [{}]}), ("wrong-file",)),
        (json.dumps(REPORT | {"ranks": 3}), ("wrong-file",)),
        (json.dumps(REPORT | {"losses": ["x"]}), ("wrong-file",)),
        (json.dumps(REPORT | {"timelines": 3}), ("wrong-file",)),
    ],
)
def test_what_is_no_report_is_refused_in_a_line(refuses, tmp_path, content, says):
    (tmp_path / "report.json").write_text(content)
    check_refusal(refuses("report", tmp_path), *says)


def test_a_picture_of_one_run_is_refused(refuses, run, tmp_path):
    check_refusal(refuses("report", run(), "--output", tmp_path / "x.png"), "conflicting-options", tmp_path, "--output")
