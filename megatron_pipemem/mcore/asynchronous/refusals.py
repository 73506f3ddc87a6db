"""What asynchronous schedules do not run with, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.errors import UnsupportedError

# Attribute, of the configuration or of DDP's, when its value is refused, and the sentence for the user.
_BOTH: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (
        "use_distributed_optimizer",
        bool,
        "its parameters are views of one buffer that it gathers into, so they cannot be pointed at another version of the "
        "weights; drop --use-distributed-optimizer",
    ),
    ("fp8", bool, "quantised weights are cached once per step and know no versions; drop --fp8-format"),
    ("fp4", bool, "quantised weights are cached once per step and know no versions; drop --fp4-format"),
    (
        "moe_router_enable_expert_bias",
        bool,
        "the bias is no weight and has no versions; drop --moe-router-enable-expert-bias",
    ),
)
_PER_MICROBATCH: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (
        "overlap_grad_reduce",
        bool,
        "every microbatch waits for its own reduction before it updates, so there is nothing to overlap; drop "
        "--overlap-grad-reduce",
    ),
    (
        "calculate_per_token_loss",
        bool,
        "gradients would be scaled by the tokens of a whole batch, which only the last stage has seen, and after it; drop "
        "--calculate-per-token-loss",
    ),
)


def check_asynchronous(config, chunks: list[torch.nn.Module], loop_updates: bool) -> None:
    """Raises:
    UnsupportedError: the configuration asks for something that needs one set of weights, or one update per step.
    """
    holders = [config, *(getattr(chunk, "ddp_config", None) for chunk in chunks)]
    for attribute, refused, sentence in (*_BOTH, *(() if loop_updates else _PER_MICROBATCH)):
        if any(refused(getattr(holder, attribute, None)) for holder in holders):
            raise UnsupportedError(f"asynchronous schedules do not support {attribute}: {sentence}")
    if loop_updates:
        return
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        if getattr(model, "share_embeddings_and_output_weights", False):
            raise UnsupportedError(
                "a schedule that updates after every microbatch cannot tie the embedding to the head: their stages update "
                "at different times; pass --untie-embeddings-and-output-weights"
            )
