"""What is written is read again: every kind of action, every family, every set of letters, and whatever else can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from megatron_pipemem.errors import PipememError, ScheduleFormatError
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import ORDERED, WHOLE_STAGE, Action, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.csv_format import LETTERS, read_table, write_header, write_table
from megatron_pipemem.schedule.lowering import lower, lower_paired
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Program, Schedule

CHANNEL = replace(Costs(), channel=Channel.of_ratio(0.3, Costs()))


def variants(schedule: Schedule) -> list[Schedule]:
    found = [schedule, schedule.forward_only()]
    if schedule.offloads or schedule.placement.replicas > 1 or schedule.slices > 1 or schedule.updates:
        return found
    kinds = (Kind.R, Kind.RS)
    found += [with_recompute(schedule, dict.fromkeys(range(schedule.num_stages), kind)) for kind in kinds]
    found += [with_vocabulary(schedule, barriers) for barriers in (1, 2)]
    return [*found, plan_offload(schedule, CHANNEL).schedule]


def same(read: Schedule, written: Schedule) -> bool:
    parts = [(s.orders, s.placement.devices, s.placement.replicas, s.num_microbatches) for s in (read, written)]
    more = [(s.slices, s.updates, s.vocabulary_barriers, s.digest, s.to_csv()) for s in (read, written)]
    return parts[0] == parts[1] and more[0] == more[1]


@pytest.mark.parametrize("name", [each.name for each in families()])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 1)])
def test_every_family(name: str, p: int, m: int) -> None:
    try:
        schedule = build_schedule(name, num_devices=p, num_microbatches=m)
    except PipememError:
        assert m == 1
        return
    for written in variants(schedule):
        assert same(Schedule.from_csv(written.to_csv()), written)
        for dialect in ("auto", "torch-new") if written.splits_backward else ("torch-new",):
            assert same(Schedule.from_csv(written.to_csv(), dialect=dialect), written)
        programs: list[tuple[str, Program]] = [("pipemem", lower(written))] if written.updates is None else []
        if not write_header(written.header(written.orders)):
            programs += [(letters, lower_paired(written)) for letters in ("torch-new", "torch-old")]
            for letters in ("torch-new", "torch-old"):
                assert read_table(write_table(written.orders, letters), letters).orders == written.orders
        for letters, program in programs:
            text = write_header(written.header(program.actions)) + write_table(program.actions, letters)
            table = read_table(text, letters)
            assert table.actions == program.actions and table.orders == written.orders
            assert table.placement().devices == written.placement.devices


@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_of_action(kind: Kind, letters: str) -> None:
    action = Action(kind, 12, None if kind in WHOLE_STAGE else 34)
    assert read_table(write_table([(action,)], letters), letters).actions == ((action,),)


KINDS = ["F", "I", "W", "B", "BW", "R", "RESHARD", "UNSHARD", *sorted(WHOLE_STAGE), "SEND_F", "S", "EMBED_B"]
HEADERS = [
    "",
    "# replicas=2\n",
    "# replicas=2 devices=0-1-1-0\n",
    "# devices=0-1 idle=0\n",
    "# vocabulary=1\n",
    "# slices=2\n",
]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Tables whose lines mostly belong to devices."""
    lines = []
    for device in range(draw(st.integers(1, 2))):
        cells = draw(
            st.lists(st.tuples(st.sampled_from([device, device, 3 - device]), st.sampled_from(KINDS)), max_size=4)
        )
        of_stage = (*WHOLE_STAGE, "RESHARD", "UNSHARD")
        lines.append([f"{stage}{kind}{'' if kind in of_stage else draw(st.integers(0, 2))}" for stage, kind in cells])
    return draw(st.sampled_from(HEADERS)) + "".join(",".join(line) + "\n" for line in lines)


@settings(max_examples=200, deadline=None)
@given(texts(), st.sampled_from(["torch", "torch-new", "auto"]))
def test_whatever_is_read_comes_back(text: str, dialect: str) -> None:
    try:
        read = Schedule.from_csv(text, dialect=dialect)
    except PipememError:
        return
    assert any(a.kind in ORDERED for order in read.orders for a in order)
    assert len(read.orders) == read.num_devices
    assert same(Schedule.from_csv(read.to_csv()), read)


def test_a_device_that_runs_nothing_has_no_line() -> None:
    """Two replicas of one stage each, of which one has no microbatch; torch's files may say that it reshards."""
    schedule = Schedule("csv", Placement.from_devices((0, 1), 2), 1, ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), ()))
    assert schedule.to_csv() == "# replicas=2 devices=0-1 idle=1\n0F0,0B0\n"
    for text in (
        schedule.to_csv(),
        "# replicas=2 devices=0-1\n0F0,0B0\n1RESHARD\n",
        "# replicas=2\n0F0,0B0\n1SUM_COPIES\n",
    ):
        assert same(Schedule.from_csv(text, dialect="auto"), schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0SUM_COPIES\n", ("no-actions",)),
        ("0RESHARD\n", ("no-actions",)),
        ("0F0,0B0\n1RESHARD\n", ("bad-placement", 1)),
        ("# devices=0-1\n0F0,0B0\n", ("bad-header", 1, 2)),
        ("# devices=0-1 idle=1-1\n0F0\n", ("bad-header",)),
        ("# idle=1\n0F0\n", ("bad-header",)),
        ("0F0\u20281F0\n", ("not-an-action", 1, "0F0\\u20281F0")),
        ("0F0\x0c,1F0\x850B0\n", ("not-an-action", 1, 2, "1F0\\x850B0")),
        (f"0F{'1' * 5000}\n", ("not-an-action", 1, 9)),
        (f"0F0\n{'2' * 5000}B0\n", ("not-an-action", 2, 1, 9)),
        (f"# slices={'3' * 5000}\n0F0\n", ("bad-header", 1)),
        ("0F\u0663\n", ("not-an-action",)),
        ("# slices=\u0663\n0F0\n", ("bad-header",)),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_short_line(text: str, message: str) -> None:
    for dialect in ("auto", "torch-new"):
        with refused(*message, kind=ScheduleFormatError) as raised:
            Schedule.from_csv(text, dialect=dialect)
        assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)
