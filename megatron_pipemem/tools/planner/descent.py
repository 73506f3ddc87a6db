"""Move layers between stages as long as a step gets shorter, with few simulations.

A step takes as long as its longest chain of passes that wait for one another. Every simulated layout yields such a
chain. The length of the chain under another layout is a lower bound of the other layout's step. The search simulates
the neighbour of the best layout with the lowest bound, and ends if no neighbour can be shorter by ``LEAST_GAIN``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from megatron_pipemem.part_costs import Passes
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.planner.replay import LongestChain

LEAST_GAIN = 1e-3
"""The least gain for which layers move, as a fraction of a step: a fifth of the gain for which a layout changes."""
_PASSES = (Kind.F, Kind.I, Kind.W)
_NEIGHBOURS = 4096  # layouts whose bounds are computed at once


class Bounds:
    """Lower bounds of a step's seconds under any layout, without the optimizer and data-parallel messages.

    ``pieces`` are the seconds of the part before the layers, of the layers, and of the part after them. ``further`` are
    the microbatches that are not simulated. Each of them takes the time of the slowest device.
    """

    def __init__(self, pieces: Sequence[Passes], placement: Placement, further: int) -> None:
        self.stages, self._further = placement.model_stages, further
        first, *layers, last = [(piece.forward, piece.input, piece.weight) for piece in pieces]
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

    def of(self, seconds: np.ndarray) -> np.ndarray:
        """Return a lower bound in seconds of the step of every layout, the highest by any chain, from ``seconds``."""
        return self.of_chains(seconds, 0) + self.of_further(seconds)

    def of_chains(self, seconds: np.ndarray, first_chain: int) -> np.ndarray:
        """Return the highest bound by the chains from number ``first_chain`` on, in the order of ``add``."""
        chains = np.stack(self._chains[first_chain:]).reshape(-1, self._ends.size)
        return (seconds @ chains.T + self._lags[first_chain:]).max(axis=1)

    def of_further(self, seconds: np.ndarray) -> np.ndarray:
        """Return the seconds of the microbatches that are not simulated, a part of every bound."""
        devices = self._devices.reshape(len(self._devices), -1)
        return self._further * (seconds @ devices.T).max(axis=1) if self._further else np.zeros(len(seconds))


def descend(
    start: tuple[int, ...],
    bounds: Bounds,
    simulate: Callable[[tuple[int, ...], float], float],
    least: Sequence[int],
    most: int,
) -> tuple[int, ...]:
    """Return the number of pieces per stage of the fastest layout found from ``start`` by moves of one or two pieces.

    ``simulate(layout, limit)`` returns the seconds of a layout's step and adds its chain to the bounds. In place of
    seconds below ``limit``, it returns infinity for a layout that is ruled out. A stage keeps at least the pieces in
    ``least``. ``most`` limits the number of simulated layouts.
    """
    pairs = [(a, b) for a in range(bounds.stages) for b in range(bounds.stages) if a != b]
    pairs.sort(key=lambda pair: abs(pair[0] - pair[1]))
    unit = np.eye(bounds.stages, dtype=int)
    moves = np.array([unit[b] - unit[a] for a, b in pairs[:_NEIGHBOURS]])
    best, shortest, left = start, simulate(start, inf), most

    def better(layouts: np.ndarray) -> tuple[int, ...] | None:
        """Simulate layouts by ascending bound, and return the first whose step is shorter by ``LEAST_GAIN``.

        Return ``None`` if no bound allows that gain, or if ``most`` layouts have been simulated.
        """
        nonlocal shortest, left
        seconds = bounds.seconds(layouts)
        further = bounds.of_further(seconds)
        lowest = bounds.of_chains(seconds, 0) + further
        while left and len(layouts):
            at = int(lowest.argmin())
            if lowest[at] >= shortest * (1 - LEAST_GAIN):
                break
            left -= 1
            layout, limit = tuple(map(int, layouts[at])), shortest * (1 - LEAST_GAIN)
            if (step_seconds := simulate(layout, limit)) < limit:
                shortest = step_seconds
                return layout
            lowest = np.maximum(lowest, bounds.of_chains(seconds, -1) + further)
            lowest[at] = np.inf
        return None

    def moved(layouts: np.ndarray) -> np.ndarray:
        neighbours = (layouts[:, None] + moves).reshape(-1, bounds.stages)
        return neighbours[(neighbours >= least).all(axis=1)]

    while True:
        near = moved(np.array([best]))
        next_one = better(near)
        if next_one is None and len(near):
            lowest = bounds.of(bounds.seconds(near)).argsort(kind="stable")
            next_one = better(moved(near[lowest[: _NEIGHBOURS // len(moves)]]))
        if next_one is None:
            return best
        best = next_one
