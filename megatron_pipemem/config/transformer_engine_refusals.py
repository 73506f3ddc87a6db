"""What delayed weight gradients and recomputed forwards do not go with on Transformer Engine's layers, and why.

A run asks Megatron's configuration, the launcher the flags that will set it.
"""

from __future__ import annotations

from collections.abc import Callable

OLDEST = "2.8"
"""Version of Transformer Engine whose modules say which weight gradients they keep for later."""

_SPLITS = {
    "use_transformer_engine_op_fuser": "its fused operations keep weight gradients for themselves, and no W would run; drop "
    "--use-transformer-engine-op-fuser",
    "overlap_dispatch_backward_with_experts_wgrad": "the experts' weight gradients would run within I, and not in W; drop "
    "--overlap-dispatch-backward-with-experts-wgrad",
}
_DELAYED_SCALING = (
    "fp8 with delayed scaling does not go with recomputation in the schedule: a second forward would count its values "
    "twice; pass --fp8-recipe tensorwise, or --pipemem-recompute none"
)


def refused(value_of: Callable[[str], object], splits: bool, recomputes: bool) -> str | None:
    """Why a configuration cannot run, in one sentence, or ``None``.

    Args:
        value_of: of an attribute of Megatron's configuration.
        splits: whether some backward is split into I and W.
        recomputes: whether the schedule may run something again, all or part of a forward.
    """
    if recomputes and value_of("fp8") and value_of("fp8_recipe") == "delayed":
        return _DELAYED_SCALING
    for attribute, sentence in _SPLITS.items():
        if splits and value_of(attribute):
            return f"{attribute} is not supported by a schedule that splits the backward: {sentence}"
    return None


def refused_flags(flags: dict[str, object], splits: bool, recomputes: bool) -> str | None:
    """The same of the training script's flags, without dashes in front; Megatron's defaults fill in what is not given."""

    def value_of(attribute: str) -> object:
        name = {"fp8": "fp8-format"}.get(attribute, attribute.replace("_", "-"))
        return flags.get(name, {"fp8_recipe": "delayed"}.get(attribute))

    return refused(value_of, splits, recomputes)
