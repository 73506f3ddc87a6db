"""Run the vocabulary passes of a program on one rank, and keep what they hold in between.

Collectives are posted where the program says, and waited for by the pass that uses the result, as messages are. Labels and
everything between the head's input and its gradient have the head's layout, ``[s, b]``; tokens have the batch's, ``[b, s]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_pipemem.features.vocabulary.runtime import collectives
from megatron_pipemem.features.vocabulary.runtime.collectives import Pending
from megatron_pipemem.features.vocabulary.runtime.head import (
    HeadMicrobatch,
    Normalised,
    OneBarrier,
    TwoBarriers,
    combine,
    finish_input_gradient,
)
from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient
from megatron_pipemem.schedule.action import VOCABULARY, VOCABULARY_COMPUTE, Action, Kind
from megatron_pipemem.schedule.placement import Placement


@dataclass(frozen=True)
class Batch:
    """Hold tokens and labels of all microbatches of a step, which may differ in ``b`` and ``s``, or of all their slices.

    Args:
        tokens: ``[b, s]`` of every microbatch.
        labels: likewise; ``None`` if logits are wanted and no losses.
        looks_ahead: whether the last stage wants embeddings as well, of the tokens that follow: multi-token prediction.
        depths: how many tokens behind the next one the head predicts as well.
    """

    tokens: Sequence[torch.Tensor]
    labels: Sequence[torch.Tensor] | None
    looks_ahead: bool = False
    depths: int = 0

    def cut(self, bounds: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch with every sequence in slices; ``bounds`` has the first token, and the one behind, of each."""

        def slices(of: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [whole[:, begin:end] for whole in of for begin, end in bounds]

        return replace(self, tokens=slices(self.tokens), labels=None if self.labels is None else slices(self.labels))

    def empty_for_head(self, microbatch: int, *further: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor of a head's layout, ``[(1 + depths) * s, b, *further]``, those of all depths one behind the
        other.

        Args:
            microbatch: its number.
            further: sizes behind the tokens'.
            dtype: of the tensor.
        """
        tokens = self.tokens[microbatch]
        b, s = tokens.shape
        return torch.empty((1 + self.depths) * s, b, *further, dtype=dtype, device=tokens.device)

    def tokens_of(self, microbatch: int) -> torch.Tensor:
        """Return the tokens to look up, ``[b, s]``; with a last column of zeros, ``[b, s + 1]``, where the last stage looks
        ahead: Megatron reads token 0 behind the end.
        """
        tokens = self.tokens[microbatch]
        return torch.nn.functional.pad(tokens, (0, 1)) if self.looks_ahead else tokens

    def labels_of(self, microbatch: int) -> torch.Tensor:
        """Return the labels of all depths in the head's layout; what is behind the end is 0, as Megatron masks its loss."""
        assert self.labels is not None
        labels = self.labels[microbatch]
        rolled = [torch.nn.functional.pad(labels[:, depth:], (0, depth)) for depth in range(1 + self.depths)]
        return torch.cat(rolled, dim=1).t().contiguous()


class ShardedLayers(Protocol):
    """This rank's shards of embedding and head."""

    partition: VocabularyPartition

    @property
    def hidden_size(self) -> int:
        """Return the channels of the model."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the element type of the shards."""

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ``VocabularyEmbedding.forward``."""

    def embedding_gradient(self, tokens: torch.Tensor, output_gradient: torch.Tensor) -> DeferredWeightGradient:
        """See ``VocabularyEmbedding.weight_gradient``."""

    def score(self, x: torch.Tensor, labels: torch.Tensor | None, for_backward: bool) -> HeadMicrobatch | torch.Tensor:
        """Score a microbatch, as ``VocabularyHead.score`` does; without labels, return its logits.

        Args:
            x: the head's input, ``[s, b, h]``.
            labels: ``[s, b]``, or ``None``.
            for_backward: whether gradients will be asked for.
        """


class HeadStage(Protocol):
    """Define what the stage before the head does for it."""

    def gather_head_input(self, output: torch.Tensor) -> torch.Tensor:
        """Return the head's input, ``[s, b, h]``, from what this tensor-parallel rank has of it."""

    def scatter_head_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the stage's output, from this pipeline's part of the gradient of the head's input."""

    def look_ahead(self, microbatch: int, embeddings: torch.Tensor) -> None:
        """Take the embeddings of a microbatch that is about to run forward, ``[b, s + 1, h]``, where it looks ahead."""

    def ahead_gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of what ``look_ahead`` was given, when the stage has run backward."""

    def loss(self, microbatch: int, scored: Sequence[Normalised]) -> torch.Tensor | None:
        """Take the token losses of a microbatch, fp32 as ``Batch.labels_of``.

        Args:
            microbatch: its number, or that of its last slice.
            scored: the microbatch, or all slices of it in order.

        Returns:
            The training loss's gradient by the losses, those of slices one behind the other, if it trains.
        """

    def take_logits(self, microbatch: int, logits: Sequence[torch.Tensor]) -> None:
        """Take the logits, ``[s, b, vocabulary]``, of a microbatch without labels, or of all its slices."""


@dataclass(frozen=True)
class Channels:
    """Process groups that carry nothing else.

    Args:
        pipeline: the pipeline's ranks, which are its devices, in order.
        shards: the ranks of all shards, in the shards' order; with tensor parallelism more than the pipeline's.
    """

    pipeline: dist.ProcessGroup
    shards: dist.ProcessGroup


@dataclass(eq=False)
class VocabularyPasses:
    """One step. Holds nothing when it has ended.

    Args:
        placement: the head's input comes from the device of its last stage, the embedding's output goes to that of its first.
        device: this rank's place in the pipeline.
        layers: this rank's shards.
        channels: opened by every rank at the same time.
        batch: the same on every rank.
        last_stage: on the device of the last stage.
        trains: whether gradients will be asked for.
        ledger: counts held bytes, if given.
        slices: sequence slices of a microbatch: they have passes of their own, and one loss.
    """

    placement: Placement
    device: int
    layers: ShardedLayers
    channels: Channels
    batch: Batch
    last_stage: HeadStage | None
    trains: bool
    ledger: ActivationLedger | None = None
    slices: int = 1

    def __post_init__(self) -> None:
        self._first, self._last = self.placement.devices[0], self.placement.devices[-1]
        # Two stages look tokens up, and both have a gradient of them.
        self._sums_for_both = self.batch.looks_ahead and self._first != self._last
        # Everything is keyed by microbatch, or slice of one.
        self._partial_embeddings: dict[int, torch.Tensor] = {}
        self._embeddings: dict[int, Pending[torch.Tensor | None]] = {}
        self._head_inputs: dict[int, torch.Tensor] = {}
        self._sent_inputs: dict[int, Pending[torch.Tensor]] = {}
        self._scored: dict[int, HeadMicrobatch | torch.Tensor] = {}
        self._gathered: dict[int, Pending[torch.Tensor]] = {}
        self._results: dict[int, torch.Tensor] = {}
        self._normalised: dict[int, OneBarrier | TwoBarriers] = {}
        self._loss_gradients: dict[int, torch.Tensor] = {}
        self._sent_loss_gradients: dict[int, Pending[torch.Tensor]] = {}
        self._partial_input_gradients: dict[int, torch.Tensor] = {}
        self._input_gradients: dict[int, Pending[torch.Tensor | None]] = {}
        self._factors: dict[int, torch.Tensor] = {}
        self._embedding_gradients: dict[int, torch.Tensor] = {}
        self._sent_embedding_gradients: dict[int, Pending[torch.Tensor]] = {}
        self._nobody_waits: list[Pending] = []
        self._needed = {
            Kind.S: (self._sent_inputs,),
            Kind.LOSS: (self._gathered,),
            Kind.T: (self._gathered, self._sent_loss_gradients),
            Kind.EMBED_B: (self._sent_embedding_gradients,),
        }
        self._perform = {
            Kind.EMBED_F: self._look_up,
            Kind.REDUCE_E: self._reduce_embedding,
            Kind.BCAST_X: self._broadcast_head_input,
            Kind.S: self._score,
            Kind.STATS: self._gather_statistics,
            Kind.LOSS: self._loss,
            Kind.BCAST_G: self._broadcast_loss_gradient,
            Kind.T: self._head_gradients,
            Kind.REDUCE_X: self._reduce_input_gradient,
            Kind.BCAST_E: self._broadcast_embedding_gradient,
            Kind.EMBED_B: self._embedding_weight_gradient,
        }

    @property
    def _own_last_stage(self) -> HeadStage:
        assert self.last_stage is not None, f"device {self.device} does not hold the last stage"
        return self.last_stage

    def extend(self, executor: Executor) -> Handlers:
        """See ``StepFeature``: the passes, and the tensors of the model's ends, which come from them and go to them."""
        others, first, last = dict(executor.handlers), 0, self.placement.num_stages - 1
        looks_ahead = self.batch.looks_ahead

        def run_pass(each: Instruction) -> None:
            action = each.action
            # Waited for here, so that the pass's own time can be told from that of the collectives that it needs.
            for waiting in self._needed.get(action.kind, ()):
                for number in self._joined(action.microbatch) if action.kind is Kind.LOSS else (action.microbatch,):
                    if number in waiting:
                        waiting[number].work.wait()
            if action.kind not in VOCABULARY_COMPUTE:
                self.perform(action)
                return
            with executor.measured(action):
                self.perform(action)

        def forward(each: Instruction) -> None:
            stage, microbatch = each.key
            if stage == first:
                executor.handed_inputs[each.key] = self.embedded(microbatch)
            if stage == last and looks_ahead:
                self._own_last_stage.look_ahead(microbatch, _sum(self._embeddings.pop(microbatch)))
            others[Kind.F](each)
            if stage == last:
                assert each.to_here is not None
                self.take_head_input(microbatch, executor.handed_inputs.pop(each.to_here))

        def backward(each: Instruction) -> None:
            stage, microbatch = each.key
            if stage == last:
                executor.handed_gradients[each.key] = self.head_gradient(microbatch)
            others[each.action.kind](each)
            if stage == last and looks_ahead:
                ahead = self._own_last_stage.ahead_gradient(microbatch)
                self._embedding_gradients[microbatch] = self._held(ahead)
            if stage == first:
                assert each.to_here is not None
                self.take_embedding_gradient(microbatch, executor.handed_gradients.pop(each.to_here))

        executor.at_end.append(self.finish)
        return {**dict.fromkeys(VOCABULARY, run_pass), Kind.F: forward, Kind.I: backward, Kind.B: backward}

    def perform(self, action: Action) -> None:
        """Run a pass, or post a collective."""
        self._perform[action.kind](action.microbatch)

    def finish(self) -> None:
        """Wait for what nobody has waited for, so that buffers may be used again."""
        while self._nobody_waits:
            self._nobody_waits.pop().work.wait()

    # Between the passes and the stages of this device

    def embedded(self, microbatch: int) -> torch.Tensor:
        """Return the embedding's output, summed over the pipeline, ``[b, s, h]``: the first stage's input."""
        if not self.batch.looks_ahead:
            return _sum(self._embeddings.pop(microbatch))
        # Where the last stage is on this device too, it comes for them later.
        waiting = self._embeddings[microbatch] if self._first == self._last else self._embeddings.pop(microbatch)
        return _sum(waiting)[:, :-1]

    def take_head_input(self, microbatch: int, output: torch.Tensor) -> None:
        """Take the last stage's output, without its graph."""
        whole = self._held(self._own_last_stage.gather_head_input(output))
        if whole is not output:
            self._released(output)  # the backend that gathered it may let go a moment later
        self._head_inputs[microbatch] = whole

    def head_gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of the last stage's output."""
        total = _sum(self._input_gradients.pop(microbatch))
        # With one barrier the sum was under way before the loss was known.
        gradient = finish_input_gradient(total, self.layers.dtype, self._factors.pop(microbatch, None))
        self._released(total)
        return self._own_last_stage.scatter_head_gradient(gradient)

    def take_embedding_gradient(self, microbatch: int, gradient: torch.Tensor) -> None:
        """Take the gradient of what ``embedded`` gave, ``[b, s, h]``."""
        looks_ahead = self.batch.looks_ahead
        ahead = self._embedding_gradients.get(microbatch) if looks_ahead else None
        if ahead is not None:  # the last stage's, on this device too
            ahead[:, :-1] += gradient
            self._released(gradient)
            return
        whole = torch.nn.functional.pad(gradient, (0, 0, 0, 1)) if looks_ahead else gradient.contiguous()
        self._embedding_gradients[microbatch] = self._held(whole)
        if whole is not gradient:
            self._released(gradient)  # the backend that gathered it may let go a moment later

    # Embedding

    def _look_up(self, microbatch: int) -> None:
        self._partial_embeddings[microbatch] = self._held(self.layers.look_up(self.batch.tokens_of(microbatch)))

    def _reduce_embedding(self, microbatch: int) -> None:
        partial = self._partial_embeddings.pop(microbatch)
        pending: Pending[torch.Tensor] | Pending[torch.Tensor | None]
        if self._sums_for_both:
            pending = collectives.all_sum(partial, self.channels.pipeline)
        else:
            pending = collectives.reduce_sum(partial, self._first, self.channels.pipeline)
        wanted = self.device == self._first or (self._sums_for_both and self.device == self._last)
        self._await(self._embeddings, microbatch, pending, partial, wanted)

    def _broadcast_embedding_gradient(self, microbatch: int) -> None:
        gradient = self._embedding_gradients.pop(microbatch, None)
        if gradient is None:
            tokens = self.batch.tokens_of(microbatch)
            empty = torch.zeros if self._sums_for_both else torch.empty
            shape = (*tokens.shape, self.layers.hidden_size)
            gradient = self._held(empty(shape, dtype=self.layers.dtype, device=tokens.device))
        if self._sums_for_both:
            pending = collectives.all_sum(gradient, self.channels.pipeline)
        else:
            pending = collectives.broadcast(gradient, self._first, self.channels.pipeline)
        self._sent_embedding_gradients[microbatch] = pending

    def _embedding_weight_gradient(self, microbatch: int) -> None:
        gradient = self._sent_embedding_gradients.pop(microbatch).wait()
        self.layers.embedding_gradient(self.batch.tokens_of(microbatch), gradient).run()
        self._released(gradient)

    # Head

    def _broadcast_head_input(self, microbatch: int) -> None:
        x = self._head_inputs.pop(microbatch, None)
        if x is None:
            hidden, dtype = self.layers.hidden_size, self.layers.dtype
            x = self._held(self.batch.empty_for_head(microbatch, hidden, dtype=dtype))
        self._sent_inputs[microbatch] = collectives.broadcast(x, self._last, self.channels.pipeline)

    def _score(self, microbatch: int) -> None:
        x = self._sent_inputs.pop(microbatch).wait()
        labels = None if self.batch.labels is None else self.batch.labels_of(microbatch)
        scored = self._scored[microbatch] = self.layers.score(x, labels, self.trains)
        if isinstance(scored, HeadMicrobatch):
            for tensor in scored.tensors:
                self._held(tensor)

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
            # In one piece, because loss and input gradient come in either order, and the first to come combines: what it
            # takes and gives back would be now the one's bytes and now the other's.
            buffer = self._held(statistics.new_empty(ranks * statistics.size(0) + results, statistics.size(1)))
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
            self._own_last_stage.take_logits(microbatch, [self._gathered.pop(each).wait() for each in joined])
            return
        done = {each: self._normalise(each) for each in joined}
        gradient = self._own_last_stage.loss(microbatch, [*done.values()])
        if not self.trains:
            for each in joined:
                del self._normalised[each]
            return
        assert gradient is not None, "a step that trains has a gradient of its loss"
        parts = gradient.split([scored.losses.size(0) for scored in done.values()])
        for (each, scored), part in zip(done.items(), parts, strict=True):
            self._loss_gradients[each] = own = self._held(scored.without_ignored(part))
            if isinstance(scored, OneBarrier):
                self._factors[each] = own

    def _joined(self, microbatch: int) -> range:
        """Return what a microbatch's loss is of, which stands with the last of its slices."""
        return range(microbatch - self.slices + 1, microbatch + 1)

    def _broadcast_loss_gradient(self, microbatch: int) -> None:
        gradient = self._loss_gradients.pop(microbatch, None)
        if gradient is None:
            gradient = self._held(self.batch.empty_for_head(microbatch, dtype=torch.float32))
        self._sent_loss_gradients[microbatch] = collectives.broadcast(gradient, self._last, self.channels.pipeline)

    def _head_gradients(self, microbatch: int) -> None:
        done = self._normalise(microbatch)
        del self._normalised[microbatch]
        gradient = self._sent_loss_gradients.pop(microbatch).wait()
        if isinstance(done, OneBarrier):
            if done.owes_input_gradient:  # its reduction comes later on this device, and nothing is kept so long
                self._partial_input_gradients[microbatch] = self._held(done.input_gradient())
            work = done.weight_gradient(gradient)
        else:
            partial, work = done.input_gradient(gradient)
            self._partial_input_gradients[microbatch] = self._held(partial)
        work.run()
        # What is left of their life is the collectives' business, and theirs depends on timing.
        for tensor in (*done.tensors, gradient):
            self._released(tensor)

    def _reduce_input_gradient(self, microbatch: int) -> None:
        partial = self._partial_input_gradients.pop(microbatch, None)
        if partial is None:
            done = self._normalise(microbatch)
            assert isinstance(done, OneBarrier), "with two barriers T has made it"
            partial = self._held(done.input_gradient())
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
        waiting: dict[int, Pending[torch.Tensor | None]],
        microbatch: int,
        pending: Pending[torch.Tensor | None],
        buffer: torch.Tensor,
        wanted: bool,
    ) -> None:
        """Keep a reduction where its result is wanted; elsewhere its buffer is the backend's from now on."""
        if wanted:
            waiting[microbatch] = pending
        else:
            self._released(buffer)
            self._leave(pending)

    def _leave(self, pending: Pending) -> None:
        self._nobody_waits = [each for each in self._nobody_waits if not each.work.is_completed()]
        self._nobody_waits.append(pending)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.ledger is not None:
            self.ledger.hold(tensor)
        return tensor

    def _released(self, tensor: torch.Tensor) -> None:
        if self.ledger is not None:
            self.ledger.release(tensor)


def _sum(pending: Pending[torch.Tensor | None]) -> torch.Tensor:
    """Wait for a reduction whose result this rank gets."""
    total = pending.wait()
    assert total is not None
    return total
