"""Split the backward of Megatron's own layers: linear layers, the LM head, local experts, the embedding.

All of Megatron's linear layers call one function of ``tensor_parallel.layers``. Its replacement here computes the same
forward and input gradient. It puts the product for the weight gradient into the queue of the running action.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, layers
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_tensor_model_parallel_group_if_none, prepare_input_tensors_for_wgrad_compute

from megatron_pipemem.runtime.activation_ledger import saved_as_is
from megatron_pipemem.runtime.weight_gradients import (
    EARLY,
    GRADIENT_READY,
    Arriving,
    DeferredWeightGradient,
    ImmediateWeightGradients,
    Shard,
    WeightGradientQueue,
    accumulator_of,
    current_queue,
    defers,
    gather_rows,
    is_early,
    is_plain,
    remember,
    shard_of,
)
from megatron_pipemem.schedule.options import EarlyWgrad, early_wgrad

logger = logging.getLogger(__name__)


def split_linear(original: Callable, *args, **kwargs) -> torch.Tensor:
    """Return the result of Megatron's linear function, with the backward of ``_SplitLinear`` if there is a queue.

    Without ``current_queue()``, and for a layer that ``_split`` leaves to Megatron, the backward is Megatron's.
    """
    queue = current_queue()
    output = None if queue is None else _split(queue, *args, **kwargs)
    return countable_linear(original, *args, **kwargs) if output is None else output


# Stock keeps a flag for its one-time warnings on the function itself.
split_linear.warned = True  # type: ignore[attr-defined]


def _split(
    queue: WeightGradientQueue,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: dist.ProcessGroup | None = None,
    **newer,
) -> torch.Tensor | None:
    """Return the layer's output by ``_SplitLinear``; ``None`` if Megatron's function has to compute it.

    It has to if the input or the weight needs no gradient, if the weight is computed from other tensors, or for
    arguments that ``_SplitLinear`` does not know.
    """
    unknown = [name for name, value in newer.items() if value is not None and (name, value) != ("gtp_remat_size", 1)]
    if unknown:
        _tell_unsplit(unknown[0])
    # Without a differentiable input, autograd never reaches our node, and Megatron's function computes the weight gradient.
    differentiable = torch.is_grad_enabled() and input.requires_grad and weight.requires_grad
    if unknown or not differentiable or not weight.is_leaf or grad_output_buffer is not None:
        return None
    fused = gradient_accumulation_fusion and hasattr(weight, "main_grad")
    group = get_tensor_model_parallel_group_if_none(tp_group)
    call = _Call(queue, weight, fused, allreduce_dgrad, sequence_parallel, group)
    at_once = isinstance(queue, ImmediateWeightGradients) or is_early(weight)
    return _SplitLinear.apply(input, weight if at_once else None, bias, call)


@functools.cache
def _tell_unsplit(argument: str) -> None:
    logger.warning(
        "linear layers that Megatron calls with %s keep their weight gradients in the input's backward, and W is empty",
        argument,
    )


def countable_linear(original: Callable, input: torch.Tensor, weight: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Return the result of Megatron's linear function; its saved tensors bypass autograd's saved-tensor hooks.

    The ledger counts the input. With fused gradient accumulation, Megatron's backward sets a mark on the saved weight,
    and DDP reads it from the parameter. A hook would return another object for the weight, and DDP would miss the mark.
    A computed weight has no such mark. Every microbatch has its own, which is an activation.
    """
    if not weight.is_leaf:
        return original(input, weight, *args, **kwargs)
    with saved_as_is(input):
        return original(input, weight, *args, **kwargs)


@dataclass(frozen=True)
class _Call:
    """The inputs of a split linear layer's backward that autograd does not see.

    The weight is one of them. If it were an autograd input with the gradient ``None``, its AccumulateGrad hooks would
    run. DDP would then take the gradient for complete. Only a weight whose gradient is not deferred is an autograd
    input too.
    """

    queue: WeightGradientQueue
    weight: torch.Tensor
    fused: bool
    allreduce_dgrad: bool
    sequence_parallel: bool
    tp_group: dist.ProcessGroup

    def gather(self, input: torch.Tensor) -> Arriving:
        """Start to gather the input if sequence parallelism shards its rows: ``[s/t, b, h] -> [s, b, h]``."""
        return gather_rows(input, self.tp_group) if self.sequence_parallel else Arriving(input)

    def reduce(self, grad_input: torch.Tensor) -> Arriving:
        """Start the sum of the input gradient over tensor-parallel ranks, if the layer has one.

        With sequence parallelism, the result is this rank's rows.
        """
        if self.sequence_parallel:
            size = (grad_input.size(0) // self.tp_group.size(), *grad_input.shape[1:])
            shard = torch.empty(size, dtype=grad_input.dtype, device=grad_input.device)
            return Arriving(
                shard, dist.reduce_scatter_tensor(shard, grad_input, group=self.tp_group, async_op=True), grad_input
            )
        if self.allreduce_dgrad:
            return Arriving(grad_input, dist.all_reduce(grad_input, group=self.tp_group, async_op=True))
        return Arriving(grad_input)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    @layers.custom_fwd
    def forward(
        ctx, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.call = call
        ctx.deferred = () if weight is not None else (call.weight,)
        ctx.has_bias = bias is not None
        output = torch.matmul(call.gather(input).wait(), call.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @layers.custom_bwd
    def backward(ctx, grad_output: torch.Tensor):
        (input,) = ctx.saved_tensors
        call = ctx.call
        at_once = ctx.needs_input_grad[1]
        # Detached: the saved input still has its graph, which would keep the chunk's input and gradient until W.
        unsharded = Shard(grad_output.detach(), Arriving)
        output_gradient = unsharded if at_once else shard_of(grad_output) or unsharded
        work = _LinearWeightGradient(call.weight, call, Shard(input.detach(), call.gather), output_gradient)
        if at_once:
            work.begin()
        reduced = call.reduce(grad_output.matmul(call.weight))
        grad_bias = grad_output.reshape(-1, grad_output.size(-1)).sum(dim=0) if ctx.has_bias else None
        grad_weight = None
        if at_once:
            grad_weight = work.gradient()
        else:
            call.queue.put(work)
        grad_input = reduced.wait()
        return grad_input, grad_weight, grad_bias, None


@dataclass
class _LinearWeightGradient(DeferredWeightGradient):
    """The product ``grad_output^T @ input`` for the weight gradient of one layer and one microbatch.

    Of an input or output gradient whose shard is known, only the shard is kept, and W gathers it again.
    """

    weight: torch.Tensor = field()  # always given, unlike in the base class
    call: _Call = field()
    input: Shard = field()
    grad_output: Shard = field()
    _arriving: tuple[Arriving, Arriving] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.input.tensor, self.grad_output.tensor

    def begin(self) -> None:
        self._arriving = self.grad_output.begin(), self.input.begin()

    def run(self) -> None:
        add_gradient(self.weight, self.gradient())

    def gradient(self) -> torch.Tensor:
        """Return the weight gradient; with fused accumulation, add it to ``main_grad`` and return a dummy tensor."""
        weight: Any = self.weight  # with Megatron's attributes
        assert self._arriving is not None, "begin() comes first"
        grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
            *(operand.wait() for operand in self._arriving)
        )
        if self.call.fused:
            accumulate = (
                layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
                if weight.main_grad.dtype == torch.float32
                else layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16
            )
            accumulate(total_input, grad_output, weight.main_grad)
            weight.grad_added_to_main_grad = True
            # DDP treats a missing gradient as an error, and does not read this one.
            gradient = torch.empty(weight.shape, dtype=total_input.dtype, device=weight.device)
            if getattr(weight, "zero_out_wgrad", False):
                gradient.zero_()
            return gradient
        return grad_output.t().matmul(total_input)


def sharded_gradients(keeps: Callable[[dist.ProcessGroup], bool]) -> Callable:
    """Return a replacement for the gather of a row-parallel layer's output gradient; it also keeps the shard for W.

    Shards are kept for the process groups for which ``keeps`` returns true. A shard is kept only if its W is deferred,
    the group has several ranks, and its shards are even.
    """

    def backward(original: Callable, ctx, grad_output: torch.Tensor) -> tuple:
        gradients = original(ctx, grad_output)
        # Shards of experts are uneven, and the global buffer is overwritten before W.
        even = ctx.input_split_sizes is None and not ctx.use_global_buffer
        if even and defers() and ctx.group.size() > 1 and keeps(ctx.group):
            remember(gradients[0], Shard(grad_output.detach(), functools.partial(gather_rows, group=ctx.group)))
        return gradients

    return backward


def add_gradient(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to ``weight.grad`` without calling autograd's hooks on the weight, which the queue calls.

    If the weight has no ``grad`` yet, the tensor ``gradient`` itself becomes it.
    """
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def attach_ddp_hooks(chunks: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Make the W of each weight call DDP's hook of that weight; return the weights that were not attached before.

    Chunks without DDP and frozen weights are skipped.
    """
    marked = []
    for chunk in chunks:
        make_hook = getattr(chunk, "_make_backward_post_hook", None)
        if make_hook is None:
            continue
        for parameter in chunk.parameters():
            if parameter.requires_grad and not hasattr(parameter, GRADIENT_READY):
                setattr(parameter, GRADIENT_READY, make_hook(parameter))
                marked.append(parameter)
    return marked


def hook_like_ddp(chunk: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let autograd call DDP's hooks of these parameters, which DDP has left to the backward of their modules."""
    for parameter in parameters:
        if parameter.requires_grad and hasattr(parameter, GRADIENT_READY):
            node = accumulator_of(parameter)
            node.register_hook(getattr(parameter, GRADIENT_READY))
            chunk.grad_accs.append(node)  # where DDP keeps such nodes alive


def is_ddps_hook(hook: Callable) -> bool:
    """Return whether Megatron's DDP has registered this hook on an autograd node. W calls it itself."""
    return getattr(hook, "__module__", None) == DistributedDataParallel.__module__


# Weights whose gradients are computed in I.


def named_unplain(chunk: torch.nn.Module) -> Iterator[str]:
    """Yield the names of a chunk's weights whose gradients autograd computes in I, and not W.

    These are weights that are computed from others, and weights with hooks.
    """
    for name, parameter in chunk.named_parameters():
        if parameter.requires_grad and not is_plain(parameter):
            yield name
    modules: Iterator[tuple[str, Any]] = chunk.named_modules()
    for name, module in modules:
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and "weight" not in module._parameters:
            yield f"{name}.weight"


_EXPERTS = re.compile(r"(?:^|\.)experts\.(?:local_experts\.\d+\.)?linear_(fc[12])\.weight")
"""Names of routed experts' weights, for experts that are single modules or one grouped module."""


def early_modules(setting: str, config: Any) -> frozenset[EarlyWgrad]:
    """Return the modules whose weight gradients pass I computes, not W, by the setting ``early_wgrad``.

    The result depends on the model's size (``options.early_wgrad``).
    """
    if not getattr(config, "num_moe_experts", None):
        return early_wgrad(setting, 0, 0)
    ranks = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    width = (config.moe_ffn_hidden_size or config.ffn_hidden_size) / ranks
    return early_wgrad(setting, config.hidden_size, width)


def mark_early(chunks: Sequence[torch.nn.Module], modules: Collection[EarlyWgrad]) -> list[torch.Tensor]:
    """Mark the weights of these modules so that pass I computes their gradients; return the newly marked weights."""
    weights = dict.fromkeys(weight for chunk in chunks for name, weight in _weights(chunk) if name in modules)
    return mark(weights, EARLY)


def mark(weights: Iterable[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Give the weights an attribute ``name`` with the value ``True``; return those that did not have it."""
    marked = [weight for weight in weights if not hasattr(weight, name)]
    for weight in marked:
        setattr(weight, name, True)
    return marked


def _weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, weight in chunk.named_parameters():
        if expert := _EXPERTS.search(name):
            yield f"experts_{expert[1]}", weight
    modules: Iterator[Any] = chunk.modules()
    for module in modules:
        # A head that is cut over the pipeline is another module, and computes its weight gradient by itself.
        if isinstance(getattr(module, "output_layer", None), ColumnParallelLinear):
            tied = module.share_embeddings_and_output_weights
            yield "head", module.shared_embedding_or_output_weight() if tied else module.output_layer.weight


# Multi-token prediction: the split backward of its embedding, and forwards that run twice.


def split_embedding(original: Callable, embedding: VocabParallelEmbedding, input_: torch.Tensor) -> torch.Tensor:
    """Look up tokens, and defer the weight gradient to W if the embedding is a copy.

    Arguments are those of ``VocabParallelEmbedding.forward``. The stage of multi-token prediction has a copy of the
    embedding. Its weight may also be the weight of the head, and autograd would sum both gradients in one backward. So
    both are left to the same W. Megatron's function is used for other embeddings, for embeddings that are cut by tensor
    parallelism, and if no W is deferred.
    """
    queue = current_queue()
    if queue is None or not defers() or is_early(embedding.weight) or not torch.is_grad_enabled():
        return original(embedding, input_)
    changed = embedding.deterministic_mode or embedding.reduce_scatter_embeddings
    if embedding.tp_group.size() == 1 and not changed and getattr(embedding.weight, "shared", False):
        empty = embedding.weight.new_empty(0, requires_grad=True)
        return _SplitEmbedding.apply(empty, input_, queue, embedding)
    return original(embedding, input_)


class _SplitEmbedding(torch.autograd.Function):
    """Embedding lookup whose backward defers the weight gradient.

    The weight is no autograd input. An empty tensor that requires a gradient makes autograd call the backward.
    """

    @staticmethod
    def forward(
        ctx, empty: torch.Tensor, tokens: torch.Tensor, queue: WeightGradientQueue, embedding: VocabParallelEmbedding
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.queue, ctx.weight, ctx.deferred = queue, embedding.weight, (embedding.weight,)
        return torch.nn.functional.embedding(tokens, ctx.weight)

    @staticmethod
    def backward(ctx, output_gradient: torch.Tensor):
        (tokens,) = ctx.saved_tensors
        ctx.queue.put(_EmbeddingWeightGradient(tokens, output_gradient.detach(), ctx.weight))
        return None, None, None, None


@dataclass
class _EmbeddingWeightGradient(DeferredWeightGradient):
    tokens: torch.Tensor
    output_gradient: torch.Tensor
    weight: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.output_gradient

    def run(self) -> None:
        rows = self.weight.size(0)
        gradient = torch.ops.aten.embedding_dense_backward(self.output_gradient, self.tokens, rows, -1, False)
        add_gradient(self.weight, gradient)


@contextmanager
def logged_before() -> Iterator[None]:
    """Do not log losses of multi-token prediction within a ``with`` block, because its forward runs a second time."""
    tracker, MTPLossLoggingHelper.tracker = MTPLossLoggingHelper.tracker, {}
    try:
        yield
    finally:
        MTPLossLoggingHelper.tracker = tracker
