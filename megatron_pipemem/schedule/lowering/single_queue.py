"""Add messages for devices that serve everything in one queue.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` whatever a device launches goes into one hardware queue: a message that waits for its
other end may hold up what the device launches after it, computing included. Here it is taken to hold up everything: the strict
model, in which an action starts when the one before it has ended, and a message moves when both its ends are at the head of
their queues.

All lists are cut from one run of all devices, in which a message stands once, for both ends, and a collective once for all.
So whatever waits in a queue waits for something earlier in that run, and nothing waits in a circle, whatever the times are.

When both ends of a message are between two actions, it moves. A device that could hand one over only later, because the other
end is busy, waits for that if computing first would delay the other end by more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COLLECTIVES, MEMORY, Action
from megatron_pipemem.schedule.action_prices import ActionPrices
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.messages import Edge, Message, Router
from megatron_pipemem.schedule.schedule import Order, Schedule


def add_messages_to_single_queues(
    schedule: Schedule, costs: Costs, orders: tuple[Order, ...] | None = None, arrived: Iterable[Action] = ()
) -> tuple[Order, ...]:
    """Insert sends and receives such that no queue waits for ever.

    Args:
        schedule: valid.
        costs: what the places of the messages are chosen for; any are safe.
        orders: a part of the schedule's own, which are all of them by default.
        arrived: receives of the part that earlier parts have posted.

    Raises:
        ScheduleError: some device waits for ever; ``validate`` says why.
        CostsError: the costs do not fit the placement.
    """
    return _Run(schedule, costs, schedule.orders if orders is None else orders, arrived).lists()


class _Run:
    """One run of all devices. A device is busy until a time, or between two actions."""

    def __init__(self, schedule: Schedule, costs: Costs, orders: tuple[Order, ...], arrived: Iterable[Action]) -> None:
        self._orders, self._router = orders, Router(schedule.placement)
        self._prices = ActionPrices(schedule, costs)
        self._lists: list[list[Action]] = [[] for _ in self._orders]
        self._at = [0] * len(self._orders)
        self._busy_until = [0.0] * len(self._orders)
        self._idle: set[int] = set()
        self._outgoing: list[dict[Edge, deque[Message]]] = [{} for _ in self._orders]
        self._arrived: set[Action] = set(arrived)
        self._consumers = {
            receive: position
            for order in self._orders
            for position, action in enumerate(order)
            if (receive := self._router.awaited(action)) is not None
        }
        self._events: list[tuple[float, int]] = [(0.0, device) for device in range(len(self._orders))]

    def lists(self) -> tuple[Order, ...]:
        """Return the orders with their messages."""
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                self._idle.add(heappop(self._events)[1])
            while self._exchange(now) or self._post_collective(now) or self._compute(now):
                pass
        for device, order in enumerate(self._orders):
            if self._at[device] < len(order):
                raise ScheduleError(
                    "unmet-need",
                    "waits for ever for its message, or for a collective; validate() says why",
                    at=(device, self._at[device], order[self._at[device]]),
                )
        return tuple(map(tuple, self._lists))

    def _occupy(self, device: int, until: float) -> None:
        self._idle.discard(device)
        self._busy_until[device] = until
        heappush(self._events, (until, device))

    def _exchange(self, now: float) -> bool:
        """Move messages between devices that are both between two actions, and return whether there were any."""
        for device in sorted(self._idle):
            for message in self._heads(device):
                other = message.edge[1]
                if other in self._idle:
                    self._outgoing[device][message.edge].popleft()
                    self._lists[device].append(message.send)
                    self._lists[other].append(message.receive)
                    self._arrived.add(message.receive)
                    for end in message.edge:
                        self._occupy(end, now + self._prices.of_message(message.edge, message.send.microbatch))
                    return True
        return False

    def _heads(self, device: int) -> Iterator[Message]:
        """Return what can be sent next over every edge."""
        return (messages[0] for messages in self._outgoing[device].values() if messages)

    def _post_collective(self, now: float) -> bool:
        """Post a collective that all devices have come to, and return whether there was one."""
        if len(self._idle) < len(self._orders):
            return False
        following = [order[at] for order, at in zip(self._orders, self._at, strict=True) if at < len(order)]
        posts = {action._replace(stage=0) for action in following if action.kind in COLLECTIVES}
        if len(following) < len(self._orders) or len(posts) != 1 or any(a.kind not in COLLECTIVES for a in following):
            return False
        for device, action in enumerate(following):
            self._lists[device].append(action)
            self._at[device] += 1
            self._occupy(device, now + self._prices.of(*action))
        return True

    def _compute(self, now: float) -> bool:
        """Return what devices run on their own, if that is better than to wait; whether any did."""
        ran = False
        for device in sorted(self._idle):
            order = self._orders[device]
            if self._at[device] == len(order):
                continue
            action = order[self._at[device]]
            receive = self._router.awaited(action)
            if action.kind in COLLECTIVES or (receive is not None and receive not in self._arrived):
                continue
            end = now + self._prices.of(*action)
            if action.kind not in MEMORY and self._should_wait(device, now, end):
                continue
            self._lists[device].append(action)
            self._at[device] += 1
            if message := self._router.emitted(action):
                self._outgoing[device].setdefault(message.edge, deque()).append(message)
            self._occupy(device, end)
            ran = True
        return ran

    def _should_wait(self, device: int, now: float, end: float) -> bool:
        """Return whether another end would be held up for longer if it got its message after ``end`` only."""
        for message in self._heads(device):
            other = message.edge[1]
            wait = self._busy_until[other] - now
            if wait < end - self._needed_at(other, message.receive, end):
                return True
        return False

    def _needed_at(self, device: int, receive: Action, latest: float) -> float:
        """Return when a busy device can come to what consumes a message; no more is said of what is after ``latest``."""
        time, order = self._busy_until[device], self._orders[device]
        # What a later part consumes is not in the orders.
        for position in range(self._at[device], self._consumers.get(receive, len(order))):
            if time >= latest:
                break
            time += self._prices.of(*order[position])
        return time
