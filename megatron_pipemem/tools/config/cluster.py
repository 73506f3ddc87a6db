"""Describe a cluster, as in ``clusters/NAME.yaml``: devices, memory, speed and links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.values import MOST_DEVICES, Amount, AmountOrZero, Devices, Limit, Limited, Part, refuse_if

GIB = 1 << 30
DEFAULT_CLUSTER = "h100-80g"
"""The name of the cluster that prices a model or a run whose devices are not known."""


@dataclass(frozen=True)
class Link(Limited):
    """A connection between two devices, which carries messages in both directions at once."""

    gb_per_s: Amount
    """10^9 bytes per second in each direction, for large messages."""
    latency_us: AmountOrZero = 10.0
    """Microseconds before the first byte arrives."""

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message of ``nbytes``."""
        return self.latency_us * 1e-6 + nbytes / (self.gb_per_s * 1e9)


@dataclass(frozen=True)
class HostChannel(Limited):
    """The bandwidths of copies between a device and host memory, in 10^9 bytes per second of one direction alone."""

    d2h_gb_per_s: Amount  # from the device to the host
    h2d_gb_per_s: Amount  # from the host to the device
    duplex: Part = 1.0
    """The share of its speed that a direction keeps while both run: 1 for independent copy engines, 0.5 for one shared
    channel.
    """

    def round_trip_seconds(self, nbytes: float, sharing: int = 1) -> float:
        """Return the seconds to copy ``nbytes`` of each of ``sharing`` devices over one channel to the host and back.

        One device alone copies in one direction at a time. Several devices take turns: one sends while another
        receives.
        """
        out, back = nbytes / (self.d2h_gb_per_s * 1e9), nbytes / (self.h2d_gb_per_s * 1e9)
        return out + back if sharing == 1 else sharing * max(out, back) / self.duplex


@dataclass(frozen=True)
class Cluster(Limited):
    """Nodes with equal devices. A device is a GPU, or a CPU rank."""

    config_folder: ClassVar[str] = "clusters"

    memory_gib: Amount  # memory of a device
    tflops: Amount  # peak of a device for dense bf16 matrix products
    intra_node: Link
    inter_node: Link  # between devices of two nodes, while all devices of a node send
    host: HostChannel
    host_memory_gib: Amount  # host memory of a node, which all of its devices share
    nodes: Devices = 1
    devices_per_node: Devices = 8
    # part of memory_gib that the driver, the context and communication libraries take, but for messages of the pipeline
    reserved_gib: float = 0.0
    fp8_tflops: Amount | None = None  # peak for dense 8-bit matrix products; None for a device without them
    achieved: Part = 0.6  # share of tflops and fp8_tflops that a transformer layer's matrix products reach
    memory_gb_per_s: Amount = 1000.0  # bandwidth of device memory, which limits optimizer and norms
    switches: tuple[tuple[int, ...], ...] = ()
    """Groups of a node's devices, by index, that share one PCIe switch and so one channel to the host. Other devices have a
    channel of their own."""
    backend: Literal["nccl", "gloo"] = "nccl"  # gloo means CPU ranks
    # CUDA_DEVICE_MAX_CONNECTIONS that Megatron demands of these devices with tensor or context parallelism; None if it does not
    max_connections: Annotated[int, Limit(1, 32)] | None = None
    sources: tuple[str, ...] = ()  # where these numbers come from

    def __post_init__(self) -> None:
        super().__post_init__()
        count, most = self.num_devices, self.devices_per_node - 1
        too_many = f"makes {count:,} devices; give at most {MOST_DEVICES:,}"
        refuse_if(count > MOST_DEVICES, "too-large", "nodes", too_many)
        outside = f"is {self.reserved_gib}; give at least 0 and less than memory_gib"
        refuse_if(not 0 <= self.reserved_gib < self.memory_gib, "bad-number", "reserved_gib", outside)
        named = [device for group in self.switches for device in group]
        twice = len(named) != len(set(named)) or not set(named) <= set(range(most + 1))
        refuse_if(twice, "bad-switches", "switches", f"name every device of a node at most once, from 0 to {most}")

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def sized(self, nodes: int, devices_per_node: int) -> Self:
        """Return the cluster with this number of nodes, of whose devices the first ones are used."""
        groups = (tuple(device for device in group if device < devices_per_node) for group in self.switches)
        switches = tuple(group for group in groups if group)
        return replace(self, nodes=nodes, devices_per_node=devices_per_node, switches=switches)

    @property
    def flops(self) -> float:
        """FLOPs per second that a device reaches in 16-bit matrix products."""
        return self.tflops * 1e12 * self.achieved

    @property
    def fp8_flops(self) -> float:
        """FLOPs per second that a device reaches in 8-bit products; a ConfigError if ``fp8_tflops`` is not given."""
        if self.fp8_tflops is None:
            missing = "is not given, and the run multiplies 8-bit numbers; give it"
            raise ConfigError("missing-option", missing, key="cluster.fp8_tflops")
        return self.fp8_tflops * 1e12 * self.achieved

    @property
    def memory_bytes(self) -> float:
        """Bytes of device memory that a run may use, without the reserved part."""
        return (self.memory_gib - self.reserved_gib) * GIB

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory for each device of a node, in equal parts."""
        return self.host_memory_gib * GIB / self.devices_per_node

    def sharing(self, device: int) -> int:
        """Return the number of devices of a node that share a channel to the host with ``device``, itself included."""
        return next((len(group) for group in self.switches if device in group), 1)

    def link(self, devices: int, stride: int = 1) -> Link:
        """Return the slowest link within a group of ``devices`` ranks whose numbers are ``stride`` apart.

        The first rank of the group is the first rank of a node.
        """
        return self.intra_node if (devices - 1) * stride < self.devices_per_node else self.inter_node

    def ring(self, devices: int, stride: int = 1) -> Link:
        """Return a ring through a group of ``devices`` ranks, whose numbers are ``stride`` apart, as one link.

        A byte of a broadcast or a reduction passes every hop once, so latencies add up. Between two nodes, a group uses the
        adapters of all its devices in a node, as NCCL's channels do. The first rank of the group is the first rank of a node.
        """
        in_node = min(devices, max(1, self.devices_per_node // stride))
        nodes = -(-devices // in_node)
        outside = nodes - 1
        inside = devices - 1 - outside
        latency = inside * self.intra_node.latency_us + outside * self.inter_node.latency_us
        speeds = [self.intra_node.gb_per_s] * (inside > 0) + [in_node * self.inter_node.gb_per_s] * (outside > 0)
        return Link(min(speeds, default=self.intra_node.gb_per_s), latency)
