"""The search problem in whole numbers: passes, their waits, times and memory.

A pass class is a kind (F, I or W) on a stage. Microbatches are identical, so every class runs them in order, and a
device's order is a sequence of passes. A class of F runs the parts of a microbatch in order. A class of I or W
runs microbatch by microbatch, each from its last part to its first (arXiv 2406.03488, section 3.2). Times are whole
*ticks*, and memory is in whole *steps*, because a search compares sums of thousands of terms for equality. Both units
are so small that rounding changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.dependencies import Waits
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import WHOLE, Units

FORWARD, INPUT, WEIGHT = range(3)
KINDS = (Kind.F, Kind.I, Kind.W)

# Divisible by the usual numbers of chunks, and by powers of ten for decimal fractions.
TICKS = 12 * 10**6
# So fine that a thousand roundings stay below the tolerance of a cap.
MEMORY_STEPS = 10**13

# In memory steps; errors of floating-point sums are smaller.
_NOISE = 0.1

Orders = list[list[int]]
"""Per device, its passes in running order. Pass ``c * units + k`` is the ``k``-th of class ``c``."""

ClassWaits = tuple[tuple[tuple[int, int], ...], ...]
"""Per class, ``(class, lag)`` of its needs."""


class PassTable(NamedTuple):
    """All passes of a problem, with time running forward or backward."""

    device: list[int]  # per pass
    price: list[int]  # per pass, its index in ``ticks`` and ``change``
    before: list[int]  # per pass, the previous pass of the same class, or -1
    waits: list[Waits]  # per pass, the needed passes of other classes, with their links
    ticks: Sequence[int]
    change: Sequence[int]  # changes of the device's memory
    lags: list[int]  # ticks of every link
    caps: Sequence[int]  # most memory of every device
    shortest: list[int]  # ticks of the shortest pass of every device


@dataclass(frozen=True)
class Problem:
    """A problem to solve: find the order of the passes of every device with the least makespan under the caps."""

    units: Units  # of a step; all its microbatches have equally many parts
    device: tuple[int, ...]  # per class; class ``3 * stage + kind`` with kinds F, I, W
    ticks: tuple[int, ...]
    """Ticks of a pass, at index ``class * parts + j``, if its unit is the ``j``-th of a microbatch that the class runs."""
    change: tuple[int, ...]  # change of the device's memory by a pass, at the same index
    waits: ClassWaits
    """Per class, ``(class, lag)`` of every class that it needs: a pass starts at least ``lag`` ticks after the end of
    the pass of that class with the same unit. Passes of a class also run in order."""
    caps: tuple[int, ...]  # most memory of every device
    full: frozenset[int] = frozenset()
    """Stages with full backwards (B). Their class I has the time and memory of B, and their class W has none."""
    ticks_per_second: float = 1.0

    @property
    def num_devices(self) -> int:
        return len(self.caps)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Return the pass classes of every device."""
        return tuple(tuple(c for c, device in enumerate(self.device) if device == d) for d in range(self.num_devices))

    @property
    def num_stages(self) -> int:
        return len(self.device) // 3

    @cached_property
    def way(self) -> tuple[int, ...]:
        """Return the classes that a microbatch runs one after another: all F in model order, then all I in reverse."""
        forwards = range(FORWARD, len(self.device), 3)
        return (*forwards, *(c + INPUT for c in reversed(forwards)))

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Return the ticks that every device computes for one microbatch."""
        return self._per_device(self.ticks)

    def _per_device(self, prices: Sequence[int]) -> tuple[int, ...]:
        """Return for every device the sum of ``prices`` over its passes of one microbatch."""
        n = self.units.parts
        return tuple(sum(sum(prices[c * n : c * n + n]) for c in classes) for classes in self.classes)

    @cached_property
    def passes(self) -> PassTable:
        return self._passes(self.waits, self.ticks, self.change, self.caps, -1)

    @cached_property
    def reversed(self) -> PassTable:
        """Return the passes with time reversed: a pass waits for its followers, and takes the memory that it frees."""
        # Memory left at the end is there from the start in reversed time, and held memory counts from there.
        left = self._per_device(self.change)
        caps = tuple(cap - self.units.num_microbatches * kept for cap, kept in zip(self.caps, left, strict=True))
        return self._passes(self.followers, self.ticks, tuple(-change for change in self.change), caps, 1)

    def _passes(
        self, waits: ClassWaits, ticks: Sequence[int], change: Sequence[int], caps: Sequence[int], before: int
    ) -> PassTable:
        units, n, classes, links = len(self.units), self.units.parts, range(len(self.device)), dict[int, int]()
        turned, of_pass = list(map(self.units.backward, range(units))), list[Waits]()
        for c, waits_of_class in enumerate(waits):
            columns = []
            for other, lag in waits_of_class:
                first, link = other * units, links.setdefault(lag, len(links))
                ranks = turned if self.are_mirrored(c, other) else range(units)
                columns.append([(first + rank, link) for rank in ranks])
            of_pass += zip(*columns, strict=True) if columns else [()] * units
        neighbours = list(range(before, len(of_pass) + before))
        neighbours[0 if before < 0 else units - 1 :: units] = [-1] * len(classes)
        device = [self.device[c] for c in classes for _ in range(units)]
        price = [at for c in classes for at in list(range(c * n, c * n + n)) * self.units.num_microbatches]
        shortest = [min(min(ticks[c * n : c * n + n]) for c in device_classes) for device_classes in self.classes]
        return PassTable(device, price, neighbours, of_pass, ticks, change, list(links), caps, shortest)

    @staticmethod
    def are_mirrored(one_class: int, other_class: int) -> bool:
        """Return whether two classes (``3 * stage + kind``) run the parts of a microbatch in opposite orders."""
        return (one_class % 3 == FORWARD) != (other_class % 3 == FORWARD)

    @cached_property
    def is_steady(self) -> bool:
        """Return whether a whole microbatch never holds less than 0 on a stage, and holds 0 after its W."""
        changes = (self.change[c : c + 3] for c in range(0, len(self.change), 3))
        return all(f >= 0 and f + i >= 0 and f + i + w == 0 for f, i, w in changes)

    @cached_property
    def followers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return for every class ``(class, lag)`` of the classes that wait for it."""
        followers: list[list[tuple[int, int]]] = [[] for _ in self.device]
        for c, waits in enumerate(self.waits):
            for other, lag in waits:
                followers[other].append((c, lag))
        return tuple(map(tuple, followers))

    @cached_property
    def reserve(self) -> tuple[int, ...]:
        """Return the memory that must stay free after a pass has taken its own, indexed like ``change``.

        A forward leaves room for its microbatch on all later chunks of the device, and for the memory of an I. With
        less free memory the microbatch might never reach its backward.
        """
        n, change, reserve = self.units.parts, self.change, [0] * len(self.change)

        def taken(c: int) -> int:
            turn = (change[at] for j in range(n) for at in ((c + INPUT) * n + j, (c + WEIGHT) * n + j))
            return max(accumulate(turn))

        for classes in self.classes:
            forwards = [c for c in classes if c % 3 == FORWARD]
            later = max(0, *map(taken, forwards))
            for at in (c * n + j for c in reversed(forwards) for j in reversed(range(n))):
                reserve[at] = later
                later += change[at]
        return tuple(reserve)

    def owed(self, c: int, upcoming: Sequence[int]) -> int:
        """Return the memory that must be free before the next forward of class ``c``, if microbatches have parts.

        ``upcoming`` has the next pass of every class. The result, in memory steps, is the memory of this forward, of
        all remaining forwards of the microbatches that the device has begun, and of one I. With less free memory, no
        microbatch might reach its backward.
        """
        n, units, change = self.units.parts, len(self.units), self.change
        forwards = [other for other in self.classes[self.device[c]] if other % 3 == FORWARD]
        ran = [upcoming[other] - other * units for other in forwards]
        begun = max(max(ran), upcoming[c] % units + 1)
        room = self.reserve[forwards[-1] * n + n - 1]
        for other, done in zip(forwards, ran, strict=True):
            first, part = other * n, other * n + done % n
            room += (-(-begun // n) - done // n) * sum(change[first : first + n]) - sum(change[first:part])
        return room

    @property
    def full_backwards(self) -> set[int]:
        """Return all I passes of stages with full backwards."""
        units = len(self.units)
        return {(3 * stage + INPUT) * units + rank for stage in self.full for rank in range(units)}

    def held(self, order: Iterable[int]) -> int:
        """Return the most memory, in memory steps, that a device holds after any pass of its ``order``."""
        units, n, change = len(self.units), self.units.parts, self.change
        now = most = 0
        for pass_ in order:
            now += change[pass_ // units * n + pass_ % n]
            if now > most:
                most = now
        return most

    def fits(self, orders: Orders) -> bool:
        return all(self.held(order) <= cap for order, cap in zip(orders, self.caps, strict=True))


def make_problem(
    placement: Placement,
    units: Units,
    costs: Costs,
    caps: Sequence[float] | None,
    full: frozenset[int] = frozenset(),
    staggered: bool = False,
) -> Problem:
    """Return the problem of a placement with these costs, in whole ticks and memory steps.

    ``caps`` has the most memory of every device, in the unit of ``Costs.memory_changes``; ``None`` is no limit.
    ``full`` has the stages with full backwards. With ``staggered``, the time of every device counts from a later moment
    than that of the previous device. The makespan, from the earliest start to the latest end in these times, is then an
    upper bound for every device's own part of a step. Raise a CostsError if all passes cost 0 seconds.
    """
    stages, n = placement.num_stages, units.parts
    seconds, memory = costs.seconds(placement, units), costs.memory_changes(placement, units=units)
    longest = max(max(seconds[kind]) for kind in KINDS)
    if longest <= 0:
        raise CostsError("no-time", "all passes cost 0 seconds; give at least one of them a price")
    scale = TICKS / longest
    zero = (0.0,) * (stages * n)
    length, memory_after = [0.0] * (3 * stages * n), [0.0] * (3 * stages * n)
    for place in range(stages * n):
        stage, part = divmod(place, n)
        kinds = (Kind.F, Kind.B) if stage in full else KINDS
        after = list(accumulate(memory.get(kind, zero)[place] for kind in kinds))
        for index in range(3):
            at = (3 * stage + index) * n + (part if index == FORWARD else n - 1 - part)
            length[at] = seconds[kinds[index]][place] if index < len(kinds) else 0.0
            memory_after[at] = after[min(index, len(kinds) - 1)]
    # At least one tick, so that a pass always starts after its needs.
    ticks = tuple(max(1, round(value * scale)) for value in length)
    memory_scale = 1 if keeps_memory_exactly(placement, costs, units) else MEMORY_STEPS / max(map(abs, memory_after))
    # The memory after a pass is rounded up, and not its change, so that roundings do not add up.
    rounded = [ceil(value * memory_scale - _NOISE) for value in memory_after]

    def before(at: int) -> int:
        """Return the memory that the pass's unit held before the pass, in memory steps."""
        c, part = divmod(at, n)
        return 0 if c % 3 == FORWARD else rounded[(c - 1) * n + (part if c % 3 == WEIGHT else n - 1 - part)]

    change = tuple(after - before(at) for at, after in enumerate(rounded))
    total = sum(max(0, value) for value in change) * units.num_microbatches
    allowed = (
        (total,) * placement.num_devices
        if caps is None
        else tuple(min(total, int(loosened(cap * memory_scale))) for cap in caps)
    )

    stagger = _stagger(placement, ticks, n) if staggered else 0

    def lag(source: int, destination: int) -> int:
        a, b = placement.devices[source], placement.devices[destination]
        return round(costs.link_seconds(a, b) / n * scale) - stagger * (b - a)

    device = tuple(placement.devices[stage] for stage in range(stages) for _ in KINDS)
    return Problem(units, device, ticks, change, waits_of(placement, lag), allowed, full, scale)


def _stagger(placement: Placement, ticks: Sequence[int], parts: int) -> int:
    """Return the number of ticks by which the clock of each device is later than the clock of the device before it.

    It is less than the ticks of any pass whose result goes to a later device, and of the pass that needs this result,
    divided by the distance of the two devices. So a pass always starts after its needs, and also with time reversed,
    where the needing pass comes first.
    """
    shortest = []
    for source in range(placement.num_stages):
        for kind, destination in ((FORWARD, placement.next_stage(source)), (INPUT, placement.previous_stage(source))):
            if destination is not None and (hop := placement.devices[destination] - placement.devices[source]) > 0:
                firsts = ((3 * stage + kind) * parts for stage in (source, destination))
                least = min(min(ticks[first : first + parts]) for first in firsts)
                shortest.append((least - 1) // hop)
    return max(0, min(shortest, default=0))


def waits_of(placement: Placement, lag: Callable[[int, int], int]) -> ClassWaits:
    """Return ``Problem.waits`` of a placement.

    ``lag(source, destination)`` returns the ticks from the end of a pass on stage ``source`` to the earliest start of
    the pass on stage ``destination`` that needs its result.
    """
    waits: list[tuple[tuple[int, int], ...]] = []
    for stage in range(placement.num_stages):
        before, after = placement.previous_stage(stage), placement.next_stage(stage)
        forward, inputs = 3 * stage + FORWARD, 3 * stage + INPUT
        data = () if before is None else ((3 * before + FORWARD, lag(before, stage)),)
        gradient = (forward, 0) if after is None else (3 * after + INPUT, lag(after, stage))
        waits += [data, (gradient,), ((inputs, 0),)]
    return tuple(waits)


def keeps_memory_exactly(placement: Placement, costs: Costs, units: Units = WHOLE) -> bool:
    """Return whether all memory changes are whole numbers in the unit of the costs, which need no scale or rounding."""
    changes = costs.memory_changes(placement, units=units)
    return all(float(value).is_integer() for kind in (*KINDS, Kind.B) for value in changes.get(kind, ()))


def better_full(placement: Placement, costs: Costs) -> frozenset[int]:
    """Return the stages whose I takes memory, and more than B. Under a cap it may be better to run only B there."""
    if costs.memory is None:
        return frozenset()
    changes, zero = costs.memory_changes(placement), (0.0,) * placement.num_stages
    inputs, full = changes.get(Kind.I, zero), changes.get(Kind.B, zero)
    return frozenset(stage for stage, taken in enumerate(inputs) if taken > 0 and full[stage] < taken)


def to_schedule(
    name: str, placement: Placement, problem: Problem, orders: Orders, fused: Collection[int] = ()
) -> Schedule:
    """Return the schedule with these orders. ``fused`` has the I passes that become a B, together with their W."""
    units, backward = len(problem.units), problem.units.backward

    def actions(order: list[int]) -> Iterator[Action]:
        for pass_ in order:
            stage, kind = divmod(pass_ // units, 3)
            unit = pass_ % units if kind == FORWARD else backward(pass_ % units)
            if pass_ in fused:
                yield Action(Kind.B, stage, unit)
            elif kind != WEIGHT or pass_ - units not in fused:
                yield Action(KINDS[kind], stage, unit)

    return Schedule(name, placement, problem.units, tuple(tuple(actions(o)) for o in orders))


def from_schedule(schedule: Schedule) -> Orders:
    """Return a schedule's orders as passes of a problem, per device. A full backward becomes I, followed by W."""
    units, backward = len(schedule.units), schedule.units.backward
    offset = {kind: index * units for index, kind in enumerate(KINDS)}
    orders = []
    for order in schedule.orders:
        passes: list[int] = []
        for kind, stage, unit in order:
            at = 3 * stage * units + (unit if kind is Kind.F else backward(unit))
            if kind is Kind.B:
                passes += [at + offset[Kind.I], at + offset[Kind.W]]
            else:
                passes.append(at + offset[kind])
        orders.append(passes)
    return orders
