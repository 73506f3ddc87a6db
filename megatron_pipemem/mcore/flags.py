"""The ``--pipemem-*`` flags."""

from __future__ import annotations

import argparse

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.plugin import STOCK, Settings
from megatron_pipemem.schedule.registry import family


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
    """
    parser = _Parser(prog="", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--pipemem-schedule", metavar="NAME", help="schedule family, or stock")
    parser.add_argument("--pipemem-memory-cap", metavar="X", help="refuse to run above this many activation units")
    parser.add_argument("--pipemem-costs", metavar="unit|FILE", default="unit", help="prices for the predicted bubble")
    parser.add_argument("--pipemem-trace", metavar="DIR", help="write timelines of plan and run")
    parser.add_argument("--pipemem-report", metavar="FILE", help="write predicted and counted bytes, bubbles, losses")
    parser.add_argument(
        "--pipemem-option", metavar="KEY=VALUE", action="append", default=[], help="option of the schedule family"
    )
    found, others = parser.parse_known_args(arguments)
    unknown = [argument for argument in others if argument.startswith("--pipemem-")]
    if unknown:
        parser.error(f"unknown flag {unknown[0]}")
    if len(others) == len(arguments):
        return None, others
    if found.pipemem_schedule is None:
        parser.error("--pipemem-schedule is missing")
    if found.pipemem_schedule != STOCK:
        family(found.pipemem_schedule)
    settings = Settings(
        found.pipemem_schedule,
        memory_cap=None if found.pipemem_memory_cap is None else _units(found.pipemem_memory_cap, parser),
        costs=found.pipemem_costs,
        trace=found.pipemem_trace,
        report=found.pipemem_report,
        options=dict(_option(text, parser) for text in found.pipemem_option),
    )
    return settings, others


_VIRTUAL_STAGES = "--num-virtual-stages-per-pipeline-rank"
_CUTS = (_VIRTUAL_STAGES, "--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout")


def add_virtual_stages(settings: Settings, arguments: list[str]) -> list[str]:
    """Ask Megatron for the chunks the schedule needs, unless the user says how the model is cut."""
    given = any(argument.split("=", 1)[0] in _CUTS for argument in arguments)
    if settings.schedule == STOCK or given:
        return arguments
    chunks = family(settings.schedule).chunks
    chunks = int(settings.options.get("chunks", 2)) if chunks is None else chunks
    return arguments if chunks == 1 else [*arguments, _VIRTUAL_STAGES, str(chunks)]


def _units(text: str, parser: _Parser) -> float:
    try:
        return float(text)
    except ValueError:
        parser.error(
            f"--pipemem-memory-cap {text!r} is no number of activation units (1.0 is what 1F1B's first rank holds)"
        )


def _option(text: str, parser: _Parser) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not separator or not key or not value:
        parser.error(f"--pipemem-option {text!r} is not KEY=VALUE")
    return key, int(value) if value.lstrip("-").isdigit() else value
