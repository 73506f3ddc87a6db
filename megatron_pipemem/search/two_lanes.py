"""Search for orders with pairs, on devices with a lane for computing and a lane for the experts' exchanges.

A device runs *turns*, one after another: a forward, a backward, or a pair of two actions, which hides exchanges
(``Schedule.pairs``): an F with a backward, or two I.
A backward may be a B. Every other W has no turn. It runs where the device would wait for its next turn, or where the
memory that it frees is needed. So a move of one turn gives a complete order.

    device 0, turns:   F0   F1   (F2 B0)   (F3 B1)   B2   B3      (F2 B0): a pair
    device 0, order:   F0   F1   (F2 I0)   (F3 I1)  W0  I2  W1  I3  W2  W3      if its backwards are I

The search is simulated annealing: it moves, joins and splits turns, chiefly those on the critical path. It keeps a
change that makes the step shorter, or a little longer. With numba it tries a hundred times as many in the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.search.compiled import Array, as_machine_code

NONE = -1
_KINDS = (Kind.F, Kind.I, Kind.B, Kind.W)
_FORWARD, _INPUT, _WHOLE, _WEIGHT = range(4)
_REACH = 8
"""The most turns that one change passes."""
_IDLE_SHARE = 0.5
"""The share of a W's time that a device must wait for its next turn, if W is to run before it."""
_DRAWS = 5
"""The random numbers of one change: its turn, kind, distance and detail, and the delay that is accepted."""
_HOT, _COLD = 5e-3, 2e-4
"""The delay that is accepted with a chance of 1/e, at first and at last, as a share of a device's F."""
_MOST_WORK = 3e8
"""The most changes at effort 1, times the number of turns."""
_CHANGES_PER_TURN = 400
"""The most changes at effort 1, divided by the number of turns."""
_WORK_AT_ONCE = 1 << 20
"""The number of changes times that of turns between two looks at the clock."""


class Lanes(NamedTuple):
    """The prices of stages. F and I compute and exchange tokens, and W computes."""

    device: Array  # [stages]
    computing: Array  # [stages, 3]: seconds of F, I and W without exchanges
    exchange: Array  # [stages, 2]: seconds of F and I
    change: Array  # [stages, 4]: change of the device's memory by F, I, W and B
    lag: Array  # [stages, 2]: seconds of the messages that F and I wait for
    caps: Array  # [devices]


class Turns(NamedTuple):
    """The turns of all devices, as codes of their actions: ``(kind * stages + stage) * microbatches + microbatch``.

    A unit is ``stage * microbatches + microbatch``, and the kinds are those of ``_KINDS``.
    """

    codes: Array  # [devices, turns, 2]: the actions, or NONE for the second
    lengths: Array  # [devices]: the number of turns

    def copy(self) -> Turns:
        return Turns(*(array.copy() for array in self))


class TurnTimes(NamedTuple):
    """A simulated step of turns."""

    ends: Array  # [3, units]: of F, I or B, and W
    turn: Array  # [2, units]: the turn on its device that runs F, and the backward
    cause: Array  # [devices, turns]: the turn whose end starts this one, as ``device * turns + turn``, or NONE
    waiting: Array  # [devices, turns]: the units whose W have no turn, in running order
    place: Array  # [devices, turns]: the turn before which such a W runs

    @classmethod
    def of(cls, turns: Turns, units: int) -> TurnTimes:
        devices, most, _ = turns.codes.shape
        weights = devices, 2 * most
        integers = (np.zeros(size, dtype=np.int64) for size in ((2, units), (devices, most), weights, weights))
        return cls(np.zeros((3, units)), *integers)


@as_machine_code
def turn_seconds(lanes: Lanes, microbatches: int, first: int, second: int) -> float:
    """Return the seconds of a turn, as ``ActionPrices`` does."""
    stages = len(lanes.device)
    units = stages * microbatches
    computing = exchange = longest = 0.0
    for code in (first, second):
        if code < 0:
            continue
        kind, stage = code // units, code % units // microbatches
        computes = lanes.computing[stage, min(kind, _INPUT)]
        if kind == _WHOLE:
            computes += lanes.computing[stage, 2]
        exchanges = lanes.exchange[stage, min(kind, _INPUT)]
        if kind == _WHOLE and second < 0:  # an exchange hides its W
            return computes + exchanges - min(exchanges, lanes.computing[stage, 2]) / 2
        longest = max(longest, computes + exchanges)
        computing += computes
        exchange += exchanges
    if first >= units and second >= 0:  # two I
        begins, ends = first % units // microbatches, second % units // microbatches
        computing += lanes.exchange[begins, _INPUT] / 2
        exchange += lanes.computing[ends, _INPUT] / 2
    return max(longest, computing, exchange)


@as_machine_code
def simulated(lanes: Lanes, microbatches: int, turns: Turns, times: TurnTimes) -> float:
    """Fill ``times`` with the step of these turns, and return its seconds; -1 if it has a deadlock or exceeds a cap."""
    codes, lengths = turns
    ends, turn_of, causes, waiting, place = times
    devices, most, _ = codes.shape
    stages = len(lanes.device)
    units = stages * microbatches
    ends[:] = -1.0
    # Per device: turns that have run, W without a turn that have run, and those whose I has run.
    reached, begun, queued = np.zeros_like(lengths), np.zeros_like(lengths), np.zeros_like(lengths)
    free, level = np.zeros(devices), np.zeros(devices)  # seconds, and memory
    # Devices whose next turn may be ready. Each runs as many turns as it can.
    stack, is_stacked, height = np.arange(devices), np.ones(devices, dtype=np.bool_), devices
    while height:
        height -= 1
        d = stack[height]
        is_stacked[d] = False
        while reached[d] < lengths[d]:
            p = reached[d]
            first, second = codes[d, p, 0], codes[d, p, 1]
            # When the last input arrives, and the turn that makes it. A function of its own would take twice as long.
            is_ready, start, cause, taken, due = True, 0.0, NONE, 0.0, begun[d]
            for code in (first, second):
                if code < 0:
                    continue
                kind, unit = code // units, code % units
                stage = unit // microbatches
                change = lanes.change[stage, kind]
                if change > 0:
                    taken += change
                is_forward = kind == _FORWARD
                row = 0 if is_forward else 1
                # The first action of a pair may be of the microbatch before.
                if unit % microbatches and ends[row, unit - 1] < 0 and (code != second or first != code - 1):
                    is_ready = False
                    break
                if is_forward:
                    if stage:
                        needed = unit - microbatches
                        if ends[0, needed] < 0:
                            is_ready = False
                            break
                        arrival = ends[0, needed] + lanes.lag[stage, 0]
                        if arrival > start:
                            start, cause = arrival, lanes.device[stage - 1] * most + turn_of[0, needed]
                    continue
                if ends[0, unit] < 0:
                    is_ready = False
                    break
                if ends[0, unit] > start:
                    start, cause = ends[0, unit], d * most + turn_of[0, unit]
                if stage < stages - 1:
                    needed = unit + microbatches
                    if ends[1, needed] < 0:
                        is_ready = False
                        break
                    arrival = ends[1, needed] + lanes.lag[stage, 1]
                    if arrival > start:
                        start, cause = arrival, lanes.device[stage + 1] * most + turn_of[1, needed]
                # All W of a stage run in the order of microbatches: with this one in a B, the earlier ones must have run.
                if kind == _WHOLE:
                    latest = queued[d]
                    while latest > due and waiting[d, latest - 1] // microbatches != stage:
                        latest -= 1
                    due = max(due, latest)
            if not is_ready:
                break
            while begun[d] < queued[d]:
                w = waiting[d, begun[d]]
                stage = w // microbatches
                lacks = taken > 0 and level[d] + taken > lanes.caps[d]
                if begun[d] >= due and not lacks and start - free[d] < _IDLE_SHARE * lanes.computing[stage, 2]:
                    break
                free[d] += lanes.computing[stage, 2]
                level[d] += lanes.change[stage, _WEIGHT]
                ends[2, w] = free[d]
                place[d, begun[d]] = p
                begun[d] += 1
            if free[d] >= start:
                start, cause = free[d], d * most + p - 1 if p else NONE
            end = start + turn_seconds(lanes, microbatches, first, second)
            free[d], causes[d, p] = end, cause
            reached[d] += 1
            for code in (first, second):
                if code < 0:
                    continue
                kind, unit = code // units, code % units
                stage = unit // microbatches
                level[d] += lanes.change[stage, kind]
                if level[d] > lanes.caps[d]:
                    return -1.0
                row = 0 if kind == _FORWARD else 1
                ends[row, unit], turn_of[row, unit] = end, p
                if kind == _INPUT:
                    waiting[d, queued[d]] = unit
                    queued[d] += 1
                elif kind == _WHOLE:
                    ends[2, unit] = end
                consumer = stage + 1 if kind == _FORWARD else stage - 1
                if 0 <= consumer < stages:
                    neighbour = lanes.device[consumer]
                    if neighbour != d and not is_stacked[neighbour]:
                        stack[height], is_stacked[neighbour] = neighbour, True
                        height += 1
    for d in range(devices):
        if reached[d] < lengths[d]:
            return -1.0
        for at in range(begun[d], queued[d]):
            stage = waiting[d, at] // microbatches
            free[d] += lanes.computing[stage, 2]
            ends[2, waiting[d, at]] = free[d]
            place[d, at] = lengths[d]
    return free.max()


@as_machine_code
def critical_path(turns: Turns, times: TurnTimes, path: Array) -> int:
    """Write the critical path into ``path``, as ``device * turns + turn``, with NONE after it. Return its length.

    It begins with the last turn of the device that ends last.
    """
    devices, most, _ = turns.codes.shape
    units = times.ends.shape[1]
    latest, at = -1.0, NONE
    for d in range(devices):
        for p in range(turns.lengths[d]):
            for code in turns.codes[d, p]:
                if code >= 0:
                    end = times.ends[0 if code < units else 2, code % units]
                    if end > latest:
                        latest, at = end, d * most + turns.lengths[d] - 1
    length = 0
    while at >= 0:
        path[length] = at
        length += 1
        at = times.cause[at // most, at % most]
    path[length] = NONE
    return length


@as_machine_code
def place_turn(turns: Turns, d: int, turn: int, first: int, second: int) -> None:
    """Insert a turn before number ``turn`` of device ``d``."""
    for other in range(turns.lengths[d], turn, -1):
        turns.codes[d, other] = turns.codes[d, other - 1]
    turns.codes[d, turn, 0], turns.codes[d, turn, 1] = first, second
    turns.lengths[d] += 1


@as_machine_code
def drop_turn(turns: Turns, d: int, turn: int) -> None:
    """Remove number ``turn`` of the turns of device ``d``."""
    for other in range(turn, turns.lengths[d] - 1):
        turns.codes[d, other] = turns.codes[d, other + 1]
    turns.lengths[d] -= 1


@as_machine_code
def may_join(first: int, second: int, units: int) -> bool:
    """Return whether two actions may be a pair: an F and a backward of another unit, or two I."""
    if first < 0:
        return False
    if first < units:
        return second >= units and second % units != first
    return first < 2 * units and units <= second < 2 * units


@as_machine_code
def change_turn(turns: Turns, units: int, d: int, turn: int, kind: float, distance: float, detail: float) -> bool:
    """Move number ``turn`` of the turns of device ``d``, split it, or join it; return whether that could be done.

    ``kind``, ``distance`` and ``detail`` are random numbers from 0 to 1. A ``distance`` below 0.5 leads to later turns.
    """
    count, codes = turns.lengths[d], turns.codes
    first, second = codes[d, turn]
    step = 1 if distance < 0.5 else -1
    reach = 1 + int(distance * 2 % 1 * _REACH)
    if kind < 0.4:  # move
        other = turn + step * reach
        if not 0 <= other < count:
            return False
        drop_turn(turns, d, turn)
        place_turn(turns, d, other, first, second)
        return True
    if kind > 0.85 and second < 0 or 0.7 < kind < 0.8 and first < units:  # B in place of I, or I in place of B
        which = 0 if second < 0 else 1
        code = codes[d, turn, which]
        codes[d, turn, which] = code - units if code >= _WHOLE * units else code + units
        return code >= units
    if second < 0:  # join
        other, a, b = turn, NONE, NONE
        while reach and not may_join(a, b, units):
            other += step
            reach -= 1
            if not 0 <= other < count:
                return False
            if codes[d, other, 1] >= 0:
                continue
            a, b = (first, codes[d, other, 0]) if step > 0 else (codes[d, other, 0], first)
            if b < units:
                a, b = b, a
            if a >= units:  # two I
                a, b = units + a % units, units + b % units
            elif b >= units and detail * 2 % 1 < 0.5:
                b = b - units if b >= _WHOLE * units else b + units
        if not may_join(a, b, units):
            return False
        at, dropped = (turn, other) if detail < 0.5 else (other, turn)
        codes[d, at, 0], codes[d, at, 1] = a, b
        drop_turn(turns, d, dropped)
        return True
    if kind < 0.7:  # split
        if int(detail * 6) % 2:
            first, second = second, first
        codes[d, turn, 0], codes[d, turn, 1] = second, NONE
        place_turn(turns, d, min(turn + int(detail * 3), count), first, NONE)
        return True
    other = turn + reach  # exchange the first or second actions of two pairs
    if other >= count or codes[d, other, 1] < 0:
        return False
    which = int(detail * 16) % 2
    codes[d, turn, which], codes[d, other, which] = codes[d, other, which], codes[d, turn, which]
    return may_join(codes[d, turn, 0], codes[d, turn, 1], units) and may_join(
        codes[d, other, 0], codes[d, other, 1], units
    )


@as_machine_code
def anneal(
    lanes: Lanes,
    microbatches: int,
    turns: Turns,
    best: Turns,
    times: TurnTimes,
    path: Array,
    seconds: Array,
    heat: Array,
    draws: Array,
) -> None:
    """Try a change for every row of ``draws``, with the accepted delay in ``heat``.

    ``turns`` is the present order, with its critical path, which ends with NONE. ``best`` is the fastest order so far.
    ``seconds`` has the makespans of both.
    """
    devices, most, _ = turns.codes.shape
    units = times.ends.shape[1]
    length = 0
    while path[length] >= 0:
        length += 1
    for number in range(len(draws)):
        chosen, kind, distance, detail, luck = draws[number]
        if chosen < 0.8:
            at = path[int(chosen / 0.8 * length)]
            d, turn = at // most, at % most
        else:  # any turn
            device = (chosen - 0.8) * 5 * devices
            d = int(device)
            turn = int(device % 1 * turns.lengths[d])
        length_before = turns.lengths[d]
        before = turns.codes[d].copy()
        after = -1.0
        if turn < length_before and change_turn(turns, units, d, turn, kind, distance, detail):
            after = simulated(lanes, microbatches, turns, times)
        if after < 0 or after - seconds[0] > -np.log(luck) * heat[number]:
            turns.lengths[d] = length_before
            turns.codes[d] = before
            continue
        seconds[0], length = after, critical_path(turns, times, path)
        if after < seconds[1]:
            seconds[1] = after
            best.codes[:], best.lengths[:] = turns.codes, turns.lengths


def lanes_of(schedule: Schedule, costs: Costs, caps: Sequence[float] | None) -> Lanes:
    """Return the prices of a schedule's stages. ``caps`` are in activation units, or in the unit of ``Costs.memory``."""
    placement = schedule.placement
    devices, stages = placement.devices, range(placement.num_stages)
    seconds, memory = costs.seconds(placement), costs.memory_changes(placement)
    apart = costs.exchange_seconds(placement)
    exchange = np.array([[min(apart[k][s], seconds[k][s]) for k in (Kind.F, Kind.I)] for s in stages])
    computing = np.array([[seconds[k][s] for k in (Kind.F, Kind.I, Kind.W)] for s in stages])
    computing[:, :2] -= exchange
    change = [[memory[k][s] if k in memory else 0.0 for k in _KINDS] for s in stages]
    neighbours = [(max(s - 1, 0), min(s + 1, placement.num_stages - 1)) for s in stages]
    lag = [[costs.link_seconds(devices[other], devices[s]) for other in neighbours[s]] for s in stages]
    unit = costs.memory_unit(placement)
    limits = [np.inf] * placement.num_devices if caps is None else [loosened(cap / unit) for cap in caps]
    return Lanes(np.array(devices), computing, exchange, np.array(change, dtype=float), np.array(lag), np.array(limits))


def turns_of(schedule: Schedule) -> Turns:
    """Return the forwards, backwards and pairs of a schedule, per device in running order. Its W are left out."""
    m, devices = schedule.num_microbatches, schedule.num_devices
    stages = schedule.placement.num_stages
    most = max(sum(action.kind is not Kind.W for action in order) for order in schedule.orders)
    codes, lengths = np.full((devices, most + 1, 2), NONE), np.zeros(devices, dtype=np.int64)
    for d, order in enumerate(schedule.orders):
        is_second = False
        for action in order:
            if action.kind is Kind.W:
                continue
            codes[d, lengths[d] - is_second, int(is_second)] = (
                _KINDS.index(action.kind) * stages + action.stage
            ) * m + (action.microbatch or 0)
            lengths[d] += not is_second
            is_second = action in schedule.pairs
    return Turns(codes, lengths)


def with_joined_backwards(turns: Turns, microbatches: int, units: int, splits: bool) -> Turns:
    """Return the turns with pairs of neighbouring backwards of one stage, which become I; with ``splits``, all do.

    Where no forward is left, only another backward can hide the exchanges of a backward.
    """

    def of_device(row: list[list[int]]) -> Iterator[list[int]]:
        coming = deque(row)
        while coming:
            first, second = coming.popleft()
            following = coming[0] if coming else [NONE, NONE]
            are_backwards = second == following[1] == NONE and min(first, following[0]) >= units
            joins = are_backwards and first % units // microbatches == following[0] % units // microbatches
            if joins:
                second = coming.popleft()[0]
            yield [code - units if code >= _WHOLE * units and (joins or splits) else code for code in (first, second)]

    joined = Turns(np.full_like(turns.codes, NONE), np.zeros_like(turns.lengths))
    for d, count in enumerate(turns.lengths):
        row = list(of_device(turns.codes[d, :count].tolist()))
        joined.lengths[d] = len(row)
        joined.codes[d, : len(row)] = row
    return joined


def schedule_of(schedule: Schedule, turns: Turns, times: TurnTimes) -> Schedule:
    """Return a copy of the schedule with the orders and pairs of these turns."""
    m, pairs = schedule.num_microbatches, set[Action]()
    units = schedule.placement.num_stages * m

    def action_of(code: int) -> Action:
        return Action(_KINDS[code // units], *divmod(code % units, m))

    def order_of(d: int) -> Order:
        order, count = list[Action](), turns.lengths[d]
        codes = turns.codes[d, :count].tolist()
        num_weights = sum(code // units == _INPUT for turn in codes for code in turn)
        weights = deque(zip(times.place[d, :num_weights], times.waiting[d, :num_weights].tolist(), strict=True))
        for p, (first, second) in enumerate(codes):
            while weights and weights[0][0] == p:
                order.append(Action(Kind.W, *divmod(weights.popleft()[1], m)))
            order.append(action_of(first))
            if second >= 0:
                pairs.add(order[-1])
                order.append(action_of(second))
        return (*order, *(Action(Kind.W, *divmod(unit, m)) for _, unit in weights))

    orders = tuple(map(order_of, range(schedule.num_devices)))
    return replace(schedule, name=AUTO, orders=orders, pairs=frozenset(pairs))


def improved(
    schedule: Schedule,
    costs: Costs,
    caps: Sequence[float] | None,
    seconds: float,
    effort: float = 1.0,
    seed: int = 0,
) -> Schedule:
    """Return a faster schedule with pairs, searched for from this one; the schedule itself if it exceeds the caps.

    Its microbatches are whole and alike, and its placement has one replica. With effort 0 only W move, and backwards become
    pairs if that is faster; the result may be slower. The search ends after ``seconds`` of this thread's processor time, or
    earlier. ``caps`` are those of ``lanes_of``.
    """
    lanes, m = lanes_of(schedule, costs, caps), schedule.num_microbatches
    units = m * schedule.placement.num_stages
    turns = turns_of(schedule)
    times = TurnTimes.of(turns, units)
    starts = [turns, *(with_joined_backwards(turns, m, units, splits) for splits in (False, True))]
    steps = [(makespan, start) for start in starts if (makespan := simulated(lanes, m, start, times)) >= 0]
    if not steps:
        return schedule
    makespan, turns = min(steps, key=itemgetter(0))
    simulated(lanes, m, turns, times)
    best, makespans = turns.copy(), np.array([makespan, makespan])
    forward_seconds = float(lanes.computing[:, 0].sum() + lanes.exchange[:, 0].sum()) / schedule.num_devices
    num_turns = int(turns.lengths.sum())
    changes = int(effort * min(_MOST_WORK / num_turns, _CHANGES_PER_TURN * num_turns))
    is_compiled = hasattr(anneal, "py_func")
    at_once = max(1, _WORK_AT_ONCE // num_turns) if is_compiled else 1
    rng = np.random.default_rng(seed)
    path = np.full(turns.codes.size + 1, NONE)
    critical_path(turns, times, path)
    if changes:  # compiled outside of the time limit
        anneal(lanes, m, turns, best, times, path, makespans, np.zeros(0), np.zeros((0, _DRAWS)))
    begin = time.thread_time()
    for first in range(0, changes, at_once):
        elapsed = time.thread_time() - begin
        if elapsed >= seconds:
            break
        # From 0 to 1, by the changes or by the time.
        progress = np.maximum((first + np.arange(min(at_once, changes - first))) / changes, elapsed / seconds)
        heat = forward_seconds * _HOT * (_COLD / _HOT) ** progress
        draws = 1 - rng.random((len(progress), _DRAWS))
        anneal(lanes, m, turns, best, times, path, makespans, heat, draws)
    simulated(lanes, m, best, times)
    return schedule_of(schedule, best, times)
