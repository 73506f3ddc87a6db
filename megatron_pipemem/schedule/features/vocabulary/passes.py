"""Give any schedule of one pipeline its vocabulary passes and collectives.

A barrier is an exchange between the last stage's forward and backward that every device takes part in at some end of an
action. So all backwards of a microbatch are put off by one interval per barrier (the time in which a device works one
microbatch off), which every device then has for its part. That is the order; in a run of all devices in time it is then
filled with the passes: S as soon as X is there, T at the latest before the next S, so that one softmax is alive at a time,
the embedding's where a device would idle, or when they are due. Every collective is posted by all devices at the one
moment of that run when its data are there, by a device that is busy then before what it is busy with, since posting waits
for nobody: with one barrier a device's part of the input gradient, which needs the statistics, is there when the device next
is between two actions. The lists are thus cut from one sequence, and cannot wait for one another in a circle.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Order, Schedule
from megatron_pipemem.schedule.core.simulator import simulate
from megatron_pipemem.schedule.core.vocabulary import BARRIERS, check_placement
from megatron_pipemem.schedule.features.vocabulary.run import BACKWARD, Run
from megatron_pipemem.schedule.registry import synchronous_schedules


def with_barriers(schedule: Schedule, barriers: int, costs: Costs | None = None) -> Schedule:
    """Return the schedule with so many barriers, as it is where it has them already or none are asked for.

    Args:
        schedule: as ``with_vocabulary`` takes it, or with that many barriers.
        barriers: 0, 1 or 2.
        costs: what to fit the order to.

    Raises:
        PipememError: as ``with_vocabulary``.
    """
    if not barriers or schedule.vocabulary_barriers == barriers:
        return schedule
    return with_vocabulary(schedule, barriers, costs)


def with_vocabulary(schedule: Schedule, barriers: int, costs: Costs | None = None) -> Schedule:
    """Return the schedule with head and embedding cut over all devices.

    In flight come ``barriers`` microbatches more: on 1F1B device r holds ``p - r + barriers``.

    Args:
        schedule: valid, of one pipeline and one model copy, without vocabulary passes; forwards alone are taken too.
        barriers: 1 (Algorithm 2 of the paper) or 2 (Algorithm 1), see ``Schedule.vocabulary_barriers``.
        costs: what to fit the order to.

    Raises:
        UnsupportedError: the schedule is not of that sort.
        ScheduleError: the schedule waits for ever.
    """
    if barriers not in BARRIERS:
        raise UnsupportedError(f"vocabulary parallelism has 1 or 2 barriers, not {barriers!r}")
    if schedule.vocabulary_barriers:
        raise UnsupportedError(f"schedule {schedule.name!r} has vocabulary passes already; take the one without")
    if schedule.simulated_only:
        raise UnsupportedError(
            f"schedule {schedule.name!r} takes no vocabulary passes: {schedule.simulated_only}; take one that can be run"
        )
    if schedule.offloads or schedule.recomputed:
        raise UnsupportedError(
            f"schedule {schedule.name!r} moves or recomputes activations, which is not planned together with vocabulary "
            "passes; take one that does neither"
        )
    check_placement(schedule.placement)
    costs = costs or Costs()
    orders = _put_off(schedule, barriers, costs)
    return replace(schedule, orders=Run(schedule, orders, barriers, costs).lists(), vocabulary_barriers=barriers)


def _put_off(schedule: Schedule, barriers: int, costs: Costs) -> tuple[Order, ...]:
    """Return the orders with every backward ``barriers`` intervals later. Whatever came after something it needs still
    does.
    """
    timeline = simulate(schedule, _without_zeros(costs, schedule.placement))
    later = barriers * timeline.ideal / schedule.num_microbatches
    # Rounded, so that what differs by rounding only is a tie, in which backwards go first: they give memory back.
    unit = timeline.makespan * 1e-9
    orders = []
    for order, spans in zip(schedule.orders, timeline.spans, strict=True):
        keyed = [
            (round((start + later * (action.kind in BACKWARD)) / unit), action.kind not in BACKWARD, position)
            for position, (action, (start, _)) in enumerate(zip(order, spans, strict=True))
        ]
        orders.append(tuple(order[position] for _, _, position in sorted(keyed)))
    return tuple(orders)


def _without_zeros(costs: Costs, placement: Placement) -> Costs:
    """Let what takes no time take a little, so that start times tell the order of everything."""
    seconds = costs.seconds(placement)
    longest = max(max(prices) for prices in seconds.values()) or 1.0
    forward, inputs, weights = (
        tuple(max(price, 1e-4 * longest) for price in seconds[kind]) for kind in (Kind.F, Kind.I, Kind.W)
    )
    return replace(costs, forward=forward, backward_input=inputs, backward_weight=weights)


def families_with_passes(
    num_devices: int, num_microbatches: int, costs: Costs, barriers: int, max_chunks: int | None = None
) -> list[Schedule]:
    """Return the schedules of all synchronous families that the costs are for, with their passes; see
    ``synchronous_schedules``.

    Args:
        num_devices: pipeline ranks.
        num_microbatches: of one step.
        costs: what actions take, in seconds, and hold.
        barriers: 1 or 2.
        max_chunks: the most stages per device; ``None`` takes the families' own.
    """
    found = []
    for schedule in synchronous_schedules(num_devices, num_microbatches, costs, max_chunks):
        with suppress(CostsError):
            found.append(with_vocabulary(schedule, barriers, costs))
    return found
