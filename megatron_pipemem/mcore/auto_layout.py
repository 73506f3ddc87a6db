"""Compute the layers of every stage when a run starts, from the sizes on its command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from megatron_pipemem.advise.reading import Context, named, read_flags
from megatron_pipemem.config import layout
from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run
from megatron_pipemem.launch import cut_flags
from megatron_pipemem.launch.start_layout import PRICED_FOR, at_start
from megatron_pipemem.mcore.known_flags import known_flags
from megatron_pipemem.request import Request, ScheduleOptions
from megatron_pipemem.schedule.memory_cap import MemoryCap


def best_layout(request: Request, arguments: Sequence[str]) -> tuple[list[str], str]:
    """Return a command line with the layout whose step is the fastest that ``balance`` finds, and a line for the log.

    ``arguments`` are Megatron's, without our flags. In the result, the layout replaces all flags that cut the model.
    Raise a PipememError without a pipeline, or without the model's sizes.
    """
    known = known_flags()
    given = named(arguments, known)
    run = _run_of(request, given, known)
    found = at_start(run)
    pattern, counts = layout.pattern_of(run.model), found.best.layers
    flag = cut_flags.given_pattern(given)[0] or layout.FLAG
    text = layout.written(counts, run.model.mtp_layers) if pattern is None else layout.cut(pattern, counts)
    words = [*cut_flags.without_cut(arguments), f"--{flag}={text}"]
    longer = found.even.seconds / found.best.seconds - 1
    said = (
        f"layout auto: --{flag} '{text}', {found.best.seconds:.3g} s a step by the prices of {PRICED_FOR}; layers divided "
        f"evenly take {longer:.1%} longer"
    )
    return words, said


def _run_of(request: Request, given: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> Run:
    """Return the run of these flags under the requested schedule.

    Its number of chunks per rank is that of the flags if the schedule can have several, else the schedule's own.
    ``given`` has the values by flag, and ``known`` the properties of Megatron's flags (``known_flags``).
    """
    ranks = 1
    for kind in ("tensor-model", "pipeline-model", "context"):
        ranks *= int(given.get(f"{kind}-parallel-size", 1))
    devices = int(os.environ.get("WORLD_SIZE", ranks))
    run = read_flags(given, {}, "", Context(known, load(PRICED_FOR, Cluster), devices)).run
    asked = {each.name: getattr(request, each.name) for each in fields(ScheduleOptions)}
    choice = replace(
        run.schedule,
        **asked,
        name=request.schedule,
        memory_cap=_text(request.memory_cap) if not request.plans_offload else None,
        module=request.schedule_module,
    )
    takes_chunks = request.is_stock or request.searches or "chunks" in getattr(request.family, "options", ())
    cut = replace(run.parallelism, chunks=run.parallelism.chunks if takes_chunks else None)
    return replace(run, schedule=choice, parallelism=cut)


def _text(cap: MemoryCap | None) -> str | None:
    """Return a memory cap as a flag's text, to the byte; ``None`` without a cap."""
    return None if cap is None else ",".join(f"{each!r}{'B' if cap.in_bytes else ''}" for each in cap.amounts)
