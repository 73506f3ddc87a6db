"""Lower bounds of the makespan and of the memory that hold for every order, with split or full backwards.

The bounds are computed from chains. A chain is one unit that runs forward through all stages and then backward through
them, with the least time of every part and the memory that it holds.
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
from megatron_pipemem.schedule.units import Units, as_units

Share = tuple[float, float, int]
"""Seconds and memory of a piece of work, and the number of such pieces."""


class StageMemory(NamedTuple):
    """The memory that a stage holds for one microbatch after its F, after its I, and after its W or B.

    The unit is that of ``Costs.memory_changes``.
    """

    forward: float
    input: float
    weight: float


class Chain:
    """The least times of one unit on every stage, in seconds, and the memory that it holds there.

    ``count`` microbatches are like this one. ``seconds`` has the seconds of F, of I and of W, each per stage. ``links``
    has the seconds of messages between neighbouring stages, forward and backward. ``memory`` has one ``StageMemory``
    per stage. Times count from the start of the microbatch's first F.

    Attributes:
        forward_start: per stage, the earliest start of F.
        input_start: per stage, the earliest start of I.
        end: the earliest end of the last action.
        after_forward: per stage, the least time from the end of F to ``end``.
        after_input: per stage, the least time from the end of I to ``end``.
        alive: per stage, the least time from the start of F to the end of I.
    """

    def __init__(
        self,
        count: int,
        seconds: Sequence[Sequence[float]],
        links: Sequence[Sequence[float]],
        memory: Sequence[StageMemory],
    ) -> None:
        self.count, self.memory = count, memory
        self.forward, self.input, self.weight = seconds
        self.there, self.back = links
        stages = range(len(memory))
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

    def least_memory(self, stages: Sequence[int]) -> float:
        """Sum the microbatch's lowest memory on each of the stages: 0, or less if more is freed than F took."""
        return sum(min(0, *self.memory[s]) for s in stages)

    def lives(self, stages: Sequence[int]) -> float:
        """Return the microbatch's memory times the least seconds that it is held, summed over a device's stages."""
        if any(min(self.memory[s]) < 0 for s in stages):
            return 0.0  # negative memory could last for any time
        # During W, a split backward holds the memory after I, a full one that after F.
        return sum(
            self.memory[s].forward * self.alive[s] + min(self.memory[s].forward, self.memory[s].input) * self.weight[s]
            for s in stages
        )


def most_needed(parts: Sequence[Chain], stages: Sequence[int]) -> float:
    """Return the peak memory that one microbatch alone needs on a device's stages.

    First the microbatch has run forward on all stages. Then it runs backward on one stage after another, from the
    last to the first. ``parts`` has the chains of the microbatch's parts. If there are several, only the first
    backward on the last stage is considered.
    """
    now = most = sum(chain.memory[s].forward for chain in parts for s in stages)
    for s in reversed(stages) if len(parts) == 1 else stages[-1:]:
        memory = parts[-1].memory[s]
        now += min(memory.input, memory.weight) - memory.forward
        most = max(most, now)
    return most


def together(parts: Sequence[Chain], stage: int, seconds: Callable[[Chain, int], float]) -> list[Share]:
    """Return a microbatch's work on a stage, divided into shares: those with most seconds per memory come first.

    ``parts`` has the chains of the microbatch's parts, and ``seconds(chain, stage)`` returns the seconds of a part's
    work there. A device never holds a part without the parts before it. So parts are joined until no share has more
    seconds per memory than an earlier one.
    """
    shares: list[Share] = []
    for chain in parts:
        shares.append((seconds(chain, stage), chain.memory[stage].forward, chain.count))
        while len(shares) > 1:
            (before, held_before, count), (after, held_after, _) = shares[-2:]
            if min(held_before, held_after) < 0 or before * held_after >= after * held_before * (1 - 1e-12):
                break
            shares[-2:] = [(before + after, held_before + held_after, count)]
    return shares


def chains_of(placement: Placement, units: Units, costs: Costs, splits: bool) -> list[list[Chain]]:
    """Return a list for every kind of microbatch, with one chain for every part of such a microbatch.

    Microbatches with equal numbers of parts are one kind, but with ``costs.microbatch`` every one is its own kind.
    ``splits`` says whether backwards may run as I and W.
    """
    n = units.parts
    prices, devices = costs.seconds(placement, units), placement.devices
    memory_of = {size: _stage_memory(placement, costs, splits, units, size) for size in units.counts}
    seconds = [prices[kind] for kind in (Kind.F, Kind.I, Kind.W)]
    there = [costs.link_seconds(device, following) / n for device, following in pairwise(devices)]
    back = [costs.link_seconds(following, device) / n for device, following in pairwise(devices)]
    links = [there, back]
    weights = costs.microbatch
    if weights is None:
        passes = _backward(seconds, None, splits)
        return [_joined(count, passes, links, memory_of[size], n, size) for size, count in units.counts.items()]
    weights.check(units.num_microbatches)
    groups: list[list[Chain]] = []
    sizes = units.sizes
    factors = zip(*map(weights.seconds_of, (Kind.F, Kind.I, Kind.W)), weights.tokens, strict=True)
    for number, (*times, tokens) in enumerate(factors):
        own = [[price * weight for price in stages] for stages, weight in zip(seconds, times, strict=True)]
        of_full = weights.kinds.get(Kind.B)
        full = None if of_full is None else [price * of_full[number] for price in prices[Kind.B]]
        own_links = [[link * tokens for link in direction] for direction in links]
        own_memory = [StageMemory(*(after * tokens for after in stage)) for stage in memory_of[sizes[number]]]
        groups.append(_joined(1, _backward(own, full, splits), own_links, own_memory, n, sizes[number]))
    return groups


def _stage_memory(placement: Placement, costs: Costs, splits: bool, units: Units, size: int) -> list[StageMemory]:
    """Return a ``StageMemory`` for every stage and part, stage by stage, in the unit of ``Costs.memory_changes``.

    The microbatch has only the first ``size`` of the ``units.parts`` with a price.
    """
    parts = units.parts
    changes, nothing = costs.memory_changes(placement, units=units), (0,) * (placement.num_stages * parts)
    forward, inputs, weights, full = (changes.get(kind, nothing) for kind in PLAIN)
    result = []
    for f, i, w, b in zip(forward, inputs, weights, full, strict=True):
        after = (f, f + i, f + min(i + w, b)) if splits else (f, f + b, f + b)
        rounding = 1e-12 * max(map(abs, (f, i, w, b)))
        result.append(StageMemory(*(0 if abs(left) <= rounding else left for left in after)))
    for stage in range(placement.num_stages if parts > 1 else 0):
        own = slice(stage * parts, stage * parts + size)
        result[own] = _without_repaid(result[own])
    return result


def _without_repaid(memory: Sequence[StageMemory]) -> list[StageMemory]:
    """Return a lower bound of the memory that a stage holds for every part of a microbatch, each part by itself.

    The I of a part may take memory that the later I of an earlier part gives back, as with gradients of keys and
    values. The result counts such memory from the later I on, so it is never more than the true memory.
    """
    bounds, left = list(memory), 0.0
    for at in reversed(range(len(memory))):
        after = memory[at]
        spare = min(after.input, after.weight)
        repaid = min(left, -spare) if spare < 0 else 0.0
        left += max(0.0, spare) - repaid
        moved = repaid - max(0.0, spare)
        bounds[at] = StageMemory(after.forward, after.input + moved, after.weight + moved)
    return bounds


def _backward(
    seconds: Sequence[Sequence[float]], full: Sequence[float] | None, splits: bool
) -> Sequence[Sequence[float]]:
    """Return the least seconds of F, I and W, each per stage.

    ``seconds`` has the prices of F, I and W, and ``full`` those of B if B has its own price. I and W then count for no
    more than B together. If backwards may not be split, I counts for the whole B, and W for nothing.
    """
    forward, inputs, weights = seconds
    if not splits:
        full = [i + w for i, w in zip(inputs, weights, strict=True)] if full is None else full
        return forward, full, [0.0] * len(full)
    if full is None:
        return seconds
    inputs = [min(i, b) for i, b in zip(inputs, full, strict=True)]
    return forward, inputs, [min(w, b - i) for i, w, b in zip(inputs, weights, full, strict=True)]


def _joined(
    count: int,
    passes: Sequence[Sequence[float]],
    links: Sequence[Sequence[float]],
    memory: Sequence[StageMemory],
    priced: int,
    size: int,
) -> list[Chain]:
    """Return the chains of a microbatch's parts, whose least times take account of one another.

    The F of a part waits for the part before it, and its I for the part after it. ``passes`` and ``memory`` have
    ``priced`` values per stage, of which the microbatch has the first ``size``.
    """
    parts = [Chain(count, [of_kind[j::priced] for of_kind in passes], links, memory[j::priced]) for j in range(size)]
    if size == 1:
        return parts
    top, final = len(parts[0].memory) - 1, len(parts) - 1
    # From the start of every F to the end of the last F, and from the start of the first I to the end of every I.
    turning = [list(chain.forward) for chain in parts]
    returning = [list(chain.input) for chain in parts]
    for j in reversed(range(len(parts))):
        chain = parts[j]
        for s in reversed(range(top + 1)):
            onward = chain.there[s] + turning[j][s + 1] if s < top else 0.0
            turning[j][s] += max(onward, turning[j + 1][s] if j < final else 0.0)
            before_it = chain.back[s] + returning[j][s + 1] if s < top else 0.0
            returning[j][s] += max(before_it, returning[j + 1][s] if j < final else 0.0)
    for at, chain in enumerate(parts):
        before = parts[at - 1] if at else None
        for s in range(top + 1):
            start = chain.forward_start[s - 1] + chain.forward[s - 1] + chain.there[s - 1] if s else 0.0
            left = chain.back[s - 1] + chain.input[s - 1] + chain.after_input[s - 1] if s else 0.0
            if before is not None:
                start = max(start, before.forward_start[s] + before.forward[s])
                left = max(left, before.input[s] + before.after_input[s])
            chain.forward_start[s] = start
            chain.after_input[s] = left if s or at else chain.weight[0]
    turn = parts[-1].forward_start[top] + parts[-1].forward[top]
    after_turn = parts[-1].input[top] + parts[-1].after_input[top]
    for chain, there, back in zip(parts, turning, returning, strict=True):
        chain.input_start = [turn + span - own for span, own in zip(back, chain.input, strict=True)]
        chain.after_forward = [span - own + after_turn for span, own in zip(there, chain.forward, strict=True)]
        chain.alive = [a + b for a, b in zip(there, back, strict=True)]
        chain.end = chain.input_start[0] + chain.input[0] + chain.weight[0]
    return parts


_MOST_TRIED = 4096  # ways to divide a cap between two kinds of work; beyond it, fractions change almost nothing


def lower_bound(
    placement: Placement,
    units: Units | int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    *,
    splits: bool = True,
    pairs: bool = False,
) -> float:
    """Return a makespan in seconds that no schedule with this placement and cap can beat, whatever its order.

    The result is the largest of four bounds over all devices:

    - *Idle*: the work of a device plus its least idle time at the start and at the end. At the start, the device runs
      only forwards until the first gradient can arrive, and no more forwards than the cap admits. At the end, the
      microbatch of the device's last forward goes on to the loss and back to stage 0. Meanwhile the device has only
      the backward work left that the cap allows it to hold. A second bound of the end begins after the last I of a
      stage: the remaining time is shorter, but only W are left on that stage. The idle times at start and end add
      up. The exception is the first bound of the end if all forwards fit the cap at once: then the larger idle time
      counts. For a V with equal costs ``u`` per pass and a cap of ``k`` stages the bound is at least
      ``(6m + 6p - 1 - 3k) u``, as in arXiv 2405.15362, appendix E.
    - *Area*: the sum over all microbatches of memory times the least time that it is held, divided by the cap. While
      the first forwards start one after another, and while the last input gradients end, the device cannot fill its
      cap. This unused area counts too.
    - *Life*: from the start of F to the end of I on a device's ``j``-th stage, a microbatch holds ``j`` stages there.
      If the cap admits ``n`` such microbatches at once, ``m`` of them take at least ``ceil(m / n)`` times as long.
    - *Path*: the time of one microbatch forward through all stages and backward again.

    If I gives back a part of the activations (``M_B`` and ``M_W`` of arXiv 2401.10241), a microbatch that waits for W
    holds less memory. The idle time at the end and the area bound take that into account. If I takes memory, such a
    microbatch holds more, unless a full backward avoids it.

    If microbatches have weights, the idle times are those of the microbatches that return or leave soonest. The path
    is that of the longest microbatch. The work within the cap is that with the most seconds per memory.

    If microbatches run in parts, the parts wait for one another: forward in order, backward in reverse. The
    first and the last pass are then those of a microbatch's first or last part.

    If actions may run in pairs (``pairs``), exchanges of experts' tokens count only on the path of one microbatch, which
    has no pairs. They may hide its W.

    If backwards may not be split (``splits``), a gradient leaves a stage at the end of its B, and the bound is higher.
    ``memory_cap`` is one number or one per device, in activation units or in the unit of ``costs.memory``. Raise an
    UnsupportedError if the cap admits no schedule. ``units`` may be a number of whole microbatches.
    """
    costs, units = costs or Costs(), as_units(units)
    if pairs and costs.have_exchanges:
        ways = (
            (Units.equal(1, units.parts), costs.with_hidden_weights(placement)),
            (units, costs.of_computing(placement)),
        )
        return max(lower_bound(placement, *way, memory_cap, splits=splits) for way in ways)
    step, unit = _Step(placement, units, costs, splits), costs.memory_unit(placement, units)
    p = placement.num_devices
    caps = (math.inf,) * p if memory_cap is None else per_device(memory_cap, p)
    weighs = costs.part_units is not None or (costs.microbatch is not None and costs.microbatch.memory is not None)
    counts_stages = costs.memory is None and not weighs
    bounds = []
    for device, cap in enumerate(caps):
        need = step.least_held(device) * unit
        if loosened(cap) < need:
            unit_name = "activation units" if costs.memory is None else "bytes"
            which = "one" if costs.microbatch is None else "the largest"
            raise UnsupportedError(
                "cap-unreachable",
                f"device {device} needs at least {need:.4g} {unit_name} with this placement, for {which} microbatch on "
                f"all its stages; raise the device's memory cap of {cap:.4g}",
            )
        room = loosened(min(cap / unit, step.most_held(device)))
        bounds.append(step.device_bound(device, int(room) if counts_stages else room))
    return max(bounds)


def least_held(placement: Placement, units: Units | int, costs: Costs) -> list[float]:
    """Return the lowest cap of every device that a schedule can keep: the peak of one microbatch on all its stages.

    A schedule that runs one microbatch after another needs no more, with full backwards if I takes memory. Costs can
    break this only if memory is negative after a pass, or is left over after the last pass. The unit is the
    activation unit, or that of ``costs.memory``.
    """
    units = as_units(units)
    step, unit = _Step(placement, units, costs), costs.memory_unit(placement, units)
    return [step.least_held(device) * unit for device in range(placement.num_devices)]


class _Step:
    """Compute the bounds of every device from the chains of all microbatches of a step."""

    def __init__(self, placement: Placement, units: Units, costs: Costs, splits: bool = True) -> None:
        self._stages = placement.stages
        self._steps = chains_of(placement, units, costs, splits)
        self._chains = [chain for parts in self._steps for chain in parts]
        # The first forward and last backward of a stage; the last forward and first backward.
        self._first, self._last = [parts[0] for parts in self._steps], [parts[-1] for parts in self._steps]

    def least_held(self, device: int) -> float:
        """Return the lowest memory cap with which a device can run, in the unit of ``Costs.memory_changes``."""
        stages, steps = self._stages[device], self._steps
        lowest_changes = [sum(chain.least_memory(stages) for chain in step) for step in steps]

        def lowest_change_of_others(step: list[Chain]) -> float:
            return sum(
                (other[0].count - (other is step)) * least for other, least in zip(steps, lowest_changes, strict=True)
            )

        return max(0, *(most_needed(step, stages) + lowest_change_of_others(step) for step in steps))

    def most_held(self, device: int) -> float:
        """Return the most memory that the device can hold in any order, in the unit of ``Costs.memory_changes``."""
        return sum(chain.count * sum(max(0, *chain.memory[s]) for s in self._stages[device]) for chain in self._chains)

    def device_bound(self, device: int, cap: float) -> float:
        """Return a lower bound of a step's seconds, from a device's work and its cap, in the unit of ``Chain.memory``."""
        stages, chains = self._stages[device], self._chains
        work = sum(c.count * sum(c.forward[s] + c.input[s] + c.weight[s] for s in stages) for c in chains)
        first, last = stages[0], stages[-1]
        forwards, are_single = self._in_turn(stages, lambda chain, s: chain.forward[s])
        head = max(
            min(c.forward_start[first] for c in self._first),
            min(c.input_start[last] for c in self._last) - _most(forwards, cap, are_single),
        )
        after_last_forward = min(c.after_forward[last] for c in self._last)
        tail = max(0.0, after_last_forward - self._left(stages, cap, last + 1))
        all_at_once = sum(c.count * sum(c.memory[s].forward for s in stages) for c in chains) <= loosened(cap)
        idle = max(head, tail) if all_at_once else head + tail
        for stage in stages:
            if stage == 0 and any(c.memory[0].input > c.memory[0].forward for c in chains):
                continue  # a full backward, which takes less memory, leaves nothing after it
            after_last_input = min(c.after_input[stage] for c in self._first)
            idle = max(idle, head + after_last_input - self._left(stages, cap, stage))
        return max(work + idle, self._area(stages, cap), self._life(stages, cap), max(c.end for c in chains))

    def _area(self, stages: Sequence[int], cap: float) -> float:
        """Return a lower bound of a step's seconds: the device's memory times the seconds that it is held, over the cap."""
        lives = sum(c.count * c.lives(stages) for c in self._chains)
        most = max(c.memory[s].forward for c in self._chains for s in stages)
        if not lives or not cap:
            return 0.0
        # No more steps than passes: then a step is long enough for both ramps, one after the other.
        steps = min(math.floor(cap / most), len(stages) * sum(c.count for c in self._chains))

        def ramp(seconds: float) -> float:
            """Return the unused area while passes of ``seconds`` fill the cap one after another."""
            return seconds * (steps * cap - most * steps * (steps + 1) / 2)

        def least(times: Callable[[Chain], Sequence[float]]) -> float:
            return min(times(c)[s] for c in self._chains for s in stages)

        rising = least(lambda c: c.forward_start) * cap + ramp(least(lambda c: c.forward))
        # After the last I, only W hold memory, one at a time. The n-th I from the end has n - 1 others after it, and a
        # W that runs before them all holds the memory of one more.
        falling = least(lambda c: c.after_input) * max(0.0, cap - most) + ramp(least(lambda c: c.input))
        return (lives + rising + falling) / cap

    def _life(self, stages: Sequence[int], cap: float) -> float:
        """Return a lower bound of a step's seconds from the number of microbatches that a device can hold at once."""
        if any(min(c.memory[s]) < 0 for c in self._chains for s in stages):
            return 0.0
        last, in_parts = self._last, len(self._chains) > len(self._last)
        taken, release = [0.0] * len(last), math.inf
        bound = 0.0
        for stage in stages:
            taken = [
                before + sum(c.memory[stage].forward for c in step)
                for before, step in zip(taken, self._steps, strict=True)
            ]
            at_once = _most([(1.0, memory, c.count) for memory, c in zip(taken, last, strict=True)], cap)
            turns = math.ceil(sum(c.count for c in last) / int(loosened(at_once)))
            # The first memory after I is released by the W of this stage, or on a stage before it.
            by_input = in_parts or any(c.memory[stage].input < c.memory[stage].forward for c in last)
            release = min(release, 0.0 if by_input else min(c.weight[stage] for c in last))
            start, after = min(c.forward_start[stage] for c in last), min(c.after_input[stage] for c in last)
            life = min(c.alive[stage] for c in last) + release
            bound = max(bound, start + turns * life + max(0.0, after - release))
            release += min(c.input[stage] for c in last)
        return bound

    def _left(self, stages: Sequence[int], cap: float, done: int) -> float:
        """Return the most seconds of backward work that a device can still hold within the cap after all its forwards.

        On stage ``done`` and the stages after it, every I has run, and only W are left.
        """
        # A part runs backward after the parts that follow it.
        waiting = [s for s in stages if s < done]
        shares, are_single = self._in_turn(waiting, lambda chain, s: chain.input[s] + chain.weight[s])
        for chain in self._chains:
            for s in stages:
                memory = chain.memory[s]
                if s >= done or memory.input != memory.forward:
                    shares.append((chain.weight[s], memory.input, chain.count))
                if memory.weight < 0:
                    shares.append((0.0, memory.weight, chain.count))
        return _most(shares, cap, are_single)

    def _in_turn(self, stages: Sequence[int], seconds: Callable[[Chain, int], float]) -> tuple[list[Share], bool]:
        """Return the shares of ``together`` of all microbatches on these stages, and whether each is a single part.

        A share is a single part if no parts were joined.
        """
        shares = [share for step in self._steps for s in stages for share in together(step, s, seconds)]
        return shares, len(shares) == len(self._chains) * len(stages)


def _most(shares: Sequence[Share], cap: float, are_single: bool = True) -> float:
    """Return the most seconds of work that the cap can hold at once, or an upper bound of them.

    ``are_single`` is the second value of ``_Step._in_turn``: every share is of one part. Fractions of passes then
    do not count if all passes take the same memory, or if there are two shares with few passes. In all other cases they
    count too, and the result is an upper bound.
    """
    for_nothing = [share for share in shares if share[1] <= 0]
    shares = [share for share in shares if share[1] > 0]
    total = sum(seconds * count for seconds, _, count in for_nothing)
    cap -= sum(memory * count for _, memory, count in for_nothing)
    if are_single and len({memory for _, memory, _ in shares}) == 1:
        left = int(loosened(cap / shares[0][1]))
        for seconds, _, count in sorted(shares, reverse=True):
            total += seconds * min(count, left)
            left -= min(count, left)
        return total
    if are_single and len(shares) == 2 and shares[0][2] <= _MOST_TRIED:
        (seconds, memory, count), other = shares
        return total + max(
            n * seconds + _most([other], cap - n * memory) for n in range(min(count, int(loosened(cap / memory))) + 1)
        )
    # Fractions of passes are allowed here, the densest first: never less than the best of whole passes.
    room = max(0.0, cap)
    for seconds, memory, count in sorted(shares, key=lambda share: share[1] / share[0] if share[0] else math.inf):
        taken = min(count, room / memory)
        total += seconds * taken
        room -= memory * taken
    return total
