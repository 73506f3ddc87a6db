"""Evaluate recipes of Megatron-Bridge and print them as JSON: ``python -m megatron_pipemem.tools.megatron.bridge_recipe NAME``.

Words ``FILE.yaml`` and ``KEY=VALUE`` change the settings of all recipes, as those of Megatron-Bridge's own programs do.

This runs in a separate process, because it imports Megatron-Bridge. The sizes of models that ``config.loading``
knows come from that module, so that nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_pipemem.model.layout import PATTERN_ARGUMENT, pattern_of
from megatron_pipemem.model.model import Model
from megatron_pipemem.tools.config.loading import known_model, read_raw, read_yaml
from megatron_pipemem.tools.config.runs import FREEZES
from megatron_pipemem.tools.megatron.asking import MARK

_SECTIONS = ("model", "ddp", "comm_overlap", "mixed_precision", "optimizer", "train")
_MEGATRON = ("megatron.core.", "megatron.training.")
_OF_PRECISION = ("grad_reduce_in_fp32", "fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""Settings of a mixed precision that replace those of ``ddp`` and ``model``, and whose defaults are not Megatron's. All but
the first need fp8.
"""


def recipes() -> dict[str, Callable[[], Any]]:
    """Return the recipe functions of the installed Megatron-Bridge by name, including aliases."""
    module = import_module("megatron.bridge.recipes")
    return {name: getattr(module, name) for name in dir(module) if name.endswith("_config")}


def _own(name: str) -> Callable[[], Any]:
    """Import the recipe function of a user from ``package.module:function``."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def evaluated(recipe: Callable[[], Any], changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a recipe that differ from Megatron's defaults, as JSON values, after ``changes``.

    The entry ``name`` is the name of the recipe's function. ``model`` is the name on Hugging Face of a model
    with known sizes, and ``unknown`` that of a model without. ``vocabulary`` and ``tokenizer`` are the tokens and the
    name of its tokenizer, ``adapters`` and ``rank`` the class and the rank of its parameter-efficient fine-tuning, and
    ``values`` the changed settings. ``tower`` has the sizes of a vision tower that is not among the known models,
    ``images`` the number and sides of a sequence's images, and ``frozen`` the parts of the model that are not trained.
    """
    config = recipe()
    _change(config, changes)
    values: dict[str, Any] = {}
    for name in _SECTIONS:
        values |= _changed(getattr(config, name, None))
    for name in _OF_PRECISION if values.get("fp8") else _OF_PRECISION[:1]:
        value = getattr(config.mixed_precision, name, None)
        if value is not None:
            values[name] = value
    provider, peft, tokenizer = (getattr(config, name, None) for name in ("model", "peft", "tokenizer"))
    values["seq_length"] = getattr(provider, "seq_length", None)
    return {
        "name": recipe.__name__,
        "model": getattr(provider, "known_model", None),
        "unknown": getattr(provider, "unknown_model", None),
        "vocabulary": getattr(tokenizer, "vocab_size", None),
        "tokenizer": getattr(tokenizer, "tokenizer_model", None),
        "adapters": None if peft is None else type(peft).__name__,
        "rank": getattr(peft, "dim", None),
        "values": values,
        **_vision(provider, getattr(config, "dataset", None)),
    }


def _change(config: Any, changes: Sequence[str]) -> None:
    """Change the settings of a recipe, in the order of ``changes``: files, and texts like ``model.num_layers=2``.

    A change of the pipeline's ranks or chunks makes the recipe's layout anew, and the length of the data is the model's.
    """
    overrides: dict[str, Any] = {}
    for text in changes:
        if text.endswith((".yaml", ".yml")):
            overrides |= dict(_flat(read_raw(text)))
        else:
            key, _, value = text.lstrip("+").partition("=")
            overrides[key] = read_yaml(value)
    for key, value in overrides.items():
        _resolve_precision(config)
        here = config
        *parents, last = key.split(".")
        for part in parents:
            here = here[part] if isinstance(here, dict) else getattr(here, part)
        if isinstance(here, dict):
            here[last] = value
        elif hasattr(here, last):
            setattr(here, last, value)
        else:
            raise AttributeError(f"there is no setting {key}")
    _resolve_precision(config)
    build = getattr(config.model, "_pipeline_model_parallel_layout_builder", None)
    ranks, chunks = "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"
    if build is not None and {ranks, chunks} & {*overrides} and "model.pipeline_model_parallel_layout" not in overrides:
        layout = build(config.model.pipeline_model_parallel_size, config.model.virtual_pipeline_model_parallel_size)
        config.model.pipeline_model_parallel_layout = layout
    if "dataset.seq_length" in overrides:
        config.model.seq_length = overrides["dataset.seq_length"]


def _flat(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolve_precision(config: Any) -> None:
    """Replace the name of a precision by its settings."""
    if isinstance(config.mixed_precision, str):
        module = import_module("megatron.bridge.training.mixed_precision")
        config.mixed_precision = module.get_mixed_precision_config(config.mixed_precision)


_SIZES = {
    "layers": ("depth", "num_hidden_layers"),
    "hidden": ("hidden_size",),
    "heads": ("num_heads", "num_attention_heads"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size",),
}
"""Fields of ``Tower``, and their names in configurations of Hugging Face."""


def _vision(provider: object, dataset: object) -> dict[str, Any]:
    """Return a recipe's images, vision tower and frozen parts; an empty dict for a language model."""
    frozen = [flag for flag in FREEZES.values() if getattr(provider, flag.replace("-", "_"), False)]
    sides = getattr(dataset, "image_size", None)
    sides = [sides] * 2 if isinstance(sides, int) else sides
    images = [getattr(dataset, "num_images", 1), *sides] if sides else None
    facts = {"frozen": frozen, "images": images, "tower": _tower(provider)}
    return {name: value for name, value in facts.items() if value}


def _tower(provider: object) -> dict[str, Any] | None:
    """Return the sizes of the vision tower of Megatron-Bridge's own provider, by field of ``Tower``.

    Sizes that are not given are left out. The result is ``None`` if the provider has no vision configuration.
    """
    vision = getattr(provider, "vision_config", None)
    if vision is None:
        return None
    sizes: dict[str, Any] = {
        field: next((size for name in names if (size := getattr(vision, name, None))), None)
        for field, names in _SIZES.items()
    }
    side, merge = getattr(vision, "patch_size", None), getattr(vision, "spatial_merge_size", None)
    if side and merge:
        sizes |= {"patch": side, "frames": getattr(vision, "temporal_patch_size", None), "merge": merge**2}
    sizes["deepstack"] = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    sizes["gated"] = getattr(vision, "hidden_act", "") == "silu"
    sizes["shared"] = not getattr(provider, "use_hf_vision_model", True)
    return {name: value for name, value in sizes.items() if value}


def _changed(section: object) -> dict[str, Any]:
    """Return the fields of a dataclass that are neither ``None`` nor the default of ``_defaults``, as JSON values.

    A function or class is replaced by its name, and other objects are left out. The result is empty if ``section`` is
    no dataclass.
    """
    if not dataclasses.is_dataclass(section):
        return {}
    values, defaults = {}, _defaults(section)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name, None)
        default = defaults.get(field.name, dataclasses.MISSING)
        if value is None or value is default or value == default:
            continue
        if type(value).__name__ == "dtype":
            value = str(value)
        if not isinstance(value, bool | int | float | str | list | tuple):
            value = getattr(value, "__name__", None)
        if value is not None:
            values[field.name] = value
    return values


def _defaults(section: Any) -> dict[str, Any]:
    """Return the defaults of the fields of a dataclass: Megatron's, if the dataclass extends one of its classes.

    The defaults of a provider's own class are sizes too: those of a hybrid model have no biases and no positions. Only for
    a provider of ``_provider``, whose sizes are elsewhere, its own defaults are returned.
    """
    megatrons = [kind for kind in type(section).__mro__ if kind.__module__.startswith(_MEGATRON)]
    kind = type(section) if hasattr(section, "known_model") or not megatrons else megatrons[0]
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }


def _with_known_models(bridge: Any) -> None:
    """Make Megatron-Bridge read the sizes of models in ``config.loading`` from there, not from Hugging Face.

    ``bridge`` is its class ``AutoBridge``, whose ``from_hf_pretrained`` is replaced for the rest of the process. With
    ``HF_HUB_OFFLINE``, a model that is not there, not a folder and not in Hugging Face's cache gets sizes of 1.
    """
    ask_hugging_face = bridge.from_hf_pretrained

    def from_hf_pretrained(path: object, *arguments: Any, **options: Any) -> Any:
        name = str(path)
        model = known_model(name)
        if model is not None and not Path(name).exists():
            return SimpleNamespace(to_megatron_provider=lambda **_: _provider(model, known_name=name))
        if os.environ.get("HF_HUB_OFFLINE") and not Path(name).exists() and not _is_cached(name):
            sizes = Model(layers=1, hidden=1, heads=1, vocabulary=1, sequence=1)
            return SimpleNamespace(to_megatron_provider=lambda **_: _provider(sizes, unknown_name=name))
        return ask_hugging_face(path, *arguments, **options)

    bridge.from_hf_pretrained = from_hf_pretrained


def _is_cached(path: str) -> bool:
    return isinstance(import_module("huggingface_hub").try_to_load_from_cache(path, "config.json"), str)


_PROVIDERS = {
    "gpt": ("gpt_provider", "GPTModelProvider"),
    "mla": ("mla_provider", "MLAModelProvider"),
    "hybrid": ("hybrid.hybrid_provider", "HybridModelProvider"),
}
"""Modules and classes of Megatron-Bridge's model providers."""


def _provider(model: Model, known_name: str | None = None, unknown_name: str | None = None) -> Any:
    """Return Megatron-Bridge's model provider with these sizes, marked with the name of the known or unknown model."""
    sizes: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
    }
    kind = "gpt" if model.kv_lora_rank is None else "mla"
    if model.pattern is not None:
        kind, sizes[PATTERN_ARGUMENT] = "hybrid", pattern_of(model)
    module, name = _PROVIDERS[kind]
    provider = getattr(import_module(f"megatron.bridge.models.{module}"), name)(**sizes)
    provider.known_model, provider.unknown_model = known_name, unknown_name
    provider.to_text_provider = lambda: provider
    return provider


def main(words: list[str]) -> None:
    """Print the configuration of each recipe among the words as a line of JSON. The other words change its settings.

    The line of a recipe that fails has its ``error``. The line of a recipe that does not exist has the ``names`` of
    all. A name with a colon is a user's own function, ``package.module:function``.
    """
    changes = [word for word in words if "=" in word or word.endswith((".yaml", ".yml"))]
    names = [word for word in words if word not in changes]
    functions = recipes()
    _with_known_models(import_module("megatron.bridge").AutoBridge)
    for name in names:
        try:
            recipe = _own(name) if ":" in name else functions.get(name)
            facts = {"names": sorted(functions)} if recipe is None else evaluated(recipe, changes)
        except (Exception, SystemExit) as error:  # a recipe is foreign code
            facts = {"name": name, "error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(MARK + json.dumps(facts | {"asked": name}, default=str) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
