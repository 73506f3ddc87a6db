"""Split the idle time of every device of a measured step by its causes.

The step is run again several times, and every time with more of what really happened: with even stages and instant messages,
which leaves what the schedule makes unavoidable; with the usual time of every stage; with microbatches that are not alike;
with the delays of messages; with those of the host; and as it was. What a device idles more than the time before is due to what
was added. It is never less than nothing: where something makes a device idle less (a stage with more work than others), what
is left of the causes before it counts. How much of the whole the barrier at the step's end makes is what would be saved if
every device began the next step as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.measured import MeasuredStep

_STEPS = 8
"""Steps without a barrier, of which the second half is taken to have come to its period."""

SCHEDULE, IMBALANCE, MICROBATCHES, MESSAGES, HOST, LATE, BARRIER = (
    "warm-up and drain",
    "uneven stages",
    "unequal microbatches",
    "messages",
    "host",
    "late actions",
    "barrier",
)
CAUSES = (SCHEDULE, IMBALANCE, MICROBATCHES, MESSAGES, HOST, LATE, BARRIER)
"""In the order in which they are looked for."""


class DeviceIdle(NamedTuple):
    """Say why a device idled.

    Args:
        device: which.
        idle: nanoseconds in which it computed nothing, from the beginning of the step to its end.
        causes: nanoseconds by cause; they sum up to ``idle``.
        late: of the late actions, nanoseconds by the device that ran them.
    """

    device: int
    idle: int
    causes: Mapping[str, int]
    late: Mapping[int, int]


def idle_causes(step: MeasuredStep) -> list[DeviceIdle]:
    """Return why every device of a step idled."""
    actions, delays = step.actions, step.delays
    even = _of_actions(step, _even(step), weighed=False)
    stages = _of_actions(step, step.usual, weighed=False)
    weighed = _of_actions(step, step.usual, weighed=True)
    none = [0] * len(actions)
    of_messages = [delay * awaits for delay, awaits in zip(delays, step.awaits_message, strict=True)]
    levels = [(even, none), (stages, none), (weighed, none), (weighed, of_messages), (weighed, delays)]
    idle = [_idle(step, *level) for level in levels]
    whole = _idle(step, step.seconds, delays)
    saved = step.length - _period(step)
    by_device = [_late_alone(step, weighed, device) for device in range(step.schedule.num_devices)]
    found = []
    for device, total in enumerate(whole):
        reached = total - saved
        kept = [reached]
        for level in reversed(idle):
            kept.append(max(0, min(kept[-1], level[device])))
        kept.append(0)
        parts = [after - before for before, after in pairwise(reversed(kept))]
        causes = dict(zip(CAUSES, [*parts, saved], strict=True))
        more = [max(0, alone[device] - idle[-1][device]) for alone in by_device]
        found.append(DeviceIdle(device, total, causes, _shared(causes[LATE], more)))
    return found


def _even(step: MeasuredStep) -> dict[tuple[Kind, int], int]:
    """Return the times of actions if every stage took the mean of all, slice by slice."""
    by_kind: dict[tuple[Kind, int], list[int]] = {}
    slices = step.schedule.slices
    for (kind, at), seconds in step.usual.items():
        by_kind.setdefault((kind, at % slices), []).append(seconds)
    means = {key: round(sum(each) / len(each)) for key, each in by_kind.items()}
    return {(kind, at): means[kind, at % slices] for kind, at in step.usual}


def _of_actions(step: MeasuredStep, seconds: Mapping[tuple[Kind, int], int], weighed: bool) -> list[int]:
    weights, slices = step.weights, step.schedule.slices
    found = []
    for action in step.actions:
        one = seconds.get(step.key_of(action), 0)
        found.append(round(one * weights[action.microbatch // slices]) if weighed else one)
    return found


def _idle(step: MeasuredStep, seconds: list[int], delays: list[int]) -> list[int]:
    length = max(step.rerun(seconds, delays).free)
    return [length - work for work in step.work_of(seconds)]


def _late_alone(step: MeasuredStep, usual: list[int], late: int) -> list[int]:
    """Return how long every device would idle if the actions of one device alone took as long as they did."""
    nodes = zip(step.lanes, step.seconds, usual, strict=True)
    seconds = [real if device == late else one for device, real, one in nodes]
    return _idle(step, seconds, step.delays)


def _shared(amount: int, weights: list[int]) -> dict[int, int]:
    """Share an amount out by weights, exactly; what rounding leaves goes to the largest."""
    total = sum(weights)
    if not amount:
        return {}
    if not total:
        weights, total = [1] * len(weights), len(weights)
    shares = [amount * weight // total for weight in weights]
    shares[weights.index(max(weights))] += amount - sum(shares)
    return {device: share for device, share in enumerate(shares) if share}


def _period(step: MeasuredStep) -> int:
    """Return the time from step to step if no device waited for another one at the end of a step; no more than the step
    took. Of a schedule with replicas of the model, whose gradients are summed up at the end, it is what the step took.
    """
    if step.schedule.placement.replicas > 1 or step.schedule.updates is not None:
        return step.length
    begins: list[int] = [0] * step.schedule.num_devices
    ends = [0]
    for _ in range(_STEPS):
        begins = step.rerun(step.seconds, step.delays, begins).free
        ends.append(max(begins))
    half = _STEPS // 2
    period = -((ends[half] - ends[_STEPS]) // half)
    return min(step.length, max(period, *step.work_of(step.seconds)))
