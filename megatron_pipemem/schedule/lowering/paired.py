"""Messages for runtimes whose two directions between a pair of devices share one channel.

torch.distributed.pipelining gives every pair of ranks one NCCL communicator, and its receives may hold up whatever comes
after them. There both ends must post the messages of a *pair* in one order, whichever way they go; our own transport
(`messages`) asks for that per direction only.
"""

from __future__ import annotations

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import Action
from megatron_pipemem.schedule.core.schedule import Order, Program, Schedule
from megatron_pipemem.schedule.lowering.gradients import add_gradient_reductions
from megatron_pipemem.schedule.lowering.messages import Router


def lower_paired(schedule: Schedule) -> Program:
    """Add messages, both ends of each at the same step of one run of all devices, and gradient reductions.

    Everything thus stands in one global sequence that the lists are cut from, so they cannot wait for one another in a
    circle, even if a send waits for its receive.

    Raises:
        ScheduleError: some action waits for ever; ``validate`` says why.
    """
    router = Router(schedule.placement)
    lowered: list[list[Action]] = [[] for _ in schedule.orders]
    posted: set[Action] = set()
    reached = [0] * len(schedule.orders)
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(schedule.orders):
            if reached[device] == len(order):
                continue
            action = order[reached[device]]
            receive = router.awaited(action)
            if receive is not None and receive not in posted:
                continue
            lowered[device].append(action)
            if message := router.emitted(action):
                lowered[device].append(message.send)
                lowered[message.edge[1]].append(message.receive)
                posted.add(message.receive)
            reached[device] += 1
            moved = True
    for device, order in enumerate(schedule.orders):
        if reached[device] < len(order):
            raise ScheduleError(
                "waits for ever for its message; validate() says why",
                device=device,
                position=reached[device],
                action=order[reached[device]],
            )
    rows: tuple[Order, ...] = tuple(map(tuple, lowered))
    return Program(schedule, tuple(map(add_gradient_reductions, rows)))
