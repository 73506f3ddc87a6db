"""What asynchronous schedules do not run with, and why.

A run asks Megatron's configurations, the launcher the flags that will set them.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.features.windows import check_batch, updates_per_batch

# Attribute of Megatron's configuration -> why it may not be set, and what to do.
_ALWAYS = {
    "use_distributed_optimizer": "its parameters are views of one buffer that it gathers into, so they cannot be "
    "pointed at another version of the weights; drop --use-distributed-optimizer",
    "fp8": "quantised weights are cached once per step and know no versions; drop --fp8-format",
    "fp4": "quantised weights are cached once per step and know no versions; drop --fp4-format",
    "moe_router_enable_expert_bias": "the bias is no weight and has no versions; drop --moe-router-enable-expert-bias",
}
_PER_MICROBATCH = {
    "overlap_grad_reduce": "every microbatch waits for its own reduction before it updates, so there is nothing to "
    "overlap; drop --overlap-grad-reduce",
    "calculate_per_token_loss": "gradients would be scaled by the tokens of a whole batch, which only the last stage "
    "has seen, and after it; drop --calculate-per-token-loss",
    "clip_grad": "the gradient's norm is a sum over all stages, which update at different times; pass --clip-grad 0",
    "fp16": "loss scaling skips updates of all stages together, which update at different times; use bf16 or fp32",
    "log_num_zeros_in_grad": "gradients are gone when the step ends; drop --log-num-zeros-in-grad",
}
_FLAGS = {"fp8": "fp8-format", "fp4": "fp4-format"}
_DEFAULTS = {"clip_grad": 1.0}

TIED = (
    "a schedule that updates after every microbatch cannot tie the embedding to the head: their stages update at different "
    "times; pass --untie-embeddings-and-output-weights"
)


def _flag_value(flags: dict[str, object], attribute: str) -> object:
    """What an option will be under a run's flags, Megatron's default included."""
    given = flags.get(_FLAGS.get(attribute, attribute.replace("_", "-")))
    return _DEFAULTS.get(attribute) if given is None or given is False else given


def refused(value_of: Callable[[str], object], per_batch: bool) -> str | None:
    """Why a configuration does not go with an asynchronous schedule, in one sentence, or ``None``.

    Args:
        value_of: of an attribute of Megatron's configuration.
        per_batch: whether the schedule updates once per batch, and not once per microbatch.
    """
    for whose, options in (
        ("asynchronous schedules do", _ALWAYS),
        ("a schedule that updates after every microbatch does", {} if per_batch else _PER_MICROBATCH),
    ):
        for attribute, sentence in options.items():
            if value_of(attribute):
                return f"{whose} not support {attribute}: {sentence}"
    return None


def check_run(run: Run, name: str) -> None:
    """Raises:
    UnsupportedError: the run would be refused when it starts under the asynchronous family of that name.
    """
    cut, per_batch = run.parallelism, updates_per_batch(name)
    check_batch(name, cut.pp, cut.microbatches)
    flags = run.flags | {run.precision: True}
    reason = refused(lambda attribute: _flag_value(flags, attribute), per_batch)
    if reason is None and run.model.tied and not per_batch:
        reason = TIED
    if reason is not None:
        raise UnsupportedError(reason)
