"""Report what a step's offload moved, held and waited for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from megatron_pipemem.runtime.offload.channel import Direction


@dataclass(frozen=True)
class Stall:
    """Say how long computing stood still for one transfer.

    Args:
        key: of the forward whose activations moved.
        direction: to the host or back.
        nbytes: of the transfer.
        seconds: of standing still.
    """

    key: Hashable
    direction: Direction
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class OffloadStatistics:
    """Hold bytes and seconds since the step began.

    Args:
        bytes_out: moved to the host.
        bytes_in: moved back.
        device_peak_bytes: the most that captured storages took on the device at once, reloads included from the moment
            their memory is allocated. What deferred weight gradients keep longer than the graph is not in it.
        host_peak_bytes: payload, from its offload until its reload was waited for.
        host_reserved_bytes: host memory behind it. It stays for later steps, and may be less, because a block is lent
            again while it is being read.
        held_elsewhere_bytes: moved in vain: somebody else still held the storage when the engine let go of it.
        stayed_bytes: saved tensors that were never candidates, per reason.
        stalls: every time that computing stood still.
    """

    bytes_out: int
    bytes_in: int
    device_peak_bytes: int
    host_peak_bytes: int
    host_reserved_bytes: int
    held_elsewhere_bytes: int
    stayed_bytes: Mapping[str, int]
    stalls: tuple[Stall, ...]

    @property
    def stall_seconds(self) -> float:
        return sum(stall.seconds for stall in self.stalls)
