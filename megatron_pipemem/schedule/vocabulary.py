"""Vocabulary parallelism in schedules: its passes and collectives, their costs, and the check that none is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.schedule.action import (
    COLLECTIVES,
    VOCABULARY,
    Kind,
)
from megatron_pipemem.schedule.display import changed_fields
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import Several, price, shared
from megatron_pipemem.schedule.units import WHOLE, Units

if TYPE_CHECKING:
    from megatron_pipemem.schedule.schedule import Schedule

_SCORE_SHARE = {1: 2 / 3, 2: 1 / 3}
"""The share of S in the three matrix products of the head (logits, input gradient, weight gradient), by the number of
barriers. With one barrier S also forms the input gradient from the local softmax. T then has only the weight
gradient."""


@dataclass(frozen=True)
class VocabularyCosts:
    """Seconds of vocabulary passes and collectives for one microbatch.

    S, T, EMBED_F and EMBED_B have one number for all devices, one per device, or one per device and part.
    """

    score: Several = 0.0  # seconds of S
    gradient: Several = 0.0  # seconds of T
    embed: Several = 0.0  # seconds of EMBED_F
    embed_gradient: Several = 0.0  # seconds of EMBED_B
    loss: float = 0.0  # seconds of LOSS, one number; it runs on the last stage's device, with the last part
    collectives: float | Mapping[Kind, float] = 0.0
    """Seconds of one collective: one number for all kinds, or one per kind. Missing kinds take no time."""

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        for name in ("score", "gradient", "embed", "embed_gradient"):
            object.__setattr__(self, name, price(f"vocabulary.{name}", getattr(self, name)))
        object.__setattr__(self, "loss", price("vocabulary.loss", self.loss, several=False))
        name = "vocabulary.collectives"
        if isinstance(self.collectives, Mapping):
            if unknown_kinds := sorted(set(self.collectives) - COLLECTIVES):
                raise CostsError(
                    "unknown-key", f"{unknown_kinds[0]} is not a collective; give {', '.join(sorted(COLLECTIVES))}"
                )
            prices = {
                Kind(kind): price(f"{name}.{kind}", seconds, several=False)
                for kind, seconds in self.collectives.items()
            }
            object.__setattr__(self, "collectives", prices)
        else:
            object.__setattr__(self, "collectives", price(name, self.collectives, several=False))

    @classmethod
    def of_head(
        cls,
        head: float,
        num_devices: int,
        barriers: int,
        *,
        embedding: float = 0.0,
        scaling: float = 1.0,
        collectives: float | Mapping[Kind, float] = 0.0,
    ) -> VocabularyCosts:
        """Return the costs of a head and an embedding that are cut into equal shards.

        ``head`` and ``embedding`` are the seconds of forward and backward of the whole head and embedding on one
        device. A third of the embedding's seconds is its forward. ``barriers`` determines how S and T divide the
        head's matrix products. ``scaling`` is the efficiency of a shard relative to the whole head, at best 1.
        """
        shard, rows = head / num_devices / scaling, embedding / num_devices
        share = _SCORE_SHARE[barriers]
        return cls(shard * share, shard * (1 - share), rows / 3, 2 * rows / 3, 0.0, collectives)

    def seconds(self, num_devices: int, units: Units = WHOLE) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of every vocabulary pass, one value per device and part, device by device."""
        prices = {
            Kind.EMBED_F: self.embed,
            Kind.S: self.score,
            Kind.T: self.gradient,
            Kind.EMBED_B: self.embed_gradient,
        }
        seconds = {kind: per_device(f"seconds of {kind}", price, num_devices, units) for kind, price in prices.items()}
        return {**seconds, Kind.LOSS: (*(0.0,) * units.lead, self.loss) * num_devices}

    def collective_seconds(self, units: Units = WHOLE) -> dict[Kind, float]:
        """Return the seconds of every kind of collective for one unit."""
        if isinstance(self.collectives, Mapping):
            return {kind: self.collectives.get(kind, 0.0) / units.parts for kind in COLLECTIVES}
        return dict.fromkeys(COLLECTIVES, self.collectives / units.parts)


def per_device(subject: str, price: Several, num_devices: int, units: Units = WHOLE) -> tuple[float, ...]:
    """Return a price as one value per device and part, device by device.

    One number, or one per device, is the price of a whole microbatch, which the parts share evenly. ``subject``
    begins the message of a CostsError.
    """
    places = num_devices * units.parts
    if not isinstance(price, Sequence):
        return (price / units.parts,) * places
    if len(price) == num_devices:
        return shared(price, units)
    if len(price) != places:
        cut = "" if units.are_whole else f", {places} of one per device and part of a microbatch"
        raise CostsError(
            "costs-mismatch",
            f"{subject} has {len(price)} values for {num_devices} devices; give one per device{cut}, or one number for all",
        )
    return tuple(price)


BARRIERS = (1, 2)
BARRIERS_OF_ALGORITHM = {1: 2, 2: 1}
"""The number of barriers of an algorithm of arXiv 2411.05288: Algorithm 1 has two, and Algorithm 2 has one. Users name
the algorithm. Schedules have the number of barriers."""


def check_placement(placement: Placement) -> None:
    """Raise an UnsupportedError unless stage ``d`` is on device ``d`` for the first stages, with one replica.

    Shard ``d`` of head and embedding is on device ``d``.
    """
    if placement.replicas > 1:
        raise UnsupportedError(
            "unsupported-placement",
            "vocabulary parallelism cuts head and embedding of one replica of the model, and this placement holds "
            f"{placement.replicas}; use a schedule with one replica",
        )
    if placement.devices[: placement.num_devices] != tuple(range(placement.num_devices)):
        raise UnsupportedError(
            "unsupported-placement",
            "vocabulary parallelism needs stage d on device d for the first stages, and this placement has the devices "
            f"{placement.devices}; use a linear, interleaved, V or wave placement",
        )


def vocabulary_passes(schedule: Schedule, backwards: bool) -> Iterator[tuple[Kind, int, set[int]]]:
    """Yield kind, device and units of all passes and posts that vocabulary parallelism adds to a step."""
    everywhere = [Kind.EMBED_F, Kind.REDUCE_E, Kind.BCAST_X, Kind.S, Kind.STATS]
    if backwards:
        everywhere += [Kind.BCAST_G, Kind.T, Kind.REDUCE_X, Kind.BCAST_E, Kind.EMBED_B]
    units = set(range(len(schedule.units)))
    for device in range(schedule.num_devices):
        for kind in everywhere:
            yield kind, device, units
    yield Kind.LOSS, schedule.placement.devices[-1], {end - 1 for end in schedule.units.ends}


def check_switch(schedule: Schedule) -> None:
    """Check that a schedule without barriers has no vocabulary actions, and that one with barriers may have them.

    It may not with asynchronous updates, offload, recomputation, or a placement that ``check_placement`` refuses.
    """
    if schedule.vocabulary_barriers:
        if schedule.vocabulary_barriers not in BARRIERS:
            raise ScheduleError(
                "bad-choice",
                f"vocabulary parallelism has 1 or 2 barriers, not {schedule.vocabulary_barriers}; give 1 or 2",
            )
        if schedule.updates is not None or schedule.offloads or schedule.recomputed:
            raise ScheduleError(
                "conflicting-features",
                "vocabulary parallelism excludes asynchronous updates, offload and recomputation; leave the vocabulary "
                "passes out, or the other feature",
            )
        check_placement(schedule.placement)
        return
    if schedule.kinds.isdisjoint(VOCABULARY):
        return
    for device, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            if action.kind in VOCABULARY:
                raise ScheduleError(
                    "useless-action",
                    "is not a compute action of this schedule: it belongs to vocabulary parallelism, and the schedule has "
                    "no number of barriers; set vocabulary to 1 or 2, or remove it",
                    at=(device, position, action),
                )
