"""Compute the makespan of one order under many costs.

A planner prices the same order again and again: other tensor parallelism, other microbatches, the same sequence of passes. What
every pass waits for is worked out once; a replay is then one sweep over the passes and agrees with ``simulate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from megatron_pipemem.schedule.core.action import PLAIN
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.dependencies import Dependencies
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import peaks
from megatron_pipemem.schedule.core.walk import Times
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.stream import until_they_repeat

_LONG = 4  # a step of more microbatches per device than this is two shorter ones, extended


class Replay:
    """A schedule, ready to be priced.

    Args:
        schedule: F, I, W and B of whole microbatches.

    Raises:
        ScheduleError: the schedule waits for ever.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._found = found = Dependencies.of_schedule(schedule)
        if error := found.stuck():
            raise error
        self._steps = list(found.graph.steps(found.walk.nodes))

    def makespan(self, costs: Costs) -> float:
        """Return the makespan in seconds."""
        return max(self._run(costs)((0.0,) * self.schedule.num_devices))

    def period(self, costs: Costs) -> float:
        """Return the seconds from step to step without a barrier between steps."""
        run = self._run(costs)
        idle = (0.0,) * self.schedule.num_devices
        period, _ = until_they_repeat(self.schedule.name, lambda _, begins: run(begins), idle)
        return period

    def _run(self, costs: Costs) -> Callable[[Sequence[float]], list[float]]:
        """Return what tells when devices end a step, from when they begin it."""
        costs.require_alike("a replay")
        found, seconds = self._found, costs.seconds(self.schedule.placement)
        prices = [seconds[kind][stage] for kind, stage in found.kinds]
        lags = [costs.link_seconds(*link) for link in found.links]

        def run(begins: Sequence[float]) -> list[float]:
            times = Times(found.graph, prices, lags, 0.0)
            times.free[: len(begins)] = begins
            times.run(self._steps)
            return times.free[: len(begins)]

        return run

    def peaks(self, costs: Costs) -> tuple[float, ...]:
        """Return the most that every device holds."""
        return peaks(self.schedule, costs)


@lru_cache(maxsize=256)
def replay(name: str, num_devices: int, num_microbatches: int, chunks: int | None) -> Replay:
    """Return a replay of a family's schedule.

    Args:
        name: of the family.
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        chunks: stages per device; ``None`` where the family has no choice.

    Raises:
        PipememError: the family cannot be built so.
    """
    return Replay(family_schedule(name, num_devices, num_microbatches, chunks))


def family_schedule(
    name: str, p: int, m: int, chunks: int | None, costs: Costs | None = None, slices: int = 1
) -> Schedule:
    """Return a family's schedule.

    Args:
        name: of the family.
        p: pipeline ranks.
        m: microbatches of one step.
        chunks: stages per device; ``None`` where the family has no choice.
        costs: for families that fit their order to them.
        slices: of every microbatch; 1 leaves it whole.

    Raises:
        PipememError: the family cannot be built so.
    """
    options = {} if chunks is None else {"chunks": chunks}
    if slices > 1:
        options["slices"] = slices
    return build_schedule(name, num_devices=p, num_microbatches=m, costs=costs, **options)


def lengths(num_devices: int, num_microbatches: int) -> tuple[int, ...]:
    """Return how many microbatches to run instead of all of a step: all, or two shorter steps to extend."""
    whole = num_devices * _LONG
    if num_microbatches <= whole + 3 * num_devices:
        return (num_microbatches,)
    longer = whole + num_microbatches % num_devices
    return longer - num_devices, longer


def same_passes(costs: Costs) -> tuple[object, ...]:
    """Return what a replay depends on: it is equal for costs that differ in transfers or in the vocabulary's passes
    only.
    """
    links = tuple(sorted(costs.p2p.items())) if isinstance(costs.p2p, Mapping) else costs.p2p
    kept = None if costs.memory is None else tuple(costs.memory.get(kind) for kind in PLAIN)
    return costs.forward, costs.backward_input, costs.backward_weight, links, kept


def measured(
    name: str,
    num_devices: int,
    num_microbatches: int,
    chunks: int | None,
    costs: Costs,
    in_full: bool = False,
    overlaps: bool = False,
) -> tuple[float, tuple[float, ...]]:
    """Return seconds and peaks of a family's step.

    Args:
        name: of the family.
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        chunks: stages per device; ``None`` where the family has no choice.
        costs: what actions take, in seconds, and hold.
        in_full: run all microbatches, however many.
        overlaps: whether no barrier stands between steps; the seconds are then from step to step.
    """
    counts = (num_microbatches,) if in_full else lengths(num_devices, num_microbatches)
    return extended([replay(name, num_devices, count, chunks) for count in counts], num_microbatches, costs, overlaps)


def extended(
    steps: Sequence[Replay], num_microbatches: int, costs: Costs, overlaps: bool = False
) -> tuple[float, tuple[float, ...]]:
    """Return seconds and peaks of a step: its own, or those of two shorter ones, extended.

    Args:
        steps: of as many microbatches as ``lengths`` says.
        num_microbatches: of the whole step.
        costs: what actions take, in seconds, and hold.
        overlaps: whether no barrier stands between steps; the seconds are then from step to step.
    """
    seconds_of = Replay.period if overlaps else Replay.makespan
    if len(steps) == 1:
        return seconds_of(steps[0], costs), steps[0].peaks(costs)
    shorter, longer = (each.schedule.num_microbatches for each in steps)
    a, b = steps
    more = (num_microbatches - longer) / (longer - shorter)
    seconds = seconds_of(b, costs)
    held = zip(a.peaks(costs), b.peaks(costs), strict=True)
    return seconds + more * (seconds - seconds_of(a, costs)), tuple(y + more * (y - x) for x, y in held)
