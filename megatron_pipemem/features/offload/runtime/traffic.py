"""Keep the transfers of one device that are under way, and report what they moved, held and waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime.channel import Copy, CopyChannel, Direction, Ticket
from megatron_pipemem.features.offload.runtime.saved import SavedStorage

_log = logging.getLogger(__name__)


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


@dataclass(eq=False)
class StartedTransfer:
    """Hold copies under way, and their tensors until computing has been ordered after them.

    The memory of a tensor freed earlier could go to the next kernel while it is still being read.

    Args:
        key: of the forward whose activations move.
        direction: to the host or back.
        ticket: of the channel.
        copies: runs of bytes with their source and destination.
        moving: storages that move.
    """

    key: Hashable
    direction: Direction
    ticket: Ticket
    copies: tuple[Copy, ...]
    moving: WeakSet[SavedStorage]

    @property
    def nbytes(self) -> int:
        return sum(copy.source.numel() for copy in self.copies)


class Traffic:
    """The transfers of one device.

    Args:
        channel: carries them.

    Attributes:
        transfers: that nobody has joined.
        bytes_out: moved to the host since the step began.
        bytes_in: moved back.
        stalls: every time that computing stood still for one.
    """

    def __init__(self, channel: CopyChannel[Any]):
        self._channel = channel
        self.transfers: list[StartedTransfer] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Count anew."""
        self._channel.forget_stalls()
        self.bytes_out = self.bytes_in = 0
        self.stalls: list[Stall] = []

    def take_stalls(self) -> Callable[[], tuple[Stall, ...]]:
        """Return a function that reads the stalls of the step so far. Calling it may wait for the device."""
        read, stalls = self._channel.take_stalls(), self.stalls
        return lambda: (read(), tuple(stalls))[1]

    def start(
        self,
        key: Hashable,
        direction: Direction,
        copies: Sequence[Copy],
        after: Sequence[Ticket],
        moving: Sequence[SavedStorage],
    ) -> Ticket | None:
        """Start a transfer, and return what tells its end; ``None`` if there is nothing to move.

        Args:
            key: of the forward whose activations move.
            direction: to the host or back.
            copies: runs of bytes.
            after: tickets of transfers that must have ended before.
            moving: the storages that the runs belong to.
        """
        if not copies:
            return None
        ticket = self._channel.start(direction, copies, after)
        transfer = StartedTransfer(key, direction, ticket, tuple(copies), WeakSet(moving))
        for storage in moving:
            storage.transfer = transfer
        self.transfers.append(transfer)
        if direction is Direction.OUT:
            self.bytes_out += transfer.nbytes
        else:
            self.bytes_in += transfer.nbytes
        return ticket

    def join(self, transfer: StartedTransfer) -> list[SavedStorage]:
        """Order computing after the transfer, and return the storages that no later transfer has taken over.

        Raises:
            OffloadError: the copy failed.
        """
        nbytes = transfer.nbytes

        def stalled(seconds: float) -> None:
            self.stalls.append(Stall(transfer.key, transfer.direction, nbytes, seconds))

        self._channel.join(transfer.ticket, stalled)
        self.transfers.remove(transfer)
        arrived = [storage for storage in transfer.moving if storage.transfer is transfer]
        transfer.copies = ()
        for storage in arrived:
            storage.transfer = None
        return arrived

    def drop(self) -> None:
        """Wait for all transfers, and forget them, whatever has become of them."""
        transfers, self.transfers = self.transfers, []
        for transfer in transfers:
            try:
                self._channel.join(transfer.ticket, lambda seconds: None)
            except OffloadError:
                _log.warning(
                    "an unfinished %s of %s was dropped", transfer.direction.value, transfer.key, exc_info=True
                )
