"""Measure the times of a rank's actions and its copies to the host, and compare costs with those of the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.units import WHOLE, Units

if TYPE_CHECKING:
    from megatron_pipemem.schedule.measured import Medians, Pair


class TracedAction(NamedTuple):
    """The start and end of an action, in seconds since the step began on this rank.

    Waiting for a message is not part of an action.
    """

    action: Action
    start: float
    end: float


class _ActionTimer:
    """A context that adds the start and end of an action to a list, unless the action fails.

    This is a class because every forward and backward uses it, and a generator would take three times as long.
    """

    __slots__ = ("_action", "_clock", "_start", "_times")

    def __init__(self, action: Action, clock: Callable[[], object], times: list):
        self._action, self._clock, self._times = action, clock, times

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            self._times.append((self._action, self._start, self._clock()))


class Trace:
    """Measures the times of a step's actions, on the compute stream of a GPU or by the host's clock.

    Reading the times of a GPU waits for the step's last action. Read them one step later, so that the GPU stays busy.
    """

    def __init__(self, on_cuda: bool = False):
        self._on_cuda = on_cuda
        # Starts and ends are CUDA events, or seconds.
        self._now: Callable[[], Any] = _event if on_cuda else time.perf_counter
        self._begin: Any = self._now()
        self._times: list[tuple] = []
        self._read: list[TracedAction] | None = None

    def measure(self, action: Action) -> _ActionTimer:
        return _ActionTimer(action, self._now, self._times)

    def actions(self) -> list[TracedAction]:
        """Return the measured actions, in the order in which they ended. Call this after the step's last action."""
        if self._read is None:
            if self._on_cuda and self._times:
                self._times[-1][2].synchronize()
            self._read = [
                TracedAction(action, self._after(start), self._after(end)) for action, start, end in self._times
            ]
            self._times.clear()
        return self._read

    def _after(self, moment: Any) -> float:
        return self._begin.elapsed_time(moment) / 1e3 if self._on_cuda else moment - self._begin


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


TOLERANCE = 0.2
_NOISE = 0.02  # share of a device's seconds per microbatch; shorter times, as of empty stages, are noise


@dataclass
class Stopwatch:
    """Collects the durations of one rank's actions over several steps.

    ``units`` are those of a step. Other numbers of microbatches with as many parts are fine too. ``steps`` is the
    number of steps since the last ``reset``.
    """

    units: Units = WHOLE
    steps: int = 0
    _durations: dict[tuple[Kind, int], list[float]] = field(default_factory=dict)
    _of_pairs: dict[Pair, list[float]] = field(default_factory=dict)

    def add(self, actions: Iterable[TracedAction], pairs: Container[Action] = ()) -> None:
        """Add the actions of one step in the order in which they ran. ``pairs`` is that of its schedule."""
        self.steps += 1
        coming = iter(actions)
        for traced in coming:
            key = self._key(traced.action)
            if traced.action in pairs:
                second = next(coming)
                pair = key, self._key(second.action)
                self._of_pairs.setdefault(pair, []).append(second.end - traced.start)
            else:
                self._durations.setdefault(key, []).append(traced.end - traced.start)

    def _key(self, action: Action) -> tuple[Kind, int]:
        return action.kind, self.units.place(action.stage, action.microbatch)

    def medians(self) -> Medians:
        return {key: median(durations) for key, durations in self._durations.items()}

    def of_pairs(self) -> dict[Pair, float]:
        """Return the median seconds of every pair."""
        return {pair: median(durations) for pair, durations in self._of_pairs.items()}

    def reset(self) -> None:
        self.steps = 0
        self._durations.clear()
        self._of_pairs.clear()


def average[Key](reports: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """Return for each key the mean of its values in the reports that have the key.

    Ranks that hold the same stage in different replicas have equal weight.
    """
    values_of: dict[Key, list[float]] = {}
    for report in reports:
        for key, seconds in report.items():
            values_of.setdefault(key, []).append(seconds)
    return {key: fmean(values) for key, values in values_of.items()}


def drift(planned: Costs, measured: Costs, placement: Placement, units: Units = WHOLE) -> str | None:
    """Return a sentence about the F, I or W whose seconds differ most from the plan; ``None`` if none differs enough.

    Enough is over 20 % of the planned time, and over 2 % of the busiest device's measured seconds per microbatch.
    """
    parts, old, new = units.parts, planned.seconds(placement, units), measured.seconds(placement, units)
    noise = _NOISE * max(
        sum(sum(new[kind][stage * parts : (stage + 1) * parts]) for stage in stages for kind in (Kind.F, Kind.B))
        for stages in placement.stages
    )
    moved = [
        (abs(new[kind][at] - old[kind][at]), kind, at)
        for kind in (Kind.F, Kind.I, Kind.W)
        for at in range(placement.num_stages * parts)
        if abs(new[kind][at] - old[kind][at]) > max(TOLERANCE * old[kind][at], noise)
    ]
    if not moved:
        return None
    _, kind, at = max(moved)
    stage, part = divmod(at, parts)
    owner = f"stage {stage}" if parts == 1 else f"part {part} of microbatches on stage {stage}"
    return f"{kind} of {owner} takes {new[kind][at] * 1e3:.3g} ms, planned with {old[kind][at] * 1e3:.3g} ms"


class Direction(Enum):
    OUT = "offload"
    IN = "reload"


@dataclass(frozen=True)
class Stall:
    """The time that the computation waited for one copy."""

    key: Hashable  # the forward whose activations moved
    direction: Direction
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class OffloadStatistics:
    """The bytes that one rank has copied since the step began, its peak bytes, and its waiting times."""

    bytes_out: int  # moved to the host
    bytes_in: int  # moved back
    # The peak of captured storages on the device. A reload counts from the allocation of its memory. Tensors that deferred
    # weight gradients keep longer than the graph are not counted.
    device_peak_bytes: int
    host_peak_bytes: int  # counted from each offload to the wait for its reload
    # Host memory of the pool, which keeps it for later steps. Less than the peak if blocks are reused while they are read.
    host_reserved_bytes: int
    held_elsewhere_bytes: int  # moved in vain, because other code still held the storage
    stayed_bytes: Mapping[str, int]  # saved tensors that cannot move, by reason
    stalls: tuple[Stall, ...]

    @property
    def stall_seconds(self) -> float:
        return sum(stall.seconds for stall in self.stalls)
