"""``pipemem check`` and ``pipemem convert``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pipemem.schedule.action import Action
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule

NAMES = [family.name for family in families()]


@pytest.fixture
def csv(tmp_path: Path):
    """Writes text into a CSV file and returns its path."""

    def write(text: str) -> Path:
        file = tmp_path / "schedule.csv"
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize("name", NAMES)
def test_check_accepts_what_convert_writes(pipemem, pipemem_json, tmp_path, name):
    file = tmp_path / "schedule.csv"
    assert pipemem("convert", name, file, "-p", 4, "-m", 8).exit_code == 0
    found = pipemem_json("check", file)
    assert found["valid"] is True
    assert (found["devices"], found["microbatches"]) == (4, 8)
    schedule = build_schedule(name, num_devices=4, num_microbatches=8)
    assert found["placement"] == schedule.placement.name
    simulated = pipemem_json("simulate", name, "-p", 4, "-m", 8)
    assert found["peak_activation"] == simulated["peak_activation"]
    assert found["bubble_rate"] == simulated["bubble_rate"]


def test_check_for_people(pipemem, csv):
    shown = pipemem("check", csv("0F0,0B0\n1F0,1B0\n"))
    assert shown.exit_code == 0
    assert "is valid" in shown.stdout and "linear" in shown.stdout


@pytest.mark.parametrize(
    ("text", "device", "position", "action"),
    [
        ("0F0,0B0\n1B0,1F0\n", 1, 0, "1B0"),  # backward before its forward
        ("0F0,0F0,0B0\n1F0,1B0\n", 0, 1, "0F0"),  # twice
        ("0F0,0I0\n1F0,1B0\n", 0, 1, "0I0"),  # no weight gradient
        ("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n", 0, 3, "0B0"),  # gradients out of microbatch order
    ],
)
def test_check_names_device_position_and_action(pipemem, csv, text, device, position, action):
    file = csv(text)
    result = pipemem("check", file, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["valid"], found["device"], found["position"], found["action"]) == (False, device, position, action)
    shown = pipemem("check", file)
    assert shown.exit_code == 1 and shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    assert line.startswith("error: ") and f"device {device}, position {position}, action {action}" in line


def test_check_finds_deadlocks(pipemem, csv):
    """Each device waits for the other: 0 wants microbatch 1 back before it sends 2, device 1 wants 2 first."""
    result = pipemem("check", csv("0F0,0F1,0B0,0B1,0F2,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"))
    assert result.exit_code == 1 and "0B0" in result.stderr


def test_check_memory_cap(pipemem, tmp_path):
    file = tmp_path / "schedule.csv"
    pipemem("convert", "1f1b", file, "-p", 4, "-m", 8)
    assert pipemem("check", file, "--memory-cap", 1).exit_code == 0
    refused = pipemem("check", file, "--memory-cap", 0.75)
    assert refused.exit_code == 1 and "device 0" in refused.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0B0\n1F0,1X0\n", "line 2, column 2: '1X0' is not an action"),
        ("0F0,,0B0,oops\n", "line 1, column 4: 'oops' is not an action"),
        ("0F0,0B0\n0F1,0B1\n", "line 2, column 1: stage 0 is on device 1 here and on device 0 above"),
        ("0F0,0SEND_F0\n1F0\n", "line 1, column 2: 0SEND_F0 is not a compute action"),
        ("0F0,0B0\n2F0,2B0\n", "no device runs stage 1"),
        ("", "holds no actions"),
        ("\n , \n", "holds no actions"),
    ],
)
def test_check_unreadable(refuses, csv, text, expected):
    assert expected in refuses("check", csv(text))


def test_check_missing_and_binary_files(refuses, tmp_path):
    assert "No such file" in refuses("check", tmp_path / "none.csv")
    assert "cannot read" in refuses("check", tmp_path)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in refuses("check", binary)


OLDER = "0F0,0F1,0B0,0W0,0B1,0W1\n1F0,1B0,1W0,1F1,1BW1\n"
OURS = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1B1\n"


def test_torch_letters_are_guessed_and_said(pipemem_json, refuses, csv):
    assert "BW" in refuses("check", csv(OLDER))
    assert pipemem_json("check", csv(OLDER), "--dialect", "torch")["letters"].startswith("torch before 2.6 (guessed)")
    assert pipemem_json("check", csv(OURS), "--dialect", "torch")["letters"].startswith("torch (guessed)")
    assert pipemem_json("check", csv(OURS))["letters"] == "F, I, W, B"


def test_convert_older_torch_letters(pipemem, csv, tmp_path):
    target = tmp_path / "ours.csv"
    assert pipemem("convert", csv(OLDER), target, "--from", "torch").exit_code == 0
    assert target.read_text() == OURS


@pytest.mark.parametrize("name", NAMES)
def test_convert_to_a_program(pipemem_json, tmp_path, name):
    target = tmp_path / "program.txt"
    found = pipemem_json("convert", name, target, "-p", 4, "-m", 5)
    program = lower(build_schedule(name, num_devices=4, num_microbatches=5))
    read = tuple(tuple(map(Action.parse, line.split(","))) for line in target.read_text().splitlines())
    assert read == program.actions
    assert found["actions"] == sum(map(len, program.actions)) and found["output"] == str(target)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_torch_reads_what_convert_writes(pipemem, tmp_path, name):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    target = tmp_path / "program.txt"
    assert pipemem("convert", name, target, "-p", 4, "-m", 5, "--to", "torch").exit_code == 0
    assert "SEND_B" in target.read_text()
    for line in target.read_text().splitlines():
        for cell in line.split(","):
            assert str(schedules._Action.from_str(cell)) == cell


def test_converting_twice_changes_nothing(pipemem, tmp_path):
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    pipemem("convert", "v-min", first, "-p", 4, "-m", 8)
    assert pipemem("convert", first, second).exit_code == 0
    assert second.read_text() == first.read_text()
    schedule = Schedule.from_csv(second.read_text())
    assert schedule.orders == build_schedule("v-min", num_devices=4, num_microbatches=8).orders


def test_convert_refuses(refuses, csv, tmp_path):
    valid, target = csv("0F0,0B0\n"), tmp_path / "out.csv"
    assert ".csv or .txt" in refuses("convert", valid, tmp_path / "out.xml")
    assert "cannot write" in refuses("convert", valid, tmp_path / "no" / "such" / "out.csv")
    assert "did you mean" in refuses("convert", "v-hal", target, "-p", 2, "-m", 2)
    assert "action 0B0" in refuses("convert", csv("0B0,0F0\n"), target, code=1)
    assert not target.exists()
