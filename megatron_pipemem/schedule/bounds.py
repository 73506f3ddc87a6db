"""How fast a schedule could be at best: bounds that hold for every order, with split or full backwards."""

from __future__ import annotations

from itertools import accumulate

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement

# A cap written as a decimal fraction must not lose a stage by rounding.
_TOLERANCE = 1e-9


def lower_bound(
    placement: Placement, num_microbatches: int, costs: Costs | None = None, memory_cap: float | None = None
) -> float:
    """No schedule of this placement within this cap has a smaller makespan.

    The largest of three bounds, each taken on every device:

    - *Idle*: a device's work, plus what it must idle before its first backward, plus what it must idle after its last
      forward. Until the gradient of a microbatch can have come back, it runs nothing but forwards, as many as the cap
      admits. After its last forward that microbatch still has all its way to the loss and back to stage 0, while what
      the device holds by then is all that is left for it to do. The windows are disjoint unless all forwards fit the
      cap at once. For a V with equal costs ``u`` per pass and ``k`` stages in the cap this is ``(6m + 6p - 1 - 3k) u``,
      the bound of arXiv 2405.15362, appendix E.
    - *Area*: the time that activations live at least, summed, over how many the cap admits at once.
    - *Path*: one microbatch through all stages and back.

    Args:
        placement: which device holds which stage.
        num_microbatches: microbatches of one step.
        costs: seconds; its ``memory`` is not looked at.
        memory_cap: the most any device may hold, in activation units; ``None`` is no limit.

    Returns:
        Seconds.

    Raises:
        UnsupportedError: the cap does not admit one microbatch on some device, so there is no schedule at all.
        CostsError: the costs do not fit the placement.
    """
    chain = _Chain(placement, costs or Costs())
    stages = max(placement.stages, key=len)
    total = num_microbatches * len(stages)
    if memory_cap is not None:
        total = min(total, int(memory_cap * placement.num_stages + _TOLERANCE))
    if total < len(stages):
        raise UnsupportedError(
            f"no schedule of this placement holds less than {len(stages) / placement.num_stages:.4g} activation units, "
            f"one microbatch on one device; raise the memory cap of {memory_cap:.4g}"
        )
    return max(chain.device_bound(device, num_microbatches, total) for device in range(placement.num_devices))


class _Chain:
    """The way of one microbatch through all stages and back, in seconds."""

    def __init__(self, placement: Placement, costs: Costs) -> None:
        seconds = costs.seconds(placement)
        self._stages = placement.stages
        self._forward, self._input, self._weight = seconds[Kind.F], seconds[Kind.I], seconds[Kind.W]
        devices = placement.devices
        there = [costs.link_seconds(a, b) for a, b in zip(devices, devices[1:], strict=False)]
        back = [costs.link_seconds(b, a) for a, b in zip(devices, devices[1:], strict=False)]
        # Earliest start of a stage's F and I; the way from the end of a stage's I to that of stage 0.
        self._forward_start = list(accumulate((f + c for f, c in zip(self._forward, there, strict=False)), initial=0.0))
        turn = self._forward_start[-1] + self._forward[-1]
        returning = [i + c for i, c in zip(self._input[1:], back, strict=True)]
        self._input_start = list(accumulate(reversed(returning), initial=turn))[::-1]
        self._end = self._input_start[0] + self._input[0] + self._weight[0]

    def device_bound(self, device: int, m: int, cap: int) -> float:
        stages = self._stages[device]
        backward = [self._input[s] + self._weight[s] for s in stages]
        forward = [self._forward[s] for s in stages]
        work = m * (sum(forward) + sum(backward))
        first, last = stages[0], stages[-1]
        head = max(self._forward_start[first], self._input_start[last] - _most(forward, m, cap))
        after_last_forward = self._end - self._forward_start[last] - self._forward[last]
        tail = max(0.0, after_last_forward - _most(backward, m, cap))
        idle = head + tail if m * len(stages) > cap else max(head, tail)
        lives = (self._input_start[s] + self._input[s] + self._weight[s] - self._forward_start[s] for s in stages)
        return max(work + idle, m * sum(lives) / cap, self._end)


def _most(seconds: list[float], m: int, cap: int) -> float:
    """The longest that ``cap`` passes take, of ``m`` each that take these seconds."""
    longest = sorted(seconds, reverse=True)
    return sum(cost * max(0, min(m, cap - m * taken)) for taken, cost in enumerate(longest))
