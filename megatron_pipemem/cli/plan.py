"""``pipemem plan``: rank the ways to run a model on a cluster within its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.cli.checks import check_output, check_seconds
from megatron_pipemem.cli.common import console, print_json
from megatron_pipemem.cli.launch import Set
from megatron_pipemem.cli.options import Json
from megatron_pipemem.cli.progress import showing
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import STOCK_OVERLAPS, Run
from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.files import write_whole
from megatron_pipemem.planner.planning import plan
from megatron_pipemem.planner.plans import Answer, Plan, facts, gibibytes, run_files
from megatron_pipemem.planner.prices import MeasuredSlowdown
from megatron_pipemem.planner.profile import Profile
from megatron_pipemem.planner.space import KEYS, Limits, without_overlap
from megatron_pipemem.planner.variants import PLAIN
from megatron_pipemem.report.tables import FittingTable
from megatron_pipemem.schedule.memory_cap import parse_bytes
from megatron_pipemem.schedule.options import FLOPS
from megatron_pipemem.schedule.stream import LEAST_GAIN

_REASONS = 12


def plan_command(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.yaml", help="Model, cluster and global batch; see configs/runs.")
    ],
    overrides: Set = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="XGiB", help="Of a device, for everything; by default all that the cluster leaves."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help=f"Leave less to the planner; keys: {', '.join(KEYS)}. Repeatable."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `pipemem profile` measured of this model on such a device."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many to list.")] = 10,
    search_seconds: Annotated[
        float, typer.Option(min=0, help="For each of three searches of a better order; 0 for none.")
    ] = 5.0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Write the best as a run for `pipemem launch`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose tensor, pipeline and data parallelism, microbatch, schedule and recompute for a run, and rank what fits.

    Expert parallelism, the global batch and all flags stay as the run has them. So do context parallelism and slices of
    microbatches, unless ``--only cp=1,2`` or ``--only slices=1,2,4`` names some, and ``--only slice_cut=tokens,flops`` how
    these are cut. If the run has ``--tp-comm-overlap`` or ``--overlap-moe-expert-parallel-comm``, Megatron's own schedules keep
    them, and ours are priced without. Where the run says
    ``schedule.overlap_steps: true``, plans are ranked by the time from step to step without a barrier between steps. The
    gain is how many times as fast that is as with the barrier.

    Examples:
        # ranked, with what binds
        pipemem plan configs/runs/98b-40xa100.yaml
        # less to choose from
        pipemem plan run.yaml --memory 60GiB --only tp=4,8 --only schedule=v-half,1f1b
        # by the period of steps without a barrier between them
        pipemem plan configs/runs/98b-40xa100.yaml --set schedule.overlap_steps=true
        # by what was measured; written for launch
        pipemem plan run.yaml --profile profile.json --output best.yaml
    """
    run = load(run_file, Run, overrides or ())
    check_output(output, (".yaml", ".yml"), "a run")
    check_seconds("--search-seconds", search_seconds)
    limits, nbytes = _limits(only or ()), None if memory is None else parse_bytes("--memory", memory)
    pace = None if profile is None else _pace(profile, run)
    with showing("planning"):
        answer = plan(run, nbytes, limits, top, search_seconds, pace)
        kept, other = _with_and_without(run, answer, lambda bare: plan(bare, nbytes, limits, 1, 0.0, pace))
    files = run_files(answer.plans[0], output) if output is not None and answer.plans else {}
    if as_json:
        print_json(
            {
                "plans": [facts(each) for each in answer.plans],
                "without_overlap": other and facts(other),
                "rejected": dict(answer.rejected.most_common()),
                "considered": answer.considered,
                "seconds": answer.seconds,
                "output": [str(path) for path in files],
            }
        )
    else:
        _print(answer, None if other is None else _worth_of_overlap(kept, other))
    for path, text in files.items():
        write_whole(path, text)
        if not as_json:
            console().print(str(path), soft_wrap=True, markup=False)
    if not answer.plans:
        raise UnsupportedError("nothing-fits", f"{run_file}: nothing fits; {_advice(answer.rejected)}")


def _limits(texts: Sequence[str]) -> Limits:
    allowed: dict[str, list[object]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError("bad-syntax", f"--only {text!r}: write KEY=A,B as in tp=4,8")
        allowed.setdefault(key, []).extend(_whole(value) for value in values.split(","))
    return Limits(allowed)


def _whole(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 10 else text


def _pace(path: Path, run: Run) -> MeasuredSlowdown:
    profile = Profile.from_json(path)
    if replace(profile.model, source=run.model.source) != run.model:
        raise ConfigError("other-model", "is of another model than the run's; profile that one", file=path)
    try:
        return profile.slowdown(run.cluster)
    except ConfigError as error:
        raise ConfigError(error.code, error.message, file=path) from error


def _print(answer: Answer, overlap: str | None) -> None:
    out = console()
    if answer.plans:
        out.print(_table(answer.plans))
        if overlap is not None:
            out.print(overlap, soft_wrap=True, markup=False)
    reasons = FittingTable(("rejected", "reason"), text=("rejected", "reason"))
    common = answer.rejected.most_common()
    for reason, count in common[:_REASONS]:
        reasons.add_row(str(count), reason)
    if len(common) > _REASONS:
        reasons.add_row(str(sum(count for _, count in common[_REASONS:])), "other reasons; --json lists all")
    out.print(reasons)
    out.print(f"{answer.considered} ways considered in {answer.seconds:.1f} s", soft_wrap=True)


def _table(plans: Sequence[Plan]) -> FittingTable:
    columns = [
        "schedule",
        "tp",
        "pp",
        "dp",
        "mb",
        "recompute",
        "s/step",
        "MFU",
        "peak GiB",
        "of 1F1B",
        "bubble",
        "binds",
    ]
    contexts = any(each.run.parallelism.cp > 1 for each in plans)
    if contexts:
        columns.insert(columns.index("mb"), "cp")
    overlaps = any(each.gain is not None for each in plans)
    if overlaps:
        columns.insert(-1, "gain")
    caption = (
        "peak: everything on the fullest rank; of 1F1B: its activations, as a share of 1F1B's bytes for the same cut"
    )
    table = FittingTable(columns, text=("schedule", "recompute", "binds"), caption=caption)
    for each in plans:
        cut = each.run.parallelism
        name = "stock " * each.hides_messages + (
            each.schedule if cut.chunks is None else f"{each.schedule} v={cut.chunks}"
        )
        if (each.run.schedule.slices or 1) > 1:
            name += f" n={each.run.schedule.slices}" + " by FLOPs" * (each.run.schedule.slice_cut == FLOPS)
        table.add_row(
            name if each.variant == PLAIN else f"{name} + {each.variant}",
            *map(str, (cut.tp, cut.pp, cut.dp, *([cut.cp] if contexts else []), cut.micro_batch)),
            each.run.schedule.recompute,
            f"{each.seconds:.4g}",
            f"{each.mfu:.1%}",
            gibibytes(each.peak),
            "-" if each.share_of_1f1b is None else f"{each.share_of_1f1b:.2f}",
            f"{each.bubble_rate:.1%}",
            *([_gain(each)] if overlaps else []),
            each.binds,
        )
    return table


def _with_and_without(run: Run, answer: Answer, again: Callable[[Run], Answer]) -> tuple[Plan | None, Plan | None]:
    """Return the fastest plan with Megatron's overlap and the fastest without it; no plan without it if the run has none.

    Args:
        run: as it was given.
        answer: what was planned for it.
        again: plans another run for its fastest way alone.
    """
    if not any(run.flags.get(flag) for flag in STOCK_OVERLAPS.values()):
        return None, None
    kept = next((each for each in answer.plans if each.hides_messages), None)
    others = [each for each in answer.plans if not each.hides_messages] or [*again(without_overlap(run)).plans]
    return kept, next(iter(others), None)


def _worth_of_overlap(kept: Plan | None, other: Plan) -> str:
    """Return what Megatron's overlap is worth, in words.

    Args:
        kept: the fastest plan that has it; ``None`` if none of those listed has it.
        other: the fastest that gives it up.
    """
    shown = other.losses["messages within layers"] / other.seconds
    text = f"without Megatron's overlap, messages within layers take {shown:.0%} of a step of {other.schedule}"
    if kept is None:
        return f"{text}; none of the plans listed keeps it"
    if kept.seconds <= other.seconds:
        return f"{text}: stay with stock, which is {other.seconds / kept.seconds - 1:.1%} faster"
    return f"{text}, which is {kept.seconds / other.seconds - 1:.1%} faster than stock all the same"


def _gain(plan: Plan) -> str:
    """Return what steps without a barrier between them gain, in words."""
    return "none" if plan.gain is None or plan.gain <= LEAST_GAIN else f"{plan.gain:.3f}"


def _advice(rejected: Counter[str]) -> str:
    if not rejected:
        return "the limits leave no way to fill the cluster's devices"
    return f"most often because: {rejected.most_common(1)[0][0]}"
