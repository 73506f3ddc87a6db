"""Price actions: seconds of a device, seconds on a link, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from megatron_pipemem.errors import CostsError
from megatron_pipemem.reading import read_json
from megatron_pipemem.schedule.core.action import VOCABULARY, WHOLE_STAGE, Kind
from megatron_pipemem.schedule.core.brief import changed_fields
from megatron_pipemem.schedule.core.microbatches import MicrobatchWeights
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.prices import Several, listed, numbers, price, shared
from megatron_pipemem.schedule.core.vocabulary_costs import VocabularyCosts, per_device
from megatron_pipemem.schedule.text.costs_file import costs_arguments

_PRICED: tuple[tuple[str, Kind], ...] = (
    ("forward", Kind.F),
    ("backward_input", Kind.I),
    ("backward_weight", Kind.W),
    ("recompute", Kind.R),
    ("recompute_selective", Kind.RS),
    ("copy_sum", Kind.REDUCE_REPLICAS),
)

SELECTIVE_SECONDS = 0.05
"""Of F that RS takes where nothing better is known: norms and GELU move about 24 bytes per element of the hidden state
(16-bit), F computes 24 times its width: about 150 / h at 300 TFLOP/s and 2 TB/s."""
SELECTIVE_BYTES = 13 / 32
"""Of what F keeps that RS makes again: 14 of 34 bytes per element (arXiv 2503.01328), as a fraction whose sums are exact."""


@dataclass(frozen=True)
class Channel:
    """Say what it takes to move activations between a device and the host.

    Every device has one channel, which serves its transfers one at a time, in the order in which they are issued.

    Args:
        offload: seconds to copy activations to the host; as the prices of ``Costs``, one number for a device's whole share
            of the model, one per stage, or one per stage and slice.
        reload: seconds to copy them back; ``None``: as long.
        duplex: one transfer of each direction at a time, rather than one at all.
        switches: devices that share one channel, for example behind one PCIe switch.
    """

    offload: Several
    reload: Several | None = None
    duplex: bool = False
    switches: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        for name in ("offload", "reload"):
            given = self.offload if getattr(self, name) is None else getattr(self, name)
            object.__setattr__(self, name, price(f"channel.{name}", given))
        switches = tuple(tuple(map(int, devices)) for devices in self.switches)
        members = [device for devices in switches for device in devices]
        if len(members) != len(set(members)):
            raise CostsError(f"switches {switches} name a device twice; a device is behind one switch")
        object.__setattr__(self, "switches", switches)

    @classmethod
    def of_ratio(
        cls, ratio: float, costs: Costs, duplex: bool = False, switches: tuple[tuple[int, ...], ...] = ()
    ) -> Channel:
        """Return the channel on which activations take ``ratio`` times as long to the host and back as their F, I and
        W.

        Args:
            ratio: seconds of activations to the host and back over those of their F, I and W.
            costs: of F, I and W.
            duplex: whether the channel carries both directions at once.
            switches: devices that share a channel.

        Raises:
            CostsError: the ratio is no finite number of at least 0, or the costs mix numbers with sequences.
        """
        price("channel.ratio", ratio, several=False)
        prices = (costs.forward, costs.backward_input, costs.backward_weight)
        if len({len(price) if isinstance(price, tuple) else None for price in prices}) > 1:
            raise CostsError("an offload ratio needs F, I and W all as one number, or all with one per stage")
        sums = tuple(ratio / 2 * sum(each) for each in zip(*map(listed, prices), strict=True))
        return cls(sums if isinstance(costs.forward, tuple) else sums[0], duplex=duplex, switches=switches)

    def seconds(self, placement: Placement, slices: int = 1) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of a copy in either direction, one value per stage and slice, stage by stage.

        Raises:
            CostsError: a sequence has not one value per stage, or per stage and slice, or a switch has devices that are not
                there.
        """
        if any(not 0 <= device < placement.num_devices for devices in self.switches for device in devices):
            raise CostsError(
                f"switches {self.switches} name devices beyond 0 to {placement.num_devices - 1}; leave those out"
            )
        reload = self.offload if self.reload is None else self.reload
        return {
            Kind.OFFLOAD: _per_slice("offload", self.offload, placement, slices),
            Kind.RELOAD: _per_slice("reload", reload, placement, slices),
        }

    def lane_of(self, device: int, kind: Kind) -> tuple[int, bool]:
        """Return what serves copies of a direction one after another: whose channel, and which half of a duplex one."""
        owner = next((members[0] for members in self.switches if device in members), device)
        return owner, self.duplex and kind is Kind.RELOAD

    @property
    def is_shared(self) -> bool:
        return any(len(devices) > 1 for devices in self.switches)


@dataclass(frozen=True)
class Costs:
    """Prices of the actions of one microbatch.

    A single number is the price of one *device's whole share* of the model: a stage on a device with ``v`` chunks costs
    ``1/v`` of it, so makespans of different placements are comparable. A device of a bidirectional pipeline has its share
    of every replica, and each at the full price: it does either for a part of the microbatches only. A sequence holds one
    price per stage, or one per stage of a replica when all replicas cost the same. Where a microbatch is cut into ``n``
    sequence slices, each costs ``1/n`` of it; or a sequence holds one price per stage and slice, stage by stage.

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
    microbatch: MicrobatchWeights | None = None
    slice_units: Mapping[Kind, tuple[float, ...]] | None = None

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        for name, kind in _PRICED:
            if (given := getattr(self, name)) is not None or getattr(Costs, name) is not None:
                object.__setattr__(self, name, price(name, given, kind))
        links = self.p2p if isinstance(self.p2p, Mapping) else {(): self.p2p}
        for link, seconds in links.items():
            price(".".join(filter(None, ("p2p", "-".join(map(str, link))))), seconds, several=False)
        if self.memory is not None:
            checked = {Kind(kind): numbers(f"memory.{kind}", change) for kind, change in self.memory.items()}
            object.__setattr__(self, "memory", checked)

    def require_alike(self, who: str) -> None:
        """Raise a CostsError in the name of whoever cannot take microbatches that have weights."""
        if self.microbatch is not None:
            raise CostsError(
                f"{who} takes the prices of microbatches that are alike, and these costs weigh them; leave the key microbatch "
                "out, and plan every step for its own with plan_step, or in a run with --pipemem-microbatch-costs"
            )

    def seconds(self, placement: Placement, slices: int = 1) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of every compute kind, one value per stage and slice, stage by stage.

        Raises:
            CostsError: a sequence has not one value per stage, or per stage and slice.
        """
        given = [(name, kind, getattr(self, name)) for name, kind in _PRICED if kind is not Kind.REDUCE_REPLICAS]
        prices: dict[Kind, tuple[float, ...]] = {
            kind: _per_slice(name, each, placement, slices) for name, kind, each in given if each is not None
        }
        prices.setdefault(Kind.R, prices[Kind.F])
        prices.setdefault(Kind.RS, tuple(SELECTIVE_SECONDS * forward for forward in prices[Kind.F]))
        prices[Kind.B] = tuple(i + w for i, w in zip(prices[Kind.I], prices[Kind.W], strict=True))
        return prices

    def replica_reduction_seconds(self, placement: Placement) -> tuple[float, ...]:
        """Return the seconds of REDUCE_REPLICAS, one value per stage.

        Raises:
            CostsError: a sequence has not one value per stage.
        """
        return _per_slice("copy_sum", self.copy_sum, placement, 1)

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
                raise CostsError(f"no p2p cost for the link {source} -> {destination}") from None
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
                raise CostsError(f"the costs have {what}; price the slices again with slice_costs")
            # One of ``memory_unit`` is what an even slice would keep.
            return {kind: tuple(part * slices for part in parts) * placement.num_stages for kind, parts in units}
        if self.memory is None:
            return {Kind.F: (1,) * places, Kind.W: (-1,) * places, Kind.B: (-1,) * places}
        changes = {}
        for kind, values in self.memory.items():
            name = f"memory of {kind}"
            if kind in VOCABULARY:
                changes[kind] = per_device(name, values, placement.num_devices, slices)
            elif kind in WHOLE_STAGE:  # no slice has a share of it
                whole = _per_slice(name, values, placement, 1)
                changes[kind] = tuple(change for change in whole for _ in range(slices))
            else:
                changes[kind] = _per_slice(name, values, placement, slices)
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
        ``{"time": [...], "memory": [...], "kinds": {"W": [...]}}``, those of ``MicrobatchWeights``. What ``profile`` says is
        for readers of ``pipemem profile``.

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
            raise CostsError(f"{path}: {error}") from error


def _per_slice(name: str, price: Several, placement: Placement, slices: int) -> tuple[float, ...]:
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
        f"{name} has {len(price)} values but the placement has {stages} stages; "
        f"give one value per stage{cut}, or a single number for a device's whole share"
    )
