"""Compute the contents of a run's report from the measurements of all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median

import torch
from megatron.core.utils import unwrap_model

from megatron_pipemem.choose.knowledge import Choice, action_memory
from megatron_pipemem.mcore.step.extension import WeightBytes, predict_weights
from megatron_pipemem.results import bubble_of_steps, peak_activation, typical
from megatron_pipemem.runtime.trace import Direction, OffloadStatistics, TracedAction
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind
from megatron_pipemem.schedule.baseline import counted_bytes_of_1f1b
from megatron_pipemem.schedule.simulator import Measured, Timeline, count_messages

Plans = Sequence[tuple[int, Choice]]
"""Pairs of a plan and the number of the first step that ran it, as (step, plan)."""


@dataclass(frozen=True)
class RecordedStep:
    """The times and the peak bytes of one training step on one rank."""

    plan: int  # index of its plan among the plans of the run
    # seconds from the step's start to the start of this rank's first action, and to the end of its last one
    span: tuple[float, float]
    work_seconds: float  # seconds of this rank's actions
    peak_bytes: int  # the most bytes of activations
    planned_seconds: float  # makespan of its plan
    arrival_seconds: float | None  # makespan of the same microbatches in arrival order (``Choice.arrival_makespan``)
    offload: OffloadStatistics | None


@dataclass(frozen=True)
class SharedMeasurements:
    """The measurements of one rank that the other ranks of its pipeline need for their part of the report."""

    of_stages: Mapping[int, int]  # bytes of one version of every stage of the rank
    spans: Sequence[tuple[float, float]]  # of its steps (``RecordedStep``)


@dataclass
class RankEntry:
    """The entry of one rank in the report. Field names are the report's keys.

    Peaks and ``expert_load`` are updated at every step whose bytes are counted, the other fields set at the end.
    """

    # the most tokens of a microbatch for the rank's experts, over an even share; ``None`` without experts
    expert_load: float | None = None
    # for the least uneven routing; the same as the next field if nothing is routed
    predicted_least_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None  # for the most uneven routing; ``None`` without a prediction
    counted_peak_bytes: int = 0
    # with sent messages that no answer has freed; ``None`` without a prediction, or if their sizes are unknown
    predicted_peak_with_messages: int | None = None
    # These five are ``None`` on a CPU. The first one is the previous field and all that was allocated at the step's start.
    predicted_allocated_bytes: int | None = None
    allocated_bytes: int | None = None  # the most that PyTorch's allocator gave out at once, at any time of the run
    reserved_bytes: int | None = None  # the most that it took from the device
    predicted_nccl_bytes: int | None = None  # NCCL's buffers for the pipeline's messages, beside the allocator
    nccl_bytes: int | None = None  # what the device had less when they were open
    predicted_weight_bytes: int | None = None  # ``None`` if a rank of the pipeline could not measure
    counted_weight_bytes: int = 0
    weight_versions: int = 1  # at once
    steps_ahead: int = 0  # this and the next three: see ``OverlapStatistics``
    steps_taken_back: int = 0
    rollback_bytes: int = 0
    waiting_gradient_bytes: int = 0
    predicted_host_peak_bytes: int = 0  # activations on the host
    counted_host_peak_bytes: int = 0
    offloaded_bytes: int = 0  # in the last step, to the host
    reloaded_bytes: int = 0  # in the last step, back
    # in the last step, saved tensors that cannot be offloaded, by reason
    stayed_bytes: Mapping[str, int] = field(default_factory=dict)
    stall_seconds: float = 0.0  # of waiting for transfers, mean of all steps but the first
    stalls: Sequence[dict] = ()  # the same by stage and direction
    predicted_bubble_rate: float = 0.0
    measured_bubble_rate: float | None = None  # of the steps of the last plan (``bubble_of_steps``)


@dataclass(frozen=True)
class RankSummary:
    """One rank's measurements and losses, from which rank 0 writes the report."""

    rank: int  # of the world
    losses: list[float | None]  # of every step, if this rank knows them
    grad_norms: list[float | None]
    failure: str | None  # the reason if something could not be measured
    measured: RankEntry | None = None  # its entry of the report, if it could measure
    plans: Sequence[dict] = ()
    steps: int = 0  # number of measured steps
    last: Sequence[TracedAction] = ()  # the actions of its last step
    # bytes after each of these actions; ``None`` if the last counted step ran other actions
    bytes_after: Sequence[int] | None = None
    layers: Mapping[int, int] = field(default_factory=dict)  # of its stages
    # change of held bytes by every kind of action, per stage and part; 0 on stages of other ranks
    memory: Mapping[Kind, Sequence[int]] = field(default_factory=dict)


def report_of(ranks: Sequence[RankSummary], timelines: Path | None) -> dict:
    """Return the contents of the report from the summaries of all ranks, in the order of the ranks.

    ``timelines`` is the folder of the pictures. Losses are those of the last rank that knows some.
    """

    def last_numbers(of_ranks: list[list[float | None]]) -> list[float | None]:
        return next(([_finite(number) for number in numbers] for numbers in reversed(of_ranks) if numbers), [])

    first, nothing = ranks[0], dict.fromkeys(entry.name for entry in fields(RankEntry))
    return {
        "schedule": first.plans[-1]["schedule"] if first.plans else "",
        "steps": first.steps,
        "losses": last_numbers([rank.losses for rank in ranks]),
        "grad_norms": last_numbers([rank.grad_norms for rank in ranks]),
        "timelines": None if timelines is None else str(timelines),
        "plans": list(first.plans),
        "ranks": [
            {"rank": rank.rank, **(asdict(rank.measured) if rank.measured else nothing), "failure": rank.failure}
            for rank in ranks
        ],
    }


def rank_entry(
    steps: Sequence[RecordedStep],
    plan: Choice,
    device: int,
    peaks: RankEntry,
    weights: WeightBytes,
    shared: Sequence[SharedMeasurements] | None,
) -> RankEntry:
    """Return the report's entry of a rank, from its entry ``peaks``, which has the peaks already.

    ``shared`` is ``None`` if a rank of the pipeline could not measure.
    """
    timeline, placement = plan.timeline, plan.schedule.placement
    bubble, predicted_weights = None, None
    if shared is not None:
        of_stages = {stage: nbytes for rank in shared for stage, nbytes in rank.of_stages.items()}
        predicted_weights = predict_weights(placement, device, of_stages, weights.planned_versions)
        times = [
            (step.work_seconds, makespan)
            for step, makespan in zip(steps, makespans(shared), strict=True)
            if step.plan == steps[-1].plan
        ]
        bubble = bubble_of_steps(times)
    return replace(
        peaks,
        predicted_weight_bytes=predicted_weights,
        counted_weight_bytes=weights.counted,
        weight_versions=weights.versions,
        **_offload_summary([step.offload for step in steps]),
        predicted_bubble_rate=1 - timeline.work[device] / timeline.makespan,
        measured_bubble_rate=bubble,
    )


def makespans(shared: Sequence[SharedMeasurements]) -> list[float]:
    """Return the seconds of each step from the first start to the last end on any rank of a pipeline."""
    steps = zip(*(rank.spans for rank in shared), strict=True)
    return [max(end for _, end in spans) - min(start for start, _ in spans) for spans in steps]


def plan_entry(
    number: int, plans: Plans, steps: Sequence[RecordedStep], shared: Sequence[SharedMeasurements] | None
) -> dict:
    """Return the report's entry of the plan ``plans[number]``: its schedule, costs and makespans.

    Makespans are medians of seconds over the plan's steps, without its first step if there are several.
    """
    first, plan = plans[number]
    schedule = plan.schedule
    times = zip(steps, makespans(shared), strict=True) if shared is not None else ()
    own = [makespan for step, makespan in times if step.plan == number]
    planned = [(step.planned_seconds, step.arrival_seconds) for step in steps if step.plan == number] or [
        (plan.timeline.makespan, None)
    ]
    makespan, arrival = map(_median, zip(*typical(planned), strict=True))
    return {
        "step": first,
        "reason": plan.why,
        "schedule": schedule.name,
        "placement": schedule.placement.name,
        "devices": schedule.num_devices,
        "chunks": schedule.placement.num_chunks,
        "microbatches": schedule.num_microbatches,
        "peak_activation": peak_activation(schedule),
        "vocabulary_barriers": schedule.vocabulary_barriers,
        "priced_by": plan.priced_by,
        "costs": _costs(plan),
        "planned_makespan": makespan,
        "arrival_makespan": arrival,
        "measured_makespan": _median(typical(own)),
        "lower_bound": plan.bound,
        "search_seconds": plan.search_seconds,
        "notes": plan.notes,
    }


def bytes_after(ran: Sequence[TracedAction], counted: Sequence[tuple[Action, int, int]]) -> list[int] | None:
    """Return the bytes on the device after each pass of a step that ran; ``None`` if the counted step had other passes.

    ``counted`` has every action of the last counted step, with the bytes after it on the device and on the host.
    """
    passes = [(action, nbytes) for action, nbytes, _ in counted if action.kind in COMPUTE]
    is_same = [action for action, _ in passes] == [traced.action for traced in ran]
    return [nbytes for _, nbytes in passes] if is_same else None


def memory_of(pipeline: Sequence[RankSummary]) -> dict[Kind, list[int]]:
    """Return the bytes by which each kind of action changes a rank's memory, per stage of the pipeline and part.

    The values of a stage's parts are consecutive. ``pipeline`` has the summaries of its ranks, in their order.
    """
    memory: dict[Kind, list[int]] = {}
    for rank in pipeline:  # 0 on stages of others; the first stage receives no output, the last one sends none
        for kind, changes in rank.memory.items():
            of_others = memory.get(kind, changes)
            memory[kind] = [max(pair, key=abs) for pair in zip(of_others, changes, strict=True)]
    return memory


def bytes_of_1f1b(pipeline: Sequence[RankSummary], plan: Choice, memory: Mapping[Kind, Sequence[int]]) -> int | None:
    """Return the peak activation bytes that 1F1B would need for the model of a run; ``None`` if unknown."""
    peak = max((rank.measured.counted_peak_bytes for rank in pipeline if rank.measured), default=0)
    return counted_bytes_of_1f1b(plan.schedule, memory, peak, layers_of(pipeline, plan))


def layers_of(pipeline: Sequence[RankSummary], plan: Choice) -> list[int] | None:
    """Return the number of layers of every stage; ``None`` if it is unknown for a stage."""
    layers = {stage: count for rank in pipeline for stage, count in rank.layers.items()}
    stages = range(plan.schedule.placement.num_stages)
    return [layers[stage] for stage in stages] if layers.keys() >= {*stages} else None


def last_step(
    pipeline: Sequence[RankSummary], plan: Choice, bubble: float | None, bytes_of_1f1b: int | None
) -> Timeline:
    """Return the timeline of the last step, with measured times and counted bytes.

    Raise a ValueError if a rank of the pipeline has not timed all passes.
    """
    schedule = plan.schedule
    compute = tuple(tuple(traced.action for traced in member.last) for member in pipeline)
    if compute != tuple(tuple(a for a in order if a.kind in COMPUTE) for order in schedule.orders):
        raise ValueError("not every action of the last step was timed")
    spans = tuple(tuple((traced.start, traced.end) for traced in member.last) for member in pipeline)
    held, peaks = counted_bytes(pipeline)
    # Copies are not timed.
    return Timeline(
        replace(schedule, orders=compute), plan.costs, spans, peaks or plan.timeline.peaks, count_messages(schedule),
        measured=Measured(bubble, held or None, bytes_of_1f1b, bool(peaks)),
    )  # fmt: skip


def planned_step(pipeline: Sequence[RankSummary], plan: Choice, bytes_of_1f1b: int | None) -> Timeline:
    """Return the timeline of the plan of the last step, with the bytes that the run counted, if it counted them."""
    memory, (held, peaks) = memory_of(pipeline), counted_bytes(pipeline)
    if not (peaks and memory):
        return plan.timeline
    costs = replace(plan.costs, memory=action_memory(memory, plan.schedule.units.parts))
    # Bytes are counted after passes only. A step of an asynchronous schedule begins with those of earlier steps.
    ran = tuple(tuple(traced.action for traced in member.last) for member in pipeline)
    measured = Measured(None, held if ran == plan.schedule.orders else None, bytes_of_1f1b, has_counted_peaks=True)
    return replace(plan.timeline, costs=costs, peaks=peaks, measured=measured)


def counted_bytes(pipeline: Sequence[RankSummary]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the bytes that every rank held after its passes of the last step, and its most bytes in all steps.

    Both are empty if a rank did not count.
    """
    held = tuple(tuple(rank.bytes_after) for rank in pipeline if rank.bytes_after is not None)
    peaks = tuple(rank.measured.counted_peak_bytes for rank in pipeline if rank.measured is not None)
    return (held, peaks) if len(held) == len(peaks) == len(pipeline) else ((), ())


def _offload_summary(steps: list[OffloadStatistics | None]) -> dict:
    """Return the report's offload entries: bytes of the last step, and mean seconds of waiting in all but the first."""
    usual = typical(steps)
    waits: defaultdict[tuple[Kind, int], float] = defaultdict(float)
    for step in usual:
        for stall in step.stalls if step is not None else ():
            kind = Kind.WAIT_OFFLOAD if stall.direction is Direction.OUT else Kind.WAIT_RELOAD
            assert isinstance(stall.key, tuple), "activations are known by stage and microbatch"
            waits[kind, stall.key[0]] += stall.seconds / len(usual)
    return {
        "offloaded_bytes": steps[-1].bytes_out if steps[-1] is not None else 0,
        "reloaded_bytes": steps[-1].bytes_in if steps[-1] is not None else 0,
        "stayed_bytes": dict(steps[-1].stayed_bytes) if steps[-1] is not None else {},
        "stall_seconds": sum(waits.values()),
        "stalls": [
            {"waited_for": kind.value, "stage": stage, "seconds": seconds}
            for (kind, stage), seconds in sorted(waits.items(), key=lambda wait: -wait[1])
        ],
    }


def _costs(plan: Choice) -> dict:
    """Return the seconds of F, I and W of a whole microbatch on each stage, and the seconds of messages.

    The entry ``p2p`` has the seconds of a message for each pair of neighbouring devices, such as ``0-1``.
    """
    placement, units = plan.schedule.placement, plan.schedule.units
    seconds = plan.costs.seconds(placement, units)
    neighbours = sorted({tuple(sorted(pair)) for pair in zip(placement.devices, placement.devices[1:], strict=False)})
    links = {f"{a}-{b}": plan.costs.link_seconds(a, b) for a, b in neighbours if a != b}
    names = {"forward": Kind.F, "backward_input": Kind.I, "backward_weight": Kind.W}
    n = units.parts
    firsts = range(0, placement.num_stages * n, n)
    return {name: [sum(seconds[kind][at : at + n]) for at in firsts] for name, kind in names.items()} | {"p2p": links}


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are not ``None``; ``None`` if there are none."""
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _finite(value: float | None) -> float | None:
    """Return the value, or ``None`` for NaN and infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


# The last step of a pipeline, for ``pipemem explain``: times of its actions, and bytes.


_TYPICAL = 2
"""The first step takes longer, because it opens channels. So the time until the second step does not count."""


def count_layers(chunks: Sequence[torch.nn.Module], stages: Sequence[int]) -> dict[int, int]:
    """Return the number of layers of each stage of this rank. Stages of models without a list of layers are left out."""
    counts = {}
    for stage, chunk in zip(stages, chunks, strict=True):
        model = unwrap_model(chunk)
        layers = getattr(getattr(model, "decoder", None), "layers", None)
        if layers is not None:
            counts[stage] = len(layers)
    return counts


def iteration_seconds(begun: Sequence[float]) -> float | None:
    """Return the median seconds between starts of consecutive steps; ``None`` for fewer than two steps.

    The time from the first start to the second is left out if there are more.
    """
    apart = [after - before for before, after in zip(begun, begun[1:], strict=False)]
    return median(apart[_TYPICAL - 1 :] or apart) if apart else None


def written_step(
    pipeline: Sequence[RankSummary], plan: Choice, memory: Mapping[Kind, Sequence[int]], iteration_seconds: float | None
) -> dict | None:
    """Return the report's data of the last step, with times in whole nanoseconds since its start.

    Return ``None`` if a forward and its backward are in different steps, or if not every pass was timed.
    """
    schedule = plan.schedule
    compute = [[action for action in order if action.kind in COMPUTE] for order in schedule.orders]
    passes = [action for order in compute for action in order]
    forwards = {(action.stage, action.microbatch) for action in passes if action.kind is Kind.F}
    backwards = {(action.stage, action.microbatch) for action in passes if action.kind in (Kind.I, Kind.B)}
    if forwards != backwards or [[traced.action for traced in rank.last] for rank in pipeline] != compute:
        return None
    held, peaks = counted_bytes(pipeline)
    return {
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
        "orders": schedule.to_csv(),
        "spans": [" ".join(f"{_ns(traced.start)}-{_ns(traced.end)}" for traced in rank.last) for rank in pipeline],
        "layers": layers_of(pipeline, plan),
        "memory": {kind.value: list(changes) for kind, changes in memory.items() if any(changes)} or None,
        "held": held or None,
        "peaks": peaks or None,
        "iteration_seconds": iteration_seconds,
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
