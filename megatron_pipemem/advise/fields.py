"""Megatron's flags for the fields of its configuration, as recipes and settings of other programs name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_pipemem.advise.shell import UNKNOWN
from megatron_pipemem.config import layout
from megatron_pipemem.config.hugging_face import known_model, unpriced_part
from megatron_pipemem.config.runs import ADAPTERS, FREEZES
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.launch.command import model_flags

VIRTUAL = "virtual_pipeline_model_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"
ENDS = {
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
"""Flag -> field of the layers in the first and the last stage."""
TOWER, IMAGES = "vision-tower", "vision-images"
"""Keys of a model's ``Tower`` and of its images (number, height, width) among its flags. Megatron has no such flags."""
_RENAMED = {
    "num_moe_experts": "num-experts",
    VIRTUAL: "num-virtual-stages-per-pipeline-rank",
    **{field: flag for flag, field in ENDS.items()},
    "hybrid_layer_pattern": "hybrid-layer-pattern",
    "gated_linear_unit": "swiglu",
    "fp8": "fp8-format",
}
"""Flag by field of Megatron's configuration, if the names differ."""
_INVERTED = {"share_embeddings_and_output_weights": "untie-embeddings-and-output-weights"}
"""Fields that are true by default, and the flag that sets each to false."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def flags_of(values: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield ``(flag, value)`` for the fields of a configuration that have a flag. Others do not change a price.

    ``known`` has the flags of Megatron's parser, as ``mcore.known_flags`` describes them.
    """
    fields: dict[tuple[str, str | None], str] = {}
    for name, flag in known.items():
        fields.setdefault((flag["dest"], str(flag["const"]) if flag["bare"] else None), name.lstrip("-"))
    for field, value in values.items():
        if value is None:
            continue
        if field in _INVERTED:
            yield _INVERTED[field], not value
        elif field in _RENAMED:
            yield _RENAMED[field], value
        elif field == LAYOUT:
            yield layout.FLAG, _layout(value)
        elif (field, str(value)) in fields:
            yield fields[field, str(value)], True
        elif (field, None) in fields and not isinstance(value, bool):
            yield fields[field, None], value
    if values.get("num_query_groups") is not None:
        yield "group-query-attention", True
    if values.get("activation_func") == "squared_relu":
        yield "squared-relu", True


def flags_of_model(name: str, hint: str) -> dict[str, Any]:
    """Return the flags of a public model's shape, by its name on Hugging Face, or the path of a folder with that name.

    ``hint`` ends the message if the shape is unknown.
    """
    if (part := unpriced_part(name)) is not None:
        raise ConfigError(
            "unsupported-model",
            f"{name} has {part}, whose seconds and bytes are not known; no schedules can be compared for this model",
        )
    model = known_model(name)
    if model is None:
        name = name.replace(UNKNOWN, "")
        raise ConfigError("unknown-size", f"the sizes of {name} are not known here; {hint}")
    if model.activation == "geglu":  # costs the same, and Megatron's parser has no flag for it
        model = replace(model, activation="swiglu")
    flags = {flag: value for flag, value in model_flags(model).items() if value is not None and value is not False}
    return flags if model.tower is None else flags | {TOWER: model.tower}


def adapter_flags(rank: int) -> dict[str, Any]:
    """Return the flags of a model whose layers are frozen and have low-rank adapters; none for rank 0."""
    return {FREEZES["language"]: True, ADAPTERS: rank} if rank else {}


def _layout(value: str | Sequence[str] | Sequence[Sequence[str]]) -> str:
    """Return a layout in the form of Megatron's flag, such as ``Ett|ttL``."""
    if isinstance(value, str):
        return value
    return "|".join("".join(_LETTERS[piece] for piece in stage) for stage in value)
