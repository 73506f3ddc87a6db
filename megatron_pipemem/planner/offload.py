"""Price activations that wait on the host, as a variant of any schedule (arXiv 2503.01328).

The copies are planned within the memory of each device and of its host, the longest-lived activations first.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.config.cluster import DEFAULT_HOST_SHARE
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import MemoryCapError, UnsupportedError
from megatron_pipemem.planner.prices import MeasuredSlowdown
from megatron_pipemem.planner.step import Step, price
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.costs import Channel
from megatron_pipemem.schedule.core.memory_cap import MemoryCap, parse_cap
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.knowledge import Knowledge, Shape
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.request import Request
from megatron_pipemem.schedule.resolve import resolve

HOST_MEMORY = "pipemem-host-memory"
"""The flag that says how much of a node's memory its ranks may use; a share of it otherwise."""


def offload_step(
    run: Run, placement: Placement, pace: MeasuredSlowdown | None = None, layers: tuple[int, ...] | None = None
) -> Step:
    """Price a step with the channel to the host, what goes over it, and how much of it the host can hold.

    Args:
        run: that is planned.
        placement: of its stages.
        pace: how much slower than modelled the passes were measured to be; ``None`` where nothing was measured.
        layers: of every stage; ``None`` lets the partition choose.
    """
    step = price(run, placement, layers, pace)
    host, sharing = run.cluster.host, run.cluster.sharing(0)
    moved = step.moved
    # Devices that share a switch take turns, so that one sends while another receives.
    channel = Channel(
        offload=tuple(nbytes / (host.d2h_gb_per_s * host.duplex * 1e9) for nbytes in moved),
        reload=tuple(nbytes / (host.h2d_gb_per_s * host.duplex * 1e9) for nbytes in moved),
        duplex=sharing == 1,
    )
    away = {Kind.WAIT_OFFLOAD: tuple(-nbytes for nbytes in moved), Kind.RELOAD: moved}
    costs = replace(step.costs, channel=channel, memory={**(step.costs.memory or {}), **away})
    return replace(step, costs=costs, host=host_bytes(run))


def host_bytes(run: Run) -> float:
    """Return the bytes of host memory for one rank's activations."""
    given = run.flags.get(HOST_MEMORY)
    if given is None:
        return DEFAULT_HOST_SHARE * run.cluster.host_bytes
    return parse_cap(str(given)).amount / run.cluster.devices_per_node


def offloaded(schedule: Schedule, step: Step, room: tuple[float, ...]) -> Schedule:
    """Return the schedule with transfers to the host and back, so that it fits.

    Args:
        schedule: an order that holds too much.
        step: from ``offload_step``.
        room: bytes that the activations of every device may take.

    Raises:
        UnsupportedError: too much has to stay.
    """
    request = Request(schedule.name, MemoryCap(room, True), offload=AUTO, file=schedule)
    shape = Shape(schedule.num_devices, None, schedule.num_microbatches)
    try:
        return resolve(request, shape, Knowledge(step.costs, host_budget=step.host)).schedule
    except MemoryCapError as error:
        why = ", ".join(error.obstacles) or "what runs at the time"
        raise UnsupportedError(f"too much has to stay on a device ({why})") from error
