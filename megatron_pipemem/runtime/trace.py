"""Record when every action of one step really ran on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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


class HostTrace:
    """Wall-clock times of this process: right where actions run synchronously, as on CPU."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._actions: list[TracedAction] = []

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        start = time.perf_counter() - self._begin
        yield
        self._actions.append(TracedAction(action, start, time.perf_counter() - self._begin))

    def actions(self) -> list[TracedAction]:
        return list(self._actions)


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

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        start = self._event()
        yield
        self._events.append((action, start, self._event()))

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
