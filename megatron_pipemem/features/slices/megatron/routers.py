"""Compute the losses of routers slice by slice: those of whole microbatches, exactly.

The load-balancing loss of a microbatch of ``T`` tokens is ``k / T^2 sum_e C_e P_e`` with ``k = experts coefficient /
topk``. ``C_e`` counts the tokens of expert ``e``, and ``P_e`` sums their scores. Its gradient with respect to every
token's score is ``k C_e / T^2``. When the first slice of a microbatch runs backward, all of them have run forward on
this stage, so the counts are known. A slice needs neither the scores of other slices nor a graph of the loss.

The z-loss is a mean over tokens. A slice adds its share of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.runtime import SlicePart
from megatron_pipemem.mcore.model.stages import shadowed


class _Kind(NamedTuple):
    """A load-balancing loss of Megatron."""

    label: str
    """its name in the log"""
    group: str
    """the router's attribute with the ranks over which tokens are counted"""
    by_sequence: bool = False
    by_step: bool = False
    """whether counts are averaged over the microbatches of the step so far"""


_KINDS = {
    "aux_loss": _Kind("load_balancing_loss", "tp_cp_group"),
    "seq_aux_loss": _Kind("seq_load_balancing_loss", "tp_cp_group", by_sequence=True),
    "global_aux_loss": _Kind("global_load_balancing_loss", "tp_dp_cp_group", by_step=True),
}
"""By Megatron's name, which is also that of the router's method that attaches the loss."""


@dataclass(eq=False)
class _Balance:
    """One load-balancing loss of one router for one microbatch.

    The tensors have an entry per expert, or per sequence and expert. ``tokens`` are those of a sequence on this rank.
    """

    coefficient: float  # k, by the number of sequences
    sequences: int
    ranks: int
    is_per_token: bool  # whether Megatron multiplies the loss by the rank's tokens
    counts: dict[int, torch.Tensor] = field(default_factory=dict)  # by slice, summed over ranks
    scores: dict[int, torch.Tensor] = field(default_factory=dict)  # by slice
    tokens: int = 0
    averaged: torch.Tensor | None = None  # counts of the microbatches of the step so far

    def slope(self) -> torch.Tensor:
        """Return the gradient of the loss with respect to the score of any token, by expert."""
        counts = _sum(self.counts) if self.averaged is None else self.averaged
        return counts * (self.coefficient / (self.ranks * self.tokens) ** 2)

    def loss(self) -> torch.Tensor:
        return (_sum(self.scores) * self.slope()).sum()


def _sum(by_slice: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([*by_slice.values()]).sum(dim=0)


class _LossOfSlices(torch.autograd.Function):
    """The loss of a microbatch with its last slice, and zero with the others. The gradient is that of all slices."""

    @staticmethod
    def forward(ctx, scores: torch.Tensor, balance: _Balance, is_last: bool) -> torch.Tensor:
        ctx.balance, ctx.shape, ctx.dtype = balance, scores.shape, scores.dtype
        return balance.loss() if is_last else scores.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        balance = ctx.balance
        tokens = balance.tokens * balance.sequences if balance.is_per_token else 1
        by_expert = (balance.slope() * gradient * tokens).to(ctx.dtype)  # [experts] or [sequences * experts]
        return by_expert.expand(ctx.shape.numel() // by_expert.numel(), -1).reshape(ctx.shape), None, None


@dataclass
class SlicedRouters:
    """The routers of a model chunk. ``running`` returns the slice that runs now, or ``None``."""

    model: torch.nn.Module
    running: Callable[[], SlicePart | None]

    def __post_init__(self) -> None:
        self._routers = [module for module in self.model.modules() if isinstance(module, TopKRouter)]
        for router in self._routers:
            for method in self._methods(router):
                if getattr(type(router), method) is not getattr(TopKRouter, method):
                    raise UnsupportedError(
                        "slices-model",
                        f"{type(router).__name__} has a {method} of its own, and slices have the losses of Megatron's routers "
                        "alone; take a schedule without sequence slices",
                    )

    def _methods(self, router: TopKRouter) -> dict[str, Callable]:
        losses = {f"_apply_{name}": partial(self._attach, router, name) for name in _KINDS}
        return {**losses, "routing": partial(self._route, router), "apply_z_loss": partial(self._attach_z_loss, router)}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Compute the losses of slices within a ``with`` block."""
        with ExitStack() as stack:
            for router in self._routers:
                stack.enter_context(shadowed(router, self._methods(router)))
            yield

    def _route(self, router: TopKRouter, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        part = self.running()
        has_losses = router.training and (router.is_aux_loss_enabled() or router.config.moe_z_loss_coeff is not None)
        if part is not None and has_losses and padding_mask is not None:
            raise UnsupportedError(
                "slices-forward-step",
                "the forward step passes padding_mask to a model whose routers have losses, and ranks would weigh the valid "
                "tokens of slices otherwise than those of whole sequences; leave it out, or take a schedule without slices",
            )
        if part is not None and has_losses and part.sequence.has_backward and not torch.is_grad_enabled():
            # The first forward of layers that run again counts, because the others run in the order of backwards.
            routing_map, scores = compute_routing_scores_for_aux_loss(
                logits.view(-1, router.config.num_moe_experts),
                router.topk,
                router.score_function,
                fused=router.config.moe_router_fusion,
            )
            for name in _KINDS:
                if router.get_aux_loss_coeff(name):
                    self._note(part, router, name, scores, routing_map, logits.size(1))
        return TopKRouter.routing(router, logits, padding_mask=padding_mask)

    def _note(
        self, part: SlicePart, router: TopKRouter, name: str, scores: torch.Tensor, routing_map: torch.Tensor, bsz: int
    ) -> _Balance:
        """Add a slice to the loss of its microbatch, unless it has run before."""
        config, kind = router.config, _KINDS[name]
        group, sequences = getattr(router, kind.group), bsz if kind.by_sequence else 1
        experts = config.num_moe_experts
        k = experts * router.get_aux_loss_coeff(name) / router.topk / sequences
        balance = part.sequence.losses.setdefault(
            (router, name), _Balance(k, sequences, group.size(), router.calculate_per_token_loss)
        )
        if part.number in balance.counts:
            return balance
        routing_map = routing_map.reshape(-1, sequences * experts)
        balance.counts[part.number] = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), group)
        balance.scores[part.number] = scores.detach().reshape(routing_map.shape).sum(dim=0)
        balance.tokens += routing_map.size(0)
        if kind.by_step and part.is_last:
            router.global_tokens_per_expert += _sum(balance.counts)
            router.ga_steps += 1
            balance.averaged = router.global_tokens_per_expert / router.ga_steps
        return balance

    def _attach(
        self,
        router: TopKRouter,
        name: str,
        probs: torch.Tensor,
        scores: torch.Tensor,
        routing_map: torch.Tensor,
        *of_sequences: int,  # tokens and number of sequences, of the loss of sequences alone
        **more: bool,
    ) -> torch.Tensor:
        part, coefficient = self.running(), router.get_aux_loss_coeff(name)
        if part is None or coefficient == 0:
            attach = getattr(TopKRouter, f"_apply_{name}")
            return attach(router, probs, scores, routing_map, *of_sequences, **more)
        balance = self._note(part, router, name, scores, routing_map, of_sequences[1] if of_sequences else 1)
        kind = _KINDS[name]
        return router.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            _LossOfSlices.apply(scores, balance, part.is_last),
            kind.label,
            getattr(router, kind.group),
            needs_dp_avg=not kind.by_step,
            valid_token_count=1,
        )

    def _attach_z_loss(self, router: TopKRouter, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        part, coefficient = self.running(), router.config.moe_z_loss_coeff
        if part is None or coefficient is None or not (router.training and torch.is_grad_enabled()):
            return TopKRouter.apply_z_loss(router, logits, padding_mask)
        loss = z_loss_func(logits, coefficient / router.tp_cp_group.size()) * part.share
        # Megatron averages over the ranks of this group, here by a sum of parts.
        return router.attach_and_log_load_balancing_loss(
            logits, coefficient, loss, "z_loss", router.tp_cp_group, valid_token_count=logits.size(0) / part.share
        )
