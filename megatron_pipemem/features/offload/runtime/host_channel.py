"""Run transfers by threads, for devices that are host memory themselves: order, bytes and stalls without a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime.channel import Copy, Direction

_LOOK_AFTER_SECONDS = 0.05
"""How often a waiting thread looks whether the thread it waits for is still alive."""


@dataclass(eq=False)
class HostTicket:
    """Stand for a transfer that a thread runs.

    Args:
        direction: to the host or back.
        thread: that runs it.
        copies: runs of bytes with their source and destination.
        after: transfers that it waits for.
        ended: is set when it has ended, well or not.
        error: why it failed, or ``None``.
    """

    direction: Direction
    thread: threading.Thread
    copies: Sequence[Copy]
    after: Sequence[HostTicket]
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def done(self) -> bool:
        return self.ended.is_set() and self.error is None

    def wait(self) -> None:
        """Block until the transfer has ended, whatever became of its thread.

        Raises:
            OffloadError: it failed, or its thread is gone.
        """
        while not self.ended.wait(_LOOK_AFTER_SECONDS):
            if not self.thread.is_alive() and not self.ended.is_set():
                raise _lost(self.direction, None)
        if self.error is not None:
            raise _lost(self.direction, self.error) from self.error


class ThreadChannel:
    """One thread per direction.

    Args:
        bandwidth: bytes per second of either direction; ``None`` for as fast as memory is.
    """

    device = torch.device("cpu")

    def __init__(self, bandwidth: float | None = None):
        self._bandwidth = bandwidth
        self._queues: dict[Direction, SimpleQueue[HostTicket | None]] = {lane: SimpleQueue() for lane in Direction}
        self._threads = {
            lane: threading.Thread(target=self._serve, args=(lane,), name=f"pipemem-{lane.value}", daemon=True)
            for lane in Direction
        }
        for thread in self._threads.values():
            thread.start()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def start(self, direction: Direction, copies: Sequence[Copy], after: Sequence[HostTicket]) -> HostTicket:
        """Start transfers in a thread, as ``CopyChannel.start`` says.

        Args:
            direction: to the host or back.
            copies: runs of bytes with their source and destination.
            after: tickets of earlier transfers.
        """
        ticket = HostTicket(direction, self._threads[direction], tuple(copies), tuple(after))
        self._queues[direction].put(ticket)
        return ticket

    def join(self, ticket: HostTicket, on_stall: Callable[[float], None]) -> None:
        if ticket.done():
            return
        begin = time.perf_counter()
        ticket.wait()
        on_stall(time.perf_counter() - begin)

    def use(self, tensor: torch.Tensor) -> None:
        """Do nothing: a host has no streams."""

    def take_stalls(self) -> Callable[[], None]:
        """Return a function that does nothing: no stall is ever left, because ``join`` blocks, and reports at once."""
        return lambda: None

    def forget_stalls(self) -> None:
        """Forget the stalls so far."""

    def close(self) -> None:
        for lane, thread in self._threads.items():
            self._queues[lane].put(None)
            thread.join()

    def pace(self, direction: Direction, nbytes: int) -> None:
        """Take the time the link would. The bytes move afterwards, at the last possible moment."""
        if self._bandwidth is not None:
            time.sleep(nbytes / self._bandwidth)

    def _serve(self, direction: Direction) -> None:
        failure: BaseException | None = None
        while (ticket := self._queues[direction].get()) is not None:
            if failure is None:
                try:
                    self._carry(ticket)
                except BaseException as error:
                    failure = error.with_traceback(None)  # its frames would keep the tensors
            # After one failure nothing that follows is in order any more.
            ticket.error = failure
            ticket.copies = ticket.after = ()
            ticket.ended.set()

    def _carry(self, ticket: HostTicket) -> None:
        for earlier in ticket.after:
            earlier.wait()
        self.pace(ticket.direction, sum(copy.source.numel() for copy in ticket.copies))
        for copy in ticket.copies:
            copy.destination.copy_(copy.source)


def _lost(direction: Direction, error: BaseException | None) -> OffloadError:
    reason = "the thread has ended" if error is None else f"{type(error).__name__}: {error}"
    return OffloadError(
        "offload-thread",
        f"the thread that carries every {direction.value} of activations failed ({reason}); "
        "this step cannot be saved: restart from the last checkpoint, without activation offload if it happens again",
    )
