"""The ``--pipemem-*`` flags."""

from __future__ import annotations

import argparse

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.offloading import DEFAULT_HOST_SHARE, OFFLOAD_MODES, RECOMPUTE_MODES
from megatron_pipemem.mcore.plugin import STOCK, Settings, source_for
from megatron_pipemem.mcore.vocabulary.source import CHOICES, OFF


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UnsupportedError(f"{message}; the flags are:\n{self.format_help()}")


def take_flags(arguments: list[str]) -> tuple[Settings | None, list[str]]:
    """Split the plugin's flags off a Megatron command line.

    Returns:
        The settings, ``None`` when no flag is given, and the other arguments in their order.

    Raises:
        UnsupportedError: an unknown ``--pipemem-*`` flag, a missing value, or flags without ``--pipemem-schedule``.
        UnknownScheduleError: no such schedule.
        ScheduleError: a schedule file that must not run.
    """
    parser = _Parser(prog="", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
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
        metavar="|".join(OFFLOAD_MODES),
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
        metavar="|".join(RECOMPUTE_MODES),
        default="none",
        help="which stages run their forwards again before their backwards",
    )
    parser.add_argument(
        "--pipemem-offload-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="ratio, min_bytes, guard, and bandwidth for CPU ranks",
    )
    parser.add_argument("--pipemem-trace", metavar="DIR", help="write timelines of plan and run")
    parser.add_argument("--pipemem-report", metavar="FILE", help="write predicted and counted bytes, bubbles, losses")
    parser.add_argument(
        "--pipemem-vocab-parallel",
        metavar="|".join(CHOICES),
        default=OFF,
        help="cut embedding and LM head over the pipeline's ranks, by Algorithm 1 (two barriers, two microbatches more in "
        "flight) or Algorithm 2 (one barrier, one microbatch more) of arXiv 2411.05288; auto: whichever of the three the "
        "model's sizes call for",
    )
    parser.add_argument(
        "--pipemem-option", metavar="KEY=VALUE", action="append", default=[], help="option of the schedule"
    )
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
        options=dict(_option("option", text, parser) for text in found.pipemem_option),
        offload=found.pipemem_offload,
        host_memory=found.pipemem_host_memory,
        recompute=found.pipemem_recompute,
        offload_options=dict(_option("offload-option", text, parser) for text in found.pipemem_offload_option),
        vocab_parallel=found.pipemem_vocab_parallel,
    )
    source_for(settings)
    return settings, others


_VIRTUAL_STAGES = "--num-virtual-stages-per-pipeline-rank"
_CUTS = (_VIRTUAL_STAGES, "--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout")


def add_virtual_stages(settings: Settings, arguments: list[str]) -> list[str]:
    """Ask Megatron for the chunks the schedule needs, unless the user says how the model is cut."""
    given = any(argument.split("=", 1)[0] in _CUTS for argument in arguments)
    if settings.schedule == STOCK or given:
        return arguments
    chunks = source_for(settings)[0].chunks
    return arguments if chunks == 1 else [*arguments, _VIRTUAL_STAGES, str(chunks)]


def _units_or_text(cap: str) -> float | str:
    try:
        return float(cap)
    except ValueError:
        return cap


def _option(flag: str, text: str, parser: _Parser) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not separator or not key or not value:
        parser.error(f"--pipemem-{flag} {text!r} is not KEY=VALUE")
    if value in ("true", "false"):
        return key, value == "true"
    return key, int(value) if value.lstrip("-").isdigit() else value
