"""Write the search problem in whole numbers: passes, what they wait for, how long they take and what they hold.

Microbatches are identical, so every pass class (a kind on a stage) runs them in order without loss, and a device's order
is a sequence of passes. Time is in ticks and memory in units small enough that nothing is lost by rounding, because a
search compares sums of thousands of terms for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import loosened
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.walk import Waits

FORWARD, INPUT, WEIGHT = range(3)
KINDS = (Kind.F, Kind.I, Kind.W)

# Twelve divides by the usual numbers of chunks, ten to some power by whatever a decimal fraction has.
TICKS = 12 * 10**6
# Fine enough for a thousand roundings to stay below what a cap is loosened by.
MEMORY_STEPS = 10**13

# Of a memory step; sums of floats are off by less.
_NOISE = 0.1

Orders = list[list[int]]
"""Per device, its passes in the order in which they run. Pass ``c * m + k`` is of class ``c`` and microbatch ``k``."""


@dataclass(frozen=True)
class Problem:
    """Find per device the order of its passes with the least makespan under the caps.

    Args:
        num_microbatches: ``m``.
        device: device of every class; class ``3 * stage + kind`` with kinds F, I, W.
        ticks: how long a pass of the class takes.
        change: by how much it changes what its device holds.
        waits: ``(class, lag)`` of what a pass waits for: the pass of that class and of the same microbatch ends ``lag`` ticks
            before it at the latest. Besides, the passes of a class run in the order of their microbatches.
        caps: the most every device may hold.
        full: stages whose backwards are full ones (B): class I has the length and the change of both, W is a shadow.
        ticks_per_second: how long a tick is.
    """

    num_microbatches: int
    device: tuple[int, ...]
    ticks: tuple[int, ...]
    change: tuple[int, ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]
    caps: tuple[int, ...]
    full: frozenset[int] = frozenset()
    ticks_per_second: float = 1.0

    @property
    def num_devices(self) -> int:
        return len(self.caps)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """The classes of every device."""
        return tuple(tuple(c for c, device in enumerate(self.device) if device == d) for d in range(self.num_devices))

    @property
    def num_stages(self) -> int:
        return len(self.device) // 3

    @cached_property
    def way(self) -> tuple[int, ...]:
        """Return the classes of a microbatch's way to the loss and back."""
        forwards = range(FORWARD, len(self.device), 3)
        return (*forwards, *(c + INPUT for c in reversed(forwards)))

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Ticks every device computes for one microbatch."""
        return tuple(sum(self.ticks[c] for c in classes) for classes in self.classes)

    @cached_property
    def left(self) -> tuple[int, ...]:
        """Return what every device still holds of a microbatch when all its passes have run: usually nothing."""
        return tuple(sum(self.change[c] for c in classes) for classes in self.classes)

    @cached_property
    def passes(self) -> tuple[list[int], list[Waits], list[int], list[int]]:
        """The lags of all links, and of every pass what it waits for, its class and its device (see ``walk.Graph``)."""
        m = self.num_microbatches
        links: dict[int, int] = {}
        waits: list[Waits] = []
        for each in self.waits:
            first = [(other * m, links.setdefault(lag, len(links))) for other, lag in each]
            waits += [[(before + k, link) for before, link in first] for k in range(m)]
        classes = [c for c in range(len(self.ticks)) for _ in range(m)]
        return list(links), waits, classes, [self.device[c] for c in classes]

    @cached_property
    def is_steady(self) -> bool:
        """Return whether a microbatch never holds less than nothing, and nothing in the end."""
        held = (self.change[c : c + 3] for c in range(0, len(self.change), 3))
        return all(f >= 0 and f + i >= 0 and f + i + w == 0 for f, i, w in held)

    @cached_property
    def followers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """``(class, lag)`` of what waits for the passes of every class."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.device]
        for c, waits in enumerate(self.waits):
            for other, lag in waits:
                found[other].append((c, lag))
        return tuple(map(tuple, found))

    @cached_property
    def reserve(self) -> tuple[int, ...]:
        """Return what must be free besides when a pass of every class starts: a chunk's forward leaves room for one
        forward of every later chunk and for what an I may take, or the microbatch could never turn round.
        """
        reserve = [0] * len(self.change)
        for classes in self.classes:
            forwards = [c for c in classes if c % 3 == FORWARD]
            taken = max(0, *(self.change[c] for c in classes if c % 3 == INPUT))
            for index, c in enumerate(forwards):
                reserve[c] = sum(self.change[later] for later in forwards[index + 1 :]) + taken
        return tuple(reserve)

    @cached_property
    def reversed(self) -> Problem:
        """The same problem with time running backwards: what was freed last is taken first.

        Its orders are the reversed orders, with microbatch ``k`` renamed ``m - 1 - k``.
        """
        return Problem(
            self.num_microbatches,
            self.device,
            self.ticks,
            tuple(-change for change in self.change),
            self.followers,
            # What is left in the end is there from the start now, and what is held counts from there.
            tuple(cap - self.num_microbatches * left for cap, left in zip(self.caps, self.left, strict=True)),
        )

    @property
    def full_backwards(self) -> set[int]:
        """The I passes of the full stages."""
        m = self.num_microbatches
        return {(3 * stage + INPUT) * m + k for stage in self.full for k in range(m)}

    def held(self, order: Iterable[int]) -> int:
        """Return the most a device holds after any pass of its order."""
        m, change = self.num_microbatches, self.change
        now = most = 0
        for each in order:
            now += change[each // m]
            if now > most:
                most = now
        return most

    def fits(self, orders: Orders) -> bool:
        return all(self.held(order) <= cap for order, cap in zip(orders, self.caps, strict=True))


def make_problem(
    placement: Placement,
    num_microbatches: int,
    costs: Costs,
    caps: Sequence[float] | None,
    full: frozenset[int] = frozenset(),
    staggered: bool = False,
) -> Problem:
    """Put a placement with its prices in whole numbers.

    Args:
        placement: one replica of the model.
        num_microbatches: ``m``.
        costs: seconds and memory.
        caps: per device, in units of ``costs.memory_changes``, or ``None``.
        full: stages whose backwards are full ones.
        staggered: every device has a clock of its own, which lags behind that of the device before. The makespan, from the
            first start to the last end by any clock, is then what no device needs longer for its part of a step.

    Returns:
        The problem, and how many of its ticks make a second.

    Raises:
        CostsError: the costs do not fit the placement, or are all 0.
    """
    stages = placement.num_stages
    seconds = costs.seconds(placement)
    longest = max(max(seconds[kind]) for kind in KINDS)
    if longest <= 0:
        raise CostsError("no-time", "all passes cost 0 seconds; give at least one of them a price")
    scale = TICKS / longest
    memory = costs.memory_changes(placement)
    zero = (0.0,) * stages
    length: list[float] = []
    held: list[float] = []
    for stage in range(stages):
        kinds = (Kind.F, Kind.B) if stage in full else KINDS
        length += [*(seconds[kind][stage] for kind in kinds), *(0.0,) * (3 - len(kinds))]
        after = list(accumulate(memory.get(kind, zero)[stage] for kind in kinds))
        held += [*after, *after[-1:] * (3 - len(kinds))]
    # At least one tick, so that a pass always starts after what it waits for.
    ticks = tuple(max(1, round(value * scale)) for value in length)
    memory_scale = 1 if keeps_memory_exactly(placement, costs) else MEMORY_STEPS / max(map(abs, held))
    # What is held after a pass is rounded up, and not by how much the pass changes it: roundings do not add up.
    rounded = [ceil(value * memory_scale - _NOISE) for value in held]
    change = tuple(after - (before if c % 3 else 0) for c, (before, after) in enumerate(pairwise([0, *rounded])))
    total = sum(max(0, value) for value in change) * num_microbatches
    allowed = (
        (total,) * placement.num_devices
        if caps is None
        else tuple(min(total, int(loosened(cap * memory_scale))) for cap in caps)
    )

    stagger = _stagger(placement, ticks) if staggered else 0

    def lag(source: int, destination: int) -> int:
        a, b = placement.devices[source], placement.devices[destination]
        return round(costs.link_seconds(a, b) * scale) - stagger * (b - a)

    device = tuple(placement.devices[stage] for stage in range(stages) for _ in KINDS)
    return Problem(num_microbatches, device, ticks, change, waits_of(placement, lag), allowed, full, scale)


def _stagger(placement: Placement, ticks: Sequence[int]) -> int:
    """Return by how many ticks every device's clock is behind that of the one before: a little less than the shortest pass
    whose result goes on to a later device, so that a pass always starts after what it waits for."""
    shortest = []
    for source in range(placement.num_stages):
        for kind, destination in ((FORWARD, placement.next_stage(source)), (INPUT, placement.previous_stage(source))):
            if destination is not None and (hop := placement.devices[destination] - placement.devices[source]) > 0:
                shortest.append((ticks[3 * source + kind] - 1) // hop)
    return max(0, min(shortest, default=0))


def waits_of(placement: Placement, lag: Callable[[int, int], int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return ``Problem.waits``.

    Args:
        placement: of the stages.
        lag: ticks of a message from one stage to another.
    """
    waits: list[tuple[tuple[int, int], ...]] = []
    for stage in range(placement.num_stages):
        before, after = placement.previous_stage(stage), placement.next_stage(stage)
        forward, inputs = 3 * stage + FORWARD, 3 * stage + INPUT
        data = () if before is None else ((3 * before + FORWARD, lag(before, stage)),)
        gradient = (forward, 0) if after is None else (3 * after + INPUT, lag(after, stage))
        waits += [data, (gradient,), ((inputs, 0),)]
    return tuple(waits)


def keeps_memory_exactly(placement: Placement, costs: Costs) -> bool:
    """Return whether memory comes in whole numbers, which ``make_problem`` does not round."""
    changes = costs.memory_changes(placement)
    return all(float(value).is_integer() for kind in (*KINDS, Kind.B) for value in changes.get(kind, ()))


def better_full(placement: Placement, costs: Costs) -> frozenset[int]:
    """Return the stages of which a full backward holds less than I alone: under a cap, some orders have only those."""
    if costs.memory is None:
        return frozenset()
    changes, zero = costs.memory_changes(placement), (0.0,) * placement.num_stages
    inputs, full = changes.get(Kind.I, zero), changes.get(Kind.B, zero)
    return frozenset(stage for stage, taken in enumerate(inputs) if taken > 0 and full[stage] < taken)


def to_schedule(
    name: str, placement: Placement, problem: Problem, orders: Orders, fused: Collection[int] = ()
) -> Schedule:
    """Return the schedule with these orders.

    Args:
        name: of the schedule.
        placement: of the problem.
        problem: tells what the numbers of passes mean.
        orders: of all devices.
        fused: I passes that become one B with their W.
    """
    m = problem.num_microbatches

    def actions(order: list[int]) -> Iterator[Action]:
        for each in order:
            stage, kind = divmod(each // m, 3)
            if each in fused:
                yield Action(Kind.B, stage, each % m)
            elif kind != WEIGHT or each - m not in fused:
                yield Action(KINDS[kind], stage, each % m)

    return Schedule(name, placement, m, tuple(tuple(actions(order)) for order in orders))


def from_schedule(schedule: Schedule) -> Orders:
    """Return the orders of a schedule, its full backwards as I and W in turn."""
    m = schedule.num_microbatches
    offset = {kind: index * m for index, kind in enumerate(KINDS)}
    orders = []
    for order in schedule.orders:
        passes: list[int] = []
        for kind, stage, microbatch in order:
            at = 3 * stage * m + microbatch
            if kind is Kind.B:
                passes += [at + offset[Kind.I], at + offset[Kind.W]]
            else:
                passes.append(at + offset[kind])
        orders.append(passes)
    return orders
