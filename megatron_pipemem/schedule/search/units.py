"""Write the passes of microbatches that are cut into slices in whole numbers: a graph in which every pass has its own price.

A stage runs its forwards slice by slice, and its backwards microbatch by microbatch with the slices reversed (arXiv 2406.03488,
section 3.2): so the passes of a kind on a stage stand in one chain, and only what runs between the chains of a device is open.
What tells slices from microbatches is where the last stage turns round, and that slices need not be alike. Time is in ticks
and memory in steps, as in ``problem``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.core.action import Action, Kind, mirrored
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import loosened
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.search.improve import Row, Timetable
from megatron_pipemem.schedule.search.problem import FORWARD, INPUT, KINDS, MEMORY_STEPS, TICKS, Orders


@dataclass(frozen=True)
class Units:
    """The passes of a step. Pass ``c * units + k`` is the ``k``-th of class ``c`` (``3 * stage + kind``, kinds F, I, W).

    Args:
        placement: of the stages.
        num_microbatches: of the step.
        slices: of a microbatch.
        device: of every pass.
        ticks: how long it takes.
        change: by how much it changes what its device holds.
        waits: ``(pass, lag)`` of what ends ``lag`` ticks before it at the latest; the pass before it in its class is among
            them.
        caps: the most every device may hold.
        ticks_per_second: how long a tick is.
    """

    placement: Placement
    num_microbatches: int
    slices: int
    device: tuple[int, ...]
    ticks: tuple[int, ...]
    change: tuple[int, ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]
    caps: tuple[int, ...]
    ticks_per_second: float

    @property
    def num_units(self) -> int:
        return self.num_microbatches * self.slices

    @cached_property
    def followers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """``(pass, lag)`` of what waits for every pass."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.waits]
        for each, waits in enumerate(self.waits):
            for other, lag in waits:
                found[other].append((each, lag))
        return tuple(map(tuple, found))

    @cached_property
    def reversed(self) -> Units:
        """The same passes with time running backwards: what was freed last is taken first."""
        left = [0] * len(self.caps)
        for device, change in zip(self.device, self.change, strict=True):
            left[device] += change
        return replace(
            self,
            change=tuple(-change for change in self.change),
            waits=self.followers,
            caps=tuple(cap - kept for cap, kept in zip(self.caps, left, strict=True)),
        )

    def fits(self, orders: Orders) -> bool:
        """Return whether every device keeps its cap."""
        for order, cap in zip(orders, self.caps, strict=True):
            held = 0
            for each in order:
                held += self.change[each]
                if held > cap:
                    return False
        return True

    def action(self, each: int) -> Action:
        """Return what a pass is."""
        c, rank = divmod(each, self.num_units)
        return Action(KINDS[c % 3], c // 3, rank if c % 3 == FORWARD else mirrored(rank, self.slices))

    def orders_of(self, schedule: Schedule) -> Orders:
        """Return the orders of a schedule, its full backwards as I and W in turn."""
        units, offset = self.num_units, {kind: index for index, kind in enumerate(KINDS)}
        orders: Orders = []
        for order in schedule.orders:
            passes: list[int] = []
            for kind, stage, unit in order:
                if kind is Kind.F:
                    passes.append(3 * stage * units + unit)
                    continue
                rank = mirrored(unit, self.slices)
                split = (Kind.I, Kind.W) if kind is Kind.B else (kind,)
                passes += [(3 * stage + offset[each]) * units + rank for each in split]
            orders.append(passes)
        return orders

    def schedule(self, name: str, orders: Orders, fused: Collection[int] = ()) -> Schedule:
        """Return the schedule with these orders.

        Args:
            name: of the schedule.
            orders: of all devices.
            fused: I passes that become one B with their W.
        """
        units = self.num_units

        def actions(order: list[int]) -> Iterator[Action]:
            for each in order:
                if each in fused:
                    yield self.action(each)._replace(kind=Kind.B)
                elif each // units % 3 == FORWARD or each - units not in fused:
                    yield self.action(each)

        rows = tuple(tuple(actions(order)) for order in orders)
        return Schedule(name, self.placement, self.num_microbatches, rows, slices=self.slices)


def make_units(
    placement: Placement, num_microbatches: int, slices: int, costs: Costs, caps: Sequence[float] | None
) -> Units:
    """Put the passes of a step in whole numbers.

    Args:
        placement: one replica of the model.
        num_microbatches: ``m``.
        slices: ``n``, of every microbatch.
        costs: seconds and memory, of whole microbatches or of every slice.
        caps: per device, in activation units or in the unit of ``costs.memory``; ``None`` for no limit.

    Raises:
        CostsError: the costs do not fit the placement, or are all 0.
    """
    stages, n, units = placement.num_stages, slices, num_microbatches * slices
    seconds, memory = costs.seconds(placement, n), costs.memory_changes(placement, slices=n)
    longest = max(max(seconds[kind]) for kind in KINDS)
    if longest <= 0:
        raise CostsError("no-time", "all passes cost 0 seconds; give at least one of them a price")
    zero = (0.0,) * (stages * n)
    changes = [memory.get(kind, zero) for kind in KINDS]
    exact = all(float(value).is_integer() for each in changes for value in each)
    scale = TICKS / longest
    memory_scale = 1.0 if exact else MEMORY_STEPS / max(abs(value) for each in changes for value in each)
    ticks: list[int] = []
    change: list[int] = []
    for stage in range(stages):
        for index, kind in enumerate(KINDS):
            of_slices = (
                range(stage * n, stage * n + n) if index == FORWARD else range(stage * n + n - 1, stage * n - 1, -1)
            )
            # At least one tick, so that a pass always starts after what it waits for.
            ticks += [max(1, round(seconds[kind][at] * scale)) for at in of_slices] * num_microbatches
            change += [round(changes[index][at] * memory_scale) for at in of_slices] * num_microbatches
    device = tuple(placement.devices[stage] for stage in range(stages) for _ in range(3 * units))
    unit = costs.memory_unit(placement, n)
    total = sum(max(0, value) for value in change)
    allowed = (
        (total,) * placement.num_devices
        if caps is None
        else tuple(min(total, int(loosened(cap / unit * memory_scale))) for cap in caps)
    )
    waits = _waits(placement, units, n, costs, scale)
    return Units(placement, num_microbatches, n, device, tuple(ticks), tuple(change), waits, allowed, scale)


def _waits(
    placement: Placement, units: int, slices: int, costs: Costs, scale: float
) -> tuple[tuple[tuple[int, int], ...], ...]:
    def lag(source: int, destination: int) -> int:
        return round(costs.link_seconds(placement.devices[source], placement.devices[destination]) / slices * scale)

    waits: list[tuple[tuple[int, int], ...]] = []
    for stage in range(placement.num_stages):
        before, after = placement.previous_stage(stage), placement.next_stage(stage)
        for kind in range(3):
            c = 3 * stage + kind
            for rank in range(units):
                own = ((c * units + rank - 1, 0),) if rank else ()
                if kind == FORWARD:
                    data = () if before is None else ((3 * before * units + rank, lag(before, stage)),)
                elif kind != INPUT:
                    data = (((c - 1) * units + rank, 0),)
                elif after is None:
                    data = (((c - 1) * units + mirrored(rank, slices), 0),)
                else:
                    data = (((3 * after + INPUT) * units + rank, lag(after, stage)),)
                waits.append((*own, *data))
    return tuple(waits)


def as_soon_as_possible(units: Units, orders: Orders) -> Timetable | None:
    """Run every device's order without waiting longer than it must; ``None`` when the orders wait for one another.

    Args:
        units: the passes.
        orders: of all devices.
    """
    starts, ends = [-1] * len(units.ticks), [-1] * len(units.ticks)
    reached, free = [0] * len(orders), [0] * len(orders)
    runnable, left = set(range(len(orders))), sum(map(len, orders))
    while runnable:
        device = runnable.pop()
        for each in orders[device][reached[device] :]:
            if any(ends[other] < 0 for other, _ in units.waits[each]):
                break
            ready = max((ends[other] + lag for other, lag in units.waits[each]), default=0)
            starts[each] = max(free[device], ready)
            ends[each] = free[device] = starts[each] + units.ticks[each]
            reached[device] += 1
            left -= 1
            runnable |= {units.device[other] for other, _ in units.followers[each]} - {device}
    return None if left else Timetable(orders, starts, max(free))


def justify(units: Units, table: Timetable, frozen: Collection[int] = ()) -> Timetable:
    """Move all passes as late as possible, then all as early as possible; neither makes the step longer or takes more memory
    than the caps.

    Args:
        units: the passes.
        table: within the caps.
        frozen: passes that are moved within their place only, to look elsewhere than a plain justification does.
    """
    late = _earlier(units.reversed, _mirror(units, table), frozen)
    return _earlier(units, _mirror(units, late), frozen)


def _mirror(units: Units, table: Timetable) -> Timetable:
    """Return the timetable with time running the other way."""
    starts = [table.makespan - start - ticks for start, ticks in zip(table.starts, units.ticks, strict=True)]
    return Timetable([order[::-1] for order in table.orders], starts, table.makespan)


def _earlier(units: Units, table: Timetable, frozen: Collection[int]) -> Timetable:
    """Move every pass, by time, into the first gap that it fits, or else behind the others."""
    ticks, waits, change, device = units.ticks, units.waits, units.change, units.device
    shortest = min(ticks)
    rows = [Row(cap, shortest) for cap in units.caps]
    ends = [0] * len(ticks)
    for each in sorted(range(len(ticks)), key=table.starts.__getitem__):
        ready = 0
        for other, lag in waits[each]:
            if ends[other] + lag > ready:
                ready = ends[other] + lag
        row, end = rows[device[each]], -1
        if each not in frozen:
            end = row.into_gap(each, ready, ticks[each], change[each])
        ends[each] = end if end >= 0 else row.append(each, ready, ticks[each], change[each])
    starts = [end - length for end, length in zip(ends, ticks, strict=True)]
    first = min(starts)
    return Timetable([row.order for row in rows], [start - first for start in starts], max(r.end for r in rows) - first)
