"""The ``--pipemem-*`` flags."""

from __future__ import annotations

import argparse
import logging
import os
from itertools import pairwise

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.offloading import DEFAULT_HOST_SHARE
from megatron_pipemem.mcore.plan_file import add_planned_flags
from megatron_pipemem.mcore.plugin import Settings, source_for
from megatron_pipemem.planner import cut_flags
from megatron_pipemem.planner.search import layout
from megatron_pipemem.schedule.model_cut import check_cut, placements_of
from megatron_pipemem.schedule.options import OFF, OFFLOAD, RECOMPUTE, STOCK, VOCABULARY, parse_options
from megatron_pipemem.schedule.request import FILE_SUFFIX

logger = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UnsupportedError(f"{message}; the flags are:\n{self.format_help()}")


def take_flags(arguments: list[str]) -> tuple[Settings | None, list[str]]:
    """Split the plugin's flags off a Megatron command line.

    Returns:
        The settings, ``None`` when no flag is given, and the other arguments in their order.

    Raises:
        UnsupportedError: an unknown ``--pipemem-*`` flag, a missing value, flags without ``--pipemem-schedule``, or a plan that
            other flags contradict.
        ConfigError: the plan cannot be read.
        UnknownScheduleError: no such schedule.
        ScheduleError: a schedule file that must not run.
    """
    plan, arguments = _plan_parser().parse_known_args(arguments)
    if plan.pipemem_plan is not None:
        arguments = add_planned_flags(plan.pipemem_plan, arguments)
    parser = flag_parser()
    found, others = parser.parse_known_args(arguments)
    unknown = [argument for argument in others if argument.startswith("--pipemem-")]
    if unknown:
        parser.error(f"unknown flag {unknown[0]}")
    if len(others) == len(arguments):
        return None, others
    if found.pipemem_schedule is None:
        parser.error("--pipemem-schedule is missing")
    settings = Settings(
        found.pipemem_schedule,
        memory_cap=found.pipemem_memory_cap and _units_or_text(found.pipemem_memory_cap),
        costs=found.pipemem_costs,
        trace=found.pipemem_trace,
        report=found.pipemem_report,
        options=parse_options("--pipemem-option", found.pipemem_option),
        offload=found.pipemem_offload,
        host_memory=found.pipemem_host_memory,
        recompute=found.pipemem_recompute,
        offload_options=parse_options("--pipemem-offload-option", found.pipemem_offload_option),
        vocab_parallel=found.pipemem_vocab_parallel,
        vocab_piece_tokens=found.pipemem_vocab_piece_tokens,
    )
    source_for(settings)
    return settings, others


def flag_parser() -> argparse.ArgumentParser:
    """What knows all flags of the plugin."""
    parser = _Parser(prog="", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS, parents=[_plan_parser()])
    parser.add_argument("--pipemem-schedule", metavar="NAME|FILE.csv|auto|stock", help="which schedule to run")
    parser.add_argument(
        "--pipemem-memory-cap",
        metavar="X|XGiB|XMiB|XB|X,X,...",
        help="the most a rank may hold: activation units, or, with auto, bytes of activations; one for all pipeline ranks, or "
        "one each",
    )
    parser.add_argument(
        "--pipemem-costs",
        metavar="unit|profile|FILE",
        default="unit",
        help="what passes take: equal, measured in the run, or as the JSON file says",
    )
    parser.add_argument(
        "--pipemem-offload",
        metavar="|".join(OFFLOAD),
        default="off",
        help="which activations wait on the host for their backward, beside what the schedule itself says",
    )
    parser.add_argument(
        "--pipemem-host-memory",
        metavar="XGiB",
        help=f"host memory per node for that, shared by its ranks (default: {DEFAULT_HOST_SHARE:g} of what is available)",
    )
    parser.add_argument(
        "--pipemem-recompute",
        metavar="|".join(RECOMPUTE),
        default="none",
        help="what runs again before its backward: of every stage what is cheap (norms, activation functions, unfused "
        "attention), or all; auto: whatever of these a memory cap needs, per stage",
    )
    parser.add_argument(
        "--pipemem-offload-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="ratio, min_bytes, guard, switches, and bandwidth for CPU ranks",
    )
    parser.add_argument("--pipemem-trace", metavar="DIR", help="write timelines of plan and run")
    parser.add_argument("--pipemem-report", metavar="FILE", help="write predicted and counted bytes, bubbles, losses")
    parser.add_argument(
        "--pipemem-vocab-parallel",
        metavar="|".join(VOCABULARY),
        default=OFF,
        help="cut embedding and LM head over the pipeline's ranks, by Algorithm 1 (two barriers, two microbatches more in "
        "flight) or Algorithm 2 (one barrier, one microbatch more) of arXiv 2411.05288; auto: whichever of the three the "
        "model's sizes and layout, the costs and the cap call for",
    )
    parser.add_argument(
        "--pipemem-vocab-piece-tokens",
        metavar="N",
        type=int,
        help="compute the cut head's logits for N tokens at a time, which bounds what they take in fp32 (default: all)",
    )
    parser.add_argument(
        "--pipemem-option", metavar="KEY=VALUE", action="append", default=[], help="option of the schedule"
    )
    return parser


def _plan_parser() -> argparse.ArgumentParser:
    planned = _Parser(prog="", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    planned.add_argument(
        "--pipemem-plan",
        metavar="FILE",
        help="add what pipemem plan --output wrote: parallelism, layout, schedule; other flags may repeat it, not contradict",
    )
    return planned


# With these, Megatron takes the sizes of the model from elsewhere, and its own checks and those of the built model must do.
_ELSEWHERE = ("yaml-cfg", "use-checkpoint-args")


def add_virtual_stages(settings: Settings, arguments: list[str]) -> list[str]:
    """Ask Megatron for the chunks the schedule needs, unless the user says how the model is cut.

    Raises:
        UnsupportedError: there is no pipeline, the layers cannot be shared out evenly and nothing says how otherwise, the
            schedule does not run a model that is cut as these arguments say, or one of them does not go with its placement.
    """
    flags = _values(arguments)
    if settings.schedule == STOCK or any(cut_flags.given(flags, name) for name in _ELSEWHERE):
        return arguments
    parser = _Parser(prog="", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-layers", type=int)
    sizes, _ = parser.parse_known_args(arguments)
    p, layers = sizes.pipeline_model_parallel_size, sizes.num_layers
    if p == 1:
        raise UnsupportedError(
            f"there is no pipeline for schedule {settings.schedule}: pass --pipeline-model-parallel-size 2 or more, or "
            f"--pipemem-schedule {STOCK} to measure Megatron's own step"
        )
    source = source_for(settings)[0]
    cut = cut_flags.cut_of(flags, p, layers)
    if settings.schedule.endswith(FILE_SUFFIX):
        placements = (source.placement(p, None),)
        if cut is not None:
            check_cut(cut, settings.schedule, placements[0])
    else:
        placements = placements_of(settings.schedule, settings.options, p, cut)
    cut_flags.check_placements(flags, settings.schedule, placements)
    if os.environ.get("RANK", "0") == "0":
        for remark in cut_flags.remarks(flags):
            logger.warning(remark)
    if any(cut_flags.given(flags, name) for name in cut_flags.CUTS):
        return arguments
    stages = p * source.chunks
    if layers is not None and layers < stages:
        raise UnsupportedError(
            f"{layers} layers are too few for the {stages} stages that schedule {settings.schedule} has on {p} pipeline ranks; "
            "take fewer ranks, or a schedule with fewer chunks per rank"
        )
    proposed = None if layers is None else cut_flags.uneven_layers(flags, layers, stages)
    if proposed is not None:
        raise UnsupportedError(
            f"{cut_flags.counted_layers(flags, layers)} cannot be shared evenly by the {stages} stages that schedule "
            f"{settings.schedule} has on {p} pipeline ranks; say what each holds, for example --{layout.FLAG} '{proposed}'"
        )
    return arguments if source.chunks == 1 else [*arguments, f"--{cut_flags.VIRTUAL_STAGES}", str(source.chunks)]


def _values(arguments: list[str]) -> dict[str, str | bool]:
    """Every flag with its first value, ``True`` for a bare one; the last one counts where a flag comes twice."""
    found: dict[str, str | bool] = {}
    for argument, follower in pairwise([*arguments, "--"]):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            found[name] = value if equals else True if follower.startswith("--") else follower
    return found


def _units_or_text(cap: str) -> float | str:
    try:
        return float(cap)
    except ValueError:
        return cap
