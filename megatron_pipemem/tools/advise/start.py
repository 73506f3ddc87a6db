"""Change the command line of a run at its start: add the flags of a plan's file, or the best layout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.flags import words_by_flag
from megatron_pipemem.logs import logger, tell
from megatron_pipemem.model import cut_flags, layout
from megatron_pipemem.request import Request, ScheduleOptions
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.tools.advise.reading import Context, named, read_flags
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER, Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import planned_flags
from megatron_pipemem.tools.megatron.known_flags import known_flags
from megatron_pipemem.tools.planner.balance import at_start
from megatron_pipemem.values import whole_number

_REPEATED = ("--pipemem-option", "--pipemem-offload-option")  # each occurrence says something else


def add_planned_flags(file: str, arguments: Sequence[str]) -> list[str]:
    """Return a command line with the plan file's flags that it lacks: model, parallelism, layout, schedule, precision.

    Raise an UnsupportedError if a flag has another value than in the plan, because the plan is valid for its own values
    only.
    """
    words_of_flags, added = words_by_flag(arguments), []
    for flag, values in words_by_flag(planned_flags(load(file, Run))).items():
        missing = [words for words in values if words not in words_of_flags.get(flag, [])]
        if missing and flag in words_of_flags and flag not in _REPEATED:
            raise UnsupportedError(
                "plan-differs",
                f"{flag} is {_text(words_of_flags[flag])} here and {_text(values)} in {file}; leave the flag out, or plan with "
                "it",
            )
        added += [word for words in missing for word in (flag, *words)]
    return [*arguments, *added]


def _text(values: Sequence[Sequence[str]]) -> str:
    return ", ".join(" ".join(words) or "set" for words in values)


def with_best_layout(request: Request, arguments: Sequence[str]) -> list[str]:
    """Return a command line with the layout whose step is the fastest that ``balance`` finds, and log the layout.

    ``arguments`` are Megatron's, without our flags. In the result, the layout replaces all flags that cut the model.
    Raise a PipememError without a pipeline, or without the model's sizes.
    """
    flag_table = known_flags()
    flag_values = named(arguments, flag_table)
    run = _run_of(request, flag_values, flag_table)
    balance = at_start(run)
    pattern, counts = layout.pattern_of(run.model), balance.best.layers
    flag = cut_flags.given_pattern(flag_values)[0] or layout.FLAG
    text = layout.written(counts, run.model.mtp_layers) if pattern is None else layout.cut(pattern, counts)
    longer = balance.even.seconds / balance.best.seconds - 1
    tell(
        logger,
        f"layout auto: --{flag} '{text}', {balance.best.seconds:.3g} s a step by the prices of {DEFAULT_CLUSTER}; "
        f"layers divided evenly take {longer:.1%} longer",
    )
    return [*cut_flags.without_flags(arguments, cut_flags.REPLACED_BY_LAYOUT), f"--{flag}={text}"]


def _run_of(request: Request, flag_values: Mapping[str, Any], flag_table: Mapping[str, Mapping[str, Any]]) -> Run:
    """Return the run of these flags under the requested schedule.

    Its number of chunks per rank is that of the flags if the schedule can have several, else the schedule's own.
    ``flag_values`` has the values by flag, and ``flag_table`` the properties of Megatron's flags (``known_flags``).
    """
    ranks = 1
    for kind in ("tensor-model", "pipeline-model", "context"):
        ranks *= whole_number(flag_values.get(name := f"{kind}-parallel-size"), name) or 1
    devices = int(os.environ.get("WORLD_SIZE", ranks))
    run = read_flags(flag_values, {}, "", Context(flag_table, load(DEFAULT_CLUSTER, Cluster), devices)).run
    options = {option.name: getattr(request, option.name) for option in fields(ScheduleOptions)}
    choice = replace(
        run.schedule,
        **options,
        name=request.schedule,
        memory_cap=_text_of_cap(request.memory_cap) if not request.plans_offload else None,
        module=request.schedule_module,
    )
    takes_chunks = request.is_stock or request.searches or "chunks" in getattr(request.family, "options", ())
    cut = replace(run.parallelism, chunks=run.parallelism.chunks if takes_chunks else None)
    return replace(run, schedule=choice, parallelism=cut)


def _text_of_cap(cap: MemoryCap | None) -> str | None:
    """Return a memory cap as a flag's text, to the byte; ``None`` without a cap."""
    return None if cap is None else ",".join(f"{amount!r}{'B' if cap.in_bytes else ''}" for amount in cap.amounts)
