"""Programs end although hosts wait for their devices, or all launches share one queue: against a play of hosts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import host_oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import examples
from program_oracle import check as mistakes
from random_schedules import family_schedules, random_schedules
from refusals import refused

from megatron_pipemem.errors import PipememError, ScheduleError
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.recompute.orders import with_recompute
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule import validator
from megatron_pipemem.schedule.action import MEMORY, MESSAGES, ORDERED, RECEIVES, SENDS, Action, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.dependencies import Dependencies, Graph, Waits
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.stream import Moment, family_window, steady
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.schedule.waits import LatestNeeds, run_single_queues
from megatron_pipemem.search import search_schedule

NAMES = [family.name for family in families()]


def fault(program: Program) -> ScheduleError | None:
    try:
        validate_program(program, microbatch_order=False)
    except ScheduleError as error:
        return error
    return None


def ahead(program: Program) -> Program:
    """Every receive one compute action ahead of its consumer, whatever its message depends on."""
    router_kinds = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_I, Kind.B: Kind.RECV_I}
    devices = program.placement.devices
    rows = []
    for actions in program.actions:
        receives = [a for a in actions if a.kind in RECEIVES]
        own = [a for a in actions if a.kind not in RECEIVES]
        computing = [at for at, a in enumerate(own) if a.kind in ORDERED]
        number = {
            Action(router_kinds[own[at].kind], *own[at][1:]): n
            for n, at in enumerate(computing)
            if own[at].kind in router_kinds
        }
        first: dict[int, int] = {}
        before: list[list[Action]] = [[] for _ in own]
        for receive in reversed(receives):
            source = devices[receive.stage + (-1 if receive.kind is Kind.RECV_F else 1)]
            first[source] = min(first.get(source, len(own)), number[receive])
            place = max(first[source] - 1, 0)
            while place and own[computing[place]].kind in MEMORY:
                place -= 1
            before[computing[place]].insert(0, receive)
        rows.append(tuple(action for at, a in enumerate(own) for action in (*before[at], a)))
    return Program(program.schedule, tuple(rows))


def test_hosts_that_all_wait_around_every_pass() -> None:
    """Megatron's timers of level 2 do that. Every family ends by the order for one queue, and few by the usual one."""
    timed, usual = (Kind.F, Kind.I, Kind.B), set()
    for name in NAMES:
        schedule = build_schedule(name, num_devices=4, num_microbatches=8, costs=Costs())
        queued = lower(schedule, single_queue=True)
        assert host_oracle.left_by_waiting(queued, timed) == host_oracle.left_by_waiting(queued, tuple(Kind)) == []
        if not host_oracle.left_by_waiting(lower(schedule), timed):
            usual.add(name)
    assert usual == {"gpipe", "1f1b-eager", "looped-bfs", "zb-h2", "gems"}


@pytest.mark.parametrize(
    ("name", "count"), [("v-half", 1), ("v-min", 4), ("1f1b-v", 2), ("hanayo", 3), ("gpipe", 3), ("looped-bfs", 3)]
)
def test_what_hosts_wait_for_otherwise(name: str, count: int) -> None:
    """As many compute actions before which a host must not wait where receives are posted one action ahead."""
    program = ahead(lower(build_schedule(name, num_devices=4, num_microbatches=8)))
    unsafe = host_oracle.unsafe(program)
    computing = {Kind.F, Kind.I, Kind.W, Kind.B}
    assert sum(program.actions[device][position].kind in computing for device, position in unsafe) == count
    error = fault(program)
    assert error is not None and (error.device, error.position + 1) in unsafe
    validate_program(program, host_waits=False)


def test_passes_offload_recomputation_and_slices() -> None:
    costs = Costs(1, 1.5, 0.5, p2p=0.1)
    costs = replace(costs, channel=Channel(ratio=0.5))
    for name in ("zb-h1", "1f1b", "v-half", "hanayo"):
        schedule = build_schedule(name, num_devices=3, num_microbatches=4)
        derived = [with_vocabulary(schedule, barriers, costs) for barriers in (1, 2)]
        derived += [plan_offload(schedule, costs).schedule, with_recompute(schedule, {1: Kind.R, 2: Kind.RS})]
        if name in ("zb-h1", "v-half"):
            sliced = build_schedule(name, num_devices=3, num_microbatches=2, slices=2)
            derived += [sliced, with_vocabulary(sliced, 1, costs)]
        for other in derived:
            for single_queue in (False, True):
                program = lower(other, single_queue=single_queue, costs=costs)
                assert fault(program) is None and host_oracle.unsafe(program) == set()
            validate_program(program, single_queue=True)
            assert host_oracle.left_by_waiting(program, tuple(Kind)) == host_oracle.stuck(program, strict=True) == []


def test_sums_over_replicas_wait_for_what_others_need() -> None:
    """A sum that is posted as soon as its own gradients are complete holds up a host that the other replica needs."""
    program = lower(build_schedule("gems", num_devices=4, num_microbatches=8))
    rows = []
    for actions in program.actions:
        row = [a for a in actions if a.kind is not Kind.REDUCE_REPLICAS]
        for total in (a for a in actions if a.kind is Kind.REDUCE_REPLICAS):
            last = max(
                at for at, a in enumerate(row) if a.kind is Kind.REDUCE_REPLICAS or a[:2] == (Kind.B, total.stage)
            )
            row.insert(last + 1 + (row[last + 1].kind in SENDS), total)
        rows.append(tuple(row))
    early = Program(program.schedule, tuple(rows))
    assert early.actions != program.actions
    unsafe, error = host_oracle.unsafe(early), fault(early)
    assert error is not None and "REDUCE_REPLICAS" in str(error.action) and (error.device, error.position + 1) in unsafe
    validate_program(early, host_waits=False)


class Tally:
    """How many programs the rule took and refused."""

    taken = refused = skipped = 0

    def judge(self, program: Program) -> None:
        """The rule and the play agree, also on where."""
        try:
            validate_program(program, microbatch_order=False, host_waits=False)
        except ScheduleError:
            self.skipped += 1
            return
        unsafe, error = host_oracle.unsafe(program), fault(program)
        assert (error is None) == (not unsafe), (error, unsafe)
        if error is None:
            self.taken += 1
        else:
            self.refused += 1
            assert (error.device, error.position + 1) in unsafe


def mutant_of(program: Program, chance: random.Random) -> Program:
    """The program with some of its posts elsewhere on their devices."""
    rows = [list(actions) for actions in program.actions]
    for _ in range(chance.randint(1, 2)):
        row = chance.choice(rows)
        posts = [at for at, a in enumerate(row) if a.kind not in ORDERED and a.kind is not Kind.REDUCE_GRAD]
        if posts:
            at = chance.choice(posts)
            row.insert(max(0, at + chance.randint(-6, 6)), row.pop(at))
    return Program(program.schedule, tuple(map(tuple, rows)))


def judge_all(tally: Tally, schedule: Schedule, chance: random.Random) -> None:
    program = lower(schedule)
    assert fault(program) is None
    for judged in (program, ahead(program), *(mutant_of(program, chance) for _ in range(4))):
        tally.judge(judged)


def test_the_rule_and_the_play_agree() -> None:
    """On random orders, schedules of families, searched orders, and programs whose posts have been moved."""
    tally, chance = Tally(), random.Random(35)

    @settings(examples(240), deadline=None, derandomize=True, database=None)
    @given(
        random_schedules(max_microbatches=3, max_replicas=2, max_slices=2)
        | family_schedules(max_devices=4, max_microbatches=4)
    )
    def run(schedule: Schedule) -> None:
        judge_all(tally, schedule, chance)

    run()
    for cap in (0.4, 0.6, 1.0):
        for chunks in (1, 2):
            costs = Costs(1, chance.uniform(0.5, 2), chance.uniform(0.3, 1.5))
            asked = {"num_devices": 3, "num_microbatches": 4, "costs": costs, "max_chunks": chunks}
            try:
                result = search_schedule(**asked, memory_cap=cap, effort=0.05, seconds=600)
            except PipememError:
                continue
            for _ in range(4):
                judge_all(tally, result.schedule, chance)
    assert tally.taken > 250 and tally.refused > 75 and tally.taken + tally.refused >= 500


def test_collectives_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective is held up like a message. Elsewhere the queue that it shares with messages forbids that anyway."""
    monkeypatch.setattr(validator, "check_queues", lambda program, dependencies: None)
    tally, chance = Tally(), random.Random(1)
    for barriers in (1, 2):
        schedule = with_vocabulary(build_schedule("zbv", num_devices=3, num_microbatches=3), barriers, Costs())
        for _ in range(60):
            tally.judge(mutant_of(lower(schedule), chance))
    assert tally.taken > 20 and tally.refused > 10


def test_what_is_refused_is_named() -> None:
    orders = ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)))
    schedule = Schedule("two", Placement.linear(2), 1, orders)
    first, second = lower(schedule).actions
    early = Program(schedule, ((first[2], *first[:2], *first[3:]), second))
    error = fault(early)
    assert error is not None and (error.device, error.position, error.action) == (0, 0, "0RECV_I0")
    assert "0SEND_F0 at position 2" in str(error) and "post it after 0SEND_F0" in str(error)


# --------------------------------------------------------------------------------------------------- one hardware queue


UNEQUAL = Costs(1, 1.5, 0.5, p2p=0.1)


def proved(schedule: Schedule, costs: Costs) -> Program:
    program = lower(schedule, single_queue=True, costs=costs)
    validate_program(program, single_queue=True, microbatch_order=False)
    assert host_oracle.stuck(program, strict=True) == host_oracle.stuck(program) == []
    if not schedule.vocabulary_barriers:
        assert mistakes(program) == []
    return program


@pytest.mark.parametrize(
    ("name", "p", "m", "options"),
    [
        ("1f1b-v", 6, 17, {}),
        ("looped-bfs", 6, 18, {"chunks": 3}),
        ("gis", 4, 8, {}),
        ("gis-h", 2, 4, {"group_size": 4}),
        ("hanayo", 5, 6, {"chunks": 2}),
        ("interleaved", 4, 13, {"group_size": 8}),
    ],
)
def test_what_hangs_there_otherwise(name: str, p: int, m: int, options: dict[str, object]) -> None:
    """The families that benchmarks/notes/gpus.md names."""
    schedule = build_schedule(name, num_devices=p, num_microbatches=m, **options)
    assert host_oracle.stuck(lower(schedule))
    proved(schedule, Costs())


@examples(100)
@given(
    family_schedules() | random_schedules(max_replicas=2, max_slices=2),
    st.sampled_from([Costs(), UNEQUAL, Costs(0, 1, 0), Costs(1, 3, 0.2)]),
)
def test_any_schedule_gets_through_single_queues(schedule: Schedule, costs: Costs) -> None:
    program = proved(schedule, costs)
    assert run_single_queues(program, costs).makespan >= simulate(schedule, costs).makespan * (1 - 1e-9)
    proved(schedule.forward_only(), costs)


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h2", "zbv", "v-half"])
def test_messages_that_take_no_time_cost_none_in_one_queue(name: str) -> None:
    """A device waits for the next one, rather than computes, where that delays the step less."""
    schedule = build_schedule(name, num_devices=8, num_microbatches=16)
    queued = run_single_queues(lower(schedule, single_queue=True))
    assert queued.makespan == pytest.approx(simulate(schedule).makespan)


@pytest.mark.parametrize(
    ("name", "most"), [("zbv", 1.065), ("dualpipe-v", 1.08), ("dualpipe", 1.055), ("hanayo", 1.13)]
)
def test_messages_have_the_better_of_two_places(name: str, most: float) -> None:
    """The first three gain where the run that decides has messages without times, and the fourth where it has times."""
    costs = Costs(1, 1.5, 0.5, p2p=0.02)
    schedule = build_schedule(name, num_devices=8, num_microbatches=32, costs=costs)
    program = proved(schedule, costs)
    assert run_single_queues(program, costs).makespan <= most * simulate(schedule, costs).makespan


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_copy_takes_its_time_before_what_comes_after_it(name: str) -> None:
    costs = replace(UNEQUAL, channel=Channel(ratio=0.5))
    away = plan_offload(build_schedule(name, num_devices=3, num_microbatches=6), costs).schedule
    assert away.offloads
    program = proved(away, costs)
    assert run_single_queues(program, costs).makespan > run_single_queues(program, UNEQUAL).makespan


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_windows_of_asynchronous_schedules(name: str) -> None:
    """The same actions and weights, in an order for single queues, at the start of a stream, in its middle and at its end."""
    p, batch = 4, 5
    for moment in (Moment(0, 0, 1), Moment(1, 1, 1), steady(p, batch), replace(steady(p, batch), left=0)):
        usual, queued = (family_window(name, p, batch, moment, single_queue=single) for single in (False, True))
        assert host_oracle.unsafe(usual.program) == host_oracle.unsafe(queued.program) == set()
        assert host_oracle.left_by_waiting(queued.program, tuple(Kind)) == []
        assert host_oracle.stuck(queued.program, strict=True) == host_oracle.stuck(queued.program) == []
        for own, other in zip(queued.actions, usual.actions, strict=True):
            assert sorted(own) == sorted(other) and len(set(own)) == len(own)
            assert [a for a in own if a.kind in ORDERED] == [a for a in other if a.kind in ORDERED]
        assert queued.versions == usual.versions
        assert [sorted(past) for past in queued.past] == [sorted(past) for past in usual.past]
        assert len(queued.updates) == len(usual.updates)
        assert all(action.kind in ORDERED for action in queued.updates)


def test_the_time_that_it_takes() -> None:
    """Two devices, one message each way of 2 seconds, which occupies both."""
    schedule = Schedule(
        "two",
        Placement.linear(2),
        1,
        ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0))),
    )
    costs = Costs(1, 1, 1, p2p=2)
    run = run_single_queues(lower(schedule, single_queue=True, costs=costs), costs)
    assert run.spans == (
        ((0, 1), (1, 3), (6, 8), (8, 10), (10, 10)),
        ((1, 3), (3, 4), (4, 6), (6, 8), (8, 8)),
    )
    assert run.makespan == 10 and run.bubble_rate == pytest.approx(0.7)


def test_a_circle_is_named() -> None:
    """The usual lowering posts receives ahead: fine for queues per stream, a circle in one."""
    program = lower(build_schedule("1f1b", num_devices=2, num_microbatches=3))
    validate_program(program)
    with pytest.raises(ScheduleError) as caught:
        validate_program(program, single_queue=True)
    text = str(caught.value)
    assert "deadlock where every device has one queue: " in text and "lower the schedule for single queues" in text
    named = [
        action for actions in program.actions for action in actions if action.kind in MESSAGES and str(action) in text
    ]
    assert len(named) >= 2 and text.count("waits for") == 2
    assert caught.value.device in (0, 1) and program.actions[caught.value.device][caught.value.position] in named


# ---------------------------------------------------------------------------- one hardware queue that starts in order


def refuses_starts(program: Program) -> ScheduleError | None:
    try:
        validate_program(program, microbatch_order=False, ordered_starts=True)
    except ScheduleError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("p", "refused"),
    [
        (4, {"gis": "queue-order", "hanayo": "host-wait"}),
        (
            8,
            {
                **dict.fromkeys(("gis", "hanayo", "1f1b-v"), "queue-order"),
                **dict.fromkeys(("v-half", "v-min"), "host-wait"),
            },
        ),
    ],
)
def test_usual_orders_in_a_queue_that_starts_launches_in_order(p: int, refused: dict[str, str]) -> None:
    """The rule and the play agree for every family. ``v-half`` ends on 8 devices, but not if a host waits."""
    for name in NAMES:
        program = lower(build_schedule(name, num_devices=p, num_microbatches=2 * p, costs=Costs()))
        error, stuck = refuses_starts(program), host_oracle.stuck(program)
        assert (error and error.code) == refused.get(name)
        assert bool(stuck) == (refused.get(name) == "queue-order")
        if not stuck and (p == 4 or name in refused):
            assert bool(host_oracle.unsafe(program, one_queue=True)) == (name in refused)


def test_the_rule_of_starts_and_the_play_agree() -> None:
    """On random orders and programs whose posts have been moved: on whether they end, and on where a host may not wait."""
    chance, codes = random.Random(57), Counter[str | None]()

    def judge(schedule: Schedule, mutants: int) -> None:
        usual = lower(schedule)
        for program in (usual, ahead(usual), *(mutant_of(usual, chance) for _ in range(mutants))):
            if fault(program) is not None:
                continue
            error = refuses_starts(program)
            codes[error and error.code] += 1
            assert bool(host_oracle.stuck(program)) == (error is not None and error.code == "queue-order")
            if error is None or error.code == "host-wait":
                unsafe = host_oracle.unsafe(program, one_queue=True)
                assert bool(unsafe) == (error is not None)
                assert error is None or (error.device, error.position + 1) in unsafe

    @settings(examples(150), deadline=None, derandomize=True, database=None)
    @given(
        random_schedules(max_microbatches=3, max_replicas=2, max_slices=2)
        | family_schedules(max_devices=4, max_microbatches=4)
    )
    def run(schedule: Schedule) -> None:
        assert refuses_starts(lower(schedule, single_queue=True)) is None, "what ends in the strict model ends here"
        judge(schedule, mutants=3)

    run()
    for name in ("gis", "hanayo", "v-half"):
        judge(build_schedule(name, num_devices=4, num_microbatches=8), mutants=25)
    assert min(codes[None], codes["queue-order"], codes["host-wait"]) > 5, codes


def test_collectives_in_a_queue_that_starts_launches_in_order() -> None:
    chance, codes = random.Random(3), Counter[str | None]()
    for barriers in (1, 2):
        schedule = with_vocabulary(build_schedule("zbv", num_devices=3, num_microbatches=3), barriers, Costs())
        for program in (lower(schedule), *(mutant_of(lower(schedule), chance) for _ in range(40))):
            if fault(program) is None:
                error = refuses_starts(program)
                codes[error and error.code] += 1
                assert bool(host_oracle.stuck(program)) == (error is not None and error.code == "queue-order")
                if error is None:
                    assert host_oracle.unsafe(program, one_queue=True) == set()
    assert codes[None] > 5


def test_orders_that_wait_for_ever_are_told() -> None:
    orders = ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)))
    with refused("unmet-need", kind=ScheduleError):
        lower(Schedule("wrong", Placement.linear(2), 1, orders), single_queue=True)


@examples(60)
@given(
    random_schedules(max_replicas=2, max_slices=2) | family_schedules(max_devices=4, max_microbatches=5), st.randoms()
)
def test_the_latest_needs_are_those_of_the_closure(schedule: Schedule, chance: random.Random) -> None:
    """Bounded lookups in any order, those of every lane, and those of all lanes."""
    dependencies = Dependencies.of_schedule(schedule)
    graph, nodes = dependencies.graph, dependencies.walk.nodes
    needs: list[set[int]] = [set() for _ in graph.waits]
    for node in nodes:
        before = [node - 1] * (node not in {lane[0] for lane in graph.lanes if lane})
        for needed in (*before, *(needed for needed, _ in graph.waits[node])):
            needs[node] |= {needed} | needs[needed]
    latest_needs = LatestNeeds(graph, dependencies.walk.depths)
    for _ in range(30):
        lane = chance.choice([lane for lane in graph.lanes if lane])
        bound, node = chance.randrange(lane[0] - 1, lane[-1] + 1), chance.choice(nodes)
        if graph.lane_of[node] != graph.lane_of[lane[0]]:
            expected = max([bound, *needs[node].intersection(lane)])
            assert latest_needs.after(node, graph.lane_of[lane[0]], bound) == expected
    lane = chance.choice([lane for lane in graph.lanes if lane])
    for node, latest in zip(lane, latest_needs.everywhere(lane), strict=True):
        for other, others in enumerate(graph.lanes):
            if others != lane:
                assert latest.get(other, -1) == max(needs[node].intersection(others), default=-1)


@pytest.mark.parametrize("name", ["1f1b", "v-half", "gpipe"])
def test_lowering_and_proof_look_at_few_waits_per_action(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at those of every device."""
    looked = 0

    class Counted(list[Waits]):
        def __getitem__(self, node):
            nonlocal looked
            looked += 1
            return super().__getitem__(node)

    def count(self: LatestNeeds, graph: Graph, depths: list[int]) -> None:
        start(self, graph, depths)
        self._waits = Counted(graph.waits)

    start = LatestNeeds.__init__
    monkeypatch.setattr(LatestNeeds, "__init__", count)
    schedule = build_schedule(name, num_devices=32, num_microbatches=64)
    validate_program(lower(schedule))
    assert 0 < looked < 16 * sum(map(len, schedule.orders))
