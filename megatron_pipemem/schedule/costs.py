"""What actions take: seconds of a device, seconds on a link, memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_pipemem.errors import PipememError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.placement import Placement

PerStage = float | Sequence[float]


class CostsError(PipememError, ValueError):
    """Costs that do not fit the schedule or cannot be read."""


@dataclass(frozen=True)
class Costs:
    """Prices of the actions of one microbatch.

    A single number is the price of one *device's whole share* of the model: a stage on a device with ``v`` chunks costs
    ``1/v`` of it, so makespans of different placements are comparable. A device of a bidirectional pipeline has its share
    of every replica, and each at the full price: it does either for a part of the microbatches only. A sequence holds one
    price per stage, or one per stage of a replica when all replicas cost the same.

    Args:
        forward: seconds of F.
        backward_input: seconds of I.
        backward_weight: seconds of W. B costs I + W.
        p2p: seconds of one message between two devices; one number, or ``{(source, destination): seconds}``.
        memory: by how much each kind of action changes what its device holds, per kind one number or one per stage.
            Default: activation units, where a stage's forward takes ``1/model_stages`` (the whole model's activations of one
            microbatch are 1.0) and its W or B gives them back. With bytes instead, I gives a part back already; B defaults to
            I + W. A single number is a device's whole share here too.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    p2p: float | Mapping[tuple[int, int], float] = 0.0
    memory: Mapping[Kind, PerStage] | None = field(default=None)

    def seconds(self, placement: Placement) -> dict[Kind, tuple[float, ...]]:
        """Seconds of every compute kind, one value per stage.

        Raises:
            CostsError: a sequence has not one value per stage, or a price is negative.
        """
        prices = {
            Kind.F: _per_stage("forward", self.forward, placement),
            Kind.I: _per_stage("backward_input", self.backward_input, placement),
            Kind.W: _per_stage("backward_weight", self.backward_weight, placement),
        }
        for kind, values in prices.items():
            if min(values) < 0:
                raise CostsError(f"cost of {kind} is negative: {min(values)}")
        prices[Kind.B] = tuple(i + w for i, w in zip(prices[Kind.I], prices[Kind.W], strict=True))
        return prices

    def link_seconds(self, source: int, destination: int) -> float:
        """Seconds a message from one device to another takes; 0 within a device."""
        if source == destination:
            return 0.0
        if isinstance(self.p2p, Mapping):
            try:
                return self.p2p[(source, destination)]
            except KeyError:
                raise CostsError(f"no p2p cost for the link {source} -> {destination}") from None
        return self.p2p

    def memory_unit(self, placement: Placement) -> float:
        """What one of ``memory_changes`` counts: a stage's share in activation units by default, else 1.

        Sums of whole stages stay exact this way, where sums of ``1/model_stages`` would not.
        """
        return 1 / placement.model_stages if self.memory is None else 1.0

    def memory_changes(self, placement: Placement) -> dict[Kind, tuple[float, ...]]:
        """Change of held memory after every kind of action, one value per stage, in ``memory_unit``.

        Kinds left out change nothing.
        """
        if self.memory is None:
            takes, gives_back = (1,) * placement.num_stages, (-1,) * placement.num_stages
            return {Kind.F: takes, Kind.W: gives_back, Kind.B: gives_back}
        changes = {
            Kind(kind): _per_stage(f"memory of {kind}", values, placement) for kind, values in self.memory.items()
        }
        if Kind.B not in changes:
            zero = (0.0,) * placement.num_stages
            changes[Kind.B] = tuple(
                i + w for i, w in zip(changes.get(Kind.I, zero), changes.get(Kind.W, zero), strict=True)
            )
        return changes

    @classmethod
    def from_json(cls, path: str | Path) -> Costs:
        """Read ``{"forward": ..., "backward_input": ..., "backward_weight": ..., "p2p": ..., "memory": {"F": ...}}``.

        Raises:
            CostsError: the file is missing, is not JSON, or has unknown keys or values of the wrong type.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CostsError(f"cannot read costs from {path}: {error}") from error
        known = ("forward", "backward_input", "backward_weight", "p2p", "memory")
        if not isinstance(data, dict) or set(data) - set(known):
            raise CostsError(f"{path}: costs are one JSON object with the keys {', '.join(known)}")
        try:
            memory = data.pop("memory", None)
            if memory is not None:
                memory = {Kind(kind): _number_or_tuple(values) for kind, values in memory.items()}
            return cls(**{key: _number_or_tuple(value) for key, value in data.items()}, memory=memory)
        except (AttributeError, TypeError, ValueError) as error:
            raise CostsError(f"{path}: {error}") from error


def _number_or_tuple(value: object) -> PerStage:
    return tuple(float(v) for v in value) if isinstance(value, list) else float(value)  # type: ignore[arg-type]


def _per_stage(name: str, price: PerStage, placement: Placement) -> tuple[float, ...]:
    if isinstance(price, Sequence):
        if len(price) == placement.model_stages:
            return tuple(price) * placement.replicas
        if len(price) != placement.num_stages:
            raise CostsError(
                f"{name} has {len(price)} values but the placement has {placement.num_stages} stages; "
                "give one value per stage, or a single number for a device's whole share"
            )
        return tuple(price)
    return tuple(price * placement.replicas / len(placement.stages[device]) for device in placement.devices)
