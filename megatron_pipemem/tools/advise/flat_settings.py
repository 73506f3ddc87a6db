"""Read YAML files that hold Megatron's flags in snake case, in any groups: Primus, FlagScale, Megatron's ``--yaml-cfg``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.tools.advise.consumers import flags_of_model
from megatron_pipemem.tools.advise.reading import decisive
from megatron_pipemem.tools.config.arguments import FlagTable, flags_of_attributes
from megatron_pipemem.tools.config.loading import known_model, merged, read_raw, read_yaml

_SIZES: tuple[str, ...] = (
    *("num_layers", "hidden_size", "seq_length", "micro_batch_size", "global_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
)
_FEWEST = 2
"""Sizes under Megatron's names that a file must have to count as one with Megatron's flags."""
_DEFAULT = re.compile(r"\$\{\w+:([^}]*)\}")
_NODES = ("nnodes", "num_nodes", "n_nodes")
_PER_NODE = ("nproc_per_node", "gpus_per_node", "n_gpus_per_node")
_FOLDERS = (".", "models", "../models", "../../models/megatron", "primus/configs/models/megatron")
"""Folders in which a file of a model is looked for, from the folder of the settings and from those above it."""


def has_flags_of_megatron(raw: Mapping[str, Any]) -> bool:
    """Return whether a file's mapping holds sizes under the names of Megatron's flags, in any group."""
    return len({key for key, _ in _leaves(raw)} & {*_SIZES}) >= _FEWEST


def inherited(path: Path, trail: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the mapping of a file over those that it names: ``defaults`` of Hydra, ``bases``, and files of models.

    Raise a ConfigError if a file leads to itself.
    """
    if path in trail:
        raise ConfigError("based-on-itself", "is based on itself", key="defaults", file=path)
    raw = read_raw(path)
    settings: dict[str, Any] = {}
    parents = [*_listed(raw.pop("defaults", [])), *_listed(raw.pop("bases", []))]
    for parent in parents:
        if isinstance(parent, str) and parent != "_self_":
            settings = merged(settings, inherited(path.parent / parent, (*trail, path)))
        elif isinstance(parent, Mapping):  # a group of Hydra: its file's mapping is below the group's name
            for group, name in parent.items():
                file = path.parent / str(group) / f"{name}.yaml"
                if file.is_file():
                    settings = merged(settings, {str(group): inherited(file, (*trail, path))})
    return merged(settings, raw)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def flags_in(
    path: Path, overrides: Iterable[str], flag_table: FlagTable
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Return the flags that a file gives, the launcher's numbers, and sentences about what is not read.

    Args:
        path: the file.
        overrides: changes like ``key=value``; of a dotted key, the last part counts.
        flag_table: the properties of Megatron's flags.

    Raises:
        ConfigError: a name has two values (``bad-choice``), or the model's file is not there (``no-file``).
    """
    raw = inherited(path)
    values = _model_values(raw, path)
    own: dict[str, Any] = {}
    for key, value in _leaves(raw):
        if key in _SIZES and own.get(key, value) != value:
            two = f"is {shortened(own[key])} in one group and {shortened(value)} in another; give {key}=VALUE"
            if not any(text.partition("=")[0].endswith(key) for text in overrides):
                raise ConfigError("bad-choice", two, key=key, file=path)
        own[key] = value
    for text in overrides:
        key, _, value = text.partition("=")
        own[key.lstrip("+").rpartition(".")[2]] = read_yaml(value)
    values |= {key: value for key, value in own.items() if value is not None}
    flags = dict(flags_of_attributes(values, flag_table))
    flags = {name: value for name, value in flags.items() if value is not False}
    numbers = {"nnodes": _NODES, "nproc-per-node": _PER_NODE}
    launcher = {option: str(values[name]) for option, names in numbers.items() for name in names if name in values}
    return flags, launcher, decisive((name for name, value in values.items() if value not in (False, None)), "{}")


def _leaves(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif isinstance(value, str) and _DEFAULT.search(value):
            yield str(key), read_yaml(_DEFAULT.sub(r"\1", value))
        else:
            yield str(key), value


def _model_values(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the flags of the model's own file, or those of a known model with its name, as attributes.

    Raise a ConfigError if the settings name a file that is not there, and no model with its name is known.
    """
    name = next((value for key, value in _leaves(raw) if key == "model" and str(value).endswith(".yaml")), None)
    if name is None:
        return {}
    for folder in (path.absolute().parent, *path.absolute().parents[1:6]):
        for place in _FOLDERS:
            file = folder / place / str(name)
            if file.is_file() and file != path.absolute():
                return {key: value for key, value in _leaves(inherited(file)) if value is not None}
    stem = Path(str(name)).stem
    for text in (stem, stem.replace("_", "-"), re.sub(r"^([a-z]+)([\d.]+)[_-]", r"\1-\2-", stem).replace("_", "-")):
        if known_model(text) is not None:
            flags = flags_of_model(text, "model")
            return {flag.replace("-", "_"): value for flag, value in flags.items()}
    raise ConfigError(
        "no-file", f"the model's file {name} is not there; give the settings in their own folder", file=path
    )
