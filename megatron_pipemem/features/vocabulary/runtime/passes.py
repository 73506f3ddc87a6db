"""Run the vocabulary passes of a program on one rank, and keep their tensors between passes.

The program says when to start each collective. The pass that uses the result waits for it. The tokens and labels of
``Batch`` have the layout ``[b, s]``. All tensors from the head's input to that input's gradient have the layout
``[s, b]``, and ``Batch.labels_of`` returns labels in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_pipemem.features.vocabulary.runtime import collectives
from megatron_pipemem.features.vocabulary.runtime.head import (
    HeadMicrobatch,
    Normalised,
    OneBarrier,
    TwoBarriers,
    VocabularyShards,
    combine,
    finish_input_gradient,
)
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction
from megatron_pipemem.runtime.weight_gradients import Arriving
from megatron_pipemem.schedule.action import VOCABULARY, VOCABULARY_COMPUTE, Action, Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.units import WHOLE, Units


@dataclass(frozen=True)
class Batch:
    """The tokens and labels of all microbatches (or slices) of a step, whose ``b`` and ``s`` may differ."""

    tokens: Sequence[torch.Tensor]  # ``[b, s]`` of every microbatch
    labels: Sequence[torch.Tensor] | None  # ``[b, s]`` of every microbatch; ``None`` to get logits instead of losses
    looks_ahead: bool = (
        False  # the last stage also needs the embeddings of the following tokens (multi-token prediction)
    )
    depths: int = 0  # how many tokens after the next one the head predicts too

    def cut(self, bounds: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch with every sequence cut into slices. ``bounds`` has ``(first token, end)`` of each slice."""

        def parts(of: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [sequences[:, begin:end] for sequences in of for begin, end in bounds]

        return replace(self, tokens=parts(self.tokens), labels=None if self.labels is None else parts(self.labels))

    def empty_for_head(self, microbatch: int, *further: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory, ``[(1 + depths) * s, b, *further]``, one prediction depth after the other."""
        tokens = self.tokens[microbatch]
        b, s = tokens.shape
        return torch.empty((1 + self.depths) * s, b, *further, dtype=dtype, device=tokens.device)

    def tokens_of(self, microbatch: int) -> torch.Tensor:
        """Return the tokens to look up, ``[b, s]``, or ``[b, s + 1]`` if the last stage needs following tokens too.

        The added column is 0, because Megatron's multi-token prediction reads token 0 after the end of a sequence.
        """
        tokens = self.tokens[microbatch]
        return torch.nn.functional.pad(tokens, (0, 1)) if self.looks_ahead else tokens

    def labels_of(self, microbatch: int) -> torch.Tensor:
        """Return the labels of all prediction depths, ``[(1 + depths) * s, b]``.

        Labels after the end of a sequence are 0, because Megatron masks the loss there.
        """
        assert self.labels is not None
        labels = self.labels[microbatch]
        rolled = [torch.nn.functional.pad(labels[:, depth:], (0, depth)) for depth in range(1 + self.depths)]
        return torch.cat(rolled, dim=1).t().contiguous()


class HeadStage(Protocol):
    """The operations on the model's last stage that the passes of the LM head need."""

    def gather_head_input(self, output: torch.Tensor) -> torch.Tensor:
        """Return the head's input of all tensor-parallel ranks, ``[(1 + depths) * s, b, h]``, depth after depth."""

    def scatter_head_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the head's input gradient, which may change, summed over tensor-parallel ranks."""

    def look_ahead(self, microbatch: int, embeddings: torch.Tensor) -> None:
        """Store the embeddings, ``[b, s + 1, h]``, with which multi-token prediction will run in the coming forward."""

    def ahead_gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of the embeddings given to ``look_ahead``. Call it after the stage's backward."""

    def loss(self, microbatch: int, scored: Sequence[Normalised]) -> torch.Tensor | None:
        """Run the loss function of a microbatch, and return the gradient of its token losses; ``None`` without
        training.

        ``scored`` has the token losses of the microbatch, ``[(1 + depths) * s, b]`` in fp32, or those of all its slices
        in order, whose gradients are concatenated. ``microbatch`` is then the number of the last slice.
        """

    def take_logits(self, microbatch: int, logits: Sequence[torch.Tensor]) -> None:
        """Pass the logits of a microbatch, or of all its slices, ``[s, b, vocabulary]``, to the loss function."""


@dataclass(frozen=True)
class Channels:
    """Process groups that only the collectives of vocabulary passes use."""

    pipeline: dist.ProcessGroup  # the ranks of the pipeline, in the order of its devices
    shards: (
        dist.ProcessGroup
    )  # the ranks of all shards, in their order; tensor parallelism adds ranks to the pipeline's


@dataclass(eq=False)
class VocabularyPasses:
    """The step feature that runs the vocabulary passes of one step on one rank.

    The head's input comes from the device of the last stage. The embedding's output goes to the device of the first
    stage. Each slice of a microbatch has its own passes, but the microbatch has one loss.
    """

    placement: Placement
    device: int  # the pipeline rank of this process
    layers: VocabularyShards
    channels: Channels  # process groups, which all ranks have created together
    batch: Batch  # tokens and labels, the same on every rank
    last_stage: HeadStage | None  # ``None`` if another device has the last stage
    trains: bool
    ledger: ActivationLedger | None = None
    units: Units = WHOLE

    def __post_init__(self) -> None:
        self._first, self._last = self.placement.devices[0], self.placement.devices[-1]
        # Two stages look up tokens, and both have gradients of the embeddings.
        self._sums_for_both = self.batch.looks_ahead and self._first != self._last
        # All keys are microbatches, or slices of microbatches.
        self._partial_embeddings: dict[int, torch.Tensor] = {}
        self._embeddings: dict[int, Arriving] = {}
        self._head_inputs: dict[int, torch.Tensor] = {}
        self._sent_inputs: dict[int, Arriving] = {}
        self._scored: dict[int, HeadMicrobatch | torch.Tensor] = {}
        self._gathered: dict[int, Arriving] = {}
        self._results: dict[int, torch.Tensor] = {}
        self._normalised: dict[int, OneBarrier | TwoBarriers] = {}
        self._loss_gradients: dict[int, torch.Tensor] = {}
        self._sent_loss_gradients: dict[int, Arriving] = {}
        self._partial_input_gradients: dict[int, torch.Tensor] = {}
        self._input_gradients: dict[int, Arriving] = {}
        self._factors: dict[int, torch.Tensor] = {}
        self._embedding_gradients: dict[int, torch.Tensor] = {}
        self._sent_embedding_gradients: dict[int, Arriving] = {}
        self._unawaited: list[Arriving] = []
        self._needed = {
            Kind.S: (self._sent_inputs,),
            Kind.LOSS: (self._gathered,),
            Kind.T: (self._gathered, self._sent_loss_gradients),
            Kind.EMBED_B: (self._sent_embedding_gradients,),
        }

    @property
    def _own_last_stage(self) -> HeadStage:
        assert self.last_stage is not None, f"device {self.device} does not hold the last stage"
        return self.last_stage

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers for all vocabulary passes, and for forwards and backwards.

        The latter pass tensors between the passes and the model's first and last stage.
        """
        others, first, last = dict(executor.handlers), 0, self.placement.num_stages - 1
        looks_ahead = self.batch.looks_ahead

        def run_pass(instruction: Instruction) -> None:
            action = instruction.action
            # Wait here, so that the measured time of the pass excludes its collectives.
            for waiting in self._needed.get(action.kind, ()):
                for number in self._joined(action.microbatch) if action.kind is Kind.LOSS else (action.microbatch,):
                    if number in waiting:
                        waiting[number].wait()
            if action.kind not in VOCABULARY_COMPUTE:
                self.perform(action)
                return
            with executor.measured(action):
                self.perform(action)

        def forward(instruction: Instruction) -> None:
            stage, microbatch = instruction.key
            if stage == first:
                executor.handed_inputs[instruction.key] = self.embedded(microbatch)
            if stage == last and looks_ahead:
                self._own_last_stage.look_ahead(microbatch, self._embeddings.pop(microbatch).wait())
            others[Kind.F](instruction)
            if stage == last:
                assert instruction.consumer_on_this_device is not None
                self.take_head_input(microbatch, executor.handed_inputs.pop(instruction.consumer_on_this_device))

        def backward(instruction: Instruction) -> None:
            stage, microbatch = instruction.key
            if stage == last:
                executor.handed_gradients[instruction.key] = self.head_gradient(microbatch)
            others[instruction.action.kind](instruction)
            if stage == last and looks_ahead:
                ahead = self._own_last_stage.ahead_gradient(microbatch)
                self._embedding_gradients[microbatch] = self._hold(ahead)
            if stage == first:
                assert instruction.consumer_on_this_device is not None
                self.take_embedding_gradient(
                    microbatch, executor.handed_gradients.pop(instruction.consumer_on_this_device)
                )

        executor.at_end.append(self.finish)
        return {**dict.fromkeys(VOCABULARY, run_pass), Kind.F: forward, Kind.I: backward, Kind.B: backward}

    def perform(self, action: Action) -> None:
        """Run the pass, or start the collective, of this action."""
        _PERFORM[action.kind](self, action.microbatch)

    def finish(self) -> None:
        """Wait for the collectives whose results this rank does not use, so that their buffers can be reused."""
        while self._unawaited:
            self._unawaited.pop().wait()

    # Between the passes and the stages of this device

    def embedded(self, microbatch: int) -> torch.Tensor:
        """Wait for the first stage's input, and return it: the embedding's output, ``[b, s, h]``, summed over ranks."""
        if not self.batch.looks_ahead:
            return self._embeddings.pop(microbatch).wait()
        # If the last stage is on this device too, it needs them later.
        waiting = self._embeddings[microbatch] if self._first == self._last else self._embeddings.pop(microbatch)
        return waiting.wait()[:, :-1]

    def take_head_input(self, microbatch: int, output: torch.Tensor) -> None:
        """Keep the output of the last stage until it is broadcast as the head's input."""
        gathered = self._hold(self._own_last_stage.gather_head_input(output))
        if gathered is not output:
            self._released(output)  # the backend that gathered it may free it a moment later
        self._head_inputs[microbatch] = gathered

    def head_gradient(self, microbatch: int) -> torch.Tensor:
        """Wait for the gradient of the head's input, and return the gradient of the last stage's output."""
        total = self._input_gradients.pop(microbatch).wait()
        # With one barrier, the sum began before the loss was known.
        gradient = finish_input_gradient(total, self.layers.embedding.weight.dtype, self._factors.pop(microbatch, None))
        self._released(total)
        return self._own_last_stage.scatter_head_gradient(gradient)

    def take_embedding_gradient(self, microbatch: int, gradient: torch.Tensor) -> None:
        """Keep the gradient of the first stage's input, ``[b, s, h]``, until it is broadcast to the shards."""
        looks_ahead = self.batch.looks_ahead
        ahead = self._embedding_gradients.get(microbatch) if looks_ahead else None
        if ahead is not None:  # the gradient of the last stage, which is on this device too
            ahead[:, :-1] += gradient
            self._released(gradient)
            return
        outgoing = torch.nn.functional.pad(gradient, (0, 0, 0, 1)) if looks_ahead else gradient.contiguous()
        self._embedding_gradients[microbatch] = self._hold(outgoing)
        if outgoing is not gradient:
            self._released(gradient)  # the backend that gathered it may free it a moment later

    # Embedding

    def _look_up(self, microbatch: int) -> None:
        self._partial_embeddings[microbatch] = self._hold(self.layers.embedding(self.batch.tokens_of(microbatch)))

    def _reduce_embedding(self, microbatch: int) -> None:
        partial = self._partial_embeddings.pop(microbatch)
        if self._sums_for_both:
            pending = collectives.all_sum(partial, self.channels.pipeline)
        else:
            pending = collectives.reduce_sum(partial, self._first, self.channels.pipeline)
        is_needed = self.device == self._first or (self._sums_for_both and self.device == self._last)
        self._await(self._embeddings, microbatch, pending, partial, is_needed)

    def _broadcast_embedding_gradient(self, microbatch: int) -> None:
        gradient = self._embedding_gradients.pop(microbatch, None)
        if gradient is None:
            tokens = self.batch.tokens_of(microbatch)
            empty = torch.zeros if self._sums_for_both else torch.empty
            weight = self.layers.embedding.weight
            shape = (*tokens.shape, weight.size(1))
            gradient = self._hold(empty(shape, dtype=weight.dtype, device=tokens.device))
        if self._sums_for_both:
            pending = collectives.all_sum(gradient, self.channels.pipeline)
        else:
            pending = collectives.broadcast(gradient, self._first, self.channels.pipeline)
        self._sent_embedding_gradients[microbatch] = pending

    def _embedding_weight_gradient(self, microbatch: int) -> None:
        gradient = self._sent_embedding_gradients.pop(microbatch).wait()
        self.layers.embedding.add_weight_gradient(self.batch.tokens_of(microbatch), gradient)
        self._released(gradient)

    # Head

    def _broadcast_head_input(self, microbatch: int) -> None:
        x = self._head_inputs.pop(microbatch, None)
        if x is None:
            weight = self.layers.embedding.weight
            x = self._hold(self.batch.empty_for_head(microbatch, weight.size(1), dtype=weight.dtype))
        self._sent_inputs[microbatch] = collectives.broadcast(x, self._last, self.channels.pipeline)

    def _score(self, microbatch: int) -> None:
        x = self._sent_inputs.pop(microbatch).wait()
        labels = None if self.batch.labels is None else self.batch.labels_of(microbatch)
        scored = self._scored[microbatch] = self.layers.head(x, labels, self.trains)
        if isinstance(scored, HeadMicrobatch):
            for tensor in scored.tensors:
                self._hold(tensor)

    def _gather_statistics(self, microbatch: int) -> None:
        if self.batch.labels is None:
            logits = self._scored.pop(microbatch)
            assert isinstance(logits, torch.Tensor)
            pending = collectives.gather_logits(logits, self.layers.partition, self.channels.shards)
        else:
            scored = self._scored[microbatch]
            assert isinstance(scored, HeadMicrobatch)
            statistics = scored.statistics
            ranks, results = self.channels.shards.size(), Normalised.NUMBERS
            # One buffer for both, because the first of loss and input gradient combines. Its change in bytes would otherwise
            # depend on which comes first.
            buffer = self._hold(statistics.new_empty(ranks * statistics.size(0) + results, statistics.size(1)))
            everyones = buffer[:-results].unflatten(0, (ranks, -1))
            pending = collectives.gather_statistics(statistics, everyones, self.channels.shards)
        if self.trains or self.device == self._last:
            self._gathered[microbatch] = pending
            if self.batch.labels is not None:
                self._results[microbatch] = buffer[-results:]
        else:
            self._scored.pop(microbatch, None)
            self._leave(pending)

    def _loss(self, microbatch: int) -> None:
        joined = self._joined(microbatch)
        if self.batch.labels is None:
            logits = (
                collectives.joined_logits(self._gathered.pop(unit).wait(), self.layers.partition) for unit in joined
            )
            self._own_last_stage.take_logits(microbatch, [*logits])
            return
        done = {unit: self._normalise(unit) for unit in joined}
        gradient = self._own_last_stage.loss(microbatch, [*done.values()])
        if not self.trains:
            for unit in joined:
                del self._normalised[unit]
            return
        assert gradient is not None, "a training step has a gradient of its loss"
        parts = gradient.split([scored.losses.size(0) for scored in done.values()])
        for (unit, scored), part in zip(done.items(), parts, strict=True):
            self._loss_gradients[unit] = own = self._hold(scored.without_ignored(part))
            if isinstance(scored, OneBarrier):
                self._factors[unit] = own

    def _joined(self, microbatch: int) -> range:
        """Return the slices whose loss is computed when slice ``microbatch``, their last, has been scored."""
        return range(self.units.first(microbatch), microbatch + 1)

    def _broadcast_loss_gradient(self, microbatch: int) -> None:
        gradient = self._loss_gradients.pop(microbatch, None)
        if gradient is None:
            gradient = self._hold(self.batch.empty_for_head(microbatch, dtype=torch.float32))
        self._sent_loss_gradients[microbatch] = collectives.broadcast(gradient, self._last, self.channels.pipeline)

    def _head_gradients(self, microbatch: int) -> None:
        done = self._normalise(microbatch)
        del self._normalised[microbatch]
        gradient = self._sent_loss_gradients.pop(microbatch).wait()
        if isinstance(done, OneBarrier):
            if done.owes_input_gradient:  # its reduction comes later on this device, and its inputs are freed before
                self._partial_input_gradients[microbatch] = self._hold(done.input_gradient())
            done.add_weight_gradient(gradient)
        else:
            self._partial_input_gradients[microbatch] = self._hold(done.gradients(gradient))
        # Only the collectives still hold these tensors, for a time that varies.
        for tensor in (*done.tensors, gradient):
            self._released(tensor)

    def _reduce_input_gradient(self, microbatch: int) -> None:
        partial = self._partial_input_gradients.pop(microbatch, None)
        if partial is None:
            done = self._normalise(microbatch)
            assert isinstance(done, OneBarrier), "with two barriers, T has computed it"
            partial = self._hold(done.input_gradient())
        pending = collectives.reduce_sum(partial, self._last, self.channels.pipeline)
        self._await(self._input_gradients, microbatch, pending, partial, self.device == self._last)

    def _normalise(self, microbatch: int) -> OneBarrier | TwoBarriers:
        if microbatch not in self._normalised:
            gathered, into = self._gathered.pop(microbatch).wait(), self._results.pop(microbatch)
            scored = self._scored.pop(microbatch)
            assert isinstance(scored, HeadMicrobatch)
            self._normalised[microbatch] = combine(scored, gathered, into)
        return self._normalised[microbatch]

    # Bookkeeping

    def _await(
        self,
        waiting: dict[int, Arriving],
        microbatch: int,
        pending: Arriving,
        buffer: torch.Tensor,
        is_needed: bool,
    ) -> None:
        """Store a reduction in ``waiting`` if this rank needs its result.

        Otherwise the ledger stops counting ``buffer`` at once, although the reduction may still read it.
        """
        if is_needed:
            waiting[microbatch] = pending
        else:
            self._released(buffer)
            self._leave(pending)

    def _leave(self, pending: Arriving) -> None:
        self._unawaited = [reduction for reduction in self._unawaited if not reduction.is_complete]
        self._unawaited.append(pending)

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.ledger is not None:
            self.ledger.hold(tensor)
        return tensor

    def _released(self, tensor: torch.Tensor) -> None:
        if self.ledger is not None:
            self.ledger.release(tensor)


# The functions of a class, and not the methods of an object: an object that refers to its own methods is a circle, which
# would keep the tensors of a step until Python collects garbage.
_PERFORM: dict[Kind, Callable[[VocabularyPasses, int], None]] = {
    Kind.EMBED_F: VocabularyPasses._look_up,
    Kind.REDUCE_E: VocabularyPasses._reduce_embedding,
    Kind.BCAST_X: VocabularyPasses._broadcast_head_input,
    Kind.S: VocabularyPasses._score,
    Kind.STATS: VocabularyPasses._gather_statistics,
    Kind.LOSS: VocabularyPasses._loss,
    Kind.BCAST_G: VocabularyPasses._broadcast_loss_gradient,
    Kind.T: VocabularyPasses._head_gradients,
    Kind.REDUCE_X: VocabularyPasses._reduce_input_gradient,
    Kind.BCAST_E: VocabularyPasses._broadcast_embedding_gradient,
    Kind.EMBED_B: VocabularyPasses._embedding_weight_gradient,
}
