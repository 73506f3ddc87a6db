"""The way of a microbatch, or of its sequence slices, through all stages and back: how long it takes at least, and what it
holds on it. Lower bounds are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_pipemem.schedule.action import PLAIN, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement

Share = tuple[float, float, int]
"""Seconds and memory of a kind of work, and how much of it there is."""


class Held(NamedTuple):
    """Hold what a stage holds of a microbatch after its F, after its I, and after its W or B."""

    forward: float
    input: float
    weight: float


class Chain:
    """The way of a microbatch through all stages and back, in seconds, and what it holds on it.

    Args:
        count: how many microbatches are like this one.
        seconds: of F, I and W, per stage.
        links: of the messages between neighbouring stages, there and back.
        held: per stage.

    Attributes:
        forward_start: per stage, the earliest start of its F.
        input_start: likewise of its I.
        end: the earliest end of all.
        after_forward: per stage, the seconds that follow its F at least.
        after_input: likewise its I.
        alive: per stage, the seconds from the start of its F to the end of its I at least.
    """

    def __init__(
        self, count: int, seconds: Sequence[Sequence[float]], links: Sequence[Sequence[float]], held: Sequence[Held]
    ) -> None:
        self.count, self.held = count, held
        self.forward, self.input, self.weight = seconds
        self.there, self.back = links
        stages = range(len(held))
        self.forward_start = list(
            accumulate((f + c for f, c in zip(self.forward, self.there, strict=False)), initial=0.0)
        )
        turn = self.forward_start[-1] + self.forward[-1]
        returning = [i + c for i, c in zip(self.input[1:], self.back, strict=True)]
        self.input_start = list(accumulate(reversed(returning), initial=turn))[::-1]
        self.end = self.input_start[0] + self.input[0] + self.weight[0]
        self.after_forward = [self.end - self.forward_start[s] - self.forward[s] for s in stages]
        self.after_input = [self.end - self.input_start[s] - self.input[s] for s in stages]
        self.alive = [self.input_start[s] + self.input[s] - self.forward_start[s] for s in stages]

    def least_given(self, stages: Sequence[int]) -> float:
        """Return what it may give on a device's stages rather than take."""
        return sum(min(0, *self.held[s]) for s in stages)

    def lives(self, stages: Sequence[int]) -> float:
        """Return what a device holds of it, times for how long at least."""
        if any(min(self.held[s]) < 0 for s in stages):
            return 0.0  # for as long as one likes, something counts for less than nothing
        # During W, a split backward holds what I has left, a full one what F has.
        return sum(
            self.held[s].forward * self.alive[s] + min(self.held[s].forward, self.held[s].input) * self.weight[s]
            for s in stages
        )


def most_needed(slices: Sequence[Chain], stages: Sequence[int]) -> float:
    """Return the most that a microbatch holds on a device's stages as it is before and after its first I or B on every one of
    them, the last first.

    Args:
        slices: its chains, one of every slice. Of several, only the last slice's first I or B is looked at.
        stages: the device's.
    """
    now = most = sum(chain.held[s].forward for chain in slices for s in stages)
    for s in reversed(stages) if len(slices) == 1 else stages[-1:]:
        each = slices[-1].held[s]
        now += min(each.input, each.weight) - each.forward
        most = max(most, now)
    return most


def together(slices: Sequence[Chain], stage: int, seconds: Callable[[Chain, int], float]) -> list[Share]:
    """Return the work of a microbatch on a stage that holds what its forwards keep, and of which no slice is there without
    those before it: as shares of which, taken the densest first, none comes before those before it either.

    Args:
        slices: the chains of its slices.
        stage: of the work.
        seconds: of the work of a slice.
    """
    shares: list[Share] = []
    for chain in slices:
        shares.append((seconds(chain, stage), chain.held[stage].forward, chain.count))
        while len(shares) > 1:
            (before, held_before, count), (after, held_after, _) = shares[-2:]
            if min(held_before, held_after) < 0 or before * held_after >= after * held_before * (1 - 1e-12):
                break
            shares[-2:] = [(before + after, held_before + held_after, count)]
    return shares


def chains_of(placement: Placement, num_microbatches: int, costs: Costs, splits: bool, slices: int = 1) -> list[Chain]:
    """Return the chain of all microbatches where they are alike, and else that of every one; of slices, one after another.

    Args:
        placement: which device holds which stage.
        num_microbatches: microbatches of one step.
        costs: seconds and memory.
        splits: whether backwards may be split.
        slices: sequence slices of a microbatch.

    Raises:
        CostsError: the costs do not fit the placement, or their weights not the microbatches.
    """
    prices, held, devices = costs.seconds(placement, slices), _held(placement, costs, splits, slices), placement.devices
    seconds = [prices[kind] for kind in (Kind.F, Kind.I, Kind.W)]
    links = [
        [costs.link_seconds(*(ends if there else reversed(ends))) / slices for ends in pairwise(devices)]
        for there in (True, False)
    ]
    weights = costs.microbatch
    if weights is None:
        parts = [_backward([each[j::slices] for each in seconds], None, splits) for j in range(slices)]
        return _joined([Chain(num_microbatches, part, links, held[j::slices]) for j, part in enumerate(parts)])
    weights.check(num_microbatches)
    chains: list[Chain] = []
    factors = zip(*map(weights.seconds_of, (Kind.F, Kind.I, Kind.W)), weights.tokens, strict=True)
    for number, (*times, tokens) in enumerate(factors):
        own = [[each * weight for each in stages] for stages, weight in zip(seconds, times, strict=True)]
        of_full = weights.kinds.get(Kind.B)
        full = None if of_full is None else [each * of_full[number] for each in prices[Kind.B]]
        taken = _backward(own, full, splits)
        ways = [[link * tokens for link in each] for each in links]
        kept = [Held(*(left * tokens for left in each)) for each in held]
        parts = [[each[j::slices] for each in taken] for j in range(slices)]
        chains += _joined([Chain(1, part, ways, kept[j::slices]) for j, part in enumerate(parts)])
    return chains


def _held(placement: Placement, costs: Costs, splits: bool, slices: int) -> list[Held]:
    """Return what every stage holds of every slice, stage by stage, in the unit of ``Costs.memory_changes``."""
    changes, nothing = costs.memory_changes(placement, slices=slices), (0,) * (placement.num_stages * slices)
    forward, inputs, weights, full = (changes.get(kind, nothing) for kind in PLAIN)
    result = []
    for f, i, w, b in zip(forward, inputs, weights, full, strict=True):
        after = (f, f + i, f + min(i + w, b)) if splits else (f, f + b, f + b)
        rounding = 1e-12 * max(map(abs, (f, i, w, b)))
        result.append(Held(*(0 if abs(left) <= rounding else left for left in after)))
    for stage in range(placement.num_stages if slices > 1 else 0):
        own = slice(stage * slices, (stage + 1) * slices)
        result[own] = _settled(result[own])
    return result


def _settled(held: Sequence[Held]) -> list[Held]:
    """Return what a stage holds of the slices of a microbatch where none gives back what another one took: at no time more
    than it does.

    What I of a slice takes, and an earlier slice gives back, counts from the I of that one, which runs later. So do
    gradients of keys and values.
    """
    settled, left = list(held), 0.0
    for at in reversed(range(len(held))):
        each = held[at]
        spare = min(each.input, each.weight)
        given = min(left, -spare) if spare < 0 else 0.0
        left += max(0.0, spare) - given
        moved = given - max(0.0, spare)
        settled[at] = Held(each.forward, each.input + moved, each.weight + moved)
    return settled


def _backward(
    seconds: Sequence[Sequence[float]], full: Sequence[float] | None, splits: bool
) -> Sequence[Sequence[float]]:
    """Return what F, I and W take at least: no more than a B, where that has a price of its own, ``full``; and where every
    backward is a B, all of it comes before the gradient.
    """
    forward, inputs, weights = seconds
    if not splits:
        full = [i + w for i, w in zip(inputs, weights, strict=True)] if full is None else full
        return forward, full, [0.0] * len(full)
    if full is None:
        return seconds
    inputs = [min(i, b) for i, b in zip(inputs, full, strict=True)]
    return forward, inputs, [min(w, b - i) for i, w, b in zip(inputs, weights, full, strict=True)]


def _joined(slices: list[Chain]) -> list[Chain]:
    """Let the slices of a microbatch wait for one another: forward for the one before, backward for the one behind."""
    if len(slices) == 1:
        return slices
    top, final = len(slices[0].held) - 1, len(slices) - 1
    # Seconds from the start of every F to the end of the last F, and from the start of the first I to the end of every I.
    turning = [list(chain.forward) for chain in slices]
    returning = [list(chain.input) for chain in slices]
    for j in reversed(range(len(slices))):
        chain = slices[j]
        for s in reversed(range(top + 1)):
            onward = chain.there[s] + turning[j][s + 1] if s < top else 0.0
            turning[j][s] += max(onward, turning[j + 1][s] if j < final else 0.0)
            before_it = chain.back[s] + returning[j][s + 1] if s < top else 0.0
            returning[j][s] += max(before_it, returning[j + 1][s] if j < final else 0.0)
    for at, chain in enumerate(slices):
        before = slices[at - 1] if at else None
        for s in range(top + 1):
            start = chain.forward_start[s - 1] + chain.forward[s - 1] + chain.there[s - 1] if s else 0.0
            left = chain.back[s - 1] + chain.input[s - 1] + chain.after_input[s - 1] if s else 0.0
            if before is not None:
                start = max(start, before.forward_start[s] + before.forward[s])
                left = max(left, before.input[s] + before.after_input[s])
            chain.forward_start[s] = start
            chain.after_input[s] = left if s or at else chain.weight[0]
    turn = slices[-1].forward_start[top] + slices[-1].forward[top]
    after_turn = slices[-1].input[top] + slices[-1].after_input[top]
    for chain, there, back in zip(slices, turning, returning, strict=True):
        chain.input_start = [turn + whole - own for whole, own in zip(back, chain.input, strict=True)]
        chain.after_forward = [whole - own + after_turn for whole, own in zip(there, chain.forward, strict=True)]
        chain.alive = [a + b for a, b in zip(there, back, strict=True)]
        chain.end = chain.input_start[0] + chain.input[0] + chain.weight[0]
    return slices
