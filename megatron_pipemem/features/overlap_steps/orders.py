"""Find the forwards of a step that may run before it is known whether the previous step must be redone.

Without a barrier between two steps, the gradient norm of the earlier step arrives while the later step is running. If
the gradients should have been clipped, the later step used wrong weights. Its actions so far are dropped and run again.

The *cut* is the part of a step that may be dropped: the first actions of every device. It has only forwards and
messages, so that no gradient changes before the norm is known. It is closed: no action in it needs an action outside,
so every device reaches the end of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import MESSAGES, Action, Kind
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.messages import Message, Router
from megatron_pipemem.schedule.schedule import Order, Program


@dataclass(frozen=True)
class ValidationCut:
    """The cut of a program, and the messages to post if the cut is dropped."""

    program: Program
    lengths: tuple[int, ...]  # for each device, how many of its first actions are in the cut, messages included
    # Per device, the messages to post when the cut is dropped, in program order: receives of sent messages, and sends
    # for posted receives. Then every message has been posted at both ends or at neither.
    drains: tuple[Order, ...]

    def check(self) -> None:
        """Prove that the cut has only forwards and messages, that it is closed, and that no message stays half posted.

        Raises:
            ScheduleError: one of these does not hold.
        """
        parts = [actions[:length] for actions, length in zip(self.program.actions, self.lengths, strict=True)]
        for device, part in enumerate(parts):
            for position, action in enumerate(part):
                if not _can_be_dropped(action):
                    raise ScheduleError(
                        "wrong-cut",
                        "is in the cut, but only forwards and messages can be dropped and run again; end the cut before it",
                        at=(device, position, action),
                    )
        messages = _messages(self.program)
        if error := _dependencies(self.program, parts, messages).stuck():
            raise error
        posted = {action for part in (*parts, *self.drains) for action in part}
        for message in messages:
            ends = [end for end in (message.send, message.receive) if end in posted]
            if len(ends) == 1:
                raise ScheduleError(
                    "wrong-cut",
                    f"if the cut is dropped, {ends[0]} is posted without its other end; add that end to the drain",
                )


def validation_cut(program: Program) -> ValidationCut:
    """Return the largest closed cut of a program, after proving it.

    A forward is outside if its input has passed through all devices. When such a forward can run, every device has
    begun the step. Messages that follow the last forward of a device's part are inside, so that they are posted before
    the norm is awaited. Raise an UnsupportedError for an asynchronous schedule, which needs no cut.
    """
    schedule, placement = program.schedule, program.placement
    if schedule.updates is not None:
        raise UnsupportedError(
            "conflicting-features",
            f"{schedule.name} is asynchronous: its steps wait for no gradient norm, so no part of them runs before it; "
            "give a synchronous schedule",
        )
    size, devices = placement.model_stages, placement.devices
    early = {
        stage
        for stage in range(placement.num_stages)
        if len(set(devices[stage - stage % size : stage])) < placement.num_devices
    }

    def leads(action: Action) -> bool:
        return _can_be_dropped(action) and (action.kind is not Kind.F or action.stage in early)

    messages = _messages(program)
    leading = [tuple(takewhile(leads, actions)) for actions in program.actions]
    lengths = tuple(_dependencies(program, leading, messages).walk.reached)
    posted = {action for actions, length in zip(program.actions, lengths, strict=True) for action in actions[:length]}
    open_ends = {m.receive for m in messages if m.send in posted} | {m.send for m in messages if m.receive in posted}
    drains = (
        tuple(action for action in actions[length:] if action in open_ends)
        for actions, length in zip(program.actions, lengths, strict=True)
    )
    validated = ValidationCut(program, lengths, tuple(drains))
    validated.check()
    return validated


def _can_be_dropped(action: Action) -> bool:
    return action.kind is Kind.F or action.kind in MESSAGES


def _messages(program: Program) -> list[Message]:
    router = Router(program.placement)
    emitted = (router.emitted(action) for order in program.schedule.orders for action in order)
    return [message for message in emitted if message is not None]


def _dependencies(program: Program, parts: Sequence[Order], messages: Sequence[Message]) -> Dependencies:
    """Return the dependencies among the first actions of all devices, which ``parts`` has.

    A forward waits until its input has been sent. Its other needs are earlier on its own device.
    """
    router, sends = Router(program.placement), {message.receive: message.send for message in messages}

    def needs(action: Action) -> tuple[Action, ...]:
        receive = router.awaited(action)
        return () if receive is None else (sends[receive],)

    return Dependencies(parts, program.placement, needs, program.schedule.units)
