"""Choose the layers of every stage so that the slowest device is as fast as whole layers allow.

Stages are contiguous slices of the model, as in Alpa's inter-operator pass (arXiv 2201.12023). The cost function is
GPipe's (arXiv 1811.06965): a stage takes the sum of its layers, and a pipeline is as fast as its slowest stage. A
dynamic programme over (stages, layers) is exact for that. Among equally fast results, a second one takes that with the
least memory. If a device holds several stages, single layers then move away from the slowest device as long as that
helps. This is exact too if all layers are equal. Some models need a layer of one kind on every device. If a device has
none, the programme runs again with such a layer in every device's first stage.

A second search (``descend``) moves layers between stages as long as a step gets shorter, with few simulations. A step
takes as long as its longest chain of passes that wait for one another. Every simulated layout yields such a chain. The
length of the chain under another layout is a lower bound of the other layout's step. The search simulates the neighbour
of the best layout with the lowest bound, and ends if no neighbour's bound is below the shortest step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.config.model import Passes
from megatron_pipemem.tools.planner.replay import LongestChain

_DIGITS = 8  # after the first significant one
_SMALLEST = 1e-300
_TOLERANCE = 1e-9
_PASSES = (Kind.F, Kind.I, Kind.W)
_NEIGHBOURS = 4096  # layouts whose bounds are computed at once


@dataclass(frozen=True)
class Loads:
    """The seconds and bytes of layers, embedding and head that are divided among stages."""

    seconds: Sequence[float]  # per layer, forward and backward of one microbatch
    first: float = 0.0  # seconds of the embedding, and of a vision tower, on the first stage
    last: float = 0.0  # seconds of head and loss, on the last stage
    static: Sequence[float] = ()
    """Bytes of every layer that do not depend on the schedule: parameters, gradients, optimizer."""
    kept: Sequence[float] = ()  # per layer, bytes of activations of one microbatch
    first_bytes: float = 0.0  # bytes of the embedding and of a vision tower
    last_bytes: float = 0.0  # static bytes of head and loss, and their activations of one microbatch
    least_first: int = 0  # least number of layers on the first stage
    needed: Sequence[bool] = ()  # per layer, whether it is of the kind that every device needs, if there are enough
    tied: Sequence[bool] = ()  # per layer, whether it is on the stage of the layer before it


def partition(loads: Loads, placement: Placement, start: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the number of layers of every stage, in the order of the stages.

    With ``start``, begin with these numbers, and only move layers away from the slowest device. Raise an
    UnsupportedError if there are no layers, or if the placement has several replicas.
    """
    if not loads.seconds or placement.replicas > 1:
        raise UnsupportedError(
            "too-few-layers",
            f"cannot divide {len(loads.seconds)} layers among stages of {placement.replicas} replicas; give at least one "
            "layer, and a placement with one replica",
        )
    measure = _Measure(loads, placement)
    if start is not None:
        return tuple(_move_layers(list(start), measure))
    counts = _cut(measure)
    if sum(loads.needed) >= placement.num_devices and measure.devices_without(np.array([counts]))[0]:
        counts = _cut(measure, with_needed=placement.num_devices)
    return tuple(counts)


def _cut(measure: _Measure, with_needed: int = 0) -> list[int]:
    """Return the number of layers per stage for which the slowest stage takes least, and among these the least memory.

    Each of the first ``with_needed`` stages has a layer of the kind that every device needs. If devices have several
    stages, layers are then moved away from the slowest device.
    """
    seconds, nbytes = measure.stage_tables(with_needed)
    slowest = _least_maximum(seconds)[0]
    counts = _least_maximum(
        [np.where(s <= slowest * (1 + _TOLERANCE), b, np.inf) for s, b in zip(seconds, nbytes, strict=True)]
    )[1]
    return counts if len(measure.devices) == measure.num_devices else _move_layers(counts, measure)


def _least_maximum(tables: Sequence[np.ndarray]) -> tuple[float, list[int]]:
    """Return the smallest possible largest load of a stage, and the number of layers per stage that gives it.

    ``tables`` has one table per stage. ``table[i, j]`` is the load of the stage with layers ``i`` to ``j - 1``, and
    infinite for ``j < i``.
    """
    best = np.full(len(tables[0]), np.inf)
    best[0] = 0.0
    choices = []
    for table in tables:
        largest = np.maximum(best[:, None], table)
        choices.append(largest.argmin(axis=0))
        best = largest.min(axis=0)
    end, counts = len(best) - 1, []
    for choice in reversed(choices):
        begin = int(choice[end])
        counts.append(end - begin)
        end = begin
    return float(best[-1]), counts[::-1]


class _Measure:
    """Computes the seconds and bytes of stages and devices for given layers per stage."""

    def __init__(self, loads: Loads, placement: Placement) -> None:
        layers, stages = len(loads.seconds), placement.num_stages
        self.devices = np.array(placement.devices)
        self.num_devices = placement.num_devices
        self._owners = np.eye(self.num_devices)[self.devices]  # [stage, device]
        self._seconds = _sums(loads.seconds)
        self._static = _sums(loads.static or [0.0] * layers)
        self._kept = _sums(loads.kept or [0.0] * layers)
        self._needed = _sums(loads.needed or [0.0] * layers)
        self._tied = np.array([*(loads.tied or [False] * layers), False])
        self.least_first = loads.least_first
        # As in 1F1B, the number of microbatches that wait on a stage for their backward falls towards the end.
        self._in_flight = (stages - np.arange(stages)) / stages * placement.num_devices
        self._end_seconds, self._end_bytes = np.zeros(stages), np.zeros(stages)
        self._end_seconds[0] += loads.first
        self._end_seconds[-1] += loads.last
        self._end_bytes[0] += loads.first_bytes
        self._end_bytes[-1] += loads.last_bytes

    def stage_tables(self, with_needed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return for each stage the seconds, and for each stage the bytes, of every range of layers.

        They are tables as in ``_least_maximum``. On the first ``with_needed`` stages, ranges without a layer of the
        kind that every device needs take infinitely long.
        """
        size = len(self._seconds)
        begin, end = np.arange(size)[:, None], np.arange(size)[None, :]
        valid = (begin == end) | ((begin < end) & ~self._tied[:, None])
        seconds, static, kept = (
            np.where(valid, sums[None, :] - sums[:, None], np.inf) for sums in (self._seconds, self._static, self._kept)
        )
        has_needed = np.where(self._needed[None, :] > self._needed[:, None], seconds, np.inf)
        tables = [(has_needed if at < with_needed else seconds) + end for at, end in enumerate(self._end_seconds)]
        tables[0][:, : self.least_first] = np.inf  # the first stage begins with layer 0
        return (
            tables,
            [static + kept * n + end for n, end in zip(self._in_flight, self._end_bytes, strict=True)],
        )

    def keys(self, counts: np.ndarray) -> np.ndarray:
        """Return for every row of layers per stage the values to minimise, the most important first.

        They are: stages that begin with a layer tied to the one before it; devices without a needed layer; the slowest
        device; the sum of squares, so that several slow devices improve one by one; the slowest stage; the most memory.
        """
        seconds = _of_stages(self._seconds, counts) + self._end_seconds
        nbytes = _of_stages(self._static, counts) + self._end_bytes
        nbytes = nbytes + _of_stages(self._kept, counts) * self._in_flight
        per_device = seconds @ self._owners
        memory = (nbytes @ self._owners).max(axis=1)
        lacking, slowest, squares = self.devices_without(counts), per_device.max(axis=1), (per_device**2).sum(axis=1)
        torn = ((counts > 0) & self._tied[np.cumsum(counts, axis=1) - counts]).sum(axis=1)
        values = np.stack((torn, lacking, slowest, squares, seconds.max(axis=1), memory), axis=1)
        # Rounded, so that sums of equal layers are equal.
        unit = 10.0 ** (np.floor(np.log10(np.maximum(values, _SMALLEST))) - _DIGITS)
        return np.round(values / unit) * unit

    def devices_without(self, counts: np.ndarray) -> np.ndarray:
        """Return for every row of layers per stage the number of devices that lack a needed layer."""
        return (_of_stages(self._needed, counts) @ self._owners == 0).sum(axis=1)

    def slowest_stages(self, counts: np.ndarray) -> list[int]:
        """Return the stages of the slowest device, except those without layers to give away.

        ``counts`` has the number of layers per stage.
        """
        seconds = _of_stages(self._seconds, counts) + self._end_seconds
        slowest = np.bincount(self.devices, seconds, self.num_devices).argmax()
        owned = np.flatnonzero(self.devices == slowest)
        return [int(stage) for stage in owned if counts[stage] > (0 if stage else self.least_first)]


def _move_layers(start: list[int], measure: _Measure) -> list[int]:
    """Return the layers per stage, with single layers moved off the slowest device while ``_Measure.keys`` decrease."""
    counts = np.array(start)
    moves = np.eye(len(counts), dtype=int)
    while True:
        taken = [counts + moves - moves[source] for source in measure.slowest_stages(counts)]
        tried = np.concatenate([counts[None, :], *taken])
        keys = measure.keys(tried)
        best = tried[np.lexsort(keys.T[::-1])[0]]  # the first of equals: the current counts, if they are among them
        if (best == counts).all():
            return [int(count) for count in counts]
        counts = best


def _of_stages(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the sum of a value over the layers of every stage, from its cumulative sums."""
    ends = np.cumsum(counts, axis=-1)
    return sums[ends] - sums[ends - counts]


def _sums(values: Sequence[float]) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=float))))


class Bounds:
    """Lower bounds of a step's seconds under any layout, without the optimizer and data-parallel messages.

    ``pieces`` are the seconds of the part before the layers, of the layers, and of the part after them. ``further`` are
    the microbatches that are not simulated. Each of them takes the time of the slowest device.
    """

    def __init__(self, pieces: Sequence[Passes], placement: Placement, further: int) -> None:
        self.stages, self._further = placement.model_stages, further
        first, *layers, last = [(each.forward, each.input, each.weight) for each in pieces]
        self._ends = np.zeros((self.stages, len(_PASSES)))
        self._ends[0] += first
        self._ends[-1] += last
        self._sums = np.concatenate((np.zeros((1, len(_PASSES))), np.cumsum(layers, axis=0)))
        self._devices = np.zeros((placement.num_devices, self.stages, len(_PASSES)))
        for stage, device in enumerate(placement.devices):
            self._devices[device, stage % self.stages] += 1 / placement.replicas
        self._chains: list[np.ndarray] = []
        self._lags: list[float] = []

    def add(self, chain: LongestChain) -> None:
        """Add the longest chain of a simulated layout."""
        counts = np.zeros((self.stages, len(_PASSES)))
        for (kind, stage), count in chain.passes.items():
            for of, share in (kind.spec.shares or {kind.value: 1}).items():
                counts[stage % self.stages, _PASSES.index(Kind(of))] += count * share
        self._chains.append(counts)
        self._lags.append(chain.lags)

    def seconds(self, layouts: np.ndarray) -> np.ndarray:
        """Return the seconds of F, I and W on every stage for one microbatch, in a row per layout.

        A row of ``layouts`` has the number of pieces per stage. A row of the result has F, I and W of the first stage,
        then those of the second, and so on.
        """
        ends = np.cumsum(layouts, axis=1)
        return (self._sums[ends] - self._sums[ends - layouts] + self._ends).reshape(len(layouts), self._ends.size)

    def of(self, seconds: np.ndarray, newest: bool = False) -> np.ndarray:
        """Return a lower bound in seconds of the step of every layout, from its row of ``seconds``.

        It is the highest bound by any chain; with ``newest``, the bound by the chain that was added last.
        """
        chains, lags = (self._chains[-1:], self._lags[-1:]) if newest else (self._chains, self._lags)
        bounds = (seconds @ np.stack(chains).reshape(len(chains), -1).T + lags).max(axis=1)
        if self._further:
            devices = self._devices.reshape(len(self._devices), -1)
            bounds += self._further * (seconds @ devices.T).max(axis=1)
        return bounds


def descend(
    start: tuple[int, ...],
    bounds: Bounds,
    simulate: Callable[[tuple[int, ...]], float],
    least: Sequence[int],
    most: int,
) -> tuple[int, ...]:
    """Return the number of pieces per stage of the fastest layout found from ``start`` by moves of one or two pieces.

    ``simulate`` returns the seconds of a layout's step and adds its chain to the bounds; infinite seconds rule a layout
    out. A stage keeps at least the pieces in ``least``. ``most`` limits the number of simulated layouts.
    """
    pairs = [(a, b) for a in range(bounds.stages) for b in range(bounds.stages) if a != b]
    pairs.sort(key=lambda pair: abs(pair[0] - pair[1]))
    unit = np.eye(bounds.stages, dtype=int)
    moves = np.array([unit[b] - unit[a] for a, b in pairs[:_NEIGHBOURS]])
    best, shortest, left = start, simulate(start), most

    def better(layouts: np.ndarray) -> tuple[int, ...] | None:
        """Simulate layouts by ascending bound, and return the first with a shorter step than the best.

        Return ``None`` if no bound is below the shortest step, or if ``most`` layouts have been simulated.
        """
        nonlocal shortest, left
        seconds = bounds.seconds(layouts)
        lowest = bounds.of(seconds)
        while left and len(layouts):
            at = int(lowest.argmin())
            if lowest[at] >= shortest * (1 - _TOLERANCE):
                break
            left -= 1
            layout = tuple(map(int, layouts[at]))
            if (found := simulate(layout)) < shortest * (1 - _TOLERANCE):
                shortest = found
                return layout
            lowest = np.maximum(lowest, bounds.of(seconds, newest=True))
            lowest[at] = np.inf
        return None

    def moved(layouts: np.ndarray) -> np.ndarray:
        found = (layouts[:, None] + moves).reshape(-1, bounds.stages)
        return found[(found >= least).all(axis=1)]

    while True:
        near = moved(np.array([best]))
        next_one = better(near)
        if next_one is None and len(near):
            lowest = bounds.of(bounds.seconds(near)).argsort(kind="stable")
            next_one = better(moved(near[lowest[: _NEIGHBOURS // len(moves)]]))
        if next_one is None:
            return best
        best = next_one
