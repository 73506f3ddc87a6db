"""Bound how fast a schedule could be at best, for every order, with split or full backwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
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
) -> float:
    """Return a makespan that no schedule of this placement within this cap undercuts.

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

    Args:
        placement: which device holds which stage; one replica of the model.
        num_microbatches: microbatches of one step.
        costs: seconds and memory.
        memory_cap: the most a device may hold, one number or one per device, in activation units or in the unit of
            ``costs.memory``; ``None`` is no limit.

    Returns:
        Seconds.

    Raises:
        UnsupportedError: the cap does not admit one microbatch on some device, so there is no schedule at all; or there are
            not as many caps as devices.
        CostsError: the costs do not fit the placement.
    """
    costs = costs or Costs()
    chain, unit = _Chain(placement, costs), costs.memory_unit(placement)
    p = placement.num_devices
    caps = (math.inf,) * p if memory_cap is None else per_device(memory_cap, p)
    bounds = []
    for device, cap in enumerate(caps):
        need = chain.least_held(device, num_microbatches) * unit
        if loosened(cap) < need:
            what = "activation units" if costs.memory is None else "bytes"
            raise UnsupportedError(
                f"no schedule of this placement holds less than {need:.4g} {what} on device {device}, one microbatch of its "
                f"stages; raise the memory cap of {cap:.4g}"
            )
        room = loosened(min(cap / unit, chain.most_held(device, num_microbatches)))
        bounds.append(chain.device_bound(device, num_microbatches, int(room) if costs.memory is None else room))
    return max(bounds)


def least_held(placement: Placement, num_microbatches: int, costs: Costs) -> list[float]:
    """Return per device, a cap below which it holds too much in every schedule: one microbatch on all its stages.

    When the first I or B of a stage is due, that microbatch has run forward on all stages, and backward on the later ones
    only. One microbatch after another, with full backwards where I takes memory, needs no more, unless the memory of some
    pass is odd: less than nothing after it, or something after the last one.

    Args:
        placement: which device holds which stage; one replica of the model.
        num_microbatches: microbatches of one step.
        costs: their ``memory``; activation units by default.

    Returns:
        In activation units, or in the unit of ``costs.memory``.
    """
    chain, unit = _Chain(placement, costs), costs.memory_unit(placement)
    return [chain.least_held(device, num_microbatches) * unit for device in range(placement.num_devices)]


class _Held(NamedTuple):
    """Hold what a stage holds of a microbatch after its F, after its I, and after its W or B."""

    forward: float
    input: float
    weight: float


def _held(placement: Placement, costs: Costs) -> list[_Held]:
    """Return what every stage holds, in the unit of ``Costs.memory_changes``."""
    changes, nothing = costs.memory_changes(placement), (0,) * placement.num_stages
    forward, inputs, weights, full = (changes.get(kind, nothing) for kind in (Kind.F, Kind.I, Kind.W, Kind.B))
    result = []
    for f, i, w, b in zip(forward, inputs, weights, full, strict=True):
        after = (f, f + i, f + min(i + w, b))
        rounding = 1e-12 * max(map(abs, (f, i, w, b)))
        result.append(_Held(*(0 if abs(left) <= rounding else left for left in after)))
    return result


class _Chain:
    """The way of one microbatch through all stages and back, in seconds."""

    def __init__(self, placement: Placement, costs: Costs) -> None:
        seconds = costs.seconds(placement)
        self._stages = placement.stages
        self._forward, self._input, self._weight = seconds[Kind.F], seconds[Kind.I], seconds[Kind.W]
        self._held = _held(placement, costs)
        devices = placement.devices
        there = [costs.link_seconds(a, b) for a, b in zip(devices, devices[1:], strict=False)]
        back = [costs.link_seconds(b, a) for a, b in zip(devices, devices[1:], strict=False)]
        # Earliest start of a stage's F and I; the way from the end of a stage's I to that of stage 0.
        self._forward_start = list(accumulate((f + c for f, c in zip(self._forward, there, strict=False)), initial=0.0))
        turn = self._forward_start[-1] + self._forward[-1]
        returning = [i + c for i, c in zip(self._input[1:], back, strict=True)]
        self._input_start = list(accumulate(reversed(returning), initial=turn))[::-1]
        self._end = self._input_start[0] + self._input[0] + self._weight[0]

    def least_held(self, device: int, m: int) -> float:
        """See the function of this name; in the unit of ``Costs.memory_changes``."""
        # Of one microbatch, as it is before and after its first I or B on every stage, the last first.
        stages = [self._held[s] for s in self._stages[device]]
        now = most = sum(held.forward for held in stages)
        for held in reversed(stages):
            now += min(held.input, held.weight) - held.forward
            most = max(most, now)
        # What others may give rather than take.
        others = (m - 1) * sum(min(0, *held) for held in stages)
        return max(0, most + others)

    def most_held(self, device: int, m: int) -> float:
        """Return what the device holds at most whatever the order, in the unit of ``Costs.memory_changes``."""
        return m * sum(max(0, *self._held[s]) for s in self._stages[device])

    def device_bound(self, device: int, m: int, cap: float) -> float:
        """Return the seconds that no order of a device undercuts.

        Args:
            device: whose work and memory are looked at.
            m: microbatches.
            cap: what it may hold, in the unit of ``Costs.memory_changes``.
        """
        stages = self._stages[device]
        work = m * sum(self._forward[s] + self._input[s] + self._weight[s] for s in stages)
        first, last = stages[0], stages[-1]
        forwards = [(self._forward[s], self._held[s].forward, m) for s in stages]
        head = max(self._forward_start[first], self._input_start[last] - _most(forwards, cap))
        after_last_forward = self._end - self._forward_start[last] - self._forward[last]
        tail = max(0.0, after_last_forward - self._left(stages, cap, m, last + 1))
        all_at_once = m * sum(self._held[s].forward for s in stages) <= loosened(cap)
        idle = max(head, tail) if all_at_once else head + tail
        for stage in stages:
            if stage == 0 and self._held[0].input > self._held[0].forward:
                continue  # in a full backward, which takes less, nothing comes after it
            after_last_input = self._end - self._input_start[stage] - self._input[stage]
            idle = max(idle, head + after_last_input - self._left(stages, cap, m, stage))
        return max(work + idle, m * self._lives(stages) / cap if cap else 0.0, self._end)

    def _lives(self, stages: Sequence[int]) -> float:
        """Return what a device holds of one microbatch, times for how long at least."""
        if any(min(self._held[s]) < 0 for s in stages):
            return 0.0  # for as long as one likes, something counts for less than nothing
        # During W, a split backward holds what I has left, a full one what F has.
        return sum(
            self._held[s].forward * (self._input_start[s] + self._input[s] - self._forward_start[s])
            + min(self._held[s].forward, self._held[s].input) * self._weight[s]
            for s in stages
        )

    def _left(self, stages: Sequence[int], cap: float, m: int, done: int) -> float:
        """Return the longest that a device's remaining backward can take when all its forwards have run.

        Args:
            stages: the device's.
            cap: what it may hold.
            m: microbatches.
            done: stages from this one up have run all their I; only W are left there.
        """
        shares = []
        for s in stages:
            held = self._held[s]
            if s < done:
                shares.append((self._input[s] + self._weight[s], held.forward, m))
            if s >= done or held.input != held.forward:
                shares.append((self._weight[s], held.input, m))
            if held.weight < 0:
                shares.append((0.0, held.weight, m))
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
