"""Messages of schedules that have collectives between their actions.

Messages and collectives may share a queue that each device serves strictly in posting order: every message then holds up
what the device posts after it until the other end has posted it too. So all lists are cut from one sequence, in which a
message stands once, for both ends, right after its producer, and a collective stands once for all devices. Whatever waits
waits for something earlier in that sequence, so nothing waits in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import COLLECTIVES, Action, Kind
from megatron_pipemem.schedule.core.schedule import Order, Schedule
from megatron_pipemem.schedule.core.simulator import dependencies, simulate
from megatron_pipemem.schedule.lowering.messages import Router


def add_messages_in_sequence(schedule: Schedule) -> tuple[Order, ...]:
    """Insert sends and receives, both ends of each at the same place of one sequence of all actions.

    Raises:
        ScheduleError: no such sequence exists; ``validate`` says why.
    """
    router = Router(schedule.placement)
    lowered: list[list[Action]] = [[] for _ in schedule.orders]
    for device, action in sequence(schedule):
        lowered[device].append(action)
        if message := router.emitted(action):
            lowered[device].append(message.send)
            lowered[message.edge[1]].append(message.receive)
    return tuple(map(tuple, lowered))


def sequence(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """``(device, action)`` of all actions, none before what it needs, the posts of a collective one after the other, and
    otherwise by when they end with unit costs, so that nothing is received long before it is needed.

    Raises:
        ScheduleError: there is no such sequence: some device would have to post a collective before and after what
            another one posts after and before it.
    """
    placement, orders = schedule.placement, schedule.orders
    ends = [[end for _, end in spans] for spans in simulate(schedule).spans]
    fused = {action for order in orders for action in order if action.kind is Kind.B}
    reached = [0] * len(orders)
    missing: dict[Action, int] = {}
    followers: dict[Action, list[Action]] = {}
    for order in orders:
        for action in order:
            needed = set(dependencies(action, placement, fused, vocabulary_barriers=schedule.vocabulary_barriers))
            missing[action] = len(needed)
            for each in needed:
                followers.setdefault(each, []).append(action)
    at_head: dict[tuple[Kind, int], int] = {}
    ready: list[tuple[float, int, int]] = []

    def arrive(device: int) -> None:
        """The device's next action, when it and all that it needs have been reached."""
        if reached[device] == len(orders[device]):
            return
        action = orders[device][reached[device]]
        if missing[action]:
            return
        end = ends[device][reached[device]]
        if action.kind in COLLECTIVES:
            key = (action.kind, action.microbatch)
            at_head[key] = at_head.get(key, 0) + 1
            if at_head[key] < len(orders):
                return
        heappush(ready, (end, device, reached[device]))

    for device in range(len(orders)):
        arrive(device)
    device_of = {action: device for device, order in enumerate(orders) for action in order}
    while ready:
        _, device, position = heappop(ready)
        action = orders[device][position]
        together = range(len(orders)) if action.kind in COLLECTIVES else (device,)
        passed = [(each, orders[each][reached[each]]) for each in together]
        yield from passed
        for each, _ in passed:
            reached[each] += 1
        woken = set(together)
        for _, each in passed:
            for follower in followers.get(each, ()):
                missing[follower] -= 1
                other = device_of[follower]
                if (
                    not missing[follower]
                    and reached[other] < len(orders[other])
                    and orders[other][reached[other]] == follower
                ):
                    woken.add(other)
        for each in sorted(woken):
            arrive(each)
    for device, order in enumerate(orders):
        if reached[device] < len(order):
            raise ScheduleError(
                "stands in no sequence of all devices' actions: the devices would wait for one another in a circle; take "
                "the passes and collectives that with_vocabulary() places",
                device=device,
                position=reached[device],
                action=order[reached[device]],
            )
