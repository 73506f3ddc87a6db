"""The keys of a run's file: Megatron's argument names, written with underscores, and shorter names for some of them.

A file is a flat mapping. ``parts_of`` sorts its keys into the fields of ``Run``, and ``keys_of`` is its inverse.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model import layout
from megatron_pipemem.model.arguments import NAMES
from megatron_pipemem.model.model import BY_ACTION
from megatron_pipemem.request import FORMER_NAMES, Request, flags_of
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.tools.config.arguments import flags_of_attributes, frozen_flags, setters
from megatron_pipemem.tools.config.runs import ADAPTERS, FREEZES, RECOMPUTE_FLAG, Parallelism, Run, ScheduleChoice
from megatron_pipemem.values import refuse_if

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "chunks": "num_virtual_stages_per_pipeline_rank",
    "micro_batch": "micro_batch_size",
    "global_batch": "global_batch_size",
    "schedule": "pipemem_schedule",
}
"""Short keys, and the arguments that they stand for. A file may use either."""

_OF_SCHEDULE = {field: flag.name.lstrip("-").replace("-", "_") for field, flag in flags_of(ScheduleChoice).items()} | {
    "name": "schedule",
    "module": "pipemem_schedule_module",
    "slices": "slices",
    "recompute": "recompute_granularity",
    "recompute_modules": "recompute_modules",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
}
KEYS = {
    **{("parallelism", field.name): field.name for field in fields(Parallelism)},
    **{("schedule", field): key for field, key in _OF_SCHEDULE.items()},
}
"""Key by the place of its value in a run: the field of ``Run``, and the field of this field."""
PLACES = {key: place for place, key in KEYS.items()}
PLACES |= {argument: PLACES[key] for key, argument in SHORT.items()}
FIELDS = ("base", *(field.name for field in fields(Run) if field.name not in ("parallelism", "schedule", "flags")))
"""Keys that are fields of ``Run`` themselves."""
_RECOMPUTE = RECOMPUTE_FLAG.replace("-", "_")
_SECTIONS = "parallelism training megatron".split()
_OLD = {
    "training.iterations": "train_iters",
    "training.data": "data_path",
    "training.cache": "data_cache_path",
    "precision": "bf16: true, fp16: true, or bf16: false for fp32",
}
"""Keys of earlier versions, and what to write instead, where more than the section is left out."""


def place_of(key: str) -> tuple[str, ...]:
    """Return the place of a key's value in a run, as names of fields and keys of mappings: ``("parallelism", "tp")``.

    A dotted key leads into a mapping, as ``cluster.nodes`` does. Raise a ConfigError for a key of an earlier version.
    """
    first, *inner = key.split(".")
    refuse_if(
        key.startswith("-"), "bad-syntax", key, f"is written without dashes; write {first.strip('-').replace('-', '_')}"
    )
    if first in _SECTIONS or first == "precision" or (first == "schedule" and inner):
        old = f"is a key of an earlier version; write {_new_name(first, '.'.join(inner))}"
        raise ConfigError("old-key", old, key=key)
    former = first.removeprefix("pipemem_")
    if former != first and former in FORMER_NAMES:
        raise ConfigError("old-key", f"is a key of an earlier version; write pipemem_{FORMER_NAMES[former]}", key=key)
    if first in FIELDS:
        return (first, *inner)
    if first in NAMES:
        return ("model", first, *inner)
    return (*PLACES.get(first, ("flags", first.replace("_", "-"))), *inner)


def _new_name(section: str, field: str) -> str:
    old = f"{section}.{field}".rstrip(".")
    if section == "schedule":
        return KEYS.get(("schedule", field), f"pipemem_{FORMER_NAMES.get(field, field)}")
    return _OLD.get(old, field.replace("-", "_") or "its keys")


_OWN_FLAGS = (ADAPTERS, *FREEZES.values())
"""Flags of a run that are not Megatron's: they stand for settings that other programs make."""


def why_unknown(name: str) -> str | None:
    """Return why a flag of a run, without leading dashes, is unknown; ``None`` if it is a flag of Megatron or of ours.

    The installed Megatron is asked about flags that the one of ``frozen_flags`` lacks.
    """
    ours = [flag.name for flag in flags_of(Request).values()]
    flag = f"--{name}"
    if name in _OWN_FLAGS or flag in frozen_flags() or flag in ours:
        return None
    # By name, because what asks an installed Megatron is built on this package.
    if flag in import_module("megatron_pipemem.tools.megatron.known_flags").known_flags():
        return None
    others = [other.lstrip("-").replace("-", "_") for other in (*frozen_flags(), *ours)]
    near = difflib.get_close_matches(name.replace("-", "_"), [*PLACES, *NAMES, *FIELDS, *others], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key; {hint}it is no flag of Megatron either, and for a flag of your own script add script: FILE.py"


def parts_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping of a run's file by the fields of ``Run``: ``{"tp": 2, "lr": 1}`` as ``{"parallelism": {"tp": 2},
    "flags": {"lr": 1}}``.

    Raise a ConfigError for a key of an earlier version, and for two keys with one meaning.
    """
    parts: dict[str, Any] = {}
    for key, value in sorted(raw.items(), key=lambda item: item[0] != "model"):
        refuse_if("." in key, "unknown-key", key, "unknown key; write a mapping, as in cluster: {nodes: 2}")
        is_section = isinstance(value, Mapping) and key in (*_SECTIONS, "schedule")
        place_of(".".join([key, *[inner for inner in value if inner != "base"][:1]]) if is_section else key)
        for (field, *inner), meaning in _meanings(key, value):
            if not inner:
                parts[field] = {"base": meaning} if field == "model" and isinstance(meaning, str) else meaning
            elif isinstance(part := parts.setdefault(field, {}), Mapping):
                refuse_if(inner[0] in part, "given-twice", key, "is given twice, under two names; leave one out")
                parts[field] = {**part, inner[0]: meaning}
    pattern = parts.get("flags", {}).get(layout.PATTERN)
    if pattern is not None and isinstance(parts.setdefault("model", {}), Mapping):
        parts["model"] = {layout.PATTERN_ARGUMENT: layout.without_cuts(pattern)} | parts["model"]
    return parts


def _meanings(key: str, value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Return the places and values in a run that say what a key says: ``disable_bias_linear`` is ``add_bias_linear``."""
    kind = ("schedule", "recompute")
    if key == _RECOMPUTE and value in ("selective", "none"):
        modules = [(("schedule", "recompute_modules"), [*BY_ACTION])] if value == "selective" else []
        return [(kind, value), *modules]
    if key == "recompute_granularity":
        return [(kind, value or "none")]
    if key == "recompute_activations":
        return [(kind, "selective")] if value else []
    if key == layout.PATTERN_ARGUMENT and layout.is_cut(str(value)):
        return [(("flags", layout.PATTERN), str(value))]
    if (place := place_of(key))[0] != "flags":
        return [(place, value)]
    flag = frozen_flags().get(f"--{place[1]}")
    if flag is None and key in setters(frozen_flags()):  # the name of an attribute that another flag sets
        places = flags_of_attributes({key: value}, frozen_flags())
        named: list[tuple[tuple[str, ...], Any]] = [(("flags", name), set_to) for name, set_to in places]
        is_wrong = not named and value is not None and not isinstance(value, bool)
        refuse_if(is_wrong, "bad-type", key, f"is {shortened(value)}; give true or false")
        return named
    if flag is not None and flag["dest"] in NAMES:
        refuse_if(
            flag["bare"] != isinstance(value, bool), "bad-type", key, f"is {shortened(value)}; give true or false"
        )
        return [(("model", flag["dest"]), flag["const"] if flag["bare"] else value)] if value else []
    return [(place, value)]


def synonyms(raw: Mapping[str, Any], key: str, value: Any) -> list[str]:
    """Return the other keys of a run's file that say what ``key`` says with this value."""
    places = {place for place, _ in _meanings(key, value)}
    return [other for other in raw if other != key and places & {place for place, _ in _meanings(other, raw[other])}]


def keys_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping of a run's file for settings by the fields of ``Run``."""
    choice = dict(parts.get("schedule", {}))
    keys: dict[str, Any] = {}
    if choice.get("recompute") == "selective" and set(choice.get("recompute_modules", ())) == set(BY_ACTION):
        del choice["recompute"], choice["recompute_modules"]
        keys[_RECOMPUTE] = "selective"
    for field, value in {**parts, "schedule": choice}.items():
        if field == "flags":
            keys |= {name.replace("-", "_"): flag for name, flag in value.items()}
        elif field in ("parallelism", "schedule"):
            keys |= {KEYS[field, name]: setting for name, setting in value.items()}
        else:
            keys[field] = value
    return keys
