"""Read the report of a run, and write its results as text and tables: speed, memory, and causes of idle time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.files import read_json
from megatron_pipemem.results import predicted_peaks, shown, shown_range
from megatron_pipemem.tools.report.measured_step import (
    BARRIER,
    CAUSES,
    HOST,
    IMBALANCE,
    LATE,
    MESSAGES,
    MICROBATCHES,
    SCHEDULE,
)
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


def table(report: Mapping[str, Any]) -> FittingTable:
    """Return a table with each rank's predicted and counted peak, and its predicted and measured bubble."""
    rows = FittingTable(("rank", "predicted MiB", "counted MiB", "planned bubble", "measured bubble"))
    for rank in report["ranks"]:
        rows.add_row(
            str(rank["rank"]),
            shown_range(*predicted_peaks(rank)),
            shown(rank["counted_peak_bytes"], 1 / _MIB, ".5g"),
            *(shown(rank[key], 1, ".1%") for key in ("predicted_bubble_rate", "measured_bubble_rate")),
        )
    return rows


_NANOSECONDS = 1e9


def explanation_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return lines of text with the two main causes of idle time, and the simulated makespan of the run's own schedule.

    ``facts`` is the result of ``planner.explanation.explain``.
    """
    idle, step, devices = facts["idle"], facts["seconds"], facts["devices"]
    total = Counter({cause: sum(device["causes_ns"][cause] for device in idle) for cause in CAUSES})
    text = [
        f"schedule {facts['schedule']}, {facts['microbatches']} microbatches on {devices} pipeline ranks: the last step takes "
        f"{seconds(step)}, of which its busiest rank idles {facts['bubble_rate']:.1%}"
    ]
    longest = [
        (cause, nanoseconds / devices / _NANOSECONDS) for cause, nanoseconds in total.most_common() if nanoseconds
    ]
    for number, (cause, idle_seconds) in enumerate(longest[:2]):
        rank = "largest cause of idle time" if number == 0 else "second"
        text.append(
            f"{rank}: {cause}, {seconds(idle_seconds)} mean of the ranks ({idle_seconds / step:.1%} of the step). "
            f"{_why(cause, facts)}"
        )
    outside = facts["outside_seconds"]
    if outside:
        text.append(
            f"outside the pipeline, a step takes {seconds(outside)} more: optimizer, reduction of gradients, data, log"
        )
    own = facts["simulated_seconds"]
    text.append(f"if every pass and message took its median time and the host were never late: {seconds(own)} a step")
    return text


def idle_table(facts: Mapping[str, Any]) -> FittingTable:
    """Return a table with each device's work and idle time, and the part of each cause that occurs.

    Causes with the same time on all devices are in the caption. ``facts`` is the result of ``planner.explanation.explain``.
    """
    occurring = [cause for cause in CAUSES if any(row["causes_ns"][cause] for row in facts["idle"])]
    unit, scale = _unit(facts["seconds"])

    def times(nanoseconds: Mapping[str, int], names: Iterable[str]) -> list[str]:
        return [f"{nanoseconds[name] / _NANOSECONDS * scale:.4g}" for name in names]

    texts = {cause: [*chain(*(times(row["causes_ns"], [cause]) for row in facts["idle"]))] for cause in occurring}
    causes = [cause for cause in occurring if len(set(texts[cause])) > 1]
    alike = [f"{cause} {texts[cause][0]}" for cause in occurring if cause not in causes]
    caption = "idles: the sum of the causes to the right" + (
        f" and, on every rank, {', '.join(alike)}" if alike else ""
    )
    late_ranks = ("late ranks",) if LATE in occurring else ()
    if late_ranks:
        caption += f"; {LATE}: longer than their median over the microbatches; late ranks: the ranks that ran them"
    rows = FittingTable(
        ("rank", "computes", "idles", *causes, *late_ranks),
        text=late_ranks,
        title=f"rank by rank, in {unit}",
        caption=caption,
    )
    for row in facts["idle"]:
        latest = sorted(row["late_ns"].items(), key=lambda item: -item[1])[:2]
        waits = []
        for device, nanoseconds in latest:
            name = "itself" if int(device) == row["device"] else f"rank {device}"
            waits.append(f"{name} ({nanoseconds / _NANOSECONDS * scale:.3g})")
        columns = [*times(row, ("work_ns", "idle_ns")), *times(row["causes_ns"], causes)]
        columns += [", ".join(waits) for _ in late_ranks]
        rows.add_row(str(row["device"]), *columns)
    return rows


def seconds(amount: float) -> str:
    """Return ``amount``, a time in seconds, as text in seconds or milliseconds: ``1.5 s`` or ``25 ms``."""
    unit, scale = _unit(amount)
    return f"{amount * scale:.4g} {unit}"


def _unit(amount: float) -> tuple[str, float]:
    return ("s", 1.0) if abs(amount) >= 1 else ("ms", 1e3)


def _why(cause: str, facts: Mapping[str, Any]) -> str:
    """Return two sentences about a cause of idle time: its source in this run, and what reduces it."""
    if cause == SCHEDULE:
        return (
            f"{facts['schedule']} has this idle time with {facts['microbatches']} microbatches even if all stages are equal. "
            "Another schedule or more microbatches reduce it"
        )
    if cause == IMBALANCE:
        stages: Sequence[float] = facts["stages"]
        slowest, mean = max(range(len(stages)), key=stages.__getitem__), sum(stages) / len(stages)
        ratio = f"{stages[slowest] / mean:.2f} times as long as the mean of all stages, by median passes"
        return f"Stage {slowest} takes {ratio}. pipemem layout moves layers away from it"
    if cause == MICROBATCHES:
        ratio = f"{facts['slowest_microbatch']:.2f} times as long as the median one"
        return f"The slowest microbatch takes {ratio}. --pipemem-microbatch-costs FLOPs orders them for it"
    if cause == MESSAGES:
        links: Mapping[str, float] = facts["links"]
        fewer = ", fewer chunks" if len(facts["stages"]) > facts["devices"] else ""
        remedy = f"Faster links{fewer} or a schedule that computes meanwhile reduce this time"
        if not links:
            return f"They arrive late. {remedy}"
        link = max(links, key=links.__getitem__)
        slowest_link = f"One from rank {link.replace('-', ' to ')} takes {seconds(links[link])}"
        return f"{slowest_link}. {remedy}"
    if cause == LATE:
        ranks: Counter[str] = Counter()
        for device in facts["idle"]:
            ranks.update(device["late_ns"])
        late = f"Actions of rank {ranks.most_common(1)[0][0]} took longer than usual, more so than on other ranks"
        return f"{late}. Look for other work on its machine"
    return {
        HOST: "The CPU was late with its work before and between actions. Faster data loading, fewer Python callbacks or CUDA "
        "graphs help",
        BARRIER: "Finished ranks wait for the others before the next step begins. --pipemem-overlap-steps lets them begin",
    }[cause]
