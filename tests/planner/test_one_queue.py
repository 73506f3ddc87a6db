"""Steps in the order for one hardware queue, which Megatron demands of tensor and context parallelism on older GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.one_queue import one_queue_slowdown, told_if_demanded
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


def test_only_runs_of_which_megatron_demands_it_are_told():
    today = as_it_stands(run_of("stock", tp=2))
    way = as_it_stands(run_of("v-half", tp=2))
    seconds = way.makespan * one_queue_slowdown(way) + way.step.outside_seconds
    text = told_if_demanded({"more memory": way, "tuned": today}, today)
    assert (
        f"more memory {seconds:.2f} s ({seconds / today.seconds - 1:+.1%} against today)" in text
        and "tuned" not in text
    )
    text = told_if_demanded({"more memory": way}, way)
    assert f"today {seconds:.2f} s; more memory {seconds:.2f} s (+0.0% against today)" in text, "both in one queue"
    for other in (run_of("stock"), run_of("stock", tp=2, connections=None)):
        assert told_if_demanded({"more memory": way}, as_it_stands(other)) is None
    assert one_queue_slowdown(today) is None and told_if_demanded({"tuned": today}, today) is None
