"""The results of a run as text, from its report, and the statistics that reports and logs share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from megatron_pipemem.schedule.baseline import planned_share_of_1f1b
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks

_MIB = 1 << 20


def peak_activation(schedule: Schedule) -> float:
    """Return the highest peak of all devices, in activation units."""
    return max(peaks(schedule))


def announcement(timeline: Timeline) -> str:
    """Return the line that a run logs at its start: the schedule, the predicted bubble and the predicted peak."""
    schedule = timeline.schedule
    share, basis = planned_share_of_1f1b(schedule, timeline.costs)
    return (
        f"{schedule.name}, {_size(schedule.num_devices, schedule.placement.num_chunks, schedule.num_microbatches)}: "
        f"planned bubble {timeline.bubble_rate:.1%}, peak activations {share:.3g} of 1F1B's ({basis})"
    )


def typical[T](steps: Sequence[T]) -> Sequence[T]:
    """Return all steps but the first, which opens channels and fills the allocator's cache, if there are several."""
    return steps[1:] or steps


def bubble_of_steps(steps: Sequence[tuple[float, float]]) -> float | None:
    """Return the idle share of a rank's training steps, from 0 to 1: the median over all steps but the first.

    Each step is a pair of seconds: the time of the rank's actions, and the time from the first start to the last end on all
    ranks of its pipeline. Steps of 0 seconds do not count. Without others, the result is ``None``.
    """
    rates = [1 - work / makespan for work, makespan in steps if makespan]
    return median(typical(rates)) if rates else None


def busiest(rates: Iterable[float | None]) -> float | None:
    """Return the bubble rate of the busiest rank, which is the lowest rate, or ``None`` if no rank has a rate."""
    return min((rate for rate in rates if rate is not None), default=None)


def measured_bubble(report: Mapping[str, Any]) -> float | None:
    """Return the bubble rate of a run's busiest rank, as measured in its report; ``None`` if no rank has one."""
    return busiest(rank["measured_bubble_rate"] for rank in report["ranks"])


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return the results of a run as lines of text, from its report (the parsed file of ``--pipemem-report``)."""
    text = []
    if chosen := report["plans"] and report["plans"][-1]:
        size = _size(chosen["devices"], chosen["chunks"], chosen["microbatches"])
        times = f", planned {len(report['plans'])} times" if len(report["plans"]) > 1 else ""
        text.append(f"{chosen['schedule']}, {size}{times}: {report['steps']} steps measured")
    ranks: Sequence[Mapping[str, Any]] = report["ranks"]
    if (peak := _most(ranks, "counted_peak_bytes")) is not None:
        # Stages of 1F1B are sums of these stages, which may share tensors: two digits are sure.
        share = f"; {peak / whole:.2g} of 1F1B's bytes" if (whole := report.get("bytes_of_1f1b")) else ""
        text.append(f"peak activations {peak / _MIB:.4g} MiB on the fullest rank, {_agreement(ranks)}{share}")
    text += _of_allocator(ranks)
    if loads := {rank["rank"]: rank["expert_load"] for rank in ranks if rank.get("expert_load")}:
        rank = max(loads, key=loads.__getitem__)
        text.append(
            f"experts of rank {rank} got {loads[rank]:.3g} times an even share of a microbatch's tokens, the most of all ranks"
        )
    if (measured := measured_bubble(report)) is not None:
        planned = busiest(rank["predicted_bubble_rate"] for rank in ranks)
        seconds = chosen["measured_makespan"] if chosen else None
        is_equal = chosen and chosen.get("priced_by") == "unit"
        costs = "with F = I = W, equal stages and messages that take no time" if is_equal else "with the run's costs"
        text.append(
            f"bubble (idle share of the rank that idles least): {shown(planned, 1, '.1%')} planned {costs}, {measured:.1%} "
            "measured"
            + ("" if seconds is None else f"; a step takes {seconds:.4g} s from its first pass to its last")
            + " (medians of all steps but the first)"
        )
    if ahead := _most(ranks, "steps_ahead"):
        back, state = _most(ranks, "steps_taken_back"), "the copy for undoing a step takes"
        sentences = {
            "rollback_bytes": f"{state} {{}} of the device",
            "waiting_gradient_bytes": "gradients that wait for their optimizer step take {} of the device",
        }
        text.append(f"{ahead} of {report['steps']} steps did not wait for a gradient norm; {back} of them were undone")
        text += [
            sentence.format(f"{nbytes / _MIB:.4g} MiB") + " on the fullest rank"
            for key, sentence in sentences.items()
            if (nbytes := _most(ranks, key))
        ]
    losses = [loss for loss in report["losses"] if loss is not None]
    if losses:
        text.append(f"loss {losses[0]:.5g} in the first step, {losses[-1]:.5g} in the last of {len(report['losses'])}")
    text += [f"rank {rank['rank']}: {rank['failure']}" for rank in ranks if rank.get("failure")]
    return text


def _of_allocator(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line on the memory of the fullest GPU; none for CPU ranks."""
    on_gpus = [rank for rank in ranks if rank.get("allocated_bytes") is not None]
    if not on_gpus:
        return
    rank = max(on_gpus, key=lambda rank: rank["allocated_bytes"])
    predicted, gib = rank["predicted_allocated_bytes"], 1 / (_MIB << 10)
    yield (
        f"allocated {shown(rank['allocated_bytes'], gib, '.4g')} GiB on rank {rank['rank']}, the fullest; "
        f"{shown(predicted, gib, '.4g')} GiB were predicted without the working memory of one action; "
        f"reserved {shown(rank['reserved_bytes'], gib, '.4g')} GiB, and NCCL's buffers of messages take "
        f"{shown(rank['nccl_bytes'], 1 / _MIB, '.4g')} MiB, {shown(rank['predicted_nccl_bytes'], 1 / _MIB, '.4g')} predicted"
    )


def _size(devices: int, chunks: int, microbatches: int) -> str:
    return (
        f"{devices} pipeline rank{'s' * (devices != 1)} with {chunks} chunk{'s' * (chunks != 1)} each, "
        f"{microbatches} microbatch{'es' * (microbatches != 1)}"
    )


def _agreement(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return text that compares the predicted peaks of all ranks with the counted ones."""
    predictions = [
        (least, most, rank["counted_peak_bytes"], rank["rank"])
        for rank in ranks
        for least, most in [predicted_peaks(rank)]
        if least is not None and most is not None and rank["counted_peak_bytes"] is not None
    ]
    if not predictions:
        return "counted; nothing was predicted"
    off = [(least, most, counted, rank) for least, most, counted, rank in predictions if not least <= counted <= most]
    if not off:
        uneven = any(least < most for least, most, *_ in predictions)
        return "counted; every rank within its prediction" if uneven else "predicted = counted on every rank"
    least, most, counted, rank = max(off, key=_distance)
    return (
        f"counted; {len(off)} ranks differ from the prediction, rank {rank} most: {shown_range(least, most)} MiB predicted, "
        f"{counted / _MIB:.5g} counted"
    )


def _distance(prediction: tuple[float, float, float, int]) -> float:
    """Return how many bytes a rank's counted peak is outside of its predicted range."""
    least, most, counted, _ = prediction
    return max(least - counted, counted - most)


def predicted_peaks(rank: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the lowest and the highest peak in bytes that is predicted for a rank.

    They differ if experts may get different numbers of tokens. Both are ``None`` if nothing is predicted.
    """
    most = rank["predicted_peak_bytes"]
    least = rank.get("predicted_least_peak_bytes")  # reports of earlier versions have none
    return most if least is None else least, most


def _most(ranks: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return max((rank[key] for rank in ranks if rank.get(key) is not None), default=None)


def shown(value: float | None, scale: float, form: str) -> str:
    """Return a scaled number in a format, or a dash if it is unknown."""
    return "-" if value is None else format(value * scale, form)


def shown_range(least: float | None, most: float | None) -> str:
    """Return a range in bytes as text in MiB; one number if both ends are equal."""
    highest = shown(most, 1 / _MIB, ".5g")
    return highest if least == most else f"{shown(least, 1 / _MIB, '.5g')} to {highest}"
