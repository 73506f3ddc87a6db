"""PipeOffload (arXiv 2503.01328): offload half or all chunks of a schedule with *uniform repeating*.

In such a schedule, forwards run at the rate of the steady state from the beginning of a step. So activations are made
no faster than they can be copied to the host. Every W directly follows its I. The placement is interleaved or a V.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.interleaved import gis_h
from megatron_pipemem.families.v_shape import zbv
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.family import Formula, built_in
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.schedule import Order, Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.units import Units

_MOST_WAITING = 4


def with_prompt_weights(schedule: Schedule, costs: Costs) -> Iterator[Schedule]:
    """Yield five schedules with W moved: with at most 0, 1, 2, 3 or 4 W waiting on a device.

    A W also runs where its device would be idle for as long as the W takes. Nothing is yielded for a schedule without
    W.
    """
    if not any(action.kind is Kind.W for order in schedule.orders for action in order):
        return
    timeline = simulate(schedule, costs)
    for most in range(_MOST_WAITING + 1):
        yield replace(schedule, orders=tuple(_prompt(timeline, device, most) for device in range(schedule.num_devices)))


def _prompt(timeline: Timeline, device: int, most: int) -> Order:
    seconds = timeline.costs.seconds(timeline.schedule.placement)[Kind.W]
    waiting: deque[Action] = deque()
    order: list[Action] = []
    now = 0.0
    for action, (start, end) in zip(timeline.schedule.orders[device], timeline.spans[device], strict=True):
        if action.kind is Kind.W:
            continue
        while waiting and (now + seconds[waiting[0].stage] <= start or len(waiting) > most):
            weight = waiting.popleft()
            now += seconds[weight.stage]
            order.append(weight)
        order.append(action)
        now = max(now, start) + end - start
        if action.kind is Kind.I:
            waiting.append(action._replace(kind=Kind.W))
    return (*order, *waiting)


def uniform_repeating(
    num_devices: int, num_microbatches: int, chunks: int = 2, placement: str = "interleaved"
) -> Schedule:
    """Build a schedule with uniform repeating: forwards run at the steady rate from the beginning, and no W waits."""
    if placement == "interleaved":
        return gis_h(num_devices, num_microbatches, chunks, group_size=1)
    if placement != "v" or chunks != 2:
        raise UnsupportedError(
            "unsupported-placement",
            f"placement {shortened(placement)} with {chunks} chunks has no order that repeats uniformly; use interleaved with "
            "any number of chunks, or v with 2",
        )
    return next(with_prompt_weights(zbv(num_devices, Units.equal(num_microbatches)), Costs()))


def pipe_offload(
    name: str,
    part: int,
    num_devices: int,
    num_microbatches: int,
    chunks: int = 2,
    k: float | None = None,
    placement: str = "interleaved",
    offload_chunks: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Build PipeOffload: offload the longer-lived chunks of every device, as far as that lowers the peak.

    ``name`` becomes the name of the schedule. At most ``offload_chunks`` chunks per device are offloaded: by default
    all chunks divided by ``part``, rounded up. ``k`` is the seconds of a copy to the host and back, divided by those of
    F, I and W. The default is that of ``costs``, or 1.
    """
    from megatron_pipemem.features.offload.orders import plan_offload  # only here, because others do not need it

    check_whole(f"{name}: chunks", chunks, least=1)
    if offload_chunks is None:
        offload_chunks = -(-chunks // part)
    check_whole(f"{name}: offload_chunks", offload_chunks, least=0)
    base = uniform_repeating(num_devices, num_microbatches, chunks, placement)
    costs = costs or Costs()
    if k is not None or costs.channel is None:
        costs = replace(costs, channel=Channel(ratio=1.0 if k is None else k))
    # Over a V the warm-up is uniform only if it is spread.
    plan = plan_offload(base, costs, offload_chunks, spread_warmup=placement == "v")
    return replace(plan.schedule, name=name)


_OPTIONS = {
    "chunks": "stages per device, v (default 2)",
    "k": "seconds of a copy to the host and back, divided by those of F, I and W (default: by the costs, or 1)",
    "placement": "interleaved (default), or v",
    "offload_chunks": "the most chunks of a device to offload (default: half for po-h, all for po-f)",
    "costs": "seconds of every pass and copy (default F = I = W)",
}

_DECLARED: dict[str, Any] = {
    "bubble": Formula("less than (p-1)(F+I+W)", lambda p, f, b, **_: (p - 1) * (f + b), at_most=True),
    "source": "arXiv 2503.01328",
    "options": _OPTIONS,
    # Declared, because planning an example takes a tenth of a second and numpy.
    "placement": "interleaved",
    "splits_backward": True,
    "offloads": True,
    "outclassed_by": "the planner's offload copies only activations that do not fit into memory",
}

PO_H = built_in(
    name="po-h",
    build=partial(pipe_offload, "po-h", 2),
    summary="Offloads the longer-lived half of the chunks: on many devices a quarter of 1F1B's peak or less.",
    peak=Formula(
        "up to (v+2)/(8v) + 3/(pv) if k <= 1", lambda p, v, **_: (v + 2) / (8 * v) + 3 / (p * v), at_most=True
    ),
    **_DECLARED,
)
PO_F = built_in(
    name="po-f",
    build=partial(pipe_offload, "po-f", 1),
    summary="Offloads all chunks: a device holds the activations of a few chunks, whatever the number of chunks.",
    peak=Formula("up to 4/(pv) if k <= 1", lambda p, v, **_: 4 / (p * v), at_most=True),
    **_DECLARED,
)
