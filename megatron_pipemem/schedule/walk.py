"""Walking along given orders: who can run when, who never can, and who then waits for whom in a circle.

A graph has nodes in lanes. A lane runs its nodes one after another, in its order; besides, a node waits for other nodes.
Devices are lanes, and what several of them do together is a node in a lane of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import Action

Waits = Sequence[tuple[int, int]]
"""``(node, link)``: what a node waits for, and over which link its result comes."""

NEVER = -1
"""In place of a node: what waits for it waits for ever."""


def numbered(orders: Sequence[Sequence[Action]]) -> list[range]:
    """Return the nodes of every device when all actions are numbered, device by device."""
    lanes, first = [], 0
    for order in orders:
        lanes.append(range(first, first + len(order)))
        first += len(order)
    return lanes


Step = tuple[int, int, Waits, int]
"""A node, its lane, what it waits for, and its price."""


class Walk(NamedTuple):
    """Say how far the lanes of a graph come.

    Args:
        nodes: all that run, none before what it waits for.
        reached: per lane, how many of its nodes run.
    """

    nodes: list[int]
    reached: list[int]


@dataclass(eq=False)
class Graph:
    """Hold who waits for whom.

    Args:
        lanes: the nodes of every lane, in the order in which it runs them. Every node is in one lane.
        waits: per node, the others that it waits for.
        prices: per node, which price it takes (see ``Times``).
        lane_of: per node, its lane; left out, it is looked up in ``lanes``.
    """

    lanes: Sequence[Sequence[int]]
    waits: Sequence[Waits]
    prices: Sequence[int] = ()
    lane_of: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.lane_of:
            lane_of = [0] * len(self.waits)
            for lane, nodes in enumerate(self.lanes):
                for node in nodes:
                    lane_of[node] = lane
            self.lane_of = lane_of

    def steps(self, nodes: Iterable[int]) -> Iterator[Step]:
        """Return the nodes as ``Times`` runs them."""
        return ((node, self.lane_of[node], self.waits[node], self.prices[node]) for node in nodes)

    def walk(self) -> Walk:
        """Run every lane as far as it comes."""
        waits, done = self.waits, bytearray(len(self.waits) + 1)  # the last is NEVER
        nodes: list[int] = []
        reached = [0] * len(self.lanes)
        waiting: dict[int, list[int]] = {}
        runnable = list(range(len(self.lanes)))
        while runnable:
            lane = runnable.pop()
            before = len(nodes)
            for node in self.lanes[lane][reached[lane] :]:
                for needed, _ in waits[node]:
                    if not done[needed]:
                        waiting.setdefault(needed, []).append(lane)
                        break
                else:
                    done[node] = True
                    nodes.append(node)
                    if node in waiting:
                        runnable += waiting.pop(node)
                    continue
                break
            reached[lane] += len(nodes) - before
        return Walk(nodes, reached)

    def by_urgency(self, urgency: Callable[[int], Any]) -> Iterator[int]:
        """Yield all nodes that run: of those that can run always the one with the smallest urgency, and of equal ones
        that of the first lane.

        Args:
            urgency: of a node, a number or whatever compares; asked once, when all that it waits for has been yielded.
        """
        done = bytearray(len(self.waits) + 1)
        reached = [0] * len(self.lanes)
        waiting: dict[int, list[int]] = {}
        runnable: list[tuple[Any, int, int]] = []
        arriving: Iterable[int] = range(len(self.lanes))
        while True:
            for lane in arriving:
                for node in self.lanes[lane][reached[lane] : reached[lane] + 1]:
                    missing = next((needed for needed, _ in self.waits[node] if not done[needed]), None)
                    if missing is None:
                        heappush(runnable, (urgency(node), lane, node))
                    else:
                        waiting.setdefault(missing, []).append(lane)
            if not runnable:
                return
            _, lane, node = heappop(runnable)
            yield node
            done[node] = True
            reached[lane] += 1
            arriving = (lane, *waiting.pop(node, ()))


class Times[Number: (int, float)]:
    """Say when the nodes of a graph start and end if each starts as soon as it can.

    Args:
        graph: who waits for whom.
        seconds: by the numbers in ``graph.prices``, how long nodes take.
        lags: per link, how long a result takes over it.
        zero: when the lanes begin; an integer where seconds and lags are ticks.
        serve: when a node whose price is a negative number ends, given when it can start; it takes no time of its own.
    """

    def __init__(
        self,
        graph: Graph,
        seconds: Sequence[Number],
        lags: Sequence[Number],
        zero: Number,
        serve: Callable[[int, Number], Number] | None = None,
    ) -> None:
        self._graph = graph
        self._seconds: Sequence[Number] = seconds
        self._lags: Sequence[Number] = lags
        self._serve: Callable[[int, Number], Number] | None = serve
        self.starts: list[Number] = [zero] * len(graph.waits)
        self.ends: list[Number] = [zero] * len(graph.waits)
        self.free: list[Number] = [zero] * len(graph.lanes)

    def start_of(self, node: int) -> Number:
        """Return the earliest start of a node when all that it waits for has run."""
        graph = self._graph
        arrivals: list[Number] = [self.ends[needed] + self._lags[link] for needed, link in graph.waits[node]]
        return max([self.free[graph.lane_of[node]]] + arrivals)

    def run(self, steps: Iterable[Step]) -> None:
        """Run nodes, none before what it waits for.

        A hot loop: searches and planners spend their time in it.
        """
        starts, ends, free, seconds, lags = self.starts, self.ends, self.free, self._seconds, self._lags
        for node, lane, waits, price in steps:
            start = free[lane]
            for needed, link in waits:
                arrival = ends[needed] + lags[link]
                if arrival > start:
                    start = arrival
            if price < 0:
                start = end = self._serve(node, start)  # type: ignore[misc]  # who has nodes with no price gives it
            else:
                end = start + seconds[price]
            starts[node] = start
            free[lane] = ends[node] = end


class Wait(NamedTuple):
    """A device that stands still.

    Args:
        device: which one.
        position: how far it came in its order.
        action: what it cannot run.
        owner: the device that it waits for.
        needed: what it waits for, which its owner has not come to.
        needed_position: where that is in the owner's order.
    """

    device: int
    position: int
    action: Action
    owner: int
    needed: Action
    needed_position: int


def find_cycle(
    orders: Sequence[Sequence[Action]], reached: Sequence[int], awaited: Callable[[int], tuple[int, int] | None]
) -> tuple[Wait, ...]:
    """Return the devices that wait for one another: every one for the next, and the last for the first.

    Args:
        orders: of all devices.
        reached: how far every device came.
        awaited: device and position of what a device that stands still waits for; ``None`` if that comes in no order.

    Returns:
        Nothing when all devices came to their ends, or some device waits for what comes in no order.
    """
    path: dict[int, Wait] = {}
    device = next((d for d, order in enumerate(orders) if reached[d] < len(order)), None)
    while device is not None and device not in path:
        place = awaited(device)
        if place is None:
            return ()
        owner, position = place
        path[device] = Wait(
            device, reached[device], orders[device][reached[device]], owner, orders[owner][position], position
        )
        device = owner
    members = list(path)
    return tuple(path[member] for member in members[members.index(device) :]) if device is not None else ()


def deadlock(cycle: Sequence[Wait], where: str, mend: str) -> ScheduleError:
    """Return the error of devices that wait for one another for ever.

    Args:
        cycle: who waits for whom.
        where: the kind of devices, in words, or nothing.
        mend: what to do.
    """
    standing = {wait.device: wait.action for wait in cycle}
    steps = "; ".join(
        f"{wait.action} (device {wait.device}, position {wait.position}) waits for {wait.needed} (device {wait.owner}, "
        f"position {wait.needed_position}), which comes after {standing[wait.owner]}"
        for wait in cycle
    )
    first = cycle[0]
    return ScheduleError(
        "deadlock",
        f"deadlock{where}: {steps}; {mend}",
        at=(first.device, first.position, first.action),
        cycle=tuple(cycle),
    )
