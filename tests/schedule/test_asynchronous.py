"""Weights that change in the middle of a schedule: who uses which version, and how many have to be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from random_schedules import random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule, WeightUpdates, weight_uses
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate


def weight_versions(schedule: Schedule) -> dict[Action, int]:
    """Return the version of its stage's weights that every action uses."""
    return {use.action: use.version for use in weight_uses(schedule)}


def build(name: str, p: int, m: int, **options: object) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m, **options)


VERSIONS = [
    # Family and options, the version that the paper's formula gives a microbatch, and the versions kept per device.
    ("pipedream", {}, lambda p, stage, microbatch: microbatch - (p - stage - 1), lambda p, device: p - device),
    # w(t+1) = w(t) - lr * gradient(w(t-p+1)), the same t on every stage.
    ("pipedream", {"vertical_sync": True}, lambda p, stage, microbatch: microbatch - p + 1, lambda p, device: p),
    # W(t+1) = W(t) - lr * gradient(W(t-1)), on every stage.
    *(
        ("pipedream-2bw", {"update_every": every}, lambda p, s, k, every=every: k // every - 1, lambda p, device: 2)
        for every in (8, 11)
    ),
]


@pytest.mark.parametrize(("name", "options", "version", "kept"), VERSIONS)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_versions_of_the_papers(
    name: str, options: dict[str, object], version: Callable, kept: Callable, p: int
) -> None:
    schedule = build(name, p, 45, **options)
    validate(schedule)
    for action, used in weight_versions(schedule).items():
        assert used == max(0, version(p, action.stage, action.microbatch)), "F and B alike"
    timeline = simulate(schedule)
    assert list(timeline.weight_versions) == [kept(p, device) for device in range(p)] == oracle.versions_kept(schedule)


@examples(150)
@given(
    random_schedules(max_microbatches=6, max_slices=2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(0, 3),
)
def test_as_the_oracle_sees_it(schedule: Schedule, every: int, kept: int, delay: int | None) -> None:
    schedule = replace(schedule, updates=WeightUpdates(every, kept, delay))
    versions = {(a.kind.value, a.stage, a.microbatch): v for a, v in weight_versions(schedule).items()}
    assert versions == oracle.versions(schedule)
    if oracle.lost_versions(schedule):
        with refused("weight-version", kind=ScheduleError):
            validate(schedule)
    else:
        validate(schedule)
        assert list(simulate(schedule).weight_versions) == oracle.versions_kept(schedule)


@pytest.mark.parametrize("updates", [WeightUpdates(0, 1), WeightUpdates(1, 0), WeightUpdates(1, 1, -1)])
def test_updates_that_make_no_sense(updates: WeightUpdates) -> None:
    with refused("bad-number", 1, 0, kind=ScheduleError):
        validate(replace(build("1f1b", 2, 2), updates=updates))


def test_synchronous_schedules_use_one_version() -> None:
    for family in families():
        if not family.asynchronous:
            assert simulate(family.build(6, 24)).weight_versions == (1,) * 6


def test_evaluation_updates_nothing() -> None:
    schedule = build("pipedream", 4, 8).forward_only()
    assert schedule.updates is None
    assert {action.kind for order in schedule.orders for action in order} == {Kind.F}
