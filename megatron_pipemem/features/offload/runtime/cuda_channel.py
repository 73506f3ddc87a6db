"""Run transfers on two side streams of a GPU. The host never waits: events between streams alone make the order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_pipemem.features.offload.runtime.channel import Copy, Direction


@dataclass(frozen=True, eq=False)
class CudaTicket:
    event: torch.cuda.Event

    def done(self) -> bool:
        return self.event.query()


class CudaChannel:
    """A stream per direction, since current GPUs copy both ways at once.

    The compute stream is the stream that is current at ``start``, where memory for reloads comes from too. Its tensors are not
    handed to ``record_stream``, because no plan can count on memory that an allocator frees some time later. Only a reloaded
    tensor that another stream uses is, as Megatron's shared experts do with --moe-shared-expert-overlap.

    Args:
        device: the GPU.
        timed: measure stalls, with two timing events around every wait.
    """

    def __init__(self, device: torch.device, timed: bool = True):
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._lanes = {direction: torch.cuda.Stream(self.device) for direction in Direction}
        self._compute: torch.cuda.Stream | None = None
        self._timed = timed
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[float], None]]] = []

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start(self, direction: Direction, copies: Sequence[Copy], after: Sequence[CudaTicket]) -> CudaTicket:
        """Start transfers on the stream of their direction, as ``CopyChannel.start`` says.

        Args:
            direction: to the host or back.
            copies: runs of bytes with their source and destination.
            after: tickets of earlier transfers.
        """
        lane = self._lanes[direction]
        # Computing so far wrote the sources, and perhaps last used what is now the destinations' memory.
        self._compute = torch.cuda.current_stream(self.device)
        computed = torch.cuda.Event()
        computed.record(self._compute)
        lane.wait_event(computed)
        for ticket in after:
            lane.wait_event(ticket.event)
        with torch.cuda.stream(lane):
            for copy in copies:
                copy.destination.copy_(copy.source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(lane)
        return CudaTicket(done)

    def join(self, ticket: CudaTicket, on_stall: Callable[[float], None]) -> None:
        compute = torch.cuda.current_stream(self.device)
        if not self._timed:
            compute.wait_event(ticket.event)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(compute)
        compute.wait_event(ticket.event)
        after.record(compute)
        self._stalls.append((before, after, on_stall))

    def use(self, tensor: torch.Tensor) -> None:
        current = torch.cuda.current_stream(self.device)
        if current != self._compute:
            tensor.record_stream(current)

    def take_stalls(self) -> Callable[[], None]:
        stalls, self._stalls = self._stalls, []

        def read() -> None:
            for before, after, on_stall in stalls:
                after.synchronize()
                on_stall(before.elapsed_time(after) / 1e3)
            stalls.clear()

        return read

    def forget_stalls(self) -> None:
        self._stalls.clear()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.synchronize()
