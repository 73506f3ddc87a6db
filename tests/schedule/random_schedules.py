"""Hypothesis strategies: schedules nobody would write, valid by construction."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import accumulate, product

import pytest
from hypothesis import strategies as st

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import Units

# Those that offload have tests, and an oracle, of their own: test_offload.py.
FAMILIES = {family.name: family for family in families() if not family.offloads}
# Asynchronous ones run window by window: test_stream.py.
EXECUTED = {name: f for name, f in FAMILIES.items() if not (f.slices > 1 or f.asynchronous) and f.replicas == 1}

COVERING = {
    (f.placement, f.splits_backward, f.replicas, f.slices > 1, f.asynchronous): name for name, f in FAMILIES.items()
}.values()
"""One family per placement and kind of backward, with replicas, slices and asynchronous weights."""


def build_or_skip(name: str, num_devices: int, num_microbatches: int, **options: object) -> Schedule:
    """A family's schedule; skips the test where the family says beforehand that it has none."""
    family = FAMILIES[name]
    try:
        return build_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
    except UnsupportedError:
        if num_devices >= family.min_devices and not family.needs:
            raise
        pytest.skip("a family has no schedule of this size")


@st.composite
def placements(draw: st.DrawFn, max_devices: int = 4, max_stages: int = 7, max_replicas: int = 1) -> Placement:
    """Any assignment of stages to devices, also several neighbours on one device and uneven counts."""
    num_devices = draw(st.integers(1, max_devices))
    extra = draw(st.lists(st.integers(0, num_devices - 1), max_size=max_stages - num_devices))
    devices = [*range(num_devices), *extra]
    replicas = draw(st.integers(1, max_replicas))
    devices += [0] * (-len(devices) % replicas)
    return Placement.from_devices(tuple(draw(st.permutations(devices))), replicas)


@st.composite
def random_schedules(
    draw: st.DrawFn, max_microbatches: int = 5, max_replicas: int = 1, max_slices: int = 1, ragged: bool = False
) -> Schedule:
    """A random run of a random placement: some backwards split and some fused, in any order that works.

    ``ragged`` microbatches have different numbers of slices.
    """
    placement = draw(placements(max_replicas=max_replicas))
    num_stages, num_microbatches = placement.num_stages, draw(st.integers(1, max_microbatches))
    size, slices = num_stages // placement.replicas, [draw(st.integers(1, max_slices))] * num_microbatches
    if ragged:
        slices = draw(st.lists(st.integers(1, max_slices), min_size=num_microbatches, max_size=num_microbatches))
    starts = [sum(slices[:microbatch]) for microbatch in range(num_microbatches)]
    num_units = sum(slices)
    # What a replica runs forward, and what backward, as (microbatch, slice).
    there: list[list[tuple[int, int]]] = [[] for _ in range(placement.replicas)]
    for microbatch in range(num_microbatches):
        there[draw(st.integers(0, placement.replicas - 1))] += [
            (microbatch, part) for part in range(slices[microbatch])
        ]
    back = [sorted(units, key=lambda unit: (unit[0], -unit[1])) for units in there]
    # One seed in place of a draw for each of hundreds of actions, which would take most of the time of a property test.
    chance = draw(st.randoms(use_true_random=True))
    fused = [chance.random() < 0.5 for _ in range(num_stages * num_units)]
    forwards, inputs, weights = ([0] * num_stages for _ in range(3))
    orders: list[list[Action]] = [[] for _ in range(placement.num_devices)]
    while True:
        ready = []
        for stage in range(num_stages):
            f, i, w = forwards[stage], inputs[stage], weights[stage]
            going, coming = ([starts[k] + j for k, j in units[stage // size]] for units in (there, back))
            if f < len(going) and (stage % size == 0 or forwards[stage - 1] > f):
                ready.append(Action(Kind.F, stage, going[f]))
            if i < len(coming) and coming[i] in going[:f] and (stage % size == size - 1 or inputs[stage + 1] > i):
                if not fused[stage * num_units + i]:
                    ready.append(Action(Kind.I, stage, coming[i]))
                elif w == i:
                    ready.append(Action(Kind.B, stage, coming[i]))
            if w < i:
                ready.append(Action(Kind.W, stage, coming[w]))
        if not ready:
            break
        action = chance.choice(ready)
        forwards[action.stage] += action.kind is Kind.F
        inputs[action.stage] += action.kind in (Kind.I, Kind.B)
        weights[action.stage] += action.kind in (Kind.W, Kind.B)
        orders[placement.devices[action.stage]].append(action)
    return Schedule("random", placement, Units(tuple(accumulate(slices))), tuple(map(tuple, orders)))


@st.composite
def family_schedules(
    draw: st.DrawFn, names: Collection[str] = FAMILIES, max_devices: int = 4, max_microbatches: int = 6
) -> Schedule:
    """A schedule of any of these families, of sequence slices too where it takes them."""
    name = draw(st.sampled_from(sorted(names)))
    num_devices, num_microbatches = draw(st.sampled_from(_shapes(name, max_devices, max_microbatches)))
    options = {}
    if "slices" in FAMILIES[name].options:
        options["slices"] = draw(st.integers(1, 3)) * (num_devices if name == "slimpipe" else 1)
    return build_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)


@cache
def _shapes(name: str, max_devices: int, max_microbatches: int) -> list[tuple[int, int]]:
    """All numbers of devices and microbatches that a family takes."""
    shapes = []
    for shape in product(range(1, max_devices + 1), range(1, max_microbatches + 1)):
        try:
            FAMILIES[name].schedule(*shape, {})
        except UnsupportedError:
            continue
        if shape[0] >= FAMILIES[name].min_devices:
            shapes.append(shape)
    return shapes
