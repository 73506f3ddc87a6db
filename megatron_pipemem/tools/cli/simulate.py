"""``pipemem simulate``, ``show`` and ``pareto``: predict the time and memory of schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from megatron_pipemem.conflicts import check_conflicts
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.offload.transfers import NOT_CHOSEN
from megatron_pipemem.features.recompute.orders import recomputed_by_mode
from megatron_pipemem.request import algorithm_of
from megatron_pipemem.schedule.action import SELECTIVE_SECONDS, Kind
from megatron_pipemem.schedule.baseline import bytes_of_1f1b, in_shares_of_1f1b, share_of_1f1b
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Costs
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.memory_cap import loosened, parse_caps
from megatron_pipemem.schedule.options import NOT_NEGATIVE, OFF, STOCK
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import megatrons_own
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks
from megatron_pipemem.schedule.simulator import simulate as simulated_once
from megatron_pipemem.schedule.stream import bubble_in_a_run, consecutive_steps, draw_steps
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.schedule.vocabulary import BARRIERS_OF_ALGORITHM
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.search import MAX_CHUNKS
from megatron_pipemem.search.result import ResultCache
from megatron_pipemem.tools.cli.common import (
    ASYNCHRONOUS,
    Shown,
    num_chunks,
    placement_text,
    print_answer,
    print_file,
    report_note,
    showing,
)
from megatron_pipemem.tools.cli.loading import (
    Loaded,
    check_attention,
    load_and_simulate,
    named,
    note_uneven_cuts,
    num_layers,
    parse_costs,
    price_layers,
    priced_head,
)
from megatron_pipemem.tools.cli.options import (
    DEVICES,
    MICROBATCHES,
    NAME_HELP,
    Json,
    Prices,
    Question,
    ScheduleModules,
    Yes,
    check_layers,
    check_output,
    check_size,
    check_steps,
    complete_schedules,
    takes_group,
)
from megatron_pipemem.tools.planner.pareto import (
    LEAST_SAVED,
    bound_line,
    busy_seconds,
    choices,
    dominated,
    trades,
    useful_caps,
)
from megatron_pipemem.tools.report import SUFFIXES, save_comparison
from megatron_pipemem.tools.report import pareto as picture
from megatron_pipemem.tools.report.figure import IMAGES, write_picture
from megatron_pipemem.tools.report.terminal import FittingTable, TerminalTimeline, placements_table
from megatron_pipemem.tools.report.timeline import DrawnRun, bytes_text

_IN_A_RUN = (
    "auto X, searched: the fastest order found within a memory cap of X; in a run --pipemem-schedule auto "
    "--pipemem-memory-cap X --pipemem-option chunks=CHUNKS"
)
_AS_A_RUN = (
    "placements of {chunks} chunks per device, as in a run without --pipemem-option chunks=N; -o "
    f"max_chunks={MAX_CHUNKS} finds the best number up to {MAX_CHUNKS}"
)


@takes_group
def simulate(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help=f"{NAME_HELP} Several are compared with each other and with Megatron's own.",
            autocompletion=complete_schedules,
        ),
    ],
    question: Question,
    single_queue: Annotated[
        bool,
        typer.Option("--single-queue", help="Simulate also one hardware queue per rank (one CUDA connection)."),
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, help="Simulate also this many steps without a barrier between them.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Simulate a schedule: makespan, bubble, peak memory, messages, and the lower bound of the makespan.

    Costs are for one device's whole share of the model and one microbatch, for any number of chunks. Makespans of
    different placements are therefore comparable.

    The lower bound holds for every order of the same placement within the memory cap. Without a cap, it holds for
    orders with no higher peak than this schedule, or in any memory with offload or recompute. For ``auto`` it holds for
    every placement tried. With several replicas, or with ``--vocab-cut``, it is the busiest device's work.

    A costs file may give microbatches different weights. It may also give each slice of a schedule with sequence slices
    its own price: lists of one value per stage and slice, stage by stage. ``--attention-share`` makes such prices from
    one number.

    With ``--steps``, every device begins a step as soon as it has finished the previous step. A run does so with
    --pipemem-overlap-steps. The period is the time from step to step. It is compared with steps at whose end all
    devices wait, as in stock Megatron.

    In ``--json``, times are in the unit of ``--costs``, rates are fractions of 1, and peaks are in activation units, of
    which 1F1B's first device holds 1.

    Examples:
        # compare schedules with each other, with 1F1B and with interleaved 1F1B
        pipemem simulate zb-h1 gis v-half -p 8 -m 32
        # give the seconds of F, I, W and of a message
        pipemem simulate v-half -p 8 -m 32 --costs 1,1.5,.5 --p2p .05
        # find the fastest order in 0.625 of 1F1B's memory
        pipemem simulate auto -p 8 -m 24 --memory-cap .625
        # hold half of the activations on the host
        pipemem simulate zbv -p 8 -m 32 --offload half --offload-ratio .4
        # cut every sequence into four slices that take equally long
        pipemem simulate seq1f1b -p 4 -m 8 -o slices=4 --attention-share .3 --slice-cut flops
        # see the gain without a barrier between steps
        pipemem simulate zb-h1 zb-h2 -p 8 -m 16 --steps 8
        # hide the exchange of the experts' tokens behind computing
        pipemem simulate dualpipe-v -p 8 -m 32 --exchange-share .4
        # price a large vocabulary
        pipemem simulate 1f1b -p 8 -m 32 --vocab-cut auto --head-cost 2.5layers --layers 32
    """
    if len(names) > 1:
        if single_queue:
            raise UnsupportedError("conflicting-options", "--single-queue is for one schedule; name one")
        _compare(names, question, steps, as_json)
        return
    if single_queue and names[0] == STOCK:
        raise UnsupportedError(
            "not-for-stock",
            "--single-queue simulates messages in this package's order for one queue, which is not Megatron's; name "
            f"{megatrons_own(question.chunks)}, or leave --single-queue out",
        )
    name = named(names[0], question)
    prices = price_layers([name], question)
    with showing(f"building, proving and simulating {name}"):
        loaded, timeline, reason = load_and_simulate(name, question, prices, names[0] == STOCK)
        check_attention(question, [loaded.schedule])
        facts = _facts(timeline, loaded)
        if single_queue:
            facts |= _in_single_queues(loaded.schedule, timeline.costs)
        if steps > 1:
            check_steps(loaded.schedule, steps, question.yes)
            facts |= _without_barrier(loaded, timeline.costs, steps)
    if loaded.schedule.vocabulary_barriers or question.vocab_cut != "off":
        facts["vocabulary_barriers"] = loaded.schedule.vocabulary_barriers
    if reason:
        facts["vocabulary_reason"] = reason
    print_answer(facts, _simulated(facts, timeline, loaded), as_json)


def _simulated(facts: Mapping[str, Any], timeline: Timeline, loaded: Loaded) -> Iterator[Shown]:
    """Yield the results of a simulation for people: ``facts``, and the placements that a search tried."""
    yield [*_lines(facts, timeline, loaded)]
    if (search := loaded.chosen.search) is not None:
        yield placements_table(search.candidates, DrawnRun(timeline).memory_text, _measure(loaded))


def _lines(facts: Mapping[str, Any], timeline: Timeline, loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Yield the results of a simulation as pairs of a name and a text."""
    placement, chunks, devices = facts["placement"], num_chunks(facts["chunks"]), facts["devices"]
    parts = f", {facts['slices']} slices per microbatch" if facts["slices"] > 1 else ""
    yield "schedule", f"{facts['schedule']}, {chunks} per device{parts}"
    yield "placement", f"{placement}{placement_text(placement)}"
    sizes = f"{devices} device{'s' * (devices > 1)}, {facts['microbatches']} microbatches"
    yield "step", f"{sizes}, {facts['messages']} messages between devices"
    unit = DrawnRun(timeline).time_unit
    alone = " of one step alone" * (timeline.schedule.updates is not None)
    makespan, moved = f"{facts['makespan']:.6g} {unit if unit == 'seconds' else f'({unit})'}{alone}", facts["in_a_run"]
    if moved is not None:
        makespan = f"{moved['makespan']:.6g} in a run, which runs W earlier to hold fewer bytes; in the order itself {makespan}"
    yield "makespan", makespan
    if timeline.schedule.updates is not None:
        seconds = f"{_step_seconds(facts):.6g} in a run, {facts['period']:.6g} without a barrier between steps"
        yield "step to step", f"{seconds}: the busiest device works {facts['ideal']:.6g}"
        yield "asynchronous", ASYNCHRONOUS
    else:
        rate = facts["bubble_rate"] if moved is None else 1 - facts["ideal"] / moved["makespan"]
        share = f"{rate:.2%} of the makespan"
        yield "bubble", f"{share}: the busiest device works {facts['ideal']:.6g}, and idles for the rest"
    is_alike = isclose(facts["bubble_rate"], facts["device_bubble_rate"], abs_tol=_LEAST_SHOWN)
    if timeline.schedule.updates is None and moved is None and not is_alike:
        share = f"{facts['device_bubble_rate']:.2%} of the longest time from a device's first pass to its last"
        yield "bubble of papers", share
    yield from _memory(facts, timeline, loaded)
    yield "lower bound", _bound(facts, loaded)
    if loaded.request.searches and not {"chunks", "max_chunks", "placement"} & set(loaded.request.options):
        yield "searched", _AS_A_RUN.format(chunks=facts["chunks"])
    if facts["replicas"] > 1:
        yield "replicas", f"{facts['replicas']} of the model"
    if any(versions > 1 for versions in facts["weight_versions"]):
        yield "weight versions", f"{_listed(facts['weight_versions'])} on the devices"
    if facts["pairs"]:
        gain = f"makespan {facts['makespan']:.6g} in place of {facts['makespan_without_pairs']:.6g}"
        yield "pairs", f"{facts['pairs']}, in which one action computes while the other's tokens travel: {gain}"
    if facts["microbatch_factors"]:
        spans = ((quantity, min(w), max(w), fmean(w)) for quantity, w in facts["microbatch_factors"].items())
        texts = (f"{quantity} {least:.4g} to {most:.4g}, mean {mean:.4g}" for quantity, least, most, mean in spans)
        yield "microbatches differ", f"factors of the costs: {'; '.join(texts)}"
    if (reason := facts.get("vocabulary_reason")) is not None:
        yield "vocabulary", reason
        if barriers := facts["vocabulary_barriers"]:
            yield "in a run", f"--pipemem-vocab-cut {algorithm_of(barriers)}"
    elif count := facts.get("vocabulary_barriers"):
        assumed = "" if timeline.costs.vocabulary is not None else _ASSUMED_HEAD
        yield "vocabulary", f"cut over all devices, with {count} barrier{'s' * (count > 1)} per microbatch{assumed}"
    if facts.get("single_queue_makespan"):
        ratio = facts["single_queue_makespan"] / facts["makespan"]
        makespan = f"makespan {facts['single_queue_makespan']:.6g}"
        yield "one queue", f"{makespan}, {_times(ratio)} as with several hardware queues per device"
    if facts.get("steps"):
        yield f"{facts['steps']} steps", f"{facts['steps_makespan']:.6g} in all, without a barrier between them"
        waiting = (
            f"{facts['period'] * facts['gain']:.6g}, {_times(facts['gain'])}, if devices wait for each other after each"
        )
        yield "period", f"{facts['period']:.6g} from step to step; {waiting}"
    if (refusal := facts.get("a_run_refuses")) is not None:
        yield "a run refuses", refusal


def _memory(facts: Mapping[str, Any], timeline: Timeline, loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Yield the lines about activations on the devices and the host."""
    if facts["peak_bytes"] is None or loaded.request.memory_cap is not None:
        units = facts["peak_activations"]
        devices = "on every device" if len(set(units)) == 1 else f"by device {_listed(units)}"
        yield "peak", f"{facts['peak_activation']:.6g} {DrawnRun(timeline).memory_units}; {devices}"
    if facts["peak_bytes"] is not None:
        share = facts["share_of_1f1b"]
        of = "" if share is None else f", {share:.3g} of 1F1B's for the same model and cut"
        if facts["in_a_run"] is not None:
            of += f", in a run {facts['in_a_run']['share_of_1f1b']:.3g}"
        sizes = ", ".join(map(bytes_text, facts["peak_bytes"]))
        yield "peak in bytes", f"{bytes_text(max(facts['peak_bytes']))}{of}; by device {sizes}"
    if (devices := facts["devices"]) > (microbatches := facts["microbatches"]):
        yield "1f1b's own peak", f"{microbatches / devices:.4g}, because there are fewer microbatches than devices"
    if facts["recomputed"]:
        yield "recomputed", "; ".join(_recomputed(facts["recomputed"], loaded.schedule.num_stages, timeline.costs))
    if facts["transfers"]:
        yield (
            "host memory",
            (
                f"{facts['host_peak']:.6g} activation units at most, of one device; {facts['transfers']} copies to and from "
                f"the host in a step{DrawnRun(timeline).copy_text}"
            ),
        )
    if any(facts["stall_seconds"]):
        yield "waits for copies", f"{_listed(facts['stall_seconds'])} on the devices, in the unit of the makespan"
    offload = loaded.chosen.offload
    if loaded.request.offload != OFF and offload is not None and offload.kept:
        reasons = Counter(offload.kept.values()).most_common()
        total = len(offload.kept) + len(offload.offloaded)
        yield (
            "not offloaded",
            (
                f"{len(offload.kept)} of {total} activations (one per stage and microbatch): "
                f"{', '.join(f'{count} {_WHY.get(why, why)}' for why, count in reasons)}"
            ),
        )


def _recomputed(stages_by_mode: Mapping[str, Sequence[int]], num_stages: int, costs: Costs) -> Iterator[str]:
    """Yield, for every mode of recomputation, its parts of a layer, the assumed shares of costs without them, its stages."""
    for mode, stages in stages_by_mode.items():
        text = mode
        if mode == "selective":
            assumed = [f"{SELECTIVE_SECONDS:g} of F"] if costs.recompute_selective is None else []
            assumed += [f"{SELECTIVE_BYTES:.2g} of the activations"] if Kind.RS not in (costs.memory or {}) else []
            text = f"norms and MLP intermediates{', assumed ' if assumed else ''}{' and '.join(assumed)},"
        is_everywhere = len(stages) == num_stages
        yield f"{text} on {'all stages' if is_everywhere else 'stages ' + ', '.join(map(str, stages))}"


_ASSUMED_HEAD = "; the head takes as long as a device's layers here, and no time without a cut; --head-cost prices both"
_WHY = {NOT_CHOSEN: "left out by --offload"}
"""Printed reasons that differ from the planner's."""
_LEAST_SHOWN = 5e-5
"""Half of the last digit of a printed bubble."""


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _times(ratio: float) -> str:
    """Return a ratio of times in words: ``1.07 times as long``, or ``as long`` if it is 1 in these digits."""
    return "as long" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f} times as long"


def _measure(loaded: Loaded) -> str:
    return "period" if loaded.request.searches_period else "makespan"


_OWN = ("1f1b", "interleaved")
_COMPARED = ("schedule", "chunks", "makespan", "to 1f1b", "bubble", "peak", "messages")


def _compare(names: list[str], question: Question, steps: int, as_json: bool) -> None:
    """Print a table of several schedules and of Megatron's own, one row each.

    Megatron's own are left out if Megatron cannot run these sizes.
    """
    are_stock = [name == STOCK for name in names]
    names = [named(name, question) for name in names]
    prices, rows = price_layers(names, question), []
    # Options belong to the schedules that were named. Megatron's own run as they are, where they can.
    bare = replace(question, options=None, chunks=None, memory_cap=None, offload=OFF)
    listed = [*names, *(own for own in _OWN if own not in names)]
    for name, is_own in zip(listed, [*are_stock, *[True] * len(_OWN)], strict=False):
        options = question if name in names else bare
        with showing(f"building, proving and simulating {name}"):
            try:
                loaded, timeline, _ = load_and_simulate(name, options, prices, is_own)
            except UnsupportedError:
                if name in names:
                    raise
                continue
            facts = _facts(timeline, loaded)
            if steps > 1:
                check_steps(loaded.schedule, steps, question.yes)
                facts |= _without_barrier(loaded, timeline.costs, steps)
            rows.append(facts)
    print_answer(rows, _comparison(rows, names, DrawnRun(timeline)), as_json)


def _comparison(rows: Sequence[Mapping[str, Any]], names: Sequence[str], drawn: DrawnRun) -> Iterator[Shown]:
    """Yield the table of the compared schedules. ``names`` are those that the user named."""
    plain = next(_step_seconds(row) for row in rows if row["schedule"] == _OWN[0])
    unasked = " and ".join(row["schedule"] for row in rows if row["schedule"] not in names)
    caption = f"{unasked}: Megatron's own, for comparison; " if unasked else ""
    asynchronous = ", ".join(row["schedule"] for row in rows if row["asynchronous"])
    caption += f"{asynchronous}: from step to step in place of the makespan, {ASYNCHRONOUS}; " if asynchronous else ""
    copies = ", ".join(f"{row['schedule']} {row['replicas']} times" for row in rows if row["replicas"] > 1)
    caption += f"weights, which peaks leave out, are held by {copies}; " if copies else ""
    in_bytes = all(row["share_of_1f1b"] is not None for row in rows)
    peak = "share of 1f1b's bytes, for the same model and cut" if in_bytes else f"in {drawn.memory_units}"
    caption += (
        f"makespan: {drawn.time_unit}; to 1f1b: makespan / 1f1b's; bubble: idle share of the busiest device; peak: {peak}; "
        "messages: between devices in a step"
    )
    has_steps = "steps" in rows[0]
    caption += "; period: from step to step without a barrier between steps" * has_steps
    table = FittingTable((*_COMPARED, *(["period"] * has_steps)), text=_COMPARED[:1], caption=caption)
    for facts in rows:
        table.add_row(
            facts["schedule"],
            str(facts["chunks"]),
            f"{_step_seconds(facts):.6g}",
            f"{_step_seconds(facts) / plain:.3f}",
            f"{facts['bubble_rate']:.1%}",
            f"{facts['share_of_1f1b']:.2f}" if in_bytes else f"{facts['peak_activation']:.4g}",
            str(facts["messages"]),
            *([f"{facts['period']:.6g}"] if has_steps else ()),
        )
    yield table
    for facts in rows:
        if (moved := facts["in_a_run"]) is not None:
            yield f"in a run, W of {facts['schedule']} runs earlier: {_moved_in_words(moved)}"


def _step_seconds(facts: Mapping[str, Any]) -> float:
    """Return the makespan, or for an asynchronous schedule the time from step to step, in the unit of the costs.

    A run without --pipemem-overlap-steps has a barrier between steps.
    """
    seconds: float = facts["period"] * facts["gain"] if facts["asynchronous"] else facts["makespan"]
    return seconds


def _in_single_queues(schedule: Schedule, costs: Costs) -> dict[str, float]:
    """Return makespan and bubble of the schedule if each rank has one hardware queue, after proving its program."""
    program = lower(schedule, single_queue=True, costs=costs)
    validate_program(program, microbatch_order=False)
    run = run_single_queues(program, costs)
    return {"single_queue_makespan": run.makespan, "single_queue_bubble_rate": run.bubble_rate}


def _without_barrier(loaded: Loaded, costs: Costs, steps: int) -> dict[str, Any]:
    """Return makespan, period and gain of ``steps`` steps without a barrier between them, by key of ``--json``.

    If a run would refuse such steps, the reason is included.
    """
    result = consecutive_steps(loaded.schedule, costs, steps=steps)
    facts: dict[str, Any] = {
        "steps": steps,
        "steps_makespan": max(result.ends[steps - 1]),
        "period": result.period,
        "gain": result.gain,
    }
    weights = None if costs.microbatch is None else "tokens"
    try:
        check_conflicts(replace(loaded.request, overlap_steps=True, microbatch_costs=weights))
    except UnsupportedError as reason:
        facts["a_run_refuses"] = str(reason)
    return facts


def _facts(timeline: Timeline, loaded: Loaded) -> dict[str, Any]:
    """Return the results of a simulation by key of ``--json``.

    ``peak_activations`` are in activation units, even if the costs have bytes.
    """
    schedule, search, weights = timeline.schedule, loaded.chosen.search, timeline.costs.microbatch
    in_units = Costs(microbatch=weights, part_units=timeline.costs.part_units)
    activations = peaks(schedule, in_units)
    facts: dict[str, Any] = {
        "schedule": schedule.name,
        "devices": schedule.num_devices,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.placement.num_chunks,
        "slices": schedule.units.parts,
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble_rate": bubble_in_a_run(timeline),
        "device_bubble_rate": timeline.device_bubble_rate,
        "peak_activations": list(activations),
        "peak_activation": max(activations),
        "peak_bytes": list(timeline.peaks) if timeline.costs.memory is not None else None,
        "share_of_1f1b": share_of_1f1b(timeline),
        "lower_bound": _lower_bound(timeline, loaded, max(activations)),
        "search_seconds": 0.0 if search is None else search.seconds,
        "messages": timeline.messages,
        "replicas": schedule.placement.replicas,
        "weight_versions": list(timeline.weight_versions),
        "placement": schedule.placement.name,
        "host_peak": max(peaks(schedule, in_units, host=True)),
        "stall_seconds": list(timeline.stall_seconds),
        "transfers": sum(map(len, timeline.transfers)),
        "recomputed": recomputed_by_mode(schedule),
        "microbatch_factors": {} if weights is None else {"time": weights.time, "memory": weights.tokens},
        "pairs": len(schedule.pairs),
        "in_a_run": _with_earlier_weights(timeline),
        "asynchronous": schedule.updates is not None,
    }
    if schedule.pairs:
        facts["makespan_without_pairs"] = simulated_once(replace(schedule, pairs=frozenset()), timeline.costs).makespan
    if schedule.updates is not None:
        steps = consecutive_steps(schedule, timeline.costs, steps=1)
        facts |= {"period": steps.period, "gain": steps.gain}
    return facts


def _with_earlier_weights(timeline: Timeline) -> dict[str, float] | None:
    """Return makespan and share of 1F1B's bytes after a run has moved W, as it does by default; ``None`` if none moves."""
    schedule = timeline.schedule
    if schedule.offloads or schedule.recomputed or schedule.vocabulary_barriers:
        return None
    moved = with_earlier_weights(schedule, timeline.costs)
    if moved is schedule:
        return None
    run = simulated_once(moved, timeline.costs)
    share = share_of_1f1b(run)
    return None if share is None else {"makespan": run.makespan, "share_of_1f1b": share}


def _lower_bound(timeline: Timeline, loaded: Loaded, peak: float) -> float:
    """Return the lower bound of the makespan, in the unit of the costs.

    It is the busiest device's work for schedules without backwards or flushes, with replicas or vocabulary passes. For other
    schedules it holds within the cap, or else within ``peak``, the schedule's own peak in activation units. Offload and
    recompute have no such limit.
    """
    schedule = timeline.schedule
    if _has_only_work(schedule):
        return timeline.ideal
    costs, pairs = loaded.chosen.costs, bool(schedule.pairs)
    if not schedule.units.are_whole or timeline.costs.head_forward:  # slices and the last stage have their own prices
        costs = replace(timeline.costs, memory=costs.of(schedule.placement).memory)
    if schedule.offloads or schedule.recomputed:
        # Offloaded and recomputed activations leave the device, so a cap on memory does not bound the makespan.
        return lower_bound(schedule.placement, schedule.units, costs, None)
    if loaded.chosen.search is not None and loaded.chosen.offload is None:
        return loaded.chosen.search.lower_bound
    cap = peak if loaded.memory_cap is None else loaded.memory_cap
    return lower_bound(schedule.placement, schedule.units, costs, cap, pairs=pairs)


def _has_only_work(schedule: Schedule) -> bool:
    """Return whether the only known lower bound of the makespan is the busiest device's work."""
    is_forward_only = all(action.kind is Kind.F for order in schedule.orders for action in order)
    is_endless = schedule.updates is not None
    return schedule.placement.replicas > 1 or bool(schedule.vocabulary_barriers) or is_forward_only or is_endless


def _bound(facts: Mapping[str, Any], loaded: Loaded) -> str:
    """Return the lower bound in words, with the orders for which it holds."""
    schedule, chosen, bound = loaded.schedule, loaded.chosen, f"{facts['lower_bound']:.6g}"
    chunks = num_chunks(schedule.placement.num_chunks)
    other = "; another placement can be faster" * (schedule.num_devices > 1)
    if _has_only_work(schedule):
        return f"{bound}; the busiest device's work with this placement ({chunks}){other}"
    in_any_memory = bool(schedule.offloads or schedule.recomputed)
    memory = "with no higher peak" if loaded.memory_cap is None else "within the memory cap"
    memory, measure = "in any memory" if in_any_memory else memory, _measure(loaded)
    if chosen.search is not None and chosen.offload is None and not in_any_memory:
        end = f"; at most {chosen.search.gap:.2%} of the {measure} can be saved" * (not chosen.search.is_optimal)
        return f"{bound}; no order with the placements tried has a shorter {measure} {memory}{end}"
    orders = f"no order with this placement ({chunks}) has a shorter {measure} {memory}"
    return f"{bound}; {orders}{other}"


def _moved_in_words(moved: Mapping[str, float]) -> str:
    return f"{moved['share_of_1f1b']:.3g} of 1F1B's bytes, makespan {moved['makespan']:.6g}"


@takes_group
def show(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help=f"{NAME_HELP} Several make a comparison.", autocompletion=complete_schedules
        ),
    ],
    question: Question,
    output: Annotated[Path | None, typer.Option(help="File: .png, .svg, .html, or .json for ui.perfetto.dev.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Draw this many steps without a barrier between them.")] = 1,
    as_json: Json = False,
) -> None:
    """Draw the time of every action and the memory of every device, in the terminal or into a file.

    Examples:
        # draw in the terminal
        pipemem show v-half -p 8 -m 16
        # draw several on one time axis, in a page that zooms
        pipemem show 1f1b v-half v-min -p 8 -m 16 --output compared.html
        # write a file for ui.perfetto.dev
        pipemem show zbv -p 8 -m 16 --output zbv.json
    """
    check_output(output, SUFFIXES, "a picture")
    are_stock = [name == STOCK for name in names]
    names = [named(name, question) for name in names]
    prices, timelines = price_layers(names, question), []
    for name, is_stock in zip(names, are_stock, strict=True):
        with showing(f"building, proving and simulating {name}"):
            _, timeline, reason = load_and_simulate(name, question, prices, is_stock)
            if steps > 1:
                check_steps(timeline.schedule, steps, question.yes)
                timeline = draw_steps(timeline, steps)
        timelines.append(timeline)
        if reason and not as_json:
            report_note(f"{name}: {reason}")
    check_attention(question, [timeline.schedule for timeline in timelines])
    pictures = (TerminalTimeline(timeline, timelines) for timeline in timelines if output is None)
    print_answer([_drawn(timeline, output) for timeline in timelines if as_json], pictures, as_json)
    if output is not None:
        cap = None if question.memory_cap is None else parse_caps(question.memory_cap)
        print_file(output, lambda: save_comparison(timelines, output, cap), as_json)


def _drawn(timeline: Timeline, output: Path | None) -> dict[str, object]:
    """Return the drawn schedule for JSON. ``timeline`` has, for each device, ``[action, start, end, memory after it]``."""
    return {
        "schedule": timeline.schedule.name,
        "devices": timeline.schedule.num_devices,
        "microbatches": timeline.schedule.num_microbatches,
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "peak": timeline.peak,
        "output": output,
        "timeline": [
            [[str(box.action), box.start, box.end, box.held] for box in row] for row in DrawnRun(timeline).rows
        ],
    }


@takes_group
def pareto(
    devices: Annotated[int, DEVICES],
    microbatches: Annotated[int, MICROBATCHES],
    price_options: Prices,
    caps: Annotated[
        str | None,
        typer.Option(metavar="X,Y,...", help="Memory caps of the searches; 1 is the peak of 1F1B."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Processor seconds of each search.")] = 10.0,
    show_all: Annotated[bool, typer.Option("--all", help="List also the dominated schedules.")] = False,
    yes: Yes = False,
    output: Annotated[Path | None, typer.Option(help="Picture file: .png or .svg.")] = None,
    as_json: Json = False,
    _modules: ScheduleModules = None,
) -> None:
    """Compare bubble and peak memory of all families and of searched schedules, and list the best trade-offs.

    A schedule is dominated if another one is no worse in memory and time, and better in one of them. Peaks are shares
    of 1F1B's bytes for the same model if ``--costs FILE`` has bytes (``pipemem profile``). Otherwise they are in
    activation units, and assume equal stages that hold no more between I and W than between F and I.

    With ``--vocab-cut auto`` every schedule is listed three times: with the head on the last stage, and cut over
    all devices by either algorithm. Asynchronous families and families with two replicas of the weights are left out,
    because they train differently or hold more weights. So are families that offload or cut microbatches into slices.

    Examples:
        # see which schedules are worth choosing
        pipemem pareto -p 8 -m 24 --costs 1,1.5,.5 --output pareto.png
        # run two short searches
        pipemem pareto -p 8 -m 24 --caps .5,.75 --seconds 2
    """
    check_size(devices, microbatches, MAX_CHUNKS, yes)
    check_output(output, IMAGES, "bubble against peak")
    NOT_NEGATIVE.read("--seconds", seconds)
    check_layers(price_options.layers, devices)
    prices = _in_shares(parse_costs(price_options.costs, price_options.p2p), price_options, devices, microbatches)
    in_bytes = prices.memory is not None
    cap_values = useful_caps(devices) if caps is None else _parse_caps(caps)
    switch = price_options.vocab_cut
    barriers = {"off": (0,), "auto": (0, 1, 2)}.get(switch) or (BARRIERS_OF_ALGORITHM[int(switch)],)

    def priced(schedule: Schedule) -> Costs:
        return priced_head(price_options, prices, schedule, schedule.vocabulary_barriers)

    layers = num_layers(price_options, prices)
    most = MAX_CHUNKS if layers is None else max(1, min(MAX_CHUNKS, layers // devices))
    with showing("families"):
        compared = choices(devices, microbatches, prices, cap_values, seconds, ResultCache(), barriers, priced, most)
    timelines = [timeline for timeline, _ in compared]
    note_uneven_cuts(prices, [timeline.schedule.placement for timeline in timelines])
    for cap in cap_values:
        if all(timeline.peak > loosened(cap) for timeline in timelines):
            report_note(f"no schedule was found that fits a memory cap of {cap:.4g} of 1F1B's peak")
    # Busy times differ if some schedules cut the head and others do not. All bubbles count from the smallest one.
    work = min(map(busy_seconds, timelines), default=0.0)
    are_out = dominated(compared)
    points = [_point(*choice, is_out, work) for choice, is_out in zip(compared, are_out, strict=True)]
    listed = [number for number, is_out in enumerate(are_out) if show_all or not is_out]
    cheap = [_saving(less, more) for less, more in trades(compared)]
    facts = {
        "choices": [_choice_facts(*compared[number], are_out[number], in_bytes) for number in listed],
        "trades": cheap,
        "output": output,
    }

    def shown() -> Iterator[Shown]:
        yield picture.table([points[number] for number in listed], in_bytes)
        message = "" if isinstance(prices.p2p, Mapping) else f", and a message takes {prices.p2p:g} in the same unit"
        costs = f"F, I, W = {price_options.costs}" if "," in price_options.costs else f"those of {price_options.costs}"
        yield f"chunks: per device; costs: {costs}{message}"
        if any(points[number].cap is not None for number in listed):
            listed_caps = sorted({cap for cap in (points[number].cap for number in listed) if cap is not None})
            yield _IN_A_RUN + (_caps_in_bytes(price_options, devices, microbatches, listed_caps) if in_bytes else "")
        if cheap:
            yield f"a little more memory that makes a step at least {LEAST_SAVED:.0%} shorter:"
        yield from cheap
        if layers is None:
            allowed = f"up to {most} chunks per device are allowed, because the number of layers is unknown"
            yield f"{allowed}; --layers N allows up to N/p chunks"
        if len(listed) < len(compared):
            yield f"{len(compared) - len(listed)} dominated schedules are not listed; --all lists them"

    print_answer(facts, shown(), as_json)
    if output is not None:
        title = f"Bubble against peak memory: p = {devices}, m = {microbatches}, F, I, W = {price_options.costs}"

        def draw() -> None:
            bound = bound_line(timelines, prices, priced)
            write_picture(lambda: picture.draw(points, bound, title, in_bytes), output, "bubble against peak")

        print_file(output, draw, as_json)


def _in_shares(costs: Costs, price_options: Prices, devices: int, microbatches: int) -> Costs:
    """Return costs with memory as a share of 1F1B's bytes, or in activation units.

    They are in units if the costs have no bytes, or if the vocabulary is cut.
    """
    if price_options.vocab_cut != OFF:  # the costs do not hold the bytes of the head's shards
        costs = replace(costs, memory=None)
    return in_shares_of_1f1b(costs, devices, microbatches)


def _caps_in_bytes(price_options: Prices, devices: int, microbatches: int, caps: Iterable[float]) -> str:
    """Return memory caps, which are shares of 1F1B's bytes, as a run takes them."""
    of_1f1b = bytes_of_1f1b(parse_costs(price_options.costs, None), Placement.linear(devices), microbatches) or 0.0
    return f". X in a run: {', '.join(f'{cap:.4g} is {cap * of_1f1b / 2**30:.4g}GiB' for cap in caps)}"


def _parse_caps(text: str) -> list[float]:
    try:
        caps = [float(part) for part in text.split(",")]
    except ValueError:
        caps = []
    if not caps or not all(0 < cap < float("inf") for cap in caps):
        raise UnsupportedError("bad-number", f"--caps {shortened(text)}: give positive numbers, as in 0.5,0.75,1")
    return caps


def _saving(less: Timeline, more: Timeline) -> str:
    """Return how much bubble a little more memory saves."""
    work = min(busy_seconds(less), busy_seconds(more))
    before, after = 1 - work / less.makespan, 1 - work / more.makespan
    return (
        f"a peak of {more.peak:.4g} instead of {less.peak:.4g} saves {100 * (before - after):.1f} points of bubble "
        f"({before:.1%} -> {after:.1%})"
    )


def _name(schedule: Schedule, cap: float | None) -> str:
    barriers = schedule.vocabulary_barriers
    name = schedule.name if cap is None else f"{schedule.name} {cap:.4g}"
    return f"{name}, {barriers} barrier{'s' if barriers > 1 else ''}" if barriers else name


def _point(timeline: Timeline, cap: float | None, is_dominated: bool, work: float) -> picture.Point:
    """Return a schedule as a point of the picture. Its bubble is the fraction of its makespan beyond ``work``.

    ``work`` is the shortest busy time of a busiest device among the compared schedules, in the unit of the costs.
    """
    family, chunks = _name(timeline.schedule, cap), timeline.schedule.placement.num_chunks
    return picture.Point(
        f"{family}, {num_chunks(chunks)}" if chunks > 2 or cap is not None else family,
        timeline.schedule.placement.name,
        timeline.peak,
        1 - work / timeline.makespan if timeline.makespan else 0.0,
        is_dominated,
        cap,
        family,
        chunks,
        timeline.schedule.name in _OWN,
    )


def _choice_facts(timeline: Timeline, cap: float | None, is_dominated: bool, in_bytes: bool) -> dict[str, object]:
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "memory_cap": cap,
        "vocabulary_barriers": schedule.vocabulary_barriers,
        "placement": schedule.placement.name,
        "chunks": schedule.placement.num_chunks,
        "peak_activation": max(peaks(schedule)),
        "share_of_1f1b": timeline.peak if in_bytes else None,
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "dominated": is_dominated,
    }
