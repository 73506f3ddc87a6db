"""Schedules as text: actions, tables in every dialect, the line of settings, and what cannot be read."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import family_schedules, random_schedules
from refusals import refused

from megatron_pipemem.errors import PipememError, ScheduleError, ScheduleFormatError
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import ORDERED, WHOLE_STAGE, Action, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.csv_format import (
    LETTERS,
    MOST_CELLS,
    read_schedule_file,
    read_table,
    write_header,
    write_table,
)
from megatron_pipemem.schedule.lowering import lower, lower_paired
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Program, Schedule, WeightUpdates
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate

# Both files are what torch.distributed.pipelining wrote for two devices: before and since it renamed its letters.
OLDER_TORCH = """\
0F0,0F1,2F0,,2F1,2B0,2W0,2B1,2W1,0B0,0W0,0B1,0W1
,1F0,1F1,3F0,3B0,3F1,3B1,3W0,1B0,3W1,1B1,1W0,1W1
"""
CURRENT_TORCH = OLDER_TORCH.replace("B", "I")


# ------------------------------------------------------------------------------------------------------------- actions


@given(kind=st.sampled_from([*Kind]), stage=st.integers(0, 10**6), microbatch=st.integers(0, 10**6))
def test_actions_round_trip(kind, stage, microbatch):
    action = Action(kind, stage, None if kind in WHOLE_STAGE else microbatch)
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action}\t") == action


def test_names_of_earlier_versions():
    """Files that earlier versions wrote are read; what is written has today's names."""
    cells = {"0IF3": "0EMBED_F3", "1IB0": "1EMBED_B0", "2SUM_COPIES": "2REDUCE_REPLICAS"}
    assert {text: str(Action.parse(text)) for text in cells} == cells
    written = with_vocabulary(build_schedule("seq1f1b", num_devices=2, num_microbatches=3), 1, Costs()).to_csv()
    before = written.replace("EMBED_F", "IF").replace("EMBED_B", "IB").replace("# slices=", "# pieces=")
    assert before.startswith("# pieces=2") and Schedule.from_csv(before).to_csv() == written


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2", "2F", "2f0", "-1F0", "2F-1", "2X0", "2F0F1", "2F 0", "F2F0", "2.0F0", "2BW0", "2RECV_B0", "O F0"],
)
def test_malformed_actions(text):
    with refused("not-an-action", kind=ScheduleFormatError):
        Action.parse(text)


# ----------------------------------------------------------------------------------------------------------------- CSV


def same(read: Schedule, written: Schedule) -> bool:
    parts = [(s.orders, s.placement.devices, s.placement.replicas, s.num_microbatches) for s in (read, written)]
    more = [(s.units, s.updates, s.vocabulary_barriers, s.digest, s.to_csv()) for s in (read, written)]
    return parts[0] == parts[1] and more[0] == more[1]


@examples(200)
@given(random_schedules() | random_schedules(max_replicas=2, max_slices=3, ragged=True) | family_schedules())
def test_csv_round_trip(schedule):
    for original in (schedule, schedule.forward_only()):
        assert same(Schedule.from_csv(original.to_csv()), original)


@examples(100)
@given(schedule=random_schedules(), data=st.data())
def test_layout_of_the_file_does_not_matter(schedule, data):
    """Idle cells, blanks, blank lines, DOS line ends and a byte order mark change nothing."""
    blanks, lines, chance = ["", " ", "\t"], [], data.draw(st.randoms(use_true_random=True))
    for order in schedule.orders:
        cells = [chance.choice(blanks) + str(action) + chance.choice(blanks) for action in order]
        for _ in range(chance.randint(0, 3)):
            cells.insert(chance.randint(0, len(cells)), chance.choice(blanks))
        lines += [*chance.sample(["", " ", ",,"], chance.randint(0, 1)), ",".join(cells)]
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    text = data.draw(st.sampled_from(["", "\ufeff"])) + end.join(lines) + data.draw(st.sampled_from(["", end]))
    assert Schedule.from_csv(text).orders == schedule.orders
    if read_table(text, "torch").letters == "torch-new":
        assert Schedule.from_csv(text, dialect="torch").orders == schedule.orders


@given(
    st.text(alphabet="0123456789FIWB,\n\r ;()_-\u00e9SENDRCVOLAP", max_size=60), st.sampled_from(["pipemem", "torch"])
)
def test_any_text_is_read_or_refused(text, dialect):
    """Never another exception than ours, and whatever is read can be judged."""
    with suppress(PipememError):
        validate(Schedule.from_csv(text, dialect=dialect))


def test_unknown_dialect():
    with refused("unknown-dialect", "deepspeed", kind=ScheduleFormatError):
        Schedule.from_csv("0F0,0B0\n", dialect="deepspeed")


# ------------------------------------------------------------------------------------------------------------ dialects


@pytest.mark.parametrize(
    ("text", "older"),
    [
        (OLDER_TORCH, True),
        (CURRENT_TORCH, False),
        ("0F0,0BW0\n", True),  # the older full backward
        ("0F0,0B0\n", False),  # a full backward in both
        ("0F0,0I0,0W0,0F1,0B1\n", False),
        ("0F0, 0B0 ,0W0\n", True),
        ("0F0\n", False),
    ],
)
def test_which_torch_wrote_it(text, older):
    assert (read_table(text, "torch").letters == "torch-old") is older


def test_both_torch_generations_mean_the_same():
    older = Schedule.from_csv(OLDER_TORCH, dialect="torch")
    current = Schedule.from_csv(CURRENT_TORCH, dialect="torch")
    assert older == current == Schedule.from_csv(CURRENT_TORCH)
    validate(older)
    assert (older.num_devices, older.num_stages, older.num_microbatches) == (2, 4, 2)
    assert older.placement.name == "interleaved"


def test_older_torch_full_backward():
    schedule = Schedule.from_csv("0F0,0F1,0BW0,0B1,0W1\n", dialect="torch")
    assert schedule.to_csv() == "0F0,0F1,0B0,0I1,0W1\n"


def test_the_torch_dialect_is_never_assumed():
    """In our letters an older torch file has full backwards followed by weight gradients of nothing."""
    schedule = Schedule.from_csv(OLDER_TORCH)
    with refused("duplicate-action", "2W0", "2B0"):
        validate(schedule)


@pytest.mark.parametrize("older", [True, False])
def test_lowered_torch_files_lose_their_messages(older):
    letter = "B" if older else "I"
    text = (
        f"0UNSHARD,0F0,0SEND_F0,0RECV_B0,0{letter}0,0W0,0REDUCE_GRAD,0RESHARD\n"
        f"1UNSHARD,1RECV_F0,1F0,1{letter}0,1SEND_B0,1W0,1REDUCE_GRAD,1RESHARD\n"
    )
    schedule = Schedule.from_csv(text, dialect="torch")
    assert schedule.to_csv() == "0F0,0I0,0W0\n1F0,1I0,1W0\n"
    validate(schedule)


@pytest.mark.parametrize("dialect", ["torch", "pipemem"])
def test_pairs_are_kept_and_torchs_pairs_of_backwards_are_read_in_turn(dialect):
    text = "0F0,1F0,1I0,1W0,(0F1;0B0)OVERLAP_F_B,1F1,(1B1;0B1)OVERLAP_F_B\n"
    schedule = Schedule.from_csv(text, dialect=dialect)
    assert schedule.pairs == {Action(Kind.F, 0, 1)}
    assert schedule.to_csv() == text.replace("(1B1;0B1)OVERLAP_F_B", "1B1,0B1")
    validate(schedule)


@pytest.mark.parametrize(
    "cell", ["(0F1;0Q0)OVERLAP_F_B", "(0F1;)OVERLAP_F_B", "(0F1,0B0)OVERLAP_F_B", "0F1;0B0", "0SEND_Q0"]
)
def test_bad_torch_cells_are_placed(cell):
    with refused("not-an-action", 1, 3, kind=ScheduleFormatError):
        Schedule.from_csv(f"0F0,0B0,{cell}\n", dialect="torch")


# -------------------------------------------------------------------------------------------------------------- digest


@examples(50)
@given(schedule=random_schedules(), data=st.data())
def test_the_digest_tells_orders_apart(schedule, data):
    device = data.draw(st.integers(0, schedule.num_devices - 1))
    order = list(schedule.orders[device])
    order[:2] = order[1::-1]
    orders = (*schedule.orders[:device], tuple(order), *schedule.orders[device + 1 :])
    changed = Schedule(schedule.name, schedule.placement, schedule.num_microbatches, orders)
    assert (changed.digest == schedule.digest) is (changed.orders == schedule.orders)
    renamed = Schedule("other", schedule.placement, schedule.num_microbatches, schedule.orders)
    assert renamed.digest == schedule.digest


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
        replace(schedule, units=Units.equal(1, 2)),
    ]
    assert len({other.digest for other in (schedule, *others)}) == 4


CHANNEL = replace(Costs(), channel=Channel(ratio=0.3))


def variants(schedule: Schedule) -> list[Schedule]:
    derived = [schedule, schedule.forward_only()]
    if schedule.offloads or schedule.placement.replicas > 1 or not schedule.units.are_whole or schedule.updates:
        return derived
    kinds = (Kind.R, Kind.RS)
    derived += [with_recompute(schedule, dict.fromkeys(range(schedule.num_stages), kind)) for kind in kinds]
    derived += [with_vocabulary(schedule, barriers) for barriers in (1, 2)]
    return [*derived, plan_offload(schedule, CHANNEL).schedule]


@pytest.mark.parametrize("name", [family.name for family in families()])
def test_every_family(name: str) -> None:
    schedule = build_schedule(name, num_devices=2, num_microbatches=4)
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
def test_every_kind_of_action(letters: str) -> None:
    for kind in Kind:
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


@examples(200)
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


ROW = "0F0,0B0\n"
UNREADABLE = [
    # Text, line and column, code, and values that the message holds.
    ("0F0,0B0\n1F0,1X0\n", (2, 2), "not-an-action", "1X0"),
    ("0F0,,hello\n", (1, 3), "not-an-action", "hello"),
    ("0F0\r\n1F0,0B0\r\n", (2, 2), "bad-placement", 0, 1),
    ("0F0\n2F0\n", (2, 1), "bad-placement", 1),
    ("", (None, None), "no-actions"),
    (" , ,\n\n", (None, None), "no-actions"),
    ("0F0\u20281F0\n", (1, 1), "not-an-action", "0F0\\u20281F0"),
    ("0F0\x0c,1F0\x850B0\n", (1, 2), "not-an-action", "1F0\\x850B0"),
    (f"0F{'1' * 5000}\n", (1, 1), "not-an-action", 9),
    ("0F\u0663\n", (1, 1), "not-an-action"),
    ("# replica=2\n" + ROW, (1, None), "bad-header", "replica=2"),
    (ROW + "# slices=0\n", (2, None), "bad-header", "slices=0"),
    ("# vocabulary=1-2\n" + ROW, (1, None), "bad-header", "vocabulary=1-2"),
    ("# slices=2\n\n# replicas=2\n" + ROW, (3, None), "bad-header"),
    ("# update_every=2\n" + ROW, (1, None), "bad-header", "versions_kept"),
    ("# versions_kept=2 update_delay=1\n" + ROW, (1, None), "bad-header", "update_every"),
    ("# replicas=2 devices=0-1-1\n" + ROW, (1, None), "bad-header"),
    ("# replicas=2 devices=0-2-2-0\n" + ROW, (1, None), "bad-header", 0),
    ("# replicas=2\n" + ROW, (None, None), "bad-header", 1, 2),
    ("# devices=0-1\n0F0,0B0\n", (None, None), "bad-header", 1, 2),
    ("# devices=0-1 idle=1-1\n0F0\n", (1, None), "bad-header"),
    ("# idle=1\n0F0\n", (1, None), "bad-header"),
    (f"# slices={'3' * 5000}\n0F0\n", (1, None), "bad-header"),
    ("# slices=\u0663\n0F0\n", (1, None), "bad-header"),
]
IN_OUR_LETTERS = [
    ("0F0,0SEND_F0\n1F0\n", (1, 2), "not-computed", "0SEND_F0"),
    ("0F0,0BW0\n", (1, 2), "not-an-action", "0BW0"),
]
IN_TORCHS_LETTERS = [
    ("0SUM_COPIES\n", (None, None), "no-actions"),
    ("0F0,0B0\n1RESHARD\n", (None, None), "bad-placement", 1),
]


@pytest.mark.parametrize(
    ("dialects", "row"),
    [
        *((("pipemem", "auto", "torch-new"), row) for row in UNREADABLE),
        *((("pipemem",), row) for row in IN_OUR_LETTERS),
        *((("auto", "torch-new"), row) for row in IN_TORCHS_LETTERS),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_short_line_that_names_the_place(dialects, row):
    text, (line, column), code, *values = row
    for dialect in dialects:
        with refused(code, *values, kind=ScheduleFormatError) as raised:
            Schedule.from_csv(text, dialect=dialect)
        assert (raised.value.line, raised.value.column) == (line, column)
        start = "" if line is None else f"line {line}: " if column is None else f"line {line}, column {column}: "
        assert str(raised.value).startswith(start) and len(str(raised.value)) < 400 and "\n" not in str(raised.value)


@pytest.mark.parametrize("cell", ["0F0,", ",", "\n", "(0F0;0B0)OVERLAP_F_B\r", "(" + "0F0;" * 50])
def test_a_table_of_too_many_cells_is_refused_before_its_cells_are_made(cell: str) -> None:
    text = cell * MOST_CELLS
    tracemalloc.start()
    try:
        with refused("too-large", f"{MOST_CELLS:,}", kind=ScheduleFormatError):
            read_table(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_of_too_many_bytes_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    with refused("too-large", kind=ScheduleFormatError):
        read_schedule_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "# devices=0-999999999\n0F0,0B0",
        "# devices=0-1-999999999 idle=1\n0F0",
        "# slices=999999999\n0F0,0B0",
        "0F999999999",
        "0F999999999,0B999999999",
        "999999999F0",
    ],
)
def test_large_numbers_make_no_large_tables(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((ScheduleFormatError, ScheduleError)):
            validate(Schedule.from_csv(text))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
