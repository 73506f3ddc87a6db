"""Tell from a run's report, in words and as a table, what it did against what was planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from megatron_pipemem.report.tables import FittingTable
from megatron_pipemem.schedule.baseline import share_of_1f1b
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks

_MIB = 1 << 20
UNITS = "activation units (1 is 1F1B's peak with equal stages, W free)"
"""What peaks are in if no bytes are known."""


def peak_activation(schedule: Schedule) -> float:
    """Return the most that a device holds, in activation units."""
    return max(peaks(schedule))


def announcement(timeline: Timeline) -> str:
    """Return the line that tells which schedule a run is about to follow, and what is expected of it."""
    schedule, share = timeline.schedule, share_of_1f1b(timeline)
    held = f"{peak_activation(schedule):.4g} {UNITS}" if share is None else f"{share:.3g} of 1F1B's bytes"
    return (
        f"{schedule.name}, {_size(schedule.num_devices, schedule.placement.num_chunks, schedule.num_microbatches)}: "
        f"planned bubble {timeline.bubble_rate:.1%}, peak activations {held}"
    )


def typical[T](steps: Sequence[T]) -> Sequence[T]:
    """Return all steps but the first, which opens channels and fills the allocator's cache."""
    return steps[1:] or steps


def bubble_of_steps(steps: Sequence[tuple[float, float]]) -> float | None:
    """Return the part of a training step in which a rank computes nothing: the median over all steps but the first.

    The bubble rate of a run is that of its busiest rank, see ``busiest``.

    Args:
        steps: per step, the seconds of the rank's actions, and those from the first start of an action on any rank of its
            pipeline to the last end.
    """
    rates = [1 - work / makespan for work, makespan in steps if makespan]
    return median(typical(rates)) if rates else None


def busiest(rates: Iterable[float | None]) -> float | None:
    """Return the bubble rate of a run, which is that of the rank that idles least; ``None`` if no rank has one.

    Args:
        rates: of the ranks, by ``bubble_of_steps``.
    """
    return min((rate for rate in rates if rate is not None), default=None)


def measured_bubble(report: Mapping[str, Any]) -> float | None:
    """Return the measured bubble rate of a run: the number in its log, its report, its page and ``pipemem explain``.

    Args:
        report: as ``--pipemem-report`` writes it.
    """
    return busiest(rank["measured_bubble_rate"] for rank in report["ranks"])


def lines(report: Mapping[str, Any]) -> list[str]:
    """Tell in lines what a run did.

    Args:
        report: as ``--pipemem-report`` writes it.
    """
    found = []
    if chosen := report["plans"] and report["plans"][-1]:
        size = _size(chosen["devices"], chosen["chunks"], chosen["microbatches"])
        times = f", planned {len(report['plans'])} times" if len(report["plans"]) > 1 else ""
        found.append(f"{chosen['schedule']}, {size}{times}: {report['steps']} steps measured")
    ranks: Sequence[Mapping[str, Any]] = report["ranks"]
    if (peak := _most(ranks, "counted_peak_bytes")) is not None:
        share = f"; {peak / whole:.3g} of 1F1B's bytes" if (whole := report.get("bytes_of_1f1b")) else ""
        found.append(f"peak activations {peak / _MIB:.4g} MiB on the fullest rank, {_agreement(ranks)}{share}")
    if loads := {rank["rank"]: rank["expert_load"] for rank in ranks if rank.get("expert_load")}:
        rank = max(loads, key=loads.__getitem__)
        found.append(
            f"experts of rank {rank} got {loads[rank]:.3g} times an even share of a microbatch's tokens, the most of all ranks"
        )
    if (measured := measured_bubble(report)) is not None:
        planned = busiest(rank["predicted_bubble_rate"] for rank in ranks)
        seconds = chosen["measured_makespan"] if chosen else None
        found.append(
            f"bubble {planned:.1%} planned, {measured:.1%} measured, of the rank that idles least"
            + ("" if seconds is None else f"; a step takes {seconds:.4g} s from its first pass to its last")
        )
    if ahead := _most(ranks, "steps_ahead"):
        back, state = _most(ranks, "steps_taken_back"), "the state to take a step back to takes"
        held = {
            "rollback_bytes": f"{state} {{}} of the device",
            "waiting_gradient_bytes": "gradients that wait for their step take {} of the device",
        }
        found.append(f"{ahead} of {report['steps']} steps waited for no gradient norm; {back} of them were taken back")
        found += [
            sentence.format(f"{nbytes / _MIB:.4g} MiB") + " on the fullest rank"
            for key, sentence in held.items()
            if (nbytes := _most(ranks, key))
        ]
    losses = [loss for loss in report["losses"] if loss is not None]
    if losses:
        found.append(f"loss {losses[0]:.5g} in the first step, {losses[-1]:.5g} in the last of {len(report['losses'])}")
    found += [f"rank {rank['rank']}: {rank['failure']}" for rank in ranks if rank.get("failure")]
    return found


def table(report: Mapping[str, Any]) -> FittingTable:
    """Return a table of the run, rank by rank."""
    rows = FittingTable(("rank", "predicted MiB", "counted MiB", "planned bubble", "measured bubble"))
    for rank in report["ranks"]:
        rows.add_row(
            str(rank["rank"]),
            _range(*_predicted(rank)),
            _shown(rank["counted_peak_bytes"], 1 / _MIB, ".5g"),
            *(_shown(rank[key], 1, ".1%") for key in ("predicted_bubble_rate", "measured_bubble_rate")),
        )
    return rows


def _size(devices: int, chunks: int, microbatches: int) -> str:
    return (
        f"{devices} pipeline rank{'s' * (devices != 1)} with {chunks} chunk{'s' * (chunks != 1)} each, "
        f"{microbatches} microbatch{'es' * (microbatches != 1)}"
    )


def _agreement(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Say how well predicted and counted peaks agree."""
    known = [
        (least, most, rank["counted_peak_bytes"], rank["rank"])
        for rank in ranks
        for least, most in [_predicted(rank)]
        if least is not None and most is not None and rank["counted_peak_bytes"] is not None
    ]
    if not known:
        return "counted; nothing was predicted"
    off = [each for each in known if not each[0] <= each[2] <= each[1]]
    if not off:
        uneven = any(least < most for least, most, *_ in known)
        return "counted; every rank within its prediction" if uneven else "predicted = counted on every rank"
    least, most, counted, rank = max(off, key=lambda each: max(each[0] - each[2], each[2] - each[1]))
    return (
        f"counted; {len(off)} ranks differ from the prediction, rank {rank} most: {_range(least, most)} MiB predicted, "
        f"{counted / _MIB:.5g} counted"
    )


def _predicted(rank: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the least and the most that a rank was to hold: they differ where experts get tokens unevenly."""
    most = rank["predicted_peak_bytes"]
    least = rank.get("predicted_least_peak_bytes")  # reports of earlier versions have none
    return most if least is None else least, most


def _most(ranks: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return max((rank[key] for rank in ranks if rank.get(key) is not None), default=None)


def _shown(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(value * scale, form)


def _range(least: float | None, most: float | None) -> str:
    shown = _shown(most, 1 / _MIB, ".5g")
    return shown if least == most else f"{_shown(least, 1 / _MIB, '.5g')} to {shown}"
