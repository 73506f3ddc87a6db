"""Choose the layers of every stage so that the slowest device is as fast as whole layers allow.

Stages are contiguous slices of the model, as in Alpa's inter-operator pass (arXiv 2201.12023). The cost function is
GPipe's (arXiv 1811.06965): a stage takes the sum of its layers, and a pipeline is as fast as its slowest stage. A
dynamic programme over (stages, layers) is exact for that. Among equally fast results, a second one takes that with the
least memory. If a device holds several stages, single layers then move away from the slowest device as long as that
helps. This is exact too if all layers are equal. Some models need a layer of one kind on every device. If a device has
none, the programme runs again with such a layer in every device's first stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.placement import Placement

_DIGITS = 8  # after the first significant one
_SMALLEST = 1e-300
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Loads:
    """The seconds and bytes of layers, embedding and head that are divided among stages."""

    seconds: Sequence[float]  # per layer, forward and backward of one microbatch
    first_seconds: float = 0.0  # seconds of the embedding, and of a vision tower, on the first stage
    last_seconds: float = 0.0  # seconds of head and loss, on the last stage
    static_bytes: Sequence[float] = ()
    """Bytes of every layer that do not depend on the schedule: parameters, gradients, optimizer."""
    kept_bytes: Sequence[float] = ()  # per layer, bytes of activations of one microbatch
    first_bytes: float = 0.0  # bytes of the embedding and of a vision tower
    last_bytes: float = 0.0  # static bytes of head and loss, and their activations of one microbatch
    least_first: int = 0  # least number of layers on the first stage
    needed: Sequence[bool] = ()  # per layer, whether it is of the kind that every device needs, if there are enough
    tied: Sequence[bool] = ()  # per layer, whether it is on the stage of the layer before it


def partition(loads: Loads, placement: Placement, start: Sequence[int] | None = None) -> tuple[int, ...]:
    """Divide the layers among the stages so that the slowest device takes the least time, and return their numbers.

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
        self._static = _sums(loads.static_bytes or [0.0] * layers)
        self._kept = _sums(loads.kept_bytes or [0.0] * layers)
        self._needed = _sums(loads.needed or [0.0] * layers)
        self._tied = np.array([*(loads.tied or [False] * layers), False])
        self.least_first = loads.least_first
        # As in 1F1B, the number of microbatches that wait on a stage for their backward falls towards the end.
        self._in_flight = (stages - np.arange(stages)) / stages * placement.num_devices
        self._end_seconds, self._end_bytes = np.zeros(stages), np.zeros(stages)
        self._end_seconds[0] += loads.first_seconds
        self._end_seconds[-1] += loads.last_seconds
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
