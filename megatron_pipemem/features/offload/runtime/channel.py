"""Define what carries bytes between a device and its host, as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch


class Direction(Enum):
    OUT = "offload"
    IN = "reload"


@dataclass(frozen=True, eq=False)
class Copy:
    """One copy of a contiguous run of bytes; both tensors are one-dimensional ``uint8`` of one size."""

    destination: torch.Tensor
    source: torch.Tensor


class Ticket(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Return whether the transfer has ended. Never blocks."""


class CopyChannel[Own: Ticket](Protocol):
    """One device's way to its host, with a lane for each direction. Transfers of a direction run in the order started.

    It takes the tickets that it gave, and no others.
    """

    device: torch.device

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory that this channel can copy from and to: ``uint8``, one-dimensional."""

    def start(self, direction: Direction, copies: Sequence[Copy], after: Sequence[Own]) -> Own:
        """Start transfers, to run when everything computed so far and every transfer in ``after`` has ended.

        The call does not wait. Both tensors of every pair must be kept until ``join``.

        Args:
            direction: to the host or back.
            copies: runs of bytes with their source and destination.
            after: tickets of earlier transfers.
        """

    def join(self, ticket: Own, on_stall: Callable[[float], None]) -> None:
        """Order all later computing after the transfer. From here on its tensors may be read, and its source freed.

        ``on_stall`` gets the seconds that computing stood still, at once or when the stalls are read.

        Raises:
            OffloadError: the transfer failed.
        """

    def use(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a reloaded tensor until the current stream has used it, whichever stream that is."""

    def take_stalls(self) -> Callable[[], None]:
        """Return a function that reports the stalls so far that are not yet reported. Calling it may wait for the device."""

    def forget_stalls(self) -> None:
        """Never report the stalls that are not yet reported."""

    def close(self) -> None:
        """Give up threads and streams."""
