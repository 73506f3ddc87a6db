"""Hold schedules against the closed forms of their families."""

from __future__ import annotations

from fractions import Fraction

import oracle
import pytest

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate


def letters(schedule: Schedule, f: int = 1, i: int = 1, w: int = 1) -> dict[str, Fraction]:
    """What the closed forms of a family are called with, exactly."""
    placement = schedule.placement
    chunks = placement.num_chunks // placement.replicas
    values = {"p": placement.num_devices, "m": schedule.num_microbatches, "v": chunks, "n": schedule.units.parts}
    return {name: Fraction(value) for name, value in (values | {"f": f, "i": i, "w": w, "b": i + w}).items()}


def assert_correct(schedule: Schedule) -> None:
    """A training step that adds weight gradients in the order of the microbatches, by validator and oracle."""
    validate(schedule)
    assert oracle.check(schedule) == []
    assert oracle.disordered_weight_gradients(schedule) == []


def assert_peak_as_promised(family: Family, schedule: Schedule, peak: float | Fraction) -> None:
    if isinstance(family.peak, Formula):
        promised = family.peak.compute(**letters(schedule))
        assert peak <= promised * (1 + 1e-9)
        if schedule.num_microbatches >= 2 * schedule.num_devices and not family.peak.at_most:
            assert peak == pytest.approx(float(promised))


def assert_bubble_as_promised(family: Family, schedule: Schedule) -> None:
    """For at least ``2p`` microbatches, exactly for equal passes of one second per stage.

    With a short W no bubble is longer, unless the formula says that it is for equal passes. Orders that follow the costs are
    those for equal passes.
    """
    v = schedule.placement.num_chunks // schedule.placement.replicas
    only_equal = "if F = I = W" in family.bubble or "costs" in family.options
    for shares in [(1, 1, 1)] if only_equal else [(1, 1, 1), (1, 1.5, 0.5)]:
        costs = [share * v for share in shares]
        promised = family.bubble.compute(**letters(schedule, *costs))
        timeline = simulate(schedule, Costs(*costs))
        idle = timeline.makespan - timeline.ideal
        if promised is not None:
            assert idle <= promised + 1e-9, shares
            assert family.bubble.at_most or shares != (1, 1, 1) or idle == pytest.approx(float(promised))
