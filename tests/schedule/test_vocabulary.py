"""Vocabulary passes, of whole sequences and of slices: what is in flight, what they cost, and that nothing hangs."""

from __future__ import annotations

import hashlib
import runpy
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import program_oracle
import pytest
from host_oracle import hangs
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples, rest_nightly
from mutants import is_accepted, mutants
from random_schedules import random_schedules
from refusals import refused
from step_oracle import play
from vocabulary_oracle import expected, present

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.features.slices.prices import slice_costs
from megatron_pipemem.features.vocabulary.choice import choose_vocabulary, head_on_last_stage, redistribute
from megatron_pipemem.features.vocabulary.orders import families_with_passes, with_vocabulary
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import COLLECTIVES, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, synchronous_schedules
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate, validate_program
from megatron_pipemem.schedule.vocabulary import VocabularyCosts

INTERLACED = Path(__file__).parents[2] / "benchmarks" / "emulated" / "interlaced.py"
NAMES = ["seq1f1b", "interleaved", "zb-h1", "zbv", "v-half"]


def seconds_of(costs: Costs, schedule: Schedule) -> dict[str, float]:
    of = {kind.value: prices[0] for kind, prices in costs.seconds(schedule.placement).items()}
    shards = costs.vocabulary.seconds(schedule.num_devices)
    return of | {kind.value: prices[0] for kind, prices in shards.items()}


def build(name: str, p: int, m: int, n: int) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m, slices=n)


def softmaxes(schedule: Schedule) -> int:
    """Most of them that are alive on a device."""
    held = [
        sum((a.kind is Kind.S) - (a.kind is Kind.T) for a in order[: position + 1])
        for order in schedule.orders
        for position in range(len(order))
    ]
    return max(held)


def check(schedule: Schedule) -> None:
    """All passes once, in an order that keeps to the slices', and nothing hangs, not even in one queue per device."""
    assert present(schedule) == expected(schedule)
    posts = [[a._replace(stage=0) for a in order if a.kind in COLLECTIVES] for order in schedule.orders]
    assert posts == posts[:1] * schedule.num_devices
    units, n = range(len(schedule.units)), schedule.units.parts
    backwards = [k * n + j for k in range(schedule.num_microbatches) for j in reversed(range(n))]
    for order in schedule.orders:
        ran = {
            kind: [a.microbatch for a in order if a.kind is kind]
            for kind in (Kind.EMBED_F, Kind.S, Kind.T, Kind.EMBED_B)
        }
        assert ran[Kind.EMBED_F] == ran[Kind.S] == list(units)
        assert ran[Kind.T] == ran[Kind.EMBED_B] == backwards
    validate(schedule)
    program = lower(schedule)
    validate_program(program)
    assert not hangs(program)
    assert not program_oracle.misreduced(program)


def makespan(schedule: Schedule, seconds: dict[str, float], p2p: float = 0.0, collective: float = 0.0) -> float:
    """As the oracle plays it. ``seconds`` are of a stage's or a shard's action."""
    return play(schedule, lambda event: seconds.get(event[0], collective), lambda unit: p2p, lambda unit: 1.0).makespan


# Of the digests of all orders below. Slices have not changed them.
UNSLICED = "69beed5c512795db"


def test_whole_sequences_run_in_the_orders_that_they_had_before_slices():
    digests = []
    for name, p in product(("1f1b", "interleaved", "zb-h1", "zbv", "v-half"), (2, 3, 4)):
        passes = VocabularyCosts(0.7, 1.1, 0.1, 0.2, 0.05, 0.03)
        for costs, m, barriers in product(
            (Costs(), Costs(1, 1.5, 0.5, 0.1, vocabulary=passes)), (1, 2 * p + 1), (1, 2)
        ):
            schedule = with_vocabulary(build_schedule(name, num_devices=p, num_microbatches=m), barriers, costs)
            digests.append(schedule.digest)
    assert hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16] == UNSLICED


@examples(60)
@given(
    name=st.sampled_from(NAMES),
    p=st.integers(2, 4),
    m=st.integers(1, 5),
    n=st.sampled_from([1, 2, 3]),
    barriers=st.sampled_from([1, 2]),
    prices=st.tuples(*[st.sampled_from([0.0, 0.3, 1.0, 2.5])] * 7),
    p2p=st.sampled_from([0.0, 0.1, 2.0]),
    collective=st.sampled_from([0.0, 0.05, 3.0]),
)
def test_any_schedule_and_costs(name, p, m, n, barriers, prices, p2p, collective):
    base = build(name, p, m, n)
    f, i, w, s, t, e, loss = prices
    costs = Costs(f + 0.1, i + 0.1, w, p2p=p2p, vocabulary=VocabularyCosts(s, t, e, e, loss, collective))
    schedule = with_vocabulary(base, barriers, costs)
    check(schedule)
    assert softmaxes(schedule) <= schedule.units.parts
    assert [[a for a in order if a.kind is Kind.F] for order in schedule.orders] == [
        [a for a in order if a.kind is Kind.F] for order in base.orders
    ]
    per_stage = {kind.value: prices[0] for kind, prices in costs.seconds(base.placement, base.units).items()}
    passes = {"S": s / n, "T": t / n, "EMBED_F": e / n, "EMBED_B": e / n, "LOSS": loss}
    timeline = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(makespan(schedule, per_stage | passes, p2p / n, collective / n))
    assert timeline.makespan >= m * (f + i + w + 0.2 + s + t + 2 * e) - 1e-9
    assert Schedule.from_csv(schedule.to_csv(), name=name) == schedule
    validate_program(lower(schedule.forward_only()))
    evaluation = with_vocabulary(base.forward_only(), barriers, costs)
    assert sum(a.kind is Kind.LOSS for order in evaluation.orders for a in order) == m
    validate_program(lower(evaluation))


@examples(40)
@given(schedule=random_schedules(max_microbatches=3, max_slices=3), barriers=st.sampled_from([1, 2]))
def test_any_order_whatever(schedule, barriers):
    p = schedule.num_devices
    if schedule.placement.devices[:p] != tuple(range(p)):
        with refused("unsupported-placement", kind=UnsupportedError):
            with_vocabulary(schedule, barriers)
        return
    check(cut := with_vocabulary(schedule, barriers))
    assert softmaxes(cut) <= cut.units.parts


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("p", rest_nightly(range(2, 9), [2, 3, 4], "test_any_schedule_and_costs, fewer devices"))
def test_a_slice_more_per_barrier_is_in_flight_and_the_bubble_shrinks(p, barriers):
    """What 1f1b and seq1f1b without a cut vocabulary promise, and one interval per barrier more."""
    head = 6.0
    sizes = [(m, 1) for m in sorted({1, p - 1, p, p + 1, 2 * p + 4})]
    for m, n in sizes + [(m, n) for m in (1, p, 2 * p + 1) for n in (2, 4) if p in (2, 3, 4, 6)]:
        embedding = 0.6 if n == 1 else 0.0
        costs = Costs(vocabulary=VocabularyCosts.of_head(head, p, barriers, embedding=embedding))
        schedule = with_vocabulary(build("seq1f1b", p, m, n), barriers, costs)
        check(schedule)
        assert softmaxes(schedule) <= n
        timeline = simulate(schedule, costs)
        assert [round(peak * p * n) for peak in timeline.peaks] == [
            min(m * n, p - r - 1 + n + barriers) for r in range(p)
        ]
        if n == 1:
            assert timeline.makespan == pytest.approx(makespan(schedule, seconds_of(costs, schedule)))
        beyond = timeline.makespan - m * (3 + (head + embedding) / p) - (p - 1) * 3 / n
        # The passes of slices that no other work hides, or of whole sequences the embedding's ends of a step: EMBED_F before
        # everything, EMBED_B after it, on idle devices. With one barrier a part of the input gradient is formed between two
        # actions: a short step can be 0.05 F longer.
        most = 2 * head / p / n if n > 1 else 2 * embedding / p + (0.05 if barriers == 1 else 0.0)
        assert beyond <= most + 1e-9, (m, n, beyond)


def test_slices_with_prices_of_their_own():
    """A later slice attends to more, and unequal slices have unequal heads."""
    base = build("seq1f1b", 3, 4, 4)
    whole = Costs(
        memory={Kind.F: 8.0, Kind.B: -8.0, Kind.S: 4.0, Kind.T: -4.0}, vocabulary=VocabularyCosts(2, 4, 1, 1, 0.5)
    )
    costs = slice_costs(whole, base.placement, (4, 2, 1, 1), 0.4, 0.2)
    for barriers in (1, 2):
        schedule = with_vocabulary(base, barriers, costs)
        check(schedule)
        assert softmaxes(schedule) <= schedule.units.parts
        timeline = simulate(schedule, costs)
        assert timeline.ideal == pytest.approx(4 * (3 + 8 + 0.5))
        assert min(timeline.peaks) > 4.0, "the logits of a microbatch are held"


@examples(80)
@given(data=st.data(), barriers=st.sampled_from([1, 2]), sizes=st.sampled_from([(2, 2, 2), (2, 3, 1), (3, 3, 1)]))
def test_mutants_are_caught_or_harmless(data, barriers, sizes):
    schedule = with_vocabulary(build("seq1f1b", *sizes), barriers)
    mutant = replace(schedule, orders=data.draw(mutants(schedule.orders)))
    if is_accepted(mutant):
        check(mutant)


def moved(schedule: Schedule, device: int, action: Action, to: int) -> Schedule:
    orders = [list(order) for order in schedule.orders]
    orders[device].remove(action)
    orders[device].insert(to, action)
    return replace(schedule, orders=tuple(map(tuple, orders)))


def test_what_slices_ask_of_passes():
    schedule = with_vocabulary(build("seq1f1b", 2, 1, 2), 2)
    order = schedule.orders[1]
    early = moved(schedule, 1, Action(Kind.LOSS, 1, 1), order.index(Action(Kind.STATS, 1, 1)))
    with refused("wrong-order", "1LOSS1", "1STATS1", kind=ScheduleError):
        validate(early)
    exchanged = [
        tuple(a._replace(microbatch=1 - a.microbatch) if a.kind is Kind.T else a for a in order)
        for order in schedule.orders
    ]
    with refused("wrong-order", kind=ScheduleError):
        validate(replace(schedule, orders=tuple(exchanged)))
    extra = replace(schedule, orders=(schedule.orders[0], (*order, Action(Kind.LOSS, 1, 0))))
    with refused("useless-action", kind=ScheduleError):
        validate(extra)


@pytest.mark.parametrize("barriers", [1, 2])
def test_all_devices_post_collectives_in_one_order(barriers):
    """Every exchange of two successive posts of one device. Some break a need as well, which is said first."""
    schedule = with_vocabulary(build_schedule("1f1b", num_devices=2, num_microbatches=3), barriers)
    validate(schedule)
    order = schedule.orders[1]
    out_of_order = 0
    for first, second in pairwise(at for at, action in enumerate(order) if action.kind in COLLECTIVES):
        row = list(order)
        row[first], row[second] = row[second], row[first]
        with pytest.raises(ScheduleError) as raised:
            validate(replace(schedule, orders=(schedule.orders[0], tuple(row))))
        if raised.value.code == "collective-order":
            assert (raised.value.device, raised.value.position, raised.value.action) == (1, first, str(order[second]))
            out_of_order += 1
    assert out_of_order > 1


def test_cutting_is_weighed_against_the_head_where_it_is():
    """Of slices as of whole microbatches."""
    base = build("seq1f1b", 4, 8, 4)
    small = choose_vocabulary(base, Costs(), 0.02, layers=16)
    large = choose_vocabulary(base, Costs(), 6.0, layers=16, layout=(4, 4, 4, 4))
    assert small.best == "off" and large.best in ("1", "2")
    off = large.steps["off"]
    assert off.ideal == pytest.approx(8 * (3 + 6)), "each slice has its part of the head"
    moved = large.steps["redistribute"]
    assert sum(moved.work) == pytest.approx(sum(off.work))


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_v_half_holds_two_half_stages_more_per_barrier(p, barriers):
    base = build_schedule("v-half", num_devices=p, num_microbatches=3 * p)
    schedule = with_vocabulary(base, barriers, Costs())
    least = p + 2 if p % 2 == 0 else p + 1
    assert max(simulate(schedule).peaks) * 2 * p == pytest.approx(least + 2 * barriers)
    # The reference's bubble is 7p/2 + 1 or 7p/2 + 4 chunks, before any head.
    free = Costs(vocabulary=VocabularyCosts())
    bubble = simulate(with_vocabulary(base, barriers, free), free).makespan - 9 * p
    assert bubble <= (7 * p / 2 + (1 if barriers == 1 else 4)) / 2 + 1e-9


def test_a_program_that_hangs_in_strict_queues_is_refused():
    schedule = with_vocabulary(build_schedule("1f1b", num_devices=2, num_microbatches=2), 1)
    program = lower(schedule)
    rows = [list(row) for row in program.actions]
    # Device 1 asks for the second microbatch before it posts the statistics that device 0 wants first.
    receive = Action(Kind.RECV_F, 1, 1)
    rows[1].remove(receive)
    rows[1].insert(0, receive)
    first = Action(Kind.RECV_F, 1, 0)
    rows[1].remove(first)
    rows[1].insert(0, first)
    mutant = Program(schedule, tuple(map(tuple, rows)))
    assert hangs(mutant)
    with refused("queue-order", kind=ScheduleError):
        validate_program(mutant)


def test_passes_need_the_switch_and_a_schedule_that_takes_them():
    schedule = with_vocabulary(build_schedule("1f1b", num_devices=2, num_microbatches=2), 1)
    with refused("useless-action", kind=ScheduleError):
        validate(replace(schedule, vocabulary_barriers=0))
    with refused("bad-choice", 1, 2, kind=ScheduleError):
        validate(replace(schedule, vocabulary_barriers=3))
    with refused("conflicting-features", kind=UnsupportedError):
        with_vocabulary(schedule, 1)
    with refused("bad-choice", 1, 2, kind=UnsupportedError):
        with_vocabulary(build_schedule("1f1b", num_devices=2, num_microbatches=2), 3)
    with refused("unsupported-placement", 2, kind=UnsupportedError):
        with_vocabulary(build_schedule("chimera", num_devices=2, num_microbatches=2), 1)
    assert schedule.digest != replace(schedule, vocabulary_barriers=2).digest


@pytest.mark.parametrize("kinds", [(Kind.R,), (Kind.OFFLOAD, Kind.WAIT_OFFLOAD, Kind.RELOAD, Kind.WAIT_RELOAD)])
def test_passes_leave_activations_where_they_are(kinds):
    """The stages at the ends of the pipeline cannot run again."""
    schedule = with_vocabulary(build_schedule("1f1b", num_devices=2, num_microbatches=2), 1)
    row = schedule.orders[0]
    backward = row.index(Action(Kind.B, 0, 0))
    added = tuple(Action(kind, 0, 0) for kind in kinds)
    moved = replace(schedule, orders=((*row[:backward], *added, *row[backward:]), schedule.orders[1]))
    with refused("conflicting-features", kind=ScheduleError):
        validate_program(lower(moved))


def test_bytes_of_passes_count_against_the_cap():
    costs = Costs(
        memory={Kind.F: 4.0, Kind.W: -2.0, Kind.I: -2.0, Kind.BCAST_X: 1.0, Kind.S: (10.0, 0.0), Kind.T: (-11.0, -1.0)}
    )
    schedule = with_vocabulary(build_schedule("1f1b", num_devices=2, num_microbatches=1), 2, costs)
    assert simulate(schedule, costs).peaks == (15.0, 5.0)
    validate(schedule, costs, 15.0)
    with refused("over-cap", kind=ScheduleError):
        validate(schedule, costs, 14.0)


def test_prices():
    assert VocabularyCosts.of_head(12.0, 4, 2) == VocabularyCosts(1.0, 2.0)
    assert VocabularyCosts.of_head(12.0, 4, 1).gradient == pytest.approx(1.0)
    default = Costs(2, 2, 2).vocabulary_costs(Placement.v_shape(3), 1)
    assert default.score + default.gradient == pytest.approx(2.0)
    for wrong in ({"score": -1}, {"gradient": "much"}, {"collectives": {Kind.F: 1.0}}):
        with pytest.raises(CostsError):
            VocabularyCosts(**wrong)
    with refused("costs-mismatch", kind=CostsError):
        VocabularyCosts(score=(1.0, 2.0)).seconds(3)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_interlaced_holds_half_as_much_again_as_1f1b(p):
    interlaced = runpy.run_path(str(INTERLACED))["interlaced"]
    for m in (1, p, 2 * p + 4):
        schedule = interlaced(p, m)
        validate_program(lower(schedule))
        check(schedule)
    assert round(simulate(schedule).peaks[0] * p) == (3 * p // 2 if p > 1 else 1)
    free = Costs(vocabulary=VocabularyCosts())
    assert simulate(schedule, free).makespan == pytest.approx(3 * (m + p - 1))


@given(
    layers=st.integers(0, 12),
    p=st.integers(1, 3),
    chunks=st.integers(1, 2),
    head=st.floats(0, 8),
)
def test_no_layout_has_a_faster_slowest_device(layers, p, chunks, head):
    placement = Placement.wave(p, chunks)
    layout = redistribute(layers, placement, head)
    assert sum(layout) == layers and min(layout) >= 0

    def slowest(held):
        extra = [head * (d == placement.devices[-1]) for d in range(p)]
        return max(map(sum, zip(held, extra, strict=True)))

    ours = slowest([sum(layout[stage] for stage in stages) for stages in placement.stages])
    splits = [(layers,)] if p == 1 else [(a, layers - a) for a in range(layers + 1)]
    if p == 3:
        splits = [(a, b, layers - a - b) for a in range(layers + 1) for b in range(layers + 1 - a)]
    assert ours <= min(map(slowest, splits)) + 1e-9


def test_head_on_the_last_stage():
    placement = Placement.linear(2)
    costs = head_on_last_stage(Costs(2, 2, 4), placement, 3.0, layers=(3, 1))
    assert (costs.forward, costs.backward_weight) == ((3.0, 2.0), (6.0, 3.0))
    with refused("costs-mismatch", kind=UnsupportedError):
        head_on_last_stage(Costs((1, 1), 1, 1), placement, 1.0, layers=(1, 1))


def test_a_small_head_is_not_worth_it_and_a_large_one_is():
    base = build_schedule("1f1b", num_devices=8, num_microbatches=32)
    small = choose_vocabulary(base, Costs(), 0.02, layers=32)
    assert small.best == "off" and "not worth" in small.reason
    large = choose_vocabulary(base, Costs(), 6.0, layers=32)
    assert large.best == "2" and "longer" in large.reason
    assert large.steps["2"].makespan < large.steps["redistribute"].makespan < large.steps["off"].makespan
    refused = choose_vocabulary(base, Costs(), 6.0, with_passes={})
    assert refused.best == "off" and "no other way was allowed" in refused.reason


def test_moved_layers_are_best_and_then_the_rules_hold_for_what_is_left():
    """Within 1 % the model's layout is kept, and of the algorithms the one that holds less."""
    for name, p, head, fastest, kept in (("v-half", 4, 0.4, "2", "off"), ("1f1b", 2, 0.35, "1", "2")):
        choice = choose_vocabulary(build_schedule(name, num_devices=p, num_microbatches=8), Costs(), head, layers=64)
        assert choice.best == "redistribute" and sum(choice.moved) == 64
        left = choice.without("redistribute")
        assert min(left.steps, key=lambda name: left.steps[name].makespan) == fastest
        assert left.best == kept


def searched(p, m, barriers, cap, costs=None, placement=None, known=None, **options):
    costs = costs or Costs()
    asked = None if cap is None else MemoryCap(cap, costs.memory is not None)
    knowledge = Knowledge(costs, placement=placement, vocabulary_schedules=known)
    return choose(Request("auto", asked, options=options).decided(barriers), Shape(p, None, m), knowledge).search


@pytest.mark.parametrize(("cap", "barriers"), [(0.75, 1), (1.0, 2)])
def test_a_searched_schedule_keeps_the_cap_with_its_passes(cap, barriers):
    result = searched(3, 5, barriers, cap, effort=0.05, seconds=60, max_chunks=3)
    for candidate in result.candidates:
        assert max(candidate.peaks) <= cap + 1e-9
        validate(candidate.schedule, memory_cap=cap)
        assert candidate.lower_bound <= candidate.makespan + 1e-9
        assert candidate.schedule.vocabulary_barriers == barriers


def test_one_after_another_keeps_a_cap_that_takes_full_backwards(monkeypatch):
    """I takes memory that W gives back, so a split backward holds more than the full one."""
    monkeypatch.setattr("megatron_pipemem.choose.searching._ATTEMPTS", 1)
    costs = Costs(memory={"F": (2.0, 2.0), "I": (2.0, 2.0), "W": (-4.0, -4.0)})
    result = searched(2, 4, 2, 4.0, costs, Placement.linear(2), known=(), seconds=0, effort=0)
    assert result.best.found_by == "one by one"
    validate(result.schedule, costs, 4.0)
    with refused("cap-unreachable", kind=UnsupportedError):
        searched(4, 8, 1, 0.1)


def test_what_takes_no_time_is_not_compared():
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=3)
    for costs in (Costs(0, 0, 0), Costs((0, 0), (0, 0), (0, 0))):
        for layers in (None, 4):
            with refused("no-time", kind=CostsError):
                choose_vocabulary(schedule, costs, 1.0, layers=layers)
    for wrong in ({"layers": 0}, {"layout": (0, 0)}, {"layout": (-1, 1)}):
        with refused("bad-layout", kind=UnsupportedError):
            choose_vocabulary(schedule, Costs(), 1.0, **wrong)
    assert choose_vocabulary(schedule, Costs(1, 0, 0), 0.0, layers=4).best == "off"


@pytest.mark.parametrize(("p", "m", "cap", "barriers"), [(4, 6, 2.0, 1), (3, 7, None, 2), (2, 6, 1.5, 1)])
def test_a_search_is_never_slower_than_a_family_with_passes(p, m, cap, barriers):
    """Whatever the time that it has."""
    costs = replace(Costs(1, 1.5, 0.5), vocabulary=VocabularyCosts.of_head(2.0, p, barriers))
    known = tuple(families_with_passes(p, m, costs, barriers))
    result = searched(p, m, barriers, cap, costs, known=known, seconds=0, effort=0, max_chunks=4)
    compared = 0
    for schedule in synchronous_schedules(p, m, costs):
        timeline = simulate(with_vocabulary(schedule, barriers, costs), costs)
        if cap is None or timeline.peak <= cap:
            compared += 1
            assert result.makespan <= timeline.makespan * (1 + 1e-9), schedule.name
    assert compared > 3
    linear = searched(p, m, barriers, cap, costs, Placement.linear(p), known, seconds=0, effort=0)
    assert linear.schedule.placement == Placement.linear(p)


@pytest.mark.parametrize("barriers", [1, 2])
def test_short_collectives_do_not_slow_the_steady_state(barriers):
    def makespan(num_microbatches, seconds):
        passes = VocabularyCosts.of_head(2.0, 8, barriers, embedding=0.01, collectives=seconds)
        costs = Costs(1.0, 1.2, 0.8, p2p=0.005, vocabulary=passes)
        schedule = build_schedule("1f1b", num_devices=8, num_microbatches=num_microbatches)
        return simulate(with_vocabulary(schedule, barriers, costs), costs).makespan

    work = 1.0 + 1.2 + 0.8 + 2.0 / 8 + 0.01 / 8
    for seconds in (0.005, 0.05):
        longest = 1.0001 if barriers == 2 else 1 + seconds
        assert (makespan(32, seconds) - makespan(16, seconds)) / 16 < longest * work


def test_with_two_barriers_a_loss_runs_one_forward_late():
    costs = Costs(1.0, 1.2, 0.8, vocabulary=VocabularyCosts.of_head(2.0, 2, 2, collectives=0.05))
    schedule = with_vocabulary(build_schedule("1f1b", num_devices=2, num_microbatches=4), 2, costs)
    order = [f"{kind}{unit}" for kind, _, unit in schedule.orders[1] if kind in (Kind.F, Kind.B, Kind.LOSS)]
    assert order == "F0 F1 LOSS0 F2 LOSS1 B0 F3 LOSS2 B1 LOSS3 B2 B3".split()
