"""What differs between Megatron's classes of language models, ``GPTModel`` and ``HybridModel``.

A layer of a GPT has attention and an MLP, and its configuration says which. A layer of a hybrid model is one block, and
a pattern says which. No other room names a class or its pattern, so all others read *kinds*: the blocks of each layer,
in the letters of ``Sublayer``, such as ``*-`` and ``*E`` in a GPT, and ``*``, ``-`` and ``M`` in a hybrid model.
"""

from __future__ import annotations

from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.symbols import GPT_MODELS, HYBRID_MODELS
from megatron_pipemem.model.arguments import model_of
from megatron_pipemem.model.counts import kind_weights, layer_weights
from megatron_pipemem.model.layout import PATTERN_ARGUMENT, pattern_layers
from megatron_pipemem.model.model import Model, Sublayer


def pattern_of(model: Any) -> str | None:
    """Return the pattern of a hybrid model, of which ``model`` is a chunk, with its ``|`` and ``/``; ``None`` for a GPT."""
    return getattr(model, PATTERN_ARGUMENT, None)


def count_layers(model: Any) -> int:
    """Return the number of layers of the whole model of which ``model`` is a chunk, without multi-token prediction."""
    pattern = pattern_of(model)
    return model.config.num_layers if pattern is None else len(pattern_layers(pattern))


def predicts_in_piece(model: Any) -> bool:
    """Return whether a chunk has multi-token prediction that is a piece of its own in layouts, as in a GPT."""
    return bool(getattr(model, "mtp_process", False)) and pattern_of(model) is None


def model_of_chunk(model: Any, sequence: int | None = None, **facts: Any) -> Model:
    """Return the shape of the whole model of which ``model`` is a chunk.

    ``sequence`` is the number of tokens of a sequence, by default the longest that the model can take. ``facts`` are those
    of ``model_of``. Raise a ConfigError if a size is missing or wrong, and an UnsupportedError for a hybrid model without
    a pattern, whose layers a program gives as objects.
    """
    pattern, hybrid = pattern_of(model), HYBRID_MODELS.find()
    if pattern is None and hybrid is not None and isinstance(model, hybrid):
        raise UnsupportedError(
            "unsupported-model",
            f"the layers of this {type(model).__name__} are given as objects, so that the kind of each is unknown (whether "
            "it hands on a state, how much it computes); give them as --hybrid-layer-pattern, or drop the feature that "
            "needs it",
        )
    of_class = {PATTERN_ARGUMENT: pattern, "seq_length": sequence or model.max_sequence_length}
    return model_of(model.config, **of_class | facts)


def kinds_of(model: Any) -> tuple[str, ...]:
    """Return the kind of every layer of the whole model of which ``model`` is a chunk, or raise as ``model_of_chunk`` does."""
    pattern = pattern_of(model)
    return model_of_chunk(model).kinds if pattern is None else tuple(pattern_layers(pattern))


def kinds_of_chunk(model: Any) -> list[str]:
    """Return the kind of every layer of a chunk. Its layers have the numbers of the whole model's, from 1."""
    kinds = kinds_of(model)
    return [kinds[layer.layer_number - 1] for layer in model.decoder.layers]


def layers_in(model: Any) -> float:
    """Return the number of layers of a chunk, where a layer counts by its FLOPs relative to the model's mean layer."""
    weights = _weights(model)
    return sum(weights[kind] for kind in kinds_of_chunk(model)) / mean_weight(model)


def mean_weight(model: Any) -> float:
    """Return the mean weight (FLOPs per token / 6) of the layers of the whole model of which ``model`` is a chunk."""
    weights, kinds = _weights(model), kinds_of(model)
    return sum(weights[kind] for kind in kinds) / len(kinds)


def _weights(model: Any) -> dict[str, float]:
    """Return the weight (FLOPs per token / 6) of each kind of layers."""
    kinds = dict.fromkeys(kinds_of(model))
    if pattern_of(model) is None:
        return kind_weights(model_of_chunk(model))
    return dict(zip(kinds, layer_weights(model.config, "".join(kinds), model.max_sequence_length), strict=True))


def build_gpt(config: Any, layers: Any, *size: int, **more: Any) -> Any:
    """Build a stage of a GPT from the specification of its layers. ``more`` are further arguments of the class."""
    return GPT_MODELS.get()(config, layers, *size, **more)


def build_hybrid(config: Any, blocks: Any, *size: int, pattern: str, **more: Any) -> Any:
    """Build a stage of a hybrid model with the layers of a pattern. ``more`` are further arguments of the class."""
    return HYBRID_MODELS.get()(config, blocks, *size, **{PATTERN_ARGUMENT: pattern}, **more)


def is_language_model(model: Any) -> bool:
    """Return whether a model is of one of Megatron's own classes of language models."""
    return isinstance(model, tuple(filter(None, (GPT_MODELS.find(), HYBRID_MODELS.find()))))


def layers_with_states(model: Any) -> dict[int, str]:
    """Return the kinds of the layers that hand a state from token to token, by their numbers in the whole model from 1."""
    return {
        number: kind
        for number, kind in enumerate(kinds_of(model), 1)
        if not {*kind}.isdisjoint((Sublayer.MAMBA, Sublayer.DELTA_NET))
    }
