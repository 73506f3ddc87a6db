"""Run pipeline schedules on devices that sleep instead of computing, and compare runtimes at equal memory.

Claim: the executor takes as long as the simulator predicts. At every amount of memory it is faster than stock
Megatron-Core and torch.distributed.pipelining. All of them drive the same stages on the same gloo ranks in the same
run. A pass sleeps for a given time, so a few cores carry any number of devices. Messages are a few bytes, and links are
not emulated.

    python benchmarks/emulated_devices.py            # p = 4 and 8, minutes
    python benchmarks/emulated_devices.py --quick    # p = 4, one step each
    python benchmarks/emulated_devices.py --steps    # p = 4, consecutive steps with and without a barrier between them
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from emulated.measure import LEGEND, Row, measure
from emulated.runtimes import Step, megatron_steps, our_steps, torch_steps
from emulated.steps import BARRIER, DROPPED, OVERLAPPED, StepsRow, measure_steps
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_pipemem import Costs, build_schedule
from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.stream import LEAST_GAIN
from megatron_pipemem.search import search_schedule

FAMILIES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "1f1b-v")
STEPPED = ("1f1b", "zb-h2", "zbv")
"""Schedules whose consecutive steps are compared: one that gains nothing without a barrier, and two that gain."""
CAPS = (0.5, 0.625, 0.75, 1.0)
"""Memory caps of searched schedules, in activation units."""


@dataclass(frozen=True)
class Duel:
    """A peer's schedule against the fastest of ours that needs no more memory."""

    peer: str
    peer_peak: float
    peer_seconds: float
    ours: str
    our_peak: float
    our_seconds: float

    @property
    def speedup(self) -> float:
        return self.peer_seconds / self.our_seconds


def our_schedules(devices: int, microbatches: int, costs: Costs) -> tuple[tuple[str, Schedule], ...]:
    """Return the families, and the schedule that a search finds under every cap for these costs."""
    shape: dict[str, Any] = {"num_devices": devices, "num_microbatches": microbatches}
    rows = [(name, build_schedule(name, **shape)) for name in FAMILIES]
    for cap in CAPS:
        result = search_schedule(**shape, costs=costs, memory_cap=cap, max_chunks=2)
        rows.append((f"search {cap:g}", result.schedule))
    return tuple(rows)


def all_steps(schedules: tuple[tuple[str, Schedule], ...], microbatches: int, costs: Costs) -> Iterator[Step]:
    """Yield the steps of every runtime."""
    yield from our_steps((name, schedule, costs) for name, schedule in schedules)
    yield from torch_steps(microbatches, costs)
    yield from megatron_steps(microbatches, costs)


def duels(rows: list[Row]) -> list[Duel]:
    """Return a duel for every row of another runtime with at least one row of ours in no more memory."""
    pairs = []
    for peer in (row for row in rows if row.runtime != "pipemem"):
        smaller = [row for row in rows if row.runtime == "pipemem" and row.peak <= peer.peak + 1e-9]
        if smaller:
            best = min(smaller, key=lambda row: row.seconds)
            pairs.append(
                Duel(f"{peer.runtime} {peer.schedule}", peer.peak, peer.seconds, best.schedule, best.peak, best.seconds)
            )
    return pairs


def rows_table(rows: list[Row]) -> Table:
    """Return a table: seconds, activation units, measured / simulated, spread over the repeats, and error of the passes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=LEGEND, caption_justify="left")
    for heading in ("runtime", "schedule", "peak", "planned", "measured", "ratio", "spread", "pass"):
        table.add_column(heading, justify="left" if heading in ("runtime", "schedule") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.runtime,
            row.schedule,
            f"{row.peak:.3f}",
            f"{row.simulated:.3f}",
            f"{row.seconds:.3f}",
            f"{1 + row.off_plan:.3f}",
            f"{(max(row.measured) - min(row.measured)) / row.seconds:.1%}",
            f"{row.pass_error:+.2%}",
        )
    return table


def duels_table(pairs: list[Duel]) -> Table:
    """Return a table of peers against the fastest schedule of ours with no more memory."""
    caption = "ours: the fastest that holds no more than the peer; peak: activation units; seconds: of a step"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("peer", "peak", "seconds", "ours", "peak", "seconds", "speedup"):
        table.add_column(heading, justify="left" if heading in ("peer", "ours") else "right", no_wrap=True)
    for duel in pairs:
        table.add_row(
            duel.peer,
            f"{duel.peer_peak:.3f}",
            f"{duel.peer_seconds:.3f}",
            duel.ours,
            f"{duel.our_peak:.3f}",
            f"{duel.our_seconds:.3f}",
            f"{duel.speedup:.3f}",
        )
    return table


def compare(devices: int, microbatches: int, ratio: tuple[float, float, float], unit: float, repeats: int) -> dict:
    """Print one comparison, and return it as JSON data. ``unit`` is the seconds of one cost unit."""
    console = Console()
    forward, backward_input, backward_weight = (unit * part for part in ratio)
    costs = Costs(forward, backward_input, backward_weight)
    title = f"{devices} devices, {microbatches} microbatches, F:I:W = {':'.join(f'{part:g}' for part in ratio)}"
    console.print(f"{title}, {unit * 1e3:g} ms each", style="bold")
    schedules = our_schedules(devices, microbatches, costs)
    rows = measure(devices, repeats, partial(all_steps, schedules, microbatches, costs))
    pairs = duels(rows)
    console.print(rows_table(rows))
    console.print(duels_table(pairs))
    return {
        "devices": devices,
        "microbatches": microbatches,
        "costs": ratio,
        "unit_seconds": unit,
        "rows": [asdict(row) | {"seconds": row.seconds, "off_plan": row.off_plan} for row in rows],
        "at_equal_memory": [asdict(duel) | {"speedup": duel.speedup} for duel in pairs],
    }


@dataclass(frozen=True)
class OverlapStatistics:
    """The gain of one schedule without the barrier between its steps."""

    schedule: str
    planned: float  # speedup over steps with the barrier, simulated
    measured: float  # the same, measured
    against_stock: float  # speedup over the fastest of Megatron-Core's schedules
    break_even: float | None  # share of steps that may need clipping until the gain is lost; ``None`` without a gain


def overlaps(rows: list[StepsRow]) -> list[OverlapStatistics]:
    """Return the overlap of every schedule of ours. A dropped step costs equally much at any place."""
    stock = min(row.seconds for row in rows if row.runtime != "pipemem")
    ours = {(row.schedule, row.way): row for row in rows if row.runtime == "pipemem"}
    gains = []
    for name in dict.fromkeys(name for name, _ in ours):
        waits, free, dropped = (ours[name, way] for way in (BARRIER, OVERLAPPED, DROPPED))
        saved, lost = waits.seconds - free.seconds, dropped.seconds - free.seconds
        assert waits.planned is not None and free.planned is not None, "our steps are planned"
        gain = waits.planned / free.planned
        even = saved / lost if gain > LEAST_GAIN and lost > 0 else None
        gains.append(OverlapStatistics(name, gain, waits.seconds / free.seconds, stock / free.seconds, even))
    return gains


def steps_table(rows: list[StepsRow]) -> Table:
    """Return a table of seconds from step to step, planned and measured, with the spread over the repeats."""
    caption = "planned, measured: seconds from step to step; ratio: measured / planned; spread: slowest - fastest repeat, of it"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("runtime", "schedule", "barrier", "planned", "measured", "ratio", "spread"):
        table.add_column(heading, justify="left" if heading in ("runtime", "schedule", "barrier") else "right")
    for row in rows:
        table.add_row(
            row.runtime,
            row.schedule,
            row.way,
            "-" if row.planned is None else f"{row.planned:.3f}",
            f"{row.seconds:.3f}",
            "-" if row.planned is None else f"{row.seconds / row.planned:.3f}",
            f"{(max(row.measured) - min(row.measured)) / row.seconds:.1%}",
        )
    return table


def overlaps_table(gains: list[OverlapStatistics]) -> Table:
    """Return a table of the schedules' gains."""
    caption = (
        "gains: times as fast without a barrier as with it, and as stock; pays up to: the share of steps with clipped "
        "gradients, which are undone, at which nothing is gained"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("schedule", "planned gain", "measured", "against stock", "pays up to"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for gain in gains:
        even = "-" if gain.break_even is None else f"{gain.break_even:.0%} clipped"
        table.add_row(gain.schedule, *(f"{x:.3f}" for x in (gain.planned, gain.measured, gain.against_stock)), even)
    return table


def compare_steps(
    devices: int, microbatches: int, ratio: tuple[float, float, float], unit: float, repeats: int, steps: int
) -> dict:
    """Print one comparison of consecutive steps, and return it as JSON data. ``unit`` is the seconds of one cost unit."""
    console = Console()
    forward, inputs, weights = (unit * part for part in ratio)
    costs = Costs(forward, inputs, weights)
    rows = measure_steps(devices, microbatches, costs, STEPPED, steps, repeats)
    title = f"{devices} devices, {microbatches} microbatches, {steps} steps, F:I:W = {':'.join(f'{part:g}' for part in ratio)}"
    console.print(f"{title}, {unit * 1e3:g} ms each", style="bold")
    gains = overlaps(rows)
    console.print(steps_table(rows))
    console.print(overlaps_table(gains))
    return {
        "devices": devices,
        "microbatches": microbatches,
        "costs": ratio,
        "unit_seconds": unit,
        "steps": steps,
        "rows": [asdict(row) | {"seconds": row.seconds} for row in rows],
        "without_barrier": [asdict(gain) for gain in gains],
    }


def parse_ratio(text: str) -> tuple[float, float, float]:
    """Return the three positive numbers of ``F,I,W``."""
    try:
        forward, backward_input, backward_weight = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not F,I,W, as in 1,1.5,.5") from None
    if min(forward, backward_input, backward_weight) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give three positive numbers")
    return forward, backward_input, backward_weight


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--devices", type=int, nargs="+", help="pipeline ranks (default: 4 8)")
    parser.add_argument(
        "--microbatches", type=int, help="microbatches of a step, a multiple of the devices (default: 3 per device)"
    )
    parser.add_argument(
        "--costs",
        type=parse_ratio,
        nargs="+",
        metavar="F,I,W",
        help="cost units of a device's whole share of a microbatch (default: 1,1,1 and 1,1.5,.5)",
    )
    parser.add_argument(
        "--step-ms", type=float, default=80, help="milliseconds of one cost unit (default: %(default)g)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of every row (default: %(default)d)")
    parser.add_argument("--quick", action="store_true", help="4 devices, one cost vector, one step of every row")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="?",
        const=6,
        help="compare this many consecutive steps (left empty: %(const)d), with and without a barrier between them, in place "
        "of single steps; the default is 4 devices, 2 microbatches each, one cost vector",
    )
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/emulated_devices.json"))
    parsed = parser.parse_args(arguments)
    few = parsed.quick or parsed.steps is not None
    parsed.costs = parsed.costs or [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5)][: 1 if few else None]
    if parsed.quick:
        parsed.costs, parsed.repeats = parsed.costs[:1], 1
    parsed.devices = parsed.devices or ([4] if few else [4, 8])
    parsed.per_device = 3 if parsed.steps is None else 2
    if parsed.steps is not None and parsed.steps < 3:
        parser.error("--steps must be at least 3, because the first step differs from the others")
    for devices in parsed.devices:
        microbatches = parsed.microbatches or parsed.per_device * devices
        if devices < 2 or microbatches % devices or microbatches < 2 * devices:
            # Our schedules take any number, but Megatron's interleaved schedule and torch's DualPipeV do not.
            parser.error(
                f"not every peer can run {microbatches} microbatches on {devices} devices; give at least 2 devices and a "
                "multiple of their number, at least twice as many"
            )
    if parsed.step_ms <= 0 or parsed.repeats < 1:
        parser.error("--step-ms and --repeats must be positive")
    return parsed


def main() -> None:
    arguments = parse_arguments()
    compared = compare if arguments.steps is None else partial(compare_steps, steps=arguments.steps)
    results = [
        compared(
            devices,
            arguments.microbatches or arguments.per_device * devices,
            ratio,
            arguments.step_ms / 1e3,
            arguments.repeats,
        )
        for devices in arguments.devices
        for ratio in arguments.costs
    ]
    write_whole(arguments.output, json.dumps(results, indent=1) + "\n")
    Console().print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
