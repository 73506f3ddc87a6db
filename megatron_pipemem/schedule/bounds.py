"""Bound how fast a schedule could be at best, for every order, with split or full backwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.chains import Chain, Share, chains_of, most_needed, together
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened, per_device
from megatron_pipemem.schedule.placement import Placement

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

    Args:
        placement: which device holds which stage; one replica of the model.
        num_microbatches: microbatches of one step.
        costs: seconds and memory.
        memory_cap: the most a device may hold, one number or one per device, in activation units or in the unit of
            ``costs.memory``; ``None`` is no limit.
        splits: whether backwards may be split into I and W. Where they may not, a gradient leaves a stage with the end of
            its B, and the bound is higher.
        slices: sequence slices of a microbatch.

    Returns:
        Seconds.

    Raises:
        UnsupportedError: the cap does not admit one microbatch on some device, so there is no schedule at all; or there are
            not as many caps as devices.
        CostsError: the costs do not fit the placement, or their weights not the microbatches.
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

    Args:
        placement: which device holds which stage; one replica of the model.
        num_microbatches: microbatches of one step.
        costs: their ``memory``; activation units by default. Where they weigh microbatches, the largest needs most.
        slices: sequence slices of a microbatch.

    Returns:
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
        """Return the seconds that no order of a device undercuts.

        Args:
            device: whose work and memory are looked at.
            cap: what it may hold, in the unit of ``Costs.memory_changes``.
        """
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
        """Return the longest that a device's remaining backward can take when all its forwards have run.

        Args:
            stages: the device's.
            cap: what it may hold.
            done: stages from this one up have run all their I; only W are left there.
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
    """Return the longest that work takes which fits the cap at once.

    Args:
        shares: of the work.
        cap: what it may hold.
        whole: whether a share is there as a whole or not at all.
    """
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
