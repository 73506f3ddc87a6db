"""``pipemem schedules``: the table."""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.table import Table

from megatron_pipemem.cli.common import Json, console, print_json
from megatron_pipemem.schedule.registry import Family, families

_COLUMNS = ("name", "placement", "backward", "peak", "bubble", "needs and options", "source")


def schedules(as_json: Json = False) -> None:
    """List every schedule: what it holds at its peak, how long it idles, what it needs.

    Peaks are in activation units: 1 is what 1F1B's first device holds. Bubbles are for many microbatches, with F, I, W, B
    the seconds of one device's share of the model, p devices and v chunks.
    """
    if as_json:
        print_json([_row(family) for family in families()])
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "placement", "backward"))
    for family in families():
        needs = [f"p >= {family.min_devices}"] if family.min_devices > 1 else []
        needs += [f"-o {option}: {text}" for option, text in family.options.items()]
        split = "I and W" if family.splits_backward else "B"
        table.add_row(
            family.name, family.placement, split, family.peak, family.bubble, "\n".join(needs), family.source
        )
    console().print(table)


def _row(family: Family) -> dict[str, object]:
    return {
        **{key: value for key, value in asdict(family).items() if key not in ("build", "options")},
        "options": dict(family.options),
    }
