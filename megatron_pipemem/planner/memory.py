"""Say whether a run as it is configured fits into its devices' memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_pipemem.config import layout
from megatron_pipemem.config.runs import Run
from megatron_pipemem.planner.offload import offload_step
from megatron_pipemem.planner.step import price
from megatron_pipemem.planner.vocabulary import vocabulary_step
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.bounds import least_held
from megatron_pipemem.schedule.core.memory_cap import MemoryCap, parse_cap
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import host_peaks, peaks
from megatron_pipemem.schedule.core.weights import versions_held
from megatron_pipemem.schedule.features.offload import plan_offload
from megatron_pipemem.schedule.features.vocabulary.needs import BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.features.vocabulary.passes import with_vocabulary
from megatron_pipemem.schedule.options import AUTO, STOCK
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.request import FILE_SUFFIX, schedule_of_file


@dataclass(frozen=True)
class MemoryUse:
    """The most that every pipeline rank holds, in bytes.

    Args:
        device: on its device, everything included.
        host: on the host, of its activations.
        room: on the host, for them.
    """

    device: tuple[float, ...]
    host: tuple[float, ...]
    room: float


def held(run: Run) -> MemoryUse | None:
    """Return the bytes that a run holds; of a search, the least it could find, and of vocabulary parallelism left open,
    the least way.

    ``None`` where the run leaves the layers of the stages to Megatron.

    Raises:
        PipememError: there is no such schedule, or it cannot do what is asked of it.
    """
    choice, cut = run.schedule, run.parallelism
    schedule = None if choice.name == AUTO else schedule_of(run)
    placement = Placement.interleaved(cut.pp, cut.chunks or 2) if schedule is None else schedule.placement
    layers = layout.layers_of(run, placement.model_stages)
    if layers is None:
        return None
    ways = [_held(run, placement, schedule, layers, barriers) for barriers in _barriers(run, schedule)]
    return min(ways, key=lambda way: max(way.device))


def schedule_of(run: Run) -> Schedule:
    """The schedule that a run names, as it is before offload and vocabulary passes are added.

    Raises:
        PipememError: there is no such schedule, or not of these sizes.
    """
    choice, cut = run.schedule, run.parallelism
    cap = _cap(run) if choice.offload == "off" else None  # which keeps it by offloading
    units = None if cap is None or cap.in_bytes else cap.amount
    if choice.name.endswith(FILE_SUFFIX):
        return schedule_of_file(choice.name, units)
    name = choice.name
    if name == STOCK:
        name = "1f1b" if (cut.chunks or 1) == 1 else "interleaved"
    size = {"num_devices": cut.pp, "num_microbatches": cut.microbatches}
    return build_schedule(name, **size, memory_cap=units, **run.schedule_options)


def _barriers(run: Run, schedule: Schedule | None) -> tuple[int, ...]:
    """The ways to hold the vocabulary that a run may come to, by their number of barriers; 0 for whole."""
    asked = run.schedule.vocab_parallel
    if run.parallelism.pp == 1:
        return (0,)
    if schedule is not None and schedule.vocabulary_barriers:
        return (schedule.vocabulary_barriers,)
    if asked == AUTO:
        return (0, *BARRIERS_OF_ALGORITHM.values())
    return (0,) if asked == "off" else (BARRIERS_OF_ALGORITHM[int(asked)],)


def _held(
    run: Run, placement: Placement, schedule: Schedule | None, layers: tuple[int, ...], barriers: int
) -> MemoryUse:
    mode = run.schedule.offload
    if barriers:
        step = vocabulary_step(barriers, run, placement, layers=layers)
        if schedule is not None and not schedule.vocabulary_barriers:
            schedule = with_vocabulary(schedule, barriers, step.costs)
    elif mode != "off" or (schedule is not None and schedule.offloads):
        step = offload_step(run, placement, layers=layers)
        if schedule is not None and mode != "off":
            cap = _cap(run)
            if cap is not None and not cap.in_bytes:
                cap = replace(cap, amount=cap.amount * sum(step.costs.memory[Kind.F]), in_bytes=True)
            limit = None if cap is None else cap.amount
            schedule = plan_offload(schedule, step.costs, mode, limit, step.host).schedule
    else:
        step = price(run, placement, layers)
    if schedule is not None:
        order = (schedule.orders, placement, step.costs, schedule.pieces)
        kept, host = peaks(*order), host_peaks(*order)
    else:
        kept, host = least_held(placement, run.parallelism.microbatches, step.costs), (0.0,) * placement.num_devices
        if mode != "off":  # a stage's activations at a time
            kept = tuple(max(step.costs.memory[Kind.F][stage] for stage in owned) for owned in placement.stages)
    versions = (1,) * placement.num_devices if schedule is None else versions_held(schedule)
    older = tuple((count - 1) * nbytes for count, nbytes in zip(versions, step.weights, strict=True))
    return MemoryUse(tuple(map(sum, zip(kept, step.static, step.buffers, older, strict=True))), host, step.host)


def _cap(run: Run) -> MemoryCap | None:
    cap = run.schedule.memory_cap
    return None if cap is None else parse_cap(cap)
