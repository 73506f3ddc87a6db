"""Compute the layers of every stage when a run starts, from the sizes on its command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_pipemem.advise.reading import Context, named, read_flags
from megatron_pipemem.config import layout
from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run
from megatron_pipemem.launch import cut_flags
from megatron_pipemem.mcore.known_flags import known_flags
from megatron_pipemem.planner.balance import balance
from megatron_pipemem.request import Request

_CLUSTER = "h100-80g"
"""The cluster whose prices are used. Only their ratios matter, and the memory of a device."""


def best_layout(request: Request, arguments: Sequence[str]) -> tuple[list[str], str]:
    """Return a command line with the layout whose step is the fastest that ``balance`` finds, and a line for the log.

    The layout replaces all flags that cut the model. Raise a PipememError without a pipeline, without the model's sizes, or
    for a schedule whose steps cannot be priced.
    """
    known = known_flags()
    given = named(arguments, known)
    run = _run_of(request, given, known)
    found = balance(run)
    pattern, counts = layout.pattern_of(run.model), found.best.layers
    flag = cut_flags.given_pattern(given)[0] or layout.FLAG
    text = layout.written(counts, run.model.mtp_layers) if pattern is None else layout.cut(pattern, counts)
    words = [*cut_flags.without_cut(arguments), f"--{flag}={text}"]
    longer = found.even.seconds / found.best.seconds - 1
    said = (
        f"layout auto: --{flag} '{text}', {found.best.seconds:.3g} s a step by the prices of {_CLUSTER}; layers divided evenly "
        f"take {longer:.1%} longer"
    )
    return words, said


def _run_of(request: Request, given: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> Run:
    """Return the run of these flags under the requested schedule, without flags that cut the model."""
    ranks = 1
    for kind in ("tensor-model", "pipeline-model", "context"):
        ranks *= int(given.get(f"{kind}-parallel-size", 1))
    devices = int(os.environ.get("WORLD_SIZE", ranks))
    run = read_flags(given, {}, "", Context(known, load(_CLUSTER, Cluster), devices)).run
    choice = replace(
        run.schedule,
        name=request.schedule,
        options=request.options,
        vocab_parallel=request.vocab_parallel,
        module=request.schedule_module,
    )
    takes_chunks = request.is_stock or (request.family is not None and "chunks" in request.family.options)
    cut = replace(run.parallelism, chunks=run.parallelism.chunks if takes_chunks else None)
    others = {name: value for name, value in run.megatron.items() if name not in cut_flags.REPLACED_BY_LAYOUT}
    return replace(run, schedule=choice, parallelism=cut, megatron=others)
