"""One run has one price: as it stands, as it starts, and as its layouts are compared, with all that its schedule adds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.vocabulary.orders import with_barriers
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.stream import consecutive_steps
from megatron_pipemem.tools.config.runs import Parallelism, ScheduleChoice
from megatron_pipemem.tools.planner.balance import balance
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.pricing import as_it_stands, priced_with
from megatron_pipemem.tools.planner.run_prices import priced
from megatron_pipemem.tools.planner.space import Limits
from megatron_pipemem.tools.planner.step import price
from megatron_pipemem.tools.planner.variants import run_step
from tests.planner.small_run import MODEL, RUN

BASE = replace(RUN, parallelism=Parallelism(pp=4, tp=2, global_batch=16, sequence_parallel=True))
SCHEDULE, PLACEMENT = build_schedule("v-half", num_devices=4, num_microbatches=16), Placement.v_shape(4)
LAYERS = (1,) * MODEL.layers


def under(**choice):
    return replace(BASE, schedule=ScheduleChoice("v-half", **choice))


@pytest.mark.parametrize(("algorithm", "barriers"), [("1", 2), ("2", 1)])
def test_a_cut_vocabulary_is_in_every_price_of_a_run(algorithm, barriers):
    run = under(vocab_cut=algorithm)
    step = run_step(run, PLACEMENT, LAYERS)
    timeline = simulate(with_barriers(SCHEDULE, barriers, step.costs), step.costs)
    way = as_it_stands(run)
    assert way.makespan == pytest.approx(timeline.makespan) and way.variant == f"vocabulary-{algorithm}"
    assert way.peak_bytes == predicted_memory(run).device_bytes == pytest.approx(step.held(timeline.peaks))
    assert balance(run).even.seconds == pytest.approx(way.seconds)
    assert way.seconds != pytest.approx(as_it_stands(under()).seconds)


def test_offload_is_in_the_price_of_a_run():
    run, plain = under(offload="full"), as_it_stands(under())
    step = run_step(run, PLACEMENT, LAYERS)
    assert step.costs.channel is not None and step.static_bytes == price(run, PLACEMENT, LAYERS).static_bytes
    way, memory = as_it_stands(run), predicted_memory(run)
    assert (
        way.peak_bytes == memory.device_bytes
        and max(way.peak_bytes) < max(plain.peak_bytes)
        and min(way.host_bytes) > 0
    )
    assert (
        way.variant == "offload"
        and min(way.host_bytes) >= min(step.offloaded_bytes)
        and way.host_bytes == memory.host_bytes
    )


def test_steps_without_a_barrier_take_their_period():
    whole, run = (
        replace(run, parallelism=replace(run.parallelism, sequence_parallel=False))
        for run in (under(), under(overlap_steps=True))
    )
    costs = run_step(run, PLACEMENT, LAYERS).costs
    way = as_it_stands(run)
    assert way.makespan == pytest.approx(consecutive_steps(SCHEDULE, costs).period)
    assert way.makespan < as_it_stands(whole).makespan
    assert way.gain_without_barrier == pytest.approx(simulate(SCHEDULE, costs).makespan / way.makespan)


@pytest.mark.parametrize("choice", [{}, {"vocab_cut": "1"}, {"vocab_cut": "2"}, {"overlap_steps": True}])
def test_the_planner_gives_the_same_run_the_same_price(choice):
    variant = f"vocabulary-{choice['vocab_cut']}" if "vocab_cut" in choice else "plain"
    sizes = {key: [getattr(BASE.parallelism, key)] for key in ("tp", "pp", "dp", "micro_batch")}
    limits = Limits({**sizes, "schedule": ["v-half"], "recompute": ["none"], "variant": [variant]})
    run = replace(BASE, schedule=ScheduleChoice(overlap_steps="overlap_steps" in choice))
    (planned,) = plan(run, limits=limits, search_seconds=0, top=1).plans
    way = priced(under(**choice))
    assert (way.makespan, way.peak_bytes, way.layers) == (planned.makespan, planned.peak_bytes, planned.layers)


def test_megatrons_own_schedules_are_compared_without_what_this_package_adds():
    assert all(way.run.schedule == ScheduleChoice() for way in priced_with(under(vocab_cut="2"), "1f1b", None))
    choices = ({"vocab_cut": "2"}, {"offload": "full"}, {"overlap_steps": True})
    alone = [way.seconds for way in priced_with(under(), "1f1b", None)]
    for choice in choices:
        assert [way.seconds for way in priced_with(under(**choice), "1f1b", None)] == alone
        assert all(
            way.run.schedule == replace(under(**choice).schedule, name="zbv", early_wgrad=way.run.schedule.early_wgrad)
            for way in priced_with(under(**choice), "zbv", None)
        )
    assert [way.variant for way in priced_with(under(vocab_cut="2"), "zbv", None)] == ["vocabulary-2"]
    with refused("not-for-stock", kind=UnsupportedError):
        as_it_stands(replace(under(vocab_cut="2"), schedule=ScheduleChoice("stock", vocab_cut="2")))


def test_families_that_cannot_have_what_a_run_adds_are_left_out():
    assert list(priced_with(under(vocab_cut="2"), "chimera", None)) == []
    assert len(list(priced_with(under(), "chimera", None))) == 1


def test_runs_that_share_layouts_search_them_once():
    run, layouts = replace(BASE, schedule=ScheduleChoice()), {}
    (way,) = priced_with(run, "interleaved", None, layouts)
    assert layouts == {way.order: way.layers} and 0 not in way.layers[1:-1]
    other = (2, *LAYERS[1:-1], 0)
    (shared,) = priced_with(run, "interleaved", None, {way.order: other})
    assert shared.layers == other
