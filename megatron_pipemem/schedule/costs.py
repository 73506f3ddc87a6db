"""Costs: the prices of all actions and messages, and the memory that actions take or give back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from megatron_pipemem.errors import CostsError
from megatron_pipemem.files import read_json
from megatron_pipemem.schedule.action import COMPUTE, FURTHER, VOCABULARY, WHOLE_STAGE, Kind
from megatron_pipemem.schedule.costs_file import costs_arguments
from megatron_pipemem.schedule.display import changed_fields
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import (
    Channel,
    MicrobatchFactors,
    Several,
    are_floats,
    numbers,
    per_part,
    price,
)
from megatron_pipemem.schedule.units import WHOLE, Units
from megatron_pipemem.schedule.vocabulary import VocabularyCosts, per_device

_PRICED: tuple[tuple[str, Kind], ...] = (
    ("forward", Kind.F),
    ("backward_input", Kind.I),
    ("backward_weight", Kind.W),
    ("recompute", Kind.R),
    ("recompute_selective", Kind.RS),
    ("copy_sum", Kind.REDUCE_REPLICAS),
)
_EXCHANGES = (("forward_exchange", Kind.F), ("backward_exchange", Kind.I))

SELECTIVE_BYTES = 13 / 32
"""The bytes that RS recomputes, as a share of those that F keeps: 14 of 34 per element (arXiv 2503.01328), rounded so
that sums are exact."""


@dataclass(frozen=True)
class Costs:
    """Prices of the actions of one microbatch.

    A single number is the price of one *device's whole share* of the model. A stage on a device with ``v`` chunks
    costs ``1/v`` of it, so makespans of different placements are comparable. A device of a bidirectional pipeline has
    a share of every replica, each at the full price, because a microbatch runs through one replica only.

    A sequence holds one price per stage, or one per stage of a replica if all replicas cost the same. If microbatches
    run in ``n`` parts, each part costs ``1/n``. A sequence may also hold one price per stage and part, stage by
    stage. ``part_costs`` has the costs of a model's layers, embedding and head, for any placement.

    Args:
        forward: seconds of F.
        backward_input: seconds of I.
        backward_weight: seconds of W. B costs I + W.
        p2p: seconds of one message between two devices; one number, or ``{(source, destination): seconds}``.
        memory: per kind, the change of the memory that the device holds; ``None`` for activation units. See below.
        recompute: seconds of R; ``None`` for those of F.
        recompute_selective: seconds of RS; ``None`` for ``SELECTIVE_SECONDS`` of those of F.
        channel: seconds of copies between device and host; ``None`` if they take no time.
        vocabulary: seconds of vocabulary passes and collectives. By default the whole head takes as long as the
            average device's share of the layers, and the rest takes no time.
        copy_sum: seconds to sum the gradients of a stage over its replicas. It runs once per step, and is priced like
            an action of a microbatch.
        microbatch: factors of time and memory per microbatch; ``None`` if microbatches are alike. ``simulate``
            applies them, ``seconds`` and ``memory_changes`` do not.
        part_units: per kind, the change of memory by every part, as a share of the bytes that F of a whole
            microbatch keeps; ``None`` if parts share them evenly.
        further: seconds of kinds added by ``register_kind``; by default those of ``KindSpec.shares``.
        forward_exchange: the part of ``forward`` in which the experts' tokens travel between ranks, and in which the
            device could compute something else. Only pairs use it (``Schedule.pairs``).
        backward_exchange: the same part of ``backward_input``. B has it too.
        head_forward: the part of ``forward`` that is the LM head's, where that was added to the last stage. It is not
            counted in the unit of times.

    Memory in activation units: a stage's forward takes ``1/model_stages``, and its W or B gives it back. In bytes,
    one number per kind is a device's whole share, and a sequence has one value per stage:

    - I changes nothing by default. B defaults to I + W, and W to B - I.
    - F of a stage with R takes the value of F, and R that of R. F of any other stage takes both. Without a value for
      R, stages with R keep nothing, as they do in activation units.
    - RS takes the bytes that F of a stage with RS leaves out, by default ``SELECTIVE_BYTES`` of what F takes without
      recomputation.
    - WAIT_OFFLOAD gives back the bytes that may leave the device, by default all that F takes except those of RS.
      RELOAD takes them again.
    - Vocabulary passes and collectives change nothing by default. Their values are per device.
    """

    forward: Several = 1.0
    backward_input: Several = 1.0
    backward_weight: Several = 1.0
    p2p: float | Mapping[tuple[int, int], float] = 0.0
    memory: Mapping[Kind, Several] | None = field(default=None)
    recompute: Several | None = None
    channel: Channel | None = None
    vocabulary: VocabularyCosts | None = None
    copy_sum: Several = 0.0
    recompute_selective: Several | None = None
    microbatch: MicrobatchFactors | None = None
    part_units: Mapping[Kind, tuple[float, ...]] | None = None
    further: Mapping[Kind, Several] | None = None
    forward_exchange: Several = 0.0
    backward_exchange: Several = 0.0
    head_forward: float = 0.0

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        for name, kind in (*_PRICED, *_EXCHANGES):
            if (value := getattr(self, name)) is not None or getattr(Costs, name) is not None:
                object.__setattr__(self, name, price(name, value, kind))
        links = self.p2p if isinstance(self.p2p, Mapping) else {(): self.p2p}
        unchecked = {} if are_floats(links.values()) and min(links.values()) >= 0 else links
        for link, seconds in unchecked.items():
            price(".".join(filter(None, ("p2p", "-".join(map(str, link))))), seconds, several=False)
        if self.memory is not None:
            checked = {Kind(kind): numbers(f"memory.{kind}", change) for kind, change in self.memory.items()}
            object.__setattr__(self, "memory", checked)
        if self.further is not None:
            if unknown := [kind for kind in self.further if kind not in FURTHER]:
                raise CostsError(
                    "unknown-key",
                    f"the key further has the kind {unknown[0]}, which register_kind has not added; leave the kind out, or "
                    "register it",
                )
            own = {
                Kind(kind): price(f"further.{kind}", seconds_of_kind) for kind, seconds_of_kind in self.further.items()
            }
            object.__setattr__(self, "further", own)

    def of(self, placement: Placement) -> Costs:
        """Return the costs of the stages of a placement. Costs of a model's parts, which are for any, override it."""
        return self

    @property
    def are_single(self) -> bool:
        """Return whether F, I and W have one price each, and not one per stage or part of the model."""
        return not any(
            isinstance(price, Sequence) for price in (self.forward, self.backward_input, self.backward_weight)
        )

    @property
    def have_exchanges(self) -> bool:
        """Return whether the costs say how long the tokens of experts travel, even if it is 0 on each stage."""
        return any(getattr(self, name) != 0 for name, _ in _EXCHANGES)

    def with_exchanges(self, share: float) -> Costs:
        """Return the costs with a time in which the tokens of experts travel: ``share`` of every F and I of layers."""
        forward, backward = (_scaled(seconds, share) for seconds in (self.forward, self.backward_input))
        return replace(self, forward_exchange=forward, backward_exchange=backward)

    def with_scaled_memory(self, factor: float) -> Costs:
        """Return the costs with all changes of memory multiplied by a number."""
        if self.memory is None:
            return self
        return replace(self, memory={kind: _scaled(change, factor) for kind, change in self.memory.items()})

    def require_alike(self, who: str) -> None:
        """Raise a CostsError if microbatches have factors. ``who`` begins the message."""
        if self.microbatch is not None:
            raise CostsError(
                "costs-mismatch",
                f"{who} needs costs whose microbatches are alike, and these costs have factors of microbatches; leave "
                "the key microbatch out, and plan each step with plan_step, or in a run with "
                "--pipemem-microbatch-costs",
            )

    def seconds(self, placement: Placement, units: Units = WHOLE) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of the compute kinds, one value per stage and part, stage by stage.

        Vocabulary passes, and kinds without a price or ``KindSpec.shares``, are left out.

        Raises:
            CostsError: a sequence does not have one value per stage, or per stage and part.
        """
        costs = self.of(placement)
        fields = [(name, kind, getattr(costs, name)) for name, kind in _PRICED if kind is not Kind.REDUCE_REPLICAS]
        prices: dict[Kind, tuple[float, ...]] = {
            kind: per_part(name, seconds, placement, units) for name, kind, seconds in fields if seconds is not None
        }
        for kind, seconds in (self.further or {}).items():
            prices[kind] = per_part(f"further.{kind}", seconds, placement, units)
        for kind in COMPUTE:
            if kind not in prices and (shares := kind.spec.shares):
                parts = [[share * seconds for seconds in prices[Kind(other)]] for other, share in shares.items()]
                prices[kind] = tuple(map(sum, zip(*parts, strict=True)))
        return prices

    def exchange_seconds(self, placement: Placement) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of F, I and B in which only the experts' tokens travel, one value per stage.

        Raises:
            CostsError: a sequence does not have one value per stage.
        """
        costs = self.of(placement)
        exchanges = {kind: per_part(name, getattr(costs, name), placement) for name, kind in _EXCHANGES}
        return {**exchanges, Kind.B: exchanges[Kind.I]}

    def with_hidden_weights(self, placement: Placement) -> Costs:
        """Return costs in which W takes the seconds that its B adds to I if the B runs alone in a schedule with pairs.

        Of the two exchanges of a layer, the one between experts and attention hides W of the experts, about half of W.
        """
        weights, apart = self.seconds(placement)[Kind.W], self.exchange_seconds(placement)[Kind.I]
        shown = tuple(total - min(total, exchange) / 2 for total, exchange in zip(weights, apart, strict=True))
        return replace(self.of(placement), backward_weight=shown)

    def exchange_shares(self, placement: Placement) -> tuple[float, ...]:
        """Return the share of F in which only the experts' tokens travel, one value per stage."""
        forward, apart = self.seconds(placement)[Kind.F], self.exchange_seconds(placement)[Kind.F]
        return tuple(part / seconds if seconds else 0.0 for part, seconds in zip(apart, forward, strict=True))

    def of_computing(self, placement: Placement) -> Costs:
        """Return the costs without the seconds in which only the experts' tokens travel, with one value per stage.

        Any order takes at least as long in pairs by these costs as it takes without pairs by the result.
        """
        seconds, apart = self.seconds(placement), self.exchange_seconds(placement)
        forward, inputs = (
            tuple(max(0.0, total - exchange) for total, exchange in zip(seconds[kind], apart[kind], strict=True))
            for kind in (Kind.F, Kind.I)
        )
        costs = self.of(placement)
        return replace(costs, forward=forward, backward_input=inputs, forward_exchange=0.0, backward_exchange=0.0)

    def replica_reduction_seconds(self, placement: Placement) -> tuple[float, ...]:
        """Return the seconds of REDUCE_REPLICAS, one value per stage.

        Raises:
            CostsError: a sequence does not have one value per stage.
        """
        return per_part("copy_sum", self.copy_sum, placement)

    def vocabulary_costs(self, placement: Placement, barriers: int, units: Units = WHOLE) -> VocabularyCosts:
        """Return the costs of vocabulary passes and collectives: the field ``vocabulary``, or its default.

        Args:
            placement: the placement of the schedule.
            barriers: vocabulary barriers of the schedule, 1 or 2.
            units: the units of a step. Only the parts of a microbatch matter.
        """
        if self.vocabulary is not None:
            return self.vocabulary
        seconds = self.seconds(placement, units)
        model = sum(map(sum, (seconds[Kind.F], seconds[Kind.B]))) / placement.replicas
        return VocabularyCosts.of_head(model / placement.num_devices, placement.num_devices, barriers)

    def link_seconds(self, source: int, destination: int) -> float:
        """Return the seconds of a message with a whole microbatch from one device to another; 0 within a device.

        Raises:
            CostsError: ``p2p`` has seconds per link, and lacks this one.
        """
        if source == destination:
            return 0.0
        if isinstance(self.p2p, Mapping):
            try:
                return self.p2p[(source, destination)]
            except KeyError:
                raise CostsError(
                    "missing-option",
                    f"p2p of the costs has no seconds for messages from device {source} to device {destination}; add "
                    f"the key {source}-{destination}",
                ) from None
        return self.p2p

    def memory_unit(self, placement: Placement, units: Units = WHOLE) -> float:
        """Return the size of one unit of ``memory_changes``: one stage's or part's activation units, or 1 byte.

        Memory in whole stages adds up exactly. Sums of floats such as ``1/model_stages`` would not.
        """
        return 1 / placement.model_stages / units.parts if self.memory is None else 1.0

    def transfer_seconds(
        self, placement: Placement, recomputed: Mapping[int, Kind] = MappingProxyType({}), units: Units = WHOLE
    ) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of OFFLOAD and RELOAD, one value per stage and part; 0 without a channel.

        Args:
            placement: the placement of the schedule.
            recomputed: as in ``memory_changes``.
            units: the units of a step. Only the parts of a microbatch matter.
        """
        if self.channel is None:
            return dict.fromkeys((Kind.OFFLOAD, Kind.RELOAD), (0.0,) * (placement.num_stages * units.parts))
        passes = self.seconds(placement, units)
        seconds = self.channel.seconds(placement, [passes[kind] for kind in (Kind.F, Kind.I, Kind.W)], units)
        if Kind.RS not in recomputed.values():
            return seconds
        full = self.memory_changes(placement, units=units)[Kind.WAIT_OFFLOAD]
        partial = self.memory_changes(placement, recomputed, units)[Kind.WAIT_OFFLOAD]
        shares = [b / a if a else 1.0 for a, b in zip(full, partial, strict=True)]
        return {
            kind: tuple(s * share for s, share in zip(transfers, shares, strict=True))
            for kind, transfers in seconds.items()
        }

    def memory_changes(
        self, placement: Placement, recomputed: Mapping[int, Kind] = MappingProxyType({}), units: Units = WHOLE
    ) -> dict[Kind, tuple[float, ...]]:
        """Return by how much every kind of action changes the memory of its device, in units of ``memory_unit``.

        Every kind has one value per stage and part, stage by stage. Kinds that are left out change nothing.

        Args:
            placement: the placement of the schedule.
            recomputed: the recomputed stages, each with R or RS.
            units: the units of a step. Only the parts of a microbatch matter.
        """
        changes = self._changes(placement, units)
        recomputes, partial_recomputes = changes.pop(Kind.R, None), changes.pop(Kind.RS, None)
        nothing: tuple[float, ...] = (0,) * (placement.num_stages * units.parts)
        forwards = changes.get(Kind.F, nothing)
        if recomputes is None:
            kept, recomputes = nothing, forwards
        else:
            kept, forwards = forwards, tuple(f + r for f, r in zip(forwards, recomputes, strict=True))
        if Kind.WAIT_OFFLOAD not in changes:
            changes[Kind.WAIT_OFFLOAD] = tuple(-takes for takes in forwards)
        changes.setdefault(Kind.RELOAD, tuple(-gives_back for gives_back in changes[Kind.WAIT_OFFLOAD]))
        if partial_recomputes is None:
            partial_recomputes = tuple(SELECTIVE_BYTES * takes for takes in forwards)
        kinds = [recomputed.get(stage) for stage in range(placement.num_stages) for _ in range(units.parts)]
        if Kind.R in kinds:
            changes[Kind.R] = recomputes
        if Kind.RS in kinds:
            changes[Kind.RS] = partial_recomputes
            selective = [part if kind is Kind.RS else 0 for kind, part in zip(kinds, partial_recomputes, strict=True)]
            for kind, sign in ((Kind.WAIT_OFFLOAD, 1), (Kind.RELOAD, -1)):
                # At least nothing: RS may make more than may leave the device.
                changes[kind] = tuple(
                    sign * min(0, sign * full + part) for full, part in zip(changes[kind], selective, strict=True)
                )
            forwards = tuple(takes - part for takes, part in zip(forwards, selective, strict=True))
        forwards = tuple(kept[at] if kind is Kind.R else forwards[at] for at, kind in enumerate(kinds))
        return {**changes, Kind.F: forwards}

    def host_changes(
        self, placement: Placement, recomputed: Mapping[int, Kind] = MappingProxyType({}), units: Units = WHOLE
    ) -> dict[Kind, tuple[float, ...]]:
        """Return by how much OFFLOAD and WAIT_RELOAD change a device's host memory, in units of ``memory_unit``.

        Both kinds have one value per stage and part, stage by stage.

        Args:
            placement: the placement of the schedule.
            recomputed: as in ``memory_changes``.
            units: the units of a step. Only the parts of a microbatch matter.
        """
        leaves = self.memory_changes(placement, recomputed, units)[Kind.WAIT_OFFLOAD]
        return {Kind.OFFLOAD: tuple(-change for change in leaves), Kind.WAIT_RELOAD: leaves}

    def _changes(self, placement: Placement, units: Units) -> dict[Kind, tuple[float, ...]]:
        """Return the changes in ``memory``, one value per stage and part. W or B is derived if ``memory`` lacks it."""
        places, parts = placement.num_stages * units.parts, units.parts
        if self.memory is None and self.part_units is not None:
            if parts != (priced := len(self.part_units[Kind.F])):
                given_units = f"activation units for {priced} parts of a microbatch, but the schedule has {parts}"
                raise CostsError("costs-mismatch", f"the costs have {given_units}; price the parts for this schedule")
            # An even part keeps one ``memory_unit``.
            shares = self.part_units.items()
            return {kind: tuple(share * parts for share in of_kind) * placement.num_stages for kind, of_kind in shares}
        memory = self.of(placement).memory
        if memory is None:
            return {kind: (kind.spec.units,) * places for kind in Kind if kind.spec.units}
        changes = {}
        for kind, values in memory.items():
            name = f"memory of {kind}"
            if kind in VOCABULARY:
                changes[kind] = per_device(name, values, placement.num_devices, units)
            elif kind in WHOLE_STAGE:  # parts do not share it
                per_stage = per_part(name, values, placement)
                changes[kind] = tuple(change for change in per_stage for _ in range(units.parts))
            else:
                changes[kind] = per_part(name, values, placement, units)
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

        Further keys:

        - ``p2p`` may have one price per link, ``{"0-1": ..., "1-0": ...}``.
        - ``recompute``, ``recompute_selective``, ``copy_sum``, ``forward_exchange`` and ``backward_exchange`` are
          prices like the others.
        - ``channel`` is ``{"offload": ..., "reload": ..., "duplex": false, "switches": [[0, 1]]}``. ``{"ratio": k}``
          replaces the first two.
        - ``vocabulary`` has the fields of ``VocabularyCosts``: ``{"score": ..., "gradient": ...}``.
        - ``microbatch`` has the fields of ``MicrobatchFactors``, as in ``{"time": [...], "memory": [...]}`` with
          ``"kinds": {"W": [...]}``.
        - ``further`` has the seconds of kinds that ``register_kind`` has added: ``{"NOISE": ...}``.
        - ``profile`` is the record that ``pipemem profile`` writes. It is ignored here.

        ``part_costs.read_costs`` reads the files of ``pipemem profile`` too, which have the key ``parts``.

        Raises:
            CostsError: the file is missing, is not JSON, or has unknown keys or values of the wrong type. The message
                has the key.
        """
        data = read_json(path, "costs", CostsError)
        try:
            return cls.of_data(data)
        except CostsError as error:
            raise CostsError(error.code, f"{path}: {error}") from error

    @classmethod
    def of_data(cls, data: object, **others: Any) -> Self:
        """Return the costs in the parsed JSON of a file. ``others`` are arguments of the class that it does not have."""
        prices = costs_arguments(data)
        for name, of in (("vocabulary", VocabularyCosts), ("microbatch", MicrobatchFactors), ("channel", Channel)):
            if name in prices:
                prices[name] = of(**prices[name])
        return cls(**prices, **others)


def _scaled(price: Several, factor: float) -> Several:
    return tuple(value * factor for value in price) if isinstance(price, Sequence) else price * factor
