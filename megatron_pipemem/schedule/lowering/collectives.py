"""Add messages to schedules that have collectives between their actions.

Messages and collectives may share a queue that each device serves strictly in posting order: every message then holds up
what the device posts after it until the other end has posted it too. So all lists are cut from one sequence, in which a
message stands once, for both ends, right after its producer, and a collective stands once for all devices. Whatever waits
waits for something earlier in that sequence, so nothing waits in a circle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.action import COLLECTIVES, Action
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.lowering.messages import add_gradient_reductions
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.schedule import Order, Program, Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.vocabulary import EVERYWHERE
from megatron_pipemem.schedule.walk import Graph


def add_messages_in_sequence(
    schedule: Schedule, actions: Iterable[tuple[int, Action]] | None = None
) -> tuple[Order, ...]:
    """Insert sends and receives, both ends of each at the same place of one sequence of all actions.

    Args:
        schedule: any.
        actions: the sequence, each action with its device; by default that of ``sequence``.

    Raises:
        ScheduleError: no such sequence exists; ``validate`` says why.
    """
    router = Router(schedule.placement)
    lowered: list[list[Action]] = [[] for _ in schedule.orders]
    for device, action in sequence(schedule) if actions is None else actions:
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
    found = Dependencies.of_schedule(schedule)
    ends = [(end, device) for device, spans in enumerate(simulate(schedule).spans) for _, end in spans]
    *devices, channel = found.lanes
    waits = list(found.graph.waits)
    firsts = {nodes.start for nodes in devices}
    for collective in channel:
        posts = [post for post, _ in waits[collective]]
        # All posts stand where the last of them can.
        waits[collective] = [
            *((post - 1, 0) for post in posts if post not in firsts),
            *(w for p in posts for w in waits[p]),
        ]
        ends.append(max(ends[post] for post in posts))
        for post in posts:
            waits[post], ends[post] = [(collective, 0)], (-math.inf, 0)
    passed = set()
    for node in Graph(found.graph.lanes, waits).by_urgency(ends.__getitem__):
        passed.add(node)
        kind, stage, microbatch = action = found.actions[node]
        if stage == EVERYWHERE:
            yield from ((device, Action(kind, device, microbatch)) for device in range(len(devices)))
        elif kind not in COLLECTIVES:
            yield found.graph.lane_of[node], action
    for device, nodes in enumerate(devices):
        for position, node in enumerate(nodes):
            if node not in passed:
                raise ScheduleError(
                    "collective-order",
                    "stands in no sequence of all devices' actions: the devices would wait for one another in a circle; take "
                    "the passes and collectives that with_vocabulary() places",
                    at=(device, position, found.actions[node]),
                )


def lower_paired(schedule: Schedule) -> Program:
    """Add messages, both ends of each at the same step of one run of all devices, and gradient reductions.

    Everything thus stands in one global sequence that the lists are cut from, so they cannot wait for one another in a
    circle, even if a send waits for its receive.

    Raises:
        ScheduleError: some action waits for ever; ``validate`` says why.
    """
    found = Dependencies.of_schedule(schedule)
    if error := found.stuck():
        raise error
    # Devices take turns, the first one first, and who waits for a message lets the others go on.
    waits, device_of = found.graph.waits, found.graph.lane_of
    turns, following = [0] * len(found.actions), [0] * len(schedule.orders)
    for node in found.walk.nodes:
        device = device_of[node]
        turns[node] = max([following[device], *(turns[n] + (device_of[n] > device) for n, _ in waits[node])])
        following[device] = turns[node] + 1
    nodes = sorted(found.walk.nodes, key=lambda node: (turns[node], device_of[node]))
    rows = add_messages_in_sequence(schedule, ((device_of[node], found.actions[node]) for node in nodes))
    return Program(schedule, tuple(map(add_gradient_reductions, rows)))
