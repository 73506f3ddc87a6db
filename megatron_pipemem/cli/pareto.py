"""``pipemem pareto``: compare what schedules cost in memory and time, and mark those that are worth choosing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.choose.pareto import ParetoPoint, bound_line, choices, trades, useful_caps
from megatron_pipemem.cli.checks import check_layers, check_output, check_seconds, check_size
from megatron_pipemem.cli.common import console, print_json, report_note
from megatron_pipemem.cli.options import DEVICES, MICROBATCHES, Json, Prices, ScheduleModules, Yes, takes_group
from megatron_pipemem.cli.prices import note_uneven_cuts, parse_costs, priced_head
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.report import pareto as picture
from megatron_pipemem.report.picture import SUFFIXES
from megatron_pipemem.schedule.baseline import in_shares_of_1f1b
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.memory_cap import loosened
from megatron_pipemem.schedule.options import OFF
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.search import MAX_CHUNKS
from megatron_pipemem.search.result import ResultCache


@takes_group
def pareto(
    devices: Annotated[int, DEVICES],
    microbatches: Annotated[int, MICROBATCHES],
    asked: Prices,
    caps: Annotated[
        str | None, typer.Option(metavar="X,Y,...", help="Memory caps to search under; 1 is the peak of 1F1B.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time of each search at most.")] = 10.0,
    show_all: Annotated[bool, typer.Option("--all", help="List the dominated schedules too.")] = False,
    yes: Yes = False,
    output: Annotated[Path | None, typer.Option(help="Picture: .png or .svg.")] = None,
    as_json: Json = False,
    _modules: ScheduleModules = None,
) -> None:
    """Compare bubble and peak memory of all families and of searched schedules; only the front is a choice.

    Peaks are shares of 1F1B's bytes for the same model where ``--costs FILE`` has bytes (``pipemem profile``), otherwise in
    activation units: equal stages, and nothing more held from I to W than from F to I.

    With ``--vocab-parallel auto`` all of them stand there three times: with the head on the last stage, and cut over all
    devices by either algorithm. Asynchronous families and those with two replicas of the weights are left out: they
    train, or hold, something else.

    Examples:
        # which schedules are worth choosing
        pipemem pareto -p 8 -m 24 --costs 1,1.5,.5 --output pareto.png
        # two short searches
        pipemem pareto -p 8 -m 24 --caps .5,.75 --seconds 2
    """
    check_size(devices, microbatches, MAX_CHUNKS, yes)
    check_output(output, SUFFIXES, "bubble against peak")
    check_seconds("--seconds", seconds)
    check_layers(asked.layers, devices)
    prices = _in_shares(parse_costs(asked.costs, asked.p2p), asked, devices, microbatches)
    in_bytes = prices.memory is not None
    wanted = useful_caps(devices) if caps is None else _parse_caps(caps)
    switch = asked.vocab_parallel
    barriers = {"off": (0,), "auto": (0, 1, 2)}.get(switch) or (BARRIERS_OF_ALGORITHM[int(switch)],)

    def priced(schedule: Schedule) -> Costs:
        return priced_head(asked, prices, schedule, schedule.vocabulary_barriers)

    layers = asked.layers if prices.part_prices is None else len(prices.part_prices.layers)
    most = MAX_CHUNKS if layers is None else max(1, min(MAX_CHUNKS, layers // devices))
    with showing("families"):
        found = choices(devices, microbatches, prices, wanted, seconds, ResultCache(), barriers, priced, most)
    note_uneven_cuts(prices, [choice.schedule.placement for choice in found])
    for cap in wanted:
        if all(choice.peak > loosened(cap) for choice in found):
            report_note(f"no schedule was found that fits a memory cap of {cap:.4g}")
    # With a head that some cut and others do not, the busiest devices have not the same work: one share for all of them.
    work = min((choice.makespan * (1 - choice.bubble_rate) for choice in found), default=0.0)
    points = [_point(choice, work) for choice in found]
    front = [choice for choice in found if not choice.dominated]
    cheap = trades(front)
    if as_json:
        print_json(
            {
                "choices": [_facts(choice, in_bytes) for choice in found if show_all or not choice.dominated],
                "trades": [str(trade) for trade in cheap],
                "output": None if output is None else str(output),
            }
        )
    else:
        out = console()
        out.print(picture.table([point for point in points if show_all or not point.dominated], in_bytes))
        for trade in cheap:
            out.print(str(trade), soft_wrap=True, markup=False)
        if layers is None:
            allowed = f"up to {most} chunks per device are allowed, since the number of layers is unknown"
            out.print(f"{allowed}; --layers N allows as many as N layers have", soft_wrap=True, markup=False)
        hidden = len(found) - len(front)
        if hidden and not show_all:
            out.print(f"{hidden} dominated schedules are not listed; --all lists them", soft_wrap=True, markup=False)
    if output is not None:
        title = f"p = {devices}, m = {microbatches}, costs {asked.costs}"
        with showing(f"working out the bound, and drawing {output}"):
            picture.save_pareto(points, output, bound_line(found, prices, priced), title, in_bytes)
        if not as_json:
            console().print(str(output), soft_wrap=True, markup=False)


def _in_shares(costs: Costs, asked: Prices, devices: int, microbatches: int) -> Costs:
    """Return the costs with memory in shares of 1F1B's bytes, or in activation units."""
    if asked.vocab_parallel != OFF:  # shards of the head hold bytes that no costs say
        costs = replace(costs, memory=None)
    return in_shares_of_1f1b(costs, devices, microbatches)


def _parse_caps(text: str) -> list[float]:
    try:
        caps = [float(part) for part in text.split(",")]
    except ValueError:
        caps = []
    if not caps or not all(0 < cap < float("inf") for cap in caps):
        raise UnsupportedError("bad-number", f"--caps {text!r}: give positive numbers, as in 0.5,0.75,1")
    return caps


def _name(choice: ParetoPoint) -> str:
    barriers = choice.schedule.vocabulary_barriers
    chunks = choice.schedule.placement.num_chunks
    name = choice.schedule.name if choice.cap is None else f"{choice.schedule.name} {choice.cap:.4g}"
    parts = [name, *([f"{chunks} chunks"] if chunks > 2 else [])]
    return ", ".join([*parts, *([f"{barriers} barrier{'s' if barriers > 1 else ''}"] if barriers else [])])


def _point(choice: ParetoPoint, work: float) -> picture.Point:
    """Return a choice as a point, with the part of its makespan beyond ``work``."""
    return picture.Point(
        _name(choice),
        choice.schedule.placement.name,
        choice.peak,
        1 - work / choice.makespan if choice.makespan else 0.0,
        choice.dominated,
        choice.cap is not None,
    )


def _facts(choice: ParetoPoint, in_bytes: bool) -> dict[str, object]:
    return {
        "schedule": choice.schedule.name,
        "memory_cap": choice.cap,
        "vocabulary_barriers": choice.schedule.vocabulary_barriers,
        "placement": choice.schedule.placement.name,
        "chunks": choice.schedule.placement.num_chunks,
        "peak_activation": max(peaks(choice.schedule)),
        "share_of_1f1b": choice.peak if in_bytes else None,
        "makespan": choice.makespan,
        "bubble_rate": choice.bubble_rate,
        "dominated": choice.dominated,
    }
