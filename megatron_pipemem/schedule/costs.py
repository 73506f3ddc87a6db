"""Price actions: seconds of a device, seconds on a link, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_pipemem.errors import CostsError
from megatron_pipemem.reading import read_json
from megatron_pipemem.schedule.action import COMPUTE, FURTHER, VOCABULARY, WHOLE_STAGE, Kind
from megatron_pipemem.schedule.costs_file import costs_arguments
from megatron_pipemem.schedule.display import changed_fields
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import (
    Channel,
    MicrobatchWeights,
    PartPrices,
    Price,
    checked_changes,
    checked_seconds,
    per_slice,
    price,
    stage_memory,
)
from megatron_pipemem.schedule.vocabulary import VocabularyCosts, per_device

_PRICED: tuple[tuple[str, Kind], ...] = (
    ("forward", Kind.F),
    ("backward_input", Kind.I),
    ("backward_weight", Kind.W),
    ("recompute", Kind.R),
    ("recompute_selective", Kind.RS),
    ("copy_sum", Kind.REDUCE_REPLICAS),
)

SELECTIVE_BYTES = 13 / 32
"""Of what F keeps that RS makes again: 14 of 34 bytes per element (arXiv 2503.01328), as a fraction whose sums are exact."""


@dataclass(frozen=True)
class Costs:
    """Prices of the actions of one microbatch.

    A single number is the price of one *device's whole share* of the model: a stage on a device with ``v`` chunks costs
    ``1/v`` of it, so makespans of different placements are comparable. A device of a bidirectional pipeline has its share
    of every replica, and each at the full price: it does either for a part of the microbatches only. A sequence holds one
    price per stage, or one per stage of a replica when all replicas cost the same. Where a microbatch is cut into ``n``
    sequence slices, each costs ``1/n`` of it; or a sequence holds one price per stage and slice, stage by stage.
    ``PartPrices`` are those of a model's layers, embedding and head: they price the stages of every placement.

    Args:
        forward: seconds of F.
        backward_input: seconds of I.
        backward_weight: seconds of W. B costs I + W.
        p2p: seconds of one message between two devices; one number, or ``{(source, destination): seconds}``.
        memory: by how much each kind of action changes what its device holds, per kind one number or one per stage.
            Default: activation units, where a stage's forward takes ``1/model_stages`` (the whole model's activations of one
            microbatch are 1.0) and its W or B gives them back. With bytes instead, I gives a part back already; B defaults to
            I + W, and W to B - I. A single number is a device's whole share here too. What a forward keeps although its
            stage is recomputed stands under F, what R takes under R; a stage that is not recomputed takes both with F, and
            without R, recomputed stages keep nothing (activation units: always). RS takes what a selectively recomputed
            forward leaves out, by default ``SELECTIVE_BYTES``. WAIT_OFFLOAD gives back what may leave the device, by default
            all that a forward takes (what RS makes never leaves); RELOAD takes it again. Of the passes and collectives of
            vocabulary parallelism, which change nothing by default, it is every device's, and a sequence has one per device.
        recompute: seconds of R; ``None``: those of F.
        recompute_selective: seconds of RS; ``None``: ``SELECTIVE_SECONDS`` of those of F.
        channel: how fast activations move to the host; ``None``: at once.
        vocabulary: seconds of the passes and collectives of vocabulary parallelism. Default: the whole head takes as long
            as one device's share of the layers (their average), the embedding and the collectives take no time.
        copy_sum: seconds to add up the gradients of a stage over the devices that hold its replicas. Once per step, it is
            priced like the actions of a microbatch.
        microbatch: by how much every microbatch takes longer, and holds more, than these prices say; ``None``: they are
            alike. What prices a stage (``seconds``, ``memory_changes``) leaves it out; ``simulate`` puts it in.
        slice_units: how sequence slices divide the activation units of a stage, where they do not evenly: by how much each
            kind of action changes what is held, one value per slice, in what F of the whole microbatch keeps. As
            ``slice_costs`` makes it.
        further: seconds of kinds that none of these names (``register_kind``); by default those of ``KindSpec.shares``.
    """

    forward: Price = 1.0
    backward_input: Price = 1.0
    backward_weight: Price = 1.0
    p2p: float | Mapping[tuple[int, int], float] = 0.0
    memory: Mapping[Kind, Price] | None = field(default=None)
    recompute: Price | None = None
    channel: Channel | None = None
    vocabulary: VocabularyCosts | None = None
    copy_sum: Price = 0.0
    recompute_selective: Price | None = None
    microbatch: MicrobatchWeights | None = None
    slice_units: Mapping[Kind, tuple[float, ...]] | None = None
    further: Mapping[Kind, Price] | None = None

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        for name, kind in _PRICED:
            if (given := getattr(self, name)) is not None or getattr(Costs, name) is not None:
                object.__setattr__(self, name, checked_seconds(name, given, kind))
        links = self.p2p if isinstance(self.p2p, Mapping) else {(): self.p2p}
        for link, seconds in links.items():
            price(".".join(filter(None, ("p2p", "-".join(map(str, link))))), seconds, several=False)
        if self.memory is not None:
            checked = {Kind(kind): checked_changes(f"memory.{kind}", change) for kind, change in self.memory.items()}
            object.__setattr__(self, "memory", checked)
        if self.further is not None:
            if strange := [kind for kind in self.further if kind not in FURTHER]:
                raise CostsError("unknown-key", f"further has {strange[0]}; give kinds that register_kind has added")
            own = {Kind(kind): checked_seconds(f"further.{kind}", each) for kind, each in self.further.items()}
            object.__setattr__(self, "further", own)

    @property
    def part_prices(self) -> PartPrices | None:
        """Return the seconds of F, I and W of every part of the model; ``None`` if the prices are those of stages."""
        found = [each for each in self._passes if isinstance(each, PartPrices)]
        return sum(found[1:], found[0]) if len(found) == len(self._passes) else None

    @property
    def are_single(self) -> bool:
        """Return whether F, I and W are one number each."""
        return not any(isinstance(price, Sequence | PartPrices) for price in self._passes)

    @property
    def _passes(self) -> tuple[Price, ...]:
        return self.forward, self.backward_input, self.backward_weight

    def with_parts(self, **changes: Any) -> Costs:
        """Return the costs with other fields of their ``PartPrices``, as in ``with_parts(cut=(4, 3))``."""

        def changed(price: Any) -> Any:
            return replace(price, **changes) if isinstance(price, PartPrices) else price

        prices = {name: changed(getattr(self, name)) for name, _ in _PRICED}
        memory = None if self.memory is None else {kind: changed(each) for kind, each in self.memory.items()}
        channel = self.channel and replace(
            self.channel, offload=changed(self.channel.offload), reload=changed(self.channel.reload)
        )
        further = None if self.further is None else {kind: changed(each) for kind, each in self.further.items()}
        return replace(self, **prices, memory=memory, channel=channel, further=further)

    def without_ends(self) -> Costs:
        """Return the costs without the seconds of embedding and head, if they are prices of parts."""
        passes = {name: getattr(self, name) for name in ("forward", "backward_input", "backward_weight")}
        alone: dict[str, Any] = {
            name: replace(price, first=price.middle, last=price.middle)
            for name, price in passes.items()
            if isinstance(price, PartPrices)
        }
        return replace(self, **alone)

    def with_cut_head(self, head: float, num_devices: int, barriers: int) -> Costs:
        """Return the costs with embedding and head cut over all devices.

        Args:
            head: seconds of forward and backward of the whole head.
            num_devices: pipeline ranks.
            barriers: of the passes, 1 or 2.
        """
        embedding = 0.0 if self.part_prices is None else self.part_prices.embedding
        vocabulary = VocabularyCosts.of_head(head, num_devices, barriers, embedding=embedding)
        return replace(self.without_ends(), vocabulary=vocabulary)

    def require_alike(self, who: str) -> None:
        """Raise a CostsError in the name of whoever cannot take microbatches that have weights."""
        if self.microbatch is not None:
            raise CostsError(
                "costs-mismatch",
                f"{who} takes the prices of microbatches that are alike, and these costs weigh them; leave the key microbatch "
                "out, and plan every step for its own with plan_step, or in a run with --pipemem-microbatch-costs",
            )

    def seconds(self, placement: Placement, slices: int = 1) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of every compute kind, one value per stage and slice, stage by stage.

        Raises:
            CostsError: a sequence has not one value per stage, or per stage and slice.
        """
        given = [(name, kind, getattr(self, name)) for name, kind in _PRICED if kind is not Kind.REDUCE_REPLICAS]
        prices: dict[Kind, tuple[float, ...]] = {
            kind: per_slice(name, each, placement, slices) for name, kind, each in given if each is not None
        }
        for kind, each in (self.further or {}).items():
            prices[kind] = per_slice(f"further.{kind}", each, placement, slices)
        for kind in COMPUTE:
            if kind not in prices and (shares := kind.spec.shares):
                parts = [[share * each for each in prices[Kind(other)]] for other, share in shares.items()]
                prices[kind] = tuple(map(sum, zip(*parts, strict=True)))
        return prices

    def replica_reduction_seconds(self, placement: Placement) -> tuple[float, ...]:
        """Return the seconds of REDUCE_REPLICAS, one value per stage.

        Raises:
            CostsError: a sequence has not one value per stage.
        """
        return per_slice("copy_sum", self.copy_sum, placement, 1)

    def vocabulary_costs(self, placement: Placement, barriers: int, slices: int = 1) -> VocabularyCosts:
        """Return the costs of a schedule with vocabulary parallelism.

        Args:
            placement: which device holds which stage.
            barriers: of the schedule, 1 or 2.
            slices: sequence slices of a microbatch.
        """
        if self.vocabulary is not None:
            return self.vocabulary
        seconds = self.seconds(placement, slices)
        model = sum(map(sum, (seconds[Kind.F], seconds[Kind.B]))) / placement.replicas
        return VocabularyCosts.of_head(model / placement.num_devices, placement.num_devices, barriers)

    def link_seconds(self, source: int, destination: int) -> float:
        """Return the seconds that a message from one device to another takes; 0 within a device."""
        if source == destination:
            return 0.0
        if isinstance(self.p2p, Mapping):
            try:
                return self.p2p[(source, destination)]
            except KeyError:
                raise CostsError("missing-option", f"no p2p cost for the link {source} -> {destination}") from None
        return self.p2p

    def memory_unit(self, placement: Placement, slices: int = 1) -> float:
        """Return what one of ``memory_changes`` counts: a stage's share in activation units by default, or that of one of
        its slices, else 1.

        Sums of whole stages stay exact this way, where sums of ``1/model_stages`` would not.
        """
        return 1 / placement.model_stages / slices if self.memory is None else 1.0

    def transfer_seconds(
        self, placement: Placement, recomputed: Mapping[int, Kind] = MappingProxyType({}), slices: int = 1
    ) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of OFFLOAD and RELOAD, one value per stage and slice; 0 without a channel.

        Args:
            placement: which device holds which stage.
            recomputed: as in ``memory_changes``.
            slices: sequence slices of a microbatch.
        """
        if self.channel is None:
            return dict.fromkeys((Kind.OFFLOAD, Kind.RELOAD), (0.0,) * (placement.num_stages * slices))
        seconds = self.channel.seconds(placement, slices)
        if Kind.RS not in recomputed.values():
            return seconds
        whole = self.memory_changes(placement, slices=slices)[Kind.WAIT_OFFLOAD]
        less = self.memory_changes(placement, recomputed, slices)[Kind.WAIT_OFFLOAD]
        shares = [b / a if a else 1.0 for a, b in zip(whole, less, strict=True)]
        return {kind: tuple(s * share for s, share in zip(each, shares, strict=True)) for kind, each in seconds.items()}

    def memory_changes(
        self, placement: Placement, recomputed: Mapping[int, Kind] = MappingProxyType({}), slices: int = 1
    ) -> dict[Kind, tuple[float, ...]]:
        """Change of held memory after every kind of action, one value per stage and slice, stage by stage, in
        ``memory_unit``.

        Kinds left out change nothing.

        Args:
            placement: which device holds which stage.
            recomputed: the stages whose forwards are run again, and whether by R or by RS.
            slices: sequence slices of a microbatch.
        """
        changes = self._changes(placement, slices)
        again, in_part = changes.pop(Kind.R, None), changes.pop(Kind.RS, None)
        nothing: tuple[float, ...] = (0,) * (placement.num_stages * slices)
        forwards = changes.get(Kind.F, nothing)
        if again is None:
            kept, again = nothing, forwards
        else:
            kept, forwards = forwards, tuple(f + r for f, r in zip(forwards, again, strict=True))
        if Kind.WAIT_OFFLOAD not in changes:
            changes[Kind.WAIT_OFFLOAD] = tuple(-takes for takes in forwards)
        changes.setdefault(Kind.RELOAD, tuple(-gives_back for gives_back in changes[Kind.WAIT_OFFLOAD]))
        if in_part is None:
            in_part = tuple(SELECTIVE_BYTES * takes for takes in forwards)
        kinds = [recomputed.get(stage) for stage in range(placement.num_stages) for _ in range(slices)]
        if Kind.R in kinds:
            changes[Kind.R] = again
        if Kind.RS in kinds:
            changes[Kind.RS] = in_part
            selective = [part if kind is Kind.RS else 0 for kind, part in zip(kinds, in_part, strict=True)]
            for kind, sign in ((Kind.WAIT_OFFLOAD, 1), (Kind.RELOAD, -1)):
                # Not below nothing: what RS makes may be more than what may leave.
                changes[kind] = tuple(
                    sign * min(0, sign * whole + part) for whole, part in zip(changes[kind], selective, strict=True)
                )
            forwards = tuple(takes - part for takes, part in zip(forwards, selective, strict=True))
        forwards = tuple(kept[at] if kind is Kind.R else forwards[at] for at, kind in enumerate(kinds))
        return {**changes, Kind.F: forwards}

    def host_changes(
        self, placement: Placement, recomputed: Mapping[int, Kind] = MappingProxyType({}), slices: int = 1
    ) -> dict[Kind, tuple[float, ...]]:
        """Change of the host memory that a device uses, as ``memory_changes``.

        Args:
            placement: which device holds which stage.
            recomputed: as in ``memory_changes``.
            slices: sequence slices of a microbatch.
        """
        leaves = self.memory_changes(placement, recomputed, slices)[Kind.WAIT_OFFLOAD]
        return {Kind.OFFLOAD: tuple(-change for change in leaves), Kind.WAIT_RELOAD: leaves}

    def _changes(self, placement: Placement, slices: int) -> dict[Kind, tuple[float, ...]]:
        """Return what ``memory`` says, or activation units, with the one of B and W that it leaves out."""
        places = placement.num_stages * slices
        if self.memory is None and self.slice_units is not None:
            units = self.slice_units.items()
            if slices != (found := len(self.slice_units[Kind.F])):
                what = f"activation units of {found} slices, and microbatches are cut into {slices}"
                raise CostsError("costs-mismatch", f"the costs have {what}; price the slices again with slice_costs")
            # One of ``memory_unit`` is what an even slice would keep.
            return {kind: tuple(part * slices for part in parts) * placement.num_stages for kind, parts in units}
        if self.memory is None:
            return {kind: (kind.spec.units,) * places for kind in Kind if kind.spec.units}
        changes = {}
        for kind, values in stage_memory(self.memory, placement).items():
            name = f"memory of {kind}"
            if kind in VOCABULARY:
                changes[kind] = per_device(name, values, placement.num_devices, slices)
            elif kind in WHOLE_STAGE:  # no slice has a share of it
                whole = per_slice(name, values, placement, 1)
                changes[kind] = tuple(change for change in whole for _ in range(slices))
            else:
                changes[kind] = per_slice(name, values, placement, slices)
        zero = (0.0,) * places
        at_input = changes.get(Kind.I, zero)
        if Kind.B not in changes:
            changes[Kind.B] = tuple(i + w for i, w in zip(at_input, changes.get(Kind.W, zero), strict=True))
        elif Kind.W not in changes:
            changes[Kind.W] = tuple(b - i for b, i in zip(changes[Kind.B], at_input, strict=True))
        return changes

    @classmethod
    def from_json(cls, path: str | Path) -> Costs:
        """Read ``{"forward": ..., "backward_input": ..., "backward_weight": ..., "p2p": ..., "memory": {"F": ...}}``.

        ``p2p`` may be one per link, ``{"0-1": ..., "1-0": ...}``. ``recompute``, ``recompute_selective`` and
        ``copy_sum`` are prices like the others, and ``channel`` is
        ``{"offload": ..., "reload": ..., "duplex": false, "switches": [[0, 1]]}``, with ``{"ratio": k}`` in place of the
        first two where ``k`` is all that is known (``Channel.of_ratio``). ``vocabulary`` holds
        ``{"score": ..., "gradient": ...}``, the fields of ``VocabularyCosts``, and ``microbatch``
        ``{"time": [...], "memory": [...], "kinds": {"W": [...]}}``, those of ``MicrobatchWeights``; ``further`` holds
        ``{"NOISE": ...}``. What ``profile`` says is
        for readers of ``pipemem profile``. ``parts`` takes the place of F, I, W and memory: what every layer, embedding and
        head take, as ``pipemem profile --output`` writes it. ``layers_per_stage`` says how they are cut into stages.

        Raises:
            CostsError: the file is missing, is not JSON, or has unknown keys or values of the wrong type; it names the key.
        """
        data = read_json(path, "costs", CostsError)
        try:
            prices = costs_arguments(data)
            channel = prices.pop("channel", None)
            for name, of in (("vocabulary", VocabularyCosts), ("microbatch", MicrobatchWeights)):
                if name in prices:
                    prices[name] = of(**prices[name])
            costs = cls(**prices)
            if channel is None:
                return costs
            if "ratio" in channel:
                return replace(costs, channel=Channel.of_ratio(costs=costs, **channel))
            return replace(costs, channel=Channel(**channel))
        except CostsError as error:
            raise CostsError(error.code, f"{path}: {error}") from error
