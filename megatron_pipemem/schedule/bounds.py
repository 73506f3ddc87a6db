"""How fast a schedule could be at best: bounds that hold for every order, with split or full backwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.placement import Placement

# Seconds and memory of a kind of work, and how much of it there is.
_Share = tuple[float, float, int]


def lower_bound(
    placement: Placement,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
) -> float:
    """No schedule of this placement within this cap has a smaller makespan.

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
    takes less room, and the tail of the idle bound and the area bound count it so.

    Args:
        placement: which device holds which stage; one replica of the model.
        num_microbatches: microbatches of one step.
        costs: seconds and memory.
        memory_cap: the most a device may hold, one number or one per device, in activation units or in the unit of
            ``costs.memory``; ``None`` is no limit.

    Returns:
        Seconds.

    Raises:
        UnsupportedError: the cap does not admit one microbatch on some device, so there is no schedule at all.
        CostsError: the costs do not fit the placement.
    """
    costs = costs or Costs()
    chain, unit = _Chain(placement, costs), costs.memory_unit(placement)
    needed = one_microbatch(placement, costs)
    if memory_cap is None:
        caps = [num_microbatches * each for each in needed]
    else:
        caps = list(memory_cap) if isinstance(memory_cap, Sequence) else [memory_cap] * placement.num_devices
    bounds = []
    for device, (cap, need) in enumerate(zip(caps, needed, strict=True)):
        if loosened(cap) < need:
            what = "activation units" if costs.memory is None else "bytes"
            raise UnsupportedError(
                f"no schedule of this placement holds less than {need:.4g} {what} on device {device}, one microbatch of its "
                f"stages; raise the memory cap of {cap:.4g}"
            )
        room = loosened(min(cap, num_microbatches * need) / unit)
        bounds.append(chain.device_bound(device, num_microbatches, int(room) if costs.memory is None else room))
    return max(bounds)


def one_microbatch(placement: Placement, costs: Costs) -> list[float]:
    """What every device holds of one microbatch on all its stages: the least cap that any schedule fits."""
    changes, nothing = costs.memory_changes(placement), (0,) * placement.num_stages
    # Forwards come first on all stages; an I that takes more comes on top for the device's last stage at least.
    forward, inputs = changes.get(Kind.F, nothing), changes.get(Kind.I, nothing)
    unit = costs.memory_unit(placement)
    return [(sum(forward[s] for s in stages) + max(0, inputs[stages[-1]])) * unit for stages in placement.stages]


class _Chain:
    """The way of one microbatch through all stages and back, in seconds."""

    def __init__(self, placement: Placement, costs: Costs) -> None:
        seconds = costs.seconds(placement)
        self._stages = placement.stages
        self._forward, self._input, self._weight = seconds[Kind.F], seconds[Kind.I], seconds[Kind.W]
        changes, nothing = costs.memory_changes(placement), (0,) * placement.num_stages
        self._takes = changes.get(Kind.F, nothing)
        # What is left after I, given back by W.
        self._keeps = [a + i for a, i in zip(self._takes, changes.get(Kind.I, nothing), strict=True)]
        devices = placement.devices
        there = [costs.link_seconds(a, b) for a, b in zip(devices, devices[1:], strict=False)]
        back = [costs.link_seconds(b, a) for a, b in zip(devices, devices[1:], strict=False)]
        # Earliest start of a stage's F and I; the way from the end of a stage's I to that of stage 0.
        self._forward_start = list(accumulate((f + c for f, c in zip(self._forward, there, strict=False)), initial=0.0))
        turn = self._forward_start[-1] + self._forward[-1]
        returning = [i + c for i, c in zip(self._input[1:], back, strict=True)]
        self._input_start = list(accumulate(reversed(returning), initial=turn))[::-1]
        self._end = self._input_start[0] + self._input[0] + self._weight[0]

    def device_bound(self, device: int, m: int, cap: float) -> float:
        """Seconds.

        Args:
            device: whose work and memory are looked at.
            m: microbatches.
            cap: what it may hold, in the unit of ``Costs.memory_changes``.
        """
        stages = self._stages[device]
        work = m * sum(self._forward[s] + self._input[s] + self._weight[s] for s in stages)
        first, last = stages[0], stages[-1]
        forwards = [(self._forward[s], self._takes[s], m) for s in stages]
        head = max(self._forward_start[first], self._input_start[last] - _most(forwards, cap))
        after_last_forward = self._end - self._forward_start[last] - self._forward[last]
        tail = max(0.0, after_last_forward - self._left(stages, cap, m, last + 1))
        all_at_once = m * sum(self._takes[s] for s in stages) <= loosened(cap)
        idle = max(head, tail) if all_at_once else head + tail
        for stage in stages:
            after_last_input = self._end - self._input_start[stage] - self._input[stage]
            idle = max(idle, head + after_last_input - self._left(stages, cap, m, stage))
        lives = sum(
            self._takes[s] * (self._input_start[s] + self._input[s] - self._forward_start[s])
            + self._keeps[s] * self._weight[s]
            for s in stages
        )
        return max(work + idle, m * lives / cap if cap else 0.0, self._end)

    def _left(self, stages: Sequence[int], cap: float, m: int, done: int) -> float:
        """The longest that a device's remaining backward can take when all its forwards have run.

        Args:
            stages: the device's.
            cap: what it may hold.
            m: microbatches.
            done: stages from this one up have run all their I; only W are left there.
        """
        shares = []
        for s in stages:
            if s < done:
                shares.append((self._input[s] + self._weight[s], self._takes[s], m))
            if s >= done or self._keeps[s] != self._takes[s]:
                shares.append((self._weight[s], self._keeps[s], m))
        return _most(shares, cap)


def _most(shares: Sequence[_Share], cap: float) -> float:
    """The longest that work takes which fits the cap at once."""
    if len({memory for _, memory, _ in shares}) == 1:
        memory = shares[0][1]
        left = int(loosened(cap / memory)) if memory > 0 else sum(count for _, _, count in shares)
        total = 0.0
        for seconds, _, count in sorted(shares, reverse=True):
            total += seconds * min(count, left)
            left -= min(count, left)
        return total
    if len(shares) == 2 and all(memory > 0 for _, memory, _ in shares):
        (seconds, memory, count), other = shares
        return max(
            n * seconds + _most([other], cap - n * memory) for n in range(min(count, int(loosened(cap / memory))) + 1)
        )
    # With parts of passes allowed, the densest first: never less than the best of whole ones.
    total, left = 0.0, max(0.0, cap)
    for seconds, memory, count in sorted(shares, key=lambda share: share[1] / share[0] if share[0] else float("inf")):
        taken = count if memory <= 0 else min(count, left / memory)
        total += seconds * taken
        left -= max(0.0, memory) * taken
    return total
