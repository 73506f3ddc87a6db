"""``pipemem check``, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import check_refusal

from megatron_pipemem.schedule.action import Action
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule

# Plain, several chunks, replicas, slices, versions of weights, offload: all that a file can hold.
NAMES = ["1f1b", "v-half", "gems", "seq1f1b", "pipedream-2bw", "po-h"]


@pytest.fixture
def csv(tmp_path: Path):
    """Writes text into a CSV file and returns its path."""

    def write(text: str) -> Path:
        file = tmp_path / "schedule.csv"
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize("name", NAMES)
def test_check_accepts_what_it_writes(pipemem, pipemem_json, tmp_path, name):
    file = tmp_path / "schedule.csv"
    assert pipemem("check", name, "--write", file, "-p", 4, "-m", 8).exit_code == 0
    answer = pipemem_json("check", file)
    assert answer["valid"] is True
    assert (answer["devices"], answer["microbatches"]) == (4, 8)
    schedule = build_schedule(name, num_devices=4, num_microbatches=8)
    assert answer["placement"] == schedule.placement.name
    simulated = pipemem_json("simulate", name, "-p", 4, "-m", 8)
    assert answer["peak_activation"] == simulated["peak_activation"]
    assert answer.get("bubble_rate") == (None if simulated["asynchronous"] else simulated["bubble_rate"])


def test_brackets_in_a_files_name_are_no_markup(pipemem, tmp_path):
    file = tmp_path / "a[" / "b].csv"  # [/b] would end a style
    file.parent.mkdir()
    file.write_text("0F0,0B0\n")
    assert pipemem("check", file).stdout.startswith(f"{file} is valid.")


@pytest.mark.parametrize(
    ("text", "device", "position", "action"),
    [
        ("0F0,0B0\n1B0,1F0\n", 1, 0, "1B0"),  # backward before its forward
        ("0F0,0F0,0B0\n1F0,1B0\n", 0, 1, "0F0"),  # twice
        ("0F0,0I0\n1F0,1B0\n", 0, 1, "0I0"),  # no weight gradient
    ],
)
def test_check_names_device_position_and_action(pipemem, csv, text, device, position, action):
    file = csv(text)
    result = pipemem("check", file, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["valid"], answer["device"], answer["position"], answer["action"]) == (
        False,
        device,
        position,
        action,
    )
    shown = pipemem("check", file)
    assert shown.exit_code == 1 and shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    assert (
        line.startswith("error: ")
        and f"device {device}, action {action}: " in line
        and f"(line {device + 1}, cell {position + 1})" in line
    )


def test_gradients_in_another_order_than_stocks_are_valid_and_said_to_be_unfit_to_run(pipemem, pipemem_json, csv):
    assert pipemem_json("check", csv("0F0,0B0\n1F0,1B0\n"))["cannot_run"] is None
    file = csv("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n")
    answer = pipemem_json("check", file)
    assert answer["valid"] and answer["cannot_run"].startswith("device 0, action 0B0: comes after 0B1, but")
    assert answer["cannot_run"].endswith("(line 1, cell 4)")
    for arguments in (
        ("check", file),
        ("simulate", file),
        ("show", file),
        ("check", file, "--write", file.with_suffix(".txt")),
    ):
        result = pipemem(*arguments)
        assert result.exit_code == 0, result.output
        assert "note: " in result.stderr and "is valid, but cannot run here" in result.stderr


def test_check_finds_deadlocks(pipemem, csv):
    """Each device waits for the other: 0 wants microbatch 1 back before it sends 2, device 1 wants 2 first."""
    result = pipemem("check", csv("0F0,0F1,0B0,0B1,0F2,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"))
    assert result.exit_code == 1
    first, *circle = result.stderr.splitlines()
    check_refusal(first, "deadlock", "device 0 at 0B0", "device 1 at 1F2", "1B0 before 1F2")
    assert circle == [
        " ┌▶ device 0 is at 0B0 (line 1, cell 3) and waits for 1B0, which comes (line 2, cell 4) after 1F2, "
        "where device 1 is",
        " │  device 1 is at 1F2 (line 2, cell 3) and waits for 0F2, which comes (line 1, cell 5) after 0B0, "
        "where device 0 is",
        " └─ device 0 again: each device of this circle waits for the next one",
    ]
    answer = json.loads(pipemem("check", csv("0F0,0F1,0B0,0B1,0F2,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"), "--json").stdout)
    assert answer["cycle"] == [
        {"device": 0, "action": "0B0", "waits_for": "1B0", "of_device": 1},
        {"device": 1, "action": "1F2", "waits_for": "0F2", "of_device": 0},
    ]
    assert (answer["line"], answer["column"]) == (1, 3)


def test_check_judges_the_messages_of_a_lowered_file(pipemem, pipemem_json, tmp_path):
    file = tmp_path / "program.txt"
    assert pipemem("check", "zb-h1", "--write", file, "-p", 3, "-m", 4, "--to", "torch").exit_code == 0
    answer = pipemem_json("check", file)
    assert answer["messages"] == "16 in the file" and answer["dialect"] == "torch-new"
    text = file.read_text()
    file.write_text(text.replace("1RECV_F0,", "", 1))
    refused = pipemem("check", file)
    assert refused.exit_code == 1 and "its input does not reach this device without 1RECV_F0" in refused.stderr


def test_check_memory_cap(pipemem, tmp_path):
    file = tmp_path / "schedule.csv"
    pipemem("check", "1f1b", "--write", file, "-p", 4, "-m", 8)
    assert pipemem("check", file, "--memory-cap", 1).exit_code == 0
    refused = pipemem("check", file, "--memory-cap", 0.75)
    assert refused.exit_code == 1 and "device 0" in refused.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0B0\n1F0,1X0\n", ("not-an-action", "line 2, column 2", "'1X0'")),
        ("0F0,0B0\n1F0,9F0,1B0\n", ("bad-placement", "line 2, column 2", "9F0", "stage 9", "stage 2")),
        ("", ("no-actions",)),
    ],
)
def test_check_unreadable(refuses, csv, text, expected):
    file = csv(text)
    for command in ("check", "simulate"):
        said = refuses(command, file)
        check_refusal(said, *expected)
        assert said.startswith(f"error: {file}: ")


OLDER = "0F0,0F1,0B0,0W0,0B1,0W1\n1F0,1B0,1W0,1F1,1BW1\n"
OURS = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1B1\n"


def test_letters_are_detected_and_said(pipemem, pipemem_json, csv):
    for stated in ((), ("--dialect", "torch")):
        answer = pipemem_json("check", csv(OLDER), *stated)
        assert answer["dialect"] == "torch-old"
        assert answer["letters"].startswith("torch before 2.6") and "(detected: BW occurs)" in answer["letters"]
    assert pipemem_json("check", csv(OURS), "--dialect", "torch")["dialect"] == "torch-new"
    answer = pipemem_json("check", csv(OURS))
    assert answer["dialect"] == "pipemem" and "detected" in answer["letters"]
    simulated = pipemem("simulate", csv(OLDER))
    assert simulated.exit_code == 0
    assert simulated.stderr.startswith("note: ") and "torch before 2.6" in simulated.stderr


def test_letters_may_be_stated(pipemem_json, refuses, csv):
    assert "(stated)" in pipemem_json("check", csv(OLDER), "--dialect", "torch-old")["letters"]
    check_refusal(refuses("check", csv(OLDER), "--dialect", "pipemem"), "not-an-action", "'1BW1'", "torch before 2.6")
    check_refusal(
        refuses("check", csv("0F0,0B0,0W0\n"), "--dialect", "torch-new", code=1), "duplicate-action", "0W0", "0B0"
    )


@pytest.mark.parametrize("source", ["auto", "torch", "torch-old"])
def test_writes_older_torch_letters_and_back(pipemem, csv, tmp_path, source):
    ours, back = tmp_path / "ours.csv", tmp_path / "back.csv"
    assert pipemem("check", csv(OLDER), "--write", ours, "--dialect", source).exit_code == 0
    assert ours.read_text() == OURS
    assert pipemem("check", ours, "--write", back, "--to", "torch-old").exit_code == 0
    assert back.read_text() == OLDER


def test_overlapped_pairs_and_sharding_are_said(pipemem_json, csv):
    answer = pipemem_json("check", csv("0UNSHARD,0F0,1F0,1I0,1W0,(0F1;0B0)OVERLAP_F_B,1F1,(1B1;0B1)OVERLAP_F_B\n"))
    assert answer["ignored"] == "1 UNSHARD"
    assert (answer["pairs"], answer["overlapped_backwards"]) == (1, "1 pairs, each read as its two actions in turn")


def test_suffix_or_flag_says_whether_messages_are_written(pipemem_json, tmp_path):
    for suffix, flags, lowered in [
        ("csv", (), False),
        ("txt", (), True),
        ("csv", ("--lowered",), True),
        ("txt", ("--compute-only",), False),
    ]:
        target = tmp_path / f"schedule.{suffix}"
        assert (
            pipemem_json("check", "1f1b", "--write", target, "-p", 2, "-m", 2, *flags)["written"]["lowered"] is lowered
        )
        assert ("SEND_F" in target.read_text()) is lowered


@pytest.mark.parametrize("name", NAMES)
def test_writes_a_program(pipemem_json, tmp_path, name):
    target = tmp_path / "program.txt"
    written = pipemem_json("check", name, "--write", target, "-p", 4, "-m", 8)["written"]
    program = lower(build_schedule(name, num_devices=4, num_microbatches=8))
    lines = [line for line in target.read_text().splitlines() if not line.startswith("#")]
    read = tuple(tuple(map(Action.parse, line.split(","))) for line in lines)
    assert read == program.actions
    assert written["actions"] == sum(map(len, program.actions)) and written["output"] == str(target)
