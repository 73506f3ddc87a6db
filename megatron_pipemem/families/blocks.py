"""Build schedules from lists of passes, and lists of passes from a building block.

A pass is a kind on a stage, without a microbatch. Microbatches of a stage always run in order, forward and backward.
The parts of a microbatch run forward from the first to the last, and backward from the last to the first. So the list of
passes of a device determines its order, and weight gradients accumulate as in 1F1B.

A block has the passes of one microbatch on all stages, each in a time slot. It is repeated at a fixed interval. Then
passes move into idle slots, and the remaining idle slots are dropped. The peak memory follows from the time that each
activation lives (arXiv 2405.15362, sections 2 and 3). F, I and W take one slot, and B takes two. If
microbatches run in parts, a block has the passes of one part, and backwards wait for the last part.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, count
from operator import itemgetter
from typing import NamedTuple

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import WHOLE, Units


class Pass(NamedTuple):
    """A kind of action on a stage. The microbatch is the next one that has not had this kind there."""

    kind: Kind
    stage: int


def in_microbatch_order(name: str, placement: Placement, units: Units, passes: Iterable[Iterable[Pass]]) -> Schedule:
    """Return the schedule of a list of passes per device: microbatches of every kind and stage run in order.

    The k-th F of a stage is that of unit ``k``, and the k-th I or B that of unit ``units.backward(k)``. The k-th W of a
    stage has the unit of its k-th I, or of its k-th backward if the stage has no I. Passes beyond the last microbatch
    are dropped.
    """
    return Schedule(name, placement, units, tuple(_order(list(device_passes), units) for device_passes in passes))


def _order(passes: list[Pass], units: Units) -> tuple[Action, ...]:
    numbers = {pass_: count() for pass_ in set(passes)}
    # On a stage that mixes I and B, both have one numbering, and a W has the number of its I.
    mixed = [stage for kind, stage in numbers if kind is Kind.I and Pass(Kind.B, stage) in numbers]
    numbers |= {Pass(Kind.B, stage): numbers[Pass(Kind.I, stage)] for stage in mixed}
    places = map(next, map(numbers.__getitem__, passes))
    numbered = [(kind, stage, place) for (kind, stage), place in zip(passes, places, strict=True)]
    for mixed_stage in mixed:
        places_of_inputs = [place for kind, stage, place in numbered if (kind, stage) == (Kind.I, mixed_stage)]
        numbered = [
            (kind, stage, places_of_inputs[place] if (kind, stage) == (Kind.W, mixed_stage) else place)
            for kind, stage, place in numbered
        ]
    num_units = len(units)
    within = [row for row in numbered if row[2] < num_units]
    if not units.are_whole:
        within = [(kind, stage, place if kind is Kind.F else units.backward(place)) for kind, stage, place in within]
    return tuple(map(partial(tuple.__new__, Action), within))  # as Action._make does, in half the time


SLOTS = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}

# Change of the stage activations that a device holds.
_CHANGE = {Kind.F: 1, Kind.I: 0, Kind.W: -1, Kind.B: -1}

Timetable = list[tuple[int, Pass]]
"""``(start slot, pass)`` of all passes, sorted by slot. The stages of a device's W are decided only in ``squeeze``."""


@dataclass(frozen=True)
class Block:
    """The passes of one microbatch, each with its slot: F and either B, or I and W, on every stage.

    A ScheduleError is raised if a pass is missing or starts before its input ends. It is also raised if two passes of
    a device take the same slot when the block is repeated.
    """

    placement: Placement
    interval: int  # slots from a microbatch to the next one; at least the slots of a device's passes per microbatch
    starts: Mapping[Pass, int]  # the slot in which every pass starts

    def __post_init__(self) -> None:
        for stage in range(self.placement.num_stages):
            kinds = {kind for kind, own_stage in self.starts if own_stage == stage}
            if kinds not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}):
                present = ", ".join(sorted(kinds)) or "nothing"
                raise ScheduleError(
                    "missing-action", f"stage {stage} has {present} in its block; give it F and B, or F, I and W"
                )
        backwards = _backwards(self.starts)
        taken: dict[tuple[int, int], Pass] = {}
        for pass_, start in self.starts.items():
            device = self.placement.devices[pass_.stage]
            for needed in _inputs(pass_, self.placement, backwards):
                ready = self.starts[needed] + SLOTS[needed.kind]
                if start < ready:
                    raise ScheduleError(
                        "slot-conflict",
                        f"{pass_.kind} of stage {pass_.stage} starts in slot {start}, before {needed.kind} of stage "
                        f"{needed.stage} has ended; start it in slot {ready} or later",
                        at=(device,),
                    )
            for slot in range(start, start + SLOTS[pass_.kind]):
                other = taken.setdefault((device, slot % self.interval), pass_)
                if other is not pass_:
                    raise ScheduleError(
                        "slot-conflict",
                        f"{pass_.kind} of stage {pass_.stage} and {other.kind} of stage {other.stage} both take slot "
                        f"{slot % self.interval} of every {self.interval}; shift one of them or raise the interval",
                        at=(device,),
                    )

    @classmethod
    def with_weight_gradients(cls, placement: Placement, interval: int, starts: Mapping[Pass, int]) -> Block:
        """Make a block from the slots of F and I. Each W gets the first slot after its I that is free in every block."""
        starts = dict(starts)
        taken = {(placement.devices[stage], slot % interval) for (_, stage), slot in starts.items()}
        inputs = sorted((slot, stage) for (kind, stage), slot in starts.items() if kind is Kind.I)
        for slot, stage in inputs:
            device = placement.devices[stage]
            following = range(slot + 1, slot + 1 + interval)
            vacant = next((s for s in following if (device, s % interval) not in taken), None)
            if vacant is None:
                raise ScheduleError(
                    "slot-conflict",
                    f"W of stage {stage} finds no vacant slot; raise the interval of {interval}",
                    at=(device,),
                )
            taken.add((device, vacant % interval))
            starts[Pass(Kind.W, stage)] = vacant
        return cls(placement, interval, starts)

    def of_unit(self, units: Units) -> Block:
        """Return the block of one unit: with the same forwards, and backwards ``units.lead`` intervals later.

        Parts run backward in reverse. So the last part of a microbatch has its backward as soon after its forward as in
        this block, and the first part ``2 * units.lead`` intervals later.
        """
        later = units.lead * self.interval
        starts = {pass_: start if pass_.kind is Kind.F else start + later for pass_, start in self.starts.items()}
        return Block(self.placement, self.interval, starts)

    @property
    def length(self) -> int:
        """Return the number of slots from slot 0 to the end of the last pass."""
        return max(start + SLOTS[kind] for (kind, _), start in self.starts.items())

    def lifespan(self, stage: int) -> int:
        """Return for how many slots an activation of a stage lives: from the start of F to the end of W or B."""
        kind = Kind.B if Pass(Kind.B, stage) in self.starts else Kind.W
        return self.starts[Pass(kind, stage)] + SLOTS[kind] - self.starts[Pass(Kind.F, stage)]

    def peaks(self) -> tuple[int, ...]:
        """Return for every device the most activations (of one stage each) if the block is repeated without end."""

        def most(stages: tuple[int, ...]) -> int:
            lives = [(self.starts[Pass(Kind.F, stage)], self.lifespan(stage)) for stage in stages]
            # The number of live activations grows only when a forward starts.
            return max(
                sum(-(-(lifespan - (slot - start) % self.interval) // self.interval) for start, lifespan in lives)
                for slot, _ in lives
            )

        return tuple(map(most, self.placement.stages))


def repeat(block: Block, num_microbatches: int) -> Timetable:
    """Return the passes of all microbatches, sorted by slot: the block, repeated every ``block.interval`` slots."""
    return sorted(
        (start + microbatch * block.interval, pass_)
        for pass_, start in block.starts.items()
        for microbatch in range(num_microbatches)
    )


def reorder(
    timetable: Timetable, placement: Placement, peak: int, *, steady: bool = False, units: Units = WHOLE
) -> Timetable:
    """Return the timetable with passes of warm-up and cool-down moved to earlier idle slots.

    No device may hold more than ``peak`` activations, of one stage each. Warm-up lasts until the first backward of
    stage 0, and cool-down begins after the last forward of stage 0. Passes move, in order of time, to the earliest idle
    slots that their inputs allow. In the cool-down, W take the slots that are idle after all other passes have moved.
    ``steady`` also moves the passes in between. That saves about one slot if backwards are full, and makes the schedule
    worse if they are split. ``units`` has the parts of microbatches.
    """
    warm_up_end = min(slot for slot, (kind, stage) in timetable if stage == 0 and kind in (Kind.I, Kind.B))
    cool_down = 1 + max(slot for slot, pass_ in timetable if pass_ == Pass(Kind.F, 0))
    # The dictionary keeps the last forward of a device, because the timetable is sorted by slot.
    last_forward = {placement.devices[stage]: slot for slot, (kind, stage) in timetable if kind is Kind.F}
    # Cool-downs without W in between are best. But before the last forward, some W may have to release memory in time.
    for deferred_from in (dict.fromkeys(last_forward, cool_down), last_forward):
        kept = [
            (slot, pass_)
            for slot, pass_ in timetable
            if pass_.kind is not Kind.W or slot < deferred_from[placement.devices[pass_.stage]]
        ]
        plan = _Plan(kept, placement, units)
        for slot, pass_ in kept:
            start = slot
            if steady or slot < warm_up_end or slot >= cool_down:
                earliest = plan.earliest(pass_)
                if pass_.kind is Kind.F:
                    earliest = plan.earliest_within(peak, pass_, earliest, slot)
                start = plan.first_idle(pass_, earliest, slot)
            plan.place(pass_, slot, start)
        plan.add_missing_weight_gradients()
        reordered = sorted(plan.placed)
        if _peak(reordered, placement) <= peak:
            break
    return reordered


def extend(timetable: Timetable, interval: int, num_microbatches: int) -> list[tuple[Timetable, int]]:
    """Return the timetable with ``num_microbatches`` more microbatches, as parts and the number of times each runs.

    One interval of slots from the middle of the steady state runs once more for each of them. None are added if the
    number is not positive.
    """
    begin, _ = timetable[len(timetable) // 2]
    middle = bisect_left(timetable, begin, key=itemgetter(0))
    end = bisect_left(timetable, begin + interval, key=itemgetter(0))
    return [(timetable[:middle], 1), (timetable[middle:end], max(num_microbatches, 0)), (timetable[middle:], 1)]


def squeeze(name: str, parts: Iterable[tuple[Timetable, int]], placement: Placement, units: Units) -> Schedule:
    """Drop the idle slots of the parts of a timetable. Every device runs its W in the order of its I.

    The number of every part says how often it runs before the next one.
    """
    by_device: list[list[Pass]] = [[] for _ in placement.stages]
    for timetable, times in parts:
        passes_of: list[list[Pass]] = [[] for _ in placement.stages]
        by_stage = [passes_of[device] for device in placement.devices]
        for _, pass_ in timetable:
            by_stage[pass_.stage].append(pass_)
        for passes, passes_of_part in zip(by_device, passes_of, strict=True):
            passes += passes_of_part * times
    weights_of = [Pass(Kind.W, stage) for stage in range(placement.num_stages)]
    for passes in by_device:
        weights = iter([weights_of[stage] for kind, stage in passes if kind is Kind.I])
        passes[:] = [next(weights) if pass_.kind is Kind.W else pass_ for pass_ in passes]
    return in_microbatch_order(name, placement, units, by_device)


def build(name: str, block: Block, units: Units, *, steady: bool = False) -> Schedule:
    """Return the schedule of a repeated block. No device holds more than the highest peak of the block.

    If there are fewer units than activations in the peak, a longer step is built, and the passes of surplus units are
    dropped. ``Block.of_unit`` is applied here, so pass the block of a whole microbatch. All microbatches must have
    equally many parts.
    """
    block, parts = block.of_unit(units), units.parts
    peak = max(block.peaks())
    # Microbatches of a warm-up, a steady state longer than any wait of a pass for its input, and a cool-down.
    enough = -(-3 * (block.length // block.interval + 1) // parts)
    built = Units.equal(min(max(units.num_microbatches, -(-peak // parts)), enough), parts)
    reordered = _reordered(block.placement, block.interval, tuple(block.starts.items()), built, peak, steady)
    extended = extend([*reordered], parts * block.interval, units.num_microbatches - enough)
    return squeeze(name, extended, block.placement, units)


@lru_cache(maxsize=16)
def _reordered(
    placement: Placement,
    interval: int,
    starts: tuple[tuple[Pass, int], ...],
    units: Units,
    peak: int,
    steady: bool,
) -> tuple[tuple[int, Pass], ...]:
    """Return the result of ``reorder`` for the repetitions of a block. It is cached: long steps share it."""
    timetable = repeat(Block(placement, interval, dict(starts)), len(units))
    return tuple(reorder(timetable, placement, peak, steady=steady, units=units))


def _backwards(passes: Iterable[Pass]) -> dict[int, Pass]:
    """Return for every stage the pass that computes its input gradient: I or B."""
    return {pass_.stage: pass_ for pass_ in passes if pass_.kind in (Kind.I, Kind.B)}


def _inputs(pass_: Pass, placement: Placement, backwards: Mapping[int, Pass]) -> list[Pass]:
    """Return the passes of the same microbatch that must end before this one starts."""
    if pass_.kind is Kind.F:
        before = placement.previous_stage(pass_.stage)
        return [] if before is None else [Pass(Kind.F, before)]
    if pass_.kind is Kind.W:
        return [Pass(Kind.I, pass_.stage)]
    after = placement.next_stage(pass_.stage)
    return [Pass(Kind.F, pass_.stage)] + ([] if after is None else [backwards[after]])


def _peak(timetable: Timetable, placement: Placement) -> int:
    """Return the most activations (of one stage each) that any device holds."""
    activations: Counter[int] = Counter()
    most = 0
    for _, (kind, stage) in timetable:
        device = placement.devices[stage]
        activations[device] += _CHANGE[kind]
        most = max(most, activations[device])
    return most


class _Plan:
    """A timetable whose passes are moved one by one: the passes placed so far, and the idle slots of every device."""

    def __init__(self, timetable: Timetable, placement: Placement, units: Units) -> None:
        self.placed: Timetable = []
        self._units = units
        self._placement = placement
        self._busy: list[set[int]] = [set() for _ in range(placement.num_devices)]
        self._ends: dict[Pass, list[int]] = defaultdict(list)
        self._input_gradient_ends: list[list[int]] = [[] for _ in range(placement.num_devices)]
        self._weight_gradients: Counter[int] = Counter()
        self._backwards = _backwards(pass_ for _, pass_ in timetable)
        last = timetable[-1][0]
        changes = [[0] * (last + 1) for _ in range(placement.num_devices)]
        for slot, (kind, stage) in timetable:
            device = placement.devices[stage]
            self._busy[device].update(range(slot, slot + SLOTS[kind]))
            changes[device][slot] = _CHANGE[kind]
        # Stage activations held after every slot.
        self._activations = [list(accumulate(device_changes)) for device_changes in changes]

    def earliest(self, pass_: Pass) -> int:
        """Return the first slot in which the inputs of the pass's next microbatch are complete.

        For F, I and B it is also not before the end of the same pass of the previous microbatch. The k-th W of a device
        only waits for the device's k-th I, whatever their stages.
        """
        kind, stage = pass_
        if kind is Kind.W:
            device = self._placement.devices[stage]
            return self._input_gradient_ends[device][self._weight_gradients[device]]
        place = len(self._ends[pass_])
        # Forwards and backwards of a stage have different orders. Only the step from a forward to its backward joins them.
        unit = place if kind is Kind.F else self._units.backward(place)
        inputs = [
            self._ends[needed][unit if needed.kind is Kind.F else place]
            for needed in _inputs(pass_, self._placement, self._backwards)
        ]
        return max([0, *self._ends[pass_][-1:], *inputs])

    def earliest_within(self, peak: int, pass_: Pass, earliest: int, slot: int) -> int:
        """Return the first slot from ``earliest`` on to which F can move from ``slot`` without exceeding ``peak``."""
        activations = self._activations[self._placement.devices[pass_.stage]]
        while slot > earliest and activations[slot - 1] < peak:
            slot -= 1
        return slot

    def first_idle(self, pass_: Pass, earliest: int, planned: int | None = None) -> int:
        """Return the first slot from ``earliest`` on at which the pass fits into idle slots.

        The slots that the pass has now, from ``planned`` on, count as idle.
        """
        busy, length = self._busy[self._placement.devices[pass_.stage]], SLOTS[pass_.kind]
        own = range(0) if planned is None else range(planned, planned + length)
        start = earliest
        while any(slot in busy and slot not in own for slot in range(start, start + length)):
            start += 1
        return start

    def place(self, pass_: Pass, planned: int, start: int) -> None:
        """Place a pass, for its next microbatch, at slot ``start`` and not at slot ``planned``."""
        device, length = self._placement.devices[pass_.stage], SLOTS[pass_.kind]
        if start != planned:
            self._busy[device].difference_update(range(planned, planned + length))
            self._busy[device].update(range(start, start + length))
            if change := _CHANGE[pass_.kind]:
                activations = self._activations[device]
                activations[start:planned] = [activation + change for activation in activations[start:planned]]
        self.placed.append((start, pass_))
        self._ends[pass_].append(start + length)
        if pass_.kind is Kind.I:
            insort(self._input_gradient_ends[device], start + length)
        self._weight_gradients[device] += pass_.kind is Kind.W

    def add_missing_weight_gradients(self) -> None:
        """Add a W for every I that has none, in the first idle slot after the I. ``squeeze`` sets the stages of W."""
        for device, ends in enumerate(self._input_gradient_ends):
            missing = Pass(Kind.W, self._placement.stages[device][0])
            for end in ends[self._weight_gradients[device] :]:
                start = self.first_idle(missing, end)
                self._busy[device].add(start)
                self.placed.append((start, missing))
