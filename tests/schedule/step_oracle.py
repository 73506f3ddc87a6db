"""A second opinion on the times and memory of a step, written apart from the package's simulator on purpose.

It plays a step literally, one action after another: the next action is that of the device that can go on soonest. Seconds of
an action are looked up by its name, ``(kind, stage, unit)``. A dictionary has the bytes that each device holds. Microbatches
need not be alike, and activations may leave their device, run again, or meet vocabulary passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

import vocabulary_oracle

from megatron_pipemem.schedule.schedule import Schedule

Event = tuple[str, int, int]


class Played(NamedTuple):
    """The result of a step: start and end of every action by device, the peak of each device, and the copies."""

    spans: list[list[tuple[float, float]]]
    device_peaks: list[float]
    host_peaks: list[float]
    copies: list[list[tuple[str, float, float]]]
    waited: list[float]  # for copies

    @property
    def makespan(self) -> float:
        used = [spans for spans in self.spans if spans]
        return max(spans[-1][1] for spans in used) - min(spans[0][0] for spans in used)


def play(
    schedule: Schedule,
    seconds: Callable[[Event], float],
    message: Callable[[int], float],
    size: Callable[[int], float],
    dropped: float = 0.0,
    changes: Callable[[Event], float] | None = None,
    lane: Callable[[int, str], Hashable] = lambda device, kind: device,
) -> Played:
    """Run it.

    Args:
        schedule: a valid one.
        seconds: of an action, a copy or a collective (whose stage is -1).
        message: seconds of one message of a microbatch.
        size: the memory that a stage's forward of a microbatch holds.
        dropped: the part of ``size`` that a forward followed by RS leaves out. One followed by R leaves out all of it.
        changes: in place of sizes: the change of the device's memory by a pass. There are no round trips then.
        lane: copies with the same lane, given their device and kind, run one after the other.
    """
    rows = [[(a.kind.value, a.stage, a.microbatch) for a in order] for order in schedule.orders]
    exists = {event for row in rows for event in row}
    again = {stage: kind for kind, stage, _ in exists if kind in ("R", "RS")}
    home = {event: device for device, row in enumerate(rows) for event in row}
    end: dict[Event, float] = {}
    vacant: dict[Hashable, float] = {}
    copies: list[list[tuple[str, float, float]]] = [[] for _ in rows]
    waited = [0.0] * len(rows)
    clock, at = [0.0] * len(rows), [0] * len(rows)
    spans: list[list[tuple[float, float]]] = [[] for _ in rows]
    held: list[dict[tuple[int, int], float]] = [{} for _ in rows]
    host: list[dict[tuple[int, int], float]] = [{} for _ in rows]
    peaks, host_peaks = [0.0] * len(rows), [0.0] * len(rows)
    channel = [(kind, -1, k) for kind, _, k in rows[0] if kind in vocabulary_oracle.COLLECTIVES]
    posted: dict[Event, list[float]] = {message: [] for message in channel}
    free, waiting = 0.0, deque(channel)

    def serve() -> None:
        """Run the collectives that everybody has posted, in their order."""
        nonlocal free
        while waiting and len(posted[waiting[0]]) == len(rows):
            message = waiting.popleft()
            free = end[message] = max([free, *posted[message]]) + seconds(message)

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
            begin = max(start, vacant.get(lane(device, kind), 0.0))
            vacant[lane(device, kind)] = end[event] = begin + seconds(event)
            copies[device].append((f"{stage}{kind}{unit}", begin, end[event]))
            if kind == "OFFLOAD":
                host[device][key] = held[device][key]
            else:
                held[device][key] = host[device][key]
        elif kind.startswith("WAIT"):
            stop = end[event] = max(start, end[kind.removeprefix("WAIT_"), stage, unit])
            waited[device] += stop - start
            start = stop
            del (held if kind == "WAIT_OFFLOAD" else host)[device][key]
        else:
            stop = end[event] = start + seconds(event)
            if changes is not None:
                held[device][key] = held[device].get(key, 0.0) + changes(event)
            elif kind == "F":
                left = {"R": 0.0, "RS": 1 - dropped}.get(again.get(stage, ""), 1.0)
                held[device][key] = size(unit) * left
            elif kind in ("R", "RS"):
                held[device][key] = size(unit)
            if changes is None and kind in ("I", "B"):
                assert held[device][key] == size(unit), f"{event} does not find all that it needs"
            if changes is None and kind in ("W", "B"):
                del held[device][key]
        clock[device] = stop
        spans[device].append((start, stop))
        at[device] += 1
        peaks[device] = max(peaks[device], sum(held[device].values()))
        host_peaks[device] = max(host_peaks[device], sum(host[device].values()))
    return Played(spans, peaks, host_peaks, copies, waited)


def _needed(event: Event, schedule: Schedule, exists: set[Event]) -> list[Event]:
    """All that ends before an action starts and does not stand before it on its own device anyway."""
    kind, stage, unit = event
    if schedule.vocabulary_barriers:
        computed, collected = vocabulary_oracle.inputs(event, schedule, exists)
        return [*computed, *((gradient, -1, k) for gradient, k in collected)]
    size, slices = schedule.num_stages // schedule.placement.replicas, schedule.units.parts
    if kind == "F":
        first = [("F", stage - 1, unit)] if stage % size else []
        return first + ([("F", stage, unit - 1)] if unit % slices else [])
    if kind in ("I", "B"):
        after = [(stage + 1, unit)] if stage % size < size - 1 else []
        after += [(stage, unit + 1)] if unit % slices < slices - 1 else []
        return [("I" if ("I", *weight) in exists else "B", *weight) for weight in after]
    return []
