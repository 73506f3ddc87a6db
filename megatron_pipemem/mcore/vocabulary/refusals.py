"""What cannot be cut over the pipeline, refused before the first step with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from megatron_pipemem.errors import UnsupportedError

_OFF = "or pass --pipemem-vocab-parallel off"

# Attribute of the configuration, when its value is refused, and the sentence for the user.
_REFUSED: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (
        "variable_seq_lengths",
        bool,
        "tokens and labels of a whole step are sent in one message; drop --variable-seq-lengths",
    ),
    (
        "fp32_residual_connection",
        bool,
        "the head is cut for inputs in the parameters' number format; drop --fp32-residual-connection",
    ),
    (
        "enable_autocast",
        bool,
        "the cut head computes in the parameters' number format; build the model in the format it is to compute in",
    ),
    (
        "init_model_with_meta_device",
        bool,
        "the shards take their first values from the whole matrices; drop --init-model-with-meta-device",
    ),
)


def check_configuration(config) -> None:
    """Raises:
    UnsupportedError: the configuration asks for something that a cut vocabulary does not do.
    """
    for attribute, refused, sentence in _REFUSED:
        if refused(getattr(config, attribute, None)):
            raise UnsupportedError(
                f"{attribute} = {getattr(config, attribute)!r} is not supported with vocabulary parallelism: {sentence}, "
                f"{_OFF}"
            )


def check_model(model: torch.nn.Module, first: torch.nn.Module | None, last: torch.nn.Module | None) -> None:
    """Raises:
    UnsupportedError: the model's ends are others than Megatron's language models have.

    Args:
        model: any chunk of this rank.
        first: the first stage's model, if it is here.
        last: the last stage's model, if it is here.
    """
    check_configuration(model.config)
    if first is not None and type(getattr(first, "embedding", None)) is not LanguageModelEmbedding:
        raise UnsupportedError(
            f"{type(first).__name__} has no LanguageModelEmbedding whose rows could be cut over the pipeline; pass "
            "--pipemem-vocab-parallel off"
        )
    if last is None:
        return
    head = getattr(last, "output_layer", None)
    if type(head) is not tensor_parallel.ColumnParallelLinear:
        raise UnsupportedError(
            f"the output layer of {type(last).__name__} is a {type(head).__name__}; only Megatron's ColumnParallelLinear can "
            "be cut over the pipeline: use it (no fp8 output projection), or pass --pipemem-vocab-parallel off"
        )
    if head.bias is not None:
        raise UnsupportedError(
            "an output layer with a bias cannot be cut over the pipeline; drop the bias, or pass "
            "--pipemem-vocab-parallel off"
        )
