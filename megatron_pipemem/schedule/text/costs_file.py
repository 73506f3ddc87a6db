"""Read costs from a JSON file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.brief import LARGEST, shortened
from megatron_pipemem.schedule.core.vocabulary_costs import VocabularyCosts

_PRICES = ("forward", "backward_input", "backward_weight", "recompute", "recompute_selective", "copy_sum")
_KEYS = (*_PRICES, "p2p", "memory", "channel", "vocabulary", "profile")
_CHANNEL = ("ratio", "offload", "reload", "duplex", "switches")


def costs_arguments(data: object) -> dict[str, Any]:
    """Check the object in a file of ``Costs.from_json``.

    Returns:
        The arguments of ``Costs``, of which ``vocabulary`` and ``channel`` are the arguments of ``VocabularyCosts`` and of
        ``Channel``, or of ``Channel.of_ratio``.

    Raises:
        CostsError: it is no object, or has unknown keys or values of the wrong type; the message names the key.
    """
    if not isinstance(data, dict) or set(data) - set(_KEYS):
        unknown = f", not {shortened(sorted(set(data) - set(_KEYS))[0])}" if isinstance(data, dict) else ""
        raise CostsError(f"costs are one JSON object with the keys {', '.join(_KEYS)}{unknown}")
    costs: dict[str, Any] = {key: _price(key, data[key]) for key in _PRICES if key in data}
    if (memory := data.get("memory")) is not None:
        costs["memory"] = {
            _kind("memory", kind): _price(f"memory.{kind}", values) for kind, values in _object("memory", memory)
        }
    costs["p2p"] = _number_or_each("p2p", data.get("p2p", 0.0), _link)
    if (vocabulary := data.get("vocabulary")) is not None:
        costs["vocabulary"] = _vocabulary(vocabulary)
    if (channel := data.get("channel")) is not None:
        costs["channel"] = _channel(channel)
    return costs


def _number_or_each(key: str, value: object, read_name: Callable[[str], Any]) -> float | dict[Any, float]:
    """Return one number, or an object with one for every name."""
    if isinstance(value, dict):
        return {read_name(name): _number(f"{key}.{name}", number) for name, number in value.items()}
    return _number(key, value)


def _channel(value: object) -> dict[str, Any]:
    settings = dict(_object("channel", value, _CHANNEL))
    duplex, switches = settings.pop("duplex", False), settings.pop("switches", [])
    if not isinstance(duplex, bool):
        raise CostsError(f"channel.duplex is {shortened(duplex)}; give true or false")
    if not isinstance(switches, list) or not all(
        isinstance(group, list) and all(isinstance(device, int) and abs(device) <= LARGEST for device in group)
        for group in switches
    ):
        raise CostsError(f"channel.switches is {shortened(switches)}; give lists of devices, as in [[0, 1], [2, 3]]")
    if "ratio" in settings and len(settings) > 1:
        raise CostsError("channel has a ratio, and seconds too; give either")
    if "ratio" not in settings and "offload" not in settings:
        raise CostsError("channel lacks the key offload, seconds to the host; give it, or ratio in its place")
    prices = {
        name: (_number if name == "ratio" else _price)(f"channel.{name}", price) for name, price in settings.items()
    }
    return {**prices, "duplex": duplex, "switches": tuple(map(tuple, switches))}


def _vocabulary(value: object) -> dict[str, Any]:
    settings = dict(_object("vocabulary", value, [field.name for field in fields(VocabularyCosts)]))
    collectives = _number_or_each(
        "vocabulary.collectives",
        settings.pop("collectives", 0.0),
        lambda kind: _kind("vocabulary.collectives", kind),
    )
    prices = {
        name: (_number if name == "loss" else _price)(f"vocabulary.{name}", price) for name, price in settings.items()
    }
    return {**prices, "collectives": collectives}


def _object(key: str, value: object, known: Iterable[str] | None = None) -> Iterable[tuple[str, Any]]:
    """Return the items of a JSON object."""
    if not isinstance(value, dict):
        raise CostsError(f"{key} is {shortened(value)}; give an object, as in {_EXAMPLES[key]}")
    if known is not None and (unknown := sorted(set(value) - set(known))):
        raise CostsError(f"{key} has the unknown key {shortened(unknown[0])}; known are {', '.join(known)}")
    return value.items()


def _price(key: str, value: object) -> float | tuple[float, ...]:
    if isinstance(value, list):
        if not value:
            raise CostsError(f"{key} is []; give a number, or a list of one per stage")
        return tuple(_number(key, each) for each in value)
    return _number(key, value, "a number, or a list of one per stage")


def _number(key: str, value: object, wanted: str = "a number") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CostsError(f"{key} is {shortened(value)}; give {wanted}")
    if not abs(value) <= LARGEST:
        raise CostsError(f"{key} is {shortened(value)}; give numbers of at most {LARGEST:g}")
    return float(value)


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
}
