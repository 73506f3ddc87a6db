"""Price stages: from one number for a device's share, one value per stage, or the parts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import Several, number, numbers, price, shared


@dataclass(frozen=True, repr=False)
class PartPrices:
    """One price of every part of a model, from which the stages of any cut are priced.

    A stage is its layers and its *frame*. The first frame has the embedding, the last has the head and the loss. If one
    stage holds the whole model, it has both.

    Args:
        layers: one value per layer, in model order.
        first: the frame of the first stage.
        middle: the frame of every stage in between.
        last: the frame of the last stage.
        end_layers: the same of layers on the first or last stage; ``None`` if they are as elsewhere.
        cut: layers of every stage. A placement with another number of stages gets an even cut.

    Raises:
        CostsError: a value is not a finite number, or the cut does not hold all layers.
    """

    layers: tuple[float, ...]
    first: float = 0.0
    middle: float = 0.0
    last: float = 0.0
    end_layers: tuple[float, ...] | None = None
    cut: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("first", "middle", "last"):
            number(f"parts.{name}", getattr(self, name))
        for value in (*self.layers, *(self.end_layers or ())):
            number("parts.layers", value)
        if self.cut is not None:
            _check_cut(self.cut, len(self.layers))

    def __repr__(self) -> str:
        return f"<PartPrices of {len(self.layers)} layers>"

    def of_stages(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return one value per stage.

        Args:
            counts: layers of every stage.

        Raises:
            CostsError: the stages do not hold all layers.
        """
        _check_cut(counts, len(self.layers))
        found, last = [], len(counts) - 1
        for stage, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            is_end = stage in (0, last)
            layers = self.end_layers if is_end and self.end_layers is not None else self.layers
            frame = self.first if stage == 0 else self.last if is_end else self.middle
            found.append(sum(layers[end - count : end], frame))
        if last == 0:
            found[0] += self.last - self.middle
        return tuple(found)

    def of_placement(self, placement: Placement) -> tuple[float, ...]:
        """Return one value per stage of one replica of the model."""
        stages = placement.model_stages
        counts = self.cut if self.cut and len(self.cut) == stages else even_layers(len(self.layers), stages)
        return self.of_stages(counts)

    @property
    def embedding(self) -> float:
        """The first frame without messages, which a stage in between has too."""
        return self.first - self.middle

    @property
    def head(self) -> float:
        """The last frame without messages, which a stage in between has too."""
        return self.last - self.middle

    def __add__(self, other: PartPrices) -> PartPrices:
        ends = [self.end_layers, other.end_layers]
        both = None
        if ends != [None, None]:
            both = _added(
                *(price.layers if end is None else end for price, end in zip((self, other), ends, strict=True))
            )
        frames = (self.first + other.first, self.middle + other.middle, self.last + other.last)
        return PartPrices(_added(self.layers, other.layers), *frames, both, self.cut)

    def __mul__(self, factor: float) -> PartPrices:
        ends = None if self.end_layers is None else tuple(each * factor for each in self.end_layers)
        frames = (self.first * factor, self.middle * factor, self.last * factor)
        return PartPrices(tuple(each * factor for each in self.layers), *frames, ends, self.cut)


Price = Several | PartPrices


def checked_changes(name: str, value: object) -> Price:
    """Return by how much an action changes what is held, as ``numbers`` does, or the prices of parts."""
    return value if isinstance(value, PartPrices) else numbers(name, value)


def checked_seconds(name: str, value: object, kind: Kind | None = None) -> Price:
    """Return seconds, as ``price`` does, or the prices of parts.

    Args:
        name: of the price, for the error's sentence.
        value: one number, several, or the prices of parts.
        kind: of the action that takes them, if one does.

    Raises:
        CostsError: one is not a number of at least 0.
    """
    if not isinstance(value, PartPrices):
        return price(name, value, kind)
    parts = (*value.layers, *(value.end_layers or ()), value.first, value.middle, value.last)
    if (least := min(parts)) < 0:
        raise CostsError("bad-number", f"cost of {kind or name} is negative: {least}")
    return value


def even_layers(layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the layers of every stage: as many on each, one fewer on the last ones if they do not divide."""
    whole, rest = divmod(layers, num_stages)
    return tuple(whole + (stage < rest) for stage in range(num_stages))


def stage_memory(memory: Mapping[Kind, Price], placement: Placement) -> dict[Kind, Several]:
    """Return the changes of held memory with the prices of parts made into one value per stage.

    Two neighbouring stages on one device hand tensors over: what would be received is there as soon as the neighbour has
    made it, and nothing is sent.
    """
    parts = {kind: each for kind, each in memory.items() if isinstance(each, PartPrices)}
    found = {kind: list(each.of_placement(placement)) for kind, each in parts.items()}
    devices = placement.devices[: placement.model_stages]
    for after in range(1, len(devices)):
        before = after - 1
        if parts and devices[before] == devices[after]:
            for to, at, kinds in (
                (Kind.F, before, ((after, Kind.RECV_F), (before, Kind.SEND_F))),
                (Kind.I, after, ((before, Kind.RECV_I), (after, Kind.SEND_I))),
            ):
                for stage, kind in kinds:
                    if kind in found:
                        found[to][at] += found[kind][stage]
                        found[kind][stage] = 0.0
    return {kind: tuple(found[kind]) if isinstance(each, PartPrices) else each for kind, each in memory.items()}


def per_slice(name: str, price: Price, placement: Placement, slices: int) -> tuple[float, ...]:
    """Return one value per stage and slice, stage by stage.

    Args:
        name: of the price, for the error's sentence.
        price: one number for a device's whole share, a sequence, or the prices of parts.
        placement: which device holds which stage.
        slices: sequence slices of a microbatch.

    Raises:
        CostsError: a sequence has not one value per stage, or per stage and slice.
    """
    if isinstance(price, PartPrices):
        price = price.of_placement(placement)
    if not isinstance(price, Sequence):
        shares = [price * placement.replicas / len(placement.stages[device]) for device in placement.devices]
        return shared(shares, slices)
    if len(price) == placement.model_stages:
        return shared(price, slices) * placement.replicas
    stages = placement.num_stages
    if len(price) == stages:
        return shared(price, slices)
    if len(price) == stages * slices and placement.replicas == 1:
        return tuple(price)
    cut = f", or {stages * slices} of one per stage and slice, stage by stage" * (slices > 1)
    if placement.replicas > 1 and cut:
        cut = " (slices have prices of their own only in a pipeline with one replica of the model)"
    raise CostsError(
        "costs-mismatch",
        f"{name} has {len(price)} values but the placement has {stages} stages; "
        f"give one value per stage{cut}, or a single number for a device's whole share",
    )


def _check_cut(counts: Sequence[int], layers: int) -> None:
    if sum(counts) != layers or min(counts) < 0:
        cut = ", ".join(map(str, counts))
        raise CostsError(
            "costs-mismatch",
            f"stages of {cut} layers are not the {layers} layers of the costs; profile the model that runs",
        )


def _added(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(sum, zip(one, other, strict=True)))
