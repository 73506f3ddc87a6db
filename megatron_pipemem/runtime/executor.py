"""Interprets one rank's part of a program. Every schedule runs through this loop; none has a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import torch

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.selective import Recorder
from megatron_pipemem.runtime.trace import Trace
from megatron_pipemem.runtime.transport import Transport
from megatron_pipemem.runtime.weight_gradients import ImmediateWeightGradients, WeightGradientQueue, collecting
from megatron_pipemem.schedule.action import RECEIVES, RECOMPUTE, SENDS, Action, Kind
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


Handler = Callable[[Instruction], None]
"""Performs one action."""

Handlers = Mapping[Kind, Handler]

_NOTHING = nullcontext()


class StageRunner(Protocol):
    """Define what runs one stage of the model on this rank."""

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        """Run the stage, and return its output; the last stage returns its loss.

        In a schedule of sequence slices, these are numbered through and stand where microbatches do. The last stage then
        returns what it must run backward through.

        What of it is cheap runs in regions of ``runtime.selective``, which drop what they make if the caller records.
        With vocabulary passes, the first stage gets the embedding's output, and the last one returns the head's input.

        Args:
            microbatch: its number within the step.
            input: the earlier stage's output; ``None`` on the stage that reads the data.
            will_recompute: whether ``recompute`` will run this microbatch once more: the stage must be able to do so
                exactly.
        """

    def recompute(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        """Run the stage as its ``forward`` of this microbatch ran, with the same data and random numbers.

        What a forward reports, it has reported.
        """

    def release_output(self, output: torch.Tensor) -> None:
        """Let the memory of an output go that has been passed on; its graph stays."""

    def backward(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Backpropagate and return the input's gradient.

        Weight gradients of layers that split go to the queue that is being collected.

        Args:
            microbatch: its number within the step.
            input: of the forward; ``None`` on the stage that reads the data.
            output: of the forward.
            output_gradient: gradient of the output; ``None`` for a loss.
        """

    def reduce_gradients(self) -> None:
        """Start to sum the stage's gradients over the data-parallel ranks: all are complete, and summed over the
        replicas.
        """


class StepFeature(Protocol):
    """Define what a feature adds to the executor of one step: offload, vocabulary passes, replicas, weight versions."""

    def extend(self, executor: Executor) -> Handlers:
        """Return who performs the feature's own kinds of actions, and others that it does something before or after.

        Args:
            executor: about to run. Its ``handlers`` are those so far.
        """


@dataclass(frozen=True)
class InFlight:
    """Hold what one call leaves for the next one.

    Args:
        inputs: of microbatches that have run forward and not backward, by stage and number.
        outputs: of the same microbatches, by stage and number.
        arrived: messages that have been received and not used, by their receive.
    """

    inputs: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    arrived: dict[Action, torch.Tensor] = field(default_factory=dict)

    def renumbered(self, by: int) -> InFlight:
        """Return the same with ``by`` added to the numbers of all microbatches."""
        return InFlight(
            {(stage, microbatch + by): tensor for (stage, microbatch), tensor in self.inputs.items()},
            {(stage, microbatch + by): tensor for (stage, microbatch), tensor in self.outputs.items()},
            {action._replace(microbatch=action.microbatch + by): tensor for action, tensor in self.arrived.items()},
        )


class Executor:
    """Runs one step of a validated program on one rank.

    The object lives for one step, so an exception leaves nothing behind but what it was holding itself.

    Args:
        program: lowered and validated.
        device: this rank's place in the pipeline.
        stages: the runner of every stage this device holds.
        transport: carries its messages.
        features: extend it, in this order.
        ledger: counts held bytes after every action, if given.
        trace: times every compute action, if given.

    Attributes:
        handlers: who performs the actions of every kind.
        ledger: as given.
        handed_inputs: inputs of stages that have been made on this device, by the stage and microbatch that take them.
        handed_gradients: gradients of outputs, likewise.
        queues: weight gradients that wait for their W, by its stage and microbatch.
        host_bytes: returns how many bytes of activations are away on the host.
        at_end: called when all actions have run and all messages have left.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        stages: Mapping[int, StageRunner],
        transport: Transport,
        features: Sequence[StepFeature] = (),
        ledger: ActivationLedger | None = None,
        trace: Trace | None = None,
    ):
        self._program = program
        self._device = device
        self._stages = stages
        self._transport = transport
        self.ledger = ledger
        self._trace = trace
        settled = settle(program, device)
        self._instructions = settled.instructions
        self._has_backward = settled.has_backward
        self._is_profiled = False
        self._done = 0
        # Keyed by (stage, microbatch) of the stage that uses the tensor next.
        self._inputs: dict[Key, torch.Tensor | None] = {}
        self._outputs: dict[Key, torch.Tensor] = {}
        self.handed_inputs: dict[Key, torch.Tensor] = {}
        self.handed_gradients: dict[Key, torch.Tensor] = {}
        self.queues: dict[Key, WeightGradientQueue] = {}
        self._recorders: dict[Key, Recorder] = {}
        # With every result that has not been sent yet, whether only that makes the ledger count it.
        self._outbox: dict[Action, tuple[torch.Tensor, bool]] = {}
        self.host_bytes: Callable[[], int] = lambda: 0
        self.at_end: list[Callable[[], None]] = []
        self.handlers: dict[Kind, Handler] = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.RS: self._recompute_selectively,
            Kind.I: self._backward,
            Kind.B: self._backward,
            Kind.W: self._weight_gradients,
            **dict.fromkeys(SENDS, self._send),
            **dict.fromkeys(RECEIVES, self._receive),
            Kind.REDUCE_GRAD: lambda each: self._stages[each.action.stage].reduce_gradients(),
        }
        for feature in features:
            self.handlers |= feature.extend(self)
        settled.check_handlers(self.handlers)

    def run(self, until: int | None = None) -> None:
        """Run every action of this device in order, or go on where an earlier call has stopped.

        Args:
            until: how many of them to have run in all; ``None`` for all, and for all messages to have left.

        Raises:
            Exception: whatever an action raises, with a note that names the rank, the position and the action.
        """
        handlers, ledger = self.handlers, self.ledger
        self._is_profiled = torch.autograd._profiler_enabled()
        position = begin = self._done
        try:
            for position, each in enumerate(self._instructions[begin:until], begin):  # noqa: B007 - for the note
                handlers[each.action.kind](each)
                if ledger is not None:
                    ledger.record(each.action, self.host_bytes())
        except Exception as error:
            error.add_note(
                f"device {self._device} failed at position {position}, action {self._instructions[position].action}, "
                f"of schedule {self._program.schedule.name}"
            )
            raise
        if until is not None:
            self._done = until
            return
        self._transport.finish()
        for finish in self.at_end:
            finish()

    def drop(self, drain: Sequence[Action]) -> None:
        """Forget everything that has run, and leave no message in flight.

        Args:
            drain: receives of messages that others have sent, and sends, of no matter what, that others wait for.
        """
        for action in drain:
            if action.kind in RECEIVES:
                self._transport.post_receive(action)
            else:
                self._transport.post_send(action, self._transport.blank(action))
        self._transport.take_in()
        self._transport.finish()

    def take_in(self, left: InFlight) -> None:
        """Go on with what an earlier step has left in flight. Called before ``run``."""
        self._inputs |= left.inputs
        self._outputs |= left.outputs
        if left.arrived:
            self._transport.arrived(left.arrived)

    def in_flight(self) -> InFlight:
        """What has run forward and not backward, handed over. Everything that was sent to this rank has then arrived."""
        left = InFlight(self._inputs, self._outputs, self._transport.take_in())
        self._inputs, self._outputs = {}, {}
        return left

    def kept(self, each: Instruction) -> list[torch.Tensor]:
        """Return the input and the output of a forward that has run, as far as they are kept for others than autograd."""
        sent = self._outbox.get(each.send, (None,))[0] if each.send is not None else None
        handed = self.handed_inputs.get(each.to_here) if each.to_here is not None else None
        tensors = (self._inputs.get(each.key), sent, handed)
        return [tensor for tensor in tensors if tensor is not None]

    def measured(self, action: Action) -> AbstractContextManager:
        """Return what times the action while it runs."""
        if self._is_profiled:
            return self._profiled(action)
        return _NOTHING if self._trace is None else self._trace.measure(action)

    def _forward(self, each: Instruction) -> None:
        key = each.key
        stage = self._stages[key[0]]
        input = None
        if each.receive is not None:
            input = self._received(each)
        elif each.from_here:
            input = self.handed_inputs.pop(key)
        if input is not None:
            input.requires_grad_(self._has_backward and input.is_floating_point())
        recomputed = each.again is Kind.R
        if recomputed:
            with self.measured(each.action), torch.no_grad():
                output = stage.forward(key[1], input, will_recompute=True)
            self._inputs[key] = input
        else:
            output = self._run_stage(each, stage.forward, input)
        if each.send is not None:
            self._put_out(each.send, output.detach())
        elif each.to_here is not None:
            self.handed_inputs[each.to_here] = self._held(output.detach())
        else:
            return
        if self._has_backward and not recomputed:
            stage.release_output(output)

    def _received(self, each: Instruction) -> torch.Tensor:
        assert each.receive is not None
        tensor = self._transport.wait(each.receive)
        for sent in each.settles:
            self._transport.settle(sent)
        return tensor

    def _recompute(self, each: Instruction) -> None:
        stage = self._stages[each.action.stage]
        output = self._run_stage(each, stage.recompute, self._inputs.pop(each.key))
        if each.send is not None or each.to_here is not None:
            stage.release_output(output)

    def _recompute_selectively(self, each: Instruction) -> None:
        with self.measured(each.action):
            self._recorders.pop(each.key).run_again()

    def _run_stage(
        self,
        each: Instruction,
        forward: Callable[[int, torch.Tensor | None], torch.Tensor],
        input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a stage, and keep what its backward needs if there is one."""
        key, selective = each.key, each.again is Kind.RS
        queue = None
        if each.split:
            queue = self.queues[key] = WeightGradientQueue()
        elif each.offloaded or selective:
            # Stock's linear layers hand their weight to autograd beside their input, and it must come back as it is.
            queue = ImmediateWeightGradients()
        if queue is None and self.ledger is None:
            with self.measured(each.action):
                output = forward(key[1], input)
        else:
            recorded: AbstractContextManager[None] = _NOTHING
            if selective:
                self._recorders[key] = Recorder(self._held)
                recorded = self._recorders[key].record()
            with self.measured(each.action), collecting(queue), self._watched(each), recorded:
                output = forward(key[1], input)
        if self._has_backward:
            self._inputs[key], self._outputs[key] = input, output
        return output

    def _backward(self, each: Instruction) -> None:
        key = each.key
        output_gradient = None
        if each.receive is not None:
            output_gradient = self._received(each)
        elif each.from_here:
            output_gradient = self.handed_gradients.pop(key)
        backward = self._stages[key[0]].backward
        input, output = self._inputs.pop(key), self._outputs.pop(key)
        if each.split:
            queue = self.queues[key]
            with self.measured(each.action), collecting(queue):
                gradient = backward(key[1], input, output, output_gradient)
            if self.ledger is not None:
                for tensor in queue.tensors():
                    self.ledger.hold(tensor)
        else:
            with self.measured(each.action):
                gradient = backward(key[1], input, output, output_gradient)
        if each.send is None and each.to_here is None:
            return
        if gradient is None:
            raise RuntimeError(
                f"stage {key[0]} gave no gradient for its input; a frozen stage or one that ignores its input "
                "cannot stand behind a stage that trains"
            )
        if each.send is not None:
            self._put_out(each.send, gradient)
        elif each.to_here is not None:
            self.handed_gradients[each.to_here] = self._held(gradient)

    def _weight_gradients(self, each: Instruction) -> None:
        queue = self.queues.pop(each.key)
        if self.ledger is not None:
            # Gone when this action ends, but the threads of a backend that gathers them let go a moment later.
            for tensor in queue.tensors():
                self.ledger.release(tensor)
        with self.measured(each.action):
            queue.run()

    def _put_out(self, send: Action, tensor: torch.Tensor) -> None:
        self._outbox[send] = tensor, self.ledger is not None and bool(self.ledger.hold(tensor))

    def _send(self, each: Instruction) -> None:
        tensor, is_counted_here = self._outbox.pop(each.action)
        self._transport.post_send(each.action, tensor)
        # An output that autograd keeps goes on counting; of a gradient, nobody but the transport has anything left.
        if self.ledger is not None and (is_counted_here or each.action.kind is Kind.SEND_I):
            self.ledger.release(tensor)

    def _receive(self, each: Instruction) -> None:
        buffer = self._transport.post_receive(each.action)
        if buffer is not None:
            self._held(buffer)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.ledger is not None:
            self.ledger.hold(tensor)
        return tensor

    def _watched(self, each: Instruction) -> AbstractContextManager:
        """Hooks for saved tensors do not nest: who captures a stage to move it tells the ledger."""
        if each.offloaded or self.ledger is None or not self._has_backward:
            return _NOTHING
        return self.ledger.watch_saved()

    @contextmanager
    def _profiled(self, action: Action) -> Iterator[None]:
        with (
            torch.profiler.record_function(f"PP:{action}"),
            self._trace.measure(action) if self._trace is not None else _NOTHING,
        ):
            yield
