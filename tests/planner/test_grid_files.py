"""Files of a grid that something else wrote, cut short or changed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from commands import pipemem
from refusals import refused

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.grid.store import Result, collect, read_result

TINY = Path(__file__).parents[2] / "configs" / "runs" / "tiny-cpu.yaml"
RANK = {
    "predicted_peak_bytes": 64,
    "counted_peak_bytes": 64,
    "predicted_bubble_rate": 0.25,
    "measured_bubble_rate": None,
}


def in_one_line(folder: Path) -> str:
    done = pipemem("report", folder)
    assert done.exit_code == 2 and done.stdout == "", done.output
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (None, "holds neither a grid nor the report of a run; give a folder"),
        ("{", "grid.json: line 1, column 2 is not JSON"),
        ("[]", "is not the index of a grid"),
        ('{"points": [3]}', "is not the index of a grid"),
        ('{"points": [{"settings": 3, "changes": {}}]}', "is not the index of a grid"),
    ],
)
def test_a_folder_that_holds_no_grid(tmp_path, index, says):
    if index is not None:
        (tmp_path / "grid.json").write_text(index)
    line = in_one_line(tmp_path)
    assert says in line and "Errno" not in line and str(tmp_path) in line


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"losses": 3}, "key losses: is 3"),
        ({"losses": [1e300]}, "key losses"),
        ({"index": "x"}, "key index: is 'x'"),
        ({"status": "ended"}, "key status: is 'ended'"),
        ({"settings": []}, "key settings"),
        ({"counted_peak_bytes": [1, 2]}, "key counted_peak_bytes"),
        ({"reason": []}, "key reason: is []"),
        ({"speed": 3}, "key speed: unknown key"),
        ({"losses": [1, 1e300]}, "key losses: is 1e+300; give a number of at most 1e+30"),
    ],
)
def test_results_that_nobody_wrote(tmp_path, changed, says):
    (tmp_path / "grid.json").write_text('{"points": [{"settings": {}, "changes": {}}]}')
    path = tmp_path / "points" / "000" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(asdict(Result(0, {}, "done")) | changed))
    line = in_one_line(tmp_path)
    assert says in line and "result.json" in line
    path.write_text("3")
    with refused("wrong-file", kind=ConfigError):
        read_result(path)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        ("", "line 1, column 1 is not JSON"),
        ('{"losses": []}', "lacks the key 'ranks'"),
        ('{"losses": [], "ranks": [{}]}', "lacks the key 'predicted_peak_bytes'"),
        ('{"losses": [], "ranks": 3}', "is not the report of a run"),
        (json.dumps({"losses": ["x"], "ranks": [RANK]}), "key losses: is 'x'; give a number"),
    ],
)
def test_a_run_that_left_no_whole_report_failed(tmp_path, report, says):
    run = load(TINY, Run, [f"output={tmp_path}"])
    (tmp_path / "report.json").write_text(report)
    result = collect(0, {}, run, tmp_path / "log.txt", 0)
    assert result.status == "failed" and says in result.reason and "report.json" in result.reason
    (tmp_path / "report.json").write_text(json.dumps({"losses": [3.0, None], "ranks": [RANK]}))
    assert collect(0, {}, run, tmp_path / "log.txt", 0).losses == (3.0, None)
