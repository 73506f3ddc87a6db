"""Read YAML files into frozen dataclasses, and check every value against its annotation.

A file may refer to other files. Where a dataclass is wanted, text is the name of a file (``model: llama3-8b``). A
mapping with the key ``base`` is such a file with changes (``model: {base: llama3-8b, layers: 16}``). A file may have a
``base`` too.

A name is looked up in the ``config_folder`` of the dataclass: first next to the file that has the name, then next to
the folder of that file, then in the package. So ``configs/runs/mine.yaml`` finds ``configs/models/mine.yaml``. The base
of a file, and the run of a grid, may also be in the same folder as the file. Text that ends in ``.yaml`` is a path,
relative to the file that has it.

PyYAML reads the text, with these changes: ``1e-4`` is a number, dates are text, and a mapping may not have a key twice.
Tags, deep nesting, and anchors within themselves are refused.

The shapes of public models, by their names on Hugging Face, ship with the package too, so no network is needed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import Parameter, signature
from pathlib import Path, PurePosixPath
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from megatron_pipemem.errors import ConfigError, readable
from megatron_pipemem.files import read_text
from megatron_pipemem.model.arguments import ATTRIBUTES, NAMES
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.tools.config.arguments import check_settings, model_from, model_settings
from megatron_pipemem.tools.config.keys import KEYS, keys_of, parts_of, place_of, synonyms, why_unknown
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.values import converted, refuse_if

MOST_LEVELS = 50
_MOST_BYTES = 1 << 23

_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_NUMBER = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)


class YamlError(ValueError):
    """The error for text that is not YAML, or that configurations cannot use, with line and column if known."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT, _TIMESTAMP)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []  # anchors of the nodes that contain the current one

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Compose a node. Raise an error for a tag, for deep nesting, and for an anchor within itself."""
        event = self.peek_event()
        anchor = getattr(event, "anchor", None)
        if getattr(event, "tag", None) is not None:
            raise _refused(f"the tag {event.tag} is unknown; leave it out", event)
        if len(self._open) == MOST_LEVELS:
            raise _refused(f"nested more than {MOST_LEVELS} deep", event)
        if isinstance(event, yaml.AliasEvent) and anchor in self._open:
            raise _refused(f"*{anchor} stands within its own anchor; take it out", event)
        self._open.append(anchor)
        node: yaml.Node = super().compose_node(parent, index)
        self._open.pop()
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise _refused("a key is not text; write it in quotes", key)
            if key.value in seen:
                raise _refused(f"duplicate key {shortened(key.value)}; leave one out", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refused(problem: str, at: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, at.start_mark)


class _Dumper(yaml.SafeDumper):
    """Writes YAML. Text that YAML would read as a number is put in quotes."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT, _NUMBER, list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Return the value of YAML text, or ``None`` for empty text. Raise a YamlError if it cannot be read."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error
    except ValueError as error:  # of Python's own numbers
        raise YamlError(str(error)) from error


def write_yaml(value: Any, flow: bool = False) -> str:
    """Return YAML text that ``read_yaml`` reads as this value. ``flow`` puts each innermost list or mapping on one
    line.
    """
    style = {"default_flow_style": None, "width": 10_000} if flow else {}
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style)


BASE = "base"
SHIPPED = Path(__file__).parent
"""The folder of the files that ship with the package."""


def load[T](source: str | Path, kind: type[T], overrides: Sequence[str] = ()) -> T:
    """Read a configuration from a file, given by path or name, with changes like ``model.num_layers=16``.

    They are applied before the files that this file refers to are read.
    """
    with readable(f"the {kind.__name__.lower()} {source}"):
        path = locate(str(source), kind)
        raw = read_raw(path)
        for text in overrides:
            override(raw, *parse_override(text))
        return typed(raw, kind, path)


def read_raw(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file without checking its keys. Files that it refers to are not read.

    An empty file gives an empty mapping. Raise a ConfigError if the file cannot be read or has no mapping.
    """
    try:
        loaded = read_yaml(read_text(path, "YAML", most_bytes=_MOST_BYTES))
    except YamlError as error:
        raise ConfigError("not-yaml", f"is not YAML: {error}", file=path) from error
    if loaded is None:  # an empty file
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            "wrong-file", "is not a mapping of keys to values; write lines of the form KEY: VALUE", file=path
        )
    return loaded


def typed[T](raw: Mapping[str, Any], kind: type[T], file: Path | None = None, prefix: str = "") -> T:
    """Return a mapping as a dataclass of type ``kind``.

    ``file`` is the file that has the mapping. Names of files are looked up from there. Errors name ``file`` and the
    key, with ``prefix`` before it, such as ``model.``.
    """
    return _build(kind, _resolve(raw, kind, file, prefix, ()), file, prefix)


def settings_of(config: Any) -> dict[str, Any]:
    """Return a dataclass as a mapping that ``typed`` would read. Default values are left out."""
    changed = model_settings(config) if isinstance(config, Model) else {}
    for field in fields(config):
        if isinstance(config, Model) and field.name not in _MODEL_FIELDS:
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value = getattr(config, field.name)
        if value != default:
            changed[field.name] = settings_of(value) if is_dataclass(value) else value
    return keys_of(changed) if isinstance(config, Run) else changed


def override(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key such as ``model.layers`` in a mapping, in place.

    If a part of the key has the name of a file (``model: llama3-8b``), it becomes a mapping with that name as ``base``.
    Other keys of a run with the same meaning are removed.
    """
    *parents, last = key.split(".")
    here = raw
    for other in () if parents else synonyms(raw, key, value):
        del raw[other]
    for part in parents:
        inner = here.get(part)
        if isinstance(inner, str):
            inner = {BASE: inner}
        here[part] = here = dict(inner) if isinstance(inner, Mapping) else {}
    here[last] = value


def check_key(kind: type, key: str, user: str = "", file: Path | None = None, any_flag: bool = False) -> None:
    """Raise a ConfigError if a dataclass has no such dotted key. In a field of type ``dict``, any key is allowed.

    The flags of a run are those of Megatron and of this package, unless ``any_flag``: the run's own script may have others.
    The error names ``file``, and the key with ``user`` before it.
    """
    here: Any = kind
    for part in place_of(key) if kind is Run else key.split("."):
        if get_origin(here) is dict:
            if kind is Run and not any_flag and (why := why_unknown(part)) is not None:
                raise ConfigError("unknown-key", why, key=f"{user}{key}", file=file)
            return
        hints = _hints(here) if isinstance(here, type) and is_dataclass(here) else {}
        if part != BASE and part not in hints:
            message = f"unknown key; {_remedy(part, here, hints)}"
            raise ConfigError("unknown-key", message, key=f"{user}{key}", file=file)
        hint = str if part == BASE else hints[part]
        here = _dataclass_in(hint) or hint


def nearest(word: str, words: Iterable[str]) -> str:
    """Return a hint about an unknown word: ``did you mean 'layers'?``, or a list of all known words."""
    choices = sorted(words)
    alike = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {alike[0]!r}?" if alike else f"known are {', '.join(choices) or 'none'}"


def _remedy(key: str, kind: type, keys: Iterable[str]) -> str:
    """Return what to write instead of a key that a dataclass does not have."""
    if kind is Model and key in _OLD_KEYS:
        return f"write {_OLD_KEYS[key]}, as Megatron's argument is called"
    return nearest(key, keys)


def parse_override(text: str) -> tuple[str, Any]:
    """Return the key and the value of text such as ``model.num_layers=16``, whose value is YAML."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError("bad-syntax", f"override {shortened(text)}: write KEY=VALUE, as in model.num_layers=16")
    try:
        return key, read_yaml(value)
    except YamlError as error:
        raise ConfigError("not-yaml", f"override {shortened(text)}: the value is not YAML: {error}") from error


def locate(name: str, kind: type, user: Path | None = None, key: str | None = None, siblings: bool = False) -> Path:
    """Return the file for a name or path that the file ``user`` has at ``key``, or that a command line has.

    On a command line, ``user`` is ``None``. With ``siblings``, the folder of ``user`` is searched first.
    Raise a ConfigError if there is no such file.
    """
    path, folder = (user.parent if user else Path()) / name, getattr(kind, "config_folder", None)
    if name.endswith((".yaml", ".yml")):
        if path.is_file():
            return path
        brought = folder and not path.exists() and (SHIPPED / folder / path.name).is_file()
        also = f", or the name {path.stem!r} for the package's own file" if brought else ""
        raise ConfigError("no-file", f"{_absence(path)}{also}", key=key, file=user)
    if folder is None:
        message = f"{shortened(name)} is not a file; give a path that ends in .yaml, or a mapping"
        raise ConfigError("no-file", message, key=key, file=user)
    beside = [user.parent, user.parent.parent] if user else [Path("configs"), Path()]
    places = [place / folder for place in (*beside, SHIPPED)]
    if user and siblings:
        places.insert(0, user.parent)
    for place in places:
        if (place / f"{name}.yaml").is_file() and place / f"{name}.yaml" != user:
            return place / f"{name}.yaml"
    if path.exists() or path.suffix or len(Path(name).parts) > 1:
        raise ConfigError("no-file", _absence(path), key=key, file=user)
    names = {path.stem for place in places for path in place.glob("*.yaml")}
    looked = ", ".join(dict.fromkeys(str(place) for place in places))
    hint = nearest(name, names)
    others = sorted(other.name for other in SHIPPED.iterdir() if (other / f"{name}.yaml").is_file())
    subject = f"there is no {shortened(name)} among the {folder}"
    subject += f", only among the {' and '.join(others)}" if others else ""
    message = f"{subject}; {hint} (looked in {looked}; a path ends in .yaml)"
    raise ConfigError("no-file", message, key=key, file=user)


def _absence(path: Path) -> str:
    """Return text that says why there is no YAML file at this path."""
    if path.is_dir():
        return f"{path} is a folder; give the path of a YAML file"
    if path.exists():
        if path.suffix == ".sh":
            return f"{path} is a script; pipemem advise {path} --write RUN.yaml makes a YAML file of it"
        return f"{path} has another ending than .yaml; give a YAML file, or rename it"
    return f"there is no file {path}; give the path of a YAML file"


def _resolve(raw: Any, kind: type, file: Path | None, prefix: str, trail: tuple[Path, ...]) -> dict[str, Any]:
    """Return ``raw`` with names of files replaced by the mappings in them. Raise a ConfigError for keys unknown to
    ``kind``.

    ``prefix`` is the dotted key of ``raw`` in ``file``, such as ``model.``. ``trail`` has the files that led to this
    one, to find a file that is based on itself.
    """
    hints = _hints(kind)
    own = {BASE: raw} if isinstance(raw, str) else raw
    if not isinstance(own, Mapping):
        message = f"is {shortened(raw)}; give a name, or a mapping of {', '.join(hints)}"
        raise ConfigError("bad-type", message, key=prefix[:-1], file=file)
    if kind is Run:
        with _in_file(file):
            own = parts_of(own)
    base, changes = {}, dict(own)
    if BASE in own:
        place = prefix[:-1] if isinstance(raw, str) else prefix + BASE
        base = _resolve_base(changes.pop(BASE), kind, file, place, trail)
    for key, value in changes.items():
        if key not in hints:
            message = f"unknown key; {_remedy(key, kind, [*hints, BASE])}"
            raise ConfigError("unknown-key", message, key=f"{prefix}{key}", file=file)
        inner = _dataclass_in(hints[key])
        if inner is not None and value is not None:
            changes[key] = _resolve(value, inner, file, f"{prefix}{key}.", trail)
            if isinstance(value, str) or BASE in value:  # it replaces the value of the base
                base.pop(key, None)
    return merged(base, changes)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``. Mappings inside them are merged too, unless they have NeMo-RL's ``_override_``."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping) and not value.get("_override_")
        result[key] = merged(result[key], value) if both else value
    return result


def _resolve_base(base: Any, kind: type, file: Path | None, key: str, trail: tuple[Path, ...]) -> dict[str, Any]:
    if not isinstance(base, str):
        raise ConfigError("bad-type", f"is {shortened(base)}; give the name of a file", key=key, file=file)
    path = locate(base, kind, file, key, siblings=key == BASE)
    if path.resolve() in trail:
        raise ConfigError(
            "based-on-itself",
            f"{shortened(base)} is based on itself, perhaps through other files; take one base out",
            key=key,
            file=file,
        )
    resolved = _resolve(read_raw(path), kind, path, "", (*trail, path.resolve()))
    _build(kind, resolved, path, "", is_whole=False)  # so that an error names this file, and the key as it is here
    return resolved


def _build(kind: type, raw: Mapping[str, Any], file: Path | None, prefix: str, is_whole: bool = True) -> Any:
    """Return a mapping without names of files as a dataclass.

    ``prefix`` is the dotted key of ``raw`` in ``file``, such as ``model.``. If not ``is_whole``, keys may be missing:
    only check the values, and return ``None``. Raise a ConfigError for a missing or wrong value.
    """
    arguments = {}
    parameters = _parameters(kind)
    if kind is Model:
        parameters = {name: parameters[name] for name in _MODEL_FIELDS}
    for name, parameter in parameters.items():
        inner, key = _dataclass_in(parameter.annotation), _key(prefix, name)
        if name not in raw:
            if is_whole and parameter.default is Parameter.empty:
                raise ConfigError("missing-option", "is missing and has no default; add it", key=key, file=file)
        elif inner is not None and isinstance(raw[name], Mapping):
            arguments[name] = _build(inner, raw[name], file, f"{prefix}{name}.", is_whole)
        elif (part_kind := _dataclass_of_values(parameter.annotation)) is not None and isinstance(raw[name], Mapping):
            arguments[name] = {at: typed(value, part_kind, file, f"{key}.{at}.") for at, value in raw[name].items()}
        else:
            try:
                arguments[name] = converted(raw[name], parameter.annotation)
            except ValueError as error:
                raise ConfigError("bad-type", str(error), key=key, file=file) from error
    try:
        if kind is Model:
            settings = {name: value for name, value in raw.items() if name not in _MODEL_FIELDS}
            if not is_whole:
                return check_settings(settings)
            return model_from(settings, **arguments)
        if kind is Run and raw.get("script") is None:
            for name in raw.get("flags", ()):
                why = why_unknown(name)
                refuse_if(why, "unknown-key", name.replace("-", "_"), str(why))
        return kind(**arguments) if is_whole else None
    except ConfigError as error:
        raise ConfigError(
            error.code, error.message, key=_key(prefix, error.key) if error.key else prefix[:-1], file=file
        ) from error


def _key(prefix: str, name: str) -> str:
    """Return a key as it is in a file. Those of a run are not in the places of their values."""
    return KEYS.get((prefix[:-1], name), f"{prefix}{name}")


@contextmanager
def _in_file(file: Path | None) -> Iterator[None]:
    """Add the file to a ConfigError that the block raises."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.code, error.message, key=error.key, file=file) from error


@cache
def _parameters(kind: type) -> dict[str, Parameter]:
    """Return the parameters of a dataclass. Their annotations are types and not text."""
    hints = get_type_hints(kind)
    return {name: parameter.replace(annotation=hints[name]) for name, parameter in signature(kind).parameters.items()}


def _hints(kind: type) -> dict[str, Any]:
    """Return the keys of a dataclass in a file, with their types. Those of a model are Megatron's arguments."""
    hints = {name: parameter.annotation for name, parameter in _parameters(kind).items()}
    if kind is Model:
        return dict.fromkeys(NAMES, Any) | {name: hints[name] for name in _MODEL_FIELDS}
    return hints


_MODEL_FIELDS = ("tower", "source")
"""The fields of a model that are keys of its file too, because Megatron has no argument for them."""
_OLD_KEYS = ATTRIBUTES | {
    "moe_every": "moe_layer_freq",
    "dense_layers": "moe_layer_freq",
    "attention_every": "linear_attention_freq",
}
"""Megatron's arguments by earlier keys of a model's file."""


def _dataclass_of_values(hint: Any) -> type | None:
    """Return the dataclass ``Part`` of a type hint ``dict[str, Part]`` or ``dict[str, Part] | None``, else ``None``."""
    mappings = (get_args(member) for member in (hint, *get_args(hint)) if get_origin(member) is dict)
    return next((value for _, value in mappings if isinstance(value, type) and is_dataclass(value)), None)


def _dataclass_in(hint: Any) -> type | None:
    """Return the dataclass ``Model`` of a type hint ``Model`` or ``Model | None``, else ``None``."""
    if get_origin(hint) in (dict, list, tuple):
        return None
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)


_HUGGING_FACE = SHIPPED / "hugging_face.yaml"
_SAME_SHAPE = re.compile(r"-(instruct|base|chat|it|thinking|hf|bf16|fp8|rl|sft|\d{4})(?=-|$)")
"""Parts of names that change weights and no shape."""


def known_model(name: str) -> Model | None:
    """Return the shape of a model, or ``None`` if it is unknown.

    ``name`` is its name on Hugging Face, or the path of a folder whose name is that name.
    """
    shapes: dict[str, str | dict[str, Any]] = _public_models()["shapes"]
    shape: str | dict[str, Any] = _name_of_shape(name)
    while isinstance(shape, str) and shapes.get(shape, shape) != shape:
        shape = shapes[shape]
    if isinstance(shape, dict):
        return typed(shape, Model, _HUGGING_FACE)
    return load(shape, Model) if (SHIPPED / Model.config_folder / f"{shape}.yaml").is_file() else None


def unpriced_part(name: str) -> str | None:
    """Return the part of this model that has no price, for example ``a vision tower``, or ``None``."""
    key = _name_of_shape(name)
    return next((part for part, names in _public_models()["unpriced"].items() if key.startswith(tuple(names))), None)


_OTHER_SHAPE = re.compile(
    r"\d(\.\d+)?[bm]\b|(^|[-_.])(vl|omni|moe|eagle|draft|embed|rerank|distill|audio|prun|lite|tiny|mini|\d*layer|vision)"
)
"""Words after a model's name with which it is the name of another shape."""


def model_within(text: str) -> str | None:
    """Return the public model whose name stands in a text, such as a script's name; ``None`` if it has none.

    Separators do not matter: ``run_qwen3_30b_a3b.sh`` has ``qwen3-30b-a3b``. The longest name counts. Names without a size
    in billions do not, unless they are the beginning of the text.
    """
    text = text.lower()
    best: tuple[int, str] | None = None
    for name in _public_models()["shapes"]:
        parts = map(re.escape, re.findall(r"[a-z]+|[\d.]+", name))
        match = re.search(rf"(?<![a-z0-9]){'[-_.]*'.join(parts)}(?![a-z0-9])", text)
        if match is None or (match.start() > 0 and not re.search(r"\db", name)):
            continue
        if _OTHER_SHAPE.search(text, match.end()):
            continue
        if best is None or match.end() - match.start() > best[0]:
            best = (match.end() - match.start(), name)
    return best and best[1]


def _name_of_shape(name: str) -> str:
    last = PurePosixPath(name.rstrip("/")).name.lower().removeprefix("meta-")
    return _SAME_SHAPE.sub("", last)


@cache
def _public_models() -> dict[str, Any]:
    return read_raw(_HUGGING_FACE)
