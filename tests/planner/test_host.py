"""A step whose host launches passes more slowly than its device computes them is bound by the host, and the planner says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_pipemem.model.model import Execution
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.advise.advice import advise
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.host import bound_by_host, host_seconds
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.pricing import as_it_stands
from megatron_pipemem.tools.planner.profile import Profile, from_formulas
from tests.planner.small_run import CLUSTER, MODEL, RUN

KIND = MODEL.main_kind


def run_of(schedule: str, chunks: int | None = None, **flags: object) -> Run:
    cut = Parallelism(pp=4, dp=CLUSTER.num_devices // 4, chunks=chunks, global_batch=32)
    return replace(RUN, parallelism=cut, schedule=ScheduleChoice(schedule), flags={**RUN.flags, **flags})


def pace(seconds: float) -> MeasuredSlowdown:
    return MeasuredSlowdown(launching=((KIND, seconds),))


@pytest.mark.parametrize(("schedule", "placement"), [("zb-h1", Placement.linear(4)), ("v-half", Placement.v_shape(4))])
def test_the_host_with_the_most_layers_launches_longest(schedule, placement):
    way = as_it_stands(run_of(schedule))
    layers = [0] * 4
    for stage, device in enumerate(placement.devices):
        layers[device] += way.step.layers[stage]
    assert host_seconds(way, {KIND: 0.5}) == max(layers) * way.run.parallelism.microbatches * 0.5
    assert host_seconds(way, {"another": 0.5}) == 0


def test_only_measured_seconds_above_those_of_the_device_bind_a_step():
    run = run_of("zb-h1")
    way = as_it_stands(run)
    even = way.work_seconds / host_seconds(way, {KIND: 1.0})
    texts = [bound_by_host(way, pace(seconds)) for seconds in (0.99 * even, 1.01 * even)]
    assert texts[0] is None and f"{way.work_seconds:.4g}" in texts[1] and f"{1.01 * way.work_seconds:.4g}" in texts[1]
    assert bound_by_host(way, None) is bound_by_host(way, MeasuredSlowdown()) is None
    assert advise(run, pace(1.01 * even)).bound_by_host == texts[1]
    assert bound_by_host(as_it_stands(run_of("zb-h1", **{"cuda-graph-impl": "local"})), pace(9.0)) is None


def test_a_profile_keeps_the_seconds_of_launches(tmp_path):
    profile = replace(from_formulas(MODEL, Execution(), CLUSTER), source="measured", launching={KIND: 0.25})
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_json()))
    assert Profile.from_json(path) == profile
    assert profile.slowdown(CLUSTER).launching == ((KIND, 0.25),)
    recomputing = replace(profile, execution=Execution(recompute="full"))
    assert recomputing.slowdown(CLUSTER).launching == ()
