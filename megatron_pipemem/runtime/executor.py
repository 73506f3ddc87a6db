"""Interprets one rank's part of a program. Every schedule runs through this loop; none has a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.instructions import Instruction, Key, settle
from megatron_pipemem.runtime.offload import OffloadEngine
from megatron_pipemem.runtime.replicas import ReplicaReducer
from megatron_pipemem.runtime.selective import Recorder
from megatron_pipemem.runtime.trace import Trace
from megatron_pipemem.runtime.transport import Transport
from megatron_pipemem.runtime.vocabulary.passes import VocabularyPasses
from megatron_pipemem.runtime.weight_gradients import ImmediateWeightGradients, WeightGradientQueue, collecting
from megatron_pipemem.schedule.core.action import VOCABULARY, VOCABULARY_COMPUTE, Action, Kind
from megatron_pipemem.schedule.core.schedule import Program

_NOTHING = nullcontext()


class StageRunner(Protocol):
    """One stage of the model on this rank."""

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        """Run the stage. ``input`` is ``None`` on the stage that reads the data; the last stage returns its loss.

        What of it is cheap runs in regions of ``runtime.selective``, which drop what they make if the caller records.
        With vocabulary passes, the first stage gets the embedding's output, and the last one returns the head's input.
        ``will_recompute`` says that the stage will ``recompute`` this microbatch: it must be able to run it once more, exactly.
        """

    def recompute(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        """Run the stage as its ``forward`` of this microbatch ran, with the same data and random numbers.

        What a forward reports, it has reported.
        """

    def release_output(self, output: torch.Tensor) -> None:
        """The output has been passed on: its memory may go, its graph stays."""

    def backward(
        self, input: torch.Tensor | None, output: torch.Tensor, output_gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Backpropagate and return the input's gradient. ``output_gradient`` is ``None`` for a loss.

        Weight gradients of layers that split go to the queue that is being collected.
        """

    def reduce_gradients(self) -> None:
        """All gradients of the stage are complete, summed over the replicas: start summing over the data-parallel ranks."""


class Weights(Protocol):
    """Who changes weights in the middle of a program."""

    def before(self, action: Action) -> None:
        """Show the action's stage the weights that it uses."""

    def after(self, action: Action) -> None:
        """Update the weights if the action was the last of a group."""


@dataclass(frozen=True)
class InFlight:
    """What one call leaves for the next one: microbatches that have run forward, keyed by stage and number, and messages."""

    inputs: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    arrived: dict[Action, torch.Tensor] = field(default_factory=dict)

    def renumbered(self, by: int) -> InFlight:
        """The same with ``by`` added to the numbers of all microbatches."""
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
        ledger: counts held bytes after every action, if given.
        trace: times every compute action, if given.
        offload: moves activations, for programs that offload any; within its ``step()``.
        vocabulary: performs the vocabulary passes of a program that has them.
        replicas: adds up gradients, for programs of more than one replica.
        weights: switches between versions of the weights, for asynchronous schedules.
        carried: what an earlier call has left in flight. This one's ``in_flight`` is what it leaves itself.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        stages: Mapping[int, StageRunner],
        transport: Transport,
        ledger: ActivationLedger | None = None,
        trace: Trace | None = None,
        offload: OffloadEngine | None = None,
        vocabulary: VocabularyPasses | None = None,
        replicas: ReplicaReducer | None = None,
        weights: Weights | None = None,
        carried: InFlight | None = None,
    ):
        self._program = program
        self._device = device
        self._stages = stages
        self._transport = transport
        self._ledger = ledger
        self._trace = trace
        self._offload = offload
        self._vocabulary = vocabulary
        self._replicas = replicas
        self._weights = weights
        settled = settle(program, device)
        self._instructions = settled.instructions
        self._has_backward = settled.has_backward
        # Keyed by (stage, microbatch) of the stage that uses the tensor next.
        carried = carried or InFlight()
        self._inputs: dict[Key, torch.Tensor | None] = dict(carried.inputs)
        self._outputs: dict[Key, torch.Tensor] = dict(carried.outputs)
        if carried.arrived:
            transport.arrived(carried.arrived)
        self._local_inputs: dict[Key, torch.Tensor] = {}
        self._local_gradients: dict[Key, torch.Tensor] = {}
        self._queues: dict[Key, WeightGradientQueue] = {}
        self._recorders: dict[Key, Recorder] = {}
        # With every result that has not been sent yet, whether only that makes the ledger count it.
        self._outbox: dict[Action, tuple[torch.Tensor, bool]] = {}
        self._perform = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.RS: self._recompute_selectively,
            Kind.I: self._backward,
            Kind.B: self._backward,
            Kind.W: self._weight_gradients,
            Kind.SEND_F: self._send,
            Kind.SEND_I: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_I: self._receive,
            Kind.REDUCE_REPLICAS: lambda each: self._replicas.post(each.action.stage),
            Kind.REDUCE_GRAD: self._reduce_gradients,
            Kind.OFFLOAD: lambda each: self._offload.offload(each.key),
            Kind.RELOAD: lambda each: self._offload.reload(each.key),
            Kind.WAIT_OFFLOAD: lambda each: self._offload.wait(each.key),
            Kind.WAIT_RELOAD: lambda each: self._offload.wait(each.key),
            **dict.fromkeys(VOCABULARY, self._vocabulary_pass),
        }

    def run(self) -> None:
        """Run every action of this device in order.

        Raises:
            Exception: whatever an action raises, with a note that names the rank, the position and the action.
        """
        perform, weights, ledger = self._perform, self._weights, self._ledger
        position = 0
        try:
            for position, each in enumerate(self._instructions):  # noqa: B007 - for the note
                action = each.action
                if weights is not None:
                    weights.before(action)
                perform[action.kind](each)
                if weights is not None:
                    weights.after(action)
                if ledger is not None:
                    ledger.record(action, self._offload.host_bytes if self._offload is not None else 0)
        except Exception as error:
            error.add_note(
                f"device {self._device} failed at position {position}, action {self._instructions[position].action}, "
                f"of schedule {self._program.schedule.name}"
            )
            raise
        self._transport.finish()
        if self._vocabulary is not None:
            self._vocabulary.finish()

    def in_flight(self) -> InFlight:
        """What has run forward and not backward, handed over. Everything that was sent to this rank has then arrived."""
        left = InFlight(self._inputs, self._outputs, self._transport.take_in())
        self._inputs, self._outputs = {}, {}
        return left

    def _forward(self, each: Instruction) -> None:
        action, key = each.action, each.key
        stage = self._stages[action.stage]
        input = None
        if each.receive is not None:
            input = self._transport.wait(each.receive)
        elif each.from_here:
            input = self._local_inputs.pop(key)
        elif self._vocabulary is not None:
            input = self._vocabulary.embedded(action.microbatch)
        if input is not None:
            input.requires_grad_(self._has_backward and input.is_floating_point())
        recomputed = each.again is Kind.R
        if recomputed:
            with self._measured(action), torch.no_grad():
                output = stage.forward(action.microbatch, input, will_recompute=True)
            self._inputs[key] = input
        else:
            output = self._run_stage(each, stage.forward, input)
        is_last = each.send is None and each.to_here is None
        if is_last and self._vocabulary is None:
            return
        passed_on = output.detach()
        if each.offloaded:
            self._offload.stay(key, [passed_on])
        if each.send is not None:
            self._put_out(each.send, passed_on)
        elif is_last:
            self._vocabulary.take_head_input(action.microbatch, passed_on)
        else:
            self._local_inputs[each.to_here] = self._held(passed_on)
        if self._has_backward and not recomputed:
            stage.release_output(output)

    def _recompute(self, each: Instruction) -> None:
        stage = self._stages[each.action.stage]
        output = self._run_stage(each, stage.recompute, self._inputs.pop(each.key))
        if each.send is not None or each.to_here is not None:
            stage.release_output(output)

    def _recompute_selectively(self, each: Instruction) -> None:
        with self._measured(each.action):
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
            queue = self._queues[key] = WeightGradientQueue()
        elif each.offloaded or selective:
            # Stock's linear layers hand their weight to autograd beside their input, and it must come back as it is.
            queue = ImmediateWeightGradients()
        recorded = _NOTHING
        if selective:
            self._recorders[key] = Recorder(self._made_again)
            recorded = self._recorders[key].record()
        with self._measured(each.action), collecting(queue), self._watched(each), recorded:
            output = forward(key[1], input)
        if each.offloaded and input is not None:
            self._offload.stay(key, [input])
        if self._has_backward:
            self._inputs[key], self._outputs[key] = input, output
        return output

    def _backward(self, each: Instruction) -> None:
        action, key = each.action, each.key
        output_gradient = None
        if each.receive is not None:
            output_gradient = self._transport.wait(each.receive)
        elif each.from_here:
            output_gradient = self._local_gradients.pop(key)
        elif self._vocabulary is not None:
            output_gradient = self._vocabulary.head_gradient(action.microbatch)
        if each.settles is not None:
            self._transport.settle(each.settles)
        queue = self._queues.get(key)
        with self._measured(action), collecting(queue):
            gradient = self._stages[action.stage].backward(
                self._inputs.pop(key), self._outputs.pop(key), output_gradient
            )
        if queue is not None and self._ledger is not None:
            for tensor in queue.tensors():
                self._ledger.hold(tensor, "weight_gradients")
        is_first = each.send is None and each.to_here is None
        if is_first and self._vocabulary is None:
            return
        if gradient is None:
            raise RuntimeError(
                f"stage {action.stage} gave no gradient for its input; a frozen stage or one that ignores its input "
                "cannot stand behind a stage that trains"
            )
        if each.send is not None:
            self._put_out(each.send, gradient)
        elif is_first:
            self._vocabulary.take_embedding_gradient(action.microbatch, gradient)
        else:
            self._local_gradients[each.to_here] = self._held(gradient)

    def _weight_gradients(self, each: Instruction) -> None:
        queue = self._queues.pop(each.key)
        if self._ledger is not None:
            # Gone when this action ends, but the threads of a backend that gathers them let go a moment later.
            for tensor in queue.tensors():
                self._ledger.release(tensor)
        with self._measured(each.action):
            queue.run()

    def _put_out(self, send: Action, tensor: torch.Tensor) -> None:
        self._outbox[send] = tensor, self._ledger is not None and bool(self._ledger.hold(tensor, "boundary"))

    def _send(self, each: Instruction) -> None:
        tensor, is_counted_here = self._outbox.pop(each.action)
        self._transport.post_send(each.action, tensor)
        # An output that autograd keeps goes on counting; of a gradient, nobody but the transport has anything left.
        if self._ledger is not None and (is_counted_here or each.action.kind is Kind.SEND_I):
            self._ledger.release(tensor)

    def _receive(self, each: Instruction) -> None:
        buffer = self._transport.post_receive(each.action)
        if buffer is not None:
            self._held(buffer)

    def _reduce_gradients(self, each: Instruction) -> None:
        stage = each.action.stage
        if self._replicas is not None:
            self._replicas.wait(stage)
        self._stages[stage].reduce_gradients()

    def _vocabulary_pass(self, each: Instruction) -> None:
        action = each.action
        self._vocabulary.wait_for(action)
        with self._measured(action) if action.kind in VOCABULARY_COMPUTE else _NOTHING:
            self._vocabulary.perform(action)

    def _made_again(self, tensor: torch.Tensor) -> None:
        if self._ledger is not None:
            self._ledger.hold(tensor, "saved")

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._ledger is not None:
            self._ledger.hold(tensor, "boundary")
        return tensor

    def _watched(self, each: Instruction) -> AbstractContextManager:
        """Hooks for saved tensors do not nest: an engine tells the ledger what it captures."""
        if each.offloaded:
            return self._offload.capture(each.key)
        return self._ledger.watch_saved() if self._ledger is not None and self._has_backward else _NOTHING

    def _measured(self, action: Action) -> AbstractContextManager:
        # torch's own pipeline runtime uses the same names, so its profiles and ours read alike.
        profiled = torch.autograd._profiler_enabled()
        if not profiled:
            return _NOTHING if self._trace is None else self._trace.measure(action)
        return self._profiled(action)

    @contextmanager
    def _profiled(self, action: Action) -> Iterator[None]:
        with (
            torch.profiler.record_function(f"PP:{action}"),
            self._trace.measure(action) if self._trace is not None else _NOTHING,
        ):
            yield
