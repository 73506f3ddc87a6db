"""How fast a channel is, measured once at the start of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from megatron_pipemem.runtime.offload.channel import Channel, Copy, Direction

_BYTES = 1 << 23
_REPETITIONS = 3
_DUPLEX_FACTOR = 1.5  # one direction at a time would take 2


@dataclass(frozen=True)
class HostLink:
    """A device's way to its host.

    Args:
        out: bytes per second of a transfer to the host, alone.
        back: bytes per second of a transfer to the device, alone.
        duplex: whether both ways at once take hardly longer than the slower one.
    """

    out: float
    back: float
    duplex: bool


def measure_host_link(channel: Channel, nbytes: int = _BYTES) -> HostLink:
    """Time transfers of ``nbytes`` each way and both ways at once.

    Whoever shares a link should measure at the same time: then contention is in the result.

    Raises:
        OffloadError: the channel fails.
    """
    pairs = {
        direction: [torch.zeros(nbytes, dtype=torch.uint8, device=channel.device), channel.host_memory(nbytes).zero_()]
        for direction in Direction
    }
    copies = {
        Direction.OUT: Copy(pairs[Direction.OUT][1], pairs[Direction.OUT][0]),
        Direction.IN: Copy(pairs[Direction.IN][0], pairs[Direction.IN][1]),
    }

    def seconds(*directions: Direction) -> float:
        taken = []
        for _ in range(1 + _REPETITIONS):
            _synchronise(channel)
            begin = time.perf_counter()
            tickets = [channel.start(direction, [copies[direction]], ()) for direction in directions]
            for ticket in tickets:
                channel.join(ticket, lambda stalled: None)
            _synchronise(channel)
            taken.append(time.perf_counter() - begin)
        return median(taken[1:])  # the first one also pays for lazily mapped memory

    out, back, both = seconds(Direction.OUT), seconds(Direction.IN), seconds(*Direction)
    channel.forget_stalls()
    return HostLink(nbytes / out, nbytes / back, both < _DUPLEX_FACTOR * max(out, back))


def _synchronise(channel: Channel) -> None:
    if channel.device.type == "cuda":
        torch.cuda.synchronize(channel.device)
