"""Copy bytes between device and host memory: on CUDA streams of a GPU, or in threads if the device is the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.runtime.trace import Direction


@dataclass(frozen=True, eq=False)
class Copy:
    """One copy of consecutive bytes. Both tensors are one-dimensional ``uint8`` of the same size."""

    destination: torch.Tensor
    source: torch.Tensor


class Ticket(Protocol):
    """The handle of a transfer that a channel has started."""

    def query(self) -> bool:
        """Return, without blocking, whether the transfer has ended successfully."""


class CopyChannel[Own: Ticket](Protocol):
    """A connection between a device and host memory. Copies to the host and copies back can run at once.

    Transfers in one direction run in the order in which they were started. Pass a channel only tickets that it has
    returned.
    """

    device: torch.device

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate one-dimensional ``uint8`` host memory that this channel can copy from and to."""

    def start(self, direction: Direction, copies: Sequence[Copy], after: Sequence[Own]) -> Own:
        """Start copies without blocking, and return their ticket.

        The copies run after the work now queued on the device's current stream and after the transfers in ``after``.
        Keep both tensors of every copy alive until ``join``.
        """

    def join(self, ticket: Own) -> Callable[[], float] | None:
        """Make later work of the device's current stream wait for the transfer. After this call, that work may read the
        destination, and the source may be freed.

        Return a function that returns the seconds that the work waited, and may wait for the device itself; ``None`` if
        the work did not wait, or if that is not measured. A failed transfer raises an OffloadError.
        """

    def use(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that was copied back until the current stream has used it."""

    def close(self) -> None:
        """End the channel's threads, or wait for its streams."""


class CudaChannel:
    """The copy channel of a GPU: one CUDA stream per direction, because GPUs can copy in both directions at once.

    The compute stream is the stream that is current in ``start``. The destinations of copies back are allocated on it.
    No ``record_stream`` is needed for tensors that only this stream uses, and the allocator can reuse their memory at
    once, as the memory plan assumes. A tensor that another stream uses does get ``record_stream``. Megatron has such a
    stream with --moe-shared-expert-overlap. ``timed`` measures how long the compute stream waits, with two events per
    wait.
    """

    def __init__(self, device: torch.device, timed: bool = True):
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._lanes = {direction: torch.cuda.Stream(self.device) for direction in Direction}
        self._compute: torch.cuda.Stream | None = None
        self._timed = timed

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(
        self, direction: Direction, copies: Sequence[Copy], after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        """Start copies on the CUDA stream of their direction (see ``CopyChannel.start``)."""
        lane = self._lanes[direction]
        # Computing so far wrote the sources, and may have used the memory of the destinations.
        self._compute = torch.cuda.current_stream(self.device)
        computed = torch.cuda.Event()
        computed.record(self._compute)
        lane.wait_event(computed)
        for ticket in after:
            lane.wait_event(ticket)
        with torch.cuda.stream(lane):
            for copy in copies:
                copy.destination.copy_(copy.source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(lane)
        return done

    def join(self, ticket: torch.cuda.Event) -> Callable[[], float] | None:
        compute = torch.cuda.current_stream(self.device)
        if not self._timed:
            compute.wait_event(ticket)
            return None
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        compute.wait_event(ticket)
        after.record(compute)

        def waited() -> float:
            after.synchronize()
            return before.elapsed_time(after) / 1e3

        return waited

    def use(self, tensor: torch.Tensor) -> None:
        current = torch.cuda.current_stream(self.device)
        if current != self._compute:
            tensor.record_stream(current)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.synchronize()


_THREAD_CHECK_SECONDS = 0.05
"""Seconds after which a thread that waits for the copying thread checks again that it is alive."""


@dataclass(eq=False)
class HostTicket:
    """A transfer that one of a ``ThreadChannel``'s threads executes."""

    direction: Direction
    thread: threading.Thread
    copies: Sequence[Copy]
    after: Sequence[HostTicket]  # transfers that must end before this one starts
    ended: threading.Event = field(default_factory=threading.Event)  # set when the transfer has ended or failed
    error: BaseException | None = None

    def query(self) -> bool:
        return self.ended.is_set() and self.error is None

    def wait(self) -> None:
        """Block until the transfer has ended. Raise an OffloadError if it failed or its thread has died."""
        while not self.ended.wait(_THREAD_CHECK_SECONDS):
            if not self.thread.is_alive() and not self.ended.is_set():
                raise _copy_error(self.direction, None)
        if self.error is not None:
            raise _copy_error(self.direction, self.error) from self.error


class ThreadChannel:
    """The copy channel of a CPU device: a thread per direction, of at most ``bandwidth`` bytes per second."""

    device = torch.device("cpu")

    def __init__(self, bandwidth: float | None = None):
        self._bandwidth = bandwidth
        self._queues: dict[Direction, SimpleQueue[HostTicket | None]] = {lane: SimpleQueue() for lane in Direction}
        self._threads = {
            lane: threading.Thread(target=self._run_thread, args=(lane,), name=f"pipemem-{lane.value}", daemon=True)
            for lane in Direction
        }
        for thread in self._threads.values():
            thread.start()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def start(self, direction: Direction, copies: Sequence[Copy], after: Sequence[HostTicket]) -> HostTicket:
        """Queue copies for the thread of their direction (see ``CopyChannel.start``)."""
        ticket = HostTicket(direction, self._threads[direction], tuple(copies), tuple(after))
        self._queues[direction].put(ticket)
        return ticket

    def join(self, ticket: HostTicket) -> Callable[[], float] | None:
        if ticket.query():
            return None
        begin = time.perf_counter()
        ticket.wait()
        seconds = time.perf_counter() - begin
        return lambda: seconds

    def use(self, tensor: torch.Tensor) -> None:
        """Do nothing, because a CPU has no streams."""

    def close(self) -> None:
        for lane, thread in self._threads.items():
            self._queues[lane].put(None)
            thread.join()

    def pace(self, direction: Direction, nbytes: int) -> None:
        """Sleep for the seconds that ``nbytes`` take at ``bandwidth``. The bytes are copied after that, as late as on a
        real link.
        """
        if self._bandwidth is not None:
            time.sleep(nbytes / self._bandwidth)

    def _run_thread(self, direction: Direction) -> None:
        failure: BaseException | None = None
        while (ticket := self._queues[direction].get()) is not None:
            if failure is None:
                try:
                    self._execute(ticket)
                except BaseException as error:
                    failure = error.with_traceback(None)  # its frames would keep the tensors
            # After a failure, later transfers are out of order.
            ticket.error = failure
            ticket.copies = ticket.after = ()
            ticket.ended.set()

    def _execute(self, ticket: HostTicket) -> None:
        for earlier in ticket.after:
            earlier.wait()
        self.pace(ticket.direction, sum(copy.source.numel() for copy in ticket.copies))
        for copy in ticket.copies:
            copy.destination.copy_(copy.source)


def _copy_error(direction: Direction, error: BaseException | None) -> OffloadError:
    reason = "the thread has ended" if error is None else f"{type(error).__name__}: {error}"
    return OffloadError(
        "offload-thread",
        f"the thread that copies activations ({direction.value}) failed: {reason}; "
        "this step cannot be completed; restart from the last checkpoint, and without activation offload if it fails again",
    )
