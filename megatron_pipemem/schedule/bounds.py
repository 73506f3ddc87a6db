"""Bound how fast a schedule could be at best, for every order, with split or full backwards.

A bound is made of chains: the way of a microbatch, or of its sequence slices, through all stages and back, how long it takes at
least, and what it holds on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import PLAIN, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened, per_device
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
    """Return the most that a microbatch holds on a device's stages as it is before and after its first I or B on every one
    of them, the last first. ``slices`` are its chains; of several, only the last slice's first I or B is looked at.
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
    """Return the chain of all microbatches where they are alike, and else that of every one; of slices, one after another."""
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


_MOST_TRIED = 4096  # ways to share a cap between two kinds of work; with more, parts of passes change next to nothing


def lower_bound(
    placement: Placement,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    *,
    splits: bool = True,
    slices: int = 1,
) -> float:
    """Return a makespan that no schedule of this placement within this cap undercuts, in whatever order it takes the
    microbatches.

    The largest of three bounds, each taken on every device:

    - *Idle*: a device's work, plus what it must idle before its first backward, plus what it must idle at the end. Until
      the gradient of a microbatch can have come back, it runs nothing but forwards, as many as the cap admits. After
      its last forward that microbatch still has all its way to the loss and back to stage 0, while what the device
      holds by then is all that is left for it to do; after the last I of a stage the way is shorter, but only W are
      left there. The windows are disjoint, the first two unless all forwards fit the cap at once. For a V with equal
      costs ``u`` per pass and ``k`` stages in the cap this is ``(6m + 6p - 1 - 3k) u``, the bound of arXiv 2405.15362,
      appendix E.
    - *Area*: the time that activations live at least, summed, over how many the cap admits at once.
    - *Path*: one microbatch through all stages and back.

    Where I gives a part of the activations back (the ``M_B`` and ``M_W`` of arXiv 2401.10241), what waits for its W only
    takes less room, and the tail of the idle bound and the area bound count it so. Where I takes memory, it takes more,
    unless a full backward spares it.

    Where microbatches have weights, the first to come back, and the last to go out, may be the shortest of all. The path is
    that of the longest, and the cap admits whatever takes longest for what it holds.

    Where microbatches are cut into sequence slices, the way is that of the slices of one microbatch, which wait for one
    another: forward in their order and backward in the reverse. What comes first, and last, is of its first or last slice.

    ``memory_cap``: one number or one per device, in activation units or in the unit of ``costs.memory``. Where backwards
    may not be split, a gradient leaves a stage with the end of its B, and the bound is higher. Raise an UnsupportedError if
    the cap admits no schedule.
    """
    costs = costs or Costs()
    step, unit = _Step(placement, num_microbatches, costs, splits, slices), costs.memory_unit(placement, slices)
    p = placement.num_devices
    caps = (math.inf,) * p if memory_cap is None else per_device(memory_cap, p)
    weighs = costs.slice_units is not None or (costs.microbatch is not None and costs.microbatch.memory is not None)
    counts_stages = costs.memory is None and not weighs
    bounds = []
    for device, cap in enumerate(caps):
        need = step.least_held(device) * unit
        if loosened(cap) < need:
            what = "activation units" if costs.memory is None else "bytes"
            which = "one" if costs.microbatch is None else "the largest"
            raise UnsupportedError(
                "cap-unreachable",
                f"no schedule of this placement holds less than {need:.4g} {what} on device {device}, {which} microbatch of "
                f"its stages; raise the memory cap of {cap:.4g}",
            )
        room = loosened(min(cap / unit, step.most_held(device)))
        bounds.append(step.device_bound(device, int(room) if counts_stages else room))
    return max(bounds)


def least_held(placement: Placement, num_microbatches: int, costs: Costs, slices: int = 1) -> list[float]:
    """Return per device, a cap below which it holds too much in every schedule: one microbatch on all its stages.

    When the first I or B of a stage is due, that microbatch has run forward on all stages, and backward on the later ones
    only. One microbatch after another, with full backwards where I takes memory, needs no more, unless the memory of some
    pass is odd: less than nothing after it, or something after the last one.

    In activation units, or in the unit of ``costs.memory``.
    """
    step, unit = _Step(placement, num_microbatches, costs, slices=slices), costs.memory_unit(placement, slices)
    return [step.least_held(device) * unit for device in range(placement.num_devices)]


class _Step:
    """All microbatches of a step."""

    def __init__(
        self, placement: Placement, num_microbatches: int, costs: Costs, splits: bool = True, slices: int = 1
    ) -> None:
        self._stages = placement.stages
        self._chains = chains_of(placement, num_microbatches, costs, splits, slices)
        self._steps = [self._chains[at : at + slices] for at in range(0, len(self._chains), slices)]
        # What runs first on a stage forward, and last backward; and what runs last forward, and first backward.
        self._first, self._last = self._chains[::slices], self._chains[slices - 1 :: slices]

    def least_held(self, device: int) -> float:
        """See the function of this name; in the unit of ``Costs.memory_changes``."""
        stages, steps = self._stages[device], self._steps
        given = [sum(chain.least_given(stages) for chain in step) for step in steps]
        return max(
            max(
                0,
                most_needed(step, stages)
                + sum((other[0].count - (other is step)) * gives for other, gives in zip(steps, given, strict=True)),
            )
            for step in steps
        )

    def most_held(self, device: int) -> float:
        """Return what the device holds at most whatever the order, in the unit of ``Costs.memory_changes``."""
        return sum(chain.count * sum(max(0, *chain.held[s]) for s in self._stages[device]) for chain in self._chains)

    def device_bound(self, device: int, cap: float) -> float:
        """Return the seconds that no order of a device undercuts."""
        stages, chains = self._stages[device], self._chains
        work = sum(c.count * sum(c.forward[s] + c.input[s] + c.weight[s] for s in stages) for c in chains)
        first, last = stages[0], stages[-1]
        forwards, whole = self._in_turn(stages, lambda chain, s: chain.forward[s])
        head = max(
            min(c.forward_start[first] for c in self._first),
            min(c.input_start[last] for c in self._last) - _most(forwards, cap, whole),
        )
        after_last_forward = min(c.after_forward[last] for c in self._last)
        tail = max(0.0, after_last_forward - self._left(stages, cap, last + 1))
        all_at_once = sum(c.count * sum(c.held[s].forward for s in stages) for c in chains) <= loosened(cap)
        idle = max(head, tail) if all_at_once else head + tail
        for stage in stages:
            if stage == 0 and any(c.held[0].input > c.held[0].forward for c in chains):
                continue  # in a full backward, which takes less, nothing comes after it
            after_last_input = min(c.after_input[stage] for c in self._first)
            idle = max(idle, head + after_last_input - self._left(stages, cap, stage))
        lives = sum(c.count * c.lives(stages) for c in chains)
        return max(work + idle, lives / cap if cap else 0.0, max(c.end for c in chains))

    def _left(self, stages: Sequence[int], cap: float, done: int) -> float:
        """Return the longest that a device's remaining backward can take when all its forwards have run. ``done``: stages
        from this one up have run all their I; only W are left there.
        """
        # A slice has not gone back before those behind it have.
        waiting = [s for s in stages if s < done]
        shares, whole = self._in_turn(waiting, lambda chain, s: chain.input[s] + chain.weight[s])
        for chain in self._chains:
            for s in stages:
                held = chain.held[s]
                if s >= done or held.input != held.forward:
                    shares.append((chain.weight[s], held.input, chain.count))
                if held.weight < 0:
                    shares.append((0.0, held.weight, chain.count))
        return _most(shares, cap, whole)

    def _in_turn(self, stages: Sequence[int], seconds: Callable[[Chain, int], float]) -> tuple[list[Share], bool]:
        """Return the shares of ``together`` on some stages, and whether they are those of single slices."""
        shares = [share for step in self._steps for s in stages for share in together(step, s, seconds)]
        return shares, len(shares) == len(self._chains) * len(stages)


def _most(shares: Sequence[Share], cap: float, whole: bool = True) -> float:
    """Return the longest that work takes which fits the cap at once. ``whole``: a share is there as a whole or not at all."""
    for_nothing = [share for share in shares if share[1] <= 0]
    shares = [share for share in shares if share[1] > 0]
    total = sum(seconds * count for seconds, _, count in for_nothing)
    cap -= sum(memory * count for _, memory, count in for_nothing)
    if whole and len({memory for _, memory, _ in shares}) == 1:
        left = int(loosened(cap / shares[0][1]))
        for seconds, _, count in sorted(shares, reverse=True):
            total += seconds * min(count, left)
            left -= min(count, left)
        return total
    if whole and len(shares) == 2 and shares[0][2] <= _MOST_TRIED:
        (seconds, memory, count), other = shares
        return total + max(
            n * seconds + _most([other], cap - n * memory) for n in range(min(count, int(loosened(cap / memory))) + 1)
        )
    # With parts of passes allowed, the densest first: never less than the best of whole ones.
    room = max(0.0, cap)
    for seconds, memory, count in sorted(shares, key=lambda share: share[1] / share[0] if share[0] else math.inf):
        taken = min(count, room / memory)
        total += seconds * taken
        room -= memory * taken
    return total
