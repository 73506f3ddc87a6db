"""Take the layers of a model out of a measured step, and price other ways to cut the model by them.

Stages in between have layers alone, so they say what a layer takes; what the first and the last stage take beyond their layers
is embedding and head, which stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.measured import MeasuredStep
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import PartPrices, even_layers

_PIECES = 12
"""Of a stage whose layers nobody told: it can be cut in two, three or four."""
_PARTS = {
    Kind.F: (Kind.F, Kind.RECV_F, Kind.SEND_F),
    Kind.I: (Kind.I, Kind.RECV_I, Kind.SEND_I),
    Kind.W: (Kind.W, Kind.REDUCE_GRAD),
}
"""The bytes of a message belong to the action that needs it or makes it."""


def _parts_of(values: Sequence[float], counts: Sequence[int]) -> PartPrices:
    """Share out what stages take among their layers and the two ends of the model."""
    each = [value / count for value, count in zip(values, counts, strict=True) if count]
    inner = [value / count for value, count in zip(values[1:-1], counts[1:-1], strict=True) if count]
    usual = median(inner) if inner else min(each, key=abs, default=0.0)
    prices, ends = [], [0.0, 0.0]
    for stage, (value, count) in enumerate(zip(values, counts, strict=True)):
        is_end = stage in (0, len(values) - 1)
        price = min(usual, value / count, key=abs) if is_end and count else usual if is_end else value / max(count, 1)
        prices += [price] * count
        if is_end:
            ends[stage > 0] = value - price * count
    return PartPrices(tuple(prices), first=ends[0], last=ends[1])


@dataclass(frozen=True)
class MeasuredLayers:
    """What the layers of a run take, and what its two ends take."""

    counts: tuple[int, ...]  # layers of every stage of the run; pieces where its layers are not known
    are_known: bool  # whether they are layers
    seconds: Mapping[Kind, PartPrices]  # of F, I and W
    memory: Mapping[Kind, PartPrices] | None  # bytes that F takes and I and W give back; ``None`` where nobody counted

    @classmethod
    def of_step(
        cls,
        step: MeasuredStep,
        layers: Sequence[int] | None = None,
        memory: Mapping[Kind, Sequence[float]] | None = None,
    ) -> MeasuredLayers:
        """Read the layers of a step. ``memory``: by how many bytes every kind of action changes what its device holds, per
        stage.
        """
        stages = step.schedule.placement.model_stages
        counts = tuple(layers or (_PIECES,) * step.schedule.num_stages)[:stages]
        of_stages = step.of_stages()
        seconds = {kind: _parts_of(of_stages[kind][:stages], counts) for kind in _PARTS}
        held = None
        if memory is not None:
            changes = stage_memory(memory)
            held = {kind: _parts_of(changes[kind][:stages], counts) for kind in _PARTS}
        return cls(counts, layers is not None, seconds, held)

    @property
    def head(self) -> float:
        """Seconds of the head's forward and backward."""
        return sum(shared.last for shared in self.seconds.values())

    @property
    def embedding(self) -> float:
        """Seconds of the embedding's forward and backward."""
        return sum(shared.first for shared in self.seconds.values())

    def costs(self, counts: Sequence[int], p2p: Mapping[tuple[int, int], float], with_ends: bool = True) -> Costs:
        """Return the costs of another cut. ``with_ends``: embedding and head are parts of the first and the last stage."""

        def of_stages(parts: PartPrices) -> tuple[float, ...]:
            return (parts if with_ends else replace(parts, first=0.0, last=0.0)).of_stages(counts)

        seconds = {kind: of_stages(parts) for kind, parts in self.seconds.items()}
        held = None if self.memory is None else {kind: of_stages(parts) for kind, parts in self.memory.items()}
        return Costs(seconds[Kind.F], seconds[Kind.I], seconds[Kind.W], p2p, held)

    def cut(self, placement: Placement, with_ends: bool = True) -> tuple[int, ...]:
        """Return the layers of every stage for another placement: balanced by what was measured, or even pieces."""
        total = sum(self.counts)
        if not self.are_known:
            return even_layers(total, placement.num_stages)
        from megatron_pipemem.planner.partition import Loads, partition  # numpy takes a while to load

        per_layer = zip(*(shared.layers for shared in self.seconds.values()), strict=True)
        ends = (self.embedding, self.head) if with_ends else (0.0, 0.0)
        return partition(Loads([sum(each) for each in per_layer], *ends), placement)


def stage_memory(memory: Mapping[Kind, Sequence[float]], slices: int = 1) -> dict[Kind, tuple[float, ...]]:
    """Return what F takes and what I and W give back, messages included. Where the backward ran fused, W gives all of it.
    Of several slices, W gives what B did: a slice's B frees what others have taken.
    """
    stages = len(next(iter(memory.values())))
    none = (0.0,) * stages
    found: dict[Kind, tuple[float, ...]] = {
        kind: tuple(map(sum, zip(*(memory.get(part, none) for part in parts), strict=True)))
        for kind, parts in _PARTS.items()
    }
    fused = memory.get(Kind.B, none)
    found[Kind.W] = tuple(
        (-(taken + at_input) if slices == 1 else whole) if whole and not given else given
        for taken, at_input, given, whole in zip(found[Kind.F], found[Kind.I], found[Kind.W], fused, strict=True)
    )
    return found
