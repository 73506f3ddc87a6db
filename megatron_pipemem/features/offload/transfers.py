"""Choose the activations that leave a device, and the start times of their copies, on one channel to and from the host.

When the channel is free, the activation that is needed last leaves first. Activations return as late as the channel
allows. An activation stays if its two copies do not fit between its forward and its backward. Copies in the two
directions run one after the other, or at once if the channel is duplex.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from megatron_pipemem.schedule.memory_cap import loosened

TOO_SHORT, CHANNEL_FULL, NO_HOST_MEMORY = (
    "used again too soon for a copy",
    "channel to the host full",
    "host memory full",
)
NOT_CHOSEN, RECOMPUTED = "not chosen", "recomputed"
"""Reasons why activations stay on their device."""


Key = tuple[int, int]
"""Stage and microbatch."""


class Item(NamedTuple):
    """The activations of one stage and microbatch, with the times between which they may be on the host."""

    device: int
    stage: int
    microbatch: int
    forward_end: float  # time at which the forward ends
    backward_start: float  # time at which the backward starts
    out_seconds: float  # seconds of the copy to the host
    back_seconds: float  # seconds of the copy back
    memory: float  # memory that these activations take, with ``memory_factor`` included
    memory_factor: float = 1.0  # memory relative to that in the costs, if microbatches differ

    @property
    def key(self) -> Key:
        """``(stage, microbatch)``."""
        return self.stage, self.microbatch

    @property
    def lifespan(self) -> float:
        return self.backward_start - self.forward_end


class RoundTrip(NamedTuple):
    """An item that is copied to the host and back. ``out_start`` and ``back_start`` are the times at which the copies start."""

    item: Item
    out_start: float
    back_start: float


def plan_round_trips(
    items: Sequence[Item], duplex: bool = False, host_budget: Sequence[float] | None = None
) -> tuple[list[RoundTrip], dict[Item, str]]:
    """Return the round trips that one channel can carry, by the start of the copy out, and the other items' reasons.

    The channel is simulated. Whenever it is free, it starts a copy back if that copy could not start later. If there is
    none, it starts a copy out: of the items with which all can still return in time, the one that is used last. If
    there is no such item, it waits. ``host_budget`` has the memory of each device's host, in the unit of ``Item.size``.
    """
    return _TransferPlan(items, duplex, host_budget).run()


class _TransferPlan:
    def __init__(self, items: Sequence[Item], duplex: bool, host_budget: Sequence[float] | None) -> None:
        self._items, self._duplex = items, duplex
        self._coming = sorted(items, key=lambda item: item.forward_end, reverse=True)
        self._resident: list[tuple[float, int, Item]] = []  # the last used first
        self._away: list[tuple[float, int, Item]] = []  # the first used first
        self._out_start: dict[Item, float] = {}
        self._trips: list[RoundTrip] = []
        self._free = {False: 0.0, True: 0.0}  # per direction; a half duplex channel uses both at once
        # Latest start of each transfer back for which it and all later ones are in time.
        self._due = [inf]
        self._exact = 1e-9 * max((item.backward_start for item in items), default=0.0)
        self._reasons: dict[Item, str] = {}
        self._host_budget = host_budget
        self._host_held: dict[int, float] = {}
        self._host_uses: list[tuple[float, int, float]] = []
        stages = {item.stage: item for item in items}
        self._are_alike = all(
            item.memory_factor == 1.0
            and (item.out_seconds, item.back_seconds, item.memory) == (one.out_seconds, one.back_seconds, one.memory)
            for item in items
            for one in (stages[item.stage],)
        )

    def run(self) -> tuple[list[RoundTrip], dict[Item, str]]:
        now, free = 0.0, self._free
        while self._coming or self._resident or self._away:
            self._arrive(now)
            due = self._due[0]
            if self._away and free[True] <= now + self._exact and due <= now + self._exact:
                _, _, back = self._away.pop(0)
                del self._due[0]
                self._trips.append(RoundTrip(back, self._out_start.pop(back), now))
                self._occupy(True, now + back.back_seconds)
            elif free[False] <= now + self._exact and (item := self._leaving(now)) is not None:
                self._out_start[item] = now
                self._send_away(item)
                self._occupy(False, now + item.out_seconds)
            else:
                now = self._next_time(now, due)
        self._trips.sort(key=lambda trip: trip.out_start)
        gone = {trip.item for trip in self._trips}
        return self._trips, {item: self._reason(item) for item in self._items if item not in gone}

    def _reason(self, item: Item) -> str:
        if item.lifespan < item.out_seconds + item.back_seconds - self._exact:
            return TOO_SHORT
        return self._reasons.get(item, CHANNEL_FULL)

    def _occupy(self, back: bool, until: float) -> None:
        for direction in (back,) if self._duplex else (False, True):
            self._free[direction] = until

    def _arrive(self, now: float) -> None:
        while self._coming and self._coming[-1].forward_end <= now + self._exact:
            item = self._coming.pop()
            insort(self._resident, (-item.backward_start, len(self._coming), item))
        while self._host_uses and self._host_uses[0][0] <= now + self._exact:
            _, device, size = heappop(self._host_uses)
            self._host_held[device] -= size

    def _send_away(self, item: Item) -> None:
        entry = (item.backward_start, -len(self._out_start), item)
        away, due = self._away, self._due
        at = bisect_left(away, entry)
        away.insert(at, entry)
        due.insert(at, min(due[at], item.backward_start) - item.back_seconds)
        while at:  # items before it must return sooner, until there is enough time
            at -= 1
            used, _, other = away[at]
            start = min(due[at + 1], used) - other.back_seconds
            if start == due[at]:
                break
            due[at] = start

    def _with_another(self, item: Item) -> tuple[float, float]:
        """Return the latest start times, if ``item`` left too, of the next copy back and of the item's own."""
        at = bisect_left(self._away, (item.backward_start,))
        start = own = min(self._due[at], item.backward_start) - item.back_seconds
        while at:
            at -= 1
            used, _, other = self._away[at]
            start = min(start, used) - other.back_seconds
            if start == self._due[at]:
                return self._due[0], own
        return start, own

    def _leaving(self, now: float) -> Item | None:
        """Return the item to copy out now, which takes its host memory: of those that let all return in time, the last
        used.

        Items that can no longer leave are removed.
        """
        stay: list[tuple[float, int, Item]] = []
        chosen = None
        while self._resident and chosen is None:
            entry = self._resident.pop(0)
            item = entry[2]
            arrived = now + item.out_seconds
            if arrived + item.back_seconds > item.backward_start + self._exact:
                continue  # it never can, because time only advances
            if not self._host_has_room(item):
                self._reasons[item] = NO_HOST_MEMORY
                stay.append(entry)
            elif not self._returns_in_time(item, now):
                stay.append(entry)
                if self._are_alike:
                    break  # later entries are used sooner, which leaves the channel even less time
            else:
                chosen = item
        self._resident = stay + self._resident
        if chosen is not None and self._host_budget is not None:
            self._host_held[chosen.device] = self._host_held.get(chosen.device, 0.0) + chosen.memory
            heappush(self._host_uses, (chosen.backward_start, chosen.device, chosen.memory))
        return chosen

    def _returns_in_time(self, item: Item, now: float) -> bool:
        """Return whether ``item`` and all items on the host can return before their use if ``item`` leaves now."""
        arrived = now + item.out_seconds
        first, own = self._with_another(item)
        vacant = max(now, self._free[True]) if self._duplex else arrived
        return own >= arrived - self._exact and first >= vacant - self._exact

    def _host_has_room(self, item: Item) -> bool:
        if self._host_budget is None:
            return True
        needed = self._host_held.get(item.device, 0.0) + item.memory
        return needed <= loosened(self._host_budget[item.device])

    def _next_time(self, now: float, due: float) -> float:
        """Return the next time at which a copy, a forward or a use of host memory ends, or ``due``.

        If no item can leave any more, drop the remaining ones, so that the loop ends.
        """
        times = [due, *self._free.values()]
        if self._coming:
            times.append(self._coming[-1].forward_end)
        if self._host_uses:
            times.append(self._host_uses[0][0])
        later = [time for time in times if time > now + self._exact]
        if not later or (not self._coming and not self._away and not self._host_uses):
            self._resident.clear()  # the remaining items can never leave
            return now
        return min(later)
