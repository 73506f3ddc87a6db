"""Convert a recipe of the installed Megatron-Bridge to Megatron's flags, and to a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from megatron_pipemem.advise.consumers import BRIDGE, IMAGES, TOWER, adapter_flags, flags_of, flags_of_model
from megatron_pipemem.advise.reading import Context, Reading, read_flags
from megatron_pipemem.config.hugging_face import known_model
from megatron_pipemem.config.loading import typed
from megatron_pipemem.config.model import Tower
from megatron_pipemem.errors import ConfigError, UpstreamError
from megatron_pipemem.launch.asking import answers

PREFIX = "bridge:"
_CHILD = "megatron_pipemem.mcore.bridge_recipe"
_SECONDS = 600
_PRICED = ("gated_delta_net", "dsa")
"""Kinds of attention, in addition to plain and latent attention, whose seconds and bytes can be predicted."""


def evaluate(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the settings of each recipe, in the order of the names, as ``mcore.bridge_recipe.evaluated`` returns them.

    Raises:
        UpstreamError: Megatron-Bridge cannot be imported (``not-installed``), or a recipe takes too long
            (``no-answer``).
    """
    try:
        yield from answers(["-m", _CHILD, *names], _SECONDS, "Megatron-Bridge")
    except UpstreamError as error:
        hint = "pip install megatron-bridge" if error.code == "not-installed" else "the recipe may wait for a network"
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
    """Return the run that an evaluated recipe configures, or raise the errors of ``read_recipe``."""
    asked = facts["asked"]
    if "names" in facts:
        near = get_close_matches(asked, facts["names"], n=1)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else "see megatron.bridge.recipes"
        raise ConfigError("unknown-recipe", f"Megatron-Bridge has no recipe {asked}; {hint}")
    if "error" in facts:
        raise ConfigError(
            "cannot-evaluate",
            f"the recipe {asked} raises an error on this machine: {facts['error']}; remove its cause, or give a launch "
            "script or run file",
        )
    if facts["unknown"] is not None:
        flags_of_model(facts["unknown"], "unset HF_HUB_OFFLINE to ask Hugging Face")
    values = facts["values"]
    variant = values.get("experimental_attention_variant", _PRICED[0])
    if variant not in _PRICED or values.get("enable_hyper_connections"):
        raise ConfigError(
            "unsupported-model",
            f"{asked} has hyper-connections or attention of the kind {variant}, whose seconds and bytes are not known; "
            "no schedules can be compared for this model",
        )
    if facts["adapters"] is not None and not facts["rank"]:
        raise ConfigError(
            "unsupported-model",
            f"{asked} trains adapters of the kind {facts['adapters']}, which have no rank, and whose seconds and bytes "
            "are not known; no schedules can be compared for this model",
        )
    alike = known_model(facts["tokenizer"] or "")
    tokens = facts["vocabulary"] or (alike and alike.vocabulary)
    base = {} if tokens is None else {"vocab-size": tokens}
    if facts["model"] is not None:
        base |= flags_of_model(facts["model"], "")
    flags = base | dict(flags_of(values, context.known)) | dict.fromkeys(facts.get("frozen", ()), True)
    flags |= adapter_flags(facts["rank"] or 0)
    if flags.get("expert-model-parallel-size", 1) > 1:  # Megatron-Bridge does not cut experts by default
        flags.setdefault("expert-tensor-parallel-size", 1)
    _add_tower(flags, facts)
    match = re.search(r"_(\d+)gpu", facts["name"])
    devices = context.devices or (int(match[1]) if match else None)
    launcher = {} if devices is None else {"nproc-per-node": str(min(devices, context.cluster.devices_per_node))}
    found = read_flags(flags, launcher, f"{PREFIX}{facts['name']}", replace(context, devices=devices))
    return replace(found, consumer=BRIDGE)


def _add_tower(flags: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Put the vision tower and the images of a recipe among its ``flags``, which are changed.

    Raise a ConfigError if the tower cannot be priced.
    """
    if "images" in facts:
        flags[IMAGES] = facts["images"]
    if "tower" in facts:
        try:
            flags[TOWER] = typed(facts["tower"], Tower, prefix="tower.")
        except ConfigError as error:
            message = f"{facts['asked']} has a vision tower whose seconds and bytes are not known: {error}"
            raise ConfigError("unsupported-model", message) from error
