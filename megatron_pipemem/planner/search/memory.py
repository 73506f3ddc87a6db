"""Whether a run as it is configured fits into its devices' memory."""

from __future__ import annotations

from pathlib import Path

from megatron_pipemem.planner.cluster import GIB
from megatron_pipemem.planner.runs import AUTO, STOCK, Run
from megatron_pipemem.planner.search import layout
from megatron_pipemem.planner.search.step import price
from megatron_pipemem.schedule.bounds import one_microbatch
from megatron_pipemem.schedule.memory_cap import parse_cap
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.schedule.weights import versions_held


def rank_bytes(run: Run) -> tuple[float, ...] | None:
    """The most that every pipeline rank holds, in bytes, everything included; of a search, the least it could find.

    ``None`` where the run leaves the layers of the stages to Megatron, or adds offload or vocabulary passes to its schedule.

    Raises:
        PipememError: there is no such schedule.
    """
    if run.schedule.offload != "off" or run.schedule.vocab_parallel != "off":
        return None
    if run.schedule.name == AUTO:
        chunks = run.parallelism.chunks or 2
        placement = Placement.interleaved(run.parallelism.pp, chunks)
        schedule = None
    else:
        schedule = _schedule(run)
        placement = schedule.placement
    layers = layout.layers_of(run, placement.num_stages)
    if layers is None:
        return None
    step = price(run, placement, layers)
    kept = (
        one_microbatch(placement, step.costs)
        if schedule is None
        else peaks(schedule.orders, placement, step.costs, schedule.pieces)
    )
    versions = (1,) * placement.num_devices if schedule is None else versions_held(schedule)
    more = tuple((count - 1) * nbytes for count, nbytes in zip(versions, step.weights, strict=True))
    return tuple(map(sum, zip(kept, step.static, step.buffers, more, strict=True)))


def too_large(run: Run) -> str | None:
    """Why a run's ranks do not fit, in one sentence, or ``None``."""
    held = rank_bytes(run)
    there = run.cluster.memory_bytes
    if held is None or max(held) <= there:
        return None
    rank = held.index(max(held))
    return (
        f"pipeline rank {rank} needs {held[rank] / GIB:.1f} GiB of {there / GIB:.1f} GiB; cut the model further, recompute, "
        "or take a schedule with a lower peak"
    )


def _schedule(run: Run) -> Schedule:
    choice, cut = run.schedule, run.parallelism
    if choice.name.endswith(".csv"):
        return Schedule.from_csv(Path(choice.name).read_text(encoding="utf-8"))
    name, options = choice.name, dict(choice.options)
    if name == STOCK:
        name = "1f1b" if (cut.chunks or 1) == 1 else "interleaved"
    if cut.chunks is not None and cut.chunks > 1:
        options["chunks"] = cut.chunks
    cap = None if choice.memory_cap is None else parse_cap(choice.memory_cap)
    return build_schedule(
        name,
        num_devices=cut.pp,
        num_microbatches=cut.microbatches,
        memory_cap=None if cap is None or cap.in_bytes else cap.amount,
        **options,
    )
