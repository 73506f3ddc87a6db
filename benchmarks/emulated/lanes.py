"""A device with two lanes, of which one computes and the other exchanges tokens, as two streams of a GPU do.

The host gives a lane pieces of work and goes on. The lane runs one piece after another. The time at which a piece ends is
known when the lane gets it, so no thread has to sleep. The host sleeps where it waits for a lane: before a message leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from emulated.device import Device, sleep_until
from megatron_pipemem.runtime.transport import Transport
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.tools.cpu.cuda import Event, HostStream


class Lane(HostStream):
    """Takes the place of ``torch.cuda.Stream``. ``free`` is the time at which its last piece ends."""

    free = 0.0

    def run(self, seconds: float) -> tuple[float, float]:
        """Give the lane a piece of work, and return its start and its end."""
        start = max(self.free, time.perf_counter())
        self.free = start + seconds
        return start, self.free

    def wait_until(self, moment: float) -> None:
        self.free = max(self.free, moment)

    def synchronize(self) -> None:
        sleep_until(self.free)


class LaneEvent(Event):
    """Takes the place of ``torch.cuda.Event``."""

    _moment = 0.0

    def record(self, stream: Any = None) -> None:
        lane: Any = stream or torch.cuda.current_stream()
        self._moment = lane.free

    def wait(self, stream: Any = None) -> None:
        lane: Any = stream or torch.cuda.current_stream()
        lane.wait_until(self._moment)


def use_lanes() -> None:
    """Let streams and events of this process be lanes. Messages of both runtimes leave when their tensors are made."""
    mock.patch.multiple(torch.cuda, Stream=Lane, Event=LaneEvent).start()
    torch.cuda.set_stream(Lane())  # type: ignore[arg-type]  # the CPU lane's streams are not torch's
    for owner, name in ((Transport, "post_send"), (P2PCommunicator, "_communicate")):
        mock.patch.object(owner, name, _after_lane(getattr(owner, name))).start()


def _after_lane(post: Callable) -> Callable:
    def posted(*arguments: Any, **named: Any) -> Any:
        torch.cuda.current_stream().synchronize()
        return post(*arguments, **named)

    return posted


class LaneDevice(Device):
    """What one rank did in one step. Passes stand in the order of their first pieces."""

    def __init__(self) -> None:
        super().__init__(lambda *_: 0.0)

    def reset(self) -> None:
        super().reset()
        self._places: dict[Action, int] = {}

    def next_forward(self, stage: int) -> int:
        """Return the number of a forward that begins."""
        self._counts[Kind.F, stage] += 1
        number = self._counts[Kind.F, stage] - 1
        self.run(Action(Kind.F, stage, number), 0.0)
        return number

    def run(self, action: Action, seconds: float) -> None:
        """Run a piece of a pass on the current lane."""
        lane: Any = torch.cuda.current_stream()
        start, end = lane.run(self.scale * seconds)
        place = self._places.setdefault(action, len(self.passes))
        if place < len(self.passes):
            self.passes[place] = action, self.passes[place][1], end
        else:
            self.passes.append((action, start, end))
