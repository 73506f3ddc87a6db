"""Bound how fast a schedule could be at best, for every order, with split or full backwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.memory_cap import loosened, per_device
from megatron_pipemem.schedule.core.placement import Placement

# Seconds and memory of a kind of work, and how much of it there is.
_Share = tuple[float, float, int]


def lower_bound(
    placement: Placement,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    *,
    splits: bool = True,
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

    Args:
        placement: which device holds which stage; one replica of the model.
        num_microbatches: microbatches of one step.
        costs: seconds and memory.
        memory_cap: the most a device may hold, one number or one per device, in activation units or in the unit of
            ``costs.memory``; ``None`` is no limit.
        splits: whether backwards may be split into I and W. Where they may not, a gradient leaves a stage with the end of
            its B, and the bound is higher.

    Returns:
        Seconds.

    Raises:
        UnsupportedError: the cap does not admit one microbatch on some device, so there is no schedule at all; or there are
            not as many caps as devices.
        CostsError: the costs do not fit the placement, or their weights not the microbatches.
    """
    costs = costs or Costs()
    step, unit = _Step(placement, num_microbatches, costs, splits), costs.memory_unit(placement)
    p = placement.num_devices
    caps = (math.inf,) * p if memory_cap is None else per_device(memory_cap, p)
    counts_stages = costs.memory is None and (costs.microbatch is None or costs.microbatch.memory is None)
    bounds = []
    for device, cap in enumerate(caps):
        need = step.least_held(device) * unit
        if loosened(cap) < need:
            what = "activation units" if costs.memory is None else "bytes"
            which = "one" if costs.microbatch is None else "the largest"
            raise UnsupportedError(
                f"no schedule of this placement holds less than {need:.4g} {what} on device {device}, {which} microbatch of "
                f"its stages; raise the memory cap of {cap:.4g}"
            )
        room = loosened(min(cap / unit, step.most_held(device)))
        bounds.append(step.device_bound(device, int(room) if counts_stages else room))
    return max(bounds)


def least_held(placement: Placement, num_microbatches: int, costs: Costs) -> list[float]:
    """Return per device, a cap below which it holds too much in every schedule: one microbatch on all its stages.

    When the first I or B of a stage is due, that microbatch has run forward on all stages, and backward on the later ones
    only. One microbatch after another, with full backwards where I takes memory, needs no more, unless the memory of some
    pass is odd: less than nothing after it, or something after the last one.

    Args:
        placement: which device holds which stage; one replica of the model.
        num_microbatches: microbatches of one step.
        costs: their ``memory``; activation units by default. Where they weigh microbatches, the largest needs most.

    Returns:
        In activation units, or in the unit of ``costs.memory``.
    """
    step, unit = _Step(placement, num_microbatches, costs), costs.memory_unit(placement)
    return [step.least_held(device) * unit for device in range(placement.num_devices)]


class _Held(NamedTuple):
    """Hold what a stage holds of a microbatch after its F, after its I, and after its W or B."""

    forward: float
    input: float
    weight: float


def _held(placement: Placement, costs: Costs, splits: bool) -> list[_Held]:
    """Return what every stage holds, in the unit of ``Costs.memory_changes``."""
    changes, nothing = costs.memory_changes(placement), (0,) * placement.num_stages
    forward, inputs, weights, full = (changes.get(kind, nothing) for kind in (Kind.F, Kind.I, Kind.W, Kind.B))
    result = []
    for f, i, w, b in zip(forward, inputs, weights, full, strict=True):
        after = (f, f + i, f + min(i + w, b)) if splits else (f, f + b, f + b)
        rounding = 1e-12 * max(map(abs, (f, i, w, b)))
        result.append(_Held(*(0 if abs(left) <= rounding else left for left in after)))
    return result


class _Chain:
    """The way of a microbatch through all stages and back, in seconds, and what it holds on it.

    Args:
        count: how many microbatches are like this one.
        seconds: of F, I and W, per stage.
        links: of the messages between neighbouring stages, there and back.
        held: per stage.
    """

    def __init__(
        self, count: int, seconds: Sequence[Sequence[float]], links: Sequence[Sequence[float]], held: Sequence[_Held]
    ) -> None:
        self.count, self.held = count, held
        self.forward, self.input, self.weight = seconds
        there, back = links
        # Earliest start of a stage's F and I; the way from the end of a stage's I to that of stage 0.
        self.forward_start = list(accumulate((f + c for f, c in zip(self.forward, there, strict=False)), initial=0.0))
        turn = self.forward_start[-1] + self.forward[-1]
        returning = [i + c for i, c in zip(self.input[1:], back, strict=True)]
        self.input_start = list(accumulate(reversed(returning), initial=turn))[::-1]
        self.end = self.input_start[0] + self.input[0] + self.weight[0]

    def most_needed(self, stages: Sequence[int]) -> float:
        """Return the most that it holds on a device's stages as it is before and after its first I or B on every one of
        them, the last first.
        """
        held = [self.held[s] for s in stages]
        now = most = sum(each.forward for each in held)
        for each in reversed(held):
            now += min(each.input, each.weight) - each.forward
            most = max(most, now)
        return most

    def least_given(self, stages: Sequence[int]) -> float:
        """Return what it may give on a device's stages rather than take."""
        return sum(min(0, *self.held[s]) for s in stages)

    def lives(self, stages: Sequence[int]) -> float:
        """Return what a device holds of it, times for how long at least."""
        if any(min(self.held[s]) < 0 for s in stages):
            return 0.0  # for as long as one likes, something counts for less than nothing
        # During W, a split backward holds what I has left, a full one what F has.
        return sum(
            self.held[s].forward * (self.input_start[s] + self.input[s] - self.forward_start[s])
            + min(self.held[s].forward, self.held[s].input) * self.weight[s]
            for s in stages
        )


def _chains(placement: Placement, num_microbatches: int, costs: Costs, splits: bool) -> list[_Chain]:
    """Return the chain of all microbatches where they are alike, and else that of every one."""
    prices, held, devices = costs.seconds(placement), _held(placement, costs, splits), placement.devices
    seconds = [prices[kind] for kind in (Kind.F, Kind.I, Kind.W)]
    links = [
        [costs.link_seconds(*(ends if there else reversed(ends))) for ends in pairwise(devices)]
        for there in (True, False)
    ]
    weights = costs.microbatch
    if weights is None:
        return [_Chain(num_microbatches, _backward(seconds, None, splits), links, held)]
    weights.check(num_microbatches)
    chains = []
    factors = zip(*map(weights.seconds_of, (Kind.F, Kind.I, Kind.W)), weights.tokens, strict=True)
    for number, (*times, tokens) in enumerate(factors):
        own = [[each * weight for each in stages] for stages, weight in zip(seconds, times, strict=True)]
        of_full = weights.kinds.get(Kind.B)
        full = None if of_full is None else [each * of_full[number] for each in prices[Kind.B]]
        ways = [[link * tokens for link in each] for each in links]
        kept = [_Held(*(left * tokens for left in each)) for each in held]
        chains.append(_Chain(1, _backward(own, full, splits), ways, kept))
    return chains


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


class _Step:
    """All microbatches of a step."""

    def __init__(self, placement: Placement, num_microbatches: int, costs: Costs, splits: bool = True) -> None:
        self._stages = placement.stages
        self._chains = _chains(placement, num_microbatches, costs, splits)

    def least_held(self, device: int) -> float:
        """See the function of this name; in the unit of ``Costs.memory_changes``."""
        stages, chains = self._stages[device], self._chains
        given = [chain.least_given(stages) for chain in chains]
        return max(
            max(
                0,
                chain.most_needed(stages)
                + sum((other.count - (other is chain)) * gives for other, gives in zip(chains, given, strict=True)),
            )
            for chain in chains
        )

    def most_held(self, device: int) -> float:
        """Return what the device holds at most whatever the order, in the unit of ``Costs.memory_changes``."""
        return sum(chain.count * sum(max(0, *chain.held[s]) for s in self._stages[device]) for chain in self._chains)

    def device_bound(self, device: int, cap: float) -> float:
        """Return the seconds that no order of a device undercuts.

        Args:
            device: whose work and memory are looked at.
            cap: what it may hold, in the unit of ``Costs.memory_changes``.
        """
        stages, chains = self._stages[device], self._chains
        work = sum(c.count * sum(c.forward[s] + c.input[s] + c.weight[s] for s in stages) for c in chains)
        first, last = stages[0], stages[-1]
        forwards = [(c.forward[s], c.held[s].forward, c.count) for c in chains for s in stages]
        head = max(
            min(c.forward_start[first] for c in chains), min(c.input_start[last] for c in chains) - _most(forwards, cap)
        )
        after_last_forward = min(c.end - c.forward_start[last] - c.forward[last] for c in chains)
        tail = max(0.0, after_last_forward - self._left(stages, cap, last + 1))
        all_at_once = sum(c.count * sum(c.held[s].forward for s in stages) for c in chains) <= loosened(cap)
        idle = max(head, tail) if all_at_once else head + tail
        for stage in stages:
            if stage == 0 and any(c.held[0].input > c.held[0].forward for c in chains):
                continue  # in a full backward, which takes less, nothing comes after it
            after_last_input = min(c.end - c.input_start[stage] - c.input[stage] for c in chains)
            idle = max(idle, head + after_last_input - self._left(stages, cap, stage))
        lives = sum(c.count * c.lives(stages) for c in chains)
        return max(work + idle, lives / cap if cap else 0.0, max(c.end for c in chains))

    def _left(self, stages: Sequence[int], cap: float, done: int) -> float:
        """Return the longest that a device's remaining backward can take when all its forwards have run.

        Args:
            stages: the device's.
            cap: what it may hold.
            done: stages from this one up have run all their I; only W are left there.
        """
        shares = []
        for chain in self._chains:
            for s in stages:
                held = chain.held[s]
                if s < done:
                    shares.append((chain.input[s] + chain.weight[s], held.forward, chain.count))
                if s >= done or held.input != held.forward:
                    shares.append((chain.weight[s], held.input, chain.count))
                if held.weight < 0:
                    shares.append((0.0, held.weight, chain.count))
        return _most(shares, cap)


def _most(shares: Sequence[_Share], cap: float) -> float:
    """Return the longest that work takes which fits the cap at once."""
    for_nothing = [share for share in shares if share[1] <= 0]
    shares = [share for share in shares if share[1] > 0]
    total = sum(seconds * count for seconds, _, count in for_nothing)
    cap -= sum(memory * count for _, memory, count in for_nothing)
    if len({memory for _, memory, _ in shares}) == 1:
        left = int(loosened(cap / shares[0][1]))
        for seconds, _, count in sorted(shares, reverse=True):
            total += seconds * min(count, left)
            left -= min(count, left)
        return total
    if len(shares) == 2:
        (seconds, memory, count), other = shares
        return total + max(
            n * seconds + _most([other], cap - n * memory) for n in range(min(count, int(loosened(cap / memory))) + 1)
        )
    # With parts of passes allowed, the densest first: never less than the best of whole ones.
    left = max(0.0, cap)
    for seconds, memory, count in sorted(shares, key=lambda share: share[1] / share[0] if share[0] else math.inf):
        taken = min(count, left / memory)
        total += seconds * taken
        left -= memory * taken
    return total
