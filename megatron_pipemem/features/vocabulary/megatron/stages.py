"""Run the pipeline's first and last stage when embedding and head are no part of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.megatron.stage import SlicedStage
from megatron_pipemem.features.vocabulary.megatron.layers import ArrivingEmbedding, DepartingHead
from megatron_pipemem.features.vocabulary.runtime.head_gradients import Normalised
from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext


@dataclass
class FirstStage(ChunkStage):
    """Gets the embedding's output as its input."""

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        model = get_attr_wrapped_model(self.model, "pre_process", return_model_obj=True)
        embedding: ArrivingEmbedding = model.embedding.word_embeddings
        assert input is not None, "the embedding's output comes from all shards"
        embedding.arrived = [input]
        return super().forward(microbatch, None, will_recompute)


@dataclass
class LastStage(ChunkStage):
    """Returns the head's input, and makes a training loss of token losses with the user's loss function.

    The user's forward step has passed by when the losses are known, so its model call returned a tensor without values, which
    it has to hand on as it is, as Megatron's scripts do. Its loss function then gets the real one.
    """

    depths: int = 0
    """Tokens behind the next one that the head predicts as well."""
    _awaiting: dict[int, tuple[Callable | None, torch.dtype, Callable | None]] = field(default_factory=dict)
    _ahead: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def _head(self) -> DepartingHead:
        return get_attr_wrapped_model(self.model, "pre_process", return_model_obj=True).output_layer

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        head = self._head
        head.depths = self.depths
        super().forward(microbatch, input, will_recompute)
        output, head.input, head.losses = head.input, None, None
        assert output is not None, "the forward step calls the model, as calls_of has seen"
        return output

    def _forward_step(self, microbatch: int) -> Callable:
        head = self._head

        def noting(*arguments):
            output, loss_function = self.step.forward_step_func(*arguments)
            if head.losses is not None and output is not head.losses:
                raise UnsupportedError(
                    "vocabulary-forward-step",
                    "the forward step changes the model's token losses before it returns them, which are not known yet with "
                    "vocabulary parallelism; do it in the loss function, or pass --pipemem-vocab-parallel off",
                )
            self._awaiting[microbatch] = loss_function, output.dtype, head.further
            head.further = None
            return output, loss_function

        return noting

    def look_ahead(self, microbatch: int, embeddings: torch.Tensor) -> None:
        ahead = embeddings.detach()
        if not self.step.forward_only:
            self._ahead[microbatch] = ahead.requires_grad_()
        model = get_attr_wrapped_model(self.model, "pre_process", return_model_obj=True)
        s = ahead.size(1) - 1
        model.embedding.word_embeddings.arrived = [
            torch.cat((ahead[:, depth:s], ahead[:, s:].expand(-1, depth, -1)), dim=1)
            for depth in range(1, 1 + self.step.config.mtp_num_layers)
        ]

    def ahead_gradient(self, microbatch: int) -> torch.Tensor:
        gradient = self._ahead.pop(microbatch).grad
        assert gradient is not None, "the stage that looked ahead has run backward"
        return gradient

    def gather_head_input(self, output: torch.Tensor) -> torch.Tensor:
        head = self._head
        if not head.sequence_parallel:
            return output
        ranks = head.tp_group.size()
        whole = output.new_empty(output.size(0) * ranks, *output.shape[1:])
        dist.all_gather_into_tensor(whole, output.contiguous(), group=head.tp_group)
        return _swapped(whole, ranks, 1 + self.depths)

    def scatter_head_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        head = self._head
        if head.sequence_parallel:
            ranks = head.tp_group.size()
            gradient = _swapped(gradient, 1 + self.depths, ranks)
            shard = gradient.new_empty(gradient.size(0) // ranks, *gradient.shape[1:])
            dist.reduce_scatter_tensor(shard, gradient.contiguous(), group=head.tp_group)
            return shard
        if head.tp_group.size() > 1:
            dist.all_reduce(gradient, group=head.tp_group)
        return gradient

    def loss(self, microbatch: int, scored: Sequence[Normalised]) -> torch.Tensor | None:
        leaf = torch.cat([each.losses for each in scored]).requires_grad_(not self.step.forward_only)
        further = self._awaiting[microbatch][2]
        losses = leaf if further is None else further(leaf, torch.cat([each.hits for each in scored]))
        loss = self._finish_forward(microbatch, losses.t().contiguous())
        if self.step.forward_only:
            return None
        if self.step.config.grad_scale_func is not None:
            loss = self.step.config.grad_scale_func(loss)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient

    def take_logits(self, microbatch: int, logits: Sequence[torch.Tensor]) -> None:
        head = self._head
        if not head.gathers_output:
            logits = [each.chunk(head.tp_group.size(), dim=-1)[head.tp_group.rank()] for each in logits]
        self._finish_forward(microbatch, torch.cat([each.transpose(0, 1) for each in logits], dim=1).contiguous())

    def _finish_forward(self, microbatch: int, output: torch.Tensor) -> torch.Tensor:
        """Do what Megatron does with the last stage's output: loss function, averages, reporting."""
        step: StepContext = self.step
        loss_function, dtype, _ = self._awaiting.pop(microbatch)
        if step.config.timers is not None:
            step.config.timers("forward-compute", log_level=2).start()
        with self.as_chunk(), torch.set_grad_enabled(not step.forward_only):
            output, num_tokens = schedules.forward_step_calc_loss(
                self.model,
                output.to(dtype),
                loss_function,
                step.config,
                self.chunk if self.num_chunks > 1 else None,
                step.collect_non_loss_data,
                step.num_microbatches,
                step.loss_data,
                step.cp_group_size,
                True,
            )
        step.num_tokens += num_tokens
        return output


@dataclass
class SlicedFirstStage(FirstStage, SlicedStage):
    """Gets the embedding's output of one slice after the other."""


@dataclass
class SlicedLastStage(LastStage, SlicedStage):
    """Returns the head's input of one slice after the other. The loss function runs behind the last slice of a sequence."""

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        output = super().forward(microbatch, input, will_recompute)
        if (microbatch + 1) % len(self.bounds):
            del self._awaiting[microbatch]
        return output


def _swapped(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Return rows that are grouped by ``outer`` and within by ``inner`` grouped the other way round."""
    return rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)
