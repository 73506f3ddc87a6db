"""Attention of Megatron's local layers over a sequence that context-parallel ranks share.

Upstream, only Transformer Engine's attention knows context parallelism. Here a rank gathers keys and values of the whole
sequence, as Transformer Engine's ``all_gather`` does, and attends to them with its own queries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_pipemem.errors import UnsupportedError


def shards(size: int) -> list[int]:
    """Return the two parts of the sequence that each of ``size`` ranks has: r and 2 ``size`` - 1 - r for rank r.

    The sequence has 2 ``size`` equal parts. All ranks then have equally much causal attention. The result is one list,
    rank after rank: ``[0, 3, 1, 2]`` for two ranks.
    """
    return [part for rank in range(size) for part in (rank, 2 * size - 1 - rank)]


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part ``[s / cp, ...]`` of a tensor ``[s, ...]`` in the order of the sequence."""
    parts, rank = whole.chunk(2 * group.size()), group.rank()
    return torch.cat([parts[part] for part in shards(group.size())[2 * rank : 2 * rank + 2]])


class _Gather(torch.autograd.Function):
    """Gather a tensor ``[s / cp, ...]`` of every rank into ``[s, ...]`` in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        size = group.size()
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own.contiguous(), group=group)
        parts = torch.cat(gathered).chunk(2 * size)
        return torch.cat([part for _, part in sorted(zip(shards(size), parts, strict=True), key=lambda each: each[0])])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return _own(total, ctx.group), None


def _mask(tokens: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the causal mask ``[1, 1, s / cp, s]`` of this rank's tokens; True where a key is later than the query."""
    positions = torch.arange(group.size() * tokens, device=device)
    return (positions[None, :] > _own(positions, group)[:, None])[None, None]


def _build(build: Callable[..., None]) -> Callable[..., None]:
    def built(self: DotProductAttention, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # which Megatron requires here
        build(self, alone, *args, **kwargs)
        self.config = config
        if config.context_parallel_size > 1 and (
            self.attn_mask_type is not AttnMaskType.causal or self.scale_mask_softmax.window_size is not None
        ):
            raise UnsupportedError(
                "not-on-cpu",
                "context parallelism on CPU ranks has causal attention to the whole sequence only; pass "
                "--context-parallel-size 1",
            )

    return built


def _attend(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attended(
        self: DotProductAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.config.context_parallel_size > 1:
            group = self.pg_collection.cp
            mask = _mask(query.size(0), group, query.device) if mask is None else mask
            key, value = (_Gather.apply(each, group) for each in (key, value))
        return attend(self, query, key, value, mask, *args, **kwargs)

    return attended


def install() -> None:
    """Let the local attention run with more than one context-parallel rank."""
    DotProductAttention.__init__ = _build(DotProductAttention.__init__)
    DotProductAttention.forward = _attend(DotProductAttention.forward)
