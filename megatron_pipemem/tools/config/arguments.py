"""Megatron's arguments as its parser sets them, from the flags of a command or from the settings of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model import layout
from megatron_pipemem.model.arguments import FREQUENCIES, NAMES, arguments_of, model_of
from megatron_pipemem.model.expressions import listed
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.options import WHOLE, Limit
from megatron_pipemem.values import refuse_if

UNKNOWN = "\0"
"""Mark before and after the name of a variable without a known value, or a command without a known output."""
VIRTUAL = "virtual_pipeline_model_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"
ENDS = {
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
"""Flag -> field of the layers in the first and the last stage."""
_RENAMED = {
    "num_moe_experts": "num-experts",
    VIRTUAL: "num-virtual-stages-per-pipeline-rank",
    **{field: flag for flag, field in ENDS.items()},
    "gated_linear_unit": "swiglu",
    "fp8": "fp8-format",
}
"""Flag by field of Megatron's configuration, if the names differ."""
_INVERTED = {
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "grad_reduce_in_fp32": "grad-reduce-in-bf16",
}
"""Fields that are true by default, and the flag that sets each to false."""
_BOTH_WAYS = {"grad_reduce_in_fp32": "accumulate-allreduce-grads-in-fp32"}
"""Fields with a flag that sets each to true too: with fp16, gradients are summed in 16 bits without it."""
_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "fp8"}
"""Megatron's names of types in flags, by PyTorch's."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_LIMITS = {"int": WHOLE, "float": Limit()}
"""Limits by the names of Megatron's types of numbers."""
_FREQUENCY_TYPES = ("moe_freq_type", "la_freq_type")
"""The names of Megatron's readers for a number or a list with one entry per layer."""

FlagTable = Mapping[str, Mapping[str, Any]]
"""The properties of Megatron's flags, as ``known_flags`` describes them, by the flag with its ``--``."""


FROZEN = Path(__file__).with_name("megatron_flags.json")
"""The properties of the flags of the Megatron that this package is tested with, for machines without Megatron.
``scripts/freeze_flags.py`` writes the file."""
PLAIN = {"choices": None, "type": None, "bare": False, "const": None, "nargs": None, "default": None}
"""The properties that the file leaves out, beside the attribute of a flag with the same name."""


@cache
def frozen_flags() -> dict[str, dict[str, Any]]:
    """Return the properties of Megatron's flags from the file of this package."""
    flags: dict[str, dict[str, Any]] = json.loads(FROZEN.read_text(encoding="utf-8"))
    return {flag: {"dest": attribute_of(flag), **PLAIN, **others} for flag, others in flags.items()}


def attribute_of(flag: str) -> str:
    """Return the attribute that a flag with its ``--`` sets, if nothing else is declared."""
    return flag.lstrip("-").replace("-", "_")


class Arguments:
    """The attributes that Megatron's parser sets for the flags of a command, and its defaults for all others.

    A value is converted and checked when it is read. An attribute that no flag sets does not exist.

    Args:
        flags: values by flag without dashes, as text or as values of YAML; ``True`` for a flag without a value.
        flag_table: the properties of Megatron's flags.
    """

    def __init__(self, flags: Mapping[str, Any], flag_table: FlagTable) -> None:
        self._flags, self._flag_table = flags, flag_table
        self._read: set[str] = set()
        self._setters = setters(flag_table)

    def __getattr__(self, attribute: str) -> Any:
        flags = self.__dict__.get("_setters", {}).get(attribute)
        if flags is None:
            raise AttributeError(attribute)
        value = self._flag_table[flags[0]]["default"]
        for flag in flags:
            name = flag.lstrip("-")
            self._read.add(name)
            text = self._flags.get(name)
            if text is not None and text is not False:
                value = flag_value(flag, text, self._flag_table[flag])
        return value

    def mark(self, *names: str) -> None:
        """Count flags, by name without dashes, as read."""
        self._read |= {*names}

    def unread(self) -> dict[str, Any]:
        """Return the flags that have not been read, except those with unknown values."""
        others = {name: value for name, value in self._flags.items() if name not in self._read}
        return {name: value for name, value in others.items() if UNKNOWN not in str(value)}


def setters(flag_table: FlagTable) -> dict[str, list[str]]:
    """Return the flags, with their ``--``, that set each attribute."""
    flags: dict[str, list[str]] = {}
    for flag, properties in flag_table.items():
        flags.setdefault(properties["dest"], []).append(flag)
    return flags


def flag_value(flag: str, value: Any, properties: Mapping[str, Any]) -> Any:
    """Return the value of a flag as Megatron's parser reads it.

    Raise a ConfigError if it depends on an unknown variable, is not among the flag's choices, or has the wrong type.
    """
    if UNKNOWN in str(value):
        ask_for(str(value), flag)
    if properties["bare"]:
        return properties["const"]
    choices, kind = properties["choices"], properties["type"]
    if choices and not isinstance(value, list) and str(value) not in choices:
        raise ConfigError("bad-choice", f"is {shortened(value)}; give {' or '.join(choices)}", key=flag)
    if (limit := _LIMITS.get(kind)) is not None:
        if (problem := limit.problem(value)) is not None:
            raise ConfigError("bad-number", problem, key=flag)
        return limit.read(flag, value)
    if kind in _FREQUENCY_TYPES:
        text = str(value)
        return int(text) if text.isdecimal() else listed(text, flag)
    return value


class MissingValue(ConfigError):
    """A size has no value (``unknown-size``).

    Args:
        message: what is missing, and the remedy.
        key: the flag or setting of the size.
        remedy: the words with which a user gives the value.
    """

    def __init__(self, message: str, key: str, remedy: str) -> None:
        super().__init__("unknown-size", message, key=key)
        self.remedy = remedy

    def supplied(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command with some value in place of the missing one, so that they can be read on."""
        raise NotImplementedError


class UnknownValue(MissingValue):
    """A size depends on a variable of the script that has no value, or on an argument, by its number."""

    def __init__(self, variable: str, key: str) -> None:
        remedy = f"argument {variable}" if variable.isdecimal() else f"--env {variable}=VALUE"
        message = f"needs a value that the script does not give; give {remedy}, or write the value into the script"
        super().__init__(message, key, remedy)
        self.variable = variable

    def supplied(self, words: Sequence[str]) -> list[str]:
        return [word.replace(f"{UNKNOWN}{self.variable}{UNKNOWN}", "1") for word in words]


class MissingSetting(MissingValue):
    """A flag or setting that a size follows from is missing, or names a model of unknown sizes.

    ``word`` is a setting with some value, to read on with. ``metavar`` stands for the value in the remedy.
    """

    def __init__(self, message: str, key: str, word: str, metavar: str = "NUMBER") -> None:
        super().__init__(message, key, f"{word.partition('=')[0]}={metavar}")
        self._word = word

    def supplied(self, words: Sequence[str]) -> list[str]:
        return [*words, self._word]


def ask_for(text: str, key: str) -> NoReturn:
    """Raise an UnknownValue about ``key``, whose value ``text`` depends on an unknown variable."""
    raise UnknownValue(text.split(UNKNOWN)[1], key)


def flags_of_attributes(values: Mapping[str, Any], flag_table: FlagTable) -> Iterator[tuple[str, Any]]:
    """Yield ``(flag, value)`` for the attributes or fields of a configuration that have a flag. Others are left out."""
    fields: dict[tuple[str, str | None], str] = {}
    for name, flag in flag_table.items():
        fields.setdefault((flag["dest"], str(flag["const"]) if flag["bare"] else None), name.lstrip("-"))
    for field, value in values.items():
        if value is None:
            continue
        if field.endswith("_dtype"):
            value = _TYPES.get(str(value).removeprefix("torch."), value)
        if field in _INVERTED:
            yield _INVERTED[field], not value
            if field in _BOTH_WAYS:
                yield _BOTH_WAYS[field], bool(value)
        elif field in _RENAMED:
            yield _RENAMED[field], value
        elif field == LAYOUT:
            yield layout.FLAG, _layout(value)
        elif field in FREQUENCIES:
            yield fields[field, None], _frequency_text(value)
        elif (field, str(value)) in fields:
            yield fields[field, str(value)], True
        elif (field, None) in fields and not isinstance(value, bool):
            yield fields[field, None], value
    if values.get("num_query_groups") is not None:
        yield "group-query-attention", True
    if values.get("activation_func") == "squared_relu":
        yield "squared-relu", True


def _frequency_text(value: Any) -> Any:
    """Return a list with an entry per layer as Megatron's parser reads it, such as ``([0]*1+[1]*3)``."""
    if not isinstance(value, list | tuple):
        return value
    return f"({'+'.join(f'[{entry}]*{len(list(equal))}' for entry, equal in groupby(value))})"


def model_settings(model: Model) -> dict[str, Any]:
    """Return the keys and values of a model's file, without Megatron's defaults."""
    defaults = {flag["dest"]: flag["default"] for flag in frozen_flags().values()}
    arguments = {name: value for name, value in arguments_of(model).items() if name in NAMES}
    del arguments["group_query_attention"]  # follows from num_query_groups
    has_default_width = model.ffn is None and model.activation != "swiglu"
    arguments |= {"num_query_groups": model.kv_heads, "moe_ffn_hidden_size": model.expert_ffn}
    arguments |= {"ffn_hidden_size": None} if has_default_width else {}
    arguments |= {name: _frequency_text(arguments.get(name)) for name in FREQUENCIES}
    return {name: value for name, value in arguments.items() if value not in (None, defaults.get(name, False))}


def model_from(settings: Mapping[str, Any], **fields: Any) -> Model:
    """Return the model that a file's ``settings`` describe by Megatron's arguments. ``fields`` are those it lacks.

    Raise a ConfigError about an argument that is missing or wrong, or that a run of the model could not have.
    """
    try:
        args = _arguments(settings)
        gate = settings.get("gated_linear_unit")
        gates = {"gated_linear_unit": gate, "swiglu": settings.get("swiglu")} if gate else {}
        model = model_of(args, **fields, **gates)
        no_size = "is missing, and the model's ends follow from it; add it"
        refuse_if(args.vocab_size is None, "unknown-size", "vocab_size", no_size)
        _check_kept(settings, args, arguments_of(model))
        return model
    except ConfigError as error:
        raise ConfigError(error.code, error.message, key=attribute_of(error.key or "")) from error


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise a ConfigError about an argument of a model whose value has the wrong type, or is no choice of Megatron's."""
    try:
        args = _arguments(settings)
        for name in settings:
            getattr(args, name, None)
    except ConfigError as error:
        raise ConfigError(error.code, error.message, key=attribute_of(error.key or "")) from error


def _arguments(settings: Mapping[str, Any]) -> Arguments:
    switches = {flag["dest"] for flag in frozen_flags().values() if flag["bare"]} | {"gated_linear_unit"}
    for name, value in settings.items():
        form = "true or false" if name in switches else "a value"
        is_wrong = value is not None and isinstance(value, bool) != (name in switches)
        refuse_if(is_wrong, "bad-type", name, f"is {shortened(value)}; give {form}")
    return Arguments(dict(flags_of_attributes(settings, frozen_flags())), frozen_flags())


def _check_kept(settings: Mapping[str, Any], args: Arguments, written: Mapping[str, Any]) -> None:
    """Raise a ConfigError about a setting that the arguments ``written`` for its model do not have.

    Such are sizes of latent attention in a model without it, and two rates of dropout, of which ``Model`` has one.
    """
    for name, value in settings.items():
        own = getattr(args, name, value)
        own = tuple(own) if isinstance(own, list) else own
        other = written.get(name, None if name in written else own and "unused")
        differs = value is not None and other is not None and own != other
        refuse_if(differs, "unsupported-setting", name, f"is {shortened(value)}, and in a run of this model is {other}")


def _layout(value: str | Sequence[str] | Sequence[Sequence[str]]) -> str:
    """Return a layout in the form of Megatron's flag, such as ``Ett|ttL``."""
    if isinstance(value, str):
        return value
    return "|".join("".join(_LETTERS[piece] for piece in stage) for stage in value)
