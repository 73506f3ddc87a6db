"""Long steps are predicted from short ones whose middle repeats: equal to their simulation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lanes import examples

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.features.vocabulary.orders import with_barriers
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.vocabulary import VocabularyCosts
from megatron_pipemem.tools.planner import replay as replay_module
from megatron_pipemem.tools.planner.replay import OrderPrice, Replay, Timing, extended, measured
from megatron_pipemem.tools.planner.step import price
from megatron_pipemem.tools.planner.variants import paired_price
from tests.planner.small_run import FAMILIES, RUN

LONG = [
    family.name
    for family in families()
    if not family.asynchronous and family.slices == 1 and "costs" not in family.options
]
PAIRED = ["1f1b", "interleaved", "zb-h1", "gis", "zbv", "v-half", "v-min", "dualpipe-v"]
SPREADS = st.sampled_from([0.1, 0.9, 0.99])
"""The shortest stage as a share of the longest. Stages that differ little keep one time only after many microbatches."""


def built(name: str, p: int, m: int) -> Schedule:
    try:
        return build_schedule(name, num_devices=p, num_microbatches=m)
    except UnsupportedError:
        assume(False)
        raise


def costs_of(schedule: Schedule, least: float, p2p: float, seed: int) -> Costs:
    rng, stages = random.Random(seed), schedule.placement.model_stages
    return Costs(*([rng.uniform(least, 1.0) for _ in range(stages)] for _ in range(3)), p2p=p2p)


def assert_same(price: OrderPrice, simulated: OrderPrice, rel: float = 1e-9) -> None:
    assert price.seconds == pytest.approx(simulated.seconds, rel=rel)
    assert price.peak_bytes == pytest.approx(simulated.peak_bytes)
    assert price.hidden_seconds == pytest.approx(simulated.hidden_seconds)


@examples(60)
@given(
    st.sampled_from(LONG),
    st.integers(2, 6),
    st.integers(4, 20),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.05, 0.5]),
    SPREADS,
    st.integers(0, 2**32),
)
def test_the_price_of_a_long_step_is_that_of_its_simulation(name, p, times, more, p2p, least, seed):
    """With groups of microbatches that are whole and that are not."""
    schedule = built(name, p, times * p + more)
    costs = costs_of(schedule, least, p2p, seed)
    timeline = simulate(schedule, costs)
    rel = 0.005 if name == "hanayo" else 1e-9  # the end of its order depends on the number of microbatches
    assert_same(measured(name, p, times * p + more, None, costs), Timing(timeline, timeline.makespan).price, rel)


@examples(20)
@given(
    st.sampled_from(PAIRED),
    st.integers(2, 4),
    st.integers(6, 16),
    st.sampled_from([0.0, 0.05, 0.5]),
    SPREADS,
    st.sampled_from([1.001, 1.2, 9.0]),
    st.integers(0, 2**32),
)
def test_the_price_of_a_long_step_in_pairs_is_that_of_its_simulation(name, p, times, p2p, least, room, seed):
    schedule = built(name, p, times * p)
    costs = costs_of(schedule, least, p2p, seed).with_exchanges(0.4)
    limits = tuple(peak * room for peak in peaks(schedule, costs))
    whole = with_pairs(
        schedule, costs, lambda version: all(a <= b for a, b in zip(peaks(version, costs), limits, strict=True))
    )
    step = replace(price(RUN, schedule.placement), costs=costs)
    paired = paired_price(lambda m: Replay(built(name, p, m)), step, limits, times * p)
    assert_same(paired, Timing(whole, whole.makespan).price)


@examples(20)
@given(
    st.sampled_from(["1f1b", "zb-h1", "zbv", "v-half"]),
    st.integers(2, 5),
    st.integers(6, 16),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.floats(0.01, 0.4),
    st.integers(0, 2**32),
)
def test_the_price_of_a_long_step_with_a_cut_vocabulary_is_that_of_its_simulation(
    name, p, times, more, barriers, seconds, seed
):
    costs = costs_of(built(name, p, p), 0.9, 0.05, seed)
    passes = VocabularyCosts(seconds, seconds, seconds / 4, seconds / 4, collectives=seconds / 2)
    costs = replace(costs, vocabulary=passes)

    def cut(m: int) -> Replay:
        return Replay(with_barriers(built(name, p, m), barriers, costs))

    whole = cut(times * p + more).timing(costs)
    assert_same(extended(cut, costs, p, times * p + more), whole.price)


@pytest.mark.parametrize("name", [*FAMILIES, "v-min"])
def test_few_microbatches_are_built_for_a_long_step(name, monkeypatch):
    """A stage in the middle that is a little slower than the ends: it takes long until all devices keep its time."""
    sizes = []

    def family_schedule(name, p, m, *rest):
        sizes.append(m)
        return build_schedule(name, num_devices=p, num_microbatches=m)

    stages = build_schedule(name, num_devices=4, num_microbatches=4).num_stages
    seconds = [1.0 + 0.05 * (stage == stages // 2) for stage in range(stages)]
    costs = Costs(seconds, seconds, seconds, p2p=0.05)
    whole = simulate(build_schedule(name, num_devices=4, num_microbatches=1024), costs)
    monkeypatch.setattr(replay_module, "family_schedule", family_schedule)
    replay_module._short_replay.cache_clear()
    assert_same(measured(name, 4, 1024, None, costs), Timing(whole, whole.makespan).price)
    assert max(sizes) <= 16
