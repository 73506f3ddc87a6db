"""Periodic orders: every device repeats one cycle of its passes, once per microbatch, at a fixed interval.

This generalises the building blocks of arXiv 2405.15362 to any costs. The interval is the work of the busiest device
per microbatch, so that this device never idles in the steady state. Two choices per device determine the start of every
pass: the order of the passes in the cycle, and the time by which the cycle is shifted against that of the next device
(the *rotation*). If a microbatch waits between two passes, its activations live longer. So a combination of choices has
a cost: the memory held during the waits, times a price per device. The cheapest combination is found as a shortest path
from the last device to the first. The prices of devices that exceed their caps rise until all devices keep them
(Lagrange multipliers of the memory constraints).

A sampler chooses the combinations and intervals that are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations

import numpy as np

from megatron_pipemem.search.problem import FORWARD, INPUT, WEIGHT, Orders, Problem

# Two chunks have 120 cyclic orders. With a pause between two passes there are 720, too many for one table.
_ORDERS_WITH_A_PAUSE = 60


@dataclass(frozen=True)
class ClassWait:
    """A pass class (a kind on a stage) that waits for another class of the same microbatch."""

    source: int  # the needed class
    target: int  # the waiting class
    gap: int  # ticks from the start of ``source`` to the earliest start of ``target``


class Cycles:
    """All cyclic orders of every device, and the waits of a microbatch between them, for one interval in ticks.

    The problem has at most two chunks per device, because more chunks have too many cyclic orders. ``interval`` is at
    least the work of the busiest device. If it is longer, there are too many places for the idle time, and ``rng``
    picks some.
    """

    def __init__(self, problem: Problem, interval: int, rng: np.random.Generator) -> None:
        self.problem, self.interval = problem, interval
        p = problem.num_devices
        self._position = {c: index for classes in problem.classes for index, c in enumerate(classes)}
        orders: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
        self._starts = []
        for classes, work in zip(problem.classes, problem.work, strict=True):
            key = (tuple(problem.ticks[c] for c in classes), interval - work)
            if key not in orders:
                orders[key] = _cycle_starts(*key, rng)
            self._starts.append(orders[key])
        links = [
            ClassWait(other, c, problem.ticks[other] + lag)
            for c, waits in enumerate(problem.waits)
            for other, lag in waits
        ]
        device = problem.device
        self._local = [[link for link in links if device[link.source] == device[link.target] == d] for d in range(p)]
        self._hops = [
            [link for link in links if {device[link.source], device[link.target]} == {d, d + 1}] for d in range(p - 1)
        ]
        self._links = [(link.source, link.target) for link in links]
        self.num_links, self.most_orders = len(links), max(map(len, self._starts))
        self._local_waits = [[self._wait(d, link) for link in local] for d, local in enumerate(self._local)]
        shared: dict[tuple, np.ndarray] = {}
        self._hop_waits = [self._shared_waits(d, shared) for d in range(p - 1)]

    def _wait(self, device: int, link: ClassWait) -> np.ndarray:
        starts, position = self._starts[device], self._position
        return (starts[:, position[link.target]] - starts[:, position[link.source]] - link.gap) % self.interval

    def _shared_waits(self, device: int, shared: dict[tuple, np.ndarray]) -> np.ndarray:
        """Return the array of ``_waits``. Pairs of neighbouring devices with equal waits share one array."""
        links, position = self._hops[device], self._position
        below, above = self._starts[device], self._starts[device + 1]
        key = (
            id(below),
            id(above),
            tuple(
                (position[k.source], position[k.target], k.gap, self.problem.device[k.source] == device) for k in links
            ),
        )
        if key not in shared:
            shared[key] = self._waits(device)
        return shared[key]

    def _waits(self, device: int) -> np.ndarray:
        """Return the waits between a device and the next one, in ticks: ``[rotation, link, next order, own order]``.

        The rotations are those that make the wait of one of the links 0.
        """
        offsets, signs = self._offsets(device)
        return np.stack(
            [
                np.stack(
                    [(sign * (offset - zero)) % self.interval for offset, sign in zip(offsets, signs, strict=True)]
                )
                for zero in offsets
            ]
        ).astype(np.float32)

    def _offsets(self, device: int) -> tuple[list[np.ndarray], list[int]]:
        """Return a rotation and a sign for every link between a device and the next one, in either direction.

        The rotation is the number of ticks by which the next device must run earlier to make the link's wait 0:
        ``[next order, own order]``. The sign is 1 for links to the next device, and -1 for links from it.
        """
        below, above = self._starts[device], self._starts[device + 1]
        offsets, signs = [], []
        for link in self._hops[device]:
            source, target = self._position[link.source], self._position[link.target]
            if self.problem.device[link.source] == device:
                offsets.append(above[:, target, None] - below[None, :, source] - link.gap)
                signs.append(1)
            else:
                offsets.append(above[:, source, None] + link.gap - below[None, :, target])
                signs.append(-1)
        return offsets, signs

    def cheapest(self, prices: np.ndarray, variation: np.ndarray, among: np.ndarray | None = None) -> PeriodicBlock:
        """Return the block of the combination with the lowest cost of waits.

        ``prices`` has one price per device, for one memory unit held for one tick. ``variation`` has one factor per
        link. ``among`` has the indices of the cyclic orders to consider on devices that have more; ``None`` for all.
        """
        p = self.problem.num_devices
        weights = self._weights(prices, variation)
        counts = [len(starts) for starts in self._starts]
        picked = [np.arange(count) for count in counts]
        if among is not None:
            picked = [among[among < count] if count > len(among) else np.arange(count) for count in counts]
        best = np.zeros(0)
        choice: list[tuple[np.ndarray, np.ndarray]] = []
        for d in reversed(range(p)):
            local = np.zeros(len(picked[d]))
            for link, wait in zip(self._local[d], self._local_waits[d], strict=True):
                local += weights[link.source, link.target] * wait[picked[d]]
            if d == p - 1:
                best = local
                continue
            weight = np.array([weights[link.source, link.target] for link in self._hops[d]], dtype=np.float32)
            waits = self._hop_waits[d]
            if among is not None:
                waits = waits[:, :, picked[d + 1][:, None], picked[d]]
            cost = np.tensordot(waits, weight, axes=([1], [0]))
            rotation = cost.argmin(axis=0)
            total = np.take_along_axis(cost, rotation[None], axis=0)[0] + best[:, None]
            above = total.argmin(axis=0)
            columns = np.arange(total.shape[1])
            best = local + total[above, columns]
            choice.append((above, rotation[above, columns]))
        return self._follow(int(best.argmin()), choice[::-1], picked)

    def _follow(
        self, order: int, choice: list[tuple[np.ndarray, np.ndarray]], picked: list[np.ndarray]
    ) -> PeriodicBlock:
        """Return the block of the cheapest combination, given the ``order`` of device 0.

        ``choice`` has two arrays for every device but the last, indexed by the device's own order: the best order of
        the next device, and the best rotation. ``picked`` has the considered cyclic orders of every device. Orders are
        indices in ``picked``.
        """
        starts = np.zeros(len(self.problem.device), dtype=np.int64)
        shift = 0
        for d in range(self.problem.num_devices):
            for c in self.problem.classes[d]:
                starts[c] = self._starts[d][picked[d][order], self._position[c]] + shift
            if d < len(choice):
                above, rotation = choice[d]
                offsets, _ = self._offsets(d)
                next_order = int(above[order])
                turned = offsets[int(rotation[order])]
                shift -= int(turned[picked[d + 1][next_order], picked[d][order]])
                order = next_order
        return PeriodicBlock.along_chain(self.problem, self.interval, starts)

    def _weights(self, prices: np.ndarray, variation: np.ndarray) -> dict[tuple[int, int], float]:
        """Return the cost of one tick of waiting on every link: the memory held, times its price and ``variation``."""
        problem = self.problem
        memory = [0.0] * (problem.num_stages + 1)
        for stage in range(problem.num_stages):
            memory[stage + 1] = memory[stage] + prices[problem.device[3 * stage]] * problem.change[3 * stage]
        weights = {}
        for (source, target), factor in zip(self._links, variation, strict=True):
            if target % 3 == WEIGHT:
                price = prices[problem.device[target]] * -problem.change[target]
            else:
                price = memory[min(source, target) // 3 + 1]
            weights[source, target] = price * factor
        return weights


@dataclass(frozen=True)
class PeriodicBlock:
    """The starts of one microbatch's passes, which repeat at a fixed interval."""

    problem: Problem
    interval: int  # ticks from one microbatch to the next
    starts: tuple[int, ...]  # tick of every pass class

    @classmethod
    def along_chain(cls, problem: Problem, interval: int, offsets: np.ndarray) -> PeriodicBlock:
        """Return the block whose passes start as early as their inputs allow, at their offset modulo the interval."""
        starts = [0] * len(offsets)
        for c in (*problem.way, *range(WEIGHT, len(offsets), 3)):
            ready = int(offsets[c]) if c == FORWARD else 0
            for other, lag in problem.waits[c]:
                ready = max(ready, starts[other] + problem.ticks[other] + lag)
            starts[c] = ready + (int(offsets[c]) - ready) % interval
        return cls(problem, interval, tuple(starts))

    def delayed(self, after: int) -> PeriodicBlock:
        """Return the block with some passes delayed by one interval.

        All F in model order, followed by all I in reverse, are a chain. Its first ``after`` passes keep their times.
        All others are delayed, with their W. If ``after`` is ``-n``, only the W of stage ``n - 1`` is delayed.
        """
        if after < 0:
            later = {3 * (-after - 1) + WEIGHT}
        else:
            later = set(self.problem.way[after:])
            later |= {c + 1 for c in later if c % 3 == INPUT}
        starts = tuple(start + self.interval * (c in later) for c, start in enumerate(self.starts))
        return PeriodicBlock(self.problem, self.interval, starts)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Return the most memory of every device in the steady state, in memory steps."""
        result = []
        for classes in self.problem.classes:
            starts = np.array([self.starts[c] for c in classes])
            change = np.array([self.problem.change[c] for c in classes])
            begun = (starts[:, None] - starts[None, :]) // self.interval + 1
            result.append(int((begun * change[None, :]).sum(axis=1).max()))
        return tuple(result)

    def orders(self) -> Orders:
        """Return the orders of a step: the block, repeated for every microbatch. No peak exceeds the steady state's."""
        m = self.problem.units.num_microbatches
        microbatches = np.arange(m)
        orders = []
        for classes in self.problem.classes:
            starts = np.array([self.starts[c] for c in classes])
            times = (starts[:, None] + self.interval * microbatches[None, :]).ravel()
            passes = (np.array(classes)[:, None] * m + microbatches[None, :]).ravel()
            orders.append(passes[np.argsort(times, kind="stable")].tolist())
        return orders


def _cycle_starts(ticks: tuple[int, ...], idle: int, rng: np.random.Generator) -> np.ndarray:
    """Return the starts of a device's passes within its cycle, for every cyclic order: ``[order, pass]``.

    The first pass starts at 0 in all orders. Idle time is spread over all passes in proportion to their ticks. Some
    further orders, chosen at random, have the idle time in one piece.
    """
    spread = np.array([length * (sum(ticks) + idle) / sum(ticks) for length in ticks])
    rows = _tilings(spread)
    if idle:
        in_one_piece = _tilings(np.array([*ticks, idle]))[:, : len(ticks)]
        few = min(len(in_one_piece), _ORDERS_WITH_A_PAUSE)
        rows = np.concatenate([rows, in_one_piece[rng.choice(len(in_one_piece), few, replace=False)]])
    # Rounded up, so that no pass begins before the previous one has ended.
    return np.ceil(rows - 1e-6).astype(np.int64)


def _tilings(lengths: np.ndarray) -> np.ndarray:
    """Return the start of every piece (``[order, piece]``) if pieces follow one another, in every order with the same first."""
    orders = _orders(len(lengths))
    ends = np.cumsum(lengths[orders], axis=1)
    starts = np.empty_like(ends)
    np.put_along_axis(starts, orders, ends - lengths[orders], axis=1)
    return starts


@lru_cache(maxsize=16)
def _orders(count: int) -> np.ndarray:
    return np.array([(0, *order) for order in permutations(range(1, count))])


_BALANCING_ROUNDS = 12
# A few orders, others each time, are searched faster and also vary the blocks.
_ORDERS_PER_VARIATION = 60
_ELITES = 20
_MOST_DELAYS = 6

# Factor by which the interval grows until a block fits the caps, and number of intervals to try from there.
_STRETCH = 1.05
_INTERVALS = 4
_LONGEST_STRETCH = 3.0


class BlockSampler:
    """Propose blocks for one interval.

    The first blocks have adjusted prices, so that all devices come equally near to their caps. Then the costs of waits
    are varied at random. It is known at once whether a block keeps the caps, but not how fast a step begins and ends
    with it. So ``learn`` records makespans, and the variations of the best blocks are varied further.
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
    def is_balanced(self) -> bool:
        """Return whether the prices of devices are adjusted, so that random variations have begun."""
        return self._proposed >= _BALANCING_ROUNDS

    def propose(self) -> PeriodicBlock | None:
        """Make the next block; return ``None`` if that exceeds a cap or was proposed before."""
        variation, among = np.zeros(self.cycles.num_links), None
        if self.is_balanced:
            variation, among = self._variation(), self._rng.permutation(self.cycles.most_orders)[:_ORDERS_PER_VARIATION]
        block = self.cycles.cheapest(self._prices / self._caps, np.exp(variation), among)
        load = np.array(block.peaks) / self._caps
        fits = bool(load.max() <= 1)
        if not self.is_balanced:
            self._prices *= np.exp((load - load.mean()) * 2 / (1 + self._proposed * 0.2))
            self._prices /= self._prices.mean()
        else:
            # Wilder variations explore more, as long as their blocks fit.
            self._boldness = min(3.0, self._boldness * 1.05) if fits else max(0.05, self._boldness * 0.95)
        self._proposed += 1
        self.least_excess = min(self.least_excess, float(load.max()))
        if fits and self.is_balanced:
            block = self._deepened(block)
        if not fits or block.starts in self._seen:
            return None
        self._seen[block.starts] = variation
        return block

    def _deepened(self, block: PeriodicBlock) -> PeriodicBlock:
        """Delay random passes of a block by one interval, as far as the caps allow.

        A device then holds more microbatches, which shortens the end of a step.
        """
        stages = len(block.starts) // 3
        for _ in range(int(self._rng.integers(_MOST_DELAYS + 1))):
            deeper = block.delayed(int(self._rng.integers(-stages, 2 * stages)))
            if all(peak <= cap for peak, cap in zip(deeper.peaks, self._limits, strict=True)):
                block = deeper
        return block

    def learn(self, block: PeriodicBlock, makespan: int) -> None:
        """Record the makespan, in ticks, of a step with a proposed block."""
        self._elites = sorted([*self._elites, (makespan, block.starts)])[:_ELITES]

    def _variation(self) -> np.ndarray:
        rng, count = self._rng, self.cycles.num_links
        if self._elites and rng.random() < 0.4:
            _, starts = self._elites[min(len(self._elites) - 1, int(rng.exponential(2)))]
            touched = rng.random(count) < rng.choice([0.1, 0.3, 1.0])
            return self._seen[starts] + rng.standard_normal(count) * self._boldness * rng.random() * touched
        return rng.standard_normal(count) * self._boldness * rng.choice([0.1, 0.3, 1.0])


class PeriodicStarts:
    """Propose blocks for given costs, with intervals that become longer until blocks keep the caps.

    The first interval is the work of the busiest device. With a longer one, all devices idle in the steady state, too.
    Under a low cap with unequal costs, this may be unavoidable.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem = problem
        self._rng = np.random.default_rng(seed)
        self.stretch = 1.0
        """The longest interval so far, divided by the work of the busiest device."""
        self._samplers = [BlockSampler(problem, max(problem.work), self._rng)]
        self._fitting: list[BlockSampler] = []

    @property
    def leaves_idle(self) -> bool:
        """Return whether an interval longer than the work of the busiest device has been tried."""
        return self.stretch > 1

    def propose(self) -> tuple[BlockSampler, PeriodicBlock] | None:
        """Return a new block that keeps the caps, with its sampler; ``None`` if this trial found none."""
        sampler = self._pick()
        block = sampler.propose()
        if block is not None and sampler not in self._fitting:
            self._fitting.append(sampler)
        return None if block is None else (sampler, block)

    @property
    def is_exhausted(self) -> bool:
        return not self._fitting and self.stretch > _LONGEST_STRETCH

    def _pick(self) -> BlockSampler:
        newest = self._samplers[-1]
        if not newest.is_balanced:
            return newest
        hopeless = not self._fitting
        if hopeless or (self.leaves_idle and len(self._fitting) < _INTERVALS):
            # Far from the caps, small steps would only cost time.
            self.stretch *= max(_STRETCH, min(newest.least_excess / 1.1, 1.5)) if hopeless else _STRETCH
            interval = int(max(self._problem.work) * self.stretch)
            self._samplers.append(BlockSampler(self._problem, interval, self._rng))
            return self._samplers[-1]
        return self._fitting[int(self._rng.integers(len(self._fitting)))]
