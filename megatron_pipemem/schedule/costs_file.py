"""Check the JSON of costs files and of microbatch factors, and convert it to arguments of ``Costs`` or to factors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.files import read_json
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.display import LARGEST, shortened
from megatron_pipemem.schedule.options import FLOPS, TOKENS
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.vocabulary import VocabularyCosts

_PRICES = (
    *("forward", "backward_input", "backward_weight", "recompute", "recompute_selective", "copy_sum"),
    *("forward_exchange", "backward_exchange"),
)
_KEYS = (*_PRICES, *"p2p memory channel vocabulary microbatch further profile".split())
_MICROBATCH = ("time", "memory", "kinds")
_CHANNEL = ("ratio", "offload", "reload", "duplex", "switches")


def costs_arguments(data: object) -> dict[str, Any]:
    """Check the keys of a costs file's parsed JSON, and return the arguments of ``Costs``.

    ``vocabulary``, ``microbatch`` and ``channel`` are arguments of ``VocabularyCosts``, ``MicrobatchFactors`` and
    ``Channel``. Those classes check the values. Raise a CostsError for unknown, missing or conflicting keys.
    """
    if isinstance(data, dict) and "parts" in data:
        raise CostsError(
            "wrong-file",
            "the costs are those of layers, embedding and head (key parts), and not of stages; read the file with "
            "megatron_pipemem.part_costs.read_costs",
        )
    if not isinstance(data, dict) or set(data) - set(_KEYS):
        unknown = f"; leave {shortened(sorted(set(data) - set(_KEYS))[0])} out" if isinstance(data, dict) else ""
        raise CostsError(
            "unknown-key", f"costs must be one JSON object, and its possible keys are {', '.join(_KEYS)}{unknown}"
        )
    costs: dict[str, Any] = {key: data[key] for key in (*_PRICES, "p2p") if key in data}
    if (memory := data.get("memory")) is not None:
        costs["memory"] = by_kind("memory", memory)
    if (further := data.get("further")) is not None:
        costs["further"] = by_kind("further", further)
    if isinstance(links := data.get("p2p"), dict):
        costs["p2p"] = {_link(link): seconds for link, seconds in links.items()}
    if (vocabulary := data.get("vocabulary")) is not None:
        costs["vocabulary"] = checked_object(
            "vocabulary", vocabulary, [field.name for field in fields(VocabularyCosts)]
        )
    if (microbatch := data.get("microbatch")) is not None:
        costs["microbatch"] = _microbatch(checked_object("microbatch", microbatch, _MICROBATCH))
    if (channel := data.get("channel")) is not None:
        costs["channel"] = _channel(checked_object("channel", channel, _CHANNEL))
    return costs


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


def _microbatch(factors: dict[str, Any]) -> dict[str, Any]:
    if "time" not in factors:
        raise CostsError(
            "missing-option", "microbatch lacks the key time, a list of one factor per microbatch; give it"
        )
    return {**factors, "kinds": by_kind("microbatch.kinds", factors.get("kinds", {}))}


def checked_object(key: str, value: object, keys: Iterable[str] | None = None) -> dict[str, Any]:
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


def by_kind(key: str, table: object) -> dict[Kind, Any]:
    """Return a JSON object whose keys are kinds of actions, or raise a CostsError."""
    values = checked_object(key, table)
    if unknown_kinds := [name for name in values if name not in set(Kind)]:
        raise CostsError(
            "unknown-key",
            f"{key} has the unknown key {shortened(unknown_kinds[0])}; it takes kinds of actions, {', '.join(Kind)}",
        )
    return {Kind(name): value for name, value in values.items()}


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


class FileFactors(NamedTuple):
    """The factors of microbatches in a JSON file, for all training steps."""

    path: str
    steps: tuple[MicrobatchFactors, ...]  # the factors of every training step, or one object for all steps
    has_one_for_all: bool

    def of_step(self, iteration: int, num_microbatches: int) -> MicrobatchFactors:
        """Return the factors of the microbatches of one training step. ``iteration`` counts steps from 0.

        Raise a CostsError if the file lacks the step, or has another number of microbatches for it.
        """
        if not self.has_one_for_all and iteration >= len(self.steps):
            raise CostsError(
                "wrong-count",
                f"{self.path} has factors of {len(self.steps)} training steps, and this is step {iteration + 1}; give "
                "factors for every step, or one object for all steps",
            )
        factors = self.steps[0 if self.has_one_for_all else iteration]
        if len(factors) != num_microbatches:
            raise CostsError(
                "wrong-count",
                f"{self.path} has {len(factors)} factors, and training step {iteration + 1} has {num_microbatches} "
                "microbatches; give one factor per microbatch",
            )
        return factors


class FunctionName(NamedTuple):
    """The name of a function that weighs a microbatch: its module or Python file, and its name there."""

    module: str
    name: str


def read_microbatch_costs(text: str) -> str | FileFactors | FunctionName:
    """Read a value of ``--pipemem-microbatch-costs``: ``tokens``, ``flops``, a JSON file, or ``module:function``.

    Return ``tokens`` or ``flops`` in lower case, the factors in the file, or the name of the function. The file is read
    and checked here, the function is not imported. Any other text raises an UnsupportedError, and a file without valid
    factors a CostsError.
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


def _file(path: str) -> FileFactors:
    """Read a file of factors: an object or list of numbers for all training steps, or a list of these, one per step."""
    content = read_json(path, "factors of microbatches", CostsError)
    has_one_for_all = not isinstance(content, list) or not any(isinstance(factors, list | dict) for factors in content)
    steps = tuple(_factors(path, factors) for factors in ([content] if has_one_for_all else content))
    return FileFactors(path, steps, has_one_for_all)


def _factors(path: str, data: object) -> MicrobatchFactors:
    fields = data if isinstance(data, dict) else {"time": data}
    try:
        return MicrobatchFactors(**costs_arguments({"microbatch": fields})["microbatch"])
    except CostsError as error:
        raise CostsError(
            "wrong-file",
            f"{path} holds no factors of microbatches ({error}); write [1, 0.25], or "
            '{"time": [1, 0.25], "memory": [1, 0.5], "kinds": {"W": [1, 0.5]}}',
        ) from error
