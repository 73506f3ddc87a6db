"""Read the report of a run, and write its results as text and tables: speed, memory, and causes of idle time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.files import read_json
from megatron_pipemem.schedule.baseline import planned_share_of_1f1b
from megatron_pipemem.schedule.measured import BARRIER, CAUSES, HOST, IMBALANCE, LATE, MESSAGES, MICROBATCHES, SCHEDULE
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks
from megatron_pipemem.tools.report.terminal import FittingTable

_MIB = 1 << 20


@contextmanager
def opened_report(path: Path) -> Iterator[Any]:
    """Yield the JSON of a run's report.

    If the block finds that a key is missing or a value has another type, a ConfigError with the name of the file is
    raised.
    """
    report = read_json(path, "the report of a run")
    try:
        yield report
    except KeyError as error:
        message = f"is not the report of a run, because it lacks the key {error}; give another file, or train again"
        raise ConfigError("wrong-file", message, file=path) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            "wrong-file", f"is not the report of a run ({error}); give another file, or train again", file=path
        ) from error


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
    """Return all steps but the first, which opens channels and fills the allocator's cache. A single step is
    kept.
    """
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
        back, state = _most(ranks, "steps_taken_back"), "the copy for undoing a step takes"
        held = {
            "rollback_bytes": f"{state} {{}} of the device",
            "waiting_gradient_bytes": "gradients that wait for their optimizer step take {} of the device",
        }
        found.append(f"{ahead} of {report['steps']} steps did not wait for a gradient norm; {back} of them were undone")
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
    """Return a table with each rank's predicted and counted peak, and its predicted and measured bubble."""
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
    """Return text that compares the predicted peaks of all ranks with the counted ones."""
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
    """Return the lowest and the highest peak in bytes that is predicted for a rank.

    They differ if experts may get different numbers of tokens. Both are ``None`` if nothing is predicted.
    """
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


_NANOSECONDS = 1e9


def explanation_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return lines of text with the two main causes of idle time, and the simulated makespan of the run's own schedule.

    ``facts`` is the result of ``planner.explanation.explain``.
    """
    idle, step, devices = facts["idle"], facts["seconds"], facts["devices"]
    total = Counter({cause: sum(each["causes_ns"][cause] for each in idle) for cause in CAUSES})
    found = [
        f"schedule {facts['schedule']}, {facts['microbatches']} microbatches on {devices} pipeline ranks: bubble "
        f"{facts['bubble_rate']:.1%}, of the rank that idles least; the explained step takes {seconds(step)}"
    ]
    told = [(cause, nanoseconds / devices / _NANOSECONDS) for cause, nanoseconds in total.most_common() if nanoseconds]
    for number, (cause, each) in enumerate(told[:2]):
        rank = "ranks idle most for" if number == 0 else "then for"
        found.append(
            f"{rank} {cause}: {seconds(each)} on average ({each / step:.1%} of the step); {_why(cause, facts)}"
        )
    outside = facts["outside_seconds"]
    if outside:
        found.append(
            f"outside the pipeline a training step takes {seconds(outside)} more: optimizer, reduction of gradients, data, log"
        )
    own = facts["simulated_seconds"]
    found.append(f"simulated with its median times, the run's own schedule takes {seconds(own)}")
    return found


def idle_table(facts: Mapping[str, Any]) -> FittingTable:
    """Return a table with each device's work and idle time, and the part of each cause that occurs.

    ``facts`` is the result of ``planner.explanation.explain``.
    """
    causes = [cause for cause in CAUSES if any(each["causes_ns"][cause] for each in facts["idle"])]
    unit, scale = _unit(facts["seconds"])
    rows = FittingTable(
        ("rank", "computes", "idles", *causes, "waits for"), text=("waits for",), title=f"rank by rank, in {unit}"
    )
    for each in facts["idle"]:
        late = sorted(each["late_ns"].items(), key=lambda item: -item[1])[:2]
        rows.add_row(
            str(each["device"]),
            *(f"{each[key] / _NANOSECONDS * scale:.4g}" for key in ("work_ns", "idle_ns")),
            *(f"{each['causes_ns'][cause] / _NANOSECONDS * scale:.4g}" for cause in causes),
            ", ".join(
                f"{'itself' if int(device) == each['device'] else f'rank {device}'} ({nanoseconds / _NANOSECONDS * scale:.3g})"
                for device, nanoseconds in late
            ),
        )
    return rows


def seconds(amount: float) -> str:
    """Return ``amount``, a time in seconds, as text in seconds or milliseconds: ``1.5 s`` or ``25 ms``."""
    unit, scale = _unit(amount)
    return f"{amount * scale:.4g} {unit}"


def _unit(amount: float) -> tuple[str, float]:
    return ("s", 1.0) if abs(amount) >= 1 else ("ms", 1e3)


def _why(cause: str, facts: Mapping[str, Any]) -> str:
    """Return the rest of a sentence about a cause of idle time: its source in this run."""
    if cause == SCHEDULE:
        return (
            f"{facts['schedule']} has this idle time with {facts['microbatches']} microbatches even if all stages are equal; "
            "another schedule or more microbatches reduce it"
        )
    if cause == IMBALANCE:
        stages: Sequence[float] = facts["stages"]
        slowest, mean = max(range(len(stages)), key=stages.__getitem__), sum(stages) / len(stages)
        return f"stage {slowest} takes {stages[slowest] / mean:.2f} times as long as the mean of all stages"
    if cause == MICROBATCHES:
        return f"the slowest microbatch takes {facts['slowest_microbatch']:.2f} times as long as the median one"
    if cause == MESSAGES:
        links: Mapping[str, float] = facts["links"]
        if not links:
            return "they arrive late"
        link = max(links, key=links.__getitem__)
        return f"one from rank {link.replace('-', ' to ')} takes {seconds(links[link])}"
    if cause == LATE:
        ranks: Counter[str] = Counter()
        for each in facts["idle"]:
            ranks.update(each["late_ns"])
        return f"actions of rank {ranks.most_common(1)[0][0]} took longer than usual, more so than on other ranks"
    return {
        HOST: "the host was late with its work before and between actions (data, Python, launches)",
        BARRIER: "finished ranks wait for the others before the next step begins",
    }[cause]
