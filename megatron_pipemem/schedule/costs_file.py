"""Check the JSON of costs files and of microbatch weights, and convert it to arguments of ``Costs`` or to weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NamedTuple

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.files import read_json
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.display import LARGEST, shortened
from megatron_pipemem.schedule.options import FLOPS, TOKENS
from megatron_pipemem.schedule.prices import MicrobatchWeights, PartPrices, number
from megatron_pipemem.schedule.vocabulary import VocabularyCosts

_PRICES = (
    *("forward", "backward_input", "backward_weight", "recompute", "recompute_selective", "copy_sum"),
    *("forward_exchange", "backward_exchange"),
)
_KEYS = (*_PRICES, *"parts layers_per_stage p2p memory channel vocabulary microbatch further profile".split())
_PARTS = ("order", "layers", "end_layers", "first", "middle", "last")
_PASSES = {"forward": "forward", "backward_input": "input", "backward_weight": "weight"}
"""Prices of ``Costs`` that parts give, and their names among the seconds of a part."""
_MICROBATCH = ("time", "memory", "kinds")
_CHANNEL = ("ratio", "offload", "reload", "duplex", "switches")

_Part = tuple[dict[str, float], dict[Kind, float]]
"""Seconds of a part's passes, and changes of held memory by its actions."""


def costs_arguments(data: object) -> dict[str, Any]:
    """Check the keys of a costs file's parsed JSON, and return the arguments of ``Costs``.

    ``vocabulary``, ``microbatch`` and ``channel`` are arguments of ``VocabularyCosts``, ``MicrobatchWeights`` and
    ``Channel`` (or ``Channel.of_ratio``). Those classes check the values. Raise a CostsError for unknown, missing or
    conflicting keys.
    """
    if not isinstance(data, dict) or set(data) - set(_KEYS):
        unknown = f"; leave {shortened(sorted(set(data) - set(_KEYS))[0])} out" if isinstance(data, dict) else ""
        raise CostsError(
            "unknown-key", f"costs must be one JSON object, and its possible keys are {', '.join(_KEYS)}{unknown}"
        )
    costs: dict[str, Any] = {key: data[key] for key in (*_PRICES, "p2p") if key in data}
    if (parts := data.get("parts")) is not None:
        if conflicting := sorted(data.keys() & {*_PASSES, "memory"}):
            raise CostsError(
                "conflicting-options",
                f"costs have the keys parts and {conflicting[0]}, which both give the same prices; leave one of the two out",
            )
        costs |= _of_parts(_object("parts", parts, _PARTS), _cut(data.get("layers_per_stage")))
    elif "layers_per_stage" in data:
        raise CostsError(
            "conflicting-options",
            "layers_per_stage cuts the layers of parts into stages, and the costs have no parts; leave "
            "layers_per_stage out, or give parts",
        )
    if (memory := data.get("memory")) is not None:
        costs["memory"] = {_kind("memory", kind): values for kind, values in _object("memory", memory).items()}
    if (further := data.get("further")) is not None:
        costs["further"] = {_kind("further", kind): seconds for kind, seconds in _object("further", further).items()}
    if isinstance(links := data.get("p2p"), dict):
        costs["p2p"] = {_link(link): seconds for link, seconds in links.items()}
    if (vocabulary := data.get("vocabulary")) is not None:
        costs["vocabulary"] = _object("vocabulary", vocabulary, [field.name for field in fields(VocabularyCosts)])
    if (microbatch := data.get("microbatch")) is not None:
        costs["microbatch"] = _microbatch(_object("microbatch", microbatch, _MICROBATCH))
    if (channel := data.get("channel")) is not None:
        costs["channel"] = _channel(_object("channel", channel, _CHANNEL))
    return costs


def _of_parts(parts: dict[str, Any], cut: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the arguments of ``Costs`` for the key ``parts``: seconds and memory as ``PartPrices`` with a ``cut``."""
    if missing := [key for key in _PARTS if key not in parts and key != "end_layers"]:
        raise CostsError(
            "missing-option", f"parts lacks the key {missing[0]}; `pipemem profile --output` writes all of them"
        )
    kinds, of_kind = parts["order"], {"layers": _object("parts.layers", parts["layers"])}
    if (ends := parts.get("end_layers")) is not None:
        of_kind["end_layers"] = _object("parts.end_layers", ends)
    if not isinstance(kinds, list) or not kinds:
        raise CostsError(
            "bad-type", f'parts.order is {shortened(kinds)}; give a list with one kind per layer, as in ["*-", "*-"]'
        )
    for name, table in of_kind.items():
        for kind in kinds:
            if not isinstance(kind, str) or kind not in table:
                raise CostsError(
                    "unknown-key",
                    f"parts.order has the kind {shortened(kind)}, and parts.{name} has no key of that name; add the "
                    "key, or correct parts.order",
                )
    read = {
        name: {kind: _part(f"parts.{name}.{kind}", table[kind]) for kind in set(kinds)}
        for name, table in of_kind.items()
    }
    first, middle, last = (_part(f"parts.{name}", parts[name]) for name in ("first", "middle", "last"))

    def priced(of: Callable[[_Part], float]) -> PartPrices:
        of_layers = {name: tuple(of(table[kind]) for kind in kinds) for name, table in read.items()}
        return PartPrices(first=of(first), middle=of(middle), last=of(last), cut=cut, **of_layers)

    def seconds(name: str) -> PartPrices:
        return priced(lambda part: part[0][name])

    def changes(kind: Kind) -> PartPrices:
        return priced(lambda part: part[1].get(kind, 0.0))

    every = [first, middle, last, *(part for table in read.values() for part in table.values())]
    actions = dict.fromkeys(kind for _, memory in every for kind in memory)
    passes = {price: seconds(name) for price, name in _PASSES.items()}
    return {**passes, **({"memory": {kind: changes(kind) for kind in actions}} if actions else {})}


def _part(key: str, value: object) -> _Part:
    """Return the seconds of F, I and W of one part, and by how much every kind of action changes the memory.

    Missing seconds are 0, and missing kinds are left out. ``key`` is the part's key in the file, for error messages.
    """
    part = _object(key, value)
    seconds, memory = (_object(f"{key}.{name}", part.get(name, {})) for name in ("seconds", "memory"))
    return (
        {name: number(f"{key}.seconds.{name}", seconds.get(name, 0.0)) for name in _PASSES.values()},
        {_kind(f"{key}.memory", kind): number(f"{key}.memory.{kind}", change) for kind, change in memory.items()},
    )


def _cut(layers: object) -> tuple[int, ...] | None:
    if layers is None:
        return None
    if (
        not isinstance(layers, list)
        or not layers
        or not all(type(count) is int and 0 <= count <= LARGEST for count in layers)
    ):
        raise CostsError(
            "bad-type", f"layers_per_stage is {shortened(layers)}; give a list of whole numbers, as in [4, 4, 3, 3]"
        )
    return tuple(layers)


def _channel(settings: dict[str, Any]) -> dict[str, Any]:
    duplex, switches = settings.get("duplex", False), settings.get("switches", [])
    if not isinstance(duplex, bool):
        raise CostsError("bad-type", f"channel.duplex is {shortened(duplex)}; give true or false")
    if not isinstance(switches, list) or not all(
        isinstance(group, list) and all(isinstance(device, int) and abs(device) <= LARGEST for device in group)
        for group in switches
    ):
        raise CostsError(
            "bad-switches", f"channel.switches is {shortened(switches)}; give lists of devices, as in [[0, 1], [2, 3]]"
        )
    if "ratio" in settings and not settings.keys().isdisjoint(("offload", "reload")):
        raise CostsError("conflicting-options", "channel has both a ratio and seconds; give one of the two")
    if "ratio" not in settings and "offload" not in settings:
        raise CostsError(
            "missing-option", "channel lacks the key offload, seconds to the host; give it, or ratio in its place"
        )
    return settings


def _microbatch(weights: dict[str, Any]) -> dict[str, Any]:
    if "time" not in weights:
        raise CostsError(
            "missing-option", "microbatch lacks the key time, a list of one weight per microbatch; give it"
        )
    kinds = _object("microbatch.kinds", weights.get("kinds", {}))
    return {**weights, "kinds": {_kind("microbatch.kinds", kind): kind_weights for kind, kind_weights in kinds.items()}}


def _object(key: str, value: object, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object with no keys other than ``keys``, or raise a CostsError.

    ``key`` is the key of ``value`` in the file, for the message. ``keys=None`` allows all.
    """
    if not isinstance(value, dict):
        raise CostsError("bad-type", f"{key} is {shortened(value)}; give an object{_EXAMPLES.get(key, '')}")
    if keys is not None and (unknown := sorted(set(value) - set(keys))):
        raise CostsError(
            "unknown-key", f"{key} has the unknown key {shortened(unknown[0])}; known are {', '.join(keys)}"
        )
    return value


def _kind(key: str, kind: str) -> Kind:
    try:
        return Kind(kind)
    except ValueError:
        raise CostsError(
            "unknown-key", f"{key} has the unknown key {shortened(kind)}; it takes kinds of actions, {', '.join(Kind)}"
        ) from None


def _link(link: str) -> tuple[int, int]:
    source, dash, destination = link.partition("-")
    if not (dash and source.isdecimal() and destination.isdecimal() and len(link) < 20):
        raise CostsError("unknown-key", f"p2p has the key {shortened(link)}; write links as two devices, as in 0-1")
    return int(source), int(destination)


_EXAMPLES = {
    "memory": ', as in {"F": 8, "W": -8}',
    "channel": ', as in {"offload": 1.5}',
    "vocabulary": ', as in {"score": 0.5, "gradient": 0.25}',
    "microbatch": ', as in {"time": [1, 1, 2.5, 1]}',
    "microbatch.kinds": ', as in {"W": [1, 1, 2, 1]}',
}


class FileWeights(NamedTuple):
    """The weights of microbatches in a JSON file, for all training steps."""

    path: str
    steps: tuple[MicrobatchWeights, ...]  # the weights of every training step, or one object for all steps
    one_for_all: bool

    def of_step(self, iteration: int, num_microbatches: int) -> MicrobatchWeights:
        """Return the weights of the microbatches of one training step. ``iteration`` counts steps from 0.

        Raise a CostsError if the file lacks the step, or has another number of microbatches for it.
        """
        if not self.one_for_all and iteration >= len(self.steps):
            raise CostsError(
                "wrong-count",
                f"{self.path} has weights of {len(self.steps)} training steps, and this is step {iteration + 1}; give "
                "weights for every step, or one object for all steps",
            )
        weights = self.steps[0 if self.one_for_all else iteration]
        if len(weights) != num_microbatches:
            raise CostsError(
                "wrong-count",
                f"{self.path} has {len(weights)} weights, and training step {iteration + 1} has {num_microbatches} "
                "microbatches; give one weight per microbatch",
            )
        return weights


class FunctionName(NamedTuple):
    """The name of a function that weighs a microbatch: its module or Python file, and its name there."""

    module: str
    name: str


def read_microbatch_costs(text: str) -> str | FileWeights | FunctionName:
    """Read a value of ``--pipemem-microbatch-costs``: ``tokens``, ``flops``, a JSON file, or ``module:function``.

    Return ``tokens`` or ``flops`` in lower case, the weights in the file, or the name of the function. The file is read
    and checked here, the function is not imported. Any other text raises an UnsupportedError, and a file without valid
    weights a CostsError.
    """
    if text.lower() in (TOKENS, FLOPS):
        return text.lower()
    if text.endswith(".json"):
        return _file(text)
    module, _, name = text.rpartition(":")
    if not (module and name):
        raise UnsupportedError(
            "bad-choice",
            f"--pipemem-microbatch-costs {shortened(text)} is neither tokens, FLOPs, a .json file nor "
            "module:function; give one of "
            "these",
        )
    return FunctionName(module, name)


def _file(path: str) -> FileWeights:
    """Read a file of weights: an object or list of numbers for all training steps, or a list of these, one per step."""
    content = read_json(path, "weights of microbatches", CostsError)
    one_for_all = not isinstance(content, list) or not any(isinstance(weights, list | dict) for weights in content)
    steps = tuple(_weights(path, weights) for weights in ([content] if one_for_all else content))
    return FileWeights(path, steps, one_for_all)


def _weights(path: str, data: object) -> MicrobatchWeights:
    fields = data if isinstance(data, dict) else {"time": data}
    try:
        return MicrobatchWeights(**costs_arguments({"microbatch": fields})["microbatch"])
    except CostsError as error:
        raise CostsError(
            "wrong-file",
            f"{path} holds no weights of microbatches ({error}); write [1, 0.25], or "
            '{"time": [1, 0.25], "memory": [1, 0.5], "kinds": {"W": [1, 0.5]}}',
        ) from error
