"""Where schedules come from: families, files and searches, without any process group."""

from __future__ import annotations

import json

import pytest
from asked_programs import programs_of
from commands import pipemem
from refusals import refused

from megatron_pipemem.choose import searching
from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.choose.searching import ONE_BY_ONE
from megatron_pipemem.conflicts import check
from megatron_pipemem.errors import CostsError, ScheduleError, ScheduleFormatError, UnsupportedError
from megatron_pipemem.mcore import programs as run_programs
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.mcore.plugin import programs_for
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.request import Request
from megatron_pipemem.schedule import schedule_file
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.measured import costs_from
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families, family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.search import Candidate, SearchResult

QUICK = {"seconds": 0.3}


def auto(cap=None, costs="unit", **options):
    return programs_of("auto", cap, costs, QUICK | options)


@pytest.fixture
def file(tmp_path):
    def write(schedule="v-half", p=4, m=8):
        path = tmp_path / f"{schedule}.csv"
        path.write_text(build_schedule(schedule, num_devices=p, num_microbatches=m).to_csv())
        return str(path)

    return write


def test_a_file_is_run_as_it_stands(file):
    source = programs_of(file(), None, "unit", {})
    expected = build_schedule("v-half", num_devices=4, num_microbatches=8)
    plan = source.plan(Shape(4, 2, 8), "start")
    assert plan.schedule.orders == expected.orders and plan.schedule.placement == expected.placement
    assert (source.request.may_split, source.request.is_round_robin, source.request.chunks) == (True, False, 2)
    fused = programs_of(file("interleaved"), None, "unit", {})
    assert (fused.request.may_split, fused.request.is_round_robin, fused.request.chunks) == (False, True, 2)


def test_a_file_evaluates_any_number_of_microbatches_on_its_placement(file):
    source = programs_of(file(), None, "unit", {})
    for m in (1, 8, 13):
        forwards = source.plan(Shape(4, 2, m)._replace(forward_only=True), "").schedule
        validate(forwards)
        assert forwards.placement.name == "v"
        assert {a.kind for order in forwards.orders for a in order} == {Kind.F}
        assert sum(map(len, forwards.orders)) == 8 * m


def test_a_file_for_other_numbers_is_refused_with_the_way_out(file):
    source = programs_of(file(), None, "unit", {})
    with refused("other-size", 8, 12, "--global-batch-size", kind=UnsupportedError):
        source.plan(Shape(4, 2, 12), "start")
    with refused("other-size", "--pipeline-model-parallel-size", 4, kind=UnsupportedError):
        source.placement(8, 2)


def test_a_file_is_checked_before_anything_runs(file, tmp_path):
    with refused("over-cap", kind=ScheduleError):
        programs_of(file(), 0.5, "unit", {})
    with refused("no-file", "none.csv", kind=ScheduleFormatError):
        programs_of(str(tmp_path / "none.csv"), None, "unit", {})
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("0F0,0B0,0B0\n")
    with pytest.raises(ScheduleError):
        programs_of(str(wrong), None, "unit", {})
    wrong.write_text("0F0,what\n")
    with refused("not-an-action", 1, 2, kind=ScheduleFormatError):
        programs_of(str(wrong), None, "unit", {})
    with refused("options-of-file", "group_size", kind=UnsupportedError):
        programs_of(file(), None, "unit", {"group_size": 4})


@pytest.mark.parametrize(
    ("options", "chunks", "name"),
    [
        ({"placement": "v"}, 2, "v"),
        ({"placement": "v"}, 4, "wave"),
        ({"placement": "interleaved"}, 3, "interleaved"),
        ({"placement": "linear"}, 1, "linear"),
        ({}, 1, "linear"),
    ],
)
def test_the_placement_that_is_asked_for(options, chunks, name):
    source = auto(**options)
    placement = source.placement(4, chunks)
    assert (placement.name, placement.num_chunks) == (name, chunks)
    assert source.placement(4, None) == placement, "chosen once"


@pytest.mark.parametrize(("kind", "chunks"), [("v", 1), ("linear", 2), ("interleaved", 1)])
def test_a_placement_that_the_model_does_not_fit_is_refused(kind, chunks):
    with refused("needs-chunks", "--num-virtual-stages-per-pipeline-rank", kind=UnsupportedError):
        auto(placement=kind).placement(4, chunks)


def test_a_search_keeps_to_the_placement_and_the_cap():
    source = auto(0.6)
    assert source.placement(4, 2).name == "v", "the fastest within this cap"
    plan = source.plan(Shape(4, 2, 8), "start")
    validate(plan.schedule, memory_cap=0.6)
    assert plan.timeline.makespan <= simulate(build_schedule("v-min", num_devices=4, num_microbatches=8)).makespan
    assert plan.bound <= plan.timeline.makespan and plan.search_seconds >= 0
    other = source.plan(Shape(4, 2, 3), "step of 3 microbatches")
    assert other.schedule.num_microbatches == 3 and other.schedule.placement == plan.schedule.placement


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ((), {}),
        (("--vocab-cut", "2"), {"vocab_cut": "2"}),
        (("--offload", "auto"), {"offload": "auto", "offload_options": {"ratio": 1.0}}),
    ],
)
def test_a_run_and_the_command_line_find_the_same_order(flags, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run_programs, "microbatches_of_the_run", lambda: 4)
    file, cap = tmp_path / "auto.csv", "1.1" if "vocab_cut" in settings else "0.5"
    asked = ["simulate", "auto", "-p", "3", "-m", "4", "--memory-cap", cap, *flags, "--json"]
    told = pipemem(*asked)
    run = programs_of("auto", cap, **settings).plan(Shape(3, 2, 4), "start")
    assert json.loads(told.stdout)["makespan"] == run.timeline.makespan
    if not flags:
        assert pipemem("check", "auto", "--write", file, *asked[2:8]).exit_code == 0
        assert Schedule.from_csv(file.read_text()).orders == run.schedule.orders


def test_a_file_is_read_once(file, monkeypatch):
    read, path = [], file()
    original = schedule_file.read_schedule_file
    monkeypatch.setattr(schedule_file, "read_schedule_file", lambda path: read.append(path) or original(path))
    settings, others = take_flags(
        ["--pipemem-schedule", path, "--pipeline-model-parallel-size", "4", "--num-layers", "8"]
    )
    add_virtual_stages(settings, others)
    programs_for(settings).plan(Shape(4, 2, 8), "start")
    assert read == [path]


def test_a_cap_below_one_microbatch_names_the_least():
    with refused("cap-unreachable", "0.25", kind=UnsupportedError):
        auto(0.2).placement(4, 2)


# Device 0 has two stages of 100 bytes and device 1 two of 80; I gives a part back, and messages take 5 bytes for a while.
CHANGES = {
    Kind.F: (95, 75, 75, 95),
    Kind.RECV_F: (0, 5, 5, 5),
    Kind.I: (-25, -25, -25, -30),
    Kind.RECV_I: (5, 5, 5, 0),
    Kind.W: (-75, -60, -60, -70),
}


def test_bytes_that_no_schedule_keeps_are_refused_with_the_least():
    source = auto("150B")
    assert source.placement(2, 2).name == "v"
    source.set_measurements(None, CHANGES)
    # Both chunks of device 0 and the buffer of the second one's input.
    with refused("cap-unreachable", "150B", 0, "195B", kind=UnsupportedError):
        source.plan(Shape(2, 2, 6), "start")


def test_bytes_that_full_backwards_keep_are_not_refused():
    """I takes output gradients, which wait for W in a split backward."""
    taken, messages = {Kind.F: (100, 100), Kind.I: (30, 30)}, {Kind.RECV_F: (0, 5), Kind.RECV_I: (5, 0)}
    changes = {**taken, **messages, Kind.W: (-135, -135)}
    source = auto("105B", placement="linear")
    source.set_measurements(None, changes)
    plan = source.plan(Shape(2, 1, 6), "start")
    assert {action.kind for order in plan.schedule.orders for action in order} == {Kind.F, Kind.B}
    less = auto("104B", placement="linear")
    less.set_measurements(None, changes)
    # The next microbatch's input depends on the last one's backward, and is received when that has run.
    with refused("cap-unreachable", "105B", kind=UnsupportedError):
        less.plan(Shape(2, 1, 6), "start")


def test_bytes_of_a_costs_file_need_no_counting(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": 1, "memory": {"F": 200, "I": -50, "W": -150}}))
    source = auto("450B", str(path))
    assert not source.needs_bytes and source.knowledge.priced_by == "file"
    plan = source.plan(Shape(2, 2, 6), "start")
    assert plan.timeline.peak <= 450
    in_units = auto(0.75, str(path)).plan(Shape(2, 2, 6), "start")
    assert in_units.timeline.peak <= 0.75


@pytest.mark.parametrize(
    ("chunks", "settings"),
    [
        (2, {"schedule": "auto", "options": QUICK}),
        (1, {"schedule": "zb-auto", "memory_cap": 1.0}),
        (1, {"schedule": "zb-auto", "offload": "half", "offload_options": {"ratio": 0.5}}),
    ],
)
def test_a_schedule_that_is_hardly_better_does_not_replace_the_one_that_runs(chunks, settings):
    source, shape = programs_of(**settings), Shape(4, chunks, 8)
    before = source.plan(shape, "start")
    source.set_measurements(Costs(3.0, 1.0, 1.0), None)
    kept = source.plan(shape, "drift", before, minimum_gain=0.9)
    assert kept.schedule is before.schedule and kept.notes == before.notes and "drift" in kept.why
    assert kept.costs.forward == 3.0 and kept.priced_by == "measured"
    assert source.plan(shape, "drift", before, minimum_gain=-9.0).schedule is not before.schedule


@pytest.mark.parametrize("fails", [True, False])
def test_one_microbatch_at_a_time_is_said_to_be_the_last_resort(fails, monkeypatch, caplog):
    def search_schedule(**question):
        if fails:
            raise UnsupportedError("cap-unreachable", "nothing fits")
        before = build_schedule("gpipe", num_devices=2, num_microbatches=6)
        return SearchResult((Candidate(before, 1.0, (1.0, 1.0), 1.0, "gpipe"),), 1.0, 1.0, Costs())

    monkeypatch.setattr(searching, "search_schedule", search_schedule)
    source = auto("210B", placement="linear")
    source.set_measurements(None, {kind: sizes[:2] for kind, sizes in CHANGES.items()})
    plan = source.plan(Shape(2, 1, 6), "bytes counted")
    assert [action.microbatch for action in plan.schedule.orders[0]] == sorted([*range(6)] * 3)
    assert plan.notes == ONE_BY_ONE and ONE_BY_ONE in caplog.text
    assert ("nothing fits" if fails else "exceed") in caplog.text


def test_profile_starts_from_unit_costs_and_unknown_costs_are_refused():
    assert auto(costs="profile").knowledge.priced_by == "unit"
    with refused("no-file", "nowhere.json"):
        auto(costs="nowhere.json")


def test_a_search_may_split_and_knows_when_megatrons_own_placement_is_certain():
    assert all(auto(**options).request.may_split for options in ({}, {"placement": "linear"}))
    assert [
        auto(**o).request.is_round_robin
        for o in ({}, {"placement": "linear"}, {"placement": "interleaved"}, {"chunks": 1})
    ] == [*(False, True, True, True)]


def test_prices_of_parts_follow_the_layers_of_the_run(tmp_path):
    path = tmp_path / "parts.json"
    layer = {"seconds": {"forward": 1, "input": 1, "weight": 1}}
    path.write_text(
        json.dumps({"parts": {"order": ["l"] * 8, "layers": {"l": layer}, "first": {}, "middle": {}, "last": {}}})
    )
    source = programs_of("1f1b", None, str(path), {})
    shape = Shape(4, 1, 8)
    even = source.plan(shape, "start").timeline
    assert source.plan(Shape(2, 1, 8), "start").timeline.makespan == pytest.approx(9 * 4 * 3)
    source.set_layers((1, 3, 3, 1))
    assert even.makespan == pytest.approx(11 * 2 * 3)
    assert source.plan(shape, "start").timeline.makespan > 8 * 3 * 3
    with refused("costs-mismatch", 1, 3, 8, kind=CostsError):
        source.set_layers((1, 3))


def test_measured_seconds_replace_those_of_parts_and_their_bytes_stay(tmp_path):
    path = tmp_path / "parts.json"
    layer = {"seconds": {"forward": 1, "input": 1, "weight": 1}, "memory": {"F": 8, "W": -8}}
    path.write_text(
        json.dumps({"parts": {"order": ["l"] * 8, "layers": {"l": layer}, "first": {}, "middle": {}, "last": {}}})
    )
    source, placement = programs_of("1f1b", None, str(path), {}), Placement.linear(4)
    source.set_measurements(costs_from({(Kind.F, 0): 5.0}, {}, placement, source.costs), None)
    assert source.costs.seconds(placement)[Kind.F] == (5, 2, 2, 2)
    assert source.costs.memory_changes(placement)[Kind.F] == (16,) * 4


RUNNABLE = [family.name for family in families()]


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_family_says_how_many_chunks_it_wants_and_builds_for_them(name):
    source = ProgramStore(Request(name))
    plan = source.plan(Shape(4, source.request.chunks, 8), "start")
    placement = plan.schedule.placement
    assert placement == source.placement(4, source.request.chunks) == source.placement(4, None)
    assert placement.num_chunks == source.request.chunks * placement.replicas
    assert placement.replicas == family(name).replicas
    round_robin = all(device == stage % 4 for stage, device in enumerate(plan.schedule.placement.devices))
    assert source.request.is_round_robin == round_robin
    assert source.request.may_split == plan.schedule.splits_backward


@pytest.mark.parametrize(
    ("name", "options", "chunks"),
    [("hanayo", {}, 4), ("hanayo", {"waves": 1}, 2), ("gis", {"chunks": 3}, 3), ("looped-bfs", {}, 2)],
)
def test_options_decide_the_chunks(name, options, chunks):
    assert Request(name, options=options).chunks == chunks


def test_cap_and_costs_fit_the_order_and_measured_costs_fit_it_again():
    costs, measured = Costs(p2p=0.3), Costs((1.0, 1.0, 1.0, 2.0), 1.5, 0.5)
    source = ProgramStore(Request("zb-auto", 1.5), costs)

    def wanted(costs):
        return build_schedule("zb-auto", num_devices=4, num_microbatches=12, memory_cap=1.5, costs=costs)

    shape = Shape(4, 1, 12)
    assert source.plan(shape, "start").schedule == wanted(costs)
    source.set_measurements(measured, None)
    assert source.plan(shape, "measured").schedule == wanted(measured) != wanted(costs)


def test_cap_and_costs_are_no_options():
    with refused("has-own-flag", "zb-auto", kind=UnsupportedError):
        check(Request("zb-auto", options={"costs": 1}))
