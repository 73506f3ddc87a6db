"""Say which forwards of a step may run before it is known whether the step before it was clipped.

Where no barrier stands between two steps, the gradient norm of the earlier one is on its way while the later one begins. If
it turns out that the gradients had to be clipped, the weights were wrong: whatever ran with them is dropped and runs again.
The *cut* is what may be dropped. It holds forwards alone, so that no gradient changes before the norm is known, and it is
closed: no action in it needs one outside, so every device comes to the end of its part whatever the others decide.
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
    """Hold the cut of a program, and what is in flight there.

    Args:
        program: the whole one.
        lengths: per device, how many of its first actions, messages included, are in the cut.
        drains: per device, the messages that it has to post when the cut is dropped, in the order of its program: receives
            of what others have sent, and sends, of whatever tensors, where others have posted their receives. Then every
            message has been posted at both ends or at neither.
    """

    program: Program
    lengths: tuple[int, ...]
    drains: tuple[Order, ...]

    def check(self) -> None:
        """Prove that the cut holds forwards alone, that it is closed, and that the drains leave no message in flight.

        Raises:
            ScheduleError: one of these is not so.
        """
        parts = [actions[:length] for actions, length in zip(self.program.actions, self.lengths, strict=True)]
        for device, part in enumerate(parts):
            for position, action in enumerate(part):
                if not _can_be_dropped(action):
                    raise ScheduleError(
                        "wrong-cut",
                        "does what a dropped cut cannot take back; end the cut before it",
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
                    "wrong-cut", f"{ends[0]} meets nothing when the cut is dropped; drain its other end as well"
                )


def validation_cut(program: Program) -> ValidationCut:
    """Return the largest closed cut of a program, proved.

    Forwards whose inputs have been through all devices are outside: where they could run, every device has begun the step.
    Messages behind the last forward of the cut belong to it, so that the forward or backward after it finds its own posted.

    Args:
        program: valid. Where it was lowered for single queues, its drains wait for one another in no circle there either.

    Raises:
        UnsupportedError: the schedule is asynchronous: its steps overlap by older weights, and none waits for a norm.
    """
    schedule, placement = program.schedule, program.placement
    if schedule.updates is not None:
        raise UnsupportedError(
            "conflicting-features", f"{schedule.name} is asynchronous: its steps wait for no norm, so they have no cut"
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
    found = ValidationCut(program, lengths, tuple(drains))
    found.check()
    return found


def _can_be_dropped(action: Action) -> bool:
    return action.kind is Kind.F or action.kind in MESSAGES


def _messages(program: Program) -> list[Message]:
    router = Router(program.placement)
    emitted = (router.emitted(action) for order in program.schedule.orders for action in order)
    return [message for message in emitted if message is not None]


def _dependencies(program: Program, parts: Sequence[Order], messages: Sequence[Message]) -> Dependencies:
    """Return who waits for whom in the first actions of all devices. A forward waits until its input has been sent; what it
    needs of its own device stands before it."""
    router, sends = Router(program.placement), {message.receive: message.send for message in messages}

    def needs(action: Action) -> tuple[Action, ...]:
        receive = router.awaited(action)
        return () if receive is None else (sends[receive],)

    return Dependencies(parts, program.placement, needs, program.schedule.slices)
