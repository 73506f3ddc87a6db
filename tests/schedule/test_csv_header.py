"""The first line of a file, which says what a table of actions cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from refusals import refused

from megatron_pipemem.errors import ScheduleFormatError
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule, WeightUpdates

ROW = "0F0,0B0\n"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("1f1b", "0F0,0F1,0B0,0B1"),
        ("gems", "# replicas=2 devices=0-1-1-0"),
        ("seq1f1b", "# slices=2"),
        ("pipedream", "# update_every=1 versions_kept=2"),
        ("pipedream-2bw", "# update_every=2 versions_kept=2 update_delay=1"),
    ],
)
def test_only_what_needs_a_line_gets_one(name: str, line: str) -> None:
    schedule = build_schedule(name, num_devices=2, num_microbatches=2)
    text = schedule.to_csv()
    assert text.splitlines()[0] == line
    assert Schedule.from_csv(text, name=name) == schedule
    assert Schedule.from_csv("\ufeff" + text.replace("\n", "\r\n").replace(line, f" {line},,"), name=name) == schedule


def test_devices_may_be_left_to_the_cells() -> None:
    schedule = Schedule.from_csv("# replicas=2\n0F0,0B0,3F1,3B1\n1F0,1B0,2F1,2B1\n")
    assert schedule.placement == Placement.bidirectional(2)
    assert schedule.num_microbatches == 2


def test_the_hash_tells_what_the_actions_do_not() -> None:
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=2)
    others = [
        replace(schedule, updates=WeightUpdates(1, 2)),
        replace(schedule, updates=WeightUpdates(1, 2, 1)),
        replace(schedule, slices=2, num_microbatches=1),
    ]
    assert len({each.digest for each in (schedule, *others)}) == 4


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("# replica=2\n" + ROW, 1, ("bad-header", "replica=2")),
        (ROW + "# slices=0\n", 2, ("bad-header", "slices=0")),
        ("# slices=2-3\n" + ROW, 1, ("bad-header", "slices=2-3")),
        ("# slices\n" + ROW, 1, ("bad-header", "slices")),
        ("# made by me\n" + ROW, 1, ("bad-header", "made")),
        ("# slices=2\n\n# replicas=2\n" + ROW, 3, ("bad-header",)),
        ("# update_every=2\n" + ROW, 1, ("bad-header", "versions_kept")),
        ("# versions_kept=2 update_delay=1\n" + ROW, 1, ("bad-header", "update_every")),
        ("# replicas=2 devices=0-1-1\n" + ROW, 1, ("bad-header",)),
        ("# replicas=2 devices=0-2-2-0\n" + ROW, 1, ("bad-header", 0)),
        ("# replicas=2\n" + ROW, None, ("bad-header", 1, 2)),
    ],
)
def test_lines_that_cannot_be_read(text: str, line: int | None, message: str) -> None:
    with refused(*message, kind=ScheduleFormatError) as raised:
        Schedule.from_csv(text)
    assert raised.value.line == line


def test_earlier_versions_called_slices_pieces() -> None:
    schedule = build_schedule("seq1f1b", num_devices=2, num_microbatches=2)
    assert Schedule.from_csv(schedule.to_csv().replace("# slices=", "# pieces="), name="seq1f1b") == schedule
