"""Record when every action of one step really ran on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_pipemem.schedule.core.action import Action


@dataclass(frozen=True)
class TracedAction:
    """Say when an action ran, in seconds since the step began on this rank.

    Args:
        action: that ran.
        start: when it began; waiting for a message ends before.
        end: when it had ended.
    """

    action: Action
    start: float
    end: float


class Trace(Protocol):
    """Times the compute actions of one step."""

    def measure(self, action: Action): ...

    def actions(self) -> list[TracedAction]: ...


class _Measured:
    """Notes when an action begins and ends, unless it fails.

    A class, because every forward and backward enters one and a generator would take three times as long.
    """

    __slots__ = ("_action", "_clock", "_start", "_times")

    def __init__(self, action: Action, clock: Callable[[], object], times: list):
        self._action, self._clock, self._times = action, clock, times

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            self._times.append((self._action, self._start, self._clock()))


class HostTrace:
    """Wall-clock times of this process: right where actions run synchronously, as on CPU."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._times: list[tuple[Action, float, float]] = []

    def measure(self, action: Action) -> _Measured:
        return _Measured(action, time.perf_counter, self._times)

    def actions(self) -> list[TracedAction]:
        return [TracedAction(action, start - self._begin, end - self._begin) for action, start, end in self._times]


class CudaTrace:
    """Times on the compute stream. Reading them waits for the step's last action: read them a step later, and the GPU
    never runs dry."""

    def __init__(self) -> None:
        self._begin = self._event()
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        self._read: list[TracedAction] | None = None

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def measure(self, action: Action) -> _Measured:
        return _Measured(action, self._event, self._events)

    def actions(self) -> list[TracedAction]:
        if self._read is None:
            if self._events:
                self._events[-1][2].synchronize()
            self._read = [
                TracedAction(action, self._begin.elapsed_time(start) / 1e3, self._begin.elapsed_time(end) / 1e3)
                for action, start, end in self._events
            ]
            self._events.clear()
        return self._read
