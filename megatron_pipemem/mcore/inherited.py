"""Warn of settings that Megatron computes wrongly under every schedule, its own included.

Runs that equal stock's to the bit have these faults too. ``tests/mcore/test_inherited.py`` fails for a Megatron that has
mended one, and its row can go then.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from megatron_pipemem.mcore.compat import counts_all_experts

logger = logging.getLogger(__name__)

_ISSUES = "https://github.com/NVIDIA/Megatron-LM/issues/"
_SPMD = f"{_ISSUES}7452, finding"


def _cuts(of: Callable[[str], Any]) -> bool:
    return (of("tensor_model_parallel_size") or 1) > 1


def _cuts_without_sequences(of: Callable[[str], Any]) -> bool:
    return _cuts(of) and not of("sequence_parallel")


_FAULTS: Sequence[tuple[Callable[[Callable[[str], Any]], object], str]] = (
    (
        lambda of: of("softmax_type") == "learnable" and _cuts(of),
        "the gradient norm has the attention sinks of one tensor-parallel rank only, so gradients are clipped less "
        f"({_SPMD} 8)",
    ),
    (
        lambda of: of("mtp_num_layers") and of("calculate_per_token_loss"),
        "multi-token prediction with --calculate-per-token-loss weighs tokens by the counts of their own microbatch and "
        f"rank, which is wrong if masks differ ({_SPMD} 3)",
    ),
    (
        lambda of: of("experimental_attention_variant") == "gated_delta_net" and _cuts_without_sequences(of),
        "tensor-parallel ranks do not add up their gradients of a gated delta net's norm, and its weights drift apart; pass "
        f"--sequence-parallel ({_SPMD} 11)",
    ),
    (
        lambda of: (
            of("moe_grouped_gemm")
            and (of("expert_model_parallel_size") or 1) > 1
            and _cuts(of)
            and not counts_all_experts()
        ),
        "the gradient norm has the experts of one tensor-parallel rank only, so gradients are clipped less "
        "(https://github.com/NVIDIA/Megatron-LM/pull/5916)",
    ),
    (
        lambda of: (
            of("multi_latent_attention")
            and (_cuts_without_sequences(of) or (of("transformer_impl") == "local" and _cuts(of)))
        ),
        "tensor-parallel ranks do not add up their gradients of latent attention's rotary keys; pass --sequence-parallel, with "
        f"Transformer Engine's layers ({_ISSUES}1699)",
    ),
)


def inherited_faults(value_of: Callable[[str], Any]) -> list[str]:
    """Return a sentence for each known fault of Megatron that the settings meet.

    ``value_of`` returns the value of an attribute of Megatron's configuration, or ``None``.
    """
    return [sentence for meets, sentence in _FAULTS if meets(value_of)]


@functools.cache  # each chunk of the model asks
def tell(fault: str) -> None:
    logger.warning("Megatron has a fault that this run meets, under its own schedules too: %s", fault)
