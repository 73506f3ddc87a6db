"""Vocabulary passes of sequences in slices: all of them, in an order that no data contradict, and as fast as slices promise."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.features.slices.prices import slice_costs
from megatron_pipemem.features.vocabulary.choice import choose_vocabulary, head_on_last_stage
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import COLLECTIVES, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate, validate_program
from megatron_pipemem.schedule.vocabulary import VocabularyCosts
from tests.schedule import program_oracle
from tests.schedule.mutants import is_accepted, mutant_of
from tests.schedule.random_schedules import random_schedules
from tests.schedule.vocabulary_oracle import expected, hangs, makespan, present

NAMES = ["seq1f1b", "interleaved", "zb-h1", "zbv", "v-half"]


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
    units, n = range(schedule.num_units), schedule.slices
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
    assert not program_oracle._misreduced(program)


# Of the digests of all orders below, before there were slices.
UNSLICED = "07e1482087b1fecb"


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
    p=st.integers(2, 5),
    m=st.integers(1, 6),
    n=st.sampled_from([1, 2, 3, 4]),
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
    assert softmaxes(schedule) <= schedule.slices
    assert [[a for a in order if a.kind is Kind.F] for order in schedule.orders] == [
        [a for a in order if a.kind is Kind.F] for order in base.orders
    ]
    per_stage = {kind.value: prices[0] for kind, prices in costs.seconds(base.placement, n).items()}
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
    assert softmaxes(cut) <= cut.slices


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_a_slice_more_per_barrier_is_in_flight_and_the_bubble_shrinks(p, n, barriers):
    """What seq1f1b without a cut vocabulary promises, and one interval per barrier more."""
    head = 6.0
    for m in (1, p, 2 * p + 1):
        costs = Costs(vocabulary=VocabularyCosts.of_head(head, p, barriers))
        schedule = with_vocabulary(build("seq1f1b", p, m, n), barriers, costs)
        timeline = simulate(schedule, costs)
        held = [round(peak * p * n) for peak in timeline.peaks]
        assert held == [min(m * n, p - r - 1 + n + barriers) for r in range(p)]
        beyond = timeline.makespan - m * (3 + head / p) - (p - 1) * 3 / n
        # The passes of slices that no other work hides.
        assert beyond <= 2 * head / p / n + 1e-9, (m, beyond)


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("name", ["zbv", "v-half", "interleaved"])
def test_slices_save_time_and_memory(name, barriers):
    p, m = 4, 8
    costs = Costs(vocabulary=VocabularyCosts.of_head(7.5, p, barriers))
    runs = [simulate(with_vocabulary(build(name, p, m, n), barriers, costs), costs) for n in (1, 2, 4)]
    assert [run.makespan for run in runs] == sorted((run.makespan for run in runs), reverse=True)
    assert [run.peak for run in runs] == sorted((run.peak for run in runs), reverse=True)
    whole = simulate(build(name, p, m, 4), head_on_last_stage(Costs(), runs[-1].schedule.placement, 7.5, slices=4))
    assert runs[-1].makespan < 0.6 * whole.makespan


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
        assert softmaxes(schedule) <= schedule.slices
        timeline = simulate(schedule, costs)
        assert timeline.ideal == pytest.approx(4 * (3 + 8 + 0.5))
        assert min(timeline.peaks) > 4.0, "the logits of a microbatch are held"


def test_the_order_of_one_microbatch():
    """Two slices on two devices: one loss, of both, before any T."""
    schedule = with_vocabulary(build("seq1f1b", 2, 1, 2), 2)
    of_head = (Kind.S, Kind.LOSS, Kind.T, Kind.B, Kind.EMBED_B)
    assert [" ".join(str(a) for a in order if a.kind in of_head) for order in schedule.orders] == [
        "0S0 0S1 0T1 0T0 0B1 0EMBED_B1 0B0 0EMBED_B0",
        "1S0 1S1 1LOSS1 1T1 1B1 1T0 1B0 1EMBED_B1 1EMBED_B0",
    ]


@examples(80)
@given(data=st.data(), barriers=st.sampled_from([1, 2]), sizes=st.sampled_from([(2, 2, 2), (2, 3, 1), (3, 3, 1)]))
def test_mutants_are_caught_or_harmless(data, barriers, sizes):
    mutant = mutant_of(with_vocabulary(build("seq1f1b", *sizes), barriers), data)
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


def test_cutting_is_weighed_against_the_head_where_it_is():
    """Of slices as of whole microbatches."""
    base = build("seq1f1b", 4, 8, 4)
    small = choose_vocabulary(base, Costs(), 0.02, layers=16)
    large = choose_vocabulary(base, Costs(), 6.0, layers=16, layout=(4, 4, 4, 4))
    assert small.best.name == "off" and large.best.name in ("1", "2")
    off = large.options["off"].timeline
    assert off.ideal == pytest.approx(8 * (3 + 6)), "each slice has its part of the head"
    moved = large.options["redistribute"].timeline
    assert sum(moved.work) == pytest.approx(sum(off.work))
