"""``pipemem plan`` and ``layout``: choose the parallelism of a run, and the layers of every pipeline stage."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from megatron_pipemem.errors import ConfigError, PipememError, UnsupportedError
from megatron_pipemem.exits import INTERRUPTED
from megatron_pipemem.files import write_whole
from megatron_pipemem.flags import words
from megatron_pipemem.model import layout
from megatron_pipemem.model.cut_flags import VIRTUAL_STAGES
from megatron_pipemem.model.model import Model
from megatron_pipemem.queues import one_queue_of
from megatron_pipemem.schedule.display import shortened
from megatron_pipemem.schedule.memory_cap import parse_bytes
from megatron_pipemem.schedule.options import AUTO, FLOPS, NOT_NEGATIVE, OFF, STOCK, VOCABULARY
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.advise.advice import refusal_of, tuned_stock
from megatron_pipemem.tools.cli.common import Shown, print_answer, print_lines, showing
from megatron_pipemem.tools.cli.launch import Set
from megatron_pipemem.tools.cli.options import (
    Devices,
    Json,
    Microbatches,
    Yes,
    check_output,
    check_size,
    takes_group,
)
from megatron_pipemem.tools.cli.profile import ClusterName, CutOptions, SequenceLength, check_runs_own, cluster_name
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER
from megatron_pipemem.tools.config.keys import PLACES
from megatron_pipemem.tools.config.loading import load, locate, override, parse_override, read_raw, typed
from megatron_pipemem.tools.config.runs import OVERLAPS, Run
from megatron_pipemem.tools.launch.feasibility import refused_settings
from megatron_pipemem.tools.planner.balance import AS_GOOD, Balance, balance, laid_out
from megatron_pipemem.tools.planner.explanation import measured_slowdown_of
from megatron_pipemem.tools.planner.host import bound_by_host
from megatron_pipemem.tools.planner.planning import PlanningInterrupted, plan
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.pricing import as_it_stands, is_stocks_order
from megatron_pipemem.tools.planner.slices import doubt_of
from megatron_pipemem.tools.planner.space import (
    KEYS,
    OF_REPLICAS,
    Limits,
    check_stock_groups,
    is_stocks,
    without_overlap,
)
from megatron_pipemem.tools.planner.ways import Answer, Way, facts, first_as_fast, gibibytes, run_files
from megatron_pipemem.tools.report.terminal import FittingTable

_LEAST_GAIN = 0.001
"""Fraction of a step from which a plan counts as faster: the printed digits show it."""
_REASONS = 6


def plan_command(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.yaml", help="Run file: model, cluster and global batch; see configs/runs.")
    ],
    overrides: Set = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="XGiB", help="Memory of a device, for everything. Default: all that the cluster leaves."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help=f"Allow only these values; keys: {', '.join(KEYS)}. Repeatable."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Profile that `pipemem profile` measured for this model on such a device, or a report of this run.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of plans to list.")] = 10,
    search_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of each of three searches for a better order; 0 for none.")
    ] = 5.0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Write the best as a run for `pipemem launch`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose parallelism, microbatch, schedule and recompute for a run, and rank the plans that fit.

    Expert parallelism, the global batch and all flags stay as in the run. Context parallelism and the cut of slices stay too,
    unless ``--only`` lists other values: ``cp=1,2`` or ``slice_cut=tokens,flops``. If the run names no ``slices``, few
    microbatches of long sequences are also planned in 2, 4 or 8 slices; ``--only slices=1,16`` names others.

    The first row is the run as it stands, if it names a parallelism that fills its cluster. If Megatron's own schedules are
    faster with another layout or number of chunks, the next row is the fastest of them. ``vs today`` compares the step with the
    first row's: -20% is a fifth shorter. ``idle`` is the part of the schedule in which ranks idle, on average.

    If the run has ``--tp-comm-overlap``, Megatron's own schedules keep the flag, and ours are priced without it. With
    ``--overlap-moe-expert-parallel-comm``, schedules are priced with pairs (variant ``pairs``) and without. If the run has
    ``pipemem_overlap_steps: true``, plans are ranked by the time from step to step without a barrier between steps. ``no
    barrier`` then says how many times faster that is than with the barrier.

    Examples:
        # rank plans, with the limit of each
        pipemem plan configs/runs/98b-40xa100.yaml
        # allow fewer choices
        pipemem plan run.yaml --memory 60GiB --only tp=4,8 --only schedule=v-half,1f1b
        # rank by the period of steps without a barrier
        pipemem plan configs/runs/98b-40xa100.yaml --set pipemem_overlap_steps=true
        # use a measured profile, and write the best plan for launch
        pipemem plan run.yaml --profile profile.json --output best.yaml
    """
    run = laid_out(load(run_file, Run, overrides or ()))
    check_output(output, (".yaml", ".yml"), "a run")
    NOT_NEGATIVE.read("--search-seconds", search_seconds)
    limits, nbytes = _limits(only or ()), None if memory is None else parse_bytes("--memory", memory)
    slowdown = None if profile is None else measured_slowdown_of(profile, run)
    answer = today = stock = kept = other = None
    is_interrupted = False
    with showing("planning"):
        try:
            answer = plan(run, nbytes, limits, top, search_seconds, slowdown, refused_settings)
            today = _as_it_stands(run, slowdown)
            stock = None if today is None else tuned_stock(today, slowdown)
            kept, other = _with_and_without(
                run, answer, lambda bare: plan(bare, nbytes, limits, 1, 0.0, slowdown, refused_settings)
            )
        except KeyboardInterrupt as interrupt:
            if answer is None:
                if not isinstance(interrupt, PlanningInterrupted):
                    raise
                answer = interrupt.answer
            is_interrupted, output = True, None  # the best so far need not be the best
    if answer.plans:
        better = [way for way in answer.plans if today is not None and way.gain(today) >= _LEAST_GAIN]
        preferred = first_as_fast(sorted(better or answer.plans, key=changes), answer.plans[0])
        others = [way for way in answer.plans if way is not preferred]
        answer = replace(answer, plans=(preferred, *others))
    one_queue = None if all(is_stocks(way.run) for way in answer.plans) else one_queue_of(run.flags)
    first = next(iter(answer.plans), None) if today is None else today
    host = None if first is None else bound_by_host(first, slowdown)
    limit = run.cluster.memory_bytes if nbytes is None else nbytes
    files = run_files(answer.plans[0], output) if output is not None and answer.plans else {}
    result = {
        "today": today and facts(today),
        "stock": stock and facts(stock),
        "plans": [facts(way) for way in answer.plans],
        "without_overlap": other and facts(other),
        "one_queue": one_queue,
        "bound_by_host": host,
        "rejected": dict(answer.rejected.most_common()),
        "considered": answer.considered,
        "seconds": answer.seconds,
        "memory_bytes": limit,
        "interrupted": is_interrupted,
        "output": [*files],
    }
    doubt = doubt_of(way.run for way in (*answer.plans, *([] if today is None else [today])))
    notes = (host, one_queue, doubt, None if other is None else _worth_of_overlap(kept, other))
    steps = [
        ("memory", f"at most {gibibytes(limit)} GiB of a device; --memory XGiB gives another limit"),
        *(
            [("interrupted", "this was found so far; faster plans may be missing, and no file was written")]
            if is_interrupted
            else []
        ),
        *([("next", _next_step(output))] if answer.plans else []),
    ]
    first_line = _answer(answer.plans, today, stock, limit)
    print_answer(result, (*first_line, *_shown(answer, today, stock, list(filter(None, notes))), steps), as_json)
    for path, text in files.items():
        write_whole(path, text)
        if not as_json:
            print_lines(path)
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if not answer.plans:
        raise UnsupportedError("nothing-fits", f"{run_file}: no plan is possible; {_advice(answer.rejected)}")


def changes(way: Way) -> int:
    """Return how much a plan's schedule changes: 0 for Megatron's own, 1 for a family of this package, 2 for a search."""
    return 0 if way.is_stock or is_stocks_order(way) else 2 if way.schedule == AUTO else 1


def _next_step(output: Path | None) -> str:
    """Return the commands that start the best plan, which ``--output`` writes."""
    path = output or Path("best.yaml")
    written = "" if output is not None else f"add --output {path}, which writes the first plan; then "
    return f"{written}pipemem launch {path}, or --pipemem-plan {path} on a command of your own"


def _answer(plans: Sequence[Way], today: Way | None, stock: Way | None, memory: float) -> Iterator[Shown]:
    """Yield the fastest plan in words, compared with ``today``, the run as it stands, and with tuned ``stock``."""
    if not plans:
        return
    best, large = plans[0], today is not None and today.peak > memory
    cut = best.run.parallelism
    sizes = ", ".join(f"{key} {getattr(cut, key)}" for key in ("tp", "pp", "dp", "cp") if getattr(cut, key) > 1)
    text = f"{_name(best)} with {sizes or 'one rank'}, micro-batch {cut.micro_batch}: {_seconds(best)} s a step"
    if today is not None:
        gain = best.gain(today)
        text += f", {abs(gain):.1%} {'shorter' if gain >= 0 else 'longer'} than today's"
        text = f"no plan beats today's run; the fastest is {text}" if gain < _LEAST_GAIN and not large else text
    fastest = min(plans, key=lambda way: way.seconds)
    if best is not fastest:
        text += f"; {_name(fastest)} is {fastest.gain(best):.1%} shorter than that, and changes more"
    if stock is not None and stock.peak <= memory and stock.seconds < best.seconds:
        text += f'; Megatron\'s own schedule in the row "tuned" is {stock.gain(best):.1%} shorter than that'
    if today is not None and large:
        text += f", which does not fit: it takes {gibibytes(today.peak)} GiB of the {gibibytes(memory)} GiB allowed"
    yield [("answer", text)]


def _seconds(way: Way) -> str:
    return f"{way.seconds:#.4g}".rstrip(".")


def _limits(texts: Sequence[str]) -> Limits:
    allowed: dict[str, list[object]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError("bad-syntax", f"--only {shortened(text)}: write KEY=A,B as in tp=4,8")
        allowed.setdefault(key, []).extend(_whole(value) for value in values.split(","))
    return Limits(allowed)


def _whole(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 10 else text


def _shown(answer: Answer, today: Way | None, stock: Way | None, notes: Sequence[str]) -> Iterator[Shown]:
    if answer.plans:
        yield _table(answer.plans, today, stock)
        yield from notes
    reasons = FittingTable(("left out", "because"), text=("left out", "because"))
    common = answer.rejected.most_common()
    for reason, count in common[:_REASONS]:
        reasons.add_row(str(count), reason)
    if len(common) > _REASONS:
        reasons.add_row(str(sum(count for _, count in common[_REASONS:])), "other reasons; --json lists all")
    yield reasons
    yield f"{answer.considered} combinations considered in {answer.seconds:.1f} s, of which {len(answer.plans)} are listed"


def _as_it_stands(run: Run, slowdown: MeasuredSlowdown | None) -> Way | None:
    """Return the plan of a run as it stands, or ``None``.

    It is ``None`` if the run does not fill its cluster, or is refused for another reason than memory.
    """
    if run.parallelism.ranks != run.cluster.num_devices:
        return None
    try:
        way = as_it_stands(run, slowdown)
    except PipememError:
        return None
    refused = refusal_of(way)
    return replace(way, run=run) if refused is None or refused.code == "does-not-fit" else None


_COLUMNS = (
    *("schedule", "tp", "pp", "dp", "cp", "mb", "recompute", "s/step", "vs today", "MFU", "GiB"),
    *("idle", "no barrier", "largest loss"),
)


def _table(plans: Sequence[Way], today: Way | None, stock: Way | None) -> FittingTable:
    caption = "; ".join(_legend([way for way in (today, stock, *plans) if way is not None], today is not None))
    table = FittingTable(_COLUMNS, text=("schedule", "recompute", "largest loss"), caption=caption)
    has_contexts = any(way.run.parallelism.cp > 1 for way in plans)
    for heading, way in (("today: ", today), ("tuned: ", stock)):
        if way is not None:
            table.add_row(heading + _name(way), *_values(way, today, has_contexts))
    for way in plans:
        table.add_row(_name(way), *_values(way, today, has_contexts))
    return table


def _legend(ways: Sequence[Way], has_today: bool) -> Iterator[str]:
    """Yield the meaning of every column, name and mark that the table of ``ways`` has."""
    if any(way.run.parallelism.chunks for way in ways):
        yield "v: chunks per rank"
    if any(way.schedule == AUTO for way in ways):
        yield "auto: a searched order"
    yield "mb: sequences of a microbatch"
    if has_today:
        yield "vs today: a longer (+) or shorter (-) step than today's"
    yield "GiB: all memory of the fullest rank"
    yield "idle: share of a step, mean of the ranks"
    yield "largest loss: as a share of the step"
    if any(way.gain_without_barrier is not None for way in ways):
        yield "no barrier: times as fast as with a barrier between steps"
    if any(way.has_earlier_weights for way in ways):
        yield "W earlier: so that no rank holds more than 1F1B's fullest, or as little as this order can"
    if any(is_stocks_order(way) and not way.is_stock for way in ways):
        yield "as stock: Megatron's own schedule runs it too (schedule: stock)"


def _name(way: Way) -> str:
    """Return the name of a plan's schedule, with its chunks, slices and variant."""
    choice = way.run.schedule
    chunks = way.step.placement.num_chunks if way.schedule == AUTO else way.run.parallelism.chunks
    name = f"stock {way.schedule}" if way.is_stock else way.schedule
    if chunks is not None:
        name += f" v={chunks}"
    if not way.units.are_whole:
        name += f" n={way.units.parts} of {min(way.tokens):,} tokens"
        name += " or more, by FLOPs" if choice.slice_cut == FLOPS else ""
    if way.has_earlier_weights:
        name += ", W earlier"
    if is_stocks_order(way) and not way.is_stock:
        name += " (as stock)"
    return name + way.variant_text


def _values(way: Way, today: Way | None, has_contexts: bool) -> Iterator[str]:
    """Yield the columns of a plan after its name. The one of context parallelism is empty unless a plan has some."""
    cut = way.run.parallelism
    yield from map(str, (cut.tp, cut.pp, cut.dp, cut.cp if has_contexts else "", cut.micro_batch))
    yield way.run.schedule.recompute
    yield _seconds(way)
    yield "" if today is None or way is today else f"{-way.gain(today):+.1%}"
    yield f"{way.mfu:.1%}"
    yield gibibytes(way.peak)
    yield f"{way.idle_rate:.1%}"
    yield "" if way.gain_without_barrier is None else f"{way.gain_without_barrier:.3f}"
    yield way.binds


def _with_and_without(run: Run, answer: Answer, replan: Callable[[Run], Answer]) -> tuple[Way | None, Way | None]:
    """Return the fastest plans with and without overlap of messages within layers; ``None`` where there is no such plan.

    ``replan`` plans the run without the overlap, if all plans of ``answer`` keep it.
    """
    if not any(run.flags.get(flag) for flag in OVERLAPS):
        return None, None
    kept = next((way for way in answer.plans if way.hides_messages), None)
    others = [way for way in answer.plans if not way.hides_messages] or [*replan(without_overlap(run)).plans]
    return kept, next(iter(others), None)


def _worth_of_overlap(kept: Way | None, other: Way) -> str:
    """Return a sentence on the time that overlap of messages within layers saves.

    ``kept`` is the fastest plan with the overlap, and ``other`` the fastest without it.
    """
    shown = other.losses["messages within layers"] / other.seconds
    text = f"without overlap, messages within layers take {shown:.0%} of a step of {other.schedule}"
    if kept is None:
        return f"{text}; no listed plan keeps the overlap"
    if kept.seconds <= other.seconds:
        faster = f"which is {other.seconds / kept.seconds - 1:.1%} faster"
        return (
            f"{text}: stay with stock, {faster}"
            if is_stocks(kept.run)
            else f"{text}: take {kept.schedule} in pairs, {faster}"
        )
    return f"{text}, which is still {kept.seconds / other.seconds - 1:.1%} faster than {kept.schedule} with overlap"


def _advice(rejected: Counter[str]) -> str:
    if not rejected:
        return "--only leaves no combination that fills the cluster's devices; allow more values"
    return f"the most frequent reason is: {rejected.most_common(1)[0][0]}"


_MICROBATCHES = 8  # default per pipeline rank
_BAR = 16  # columns of the slowest rank
_SHADES = "\u2588\u2593\u2592\u2591"
"""The shades of a rank's chunks, used in turn."""


@takes_group
def layout_command(
    context: typer.Context,
    cut: CutOptions,
    of: Annotated[
        str,
        typer.Argument(metavar="RUN.yaml|MODEL", help="A run or a model, by name or YAML file.", show_default=False),
    ],
    overrides: Set = None,
    devices: Devices = None,
    chunks: Annotated[int | None, typer.Option("--chunks", "-v", min=1, help="Stages per pipeline rank.")] = None,
    microbatches: Microbatches = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="`stock` for Megatron's 1F1B or, with --chunks, interleaved; or one of `pipemem schedules`."),
    ] = None,
    vocab_cut: Annotated[
        str | None, typer.Option(metavar="off|1|2", help="Cut embedding and head over all pipeline ranks.")
    ] = None,
    cluster: ClusterName = None,
    sequence: SequenceLength = None,
    dp: Annotated[
        int | None, typer.Option(min=1, help="Data-parallel ranks of a model; its memory depends on them.")
    ] = None,
    beside: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="A layout of your own to compare, as in 'Et*3|(tt|)*29m|L'.")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Choose the layers of each pipeline stage that make a step shortest, and compare with the even split.

    Embedding, head, multi-token prediction and every kind of layer are priced as in `pipemem plan`. Milliseconds of
    ranks are for forward and backward of one microbatch, and `s/step` for a whole step.

    Examples:
        # balance stock Megatron's 1F1B
        pipemem layout llama3-70b --devices 8 --tp 8 --sequence-parallel
        # balance its interleaved schedule, and compare with a layout by hand
        pipemem layout deepseek-v3 -p 16 -v 2 --ep 32 --beside 'Et*3|(tt|)*29m|L'
        # balance a run
        pipemem layout configs/runs/98b-40xa100.yaml
    """
    of = _file_of(of)
    raw = _raw_of(of, overrides or (), {
        **_of_cut(context, of, cut),
        "pp": devices,
        "chunks": chunks,
        "dp": dp,
        "schedule": schedule,
        "pipemem_vocab_cut": vocab_cut,
        "cluster": cluster,
        "seq_length": sequence,
    })  # fmt: skip
    if vocab_cut in VOCABULARY and vocab_cut != OFF and (raw.get("schedule") or STOCK) == STOCK:
        raise UnsupportedError(
            "not-for-stock",
            f"--vocab-cut {shortened(vocab_cut)}: Megatron's own schedules have no passes for a cut vocabulary; name another "
            "--schedule, or leave --vocab-cut out",
        )
    run = _run_of(of, raw, microbatches)
    parts = run.parallelism
    check_size(parts.pp, parts.microbatches, parts.chunks or 2, yes)
    check_stock_groups(run)
    knows_memory = dp is not None or _is_run(of)
    with showing("weighing layouts"):
        comparison = balance(run, beside, None if knows_memory else 0.0)
    layouts = {name: _Layout.of(run, way, knows_memory) for name, way in comparison.layouts.items()}
    answer = {
        "of": of,
        "schedule": run.schedule.name,
        "cluster": cluster_name(raw.get("cluster")),
        **{key: getattr(parts, key) for key in ("pp", "chunks", "tp", "dp", "cp", "ep", "microbatches")},
        "even_is_as_good": comparison.even_is_as_good,
        "layouts": layouts,
    }
    memory = "" if knows_memory else "; without --dp, memory is not compared"
    assumed = f"{answer['cluster']}, {parts.microbatches} microbatches"
    priced = [("priced for", f"{assumed}; --cluster NAME and --microbatches M give others{memory}")]
    print_answer(answer, (*_shown_layouts(run, comparison, layouts), priced), as_json)


def _file_of(of: str) -> str:
    """Return the path of the run file that has this name; ``of`` itself if it is a path, or the name of a model."""
    for kind in (Model, Run):
        with suppress(ConfigError):
            path = locate(of, kind)
            return of if kind is Model else str(path)
    return of


def _is_run(of: str) -> bool:
    """Return whether the argument is a run file. Otherwise it is a model."""
    return of.endswith((".yaml", ".yml")) and bool({"model", "cluster", *PLACES} & set(read_raw(of)))


def _of_cut(context: typer.Context, of: str, cut: CutOptions) -> dict[str, Any]:
    """Return the options of the parallelism as keys of a run file, for example ``tp``.

    If ``of`` is a run file, it has these keys itself. Then return nothing, and raise an UnsupportedError if an option
    is given.
    """
    if _is_run(of):
        check_runs_own(context, cut)
        return {}
    keys = asdict(cut)
    precision, recompute = keys.pop("precision"), keys.pop("recompute")
    if precision not in _PRECISIONS:
        choices = " or ".join(_PRECISIONS)
        raise UnsupportedError("bad-choice", f"--precision {shortened(precision)}: give {choices}")
    return keys | _PRECISIONS[precision] | {"recompute_granularity": recompute}


_PRECISIONS = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {"bf16": False}}
"""Keys of a run file by the values of ``--precision``."""


def _raw_of(of: str, overrides: Iterable[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run file, or those of a run of a model, changed by the options."""
    raw = read_raw(of) if _is_run(of) else {"model": of, "cluster": DEFAULT_CLUSTER}
    for key, value in (*map(parse_override, overrides), *((k, v) for k, v in changes.items() if v is not None)):
        override(raw, key, value)
    return raw


def _run_of(of: str, raw: Mapping[str, Any], microbatches: int | None) -> Run:
    """Return the run that the keys ``raw`` of a run file or a model describe.

    A model needs a number of pipeline ranks, and has 8 microbatches per rank by default.
    """
    is_run = _is_run(of)
    run = typed(raw, Run, Path(of) if is_run else None)
    parts = run.parallelism
    if not is_run:
        if "pp" not in raw and parts.pp == 1:
            raise UnsupportedError(
                "missing-option", "the number of pipeline ranks is missing; give --devices, as in --devices 8"
            )
        microbatches = microbatches or _MICROBATCHES * parts.pp
        if parts.dp * parts.cp > 1:
            run = replace(run, flags=OF_REPLICAS | run.flags)
    if microbatches is not None:
        run = replace(run, parallelism=parts.with_microbatches(microbatches))
    return run


def _paste(run: Run, way: Way) -> str:
    """Return the flags that make a training script use this layout."""
    cut, choice = run.parallelism, run.schedule
    flags: dict[str, object] = {"pipeline-model-parallel-size": cut.pp}
    of_layout = layout.flags(run.model, way.layers)
    if choice.name != STOCK:
        flags["pipemem-schedule"] = choice.name
    elif not of_layout and cut.chunks:
        flags[VIRTUAL_STAGES] = cut.chunks
    if choice.vocab_cut != OFF:
        flags["pipemem-vocab-cut"] = choice.vocab_cut
    return shlex.join(words(flags | of_layout))


@dataclass(frozen=True)
class _Layout:
    """A layout of the model's layers, with the flags that set it, and its predicted seconds and bytes."""

    layers: tuple[int, ...]
    stages: list[str]
    flags: str
    stage_seconds: tuple[float, ...]
    rank_seconds: tuple[float, ...]
    imbalance: float
    step_seconds: float
    rank_bytes: tuple[float, ...] | None  # ``None`` if the number of data-parallel ranks is unknown

    @classmethod
    def of(cls, run: Run, way: Way, knows_memory: bool) -> _Layout:
        stages, peaks = layout.stages_of(run.model, way.layers), way.peak_bytes if knows_memory else None
        seconds = (way.stage_seconds, way.step.work_seconds, way.imbalance, way.seconds)
        return cls(way.layers, stages, _paste(run, way), *seconds, peaks)


def _shown_layouts(run: Run, comparison: Balance, layouts: Mapping[str, _Layout]) -> Iterator[Shown]:
    best = layouts["best"]
    verdict = _verdict(run, comparison, best.rank_bytes is not None)
    yield [("answer", f"the even split {verdict}; flags of the best layout:")]
    yield Text(best.flags)
    empty, ranks = sum(not seconds for seconds in best.rank_seconds), len(best.rank_seconds)
    if empty:
        yield [("empty ranks", f"{empty} of {ranks} hold nothing; fewer pipeline ranks do the same work")]
    names: dict[tuple[int, ...], list[str]] = {}
    for name, one in layouts.items():
        names.setdefault(one.layers, []).append(name)
    different = {same[0]: layouts[same[0]] for same in names.values()}
    yield _ranks(run, comparison.best.step.placement, different)
    caption = "ms: F, I and W of one microbatch, of the slowest rank"
    caption += "; vs best: a longer step than the best layout's" * (len(different) > 1)
    table = FittingTable(("layout", "slowest ms", "s/step", "vs best", "most GiB"), text=("layout",), caption=caption)
    for one in different.values():
        table.add_row(
            " = ".join(names[one.layers]),
            _milliseconds(max(one.rank_seconds)),
            f"{one.step_seconds:#.4g}".rstrip("."),
            "" if one is best else f"{one.step_seconds / best.step_seconds - 1:+.1%}",
            "" if one.rank_bytes is None else gibibytes(max(one.rank_bytes)),
        )
    yield table


def _verdict(run: Run, comparison: Balance, knows_memory: bool) -> str:
    """Return a sentence that compares the even split of layers with the best layout."""
    stages, room = len(comparison.best.layers), run.cluster.memory_bytes
    if comparison.even.layers == comparison.best.layers:
        text = "is the best layout found"
    elif comparison.even_is_as_good:
        text = f"is as good, within {AS_GOOD:.1%} of a step"
    else:
        text = f"takes {comparison.even.seconds / comparison.best.seconds - 1:.1%} longer than the best layout"
    if knows_memory and comparison.best.peak <= room < comparison.even.peak:
        text += f", but does not fit into the {gibibytes(room)} GiB of a device"
    if layout.uncut(run.model, stages) is None:
        text += f"; {stages} stages do not divide {run.model.layers} layers, so Megatron cuts them only by a flag"
    if comparison.own_layers == comparison.best.layers:
        text += "; keep your own layout, which is the best"
    if knows_memory and comparison.best.peak > room:
        text += f"; the best layout does not fit into the {gibibytes(room)} GiB of a device"
    return text


def _ranks(run: Run, placement: Placement, layouts: Mapping[str, _Layout]) -> FittingTable:
    """Return a table with a row for each pipeline rank: its layers, and a bar of its time, for every layout."""
    schedule, cut = run.schedule.name, run.parallelism
    if schedule == STOCK:
        schedule = "stock 1F1B" if (cut.chunks or 1) == 1 else "stock interleaved"
    columns, text = ["rank"], []
    for name in layouts:
        text += [name, f"{name} load"]
        columns += [name, f"{name} ms", f"{name} load"]
    columns[4:4] = [f"{columns[1]} GiB"]
    batch = f"{cut.microbatches} microbatches of {cut.micro_batch} x {run.model.sequence:,} tokens"
    title = f"{schedule}, {cut.pp} pipeline ranks, {batch}: ms per microbatch"
    title += ", with a shade per chunk" * (placement.num_chunks > 1)
    table = FittingTable(columns, text=text, title=title, caption=_letters_of(layouts))
    longest = max(max(one.rank_seconds) for one in layouts.values())
    for rank in range(cut.pp):
        cells = [str(rank)]
        for one in layouts.values():
            owned = placement.stages[rank]
            bar = _bar([one.stage_seconds[stage] / placement.replicas for stage in owned], longest)
            layers = " ".join(one.stages[stage % len(one.stages)] or "-" for stage in owned)
            cells += [layers, _milliseconds(one.rank_seconds[rank]), bar]
        bytes_of_ranks = next(iter(layouts.values())).rank_bytes
        cells[4:4] = ["" if bytes_of_ranks is None else gibibytes(bytes_of_ranks[rank])]
        table.add_row(*cells)
    return table


_LETTERS = {
    "E": "embedding",
    "t": "layer (t*2: two)",
    "m": "multi-token prediction",
    "L": "LM head and loss",
    "M": "Mamba",
    "*": "attention",
    "-": "FFN",
}
"""Megatron's letters of layouts and of hybrid patterns."""


def _letters_of(layouts: Mapping[str, _Layout]) -> str:
    """Return the legend of the letters that the stages of the layouts have."""
    letters = set("".join(stage for one in layouts.values() for stage in one.stages))
    of_kind = "M*-" if "M" in letters else "EtmL"
    legend = ", ".join(f"{letter} {_LETTERS[letter]}" for letter in of_kind if letter in letters)
    return f"load: the ms as a bar; stages: {legend}"


def _milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, with three digits below 10 ms and one decimal above."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.3g}"


def _bar(seconds: Sequence[float], longest: float) -> str:
    """Return a text bar with one shade per stage, as long as the stage's seconds.

    A bar of ``longest`` seconds has 16 columns.
    """
    ends = [round(_BAR * end / longest) for end in accumulate(seconds, initial=0.0)]
    return "".join(_SHADES[at % len(_SHADES)] * (b - a) for at, (a, b) in enumerate(pairwise(ends)))
