"""Steps in the order for one hardware queue, which Megatron demands of tensor and context parallelism on older GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.one_queue import demands_one_queue, in_demanded_order, one_queue_slowdown
from megatron_pipemem.tools.planner.pricing import as_it_stands
from tests.planner.small_run import CLUSTER, RUN


def run_of(schedule: str, tp: int = 1, microbatches: int = 8, connections: int | None = 1) -> Run:
    cut = Parallelism(pp=4, tp=tp, dp=CLUSTER.num_devices // 4 // tp)
    choice = ScheduleChoice(schedule, early_wgrad="none")
    devices = replace(CLUSTER, max_connections=connections)
    return replace(RUN, cluster=devices, parallelism=cut.with_microbatches(microbatches), schedule=choice)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv", "v-half"])
@pytest.mark.parametrize("microbatches", [4, 8, 40])
def test_a_step_is_longer_by_what_its_messages_hold_up(schedule, microbatches):
    way = as_it_stands(run_of(schedule, microbatches=microbatches))
    costs, counted = way.step.costs, min(microbatches, 48 // way.step.placement.num_chunks)
    short, long = (build_schedule(schedule, num_devices=4, num_microbatches=m) for m in (counted, microbatches))

    def ratio(order):
        return (
            run_single_queues(lower(order, single_queue=True, costs=costs), costs).makespan
            / simulate(order, costs).makespan
        )

    assert one_queue_slowdown(way) == pytest.approx(ratio(short)) == pytest.approx(ratio(long), abs=0.02)
    assert one_queue_slowdown(way) >= 1 - 1e-9


@pytest.mark.parametrize("algorithm", ["1", "2"])
def test_a_cut_vocabulary_has_seconds_in_one_queue(algorithm):
    run = run_of("zbv", tp=2)
    way = as_it_stands(replace(run, schedule=replace(run.schedule, vocab_cut=algorithm)))
    costs, order = way.step.costs, build_schedule("zbv", num_devices=4, num_microbatches=8)
    order = with_vocabulary(order, BARRIERS_OF_ALGORITHM[int(algorithm)], costs)
    seconds = run_single_queues(lower(order, single_queue=True, costs=costs), costs).makespan
    assert in_demanded_order(way).makespan == pytest.approx(seconds)
    assert seconds > way.makespan


def test_only_our_schedules_change_and_only_if_megatron_demands_it():
    way = as_it_stands(run_of("v-half", tp=2))
    slowed = in_demanded_order(way)
    assert slowed.seconds == way.makespan * one_queue_slowdown(way) + way.step.outside_seconds > way.seconds
    assert slowed.idle_rate > way.idle_rate
    stock = as_it_stands(run_of("stock", tp=2))
    free = [as_it_stands(run_of("v-half")), as_it_stands(run_of("v-half", tp=2, connections=None))]
    for other in (stock, *free):
        assert in_demanded_order(other) is other
    assert one_queue_slowdown(stock) is None


def test_orders_that_are_not_a_familys_keep_their_seconds():
    way = as_it_stands(run_of("auto", tp=2))
    assert demands_one_queue(way) and in_demanded_order(way) is way
