"""``pipemem simulate``: compute time, bubble and memory of a schedule before any run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

import typer

from megatron_pipemem.cli.checks import check_steps
from megatron_pipemem.cli.common import console, print_facts, print_json
from megatron_pipemem.cli.completion import complete_schedules
from megatron_pipemem.cli.loading import Loaded, check_attention, load_and_simulate, named
from megatron_pipemem.cli.options import NAME_HELP, Json, Question, takes_group
from megatron_pipemem.cli.prices import price_layers
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.conflicts import check_conflicts
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.recompute.orders import recomputed_by_mode
from megatron_pipemem.report.placements import placements_table
from megatron_pipemem.report.run import UNITS
from megatron_pipemem.report.timeline import bytes_text
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.baseline import share_of_1f1b
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks
from megatron_pipemem.schedule.stream import stream
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.schedule.waits import run_single_queues
from megatron_pipemem.search import MAX_CHUNKS

_USUAL = {"slices": 1, "replicas": 1, "weight_versions": 1, "recomputed": {}, "microbatch_weights": {}}
_USUAL |= dict.fromkeys(("peak_bytes", "share_of_1f1b"))
_USUAL |= dict.fromkeys(("search_seconds", "host_peak", "stall_seconds", "transfers"), 0)
"""What nobody needs to be told; of a list, for every device."""

_AS_A_RUN = (
    "placements of {chunks} chunks per device, as a run does whose flags cut the model no other way; --chunks asks for another "
    f"number, -o max_chunks={MAX_CHUNKS} for the best of up to {MAX_CHUNKS}"
)


@takes_group
def simulate(
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAME_HELP, autocompletion=complete_schedules)],
    asked: Question,
    single_queue: Annotated[
        bool,
        typer.Option("--single-queue", help="Also in one hardware queue per rank (one CUDA connection)."),
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, help="Also so many steps without a barrier between them: their period.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Run a schedule in the simulator: makespan, bubble, peak memory, messages, and how fast any could be.

    Costs are for one device's whole share of the model and one microbatch, whatever the number of chunks, so makespans
    of different placements compare. The lower bound holds for every order of the same placement (for ``auto``: of every
    placement tried) within the memory cap, or, without one, within this schedule's own peak; with several replicas it
    is the busiest device's work, as it is with the vocabulary passes of ``--vocab-parallel``. A costs file may weigh
    microbatches that are not alike; the bound then holds for every order of these, too. It may also price every slice of a
    schedule with sequence slices: lists of one value per stage and slice, stage by stage. ``--attention-share`` makes such
    prices of one number.

    With ``--steps``, every device begins a step when it has done the one before, as with an optimizer that is validated
    later. The period is the time from step to step then, the gain that over steps that end together. A run does so with
    --pipemem-overlap-steps; else, as in stock Megatron, all devices meet at the end of a step.

    Examples:
        # with the seconds of F, I, W and of a message
        pipemem simulate v-half -p 8 -m 32 --costs 1,1.5,.5 --p2p .05
        # the fastest order in so much of 1F1B's memory
        pipemem simulate auto -p 8 -m 24 --memory-cap .625
        # half of the activations wait on the host
        pipemem simulate zbv -p 8 -m 32 --offload half --offload-ratio .4
        # four slices of every sequence, cut where all take as long
        pipemem simulate seq1f1b -p 4 -m 8 -o slices=4 --attention-share .3 --slice-cut flops
        # who gains without a barrier between steps
        pipemem simulate zbv -p 8 -m 16 --steps 8
        # a large vocabulary
        pipemem simulate 1f1b -p 8 -m 32 --vocab-parallel auto --head-cost 2.5layers --layers 32
    """
    name = named(name, asked.chunks)
    prices = price_layers([name], asked)
    with showing(f"building, proving and simulating {name}"):
        loaded, timeline, reason = load_and_simulate(name, asked, prices)
        check_attention(asked, [loaded.schedule])
        chosen, costs = loaded.chosen, timeline.costs
        facts = _facts(timeline, loaded)
        if single_queue:
            facts |= _in_single_queues(loaded.schedule, costs)
        if steps > 1:
            check_steps(loaded.schedule, steps, asked.yes)
            facts |= _without_barrier(loaded, costs, steps)
    if loaded.schedule.vocabulary_barriers or asked.vocab_parallel != "off":
        facts["vocabulary_barriers"] = loaded.schedule.vocabulary_barriers
    if reason:
        facts["vocabulary_reason"] = reason
    if as_json:
        print_json(facts)
        return
    out = console()
    print_facts(out, _told(facts))
    if loaded.request.searches and not {"chunks", "max_chunks", "placement"} & set(loaded.request.options):
        print_facts(out, [("searched", _AS_A_RUN.format(chunks=loaded.schedule.placement.num_chunks))])
    if (search := chosen.search) is not None:
        what = "period" if loaded.request.searches_period else "makespan"
        if chosen.offload is not None:
            gap = f"{1 - facts['lower_bound'] / timeline.makespan:.2%} of the makespan at most; the bound knows no cap"
        elif search.is_optimal:
            gap = "0, optimal among the placements tried"
        else:
            gap = f"{search.gap:.2%} of the {what} at most"
        print_facts(out, [("gap to the bound", gap)])
        out.print(placements_table(search.candidates, what))
    if chosen.offload is not None and chosen.offload.kept:
        reasons = Counter(chosen.offload.kept.values()).most_common()
        print_facts(out, [("activations kept", ", ".join(f"{count} ({why})" for why, count in reasons))])


def _in_single_queues(schedule: Schedule, costs: Costs) -> dict[str, float]:
    """Prove the order that a run has in single queues, and return what becomes of the schedule in it."""
    program = lower(schedule, single_queue=True, costs=costs)
    validate_program(program, microbatch_order=False)
    run = run_single_queues(program, costs)
    return {"single_queue_makespan": run.makespan, "single_queue_bubble_rate": run.bubble_rate}


def _without_barrier(loaded: Loaded, costs: Costs, steps: int) -> dict[str, Any]:
    """Return how long steps take that do not wait for each other, and why a run would not have them so, if it would not."""
    found = stream(loaded.schedule, costs, steps=steps)
    facts: dict[str, Any] = {
        "steps": steps,
        "steps_makespan": max(found.ends[steps - 1]),
        "period": found.period,
        "gain": found.gain,
    }
    weights = None if costs.microbatch is None else "tokens"
    try:
        check_conflicts(replace(loaded.request, overlap_steps=True, microbatch_costs=weights))
    except UnsupportedError as reason:
        facts["a_run_refuses"] = str(reason)
    return facts


def _facts(timeline: Timeline, loaded: Loaded) -> dict[str, Any]:
    """Return the keys of ``--json``. ``peak_activations`` are in activation units whatever the costs say about bytes."""
    schedule, search, weights = timeline.schedule, loaded.chosen.search, timeline.costs.microbatch
    in_units = Costs(microbatch=weights, slice_units=timeline.costs.slice_units)
    activations = peaks(schedule, in_units)
    return {
        "schedule": schedule.name,
        "devices": schedule.num_devices,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.placement.num_chunks,
        "slices": schedule.slices,
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble_rate": timeline.bubble_rate,
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
        "microbatch_weights": {} if weights is None else {"time": weights.time, "memory": weights.tokens},
    }


def _lower_bound(timeline: Timeline, loaded: Loaded, peak: float) -> float:
    """Return the bound, which is about whole training steps of one pipeline; a file may also hold forwards only, as
    evaluation runs them.
    """
    schedule = timeline.schedule
    if (
        schedule.placement.replicas > 1
        or schedule.vocabulary_barriers
        or all(action.kind is Kind.F for order in schedule.orders for action in order)
    ):
        return timeline.ideal
    costs, slices = loaded.chosen.costs, schedule.slices
    if slices > 1:  # of which each may have its own price
        costs = replace(timeline.costs, memory=costs.memory)
    if schedule.offloads or schedule.recomputed:
        # What is away or dropped takes no memory: no cap on what is held bounds the makespan.
        return lower_bound(schedule.placement, schedule.num_microbatches, costs, None, slices=slices)
    if loaded.chosen.search is not None and loaded.chosen.offload is None:
        return loaded.chosen.search.lower_bound
    cap = peak if loaded.memory_cap is None else loaded.memory_cap
    return lower_bound(schedule.placement, schedule.num_microbatches, costs, cap, slices=slices)


_SHORT = {"single_queue_makespan": "one queue: makespan", "single_queue_bubble_rate": "one queue: bubble"}
"""What would not fit the column of names."""


def _told(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Print the facts in words, without those that are what they usually are."""
    for key, fact in facts.items():
        if any(each != _USUAL.get(key) for each in (fact if isinstance(fact, list) else [fact])):
            yield _SHORT.get(key, key.replace("_", " ")), _text(key, fact)


def _text(key: str, fact: Any) -> str:
    if key == "microbatch_weights":
        spans = ((what, min(each), max(each), fmean(each)) for what, each in fact.items())
        return ", ".join(f"{what} {least:.4g} to {most:.4g}, mean {mean:.4g}" for what, least, most, mean in spans)
    if isinstance(fact, dict):
        return "; ".join(f"{mode}: {', '.join(map(str, stages))}" for mode, stages in fact.items())
    if isinstance(fact, list):
        return ", ".join(bytes_text(each) if key == "peak_bytes" else f"{each:.4g}" for each in fact)
    if key == "peak_activation":
        return f"{fact:.6g} {UNITS}"
    if key == "share_of_1f1b":
        return f"{fact:.3g} of its bytes, for the same model and cut"
    if key.endswith("rate"):
        return f"{fact:.2%}"
    return f"{fact:.6g}" if isinstance(fact, float) else str(fact)
