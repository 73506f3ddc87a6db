"""Convert a recipe of the installed Megatron-Bridge to Megatron's flags, and to a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from megatron_pipemem.advise.reading import Context, Reading, read_flags
from megatron_pipemem.config import layout
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.model import Model
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import ConfigError, UpstreamError
from megatron_pipemem.launch.asking import answers
from megatron_pipemem.launch.command import model_flags
from megatron_pipemem.planner.space import STOCKS_ALONE
from megatron_pipemem.schedule.options import STOCK

PREFIX = "bridge:"
_CHILD = "megatron_pipemem.mcore.bridge_recipe"
_SECONDS = 600
_RENAMED = {
    "num_moe_experts": "num-experts",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "hybrid_layer_pattern": "hybrid-layer-pattern",
    "gated_linear_unit": "swiglu",
    "fp8": "fp8-format",
}
"""Flag by field of a recipe's settings, if the names differ."""
_INVERTED = {"share_embeddings_and_output_weights": "untie-embeddings-and-output-weights"}
"""Fields that are true by default, and the flag that sets each to false."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_UNPRICED = {
    "experimental_attention_variant": "attention of another kind",
    "vision_config": "a vision tower",
    "enable_hyper_connections": "hyper-connections",
    "linear_attention_freq": "linear attention",
}
"""Fields of models whose seconds and bytes cannot be predicted."""


def evaluate(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the settings of each recipe, in the order of the names, as ``mcore.bridge_recipe.evaluated`` returns them.

    Raises:
        UpstreamError: Megatron-Bridge cannot be imported (``not-installed``), or a recipe takes too long
            (``no-answer``).
    """
    try:
        yield from answers(["-m", _CHILD, *names], _SECONDS, "Megatron-Bridge")
    except UpstreamError as error:
        hint = "pip install megatron-bridge" if error.code == "not-installed" else "a recipe may wait for a network"
        raise UpstreamError(error.code, f"{error}; {hint}") from error


def read_recipe(name: str, context: Context) -> Reading:
    """Return the run that a recipe configures.

    Args:
        name: a recipe of Megatron-Bridge, with or without ``_config``; or a user's recipe, as
            ``package.module:function``.
        context: facts that the recipe may leave open. A part of its name like ``_32gpu_`` gives the number of devices.

    Raises:
        ConfigError: no such recipe (``unknown-recipe``), or a size is missing.
        UnsupportedError: the model cannot be priced (``unsupported-model``).
    """
    asked = name if name.endswith("_config") or ":" in name else f"{name}_config"
    (facts,) = evaluate([asked])
    return run_of(facts, context)


def run_of(facts: Mapping[str, Any], context: Context) -> Reading:
    """Return the run that an evaluated recipe configures (``read_recipe``)."""
    asked = facts["asked"]
    if "names" in facts:
        near = get_close_matches(asked, facts["names"], n=1)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else "see megatron.bridge.recipes"
        raise ConfigError("unknown-recipe", f"Megatron-Bridge has no recipe {asked}; {hint}")
    if "error" in facts:
        raise ConfigError("cannot-evaluate", f"the recipe {asked} cannot be evaluated: {facts['error']}")
    if facts["unknown"] is not None:
        raise ConfigError(
            "unknown-size",
            f"the sizes of {facts['unknown']} are not known here; unset HF_HUB_OFFLINE to ask Hugging Face",
        )
    values = facts["values"]
    for field, words in _UNPRICED.items():
        if values.get(field):
            raise ConfigError("unsupported-model", f"{asked} has {words}, whose seconds and bytes are not known")
    if facts["adapters"] is not None:
        raise ConfigError(
            "unsupported-model",
            f"{asked} trains adapters ({facts['adapters']}): frozen layers have no W, so a split backward gains little",
        )
    base = {} if facts["model"] is None else _said(model_flags(load(facts["model"], Model)))
    flags = base | dict(_flags(values, context.known))
    match = re.search(r"_(\d+)gpu", facts["name"])
    devices = context.devices or (int(match[1]) if match else None)
    launcher = {} if devices is None else {"nproc-per-node": str(min(devices, context.cluster.devices_per_node))}
    return read_flags(flags, launcher, f"{PREFIX}{facts['name']}", replace(context, devices=devices))


def changes(today: Run, other: Run, chunks: int) -> list[str]:
    """Return Python statements that change a recipe's ``config`` from the run ``today`` to the run ``other``.

    ``chunks`` is the number of chunks per rank of ``other``.
    """
    found = []
    if other.schedule.name != STOCK:
        found.append(f'megatron_pipemem.enable("{other.schedule.name}")')
    if chunks != (today.parallelism.chunks or 1):
        virtual = None if chunks == 1 else chunks
        found.append(f"config.model.virtual_pipeline_model_parallel_size = {virtual}")
    cut = other.flags.get(layout.FLAG)
    if cut != today.flags.get(layout.FLAG):
        found.append(f"config.model.pipeline_model_parallel_layout = {json.dumps(cut)}")
    gone = (flag for flag in STOCKS_ALONE if today.flags.get(flag) is True and flag not in other.flags)
    return [*found, *(f"config.comm_overlap.{flag.replace('-', '_')} = False" for flag in gone)]


def _said(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags without those that are ``None`` or false, which a command leaves out."""
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def _flags(values: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (flag, value) for the fields of a recipe's settings.

    Fields without a flag are left out, because they do not change a price.
    """
    fields: dict[tuple[str, str | None], str] = {}
    for name, flag in known.items():
        fields.setdefault((flag["dest"], str(flag["const"]) if flag["bare"] else None), name.lstrip("-"))
    for field, value in values.items():
        if field in _INVERTED:
            yield _INVERTED[field], not value
        elif field in _RENAMED:
            yield _RENAMED[field], value
        elif field == "pipeline_model_parallel_layout":
            yield layout.FLAG, _layout(value)
        elif (field, str(value)) in fields:
            yield fields[field, str(value)], True
        elif (field, None) in fields and not isinstance(value, bool):
            yield fields[field, None], value
    heads = values.get("num_query_groups")
    if heads is not None:
        yield "group-query-attention", True


def _layout(value: str | Sequence[str] | Sequence[Sequence[str]]) -> str:
    """Return a layout in the form of Megatron's flag, such as ``Ett|ttL``."""
    if isinstance(value, str):
        return value
    return "|".join("".join(_LETTERS[piece] for piece in stage) for stage in value)
