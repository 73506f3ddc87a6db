"""Price the transfers of activations between a device and its host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.brief import changed_fields
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import listed, price
from megatron_pipemem.schedule.stage_prices import PartPrices, Price, checked_seconds, per_slice


class PassPrices(Protocol):
    """What ``Costs`` say of F, I and W."""

    @property
    def forward(self) -> Price: ...

    @property
    def backward_input(self) -> Price: ...

    @property
    def backward_weight(self) -> Price: ...


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

    offload: Price
    reload: Price | None = None
    duplex: bool = False
    switches: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        for name in ("offload", "reload"):
            given = self.offload if getattr(self, name) is None else getattr(self, name)
            object.__setattr__(self, name, checked_seconds(f"channel.{name}", given))
        switches = tuple(tuple(map(int, devices)) for devices in self.switches)
        members = [device for devices in switches for device in devices]
        if len(members) != len(set(members)):
            raise CostsError("bad-switches", f"switches {switches} name a device twice; a device is behind one switch")
        object.__setattr__(self, "switches", switches)

    @classmethod
    def of_ratio(
        cls, ratio: float, costs: PassPrices, duplex: bool = False, switches: tuple[tuple[int, ...], ...] = ()
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
        given = (costs.forward, costs.backward_input, costs.backward_weight)
        parts = [price for price in given if isinstance(price, PartPrices)]
        prices = [price for price in given if not isinstance(price, PartPrices)]
        if not prices:
            return cls(sum(parts[1:], parts[0]) * (ratio / 2), duplex=duplex, switches=switches)
        if parts or len({len(price) if isinstance(price, tuple) else None for price in prices}) > 1:
            raise CostsError(
                "costs-mismatch", "an offload ratio needs F, I and W all as one number, or all with one per stage"
            )
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
                "bad-switches",
                f"switches {self.switches} name devices beyond 0 to {placement.num_devices - 1}; leave those out",
            )
        reload = self.offload if self.reload is None else self.reload
        return {
            Kind.OFFLOAD: per_slice("offload", self.offload, placement, slices),
            Kind.RELOAD: per_slice("reload", reload, placement, slices),
        }

    def lane_of(self, device: int, kind: Kind) -> tuple[int, bool]:
        """Return what serves copies of a direction one after another: whose channel, and which half of a duplex one."""
        owner = next((members[0] for members in self.switches if device in members), device)
        return owner, self.duplex and kind is Kind.RELOAD

    @property
    def is_shared(self) -> bool:
        return any(len(devices) > 1 for devices in self.switches)
