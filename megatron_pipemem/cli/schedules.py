"""``pipemem schedules``: the table."""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.table import Table

from megatron_pipemem.cli.common import Json, console, print_json
from megatron_pipemem.schedule.registry import Family, families


def schedules(as_json: Json = False) -> None:
    """List every schedule: what it holds at its peak, how long it idles, what it needs.

    Peaks are in activation units: 1 is what 1F1B's first device holds. Bubbles are for many microbatches, with F, I, W,
    B the seconds of one device's share of the model, p devices, m microbatches and v chunks. Asynchronous schedules
    update weights in the middle of a step, so they train differently from all others. What is simulated only can be
    built, simulated, drawn and converted, but not run.
    """
    if as_json:
        print_json([_row(family) for family in families()])
        return
    figures = _table("name", "placement", "backward", "peak", "bubble")
    origins = _table("name", "source", "needs and options")
    for family in families():
        split = "I and W" if family.splits_backward else "B"
        figures.add_row(family.name, family.placement, split, family.peak, family.bubble)
        least = f"p >= {family.min_devices}" if family.min_devices > 1 else ""
        marks = ["asynchronous" if family.asynchronous else "", "simulated only" if family.simulated_only else ""]
        copies = f"{family.replicas} copies of the weights" if family.replicas > 1 else ""
        needs = [line for line in (family.needs or least, copies, ", ".join(filter(None, marks))) if line]
        needs += [f"{_FLAGS.get(option, f'-o {option}')}: {text}" for option, text in family.options.items()]
        origins.add_row(family.name, family.source, "\n".join(needs))
    console().print(figures, origins)


# Arguments of every schedule; those that list them fit their order to them.
_FLAGS = {"costs": "--costs", "memory_cap": "--memory-cap"}


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column in ("name", "placement", "backward"))
    return table


def _row(family: Family) -> dict[str, object]:
    return {
        **{
            key: value
            for key, value in asdict(family).items()
            if key not in ("build", "fewest_microbatches", "options")
        },
        "options": dict(family.options),
    }
