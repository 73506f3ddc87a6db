"""Search for orders with pairs, on devices with a lane for computing and a lane for the experts' exchanges.

A device runs *turns*, one after another: a forward, a backward, or a pair of both, which hides exchanges (``Schedule.pairs``).
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
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.search.compiled import Array, as_machine_code

NONE = -1
_FORWARD, _BACKWARD, _WEIGHT, _WHOLE = range(4)
_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
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
    """The turns of all devices. A unit is ``stage * microbatches + microbatch``."""

    forward: Array  # [devices, turns]: the unit whose F runs, or NONE
    backward: Array  # [devices, turns]: the unit whose I or B runs, or NONE
    is_whole: Array  # [devices, turns]: whether the backward is a B
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
        shape = turns.forward.shape
        integers = (np.zeros(size, dtype=np.int64) for size in ((2, units), shape, shape, shape))
        return cls(np.zeros((3, units)), *integers)


@as_machine_code
def pair_seconds(lanes: Lanes, microbatches: int, forward: int, backward: int, is_whole: bool) -> float:
    """Return the seconds of a turn, as ``ActionPrices`` does."""
    computing = exchange = first = second = 0.0
    if forward >= 0:
        stage = forward // microbatches
        computing, exchange = lanes.computing[stage, 0], lanes.exchange[stage, 0]
        first = computing + exchange
    if backward >= 0:
        stage = backward // microbatches
        computes = lanes.computing[stage, 1] + (lanes.computing[stage, 2] if is_whole else 0.0)
        second = computes + lanes.exchange[stage, 1]
        if is_whole and forward < 0:  # an exchange hides its W
            return second - min(lanes.exchange[stage, 1], lanes.computing[stage, 2]) / 2
        computing += computes
        exchange += lanes.exchange[stage, 1]
    return max(first, second, computing, exchange)


@as_machine_code
def simulated(lanes: Lanes, microbatches: int, turns: Turns, times: TurnTimes) -> float:
    """Fill ``times`` with the step of these turns, and return its seconds; -1 if it has a deadlock or exceeds a cap."""
    forward, backward, is_whole, lengths = turns
    ends, turn_of, causes, waiting, place = times
    devices, most = forward.shape
    stages = len(lanes.device)
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
            f, b, is_b = forward[d, p], backward[d, p], is_whole[d, p]
            # When the last input arrives, and the turn that makes it. A function of its own would take twice as long.
            is_ready, start, cause = True, 0.0, NONE
            if f >= 0:
                stage = f // microbatches
                if f % microbatches:
                    is_ready = ends[0, f - 1] >= 0
                if stage and is_ready:
                    needed = f - microbatches
                    is_ready = ends[0, needed] >= 0
                    start = ends[0, needed] + lanes.lag[stage, 0]
                    cause = lanes.device[stage - 1] * most + turn_of[0, needed]
            if b >= 0 and is_ready:
                stage = b // microbatches
                is_ready = ends[0, b] >= 0 and (b % microbatches == 0 or ends[1, b - 1] >= 0)
                if ends[0, b] > start:
                    start, cause = ends[0, b], d * most + turn_of[0, b]
                if stage < stages - 1 and is_ready:
                    needed = b + microbatches
                    is_ready = ends[1, needed] >= 0
                    arrival = ends[1, needed] + lanes.lag[stage, 1]
                    if arrival > start:
                        start, cause = arrival, lanes.device[stage + 1] * most + turn_of[1, needed]
            if not is_ready:
                break
            # All W of a stage run in the order of microbatches: with this one in a B, the earlier ones must have run.
            due = begun[d]
            if b >= 0 and is_b:
                due = queued[d]
                while due > begun[d] and waiting[d, due - 1] // microbatches != b // microbatches:
                    due -= 1
            while begun[d] < queued[d]:
                w = waiting[d, begun[d]]
                stage = w // microbatches
                lacks = f >= 0 and level[d] + lanes.change[f // microbatches, 0] > lanes.caps[d]
                if begun[d] >= due and not lacks and start - free[d] < _IDLE_SHARE * lanes.computing[stage, 2]:
                    break
                free[d] += lanes.computing[stage, 2]
                level[d] += lanes.change[stage, 2]
                ends[2, w] = free[d]
                place[d, begun[d]] = p
                begun[d] += 1
            if free[d] >= start:
                start, cause = free[d], d * most + p - 1 if p else NONE
            if f >= 0:
                level[d] += lanes.change[f // microbatches, 0]
                if level[d] > lanes.caps[d]:
                    return -1.0
            if b >= 0:
                level[d] += lanes.change[b // microbatches, 3 if is_b else 1]
                if level[d] > lanes.caps[d]:
                    return -1.0
                if not is_b:
                    waiting[d, queued[d]] = b
                    queued[d] += 1
            end = start + pair_seconds(lanes, microbatches, f, b, is_b)
            free[d], causes[d, p] = end, cause
            reached[d] += 1
            for kind in range(2):
                unit = f if kind == 0 else b
                if unit < 0:
                    continue
                ends[kind, unit], turn_of[kind, unit] = end, p
                if kind == 1 and is_b:
                    ends[2, unit] = end
                consumer = unit // microbatches + (1 if kind == 0 else -1)
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
    devices, most = turns.forward.shape
    latest, at = -1.0, NONE
    for d in range(devices):
        for p in range(turns.lengths[d]):
            b, f = turns.backward[d, p], turns.forward[d, p]
            end = times.ends[2, b] if b >= 0 else times.ends[0, f]
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
def place_turn(turns: Turns, d: int, turn: int, forward: int, backward: int, is_whole: bool) -> None:
    """Insert a turn before number ``turn`` of device ``d``."""
    for other in range(turns.lengths[d], turn, -1):
        turns.forward[d, other], turns.backward[d, other] = turns.forward[d, other - 1], turns.backward[d, other - 1]
        turns.is_whole[d, other] = turns.is_whole[d, other - 1]
    turns.forward[d, turn], turns.backward[d, turn], turns.is_whole[d, turn] = forward, backward, is_whole
    turns.lengths[d] += 1


@as_machine_code
def drop_turn(turns: Turns, d: int, turn: int) -> None:
    """Remove number ``turn`` of the turns of device ``d``."""
    for other in range(turn, turns.lengths[d] - 1):
        turns.forward[d, other], turns.backward[d, other] = turns.forward[d, other + 1], turns.backward[d, other + 1]
        turns.is_whole[d, other] = turns.is_whole[d, other + 1]
    turns.lengths[d] -= 1


@as_machine_code
def change_turn(turns: Turns, d: int, turn: int, kind: float, distance: float, detail: float) -> bool:
    """Move number ``turn`` of the turns of device ``d``, split it, or join it; return whether that could be done.

    ``kind``, ``distance`` and ``detail`` are random numbers from 0 to 1. A ``distance`` below 0.5 leads to later turns.
    """
    count = turns.lengths[d]
    f, b, is_b = turns.forward[d, turn], turns.backward[d, turn], turns.is_whole[d, turn]
    step = 1 if distance < 0.5 else -1
    reach = 1 + int(distance * 2 % 1 * _REACH)
    if kind < 0.4:  # move
        other = turn + step * reach
        if not 0 <= other < count:
            return False
        drop_turn(turns, d, turn)
        place_turn(turns, d, other, f, b, is_b)
        return True
    if kind > 0.85 and f < 0:  # B in place of I, or I in place of B
        turns.is_whole[d, turn] = not is_b
        return True
    if f < 0 or b < 0:  # join
        other = turn + step
        while 0 <= other < count and reach and (turns.forward[d, other] if f >= 0 else turns.backward[d, other]) >= 0:
            other += step
            reach -= 1
        if not (0 <= other < count and reach):
            return False
        forward, backward = max(f, turns.forward[d, other]), max(b, turns.backward[d, other])
        if forward == backward:
            return False
        at, dropped = (turn, other) if detail < 0.5 else (other, turn)
        turns.forward[d, at], turns.backward[d, at] = forward, backward
        turns.is_whole[d, at] = detail * 2 % 1 < 0.5
        drop_turn(turns, d, dropped)
        return True
    if kind < 0.7:  # split
        turns.forward[d, turn] = NONE
        place_turn(turns, d, min(turn + int(detail * 3), count), f, NONE, False)
        return True
    if kind < 0.85:
        turns.is_whole[d, turn] = not is_b
        return True
    other = turn + 1  # exchange the forwards of two neighbours
    if other == count or turns.backward[d, other] in (NONE, f) or turns.forward[d, other] in (NONE, b):
        return False
    turns.forward[d, turn], turns.forward[d, other] = turns.forward[d, other], f
    return True


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
    devices, most = turns.forward.shape
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
        forward, backward, is_whole = turns.forward[d].copy(), turns.backward[d].copy(), turns.is_whole[d].copy()
        after = -1.0
        if turn < length_before and change_turn(turns, d, turn, kind, distance, detail):
            after = simulated(lanes, microbatches, turns, times)
        if after < 0 or after - seconds[0] > -np.log(luck) * heat[number]:
            turns.lengths[d] = length_before
            turns.forward[d], turns.backward[d], turns.is_whole[d] = forward, backward, is_whole
            continue
        seconds[0], length = after, critical_path(turns, times, path)
        if after < seconds[1]:
            seconds[1] = after
            best.forward[:], best.backward[:] = turns.forward, turns.backward
            best.is_whole[:], best.lengths[:] = turns.is_whole, turns.lengths


def lanes_of(schedule: Schedule, costs: Costs, caps: Sequence[float] | None) -> Lanes:
    """Return the prices of a schedule's stages. ``caps`` are in activation units, or in the unit of ``Costs.memory``."""
    placement = schedule.placement
    devices, stages = placement.devices, range(placement.num_stages)
    seconds, memory = costs.seconds(placement), costs.memory_changes(placement)
    apart = costs.exchange_seconds(placement)
    exchange = np.array([[min(apart[k][s], seconds[k][s]) for k in (Kind.F, Kind.I)] for s in stages])
    computing = np.array([[seconds[k][s] for k in _KINDS[:3]] for s in stages])
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
    most = max(sum(action.kind is not Kind.W for action in order) for order in schedule.orders)
    forward, backward = np.full((2, devices, most + 1), NONE)
    is_whole, lengths = np.zeros(forward.shape, dtype=bool), np.zeros(devices, dtype=np.int64)
    for d, order in enumerate(schedule.orders):
        is_second = False
        for action in order:
            if action.kind is Kind.W:
                continue
            unit = action.stage * m + (action.microbatch or 0)
            at = lengths[d] - is_second
            if action.kind is Kind.F:
                forward[d, at] = unit
            else:
                backward[d, at], is_whole[d, at] = unit, action.kind is Kind.B
            lengths[d] = at + 1
            is_second = action in schedule.pairs
    return Turns(forward, backward, is_whole, lengths)


def schedule_of(schedule: Schedule, turns: Turns, times: TurnTimes) -> Schedule:
    """Return a copy of the schedule with the orders and pairs of these turns."""
    m, pairs = schedule.num_microbatches, set[Action]()

    def order_of(d: int) -> Order:
        order, count = list[Action](), turns.lengths[d]
        num_weights = int(((turns.backward[d] >= 0) & ~turns.is_whole[d])[:count].sum())
        weights = deque(zip(times.place[d, :num_weights], times.waiting[d, :num_weights].tolist(), strict=True))
        for p in range(count):
            while weights and weights[0][0] == p:
                order.append(Action(Kind.W, *divmod(weights.popleft()[1], m)))
            f, b = int(turns.forward[d, p]), int(turns.backward[d, p])
            if f >= 0:
                forward = Action(Kind.F, *divmod(f, m))
                order.append(forward)
                if b >= 0:
                    pairs.add(forward)
            if b >= 0:
                order.append(Action(Kind.B if turns.is_whole[d, p] else Kind.I, *divmod(b, m)))
        return (*order, *(Action(Kind.W, *divmod(unit, m)) for _, unit in weights))

    orders = tuple(map(order_of, range(schedule.num_devices)))
    return replace(schedule, name=AUTO, orders=orders, pairs=frozenset(pairs))


def improved(
    schedule: Schedule, costs: Costs, caps: Sequence[float] | None, seconds: float, effort: float = 1.0, seed: int = 0
) -> Schedule:
    """Return a faster schedule with pairs, searched for from this one; the schedule itself if it exceeds the caps.

    Its microbatches are whole and alike, and its placement has one replica. With effort 0 only W move, and the result may be
    slower. The search ends after ``seconds`` of this thread's processor time, or earlier. ``caps`` are those of ``lanes_of``.
    """
    lanes, m = lanes_of(schedule, costs, caps), schedule.num_microbatches
    turns = turns_of(schedule)
    times = TurnTimes.of(turns, m * schedule.placement.num_stages)
    makespan = simulated(lanes, m, turns, times)
    if makespan < 0:
        return schedule
    best, makespans = turns.copy(), np.array([makespan, makespan])
    forward_seconds = float(lanes.computing[:, 0].sum() + lanes.exchange[:, 0].sum()) / schedule.num_devices
    num_turns = int(turns.lengths.sum())
    changes = int(effort * min(_MOST_WORK / num_turns, _CHANGES_PER_TURN * num_turns))
    is_compiled = hasattr(anneal, "py_func")
    at_once = max(1, _WORK_AT_ONCE // num_turns) if is_compiled else 1
    rng = np.random.default_rng(seed)
    path = np.full(turns.forward.size + 1, NONE)
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
