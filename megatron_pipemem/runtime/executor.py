"""Run one rank's part of a program. All schedules share this loop, and features add handlers for their own actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Protocol, cast
from weakref import ref

import torch

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.selective import Recorder
from megatron_pipemem.runtime.transport import Transport
from megatron_pipemem.runtime.weight_gradients import (
    ImmediateWeightGradients,
    LateWeightGradients,
    WeightGradientQueue,
    collecting,
)
from megatron_pipemem.schedule.action import RECEIVES, RECOMPUTE, SENDS, Action, Kind
from megatron_pipemem.schedule.message_memory import freed_sends
from megatron_pipemem.schedule.schedule import Program

if TYPE_CHECKING:  # loaded where a step is timed
    from megatron_pipemem.runtime.trace import Trace

Key = tuple[int, int]
"""Stage and microbatch of a forward."""

_FORWARDS = frozenset((Kind.F, Kind.R, Kind.RS))
_BACKWARDS = frozenset((Kind.I, Kind.B))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action of a device, with the sources and destinations of its tensors.

    The fields from ``receive`` on are for forwards and backwards only.
    """

    action: Action
    key: Key
    receive: Action | None = None  # the message that it waits for
    # A stage of this device makes its tensor. With a cut vocabulary, the embedding and the head count as such stages.
    is_made_here: bool = False
    send: Action | None = None  # the message with its result
    consumer_on_this_device: Key | None = None  # the forward or backward of this device that takes its result
    # Messages of this device that the sender of ``receive`` had used before it sent.
    frees_sent: tuple[Action, ...] = ()
    is_split: bool = False  # its backward is split into I and W
    recompute_kind: Kind | None = None  # the action that runs its forward again
    is_offloaded: bool = False  # activations of its stage leave the device


@dataclass(frozen=True)
class RankProgram:
    """The instructions of one device."""

    instructions: tuple[Instruction, ...]
    has_backward: bool
    kinds: frozenset[Kind]


@lru_cache(maxsize=32)  # a run has few programs: training, evaluation, and their versions before a new plan
def rank_program(program: Program, device: int) -> RankProgram:
    """Return a device's instructions. Nothing is sent, received or freed here.

    For each received message, they name the sent messages whose memory this device may then free. The cache compares
    programs by identity.
    """
    freed = freed_sends(program, device)
    instructions = [
        replace(instruction, frees_sent=freed[instruction.action]) if instruction.action in freed else instruction
        for instruction in _instructions(program, device)
    ]
    kinds = frozenset(instruction.action.kind for instruction in instructions)
    return RankProgram(tuple(instructions), not kinds.isdisjoint(_BACKWARDS), kinds)


@lru_cache(maxsize=128)
def _instructions(program: Program, device: int) -> tuple[Instruction, ...]:
    actions = program.actions[device]
    split_keys = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.I}
    recompute_kinds = {(a.stage, a.microbatch): a.kind for a in actions if a.kind in RECOMPUTE}
    # By stage, because microbatches may share tensors. A shared tensor is offloaded with the last offloaded microbatch.
    offloaded_stages = {a.stage for a in actions if a.kind is Kind.OFFLOAD}
    placement, cut = program.placement, bool(program.schedule.vocabulary_barriers)
    instructions = []
    for action in actions:
        kind, stage, microbatch = action
        key = (stage, microbatch)
        if kind not in _FORWARDS and kind not in _BACKWARDS:
            instructions.append(Instruction(action, key))
            continue
        neighbours = placement.previous_stage(stage), placement.next_stage(stage)
        is_forward = kind in _FORWARDS
        before, after = neighbours if is_forward else neighbours[::-1]
        receive, send = (Kind.RECV_F, Kind.SEND_F) if is_forward else (Kind.RECV_I, Kind.SEND_I)
        is_made_here, is_used_here = (
            cut if neighbour is None else placement.devices[neighbour] == device for neighbour in (before, after)
        )
        if after is None:
            # With a cut vocabulary, the head counts as the stage after the last, and the embedding as stage -1.
            after_stage, sent = stage + 1 if is_forward else stage - 1, None
        else:
            after_stage, sent = after, None if is_used_here else Action(send, *key)
        instructions.append(
            Instruction(
                action,
                key,
                receive=None if before is None or is_made_here else Action(receive, *key),
                is_made_here=is_made_here,
                send=sent,
                consumer_on_this_device=(after_stage, microbatch) if is_used_here else None,
                is_split=key in split_keys,
                recompute_kind=recompute_kinds.get(key),
                is_offloaded=stage in offloaded_stages,
            )
        )
    return tuple(instructions)


Handler = Callable[[Instruction], None]
"""A function that performs one action."""

Handlers = Mapping[Kind, Handler]

_NOTHING = nullcontext()


class StageRunner(Protocol):
    """A model stage on this rank, as the executor calls it.

    Example: a stage that is one module. The first stage has the batches of the step, and the last one a loss function.

        class ModuleRunner:
            def __init__(self, module, batches=None, loss=None):
                self.module, self.batches, self.loss = module, batches, loss

            def forward(self, microbatch, input, will_recompute=False):
                output = self.module(self.batches[microbatch] if input is None else input)
                return output if self.loss is None else self.loss(output)

            def recompute(self, microbatch, input):
                return self.forward(microbatch, input)

            def release_output(self, output):
                pass

            def backward(self, microbatch, input, output, output_gradient):
                output.backward(output_gradient)
                return None if input is None else input.grad

            def reduce_gradients(self):
                pass
    """

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        """Run the stage, and return its output. The last stage returns its loss.

        If microbatches run in parts, ``microbatch`` is the number of a unit, and the last stage returns the tensor to run
        backward from. With vocabulary passes, the first stage gets the embedding's output, and the last stage
        returns the head's input. Cheap parts of a stage run in regions of ``runtime.selective``, which can drop their
        results.

        Args:
            microbatch: its number within the step.
            input: the output of the previous stage; ``None`` on the stage that reads the data.
            will_recompute: whether ``recompute`` will run this microbatch again, and must reproduce it exactly.
        """

    def recompute(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        """Run the forward of this microbatch again, with the same data and random numbers, and return its output.

        Report no loss.
        """

    def release_output(self, output: torch.Tensor) -> None:
        """Drop an output's data, but keep its graph for the backward. The executor keeps data to send or hand on."""

    def backward(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run the backward of a microbatch, and return the gradient of the input.

        Layers that split their backward put their weight gradients into the queue of ``collecting``.

        Args:
            microbatch: its number within the step.
            input: the input of the forward; ``None`` on the stage that reads the data.
            output: the output of the forward.
            output_gradient: gradient of the output; ``None`` for a loss.
        """

    def reduce_gradients(self) -> None:
        """Start to sum the stage's gradients over data-parallel ranks. Called when all passes have added to them."""


BackwardArguments = tuple[int, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
"""The arguments of ``StageRunner.backward``: the microbatch, its input, its output and the gradient of its output."""


class PairRunner(StageRunner, Protocol):
    """A stage that can run a forward together with a backward of any stage of this rank."""

    def run_pair(
        self, microbatch: int, input: torch.Tensor | None, other: PairRunner, arguments: BackwardArguments
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a forward of this stage together with a backward of the stage ``other``.

        ``microbatch`` and ``input`` are those of the forward, and ``arguments`` those of the backward. Return the
        output of the forward, then the gradient of the backward's input.
        """

    def defer_weight_gradients(self) -> None:
        """Put the weight gradients that this stage's layers keep after a backward into the queue of ``collecting``."""


class StepFeature(Protocol):
    """Adds a feature's handlers of actions to the executor of one step.

    Example: perform AUDIT actions, and count forwards.

        class Audits:
            def extend(self, executor):
                run_forward = executor.handlers[Kind.F]

                def forward(instruction):
                    self.forwards += 1
                    run_forward(instruction)

                return {Kind.AUDIT: self.check, Kind.F: forward}
    """

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers for the feature's own kinds of actions, and replacements of earlier handlers.

        Args:
            executor: the executor before its run. ``executor.handlers`` holds the earlier handlers.
        """


@dataclass(frozen=True)
class InFlight:
    """The tensors that one step leaves for the next: of forwards without a backward so far, and unused messages."""

    # The inputs and outputs of microbatches whose forward has run and whose backward has not.
    inputs: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    arrived: dict[Action, torch.Tensor] = field(default_factory=dict)  # received but unused, by their receive

    def renumbered(self, by: int) -> InFlight:
        """Return a copy in which every microbatch number is larger by ``by``. The tensors are the same."""
        inputs = {(stage, microbatch + by): tensor for (stage, microbatch), tensor in self.inputs.items()}
        outputs = {(stage, microbatch + by): tensor for (stage, microbatch), tensor in self.outputs.items()}
        arrived = {
            action._replace(microbatch=action.microbatch + by): tensor for action, tensor in self.arrived.items()
        }
        return InFlight(inputs, outputs, arrived)


@dataclass(eq=False)
class Progress:
    """How far the training thread of this process is, for another thread to read (``runtime.positions``).

    Attributes:
        steps: number of steps that have begun, training and evaluation.
        thread: the training thread.
        executor: of the last step, while it exists.
        position: index of the running action among the executor's instructions; ``None`` outside of a step.
        since: ``time.monotonic()`` when the action began, or when the step ended.
        launched: an event of the GPU after the last step; ``None`` on a CPU.
        patience: seconds for which an action may run before the ranks report their positions; ``None`` without a limit.
    """

    steps: int = 0
    thread: int | None = None
    executor: ref[Executor] | None = None
    position: int | None = None
    since: float = field(default_factory=monotonic)
    launched: torch.cuda.Event | None = None
    patience: float | None = None
    _told: tuple[int, int | None] | None = None

    def begin(self, executor: Executor) -> None:
        self.steps += not executor._done  # a trial runs the first actions alone
        self.thread, self.executor, self.launched = get_ident(), ref(executor), None

    def end(self) -> None:
        self.position, self.since = None, monotonic()

    def stands_still(self) -> bool:
        """Return whether the running action, or the GPU's work of the last step, takes longer than ``patience``.

        It is true once for each place.
        """
        place = self.steps, self.position
        if self.patience is None or monotonic() - self.since < self.patience or place == self._told:
            return False
        if self.position is None and (self.launched is None or self.launched.query()):
            return False
        self._told = place
        return True


PROGRESS = Progress()
"""Of this process."""


class Executor:
    """Runs one step of a validated program on one rank.

    An executor lives for one step, so an exception leaves no state for the next step.

    Attributes:
        instructions: the actions of this device, in order.
        handlers: the function that performs each kind of action.
        handed_inputs: inputs that a stage of this device has made, by the stage and microbatch that take them.
        handed_gradients: gradients of outputs that a stage of this device has made, by the stage and microbatch that
            take them.
        queues: the weight gradients of each W that has not run, by stage and microbatch.
        late_weights: whether backwards that are not split queue their weight gradients too (``LateWeightGradients``).
        host_bytes: a function that returns the bytes of activations on the host.
        at_end: functions to call after the last action and ``Transport.finish``.
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
        rank = rank_program(program, device)
        self.instructions = rank.instructions
        self._has_backward = rank.has_backward
        self._is_profiled = False
        self._done = 0
        # Keyed by (stage, microbatch) of the stage that uses the tensor next.
        self._inputs: dict[Key, torch.Tensor | None] = {}
        self._outputs: dict[Key, torch.Tensor] = {}
        self.handed_inputs: dict[Key, torch.Tensor] = {}
        self.handed_gradients: dict[Key, torch.Tensor] = {}
        self.queues: dict[Key, WeightGradientQueue] = {}
        self.late_weights = False
        self._recorders: dict[Key, Recorder] = {}
        # The results that have not been sent yet, and whether the ledger counts them only because of that.
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
            Kind.REDUCE_GRAD: lambda instruction: self._stages[instruction.action.stage].reduce_gradients(),
        }
        try:
            for feature in features:
                self.handlers |= feature.extend(self)
            if unknown := sorted(rank.kinds.difference(self.handlers)):
                raise UnsupportedError(
                    "no-handler",
                    f"the executor has no handler for {', '.join(unknown)}; give it a StepFeature that returns one",
                )
        except BaseException:
            self.close()
            raise

    def run(self, until: int | None = None) -> None:
        """Run the actions of this device in order, after those that earlier calls have run.

        ``until`` is the number of actions after which to stop, counted from the first of the step. By default all run,
        and ``Transport.finish`` and the functions of ``at_end`` follow. An exception of an action gets a note with the
        device, the position and the action.
        """
        handlers, ledger = self.handlers, self.ledger
        self._is_profiled = torch.autograd._profiler_enabled()
        position = begin = self._done
        progress = PROGRESS
        progress.begin(self)
        try:
            for position, instruction in enumerate(self.instructions[begin:until], begin):
                progress.position, progress.since = position, monotonic()
                handlers[instruction.action.kind](instruction)
                if ledger is not None:
                    ledger.record(instruction.action, self.host_bytes())
        except Exception as error:
            error.add_note(
                f"device {self._device} failed at position {position}, action {self.instructions[position].action}, "
                f"of schedule {self._program.schedule.name}"
            )
            raise
        else:
            if until is None:
                self._transport.finish()
                for finish in self.at_end:
                    finish()
        finally:
            progress.end()
        if until is not None:
            self._done = until

    @property
    def awaited(self) -> tuple[Action, int] | None:
        """The message that the host waits for at this moment, and the global rank at its other end."""
        action = self._transport.awaited
        return None if action is None else (action, self._transport.rank_of(action))

    def close(self) -> None:
        """Forget the handlers and the features' functions. Call it after the step, also if the step has failed.

        They refer to this executor. The circle would keep the tensors of the step until Python collects garbage, which
        some loops seldom do.
        """
        self.handlers.clear()
        self.at_end.clear()
        self.host_bytes = int
        self._transport.note_finished()

    def drop(self, drain: Sequence[Action]) -> None:
        """Complete every message that has been started, and drop the received tensors. Do not run this executor again.

        ``drain`` holds receives of messages that other ranks have sent, and sends that other ranks wait for. The
        content of these sends is not used.
        """
        for action in drain:
            if action.kind in RECEIVES:
                self._transport.post_receive(action)
            else:
                self._transport.post_send(action, self._transport.blank(action))
        self._transport.take_in()
        self._transport.finish()

    def take_in(self, left: InFlight) -> None:
        """Add the tensors that the previous step left for this one, without running. Call this before ``run``."""
        self._inputs |= left.inputs
        self._outputs |= left.outputs
        if left.arrived:
            self._transport.arrived(left.arrived)

    def in_flight(self) -> InFlight:
        """Wait for all posted receives. Return the tensors of forwards without a backward, and the unused messages.

        This executor gives them up. The next step's executor takes them with ``take_in``.
        """
        left = InFlight(self._inputs, self._outputs, self._transport.take_in())
        self._inputs, self._outputs = {}, {}
        return left

    def kept_tensors(self, instruction: Instruction) -> list[torch.Tensor]:
        """Return the input and output of a forward that the executor itself keeps at present, apart from autograd."""
        sent = self._outbox.get(instruction.send, (None,))[0] if instruction.send is not None else None
        handed = (
            self.handed_inputs.get(instruction.consumer_on_this_device)
            if instruction.consumer_on_this_device is not None
            else None
        )
        tensors = (self._inputs.get(instruction.key), sent, handed)
        return [tensor for tensor in tensors if tensor is not None]

    def measured(self, action: Action) -> AbstractContextManager:
        """Return a context that times the action if there is a trace, and names it if PyTorch's profiler runs."""
        if self._is_profiled:
            return self._profiled(action)
        return _NOTHING if self._trace is None else self._trace.measure(action)

    def _forward(self, instruction: Instruction) -> None:
        key = instruction.key
        stage, input = self._stages[key[0]], self._input_of(instruction)
        if instruction.recompute_kind is Kind.R:
            with self.measured(instruction.action), torch.no_grad():
                output = stage.forward(key[1], input, will_recompute=True)
            self._inputs[key] = input
        else:
            output = self._run_stage(instruction, stage.forward, input)
        self._pass_on(instruction, output)

    def _input_of(self, instruction: Instruction) -> torch.Tensor | None:
        """Wait for the input of a forward, and return it; ``None`` on the stage that reads the data.

        The input requires a gradient if it has floating-point numbers and the program has backwards.
        """
        input = None
        if instruction.receive is not None:
            input = self._received(instruction)
        elif instruction.is_made_here:
            input = self.handed_inputs.pop(instruction.key)
        if input is not None:
            input.requires_grad_(self._has_backward and input.is_floating_point())
        return input

    def _pass_on(self, instruction: Instruction, output: torch.Tensor) -> None:
        """Keep the output of a forward for its send, or for the next stage on this device. Nothing is sent here.

        The stage may then drop its own output's data, unless the forward runs again or the program has no backward.
        """
        if instruction.send is not None:
            self._put_out(instruction.send, output.detach())
        elif instruction.consumer_on_this_device is not None:
            self.handed_inputs[instruction.consumer_on_this_device] = self._hold(output.detach())
        else:
            return
        if self._has_backward and instruction.recompute_kind is not Kind.R:
            self._stages[instruction.key[0]].release_output(output)

    def run_pair(self, forward: Instruction, backward: Instruction) -> Callable[[], None]:
        """Run a forward and a backward together. The backward's stage is a ``PairRunner``.

        Return a function to call as the backward's action, because the ledger counts the two actions apart. It puts the
        weight gradients into the backward's queue, and keeps the gradient of the backward's input for the previous
        stage.
        """
        runner, key = cast(PairRunner, self._stages[forward.key[0]]), backward.key
        other = cast(PairRunner, self._stages[key[0]])
        input, gradient = self._input_of(forward), self._gradient_of(backward)
        if self.ledger is not None:
            self.ledger.free_later()
        arguments = [(key[1], self._inputs.pop(key), self._outputs.pop(key), gradient)]
        gradients: list[torch.Tensor | None] = []

        def together(microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
            output, gradient = runner.run_pair(microbatch, input, other, arguments.pop())
            gradients.append(gradient)
            return output

        self._pass_on(forward, self._run_stage(forward, together, input))

        def finish() -> None:
            with self.measured(backward.action), collecting(self.queues[key]):
                other.defer_weight_gradients()
                if not backward.is_split:
                    self.queues.pop(key).run()
            self._hold_queued(backward)
            self._pass_back(backward, gradients.pop())

        return finish

    def _received(self, instruction: Instruction) -> torch.Tensor:
        assert instruction.receive is not None
        tensor = self._transport.wait(instruction.receive)
        for sent in instruction.frees_sent:
            self._transport.free_sent(sent)
        return tensor

    def _recompute(self, instruction: Instruction) -> None:
        stage = self._stages[instruction.action.stage]
        output = self._run_stage(instruction, stage.recompute, self._inputs.pop(instruction.key))
        if instruction.send is not None or instruction.consumer_on_this_device is not None:
            stage.release_output(output)

    def _recompute_selectively(self, instruction: Instruction) -> None:
        with self.measured(instruction.action):
            self._recorders.pop(instruction.key).run_again()

    def _run_stage(
        self,
        instruction: Instruction,
        forward: Callable[[int, torch.Tensor | None], torch.Tensor],
        input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the forward of a stage with ``forward``, and return its output.

        Keep its input and output if the program has backwards. If the backward is split, its W gets a new queue.
        """
        key, is_selective = instruction.key, instruction.recompute_kind is Kind.RS
        queue = None
        if instruction.is_split:
            queue = self.queues[key] = WeightGradientQueue()
        elif instruction.is_offloaded or is_selective:
            # Megatron's linear layers save their weight with autograd, and need it unchanged in the backward.
            queue = ImmediateWeightGradients()
        elif self.late_weights and self._has_backward:
            queue = self.queues[key] = LateWeightGradients()
        if queue is None and self.ledger is None:
            with self.measured(instruction.action):
                output = forward(key[1], input)
        else:
            recorded: AbstractContextManager[None] = _NOTHING
            if is_selective:
                self._recorders[key] = Recorder(self._hold)
                recorded = self._recorders[key].record()
            with self.measured(instruction.action), collecting(queue), self._watched(instruction), recorded:
                output = forward(key[1], input)
        if self._has_backward:
            self._inputs[key], self._outputs[key] = input, output
        return output

    def _backward(self, instruction: Instruction) -> None:
        key = instruction.key
        output_gradient = self._gradient_of(instruction)
        backward = self._stages[key[0]].backward
        input, output = self._inputs.pop(key), self._outputs.pop(key)
        queue = self.queues.get(key)
        with self.measured(instruction.action), collecting(queue) if queue is not None else _NOTHING:
            gradient = backward(key[1], input, output, output_gradient)
            if not instruction.is_split and queue is not None:
                self.queues.pop(key).run()
        self._hold_queued(instruction)
        self._pass_back(instruction, gradient)

    def _gradient_of(self, instruction: Instruction) -> torch.Tensor | None:
        """Wait for the gradient of a stage's output, and return it; ``None`` for a loss."""
        if instruction.receive is not None:
            return self._received(instruction)
        return self.handed_gradients.pop(instruction.key) if instruction.is_made_here else None

    def _hold_queued(self, instruction: Instruction) -> None:
        """Let the ledger count the tensors that a backward has left for its W."""
        if instruction.is_split and self.ledger is not None:
            for tensor in self.queues[instruction.key].tensors():
                self.ledger.hold(tensor)

    def _pass_back(self, instruction: Instruction, gradient: torch.Tensor | None) -> None:
        """Keep the gradient of a backward's input for its send, or for the previous stage on this device.

        Nothing is sent here. The gradient is dropped on the stage that reads the data. Raise a RuntimeError if another
        stage has none.
        """
        if instruction.send is None and instruction.consumer_on_this_device is None:
            return
        if gradient is None:
            raise RuntimeError(
                f"stage {instruction.key[0]} gave no gradient for its input; a stage that detaches or ignores its input "
                "cannot come after another stage"
            )
        if instruction.send is not None:
            self._put_out(instruction.send, gradient)
        elif instruction.consumer_on_this_device is not None:
            self.handed_gradients[instruction.consumer_on_this_device] = self._hold(gradient)

    def _weight_gradients(self, instruction: Instruction) -> None:
        queue = self.queues.pop(instruction.key)
        if self.ledger is not None:
            # This action frees them, but a backend that gathers them may hold them a moment longer.
            for tensor in queue.tensors():
                self.ledger.release(tensor)
        with self.measured(instruction.action):
            queue.run()

    def _put_out(self, send: Action, tensor: torch.Tensor) -> None:
        self._outbox[send] = tensor, self.ledger is not None and bool(self.ledger.hold(tensor))

    def _send(self, instruction: Instruction) -> None:
        tensor, is_counted_here = self._outbox.pop(instruction.action)
        self._transport.post_send(instruction.action, tensor)
        # The ledger still counts an output, if autograd keeps it. A gradient is only kept by the transport.
        if self.ledger is not None and (is_counted_here or instruction.action.kind is Kind.SEND_I):
            self.ledger.release(tensor)

    def _receive(self, instruction: Instruction) -> None:
        buffer = self._transport.post_receive(instruction.action)
        if buffer is not None:
            self._hold(buffer)

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.ledger is not None:
            self.ledger.hold(tensor)
        return tensor

    def _watched(self, instruction: Instruction) -> AbstractContextManager:
        """Return a context in which the ledger counts the tensors that autograd saves.

        It does nothing without a ledger or without backwards. It does nothing for an offloaded stage either, because
        hooks on saved tensors do not nest, and the offload counts these tensors.
        """
        if instruction.is_offloaded or self.ledger is None or not self._has_backward:
            return _NOTHING
        return self.ledger.watch_saved()

    @contextmanager
    def _profiled(self, action: Action) -> Iterator[None]:
        with (
            torch.profiler.record_function(f"PP:{action}"),
            self._trace.measure(action) if self._trace is not None else _NOTHING,
        ):
            yield
