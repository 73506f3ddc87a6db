"""The costs of a model's parts, from which the stages of any placement are priced.

A stage consists of layers and a *frame*, which is everything else: messages, on the first stage the embedding, and on
the last stage the final norm, the head and the loss. Seconds and bytes of a stage are sums over its layers and its
frame. `pipemem profile --output` writes files of such costs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from megatron_pipemem.errors import CostsError
from megatron_pipemem.files import read_json
from megatron_pipemem.request import PROFILE
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.costs_file import by_kind, checked_object
from megatron_pipemem.schedule.display import LARGEST, shortened
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import Several, number, price
from megatron_pipemem.schedule.vocabulary import VocabularyCosts


class Summed:
    """A dataclass whose objects can be added, and multiplied by a number, field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(value * factor for value in vars(self).values()))


@dataclass(frozen=True)
class Passes(Summed):
    """One number for each of F, I and W, for example seconds or FLOPs."""

    forward: float = 0.0  # the number for F
    input: float = 0.0  # the number for I
    weight: float = 0.0  # the number for W

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class Part:
    """The costs of a layer, or of a stage without its layers (a frame), on one rank and for one microbatch."""

    seconds: Passes = Passes()
    memory: dict[Kind, float] = field(default_factory=dict)
    """Bytes by which every kind of action changes the rank's memory, as the activation ledger counts."""
    parameters: int = 0  # on the rank

    @property
    def saved(self) -> float:
        """Bytes that are kept from F to I, except messages."""
        return self._net(Kind.F, Kind.RECV_F, Kind.SEND_F)

    @property
    def released_at_input(self) -> float:
        """Bytes that pass I frees, except messages."""
        return -self._net(Kind.I, Kind.RECV_I, Kind.SEND_I)

    def _net(self, *kinds: Kind) -> float:
        return sum(self.memory.get(kind, 0.0) for kind in kinds)

    def __add__(self, other: Part) -> Part:
        kinds = dict.fromkeys((*self.memory, *other.memory))
        memory = {kind: self.memory.get(kind, 0.0) + other.memory.get(kind, 0.0) for kind in kinds}
        return Part(self.seconds + other.seconds, memory, self.parameters + other.parameters)

    def __mul__(self, count: int) -> Part:
        memory = {kind: change * count for kind, change in self.memory.items()}
        return Part(self.seconds * count, memory, self.parameters * count)

    def __sub__(self, other: Part) -> Part:
        return self + other * -1


@dataclass(frozen=True, repr=False)
class Parts:
    """The layers of a model in order, and the frames of its stages."""

    layers: tuple[Part, ...]
    first: Part  # the frame of the stage with the embedding
    middle: Part  # the frame of a middle stage
    last: Part  # the frame of the stage with the head
    end_layers: tuple[Part, ...] | None = None
    """The layers if they are on the first or last stage; ``None`` if they cost the same there."""

    def __repr__(self) -> str:
        return f"<Parts of {len(self.layers)} layers>"

    @property
    def all(self) -> tuple[Part, ...]:
        return *self.layers, *(self.end_layers or ()), self.first, self.middle, self.last

    @property
    def embedding(self) -> Part:
        """The first frame without the messages, which the middle one has too."""
        return self.first - self.middle

    @property
    def head(self) -> Part:
        """The last frame without the messages, which the middle one has too."""
        return self.last - self.middle

    def of_stages(self, counts: Sequence[int]) -> list[tuple[tuple[Part, ...], Part]]:
        """Return the layers and the frame of every stage, given the numbers of layers.

        If one stage holds the whole model, its frame has embedding and head. Raise a CostsError if the numbers do not
        add up to the number of layers.
        """
        if sum(counts) != len(self.layers) or min(counts) < 0:
            cut = ", ".join(map(str, counts))
            raise CostsError(
                "costs-mismatch",
                f"stages of {cut} layers do not add up to the {len(self.layers)} layers of the costs; correct the layers "
                "per stage, or profile the model that runs",
            )
        if len(counts) == 1:
            return [(self.end_layers or self.layers, self.first + self.head)]
        stages, last = [], len(counts) - 1
        for stage, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            is_end = stage in (0, last)
            layers = self.end_layers if is_end and self.end_layers is not None else self.layers
            frame = self.first if stage == 0 else self.last if is_end else self.middle
            stages.append((layers[end - count : end], frame))
        return stages

    def scaled_bytes(self, factor: float) -> Parts:
        """Return the parts with all changes of memory multiplied by a number."""

        def scaled(part: Part) -> Part:
            return replace(part, memory={kind: change * factor for kind, change in part.memory.items()})

        ends = None if self.end_layers is None else tuple(map(scaled, self.end_layers))
        first, middle, last = map(scaled, (self.first, self.middle, self.last))
        return Parts(tuple(map(scaled, self.layers)), first, middle, last, ends)

    def without_ends(self) -> Parts:
        """Return the parts without the seconds of embedding and head. The bytes stay."""
        first, last = (replace(frame, seconds=self.middle.seconds) for frame in (self.first, self.last))
        return replace(self, first=first, last=last)


@dataclass(frozen=True, repr=False)
class PartCosts(Costs):
    """Costs whose seconds of F, I and W, and whose memory, are those of a model's parts, for any placement.

    ``memory`` is empty for that of the parts. ``of`` returns the costs of a placement's stages.
    """

    parts: Parts = field(kw_only=True)
    cut: tuple[int, ...] | None = field(default=None, kw_only=True)
    """The number of layers of every stage. A placement with another number of stages gets evenly many layers."""
    exchange_share: float | None = field(default=None, kw_only=True)
    """The share of F and I of layers in which the experts' tokens travel; ``None`` for the exchanges in the costs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.parts.all:
            for name, seconds in vars(part.seconds).items():
                price(name, seconds, several=False)
        if self.cut is not None:
            self.parts.of_stages(self.cut)

    @cached_property
    def _by_placement(self) -> dict[Placement, Costs]:
        return {}

    def of(self, placement: Placement) -> Costs:
        """Return the costs of the stages of a placement, with one price per stage of a replica."""
        if placement not in self._by_placement:
            self._by_placement[placement] = self._priced(placement)
        return self._by_placement[placement]

    def _priced(self, placement: Placement) -> Costs:
        stages, layers = placement.model_stages, len(self.parts.layers)
        counts = self.cut if self.cut and len(self.cut) == stages else even_layers(layers, stages)
        parts_of_stages = self.parts.of_stages(counts)

        def summed(of: Callable[[Part], float]) -> tuple[float, ...]:
            return tuple(sum(map(of, layers), of(frame)) for layers, frame in parts_of_stages)

        prices: dict[str, Any] = {price.name: getattr(self, price.name) for price in fields(Costs)}
        if self.memory == {}:
            kinds = dict.fromkeys(kind for part in self.parts.all for kind in part.memory)
            memory = {kind: list(summed(partial(_change, kind))) for kind in kinds}
            _join_neighbours(memory, placement)
            prices["memory"] = memory
        prices["forward"] = summed(lambda part: part.seconds.forward)
        prices["backward_input"] = summed(lambda part: part.seconds.input)
        prices["backward_weight"] = summed(lambda part: part.seconds.weight)
        if self.exchange_share is not None:
            for name, of in (("forward", "forward"), ("backward", "input")):
                seconds = (sum(getattr(layer.seconds, of) for layer in layers) for layers, _ in parts_of_stages)
                prices[f"{name}_exchange"] = tuple(self.exchange_share * total for total in seconds)
        return Costs(**prices)

    @property
    def are_single(self) -> bool:
        return False

    @property
    def have_exchanges(self) -> bool:
        return self.exchange_share is not None or super().have_exchanges

    def with_exchanges(self, share: float) -> Costs:
        return replace(self, exchange_share=share)

    def with_scaled_memory(self, factor: float) -> Costs:
        memory = super().with_scaled_memory(factor).memory
        return replace(self, memory=memory, parts=self.parts.scaled_bytes(factor))


def _change(kind: Kind, part: Part) -> float:
    return part.memory.get(kind, 0.0)


def _join_neighbours(memory: dict[Kind, list[float]], placement: Placement) -> None:
    """Move the changes by messages between two neighbouring stages on one device, which exchange none.

    They are added to the pass that makes the tensor: F of the first stage, or I of the second one.
    """
    devices = placement.devices[: placement.model_stages]
    for after in range(1, len(devices)):
        before = after - 1
        if devices[before] != devices[after]:
            continue
        for to, at, messages in (
            (Kind.F, before, ((after, Kind.RECV_F), (before, Kind.SEND_F))),
            (Kind.I, after, ((before, Kind.RECV_I), (after, Kind.SEND_I))),
        ):
            for stage, kind in messages:
                if kind in memory:
                    memory[to][at] += memory[kind][stage]
                    memory[kind][stage] = 0.0


def even_layers(layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of every stage, as even as possible: ``even_layers(7, 4)`` is ``(2, 2, 2, 1)``."""
    least, remainder = divmod(layers, num_stages)
    return tuple(least + (stage < remainder) for stage in range(num_stages))


def head_seconds(costs: Costs) -> float | None:
    """Return the seconds of F, I and W of the whole LM head; ``None`` if the costs are not those of parts."""
    return costs.parts.head.seconds.total if isinstance(costs, PartCosts) else None


def without_ends(costs: Costs) -> Costs:
    """Return a copy whose F, I and W lack the seconds of embedding and head, if the costs are those of parts."""
    return replace(costs, parts=costs.parts.without_ends()) if isinstance(costs, PartCosts) else costs


def with_cut_head(costs: Costs, head: float, num_devices: int, barriers: int) -> Costs:
    """Return the costs with embedding and head cut over all devices.

    Args:
        costs: the costs with the embedding and the head on their stages.
        head: seconds of forward and backward of the whole head.
        num_devices: pipeline ranks.
        barriers: vocabulary barriers, 1 or 2.
    """
    embedding = costs.parts.embedding.seconds.total if isinstance(costs, PartCosts) else 0.0
    vocabulary = VocabularyCosts.of_head(head, num_devices, barriers, embedding=embedding)
    return replace(without_ends(costs), vocabulary=vocabulary)


def read_costs(path: str | Path) -> Costs:
    """Read a file of costs: of stages (``Costs.from_json``), or of parts, as `pipemem profile --output` writes it.

    The key ``parts`` replaces F, I, W and memory by those of layers, embedding and head. ``layers_per_stage`` cuts the
    layers into stages.

    Raises:
        CostsError: the file is missing, is not JSON, or has unknown keys or values of the wrong type. The message has
            the key.
    """
    data = read_json(path, "costs", CostsError)
    if not isinstance(data, dict) or data.keys().isdisjoint(("parts", "layers_per_stage")):
        return Costs.from_json(path)
    try:
        return part_costs(data)
    except CostsError as error:
        raise CostsError(error.code, f"{path}: {error}") from error


_PARTS = ("order", "layers", "end_layers", "first", "middle", "last")
_PASSES = ("forward", "input", "weight")


def part_costs(data: dict[str, Any]) -> PartCosts:
    """Return the costs in the parsed JSON of a file with the key ``parts``."""
    if data.get("parts") is None:
        raise CostsError(
            "conflicting-options",
            "layers_per_stage cuts the layers of parts into stages, and the costs have no parts; leave "
            "layers_per_stage out, or give parts",
        )
    if conflicting := sorted(data.keys() & {"forward", "backward_input", "backward_weight", "memory"}):
        raise CostsError(
            "conflicting-options",
            f"costs have the keys parts and {conflicting[0]}, which both give the same prices; leave one of the two out",
        )
    parts = _parts(checked_object("parts", data["parts"], _PARTS))
    memory: dict[Kind, Several] | None = {} if any(part.memory for part in parts.all) else None
    others = {key: value for key, value in data.items() if key not in ("parts", "layers_per_stage")}
    return PartCosts.of_data(others, parts=parts, cut=_cut(data.get("layers_per_stage")), memory=memory)


def _parts(parts: dict[str, Any]) -> Parts:
    if missing := [key for key in _PARTS if key not in parts and key != "end_layers"]:
        raise CostsError(
            "missing-option", f"parts lacks the key {missing[0]}; `pipemem profile --output` writes all of them"
        )
    order = parts["order"]
    if not isinstance(order, list) or not order:
        raise CostsError(
            "bad-type", f'parts.order is {shortened(order)}; give a list with one kind per layer, as in ["*-", "*-"]'
        )

    def layers(name: str) -> tuple[Part, ...]:
        table = checked_object(f"parts.{name}", parts[name])
        for kind in order:
            if not isinstance(kind, str) or kind not in table:
                raise CostsError(
                    "unknown-key",
                    f"parts.order has the kind {shortened(kind)}, and parts.{name} has no key of that name; add the "
                    "key, or correct parts.order",
                )
        read = {kind: _part(f"parts.{name}.{kind}", table[kind]) for kind in set(order)}
        return tuple(read[kind] for kind in order)

    first, middle, last = (_part(f"parts.{name}", parts[name]) for name in ("first", "middle", "last"))
    ends = None if parts.get("end_layers") is None else layers("end_layers")
    return Parts(layers("layers"), first, middle, last, ends)


def _part(key: str, value: object) -> Part:
    """Return the costs of one part. Missing seconds are 0. ``key`` is that of the part in the file, for messages."""
    part = checked_object(key, value)
    seconds = checked_object(f"{key}.seconds", part.get("seconds", {}))
    memory = by_kind(f"{key}.memory", part.get("memory", {}))
    return Part(
        Passes(*(number(f"{key}.seconds.{name}", seconds.get(name, 0.0)) for name in _PASSES)),
        {kind: number(f"{key}.memory.{kind}", change) for kind, change in memory.items()},
        int(number(f"{key}.parameters", part.get("parameters", 0))),
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


def prices_of(costs: str) -> tuple[Costs, str]:
    """Return the costs with which a run begins, and their source, ``unit`` or ``file``.

    ``costs`` is a value of ``--pipemem-costs``. With ``profile`` a run begins with unit costs, and measures others
    later. Raise a CostsError if the file cannot be read, or if it has factors of microbatches: every step has its own
    weights.
    """
    if costs in ("unit", PROFILE):
        return Costs(), "unit"
    prices = read_costs(costs)
    prices.require_alike(f"{costs}: a run")
    return prices, "file"
