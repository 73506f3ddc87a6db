"""Add messages for runtimes whose two directions between a pair of devices share one channel.

torch.distributed.pipelining gives every pair of ranks one NCCL communicator, and its receives may hold up whatever comes
after them. There both ends must post the messages of a *pair* in one order, whichever way they go; our own transport
(`messages`) asks for that per direction only.
"""

from __future__ import annotations

from megatron_pipemem.schedule.core.action import Action
from megatron_pipemem.schedule.core.dependencies import Dependencies
from megatron_pipemem.schedule.core.messages import Router
from megatron_pipemem.schedule.core.schedule import Order, Program, Schedule
from megatron_pipemem.schedule.lowering.gradients import add_gradient_reductions


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
    router = Router(schedule.placement)
    lowered: list[list[Action]] = [[] for _ in schedule.orders]
    for node in sorted(found.walk.nodes, key=lambda node: (turns[node], device_of[node])):
        action = found.actions[node]
        lowered[device_of[node]].append(action)
        if message := router.emitted(action):
            lowered[message.edge[0]].append(message.send)
            lowered[message.edge[1]].append(message.receive)
    rows: tuple[Order, ...] = tuple(map(tuple, lowered))
    return Program(schedule, tuple(map(add_gradient_reductions, rows)))
