"""Prices: one number, or one per stage; copies to the host; and factors of microbatches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import Kind, Resource, kinds_where
from megatron_pipemem.schedule.display import LARGEST, changed_fields, shortened
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.units import WHOLE, Units

Several = float | Sequence[float]


def number(subject: str, value: object, expected: str = "a number") -> float:
    """Return a number of any library as a float, or raise a CostsError, whose message asks for ``expected``.

    Texts, booleans, and numbers above ``LARGEST`` are refused. ``subject`` begins the message.
    """
    try:
        converted = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except OverflowError:
        converted = math.inf
    except (TypeError, ValueError):
        converted = math.nan
    if not abs(converted) <= LARGEST:
        code, give = (
            ("bad-type", expected) if math.isnan(converted) else ("bad-number", f"numbers of at most {LARGEST:g}")
        )
        raise CostsError(code, f"{subject} is {shortened(value)}; give {give}")
    return converted


def numbers(subject: str, value: object) -> Several:
    """Return one number as a float, or a sequence of numbers as a tuple of floats.

    Negative numbers are allowed. Raise a CostsError for anything else: an empty sequence, text, a boolean, NaN, or a
    number whose absolute value is above ``LARGEST``.
    """
    if type(value) is tuple and are_floats(value):
        return value
    if (several := listed_objects(value)) is not None:
        return tuple(number(subject, item) for item in several)
    return number(subject, value, "a number, or a list of one per stage")


def are_floats(values: Collection[Any]) -> bool:
    """Return whether there are values, and all are floats that ``number`` returns unchanged. Planners check millions."""
    return set(map(type, values)) == {float} and max(map(abs, values)) <= LARGEST and not any(map(math.isnan, values))


def listed_objects(value: object) -> list[Any] | None:
    """Return the items of a list, array or tensor of any library; ``None`` if it is empty or something else."""
    if isinstance(value, str | Mapping) or not isinstance(value, Sized) or not isinstance(value, Iterable):
        return None
    return list(value) or None


def price(subject: str, value: object, kind: Kind | None = None, *, several: bool = True) -> Several:
    """Return seconds as floats, or raise a CostsError if one is negative or no number.

    ``subject`` and ``kind`` name the price in the message. ``several`` allows a sequence.
    """
    seconds = numbers(subject, value) if several else number(subject, value)
    if (least := min(listed(seconds))) < 0:
        raise CostsError("bad-number", f"cost of {kind or subject} is negative: {least}; give numbers of at least 0")
    return seconds


def shared(values: Sequence[float], units: Units) -> tuple[float, ...]:
    """Divide one value per stage evenly by the parts: for two parts ``shared((4, 6), units)`` is ``(2, 2, 3, 3)``."""
    n = units.parts
    return tuple(values) if n == 1 else tuple(value / n for value in values for _ in range(n))


def listed(value: Several) -> Sequence[float]:
    """Return a sequence as it is, and one number as a sequence of one."""
    return value if isinstance(value, Sequence) else (value,)


def per_part(name: str, price: Several, placement: Placement, units: Units = WHOLE) -> tuple[float, ...]:
    """Return a price as one value per stage and part, stage by stage. One number prices a device's whole share.

    A value per stage is shared evenly by its parts. Raise a CostsError, which has ``name``, if a sequence has another
    number of values than one per stage, or per stage and part.
    """
    if not isinstance(price, Sequence):
        shares = [price * placement.replicas / len(placement.stages[device]) for device in placement.devices]
        return shared(shares, units)
    if len(price) == placement.model_stages:
        return shared(price, units) * placement.replicas
    stages, places = placement.num_stages, placement.num_stages * units.parts
    if len(price) == stages:
        return shared(price, units)
    if len(price) == places and placement.replicas == 1:
        return tuple(price)
    cut = f", or {places} of one per stage and part of a microbatch, stage by stage" * (not units.are_whole)
    if placement.replicas > 1 and cut:
        cut = " (parts have prices of their own only in a pipeline with one replica of the model)"
    raise CostsError(
        "costs-mismatch",
        f"the costs have {len(price)} values for {name}, but the placement has {stages} stages; give one value per "
        f"stage{cut}, or a single number for a device's whole share",
    )


@dataclass(frozen=True)
class HostLink:
    """The bandwidth between a device and its host: bytes per second to the host (``out``) and from it (``back``)."""

    out: float
    back: float
    duplex: bool
    """Whether a copy to the host and one back, at the same time, take about as long as the slower of the two."""


@dataclass(frozen=True)
class Channel:
    """The seconds of copies of activations between a device and its host.

    A channel makes one copy at a time, in the order in which the copies are issued; with ``duplex``, one in each
    direction. Every device has a channel, except that those of a group in ``switches`` share one.
    """

    offload: Several = 0.0
    """Seconds to copy activations to the host: one number for a device's whole share of the model, one per stage, or one
    per stage and part of a microbatch."""
    reload: Several | None = None  # seconds to copy them back; ``None`` if they equal ``offload``
    duplex: bool = False  # whether one transfer of each direction can run at a time
    switches: tuple[tuple[int, ...], ...] = ()  # devices that share a channel, for example through one PCIe switch
    ratio: float | None = None
    """The seconds of copying to the host and back, divided by those of F, I and W; replaces ``offload`` and ``reload``."""

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        if self.ratio is not None:
            price("channel.ratio", self.ratio, several=False)
        for name in ("offload", "reload"):
            seconds = self.offload if getattr(self, name) is None else getattr(self, name)
            object.__setattr__(self, name, price(f"channel.{name}", seconds))
        switches = tuple(tuple(map(int, devices)) for devices in self.switches)
        members = [device for devices in switches for device in devices]
        if len(members) != len(set(members)):
            raise CostsError("bad-switches", f"switches {switches} name a device twice; name it once")
        object.__setattr__(self, "switches", switches)

    def seconds(
        self, placement: Placement, passes: Sequence[Sequence[float]], units: Units = WHOLE
    ) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of OFFLOAD and of RELOAD, one value per stage and part, stage by stage.

        ``passes`` has those of F, of I and of W. Raise a CostsError if ``switches`` name a device that the placement
        does not have.
        """
        if any(not 0 <= device < placement.num_devices for devices in self.switches for device in devices):
            raise CostsError(
                "bad-switches",
                f"switches {self.switches} name a device that is not among the devices 0 to "
                f"{placement.num_devices - 1}; leave it out",
            )
        if self.ratio is not None:
            copies = tuple(self.ratio / 2 * sum(seconds) for seconds in zip(*passes, strict=True))
            return {Kind.OFFLOAD: copies, Kind.RELOAD: copies}
        reload = self.offload if self.reload is None else self.reload
        return {
            Kind.OFFLOAD: per_part("offload", self.offload, placement, units),
            Kind.RELOAD: per_part("reload", reload, placement, units),
        }

    def lane_of(self, device: int, kind: Kind) -> tuple[int, bool]:
        """Return a key that copies share if they wait for each other: same channel and, if duplex, same direction."""
        owner = next((members[0] for members in self.switches if device in members), device)
        return owner, self.duplex and kind is Kind.RELOAD

    @property
    def is_shared(self) -> bool:
        return any(len(devices) > 1 for devices in self.switches)


LAYERS = kinds_where(lambda spec: spec.runs_layers)
"""Kinds that run the layers of a stage. ``MicrobatchFactors.time`` multiplies their seconds. ``memory`` multiplies
those of all others, because they depend on the number of tokens."""
WEIGHED = kinds_where(lambda spec: spec.resource in (Resource.COMPUTE, Resource.COPY, Resource.COLLECTIVE))
"""The kinds that ``MicrobatchFactors.kinds`` may have."""


@dataclass(frozen=True)
class MicrobatchFactors:
    """Factors that multiply the seconds and memory in ``Costs``, one per microbatch.

    1.0 is the price in ``Costs``. The factors are in the order in which a ``Schedule`` numbers microbatches.
    """

    time: tuple[float, ...]  # per microbatch, the factor of the seconds of F, I, W, B, R and RS
    memory: tuple[float, ...] | None = None
    """Per microbatch, the factor of its device and host memory. The seconds of messages, copies to the host and
    vocabulary actions scale with it too, because they depend on tokens. ``None``: 1 each."""
    kinds: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    """Factors for the seconds of single kinds, in place of ``time`` or ``memory``. For example, F of attention grows
    with the square of a document's length, and W does not. R without factors has those of F, and B costs I + W."""

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "time", _microbatch_factors("time", self.time))
        if self.memory is not None:
            object.__setattr__(self, "memory", _microbatch_factors("memory", self.memory))
        if unknown_kinds := sorted(set(self.kinds) - WEIGHED):
            raise CostsError(
                "unknown-key",
                f"microbatch.kinds has {shortened(unknown_kinds[0])}, which takes no factors; give some of "
                f"{', '.join(sorted(WEIGHED))}",
            )
        kinds = {Kind(kind): _microbatch_factors(f"kinds.{kind}", factors) for kind, factors in self.kinds.items()}
        object.__setattr__(self, "kinds", kinds)
        named = {"memory": self.memory or self.time, **{f"kinds.{kind}": factors for kind, factors in kinds.items()}}
        for name, factors in named.items():
            if len(factors) != len(self.time):
                raise CostsError(
                    "wrong-count",
                    f"microbatch.{name} has {len(factors)} factors and microbatch.time has {len(self.time)}; give both "
                    "one factor per microbatch",
                )

    def __len__(self) -> int:
        return len(self.time)

    def check(self, num_microbatches: int) -> None:
        """Raise a CostsError if there is not one factor per microbatch of the step."""
        if len(self) != num_microbatches:
            raise CostsError(
                "wrong-count",
                f"the costs have factors of {len(self)} microbatches, and the step has {num_microbatches} "
                "microbatches; give one factor per microbatch",
            )

    def seconds_of(self, kind: Kind) -> tuple[float, ...]:
        """Return the factors for the seconds of a kind, one per microbatch.

        Do not call it for B if ``kinds`` has no B: the seconds of B are then those of I and W, each with its factor.
        """
        if kind is Kind.R and kind not in self.kinds:
            kind = Kind.F
        return self.kinds.get(kind) or (self.time if kind in LAYERS else self.tokens)

    @property
    def tokens(self) -> tuple[float, ...]:
        """Return the factors of memory, and of the seconds that depend on the number of tokens; 1 each by default."""
        return (1.0,) * len(self) if self.memory is None else self.memory

    def reordered(self, order: Sequence[int]) -> MicrobatchFactors:
        """Return the factors in a new order: those of microbatch ``order[i]`` become those of microbatch ``i``.

        Raise a CostsError if ``order`` does not have every microbatch once.
        """
        if sorted(order) != list(range(len(self))):
            raise CostsError(
                "wrong-order",
                f"order {shortened(list(order))} does not name each of {len(self)} microbatches once; give the numbers "
                f"0 to {len(self) - 1} in an order",
            )

        def moved(factors: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factors[number] for number in order)

        return replace(
            self,
            time=moved(self.time),
            memory=None if self.memory is None else moved(self.memory),
            kinds={kind: moved(factors) for kind, factors in self.kinds.items()},
        )


def _microbatch_factors(name: str, value: object) -> tuple[float, ...]:
    listed = listed_objects(value)
    if listed is None:
        raise CostsError(
            "bad-type", f"microbatch.{name} is {shortened(value)}; give a list of one factor per microbatch"
        )
    factors = tuple(number(f"microbatch.{name}[{at}]", factor) for at, factor in enumerate(listed))
    if (least := min(factors)) < 0:
        raise CostsError(
            "bad-number",
            f"microbatch.{name}[{factors.index(least)}] is negative: {least}; give factors of at least 0",
        )
    return factors
