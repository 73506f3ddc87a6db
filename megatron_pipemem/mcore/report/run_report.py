"""Put the report of a run together from what every rank has seen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from megatron_pipemem.mcore.model.weight_memory import WeightBytes, predict_weights
from megatron_pipemem.report.run import peak_activation
from megatron_pipemem.runtime.offload import OffloadStatistics
from megatron_pipemem.runtime.offload.channel import Direction
from megatron_pipemem.runtime.trace import TracedAction
from megatron_pipemem.schedule.core.action import COMPUTE, Kind
from megatron_pipemem.schedule.core.simulator import Timeline, count_messages
from megatron_pipemem.schedule.resolve import ChosenSchedule

Plans = Sequence[tuple[int, ChosenSchedule]]
"""The step that each plan was first run in, and the plan."""


@dataclass(frozen=True)
class Step:
    """One training step of a rank.

    Args:
        plan: number of the plan it ran.
        end: seconds from its beginning to the end of this rank's last action.
        work: seconds of this rank's actions.
        peak: the most bytes of activations that it held.
        planned: makespan of its plan.
        arrival: of the same microbatches in arrival order, see ``ChosenSchedule.arrival_makespan``.
        offload: what it moved; ``None`` for nothing.
    """

    plan: int
    end: float
    work: float
    peak: int
    planned: float
    arrival: float | None
    offload: OffloadStatistics | None


@dataclass(frozen=True)
class Shared:
    """Hold what the ranks of a pipeline tell each other.

    Args:
        of_stages: bytes of one version of every stage that the rank holds.
        ends: of its steps, in seconds.
    """

    of_stages: Mapping[int, int]
    ends: Sequence[float]


class Overlap(NamedTuple):
    """Hold what steps without a barrier between them have come to on a rank."""

    steps_ahead: int = 0
    """optimizer steps that were taken before the gradient norm was known"""
    steps_taken_back: int = 0
    """of these, those whose gradients had to be clipped"""
    rollback_bytes: int = 0
    """of the state that a step may be taken back to, on the device"""
    rollback_host_bytes: int = 0
    """likewise, on the host"""
    waiting_gradient_bytes: int = 0
    """of the gradients that wait for their step while the next batch adds up its own"""


@dataclass
class OfRank:
    """A rank's entry of the report, under the same names. What it held at most is added step by step, all else at the end.

    Args:
        expert_load: the most tokens that the rank's experts got of a microbatch, over an even share; ``None`` without any.
        predicted_least_peak_bytes: activations, as foretold for the least uneven routing; the next where nothing is routed.
        predicted_peak_bytes: activations, as foretold; ``None`` where nobody foretold it. Of uneven routing, the most.
        counted_peak_bytes: activations, as counted.
        predicted_weight_bytes: parameters, as the schedule says; ``None`` where a rank of the pipeline could not measure.
        counted_weight_bytes: parameters, as they are there.
        weight_versions: of them, at once.
        steps_ahead: see ``Overlap``, as for the next four.
        steps_taken_back: as there.
        rollback_bytes: as there.
        rollback_host_bytes: as there.
        waiting_gradient_bytes: as there.
        predicted_host_peak_bytes: what was away on the host, as foretold.
        counted_host_peak_bytes: what was away, as counted.
        offloaded_bytes: of the last step, to the host.
        reloaded_bytes: of the last step, back.
        stayed_bytes: of the last step, saved tensors that could not be offloaded, per reason.
        stall_seconds: of a step, on average, in which the rank waited for transfers.
        stalls: these by what was waited for.
        predicted_bubble_rate: of the plan.
        measured_bubble_rate: on average.
    """

    expert_load: float | None = None
    predicted_least_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    counted_peak_bytes: int = 0
    predicted_weight_bytes: int | None = None
    counted_weight_bytes: int = 0
    weight_versions: int = 1
    steps_ahead: int = 0
    steps_taken_back: int = 0
    rollback_bytes: int = 0
    rollback_host_bytes: int = 0
    waiting_gradient_bytes: int = 0
    predicted_host_peak_bytes: int = 0
    counted_host_peak_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    stayed_bytes: Mapping[str, int] = field(default_factory=dict)
    stall_seconds: float = 0.0
    stalls: Sequence[dict] = ()
    predicted_bubble_rate: float = 0.0
    measured_bubble_rate: float | None = None


@dataclass(frozen=True)
class Summary:
    """A rank's part of the report.

    Args:
        rank: of the world.
        losses: of every step, where this rank knows them.
        grad_norms: likewise.
        failure: what could not be measured, and why.
        measured: its entry of the report; ``None`` where nothing was measured.
        plans: as the report shows them.
        steps: that were measured.
        last: its actions of the last step.
        layers: of its stages.
        memory: by how many bytes every kind of action changes what it holds, per stage; 0 on stages of others.
    """

    rank: int
    losses: list[float | None]
    grad_norms: list[float | None]
    failure: str | None
    measured: OfRank | None = None
    plans: Sequence[dict] = ()
    steps: int = 0
    last: Sequence[TracedAction] = ()
    layers: Mapping[int, int] = field(default_factory=dict)
    memory: Mapping[Kind, Sequence[int]] = field(default_factory=dict)


def report_of(ranks: Sequence[Summary], timelines: Path | None) -> dict:
    """Return what ``--pipemem-report`` writes.

    Args:
        ranks: of the world, in their order.
        timelines: folder of its pictures, if there is one.
    """

    def known(values: list[list[float | None]]) -> list[float | None]:
        return next(([_finite(each) for each in own] for own in reversed(values) if own), [])

    first, nothing = ranks[0], dict.fromkeys(each.name for each in fields(OfRank))
    return {
        "schedule": first.plans[-1]["schedule"] if first.plans else "",
        "steps": first.steps,
        "losses": known([each.losses for each in ranks]),
        "grad_norms": known([each.grad_norms for each in ranks]),
        "timelines": None if timelines is None else str(timelines),
        "plans": list(first.plans),
        "ranks": [
            {"rank": each.rank, **(asdict(each.measured) if each.measured else nothing), "failure": each.failure}
            for each in ranks
        ],
    }


def measured(
    steps: Sequence[Step],
    plan: ChosenSchedule,
    device: int,
    held: OfRank,
    weights: WeightBytes,
    shared: Sequence[Shared] | None,
) -> OfRank:
    """Return a rank's entry of the report.

    Args:
        steps: of the rank.
        plan: of the last one.
        device: its place in the pipeline.
        held: with its activations.
        weights: of the rank.
        shared: of all ranks of its pipeline; ``None`` where one of them could not measure.
    """
    timeline, placement = plan.timeline, plan.schedule.placement
    rates, predicted_weights = [], None
    if shared is not None:
        of_stages = {stage: nbytes for each in shared for stage, nbytes in each.of_stages.items()}
        predicted_weights = predict_weights(placement, device, of_stages, weights.planned_versions)
        rates = [1 - step.work / makespan for step, makespan in zip(steps, makespans(shared), strict=True)]
    # The first step pays for lazily opened channels and allocator growth.
    return replace(
        held,
        predicted_weight_bytes=predicted_weights,
        counted_weight_bytes=weights.counted,
        weight_versions=weights.versions,
        **_offload_summary([step.offload for step in steps]),
        predicted_bubble_rate=1 - timeline.work[device] / timeline.makespan,
        measured_bubble_rate=fmean(rates[1:] or rates) if rates else None,
    )


def makespans(shared: Sequence[Shared]) -> list[float]:
    """Return the makespan of every step of a pipeline."""
    return [max(ends) for ends in zip(*(each.ends for each in shared), strict=True)]


def described(number: int, plans: Plans, steps: Sequence[Step], shared: Sequence[Shared] | None) -> dict:
    """Describe a plan as the report shows it. A plan's first step is not typical and counts only where it is the only
    one.

    Args:
        number: of the plan in ``plans``.
        plans: of the run, each with its first step.
        steps: of this rank.
        shared: what the ranks of the pipeline told each other, or ``None``.
    """
    first, plan = plans[number]
    schedule = plan.schedule
    times = zip(steps, makespans(shared), strict=True) if shared is not None else ()
    own = [makespan for step, makespan in times if step.plan == number]
    planned = [(step.planned, step.arrival) for step in steps if step.plan == number] or [
        (plan.timeline.makespan, None)
    ]
    makespan, arrival = (_mean([each[i] for each in planned[1:] or planned]) for i in range(2))
    return {
        "step": first,
        "reason": plan.reason,
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
        "measured_makespan": fmean(own[1:] or own) if own else None,
        "lower_bound": plan.lower_bound,
        "search_seconds": plan.search_seconds,
        "notes": plan.notes,
    }


def last_step(pipeline: Sequence[Summary], plan: ChosenSchedule) -> Timeline:
    """Return the last step of a pipeline as it ran.

    Raises:
        ValueError: a rank of the pipeline has not timed all of it.
    """
    schedule = plan.schedule
    compute = tuple(tuple(traced.action for traced in member.last) for member in pipeline)
    if compute != tuple(tuple(a for a in order if a.kind in COMPUTE) for order in schedule.orders):
        raise ValueError("not every action of the last step was timed")
    spans = tuple(tuple((traced.start, traced.end) for traced in member.last) for member in pipeline)
    # Copies are not timed.
    return Timeline(replace(schedule, orders=compute), plan.costs, spans, plan.timeline.peaks, count_messages(schedule))


def _offload_summary(steps: list[OffloadStatistics | None]) -> dict:
    """Return the bytes of the last step; seconds per step, on average. The first step is not typical here either."""
    typical = steps[1:] or steps
    waits: defaultdict[tuple[Kind, int], float] = defaultdict(float)
    for step in typical:
        for stall in step.stalls if step is not None else ():
            kind = Kind.WAIT_OFFLOAD if stall.direction is Direction.OUT else Kind.WAIT_RELOAD
            assert isinstance(stall.key, tuple), "activations are known by stage and microbatch"
            waits[kind, stall.key[0]] += stall.seconds / len(typical)
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


def _costs(plan: ChosenSchedule) -> dict:
    """Return one value per stage, of all slices of a microbatch; the time of a message between every two neighbours."""
    placement, slices = plan.schedule.placement, plan.schedule.slices
    seconds = plan.costs.seconds(placement, slices)
    neighbours = sorted({tuple(sorted(pair)) for pair in zip(placement.devices, placement.devices[1:], strict=False)})
    links = {f"{a}-{b}": plan.costs.link_seconds(a, b) for a, b in neighbours if a != b}
    names = {"forward": Kind.F, "backward_input": Kind.I, "backward_weight": Kind.W}
    firsts = range(0, placement.num_stages * slices, slices)
    return {name: [sum(seconds[kind][at : at + slices]) for at in firsts] for name, kind in names.items()} | {
        "p2p": links
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of those that there are, and a value that all are to the bit."""
    known = {value for value in values if value is not None}
    return fmean(value for value in values if value is not None) if len(known) > 1 else next(iter(known), None)


def _finite(value: float | None) -> float | None:
    """Replace what is no number by ``null``: JSON has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None
