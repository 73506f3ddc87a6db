"""Families as a source of a run's schedules: chunks to ask Megatron for, cap and costs handed on."""

from __future__ import annotations

import pytest
from refusals import refused

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.conflicts import check
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.programs import Programs
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule, families, family

RUNNABLE = [each.name for each in families()]


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_family_says_how_many_chunks_it_wants_and_builds_for_them(name):
    source = Programs(Request(name))
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


def test_group_size_of_megatron_is_ours_unless_it_is_its_default():
    def schedule(name, group_size):
        return Programs(Request(name)).plan(Shape(4, 2, 12, group_size), "start").schedule

    assert schedule("gis", 3) == build_schedule("gis", num_devices=4, num_microbatches=12, group_size=3)
    assert schedule("gis-h", 4) == build_schedule("gis-h", num_devices=4, num_microbatches=12)


def test_cap_and_costs_fit_the_order_and_measured_costs_fit_it_again():
    costs, measured = Costs(p2p=0.3), Costs((1.0, 1.0, 1.0, 2.0), 1.5, 0.5)
    source = Programs(Request("zb-auto", 1.5), costs)

    def wanted(costs):
        return build_schedule("zb-auto", num_devices=4, num_microbatches=12, memory_cap=1.5, costs=costs)

    shape = Shape(4, 1, 12)
    assert source.plan(shape, "start").schedule == wanted(costs)
    source.measured(measured, None)
    assert source.plan(shape, "measured").schedule == wanted(measured) != wanted(costs)


def test_cap_and_costs_are_no_options():
    with refused("has-own-flag", "zb-auto", kind=UnsupportedError):
        check(Request("zb-auto", options={"costs": 1}))
