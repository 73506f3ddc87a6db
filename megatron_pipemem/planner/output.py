"""Write a plan as a run's configuration that ``pipemem launch`` takes, and as JSON."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass, replace
from math import floor, log10
from pathlib import Path
from typing import Any

from megatron_pipemem.config.cluster import GIB
from megatron_pipemem.config.runs import Run
from megatron_pipemem.config.yaml_text import write_yaml
from megatron_pipemem.planner.plans import Plan


def run_files(plan: Plan, path: Path) -> dict[Path, str]:
    """Return the files of a plan's run, with their texts: an order that has no name goes beside ``path`` as a schedule
    file.
    """
    run, files = plan.run, {}
    if plan.order is not None:
        order = path.with_suffix(".csv")
        files[order] = plan.order.to_csv()
        choice = replace(run.schedule, name=str(order))
        if plan.order.offloads:  # which the file says itself, and a flag would plan afresh
            choice = replace(choice, offload="off")
        run = replace(run, schedule=choice)
    return files | {path: f"{_heading(plan)}{write_yaml(settings(run))}"}


def settings(run: Run) -> dict[str, Any]:
    """Return everything in which a run differs from a default; complete without any other file."""
    return _changed(run)


def facts(plan: Plan) -> dict[str, Any]:
    """Return a plan's seconds and bytes for JSON."""
    cut = plan.run.parallelism
    return {
        "schedule": plan.schedule,
        "variant": plan.variant,
        "recompute": plan.run.schedule.recompute,
        **{key: getattr(cut, key) for key in ("tp", "pp", "dp", "cp", "ep", "chunks", "micro_batch", "microbatches")},
        "layers": list(plan.step.layers),
        "seconds": plan.seconds,
        "mfu": plan.mfu,
        "bubble_rate": plan.bubble_rate,
        "peak_bytes": list(plan.peaks),
        "losses_seconds": plan.losses,
        "binds": plan.binds,
        "run": settings(plan.run),
    }


def gibibytes(nbytes: float) -> str:
    """Return GiB to a tenth, of less than one to two digits, rounded up, so that it is a limit that admits so many
    bytes.
    """
    amount = nbytes / GIB
    digits = 1 if amount >= 1 or amount <= 0 else 1 - floor(log10(amount))
    tenths = floor(amount * 10**digits)
    while float(text := f"{tenths / 10**digits:.{digits}f}") * GIB < nbytes:
        tenths += 1
    return text


def _heading(plan: Plan) -> str:
    return (
        f"# Planned: {plan.seconds:.4g} s a step, {plan.mfu:.1%} MFU, bubble {plan.bubble_rate:.1%}, at most "
        f"{gibibytes(plan.peak)} GiB a rank; binds: {plan.binds}.\n"
    )


def _changed(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not their defaults, those of dataclasses within it likewise."""
    changed = {}
    for each in fields(config):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        held = getattr(config, each.name)
        if held != default:
            changed[each.name] = _changed(held) if is_dataclass(held) else held
    return changed
