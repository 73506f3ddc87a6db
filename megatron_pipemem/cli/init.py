"""``pipemem init``: write a run file to begin with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_pipemem.cli.checks import check_output
from megatron_pipemem.cli.common import console, print_json, report_note
from megatron_pipemem.cli.options import Json, at_least_one
from megatron_pipemem.config import layout
from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.loading import load, settings_of, typed
from megatron_pipemem.config.model import Model
from megatron_pipemem.config.runs import Run
from megatron_pipemem.config.yaml_text import write_yaml
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import write_whole
from megatron_pipemem.launch.command import min_nodes
from megatron_pipemem.launch.feasibility import feasible
from megatron_pipemem.planner.memory import request_of, schedule_of
from megatron_pipemem.planner.space import OF_REPLICAS
from megatron_pipemem.schedule.options import STOCK

_MICROBATCHES = 8  # per pipeline rank
_COMMENTS = dict(
    parallelism="what pipemem plan chooses",
    schedule=f"see pipemem schedules; {STOCK} is Megatron's own",
    training="data: the prefix of a Megatron dataset (PREFIX.bin and PREFIX.idx), or mock",
    megatron="any other flag of the training script",
    output="of reports, timelines and checkpoints",
)


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model by name, as llama3-8b, or its YAML file.")],
    devices: Annotated[
        int, typer.Option("--devices", "-p", callback=at_least_one, help="Pipeline ranks; 1 for no pipeline.")
    ] = 4,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks, of the data-parallel ones.")] = 1,
    schedule: Annotated[str, typer.Option(help="One of `pipemem schedules`, or `stock`.")] = "v-half",
    cluster: Annotated[str, typer.Option(help="A cluster by name or YAML file.")] = "h100-80g",
    output: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="By default MODEL.yaml, here.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run file to begin with: a model, cut as asked, on as few nodes as its ranks fill.

    `pipemem plan` finds better cuts and schedules for it, and `pipemem launch` starts it. A run that does not fit is
    written too, with a note.

    Examples:
        # 32 devices
        pipemem init llama3-70b -p 4 --tp 8
        # a model with experts
        pipemem init qwen3-30b-a3b -p 4 --dp 4 --ep 4 --output mine.yaml
        # without a GPU
        pipemem init tiny-gpt --cluster cpu
    """
    path = output or Path(f"{Path(model).stem if model.endswith(('.yaml', '.yml')) else model}.yaml")
    check_output(path, (".yaml", ".yml"), "a run")
    if path.exists():
        raise UnsupportedError("exists-already", f"{path} is there already; choose another --output")
    cut: dict[str, Any] = {"tp": tp, "pp": devices, "dp": dp, **({"ep": ep} if ep > 1 else {}), "micro_batch": 1}
    cut |= {"global_batch": _MICROBATCHES * devices * dp, "sequence_parallel": tp > 1}
    flags: dict[str, Any] = {"lr": 1e-4}
    raw: dict[str, Any] = dict(
        model=_name(model, path),
        cluster=_name(cluster, path),
        precision="bf16",
        parallelism=cut,
        schedule={"name": schedule if devices > 1 else STOCK},
        training={"iterations": 20, "save_interval": 0, "data": "mock"},
        megatron=flags,
        output=f"out/runs/{path.stem}",
    )
    run = _completed(raw, flags, load(model, Model), load(cluster, Cluster))
    reason = feasible(run)
    write_whole(path, _text(raw, path))
    if as_json:
        print_json({"output": str(path), "run": settings_of(run), "reason": reason})
        return
    if reason is not None:
        report_note(f"{path}: {reason}")
    console().print(str(path), soft_wrap=True, markup=False)


def _name(given: str, path: Path) -> str:
    """Return the name of a model or cluster as it is written in a file at this path."""
    return os.path.relpath(given, path.parent) if given.endswith((".yaml", ".yml")) else given


def _completed(raw: dict[str, Any], flags: dict[str, Any], model: Model, cluster: Cluster) -> Run:
    """Add the keys and flags that depend on the model and the cluster, and return the run."""
    if cluster.backend == "gloo":
        raw["precision"] = "fp32"
    else:
        flags |= OF_REPLICAS
    run = typed(raw | {"model": settings_of(model), "cluster": settings_of(cluster)}, Run)
    nodes = min_nodes(run)
    if nodes != cluster.nodes:
        raw["cluster"] = {"base": raw["cluster"], "nodes": nodes}
        run = replace(run, cluster=replace(cluster, nodes=nodes))
    stages = schedule_of(run, request_of(run)).placement.model_stages
    flags |= layout.flags(model, layout.even(model, stages))  # where Megatron has to be told
    return replace(run, megatron=flags)


def _text(raw: dict[str, Any], path: Path) -> str:
    """Return the text of a run file, with comments for its next reader."""
    lines = [
        "# To go on (docs/running-on-slurm.md has all keys):",
        f"#     pipemem plan {path}",
        f"#     pipemem launch {path} --print",
        f"#     pipemem launch {path} --launcher slurm --print",
    ]
    for key, value in raw.items():
        lines += [f"# {_COMMENTS[key]}"] if key in _COMMENTS else []
        lines.append(write_yaml({key: value}, flow=isinstance(value, dict)).rstrip())
    return "\n".join(lines) + "\n"
