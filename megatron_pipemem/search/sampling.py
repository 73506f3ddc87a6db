"""Vary periodic orders: choose which blocks are proposed, and for which intervals."""

from __future__ import annotations

import numpy as np

from megatron_pipemem.search.periodic import Cycles, PeriodicBlock
from megatron_pipemem.search.problem import Problem

_BALANCING_ROUNDS = 12
# Few orders, other ones each time, are searched faster and vary the blocks besides.
_ORDERS_PER_VARIATION = 60
_ELITES = 20
_MOST_DELAYS = 6

# By how much the interval grows until some block fits the caps, and how many intervals from there on are worth a look.
_STRETCH = 1.05
_INTERVALS = 4
_LONGEST_STRETCH = 3.0


class BlockSampler:
    """Proposes blocks for one interval: first ever better balanced ones, then random variations of what did well.

    Which blocks fit the caps is known at once, but which of them starts up and runs dry fastest is not: so the prices of
    waiting are varied at random, and the variations of the best blocks are varied further.

    Args:
        problem: with at most two chunks per device.
        interval: ticks from one microbatch to the next.
        rng: source of the variations.
    """

    def __init__(self, problem: Problem, interval: int, rng: np.random.Generator) -> None:
        self.cycles = Cycles(problem, interval, rng)
        self._rng = rng
        self._limits = problem.caps
        self._caps = np.maximum(np.array(problem.caps, dtype=float), 1)
        self._prices = np.ones(problem.num_devices)
        self._boldness = 3.0
        self._proposed = 0
        self._seen: dict[tuple[int, ...], np.ndarray] = {}
        self._elites: list[tuple[int, tuple[int, ...]]] = []
        self.least_excess = float("inf")

    @property
    def balanced(self) -> bool:
        """Return whether the prices have settled and variations have begun."""
        return self._proposed >= _BALANCING_ROUNDS

    def propose(self) -> PeriodicBlock | None:
        """Propose another block; ``None`` when it was proposed before or exceeds a cap."""
        variation, among = np.zeros(self.cycles.num_links), None
        if self.balanced:
            variation, among = self._variation(), self._rng.permutation(self.cycles.most_orders)[:_ORDERS_PER_VARIATION]
        block = self.cycles.cheapest(self._prices / self._caps, np.exp(variation), among)
        load = np.array(block.peaks) / self._caps
        fits = bool(load.max() <= 1)
        if not self.balanced:
            self._prices *= np.exp((load - load.mean()) * 2 / (1 + self._proposed * 0.2))
            self._prices /= self._prices.mean()
        else:
            # Wild variations show more, as long as what they show fits.
            self._boldness = min(3.0, self._boldness * 1.05) if fits else max(0.05, self._boldness * 0.95)
        self._proposed += 1
        self.least_excess = min(self.least_excess, float(load.max()))
        if fits and self.balanced:
            block = self._deepened(block)
        if not fits or block.starts in self._seen:
            return None
        self._seen[block.starts] = variation
        return block

    def _deepened(self, block: PeriodicBlock) -> PeriodicBlock:
        """Spend memory that the block leaves on microbatches in flight: they cover for others when the step runs dry."""
        stages = len(block.starts) // 3
        for _ in range(int(self._rng.integers(_MOST_DELAYS + 1))):
            deeper = block.delayed(int(self._rng.integers(-stages, 2 * stages)))
            if all(peak <= cap for peak, cap in zip(deeper.peaks, self._limits, strict=True)):
                block = deeper
        return block

    def learn(self, block: PeriodicBlock, makespan: int) -> None:
        """Tell how a proposed block did."""
        self._elites = sorted([*self._elites, (makespan, block.starts)])[:_ELITES]

    def _variation(self) -> np.ndarray:
        rng, count = self._rng, self.cycles.num_links
        if self._elites and rng.random() < 0.4:
            _, starts = self._elites[min(len(self._elites) - 1, int(rng.exponential(2)))]
            touched = rng.random(count) < rng.choice([0.1, 0.3, 1.0])
            return self._seen[starts] + rng.standard_normal(count) * self._boldness * rng.random() * touched
        return rng.standard_normal(count) * self._boldness * rng.choice([0.1, 0.3, 1.0])


class PeriodicStarts:
    """Blocks for the costs at hand, in more and more variations.

    The interval is the work of the busiest device if any block fits the caps so, else as little longer as it takes:
    unequal costs under a small cap must idle in the steady state too.

    Args:
        problem: what the blocks must fit; its microbatches are few where the real ones are many.
        seed: of the variations.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem = problem
        self._rng = np.random.default_rng(seed)
        self.stretch = 1.0
        """The longest interval so far over the work of the busiest device."""
        self._samplers = [BlockSampler(problem, max(problem.work), self._rng)]
        self._fitting: list[BlockSampler] = []

    @property
    def idles(self) -> bool:
        """Return whether the interval had to be stretched."""
        return self.stretch > 1

    def propose(self) -> tuple[BlockSampler, PeriodicBlock] | None:
        """Return a block that fits the caps; ``None`` when this trial gave none."""
        sampler = self._pick()
        block = sampler.propose()
        if block is not None and sampler not in self._fitting:
            self._fitting.append(sampler)
        return None if block is None else (sampler, block)

    @property
    def exhausted(self) -> bool:
        return not self._fitting and self.stretch > _LONGEST_STRETCH

    def _pick(self) -> BlockSampler:
        newest = self._samplers[-1]
        if not newest.balanced:
            return newest
        hopeless = not self._fitting
        if hopeless or (self.idles and len(self._fitting) < _INTERVALS):
            # Far from fitting, small steps would only cost time.
            self.stretch *= max(_STRETCH, min(newest.least_excess / 1.1, 1.5)) if hopeless else _STRETCH
            interval = int(max(self._problem.work) * self.stretch)
            self._samplers.append(BlockSampler(self._problem, interval, self._rng))
            return self._samplers[-1]
        return self._fitting[int(self._rng.integers(len(self._fitting)))]
