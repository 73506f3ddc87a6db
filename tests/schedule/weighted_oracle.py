"""A second opinion on microbatches that are not alike, written apart from the package's simulator on purpose.

It plays a step literally, one action after another: of the devices that can go on, the one that can soonest does. What every
action takes is looked up by its name, ``(kind, stage, unit)``, what its device holds is kept in a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_pipemem.schedule.schedule import Schedule
from tests.schedule import vocabulary_oracle

Event = tuple[str, int, int]


class Played(NamedTuple):
    """What a step came to: when every action of every device started and ended, and the most that it held."""

    spans: list[list[tuple[float, float]]]
    device_peaks: list[float]
    host_peaks: list[float]


def play(
    schedule: Schedule,
    seconds: Callable[[Event], float],
    message: Callable[[int], float],
    size: Callable[[int], float],
    kept: float = 0.0,
    dropped: float = 0.0,
    changes: Callable[[Event], float] | None = None,
) -> Played:
    """Run it.

    Args:
        schedule: a valid one.
        seconds: of an action, a copy or a collective (whose stage is -1).
        message: seconds of one message of a microbatch.
        size: what a stage's forward of a microbatch holds.
        kept: the part of that which a forward followed by R keeps.
        dropped: the part which a forward followed by RS leaves out.
        changes: in place of all this: by how much a pass changes what its device holds, in no round trip.
    """
    rows = [[(a.kind.value, a.stage, a.microbatch) for a in order] for order in schedule.orders]
    exists = {event for row in rows for event in row}
    again = {stage: kind for kind, stage, _ in exists if kind in ("R", "RS")}
    home = {event: device for device, row in enumerate(rows) for event in row}
    end: dict[Event, float] = {}
    vacant = [0.0] * len(rows)
    clock, at = [0.0] * len(rows), [0] * len(rows)
    spans: list[list[tuple[float, float]]] = [[] for _ in rows]
    held: list[dict[tuple[int, int], float]] = [{} for _ in rows]
    host: list[dict[tuple[int, int], float]] = [{} for _ in rows]
    peaks, host_peaks = [0.0] * len(rows), [0.0] * len(rows)
    channel = [(kind, -1, k) for kind, _, k in rows[0] if kind in vocabulary_oracle.COLLECTIVES]
    posted: dict[Event, list[float]] = {each: [] for each in channel}

    def serve() -> None:
        """Run the collectives that everybody has posted, in their order."""
        free = 0.0
        for each in channel:
            if len(posted[each]) < len(rows):
                return
            free = end[each] = max([free, *posted[each]]) + seconds(each)

    def earliest(device: int) -> float | None:
        if at[device] == len(rows[device]):
            return None
        event = rows[device][at[device]]
        start = clock[device]
        for needed in _needed(event, schedule, exists):
            if needed not in end:
                return None
            far = needed[1] >= 0 and home[needed] != device
            start = max(start, end[needed] + (message(needed[2]) if far else 0.0))
        return start

    while any(at[device] < len(row) for device, row in enumerate(rows)):
        serve()
        start, device = min((start, device) for device in range(len(rows)) if (start := earliest(device)) is not None)
        kind, stage, unit = event = rows[device][at[device]]
        key = (stage, unit)
        stop = start
        if kind in vocabulary_oracle.COLLECTIVES:
            posted[kind, -1, unit].append(start)
        elif kind in ("OFFLOAD", "RELOAD"):
            vacant[device] = end[event] = max(start, vacant[device]) + seconds(event)
            if kind == "OFFLOAD":
                host[device][key] = held[device][key]
            else:
                held[device][key] = host[device][key]
        elif kind.startswith("WAIT"):
            start = stop = max(start, end[kind.removeprefix("WAIT_"), stage, unit])
            end[event] = stop
            del (held if kind == "WAIT_OFFLOAD" else host)[device][key]
        else:
            stop = end[event] = start + seconds(event)
            if changes is not None:
                held[device][key] = held[device].get(key, 0.0) + changes(event)
            elif kind == "F":
                left = {"R": kept, "RS": 1 - dropped}.get(again.get(stage, ""), 1.0)
                held[device][key] = size(unit) * left
            elif kind in ("R", "RS"):
                held[device][key] = size(unit)
            elif kind in ("W", "B"):
                del held[device][key]
        clock[device] = stop
        spans[device].append((start, stop))
        at[device] += 1
        peaks[device] = max(peaks[device], sum(held[device].values()))
        host_peaks[device] = max(host_peaks[device], sum(host[device].values()))
    return Played(spans, peaks, host_peaks)


def _needed(event: Event, schedule: Schedule, exists: set[Event]) -> list[Event]:
    """All that ends before an action starts and does not stand before it on its own device anyway."""
    kind, stage, unit = event
    if schedule.vocabulary_barriers:
        computed, collected = vocabulary_oracle.inputs(event, schedule, exists)
        return [*computed, *((each, -1, k) for each, k in collected)]
    size, slices = schedule.num_stages // schedule.placement.replicas, schedule.slices
    if kind == "F":
        first = [("F", stage - 1, unit)] if stage % size else []
        return first + ([("F", stage, unit - 1)] if unit % slices else [])
    if kind in ("I", "B"):
        after = [(stage + 1, unit)] if stage % size < size - 1 else []
        after += [(stage, unit + 1)] if unit % slices < slices - 1 else []
        return [("I" if ("I", *each) in exists else "B", *each) for each in after]
    return []


class Tiny(NamedTuple):
    """A problem whose microbatches are not alike.

    Args:
        devices: the device of every stage.
        ticks: of F, I, W and B of a stage and a microbatch.
        message: ticks of a microbatch's message between two devices.
        changes: of what a device holds, after F, I and W of a stage and a microbatch; B changes it as I and W together.
        caps: the most every device may hold after any action; ``None`` is no limit.
        m: microbatches.
        splits: whether orders may have I and W.
        slices: of a sequence; what goes for a microbatch above goes for each of them, and ``m`` counts them all.
    """

    devices: tuple[int, ...]
    ticks: Callable[[int, int, int], int]
    message: Callable[[int], int]
    changes: Callable[[int, int, int], int]
    caps: tuple[float, ...] | None
    m: int
    splits: bool = True
    slices: int = 1


_F, _I, _W, _B = range(4)
Pass = tuple[int, int, int]


def shortest(tiny: Tiny) -> int | None:
    """The least makespan of all orders, whatever microbatch goes first; ``None`` when none keeps the caps.

    Of the ways to have run the same passes, those are kept that no other beats in all times that matter from there on.
    """
    stages, last = range(len(tiny.devices)), len(tiny.devices) - 1
    whole = frozenset((kind, stage, k) for kind in (_F, _I, _W) for stage in stages for k in range(tiny.m))
    kinds = (_F, _I, _W, _B) if tiny.splits else (_F, _B)
    idle = (0,) * (max(tiny.devices) + 1)
    layers: list[dict[frozenset[Pass], set]] = [{} for _ in range(len(whole) + 1)]
    layers[0] = {frozenset(): {(idle, ())}}

    def sources(kind: int, stage: int, k: int) -> list[Pass]:
        if kind == _F:
            attends = [(_F, stage, k - 1)] if k % tiny.slices else []
            return [(_F, stage - 1, k), *attends] if stage else attends
        if kind == _W:
            return [(_I, stage, k)]
        adds = [(_I, stage, k + 1)] if (k + 1) % tiny.slices else []
        return [(_F, stage, k), *adds, *([(_I, stage + 1, k)] if stage < last else [])]

    def awaited(done: frozenset[Pass]) -> list[Pass]:
        """What somebody on another device has still to use."""
        return sorted(
            each
            for each in done
            if each[0] != _W
            and 0 <= (user := each[1] + (1 if each[0] == _F else -1)) <= last
            and tiny.devices[user] != tiny.devices[each[1]]
            and (each[0], user, each[2]) not in done
        )

    for count, layer in enumerate(layers[:-1]):
        for done, ways in layer.items():
            known = awaited(done)
            for kind, stage, k in ((kind, s, k) for kind in kinds for s in stages for k in range(tiny.m)):
                new = {(_I, stage, k), (_W, stage, k)} if kind == _B else {(kind, stage, k)}
                needed = sources(_I if kind == _B else kind, stage, k)
                after = done | new
                if new & done or not all(each in done for each in needed) or not _keeps(tiny, after, stage):
                    continue
                coming, device = awaited(after), tiny.devices[stage]
                for free, times in _not_beaten(ways):
                    ends = dict(zip(known, times, strict=True))
                    arrivals = [ends[each] + tiny.message(k) for each in needed if tiny.devices[each[1]] != device]
                    now = max([free[device], *arrivals]) + tiny.ticks(kind, stage, k)
                    ends |= dict.fromkeys(new, now)
                    way = (*free[:device], now, *free[device + 1 :]), tuple(ends[each] for each in coming)
                    layers[count + len(new)].setdefault(after, set()).add(way)
        layer.clear()
    return min((max(free) for free, _ in layers[-1].get(whole, ())), default=None)


def _keeps(tiny: Tiny, done: frozenset[Pass], stage: int) -> bool:
    if tiny.caps is None:
        return True
    device = tiny.devices[stage]
    return sum(tiny.changes(*each) for each in done if tiny.devices[each[1]] == device) <= tiny.caps[device]


def _not_beaten(ways: set) -> list:
    kept: list = []
    for way in sorted(ways):
        times = (*way[0], *way[1])
        if not any(all(a <= b for a, b in zip((*other[0], *other[1]), times, strict=True)) for other in kept):
            kept.append(way)
    return kept
