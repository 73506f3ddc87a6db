"""What the quickstart concludes from its runs. The runs themselves are those of tests/end_to_end."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.py"


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["quickstart"]


def row(schedule: str, engine: str = "pipemem", losses=(4.5, 3.25), peak: int = 800) -> dict:
    return {
        "schedule": schedule,
        "engine": engine,
        "losses": list(losses),
        "predicted_peak_bytes": [None] * 4 if engine == "stock" else [peak, 1, 1, 1],
        "counted_peak_bytes": [peak, 1, 1, 1],
        "predicted_weight_bytes": [10_000_000] * 4,
        "counted_weight_bytes": [10_000_000] * 4,
        "seconds": 1.5,
    }


def printed(quickstart, rows: list[dict]) -> str:
    text = io.StringIO()
    Console(file=text, width=100).print(quickstart.table(rows))
    return text.getvalue()


@pytest.mark.parametrize("losses", [(4.5,), (4.5, 3.25, 3.0), (), (4.5, math.nan)])
def test_missing_extra_and_undefined_losses_are_not_identical(quickstart, losses):
    rows = quickstart.compare([row("1f1b", "stock"), row("v-half", losses=losses)])
    assert rows[1]["bit_identical_to_stock"] is False


def test_asynchronous_rows_are_compared_with_their_emulator(quickstart):
    late = row("pipedream", losses=(4.5, 3.5))
    rows = [row("1f1b", "stock"), late | {"emulator_losses": [4.5, 3.5]}, late | {"emulator_losses": [4.5, 3.25]}]
    _, right, wrong = quickstart.compare(rows)
    assert right["bit_identical_to_stock"] is False and wrong["bit_identical_to_stock"] is False
    assert (right["compared_with"], right["identical"]) == ("emulator", True)
    assert (wrong["compared_with"], wrong["identical"]) == ("emulator", False)
    text = printed(quickstart, [rows[0] | {"compared_with": "stock", "identical": True}, right])
    assert "emulator" in text.split("pipedream")[1] and "NO" not in text


@pytest.mark.parametrize(
    ("schedule", "loss", "mark"),
    [
        ("gems", 0, "~"),  # no luck of one processor's rounding is promised
        ("gems", 2e-6, "~"),
        ("gems", 1e-5, "NO"),
        ("zbv", 0, "yes"),
        ("zbv", 2e-6, "NO"),
        ("pipedream", 0, "NO"),
    ],
)
def test_the_mark_of_a_row_is_the_same_on_every_processor(quickstart, schedule, loss, mark):
    emulated = {"emulator_losses": [4.5, 3.5]} if schedule == "pipedream" else {}
    rows = quickstart.compare([row("1f1b", "stock"), row(schedule, losses=(4.5, 3.25 + loss)) | emulated])
    assert quickstart.is_right(rows[1], rows[0]) is (mark != "NO")
    (line,) = (line.split() for line in printed(quickstart, rows).splitlines() if line.strip().startswith(schedule))
    assert line[3] == mark


def test_log_lines_of_megatron_are_understood(quickstart):
    line = (
        " [2026-01-01 10:00:00.000000] iteration       10/      10 | consumed samples:           80 | elapsed time per "
        "iteration (ms): 431.6 | learning rate: 2.000000E-03 | global batch size:     8 | lm loss: 3.240771E+00 | "
    )
    assert quickstart.LOGGED.search(line).groups() == ("10", "431.6", "3.240771E+00")
    assert quickstart.LOGGED.search("validation loss at iteration 10 | lm loss value: 3.1E+00 |") is None


@pytest.mark.parametrize("verbose", [False, True])
def test_a_verbose_log_has_the_warnings_of_imports(quickstart, monkeypatch, tmp_path, verbose):
    """Which forked ranks have made already."""
    started = []

    def start_ranks(target, arguments, logs, forked):
        started.append((arguments[0][3], forked))
        return []

    monkeypatch.setattr(quickstart, "start_ranks", start_ranks)
    quickstart.launch([], tmp_path / "run.log", print, verbose=verbose)
    assert started == [(verbose, not verbose)]


def test_a_failing_run_raises_with_the_end_and_the_path_of_its_log(quickstart, monkeypatch, tmp_path):
    (tmp_path / "pretrain_gpt.py").write_text("for i in range(40): print('line', i)\nraise SystemExit('the reason')\n")
    monkeypatch.setattr(quickstart, "SCRIPTS", tmp_path)
    monkeypatch.setattr(quickstart, "DEVICES", 1)
    log, seen = tmp_path / "logs" / "run.log", []
    with pytest.raises(quickstart.RunFailed) as caught:
        quickstart.launch([], log, seen.append)
    message = str(caught.value)
    assert "the reason" in message and "exit code 1" in message and str(log) in message
    assert "line 1\n" not in message
    assert seen == log.read_text().splitlines() and {"line 1", "the reason"} <= set(seen)


@pytest.mark.parametrize(
    ("arguments", "reason"), [(["--only", "v-hal"], "v-hal"), (["--iterations", "0"], "--iterations")]
)
def test_bad_options_end_before_anything_runs(quickstart, monkeypatch, capsys, tmp_path, arguments, reason):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *arguments, "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        quickstart.main()
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_text_it_ends_with_a_sentence(quickstart, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(quickstart.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--output", str(tmp_path / "out")])
    assert quickstart.main() == 1
    assert "is not a folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "losses", "code"),
    [(None, (4.5, 3.25), 0), (None, (4.5, 3.5), 1), ("pipemem-zbv", (4.5, 3.25), 1), ("stock-1f1b", (4.5, 3.25), 1)],
)
def test_the_exit_code_and_the_kept_results(quickstart, monkeypatch, capsys, tmp_path, broken, losses, code):
    def train(run, flags, output, on_line, verbose):
        assert not verbose
        if run.name == broken:
            raise quickstart.RunFailed("[/red] the reason")
        return row(run.schedule, run.engine, losses if run.schedule == "v-half" else (4.5, 3.25))

    monkeypatch.setattr(quickstart, "prepare_text", lambda folder: [])
    monkeypatch.setattr(quickstart, "launch", lambda *arguments: None)
    monkeypatch.setattr(quickstart, "train", train)
    if code:  # the picture is drawn from the plans alone, and thus the same in all cases
        monkeypatch.setattr(quickstart, "save_comparison", lambda timelines, file: file.write_text(str(timelines)))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--only", "zbv", "v-half", "--output", str(tmp_path)])
    assert quickstart.main() == code
    text = capsys.readouterr().out
    ran = {f"{row['engine']}-{row['schedule']}" for row in json.loads((tmp_path / "summary.json").read_text())}
    assert ran == {"stock-1f1b", "stock-interleaved", "pipemem-zbv", "pipemem-v-half"} - {broken}
    assert ("[/red] the reason" in text) == (broken is not None)
    assert ("not the losses of stock: v-half" in text) == (losses != (4.5, 3.25))
    assert (tmp_path / "comparison.png").stat().st_size > 0
