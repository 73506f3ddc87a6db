"""Read costs from a JSON file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.brief import LARGEST, shortened
from megatron_pipemem.schedule.core.vocabulary_costs import VocabularyCosts

_PRICES = ("forward", "backward_input", "backward_weight", "recompute", "recompute_selective", "copy_sum")
_KEYS = (*_PRICES, "p2p", "memory", "channel", "vocabulary", "microbatch", "profile")
_MICROBATCH = ("time", "memory", "kinds")
_CHANNEL = ("ratio", "offload", "reload", "duplex", "switches")


def costs_arguments(data: object) -> dict[str, Any]:
    """Check the names in the file of ``Costs.from_json``; whoever takes the values checks those.

    Returns:
        The arguments of ``Costs``, of which ``vocabulary``, ``microbatch`` and ``channel`` are the arguments of
        ``VocabularyCosts``, of ``MicrobatchWeights`` and of ``Channel``, or of ``Channel.of_ratio``.

    Raises:
        CostsError: it is no object, or has unknown keys or values of the wrong type; the message names the key.
    """
    if not isinstance(data, dict) or set(data) - set(_KEYS):
        unknown = f", not {shortened(sorted(set(data) - set(_KEYS))[0])}" if isinstance(data, dict) else ""
        raise CostsError(f"costs are one JSON object with the keys {', '.join(_KEYS)}{unknown}")
    costs: dict[str, Any] = {key: data[key] for key in (*_PRICES, "p2p") if key in data}
    if (memory := data.get("memory")) is not None:
        costs["memory"] = {_kind("memory", kind): values for kind, values in _object("memory", memory).items()}
    if isinstance(links := data.get("p2p"), dict):
        costs["p2p"] = {_link(link): seconds for link, seconds in links.items()}
    if (vocabulary := data.get("vocabulary")) is not None:
        costs["vocabulary"] = _object("vocabulary", vocabulary, [field.name for field in fields(VocabularyCosts)])
    if (microbatch := data.get("microbatch")) is not None:
        costs["microbatch"] = _microbatch(_object("microbatch", microbatch, _MICROBATCH))
    if (channel := data.get("channel")) is not None:
        costs["channel"] = _channel(_object("channel", channel, _CHANNEL))
    return costs


def _channel(settings: dict[str, Any]) -> dict[str, Any]:
    duplex, switches = settings.get("duplex", False), settings.get("switches", [])
    if not isinstance(duplex, bool):
        raise CostsError(f"channel.duplex is {shortened(duplex)}; give true or false")
    if not isinstance(switches, list) or not all(
        isinstance(group, list) and all(isinstance(device, int) and abs(device) <= LARGEST for device in group)
        for group in switches
    ):
        raise CostsError(f"channel.switches is {shortened(switches)}; give lists of devices, as in [[0, 1], [2, 3]]")
    if "ratio" in settings and not settings.keys().isdisjoint(("offload", "reload")):
        raise CostsError("channel has a ratio, and seconds too; give either")
    if "ratio" not in settings and "offload" not in settings:
        raise CostsError("channel lacks the key offload, seconds to the host; give it, or ratio in its place")
    return settings


def _microbatch(weights: dict[str, Any]) -> dict[str, Any]:
    if "time" not in weights:
        raise CostsError("microbatch lacks the key time, a list of one weight per microbatch; give it")
    kinds = _object("microbatch.kinds", weights.get("kinds", {}))
    return {**weights, "kinds": {_kind("microbatch.kinds", kind): each for kind, each in kinds.items()}}


def _object(key: str, value: object, known: Iterable[str] | None = None) -> dict[str, Any]:
    """Return a JSON object, whose keys are known."""
    if not isinstance(value, dict):
        raise CostsError(f"{key} is {shortened(value)}; give an object, as in {_EXAMPLES[key]}")
    if known is not None and (unknown := sorted(set(value) - set(known))):
        raise CostsError(f"{key} has the unknown key {shortened(unknown[0])}; known are {', '.join(known)}")
    return value


def _kind(key: str, kind: str) -> Kind:
    try:
        return Kind(kind)
    except ValueError:
        raise CostsError(
            f"{key} has the unknown key {shortened(kind)}; it takes kinds of actions, {', '.join(Kind)}"
        ) from None


def _link(link: str) -> tuple[int, int]:
    source, dash, destination = link.partition("-")
    if not (dash and source.isdecimal() and destination.isdecimal() and len(link) < 20):
        raise CostsError(f"p2p has the key {shortened(link)}; write links as two devices, as in 0-1")
    return int(source), int(destination)


_EXAMPLES = {
    "memory": '{"F": 8, "W": -8}',
    "channel": '{"offload": 1.5}',
    "vocabulary": '{"score": 0.5, "gradient": 0.25}',
    "microbatch": '{"time": [1, 1, 2.5, 1]}',
    "microbatch.kinds": '{"W": [1, 1, 2, 1]}',
}
