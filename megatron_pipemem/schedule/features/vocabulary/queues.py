"""Proof that messages and collectives do not hang, however strictly a device serves its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.schedule.core.action import COLLECTIVES, MESSAGES, Action, Kind
from megatron_pipemem.schedule.lowering.messages import Router

if TYPE_CHECKING:
    from megatron_pipemem.schedule.core.schedule import Program


def check_queues(program: Program, needs: Mapping[Action, Sequence[Action]]) -> None:
    """Run the program with one queue per device for whatever it posts, served in posting order: a message moves when it
    is at the head of both ends' queues, a collective when it is at the head of all, and nothing behind a head moves. A
    post waits for the data it brings.

    Args:
        program: with matching messages.
        needs: what every compute action and every collective waits for; of messages, their sends.

    Raises:
        ScheduleError: some device waits for ever.
    """
    router = Router(program.placement)
    messages = [message for order in program.schedule.orders for action in order if (message := router.emitted(action))]
    ends: dict[Action, tuple[tuple[int, Action], ...]] = {}
    for message in messages:
        both = ((message.edge[0], message.send), (message.edge[1], message.receive))
        ends[message.send] = ends[message.receive] = both
    everyone = range(len(program.actions))
    queues: list[deque[Action]] = [deque() for _ in everyone]
    reached = [0] * len(program.actions)
    done: set[Action] = set()

    def parties(action: Action) -> tuple[tuple[int, Action], ...]:
        return ends.get(action) or tuple((device, action._replace(stage=device)) for device in everyone)

    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(program.actions):
            while reached[device] < len(actions):
                action = actions[reached[device]]
                if any(needed not in done for needed in needs.get(action, ())):
                    break
                if action.kind in MESSAGES or action.kind in COLLECTIVES:
                    queues[device].append(action)
                elif action.kind is not Kind.REDUCE_GRAD:
                    done.add(action)
                reached[device] += 1
                moved = True
            while queues[device] and all(
                queues[other] and queues[other][0] == post for other, post in parties(queues[device][0])
            ):
                for other, _ in parties(queues[device][0]):
                    done.add(queues[other].popleft())
                moved = True
    for device, actions in enumerate(program.actions):
        if reached[device] < len(actions) or queues[device]:
            stuck = queues[device][0] if queues[device] else actions[reached[device]]
            position = actions.index(stuck)
            raise ScheduleError(
                "never gets through where a device serves its messages and collectives strictly in posting order; post "
                "them in one order on all devices that take part, as lower() does",
                device=device,
                position=position,
                action=stuck,
            )
