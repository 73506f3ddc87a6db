"""Interprets one rank's part of a program. Every schedule runs through this loop; none has a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.copies import CopySums
from megatron_pipemem.runtime.offload import OffloadEngine
from megatron_pipemem.runtime.selective import Recorder
from megatron_pipemem.runtime.trace import Trace
from megatron_pipemem.runtime.transport import Transport
from megatron_pipemem.runtime.vocabulary.passes import VocabularyPasses
from megatron_pipemem.runtime.weight_gradients import ImmediateWeightGradients, WeightGradientQueue, collecting
from megatron_pipemem.schedule.action import VOCABULARY, VOCABULARY_COMPUTE, Action, Kind
from megatron_pipemem.schedule.schedule import Program


class StageRunner(Protocol):
    """One stage of the model on this rank."""

    def forward(self, microbatch: int, input: torch.Tensor | None, again: bool = False) -> torch.Tensor:
        """Run the stage. ``input`` is ``None`` on the stage that reads the data; the last stage returns its loss.

        What of it is cheap runs in regions of ``runtime.selective``, which drop what they make if the caller records.
        With vocabulary passes, the first stage gets the embedding's output, and the last one returns the head's input.
        ``again`` says that the stage will ``recompute`` this microbatch: it must be able to run it once more, exactly.
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
        """All gradients of the stage are complete, summed over its copies: start summing over the data-parallel ranks."""


class Weights(Protocol):
    """Who changes weights in the middle of a program."""

    def before(self, action: Action) -> None:
        """Show the action's stage the weights that it uses."""

    def after(self, action: Action) -> None:
        """Update the weights if the action was the last of a group."""


@dataclass(frozen=True)
class InFlight:
    """What one call leaves for the next one: microbatches that have run forward, keyed by stage and number, and messages."""

    inputs: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
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
        copies: adds up gradients, for programs of more than one replica.
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
        copies: CopySums | None = None,
        weights: Weights | None = None,
        carried: InFlight | None = None,
    ):
        self._program = program
        self._placement = program.placement
        self._device = device
        self._stages = stages
        self._transport = transport
        self._ledger = ledger
        self._trace = trace
        self._offload = offload
        self._vocabulary = vocabulary
        self._copies = copies
        self._weights = weights
        self._actions = program.actions[device]
        self._split = {(a.stage, a.microbatch) for a in self._actions if a.kind is Kind.I}
        self._recomputed = {(a.stage, a.microbatch) for a in self._actions if a.kind is Kind.R}
        self._selective = {(a.stage, a.microbatch) for a in self._actions if a.kind is Kind.RS}
        # Whole stages, because its microbatches may share tensors: those leave with the last that is offloaded.
        self._offloaded = {a.stage for a in self._actions if a.kind is Kind.OFFLOAD}
        self._has_backward = any(a.kind in (Kind.I, Kind.B) for a in self._actions)
        # Keyed by (stage, microbatch) of the stage that uses the tensor next.
        carried = carried or InFlight()
        self._inputs: dict[tuple[int, int], torch.Tensor | None] = dict(carried.inputs)
        self._outputs: dict[tuple[int, int], torch.Tensor] = dict(carried.outputs)
        if carried.arrived:
            transport.arrived(carried.arrived)
        self._local_inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._local_gradients: dict[tuple[int, int], torch.Tensor] = {}
        self._queues: dict[tuple[int, int], WeightGradientQueue] = {}
        self._recorders: dict[tuple[int, int], Recorder] = {}
        self._outbox: dict[Action, torch.Tensor] = {}
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
            Kind.SUM_COPIES: lambda action: self._copies.post(action.stage),
            Kind.REDUCE_GRAD: self._reduce_gradients,
            Kind.OFFLOAD: lambda action: self._offload.offload(_key(action)),
            Kind.RELOAD: lambda action: self._offload.reload(_key(action)),
            Kind.WAIT_OFFLOAD: lambda action: self._offload.wait(_key(action)),
            Kind.WAIT_RELOAD: lambda action: self._offload.wait(_key(action)),
            **dict.fromkeys(VOCABULARY, self._vocabulary_pass),
        }

    def run(self) -> None:
        """Run every action of this device in order.

        Raises:
            Exception: whatever an action raises, with a note that names the rank, the position and the action.
        """
        for position, action in enumerate(self._actions):
            try:
                if self._weights is not None:
                    self._weights.before(action)
                self._perform[action.kind](action)
                if self._weights is not None:
                    self._weights.after(action)
                if self._ledger is not None:
                    self._ledger.record(action, self._offload.host_bytes if self._offload is not None else 0)
            except Exception as error:
                error.add_note(
                    f"device {self._device} failed at position {position}, action {action}, "
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

    def _forward(self, action: Action) -> None:
        stage, key = self._stages[action.stage], _key(action)
        before, after = self._placement.previous_stage(action.stage), self._placement.next_stage(action.stage)
        input = None
        if before is not None:
            input = (
                self._local_inputs.pop(key)
                if self._is_local(before)
                else self._transport.wait(Action(Kind.RECV_F, *key))
            )
        elif self._vocabulary is not None:
            input = self._vocabulary.embedded(action.microbatch)
        if input is not None:
            input.requires_grad_(self._has_backward and input.is_floating_point())
        if key in self._recomputed:
            with self._measured(action), torch.no_grad():
                output = stage.forward(action.microbatch, input, again=True)
            self._inputs[key] = input
        else:
            output = self._run_stage(action, stage.forward, input)
        if after is None and self._vocabulary is None:
            return
        passed_on = output.detach()
        if action.stage in self._offloaded:
            self._offload.stay(key, [passed_on])
        if after is None:
            self._vocabulary.take_head_input(action.microbatch, passed_on)
        elif self._is_local(after):
            self._local_inputs[after, action.microbatch] = self._held(passed_on)
        else:
            self._outbox[Action(Kind.SEND_F, *key)] = passed_on
        if self._has_backward and key not in self._recomputed:
            stage.release_output(output)

    def _recompute(self, action: Action) -> None:
        stage = self._stages[action.stage]
        output = self._run_stage(action, stage.recompute, self._inputs.pop(_key(action)))
        if self._placement.next_stage(action.stage) is not None:
            stage.release_output(output)

    def _recompute_selectively(self, action: Action) -> None:
        with self._measured(action):
            self._recorders.pop(_key(action)).run_again()

    def _run_stage(
        self,
        action: Action,
        forward: Callable[[int, torch.Tensor | None], torch.Tensor],
        input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a stage, and keep what its backward needs if there is one."""
        key = _key(action)
        captured, selective = action.stage in self._offloaded, key in self._selective
        queue = None
        if key in self._split:
            queue = WeightGradientQueue()
        elif captured or selective:
            # Stock's linear layers hand their weight to autograd beside their input, and it must come back as it is.
            queue = ImmediateWeightGradients()
        recorded = nullcontext()
        if selective:
            self._recorders[key] = Recorder(self._made_again)
            recorded = self._recorders[key].record()
        with self._measured(action), collecting(queue), self._watched(key), recorded:
            output = forward(action.microbatch, input)
        if captured and input is not None:
            self._offload.stay(key, [input])
        if self._has_backward:
            self._inputs[key], self._outputs[key] = input, output
        if key in self._split:
            self._queues[key] = queue
        return output

    def _backward(self, action: Action) -> None:
        stage, key = self._stages[action.stage], _key(action)
        before, after = self._placement.previous_stage(action.stage), self._placement.next_stage(action.stage)
        output_gradient = None
        if after is not None:
            output_gradient = (
                self._local_gradients.pop(key)
                if self._is_local(after)
                else self._transport.wait(Action(Kind.RECV_I, *key))
            )
            self._transport.settle(Action(Kind.SEND_F, *key))
        elif self._vocabulary is not None:
            output_gradient = self._vocabulary.head_gradient(action.microbatch)
        queue = self._queues.get(key)
        with self._measured(action), collecting(queue):
            gradient = stage.backward(self._inputs.pop(key), self._outputs.pop(key), output_gradient)
        if queue is not None and self._ledger is not None:
            for tensor in queue.tensors():
                self._ledger.hold(tensor, "weight_gradients")
        if before is None and self._vocabulary is None:
            return
        if gradient is None:
            raise RuntimeError(
                f"stage {action.stage} gave no gradient for its input; a frozen stage or one that ignores its input "
                "cannot stand behind a stage that trains"
            )
        if before is None:
            self._vocabulary.take_embedding_gradient(action.microbatch, gradient)
        elif self._is_local(before):
            self._local_gradients[before, action.microbatch] = self._held(gradient)
        else:
            self._outbox[Action(Kind.SEND_I, *key)] = gradient

    def _weight_gradients(self, action: Action) -> None:
        queue = self._queues.pop(_key(action))
        if self._ledger is not None:
            # Gone when this action ends, but the threads of a backend that gathers them let go a moment later.
            for tensor in queue.tensors():
                self._ledger.release(tensor)
        with self._measured(action):
            queue.run()

    def _send(self, action: Action) -> None:
        tensor = self._outbox.pop(action)
        self._transport.post_send(action, tensor)
        if self._ledger is not None and action.kind is Kind.SEND_I:
            self._ledger.release(tensor)

    def _receive(self, action: Action) -> None:
        buffer = self._transport.post_receive(action)
        if buffer is not None:
            self._held(buffer)

    def _reduce_gradients(self, action: Action) -> None:
        if self._copies is not None:
            self._copies.wait(action.stage)
        self._stages[action.stage].reduce_gradients()

    def _vocabulary_pass(self, action: Action) -> None:
        self._vocabulary.wait_for(action)
        with self._measured(action) if action.kind in VOCABULARY_COMPUTE else nullcontext():
            self._vocabulary.perform(action)

    def _is_local(self, stage: int) -> bool:
        return self._placement.devices[stage] == self._device

    def _made_again(self, tensor: torch.Tensor) -> None:
        if self._ledger is not None:
            self._ledger.hold(tensor, "saved")

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._ledger is not None:
            self._ledger.hold(tensor, "boundary")
        return tensor

    def _watched(self, key: tuple[int, int]) -> AbstractContextManager:
        """Hooks for saved tensors do not nest: an engine tells the ledger what it captures."""
        if key[0] in self._offloaded:
            return self._offload.capture(key)
        return self._ledger.watch_saved() if self._ledger is not None and self._has_backward else nullcontext()

    @contextmanager
    def _measured(self, action: Action) -> Iterator[None]:
        # torch's own pipeline runtime uses the same names, so its profiles and ours read alike.
        profiled = torch.autograd._profiler_enabled()
        with (
            torch.profiler.record_function(f"PP:{action}") if profiled else nullcontext(),
            self._trace.measure(action) if self._trace is not None else nullcontext(),
        ):
            yield


def _key(action: Action) -> tuple[int, int]:
    """What belongs to one forward of one stage."""
    return action.stage, action.microbatch
