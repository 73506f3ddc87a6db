"""Describe machines: what ``configs/clusters/NAME.yaml`` says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron_pipemem.config.values import MOST_DEVICES, Amount, AmountOrZero, Devices, Limited, Part
from megatron_pipemem.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class Link(Limited):
    """A connection, each way.

    Args:
        gb_per_s: 10^9 bytes per second that a large message reaches.
        latency_us: microseconds before the first byte arrives.
    """

    gb_per_s: Amount
    latency_us: AmountOrZero = 10.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_us * 1e-6 + nbytes / (self.gb_per_s * 1e9)


@dataclass(frozen=True)
class HostChannel(Limited):
    """Copies between a device and its host's memory.

    Args:
        d2h_gb_per_s: 10^9 bytes per second to the host, alone.
        h2d_gb_per_s: back, alone.
        duplex: what each direction keeps of that while both run: 1 for independent engines, 0.5 for a shared channel.
    """

    d2h_gb_per_s: Amount
    h2d_gb_per_s: Amount
    duplex: Part = 1.0

    def round_trip_seconds(self, nbytes: float, sharing: int = 1) -> float:
        """Return the seconds that bytes take to the host and back.

        Args:
            nbytes: of each device.
            sharing: devices that use the channel. A lone one carries one direction at a time; several take turns, so that one
                sends while another receives.
        """
        out, back = nbytes / (self.d2h_gb_per_s * 1e9), nbytes / (self.h2d_gb_per_s * 1e9)
        return out + back if sharing == 1 else sharing * max(out, back) / self.duplex


@dataclass(frozen=True)
class Cluster(Limited):
    """Nodes of equal devices.

    Args:
        nodes: of the cluster.
        devices_per_node: GPUs, or CPU ranks.
        memory_gib: of one device.
        reserved_gib: of that, what the driver, the context and communication libraries take.
        tflops: dense bf16 peak of one device, 10^12 per second.
        fp8_tflops: dense peak of 8-bit matrix products; ``None`` if the device has none.
        achieved: the part of ``tflops``, and of ``fp8_tflops``, that a transformer layer's matrix products reach.
        memory_gb_per_s: of a device's own memory, for what is bound by it (optimizer, norms).
        intra_node: between two devices of a node.
        inter_node: between two devices of different nodes, all devices of a node sending at once.
        host: between a device and its host.
        host_memory_gib: of one node, for all its devices.
        switches: groups of devices of a node, by index, that share one PCIe switch and so one channel to the host. A device in
            no group has a channel of its own.
        backend: what Megatron communicates through.
        sources: of these numbers.
    """

    config_folder: ClassVar[str] = "clusters"

    memory_gib: Amount
    tflops: Amount
    intra_node: Link
    inter_node: Link
    host: HostChannel
    host_memory_gib: Amount
    nodes: Devices = 1
    devices_per_node: Devices = 8
    reserved_gib: float = 0.0
    fp8_tflops: Amount | None = None
    achieved: Part = 0.6
    memory_gb_per_s: Amount = 1000.0
    switches: tuple[tuple[int, ...], ...] = ()
    backend: Literal["nccl", "gloo"] = "nccl"
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(
                "too-large", f"makes {self.num_devices:,} devices; give at most {MOST_DEVICES:,}", key="nodes"
            )
        if not 0 <= self.reserved_gib < self.memory_gib:
            raise ConfigError(
                "bad-number", f"is {self.reserved_gib}; give at least 0 and less than memory_gib", key="reserved_gib"
            )
        seen = [device for group in self.switches for device in group]
        if len(seen) != len(set(seen)) or not set(seen) <= set(range(self.devices_per_node)):
            raise ConfigError(
                "bad-switches",
                f"name every device of a node at most once, from 0 to {self.devices_per_node - 1}",
                key="switches",
            )

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def flops(self) -> float:
        """Per second that one device achieves."""
        return self.tflops * 1e12 * self.achieved

    @property
    def fp8_flops(self) -> float:
        """Per second that one device achieves with 8-bit numbers.

        Raises:
            ConfigError: the cluster does not say.
        """
        if self.fp8_tflops is None:
            raise ConfigError(
                "missing-option",
                "is not given, and the run multiplies 8-bit numbers; give it",
                key="cluster.fp8_tflops",
            )
        return self.fp8_tflops * 1e12 * self.achieved

    @property
    def memory_bytes(self) -> float:
        """Bytes of one device that are free for the model."""
        return (self.memory_gib - self.reserved_gib) * GIB

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory per device, shared evenly."""
        return self.host_memory_gib * GIB / self.devices_per_node

    def sharing(self, device: int) -> int:
        """Return how many devices use the channel to the host that device ``device`` of a node uses, itself among them."""
        return next((len(group) for group in self.switches if device in group), 1)

    def link(self, devices: int, stride: int = 1) -> Link:
        """Return the slowest link of a group of ``devices`` ranks that lie ``stride`` apart, from the first of a node
        on.
        """
        return self.intra_node if (devices - 1) * stride < self.devices_per_node else self.inter_node
