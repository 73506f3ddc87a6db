"""Predict the memory that a configured run needs, on devices and on hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_pipemem.errors import PipememError, ScheduleError, UnsupportedError
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.bounds import least_held
from megatron_pipemem.schedule.options import AUTO, OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.run_prices import RunPrices, request_of, schedule_of
from megatron_pipemem.tools.planner.step import PlannedStep
from megatron_pipemem.tools.planner.variants import run_step


@dataclass(frozen=True)
class MemoryUse:
    """The peak bytes of every pipeline rank on its device and on its host."""

    device_bytes: tuple[float, ...]  # on its device, everything included
    static_bytes: tuple[float, ...]  # of its parameters, gradients and optimizer on its device
    host_bytes: tuple[float, ...]  # of its activations and its optimizer on the host
    host_limit_bytes: float  # for a rank


def predicted_memory(run: Run, request: Request | None = None) -> MemoryUse | None:
    """Return the peak bytes of a run; ``None`` if its flags do not give the layers of each stage.

    For ``auto`` schedules, these are the least bytes that any order of the stages of ``interleaved`` needs. For
    ``auto`` vocabulary parallelism, they are those of the setting that needs least on its fullest rank. Raise an error if
    no setting is possible.
    """
    request = request or request_of(run)
    schedule = None if request.searches else request.file or schedule_of(run, request)
    searched = Placement.interleaved(run.parallelism.pp, run.parallelism.chunks or 2)
    placement = searched if schedule is None else schedule.placement
    layers = run_layout.pieces_of(run, placement.model_stages)
    if layers is None:
        return None
    uses: list[MemoryUse] = []
    refusal: PipememError | None = None
    for barriers in _barriers(run, schedule):
        decided = request.decided(barriers)
        try:
            uses.append(
                _least(run, placement, decided, layers) if schedule is None else _of_order(run, decided, layers)
            )
        except (ScheduleError, UnsupportedError) as error:
            refusal = error
    if refusal is not None and not uses:
        raise refusal
    return min(uses, key=lambda use: max(use.device_bytes))


def _barriers(run: Run, schedule: Schedule | None) -> tuple[int, ...]:
    """Return the possible numbers of vocabulary barriers of a run; 0 means an uncut vocabulary.

    There are several only for ``auto``. One pipeline rank has 0, and a schedule file with vocabulary passes has its own.
    """
    setting = run.schedule.vocab_cut
    if run.parallelism.pp == 1:
        return (0,)
    if schedule is not None and schedule.vocabulary_barriers:
        return (schedule.vocabulary_barriers,)
    if setting == AUTO:
        return (0, *BARRIERS_OF_ALGORITHM.values())
    return (0,) if setting == OFF else (BARRIERS_OF_ALGORITHM[int(setting)],)


def _least(run: Run, placement: Placement, request: Request, layers: tuple[int, ...]) -> MemoryUse:
    """Return the least bytes of any order with these stages."""
    whole = run.with_parts(1)
    choice = replace(whole.schedule, vocab_cut=request.vocab_cut)
    step = run_step(replace(whole, schedule=choice), placement, layers)
    kept = tuple(least_held(placement, run.parallelism.microbatches, step.costs))
    if request.offload != OFF:  # the activations of one stage at a time
        kept = tuple(max(step.saved_bytes[stage] for stage in owned) for owned in placement.stages)
    return _use(run, step, step.held(kept), (0.0,) * placement.num_devices)


def _of_order(run: Run, request: Request, layers: tuple[int, ...]) -> MemoryUse:
    """Return the bytes of the requested family or schedule file."""
    way = RunPrices(run, request).way(layers)
    return _use(run, way.step, way.peak_bytes, way.host_bytes)


def _use(run: Run, step: PlannedStep, device: tuple[float, ...], activations: tuple[float, ...]) -> MemoryUse:
    host = tuple(map(sum, zip(activations or (0.0,) * len(device), step.host_optimizer_bytes, strict=True)))
    # Activations may take a share of the host, and the optimizer all of it.
    room = (
        min(step.host_bytes + max(step.host_optimizer_bytes), run.cluster.host_bytes) if max(host) else step.host_bytes
    )
    return MemoryUse(device, step.static_bytes, host, room)
