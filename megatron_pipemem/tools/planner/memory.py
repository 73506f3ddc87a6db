"""Predict the memory that a configured run needs, on devices and on hosts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megatron_pipemem.choose.choice import choose
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.conflicts import requested
from megatron_pipemem.errors import PipememError, ScheduleError, UnsupportedError
from megatron_pipemem.request import FILE_SUFFIX, Request, ScheduleOptions
from megatron_pipemem.schedule.bounds import least_held
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.options import AUTO, OFF, STOCK
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import megatrons_own
from megatron_pipemem.schedule.schedule import Schedule, versions_held
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.runs import RECOMPUTE_FLAG, Run
from megatron_pipemem.tools.planner.early_weights import moves_weights
from megatron_pipemem.tools.planner.slices import step_of, with_slices
from megatron_pipemem.tools.planner.variants import HOST_MEMORY, offload_step, vocabulary_step


@dataclass(frozen=True)
class MemoryUse:
    """The peak bytes of every pipeline rank on its device and on its host."""

    device: tuple[float, ...]  # on its device, everything included
    host: tuple[float, ...]  # of its activations and its optimizer on the host
    room: float  # bytes on the host for a rank


def held(run: Run, request: Request | None = None) -> MemoryUse | None:
    """Return the peak bytes of a run; ``None`` if its flags do not give the layers of each stage.

    For ``auto`` schedules, these are the least bytes that any order of the stages of ``interleaved`` needs. For
    ``auto`` vocabulary parallelism, they are those of the setting that needs least on its fullest rank. Raise an error if
    no setting is possible.
    """
    choice, cut = run.schedule, run.parallelism
    request = request or request_of(run)
    schedule = request.file
    if schedule is None and choice.name != AUTO:
        schedule = schedule_of(run, request)
    placement = Placement.interleaved(cut.pp, cut.chunks or 2) if schedule is None else schedule.placement
    layers = run_layout.pieces_of(run, placement.model_stages)
    if layers is None:
        return None
    request = replace(request, file=schedule, recompute="none")  # the prices of layers include recomputation
    ways: list[MemoryUse] = []
    refused: PipememError | None = None
    for barriers in _barriers(run, schedule):
        try:
            ways.append(_held(run, placement, request.decided(barriers), layers))
        except (ScheduleError, UnsupportedError) as error:
            refused = error
    if refused is not None and not ways:
        raise refused
    return min(ways, key=lambda way: max(way.device))


def request_of(run: Run) -> Request:
    """Return the schedule request of a run. Stock's schedule becomes our schedule with the same order."""
    choice, cut = run.schedule, run.parallelism
    recompute = "selective" if choice.recomputes_by_action else str(run.flags.get(RECOMPUTE_FLAG, "none"))
    settings = {option.name: getattr(choice, option.name) for option in fields(ScheduleOptions)}
    settings |= {
        "options": run.schedule_options,
        "microbatch_costs": choice.microbatch_costs,
        "offload": choice.offload,
    }
    settings |= {"memory_cap": choice.memory_cap, "host_memory": run.flags.get(HOST_MEMORY), "recompute": recompute}
    settings["pairs"] = choice.name != STOCK and run.pairs
    request = requested(choice.name, **settings)
    if choice.name != STOCK:
        return request
    return replace(request, schedule=megatrons_own(cut.chunks))


def schedule_of(run: Run, request: Request) -> Schedule:
    """Return the schedule that a run names, without offload and vocabulary passes."""
    cut = run.parallelism
    shape = Shape(cut.pp, None, cut.microbatches)
    return choose(request.decided(0).without_offload(), shape, Knowledge()).schedule


def _barriers(run: Run, schedule: Schedule | None) -> tuple[int, ...]:
    """Return the possible numbers of vocabulary barriers of a run; 0 means an uncut vocabulary.

    There are several only for ``auto``. One pipeline rank has 0, and a schedule file with vocabulary passes has its own.
    """
    setting = run.schedule.vocab_parallel
    if run.parallelism.pp == 1:
        return (0,)
    if schedule is not None and schedule.vocabulary_barriers:
        return (schedule.vocabulary_barriers,)
    if setting == AUTO:
        return (0, *BARRIERS_OF_ALGORITHM.values())
    return (0,) if setting == OFF else (BARRIERS_OF_ALGORITHM[int(setting)],)


def _held(run: Run, placement: Placement, request: Request, layers: tuple[int, ...]) -> MemoryUse:
    schedule, microbatches = request.file, run.parallelism.microbatches
    is_family = run.schedule.name != AUTO and not run.schedule.name.endswith(FILE_SUFFIX)
    cut = sliced(run, 1 if schedule is None else schedule.slices)
    if request.barriers:
        step = vocabulary_step(request.barriers, cut, placement, layers=layers)
    elif request.offload != OFF or (schedule is not None and schedule.offloads):
        step = offload_step(run, placement, layers=layers)
        if request.cap_in_units is not None:
            unit = sum(step.saved)
            caps = tuple(cap * unit for cap in request.caps(placement.num_devices) or ())
            request = replace(request, memory_cap=MemoryCap(caps, True))
    else:
        step = step_of(cut, placement, layers)
    if schedule is not None:
        shape = Shape(placement.num_devices, None, microbatches)
        if is_family and moves_weights(run) and not request.barriers:
            request = replace(request, file=with_earlier_weights(schedule, step.costs))
        schedule = choose(request, shape, Knowledge(step.costs, host_budget=step.host)).schedule
        kept, host = peaks(schedule, step.costs), peaks(schedule, step.costs, host=True)
    else:
        kept, host = tuple(least_held(placement, microbatches, step.costs)), (0.0,) * placement.num_devices
        if request.offload != OFF:  # the activations of one stage at a time
            kept = tuple(max(step.saved[stage] for stage in owned) for owned in placement.stages)
    versions = (1,) * placement.num_devices if schedule is None else versions_held(schedule)
    older = tuple((count - 1) * nbytes for count, nbytes in zip(versions, step.weights, strict=True))
    device = tuple(map(sum, zip(step.held(kept), older, strict=True)))
    on_host = tuple(map(sum, zip(host, step.host_optimizer, strict=True)))
    # Activations may take a share of the host, and the optimizer all of it.
    room = min(step.host + max(step.host_optimizer), run.cluster.host_bytes) if max(on_host) else step.host
    return MemoryUse(device, on_host, room)


def sliced(run: Run, slices: int) -> Run:
    """Return the run with that many slices, for ``step_of``, which prices whole microbatches if it cannot price slices."""
    if slices == 1:
        return replace(run, schedule=replace(run.schedule, slices=None))
    return with_slices(run, slices, run.schedule.slice_cut)
