"""Tell in words and tables where the time of a step went: what ``pipemem explain`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pipemem.report.run import UNITS
from megatron_pipemem.report.tables import FittingTable
from megatron_pipemem.schedule.measured import BARRIER, CAUSES, HOST, IMBALANCE, LATE, MESSAGES, MICROBATCHES, SCHEDULE

_MIB = 1 << 20
_NANOSECONDS = 1e9


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Tell what costs most, and how far the simulation can be believed.

    Args:
        facts: as ``planner.explanation.explain`` returns them.
    """
    idle, step, devices = facts["idle"], facts["seconds"], facts["devices"]
    total = Counter({cause: sum(each["causes_ns"][cause] for each in idle) for cause in CAUSES})
    found = [
        f"schedule {facts['schedule']}, {facts['microbatches']} microbatches on {devices} pipeline ranks: bubble "
        f"{facts['bubble_rate']:.1%}, of the rank that idles least; the step that is explained takes {seconds(step)}"
    ]
    told = [(cause, nanoseconds / devices / _NANOSECONDS) for cause, nanoseconds in total.most_common() if nanoseconds]
    for number, (cause, each) in enumerate(told[:2]):
        rank = "ranks idle most of all for" if number == 0 else "then for"
        found.append(
            f"{rank} {cause}: {seconds(each)} on average ({each / step:.1%} of the step); {_why(cause, facts)}"
        )
    outside = facts["outside_seconds"]
    if outside:
        found.append(
            f"beside the pipeline a training step takes {seconds(outside)} more: optimizer, reduction of gradients, data, log"
        )
    own = facts["simulated_seconds"]
    found.append(
        f"simulated with its usual times the run's own schedule takes {seconds(own)}: changes are compared with that"
    )
    return found


def idle_table(facts: Mapping[str, Any]) -> FittingTable:
    """Return a table of every device's idle time by its causes; they add up to it."""
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


def change_lines(facts: Mapping[str, Any]) -> list[str]:
    """Tell the changes that would win most, each with what it saves and takes, or that none is worth it."""
    own = facts["simulated_seconds"]
    if not facts["changes"]:
        why = next(iter(facts["refused"].values()), "")
        return [f"nothing that was simulated saves as much as 1% of the step{f'; not tried: {why}' if why else ''}"]
    found = []
    for number, each in enumerate(facts["changes"], start=1):
        found.append(
            f"{number}. {each['what']}: {seconds(each['seconds'])} in place of {seconds(own)}, saves "
            f"{each['saves'] / own:.1%}; {_memory(each['peak'], facts)}"
        )
        found += [f"   {text}" for text in (each["flags"], each["note"]) if text]
    return found


def seconds(amount: float) -> str:
    """Return a time with a unit that fits it."""
    unit, scale = _unit(amount)
    return f"{amount * scale:.4g} {unit}"


def _unit(amount: float) -> tuple[str, float]:
    return ("s", 1.0) if abs(amount) >= 1 else ("ms", 1e3)


def _memory(peak: float, facts: Mapping[str, Any]) -> str:
    """Say what the fullest rank holds with a change, and what it holds now."""
    now = facts["peak"]
    if peak == now:
        return "same activation memory"
    more = f"{abs(peak / now - 1):.0%} {'more' if peak > now else 'less'} activation memory" if now else "more memory"
    if not facts["in_bytes"]:
        return f"{more}, {peak:.4g} in place of {now:.4g} {UNITS}"
    whole = facts["bytes_of_1f1b"]
    share = f" ({peak / whole:.3g} of 1F1B's bytes)" if whole else ""
    return f"{more}, {peak / _MIB:.4g} MiB on the fullest rank in place of {now / _MIB:.4g}{share}"


def _why(cause: str, facts: Mapping[str, Any]) -> str:
    """Say of a cause where to look."""
    if cause == SCHEDULE:
        return (
            f"{facts['schedule']} makes it unavoidable with {facts['microbatches']} microbatches, however even the stages; "
            "another schedule or more microbatches make it less"
        )
    if cause == IMBALANCE:
        stages: Sequence[float] = facts["stages"]
        slowest, mean = max(range(len(stages)), key=stages.__getitem__), sum(stages) / len(stages)
        return f"stage {slowest} takes {stages[slowest] / mean:.2f} times as long as the mean of all stages"
    if cause == MICROBATCHES:
        return f"the slowest microbatch takes {facts['slowest_microbatch']:.2f} times as long as usual"
    if cause == MESSAGES:
        links: Mapping[str, float] = facts["links"]
        if not links:
            return "they come late"
        link = max(links, key=links.__getitem__)
        return f"one from rank {link.replace('-', ' to ')} takes {seconds(links[link])}"
    if cause == LATE:
        ranks: Counter[str] = Counter()
        for each in facts["idle"]:
            ranks.update(each["late_ns"])
        return f"actions of rank {ranks.most_common(1)[0][0]} took longer than they usually do, most of all ranks"
    return {
        HOST: "the host was not done with what comes before and between actions (data, Python, launches)",
        BARRIER: "ranks that are done wait for the others before the next step begins",
    }[cause]
