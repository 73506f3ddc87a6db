"""Price the passes and collectives of vocabulary parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import COLLECTIVES, Kind
from megatron_pipemem.schedule.brief import changed_fields
from megatron_pipemem.schedule.prices import Several, price, shared

_SCORE_SHARE = {1: 2 / 3, 2: 1 / 3}
"""Of the head's three matrix products per weight (logits, input gradient, weight gradient), those that S does. With one
barrier it forms the input gradient from the local softmax; only the weight gradient is left to T."""


@dataclass(frozen=True)
class VocabularyCosts:
    """Seconds of one microbatch: one number for every device, one per device, or one per device and slice.

    Args:
        score: of S.
        gradient: of T.
        embed: of EMBED_F.
        embed_gradient: of EMBED_B.
        loss: of LOSS on the last stage's device, one number; it stands with the last slice.
        collectives: of one collective, one number for all kinds or one per kind; kinds left out take no time.
    """

    score: Several = 0.0
    gradient: Several = 0.0
    embed: Several = 0.0
    embed_gradient: Several = 0.0
    loss: float = 0.0
    collectives: float | Mapping[Kind, float] = 0.0

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        for name in ("score", "gradient", "embed", "embed_gradient"):
            object.__setattr__(self, name, price(f"vocabulary.{name}", getattr(self, name)))
        object.__setattr__(self, "loss", price("vocabulary.loss", self.loss, several=False))
        name = "vocabulary.collectives"
        if isinstance(self.collectives, Mapping):
            if strange := sorted(set(self.collectives) - COLLECTIVES):
                raise CostsError("unknown-key", f"{strange[0]} is no collective; give {', '.join(sorted(COLLECTIVES))}")
            given = self.collectives.items()
            prices = {Kind(kind): price(f"{name}.{kind}", seconds, several=False) for kind, seconds in given}
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
        """Cut a head and an embedding into equal shards.

        Args:
            head: seconds of forward and backward of the whole head and its loss on one device.
            num_devices: shards.
            barriers: 1 or 2; says how the head's matrix products are divided between S and T.
            embedding: seconds of forward and backward of the whole embedding on one device; a third of it is forward.
            scaling: how much of a shard's speed is left of the whole head's, 1 at best.
            collectives: seconds, as above.
        """
        shard, rows = head / num_devices / scaling, embedding / num_devices
        share = _SCORE_SHARE[barriers]
        return cls(shard * share, shard * (1 - share), rows / 3, 2 * rows / 3, 0.0, collectives)

    def seconds(self, num_devices: int, slices: int = 1) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of every pass, one value per device and slice, device by device.

        Raises:
            CostsError: a sequence has not one value per device, or per device and slice.
        """
        prices = {
            Kind.EMBED_F: self.embed,
            Kind.S: self.score,
            Kind.T: self.gradient,
            Kind.EMBED_B: self.embed_gradient,
        }
        seconds = {kind: per_device(f"seconds of {kind}", price, num_devices, slices) for kind, price in prices.items()}
        return {**seconds, Kind.LOSS: (*(0.0,) * (slices - 1), self.loss) * num_devices}

    def collective_seconds(self, slices: int = 1) -> dict[Kind, float]:
        """Return the seconds of every kind of collective, of one of so many slices of a microbatch."""
        if isinstance(self.collectives, Mapping):
            return {kind: self.collectives.get(kind, 0.0) / slices for kind in COLLECTIVES}
        return dict.fromkeys(COLLECTIVES, self.collectives / slices)


def per_device(what: str, price: Several, num_devices: int, slices: int = 1) -> tuple[float, ...]:
    """Return one value per device and slice, device by device.

    Args:
        what: name of the price, for the error's sentence.
        price: one number for all devices, or a sequence with one per device, either shared evenly by the slices; or with one
            per device and slice.
        num_devices: pipeline ranks.
        slices: sequence slices of a microbatch.

    Raises:
        CostsError: a sequence has not one value per device, or per device and slice.
    """
    if not isinstance(price, Sequence):
        return (price / slices,) * (num_devices * slices)
    if len(price) == num_devices:
        return shared(price, slices)
    if len(price) != num_devices * slices:
        cut = f", {num_devices * slices} of one per device and slice" if slices > 1 else ""
        raise CostsError(
            "costs-mismatch",
            f"{what} has {len(price)} values for {num_devices} devices; give one per device{cut}, or one number for all",
        )
    return tuple(price)
