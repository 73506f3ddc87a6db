"""Hypothesis strategies: schedules nobody would write, valid by construction."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule

FAMILIES = {family.name: family for family in families()}


@st.composite
def placements(draw: st.DrawFn, max_devices: int = 4, max_stages: int = 7) -> Placement:
    """Any assignment of stages to devices, also several neighbours on one device and uneven counts."""
    num_devices = draw(st.integers(1, max_devices))
    extra = draw(st.lists(st.integers(0, num_devices - 1), max_size=max_stages - num_devices))
    return Placement.from_devices(tuple(draw(st.permutations([*range(num_devices), *extra]))))


@st.composite
def random_schedules(draw: st.DrawFn, max_microbatches: int = 5) -> Schedule:
    """A random run of a random placement: some backwards split and some fused, in any order that works."""
    placement = draw(placements())
    num_stages, num_microbatches = placement.num_stages, draw(st.integers(1, max_microbatches))
    cells = num_stages * num_microbatches
    fused = draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    forwards, inputs, weights = ([0] * num_stages for _ in range(3))
    orders: list[list[Action]] = [[] for _ in range(placement.num_devices)]
    while True:
        ready = []
        for stage in range(num_stages):
            f, i, w = forwards[stage], inputs[stage], weights[stage]
            if f < num_microbatches and (stage == 0 or forwards[stage - 1] > f):
                ready.append(Action(Kind.F, stage, f))
            if i < f and (stage == num_stages - 1 or inputs[stage + 1] > i):
                if not fused[stage * num_microbatches + i]:
                    ready.append(Action(Kind.I, stage, i))
                elif w == i:
                    ready.append(Action(Kind.B, stage, i))
            if w < i:
                ready.append(Action(Kind.W, stage, w))
        if not ready:
            break
        action = draw(st.sampled_from(ready))
        forwards[action.stage] += action.kind is Kind.F
        inputs[action.stage] += action.kind in (Kind.I, Kind.B)
        weights[action.stage] += action.kind in (Kind.W, Kind.B)
        orders[placement.devices[action.stage]].append(action)
    return Schedule("random", placement, num_microbatches, tuple(map(tuple, orders)))


@st.composite
def family_schedules(draw: st.DrawFn, max_devices: int = 4, max_microbatches: int = 6) -> Schedule:
    """A schedule of any registered family."""
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    return build_schedule(
        family.name,
        num_devices=draw(st.integers(family.min_devices, max_devices)),
        num_microbatches=draw(st.integers(1, max_microbatches)),
    )
