"""Attention of Megatron's local layers to packed documents, and to a sequence that context-parallel ranks share.

Upstream, only Transformer Engine's attention knows both. Here a rank gathers keys and values of the whole sequence, as
Transformer Engine's ``all_gather`` does, and attends to them with its own queries. A mask hides other documents.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_pipemem.errors import UnsupportedError


def shares(ends: Sequence[int], size: int) -> list[torch.Tensor]:
    """Return, for each of ``size`` context-parallel ranks, the positions of its tokens in the whole sequence.

    ``ends`` begins with 0. Document i has the positions from ``ends[i]`` up to, but without, ``ends[i + 1]``. Each
    document has 2 ``size`` equal parts, of which rank r has parts r and 2 ``size`` - 1 - r, so that all ranks have
    equally much causal attention. Raise an UnsupportedError if a document does not divide.
    """
    if size == 1:
        return [torch.arange(ends[-1])]
    odd = [last - first for first, last in pairwise(ends) if (last - first) % (2 * size)]
    if odd:
        raise UnsupportedError(
            "not-on-cpu",
            f"a packed document has {odd[0]} tokens, and each of {size} context-parallel ranks takes two of {2 * size} "
            f"equal parts of every document; pad documents to a multiple of {2 * size} tokens, as --sft does, or pass "
            "--context-parallel-size 1",
        )
    parts = [torch.arange(first, last).chunk(2 * size) for first, last in pairwise(ends) if last > first]
    return [torch.cat([each for of in parts for each in (of[rank], of[2 * size - 1 - rank])]) for rank in range(size)]


class _Gather(torch.autograd.Function):
    """Gather the tensor ``[s / cp, ...]`` of every context-parallel rank into ``[s, ...]``, in the sequence's order.

    ``own`` is the tensor of this rank, and ``held`` the result of ``shares``. The backward sums the ranks' gradients
    and returns those of this rank's tokens.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, held: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.own = group, held[group.rank()]
        gathered = [torch.empty_like(own) for _ in held]
        dist.all_gather(gathered, own.contiguous(), group=group)
        return torch.cat(gathered)[torch.cat(held).argsort()]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.own], None, None


def _mask(ends: Sequence[int], own: torch.Tensor) -> torch.Tensor:
    """Return the causal mask ``[1, 1, queries, s]`` of this rank's queries, at the positions ``own``. True hides a key.

    Hidden are later keys, and keys of earlier documents. ``ends`` is that of ``shares``.
    """
    keys, starts = torch.arange(ends[-1]), torch.tensor(ends[:-1])
    document = torch.searchsorted(torch.tensor(ends[1:]), own, right=True)
    return ((keys[None, :] > own[:, None]) | (keys[None, :] < starts[document][:, None]))[None, None]


def _build(build: Callable[..., None]) -> Callable[..., None]:
    def built(
        self: DotProductAttention,
        config: Any,
        *args: Any,
        k_channels: int | None = None,  # of latent attention, which sets the scale itself
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # which Megatron requires here
        build(self, alone, *args, **kwargs)
        self.config = config
        if config.context_parallel_size > 1:
            _check(self, "context parallelism", "--context-parallel-size 1")

    return built


def _check(attention: DotProductAttention, feature: str, remedy: str) -> None:
    if attention.attn_mask_type is not AttnMaskType.causal or attention.scale_mask_softmax.window_size is not None:
        raise UnsupportedError(
            "not-on-cpu",
            f"{feature} on CPU ranks has causal attention to the whole sequence only; pass {remedy}",
        )


def _attend(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attended(
        self: DotProductAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        packed, size = packed_seq_params, self.config.context_parallel_size
        # In latent attention values have another width than keys. In Megatron only Transformer Engine can do this.
        self.hidden_size_per_partition = value.size(-1) * self.num_attention_heads_per_partition
        if packed is None and size == 1:
            return attend(self, query, key, value, mask, *args, **kwargs)
        if packed is None:
            ends = [0, size * query.size(0)]
        else:
            _check(self, "packed sequences", "no --window-size")
            found = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            ends, mask = found.tolist(), None
            query, key, value = (each.unsqueeze(1) for each in (query, key, value))  # one sequence
        held = shares(ends, size)
        own = held[self.pg_collection.cp.rank() if size > 1 else 0]
        if size > 1:
            key, value = (_Gather.apply(each, held, self.pg_collection.cp) for each in (key, value))
        output = attend(self, query, key, value, _mask(ends, own) if mask is None else mask, *args, **kwargs)
        return output if packed is None else output.squeeze(1)

    return attended


def _own_indices(ends: torch.Tensor, num_tokens: int, size: int, rank: int) -> torch.Tensor:
    """Return the positions of a rank's tokens in the whole sequence.

    This replaces ``thd_get_partitioned_indices`` of Transformer Engine's extension. ``size`` and ``rank`` are those of
    context parallelism. ``num_tokens`` is unused, because ``ends`` ends with it.
    """
    return shares(ends.tolist(), size)[rank]


def install() -> None:
    """Let the local attention run with packed sequences, and with more than one context-parallel rank."""
    DotProductAttention.__init__ = _build(DotProductAttention.__init__)
    DotProductAttention.forward = _attend(DotProductAttention.forward)
    if getattr(utils, "tex", None) is None:  # Megatron has found no Transformer Engine
        utils.tex = SimpleNamespace(thd_get_partitioned_indices=_own_indices)
