"""Statistics of the copies of activations between a device and its host in a step: bytes and waiting times."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    OUT = "offload"
    IN = "reload"


@dataclass(frozen=True)
class Stall:
    """The time that the computation waited for one copy."""

    key: Hashable  # the forward whose activations moved
    direction: Direction
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class OffloadStatistics:
    """The bytes that one rank has copied since the step began, its peak bytes, and its waiting times."""

    bytes_out: int  # moved to the host
    bytes_in: int  # moved back
    # The peak of captured storages on the device. A reload counts from the allocation of its memory. Tensors that deferred
    # weight gradients keep longer than the graph are not counted.
    device_peak_bytes: int
    host_peak_bytes: int  # counted from each offload to the wait for its reload
    # Host memory of the pool, which keeps it for later steps. Less than the peak if blocks are reused while they are read.
    host_reserved_bytes: int
    held_elsewhere_bytes: int  # moved in vain, because other code still held the storage
    stayed_bytes: Mapping[str, int]  # saved tensors that cannot move, by reason
    stalls: tuple[Stall, ...]

    @property
    def stall_seconds(self) -> float:
        return sum(stall.seconds for stall in self.stalls)
