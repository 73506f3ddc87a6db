"""DeepEP's library on the CPU, for a group of one rank: what Megatron's autograd functions of flex dispatchers call of it.

``Buffer`` is of the backend deepep, ``HybridEPBuffer`` of hybridep. As theirs, a dispatch puts tokens in an order of its own,
which its handle keeps for the other three exchanges of the microbatch, and the host waits for numbers of tokens. So none can be
captured. Import this before Megatron.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch


class EventHandle:
    """An event on the stream of messages."""


class EventOverlap:
    """A message on its way."""

    def __init__(self, event: EventHandle | None = None):
        self.event = event

    def current_stream_wait(self) -> None:
        """Return at once, because messages on a CPU have ended."""


class _BufferConfig:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    """Exchanges tokens once for all experts of a rank."""

    set_num_sms = staticmethod(lambda number: None)
    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: _BufferConfig())

    def __init__(self, group: torch.distributed.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple:
        """Return tokens per rank, per node and per expert, the map of ranks, and an event."""
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return torch.tensor([len(topk_idx)]), None, per_expert, torch.ones_like(topk_idx[:, :1] >= 0), EventOverlap()

    def dispatch(
        self, x: torch.Tensor, handle: torch.Tensor | None = None, topk_idx=None, topk_weights=None,
        num_tokens_per_expert=None, **_: Any,
    ) -> tuple:  # fmt: skip
        if handle is not None:
            return x[handle], None, None, None, handle, EventOverlap()
        order = topk_idx[:, 0].argsort(stable=True)
        return x[order], topk_idx[order], topk_weights[order], num_tokens_per_expert.tolist(), order, EventOverlap()

    def combine(
        self, x: torch.Tensor, handle: torch.Tensor, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple:
        back = handle.argsort()
        return x[back], None if topk_weights is None else topk_weights[back], EventOverlap()


class _Rows(NamedTuple):
    """The token and the expert of every row after a dispatch, and the number of rows of every expert with its padding."""

    tokens: torch.Tensor  # -1 in padding
    experts: torch.Tensor
    per_expert: torch.Tensor
    shape: torch.Size  # [tokens, experts]

    @classmethod
    def of(cls, routing_map: torch.Tensor, multiple: int) -> _Rows:
        tokens = [chosen.nonzero().flatten() for chosen in routing_map.t()]
        tokens = [torch.nn.functional.pad(of_expert, (0, -len(of_expert) % multiple), value=-1) for of_expert in tokens]
        per_expert = torch.tensor([len(of_expert) for of_expert in tokens])
        experts = torch.arange(len(tokens)).repeat_interleave(per_expert)
        return cls(torch.cat(tokens), experts, per_expert, routing_map.shape)


class HybridEPBuffer:
    """Exchanges tokens once per expert, and puts them in the order of experts."""

    def __init__(self, group: torch.distributed.ProcessGroup, **_: Any):
        self.group = group

    def dispatch_with_permute(
        self, *, hidden: torch.Tensor, routing_map=None, probs=None, handle: _Rows | None = None, pad_multiple=None, **_: Any
    ) -> tuple:  # fmt: skip
        rows = handle or _Rows.of(routing_map, pad_multiple or 1)
        is_token = rows.tokens >= 0
        tokens = torch.where(is_token[:, None], hidden[rows.tokens], 0)
        weights = None if probs is None else torch.where(is_token, probs[rows.tokens, rows.experts], 0)
        return tokens, weights, None, rows.per_expert.clone(), rows

    def combine_with_unpermute(
        self, *, hidden: torch.Tensor, handle: _Rows, probs: torch.Tensor | None = None, **_: Any
    ) -> tuple:
        is_token = handle.tokens >= 0
        tokens, experts = handle.tokens[is_token], handle.experts[is_token]
        sums = hidden.new_zeros(handle.shape[0], hidden.shape[1], dtype=torch.float32)
        sums.index_add_(0, tokens, hidden[is_token].float())
        weights = (
            None if probs is None else probs.new_zeros(handle.shape).index_put_((tokens, experts), probs[is_token])
        )
        return sums.to(hidden.dtype), weights


def _install() -> None:
    library, utilities = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(library).update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer, utils=utilities)
    vars(utilities).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    sys.modules |= {library.__name__: library, utilities.__name__: utilities}


_install()
