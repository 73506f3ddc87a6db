"""Settle once per program what every action of a rank asks for, instead of in every step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import RECOMPUTE, SENDS, Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Program

Key = tuple[int, int]
"""Stage and microbatch: what belongs to one forward of one stage."""

_FORWARDS = frozenset((Kind.F, Kind.R, Kind.RS))
_BACKWARDS = frozenset((Kind.I, Kind.B))
_COUNTERPARTS = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_I: Kind.RECV_I,
    Kind.RECV_I: Kind.SEND_I,
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action, with where its tensors come from and go to.

    Args:
        action: what to do.
        key: its stage and microbatch.
        receive: for a forward or backward, the message that it waits for; ``None`` if nothing is sent to it.
        from_here: for a forward or backward, whether its tensor is made on this device, by a neighbouring stage or, at the ends
            of a model whose vocabulary is cut, by the embedding or the head.
        send: for a forward or backward, the message that takes its result away; ``None`` if none does.
        to_here: the key of the neighbour's forward or backward on this device that takes the result, or ``None``. Embedding and
            head stand before the first stage and behind the last one.
        settles: the messages from here that the sender of ``receive`` had used when it sent it.
        split: whether the backward of this forward is split.
        again: by which action the forward runs again, ``None`` if it does not.
        offloaded: whether activations of the stage leave the device.
    """

    action: Action
    key: Key
    receive: Action | None = None
    from_here: bool = False
    send: Action | None = None
    to_here: Key | None = None
    settles: tuple[Action, ...] = ()
    split: bool = False
    again: Kind | None = None
    offloaded: bool = False


@dataclass(frozen=True)
class RankProgram:
    """One device's part of a program.

    Args:
        instructions: one for every action, in order.
        has_backward: whether anything is kept for a backward.
        kinds: of its actions.
    """

    instructions: tuple[Instruction, ...]
    has_backward: bool
    kinds: frozenset[Kind]

    def check_handlers(self, handlers: Collection[Kind]) -> None:
        """Raise an UnsupportedError if some kind has no handler."""
        if unknown := sorted(self.kinds.difference(handlers)):
            raise UnsupportedError(
                "no-handler",
                f"nothing here performs {', '.join(unknown)}: give the executor a StepFeature whose handlers do",
            )


@lru_cache(
    maxsize=32
)  # a run has a few programs: training, evaluation, and what they were before they were planned again
def settle(program: Program, device: int) -> RankProgram:
    """Return what this device runs. Programs are told apart by identity."""
    answers = _answers(program, device)
    instructions = []
    for each in _instructions(program, device):
        answer = answers.get(each.receive) if each.receive is not None else None
        # Messages ahead of an answer on its edge have been taken in, too.
        settled = () if answer is None else tuple(sent for earlier in answer.take() for sent in earlier)
        instructions.append(replace(each, settles=settled) if settled else each)
    kinds = frozenset(each.action.kind for each in instructions)
    return RankProgram(tuple(instructions), not kinds.isdisjoint(_BACKWARDS), kinds)


@dataclass
class _Answer:
    """The messages from here that a peer has used before it sends one of its own, which is number ``number`` on its edge."""

    number: int
    of_edge: list[tuple[Action, ...]]

    def take(self) -> list[tuple[Action, ...]]:
        """Return what this message and those ahead of it answer, once."""
        taken = self.of_edge[: self.number + 1]
        self.of_edge[: self.number + 1] = [()] * len(taken)
        return taken


def _answers(program: Program, device: int) -> dict[Action, _Answer]:
    """Return, for every message to this device, the messages from here that its sender has used before.

    Their memory can go when that message has arrived, and no host has to ask a device whether they have left.
    """
    placement, found = program.placement, dict[Action, _Answer]()
    neighbours = (
        neighbour(stage)
        for stage in placement.stages[device]
        for neighbour in (placement.previous_stage, placement.next_stage)
    )
    for peer in {placement.devices[stage] for stage in neighbours if stage is not None} - {device}:
        used: list[Action] = []
        of_edge: list[tuple[Action, ...]] = []
        for each in _instructions(program, peer):
            if each.receive is not None and _end(placement, each.receive)[0] == device:
                used.append(_end(placement, each.receive)[1])
            elif each.action.kind in SENDS and _end(placement, each.action)[0] == device:
                found[_end(placement, each.action)[1]] = _Answer(len(of_edge), of_edge)
                of_edge.append(tuple(used))
                used = []
    return found


def _end(placement: Placement, message: Action) -> tuple[int, Action]:
    """Return the device at the other end of a message, and the action there."""
    upward = message.kind in (Kind.SEND_F, Kind.RECV_I)
    other = (placement.next_stage if upward else placement.previous_stage)(message.stage)
    assert other is not None, f"{message} has no neighbour"
    return placement.devices[other], Action(_COUNTERPARTS[message.kind], other, message.microbatch)


@lru_cache(maxsize=128)
def _instructions(program: Program, device: int) -> tuple[Instruction, ...]:
    actions = program.actions[device]
    split = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.I}
    again = {(a.stage, a.microbatch): a.kind for a in actions if a.kind in RECOMPUTE}
    # Whole stages, because its microbatches may share tensors: those leave with the last that is offloaded.
    offloaded = {a.stage for a in actions if a.kind is Kind.OFFLOAD}
    placement, cut = program.placement, bool(program.schedule.vocabulary_barriers)
    instructions = []
    for action in actions:
        kind, stage, microbatch = action
        key = (stage, microbatch)
        if kind not in _FORWARDS and kind not in _BACKWARDS:
            instructions.append(Instruction(action, key))
            continue
        neighbours = placement.previous_stage(stage), placement.next_stage(stage)
        forward = kind in _FORWARDS
        before, after = neighbours if forward else neighbours[::-1]
        receive, send = (Kind.RECV_F, Kind.SEND_F) if forward else (Kind.RECV_I, Kind.SEND_I)
        from_here, here = (cut if other is None else placement.devices[other] == device for other in (before, after))
        beyond = stage + (1 if forward else -1)
        instructions.append(
            Instruction(
                action,
                key,
                receive=None if before is None or from_here else Action(receive, *key),
                from_here=from_here,
                send=None if after is None or here else Action(send, *key),
                to_here=(beyond if after is None else after, microbatch) if here else None,
                split=key in split,
                again=again.get(key),
                offloaded=stage in offloaded,
            )
        )
    return tuple(instructions)
