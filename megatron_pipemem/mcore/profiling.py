"""Takes apart what stages of a model hold and take when they run on this device, alone (``lone_stage``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.model import Execution, Model, Passes
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.lone_stage import FIRST, LAST, MIDDLE, build_stage, lone_rank, run_stage
from megatron_pipemem.planner.activations import gathered_bytes, message_bytes
from megatron_pipemem.planner.profile import Part, Profile, from_formulas, speed
from megatron_pipemem.runtime.activation_ledger import LedgerEntry
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.progress import doing


def profile(model: Model, execution: Execution, cluster: Cluster | None, repeats: int = 5) -> Profile:
    """Run stages of one and two layers, with the embedding, with the head and without either, and take them apart.

    Args:
        model: the shape.
        execution: how it runs.
        cluster: count bytes with fake tensors and take the planner's prices for it as seconds; ``None`` runs the stages on
            this device.
        repeats: microbatches that are timed, after one that is not.

    Raises:
        UnsupportedError: it cannot be run this way; the message says which way can.
    """
    fake = cluster is not None
    _check(model, execution, fake)
    with lone_rank(execution, fake):
        microbatches = 2 if fake else 1 + repeats
        gpu_norms = fake and cluster.backend == "nccl"

        def part(role: int, layers: int) -> Part:
            name = ("the first", "a middle", "the last")[role]
            with doing(
                f"running {name} stage with {layers} layer{'s' if layers > 1 else ''}, {microbatches} microbatches"
            ):
                return _stage_part(model, execution, role, layers, microbatches=microbatches, gpu_norms=gpu_norms)

        one, two, first, last = part(MIDDLE, 1), part(MIDDLE, 2), part(FIRST, 1), part(LAST, 1)
        layer = end_layer = two - one
        if execution.attention == "unfused":
            end_layer = part(FIRST, 2) - first
    if fake:
        priced = from_formulas(model, execution, cluster)
        optimizer, layer_seconds = priced.optimizer_seconds, priced.layer.seconds
        frames = {FIRST: priced.first.seconds, MIDDLE: priced.middle.seconds, LAST: priced.last.seconds}
    else:
        optimizer = _optimizer_seconds(two.parameters, repeats)
        # Half of two layers: a difference of two times would be noise where layers are small.
        layer_seconds = two.seconds * 0.5
        frames = {FIRST: _excess(first, layer_seconds), MIDDLE: Passes(), LAST: _excess(last, layer_seconds)}
    # The modules that ran are Megatron's own.
    grown = round(gathered_bytes(model, execution))
    gathered = Part(memory={Kind.I: grown, Kind.W: -grown} if grown else {})
    return Profile(
        model=model,
        execution=execution,
        source="fake tensors" if fake else "measured",
        device=speed(cluster) if fake else device_name(),
        layer=replace(layer, seconds=layer_seconds) + gathered,
        first=replace(first - end_layer, seconds=frames[FIRST]),
        middle=replace(one - layer, seconds=frames[MIDDLE]),
        last=replace(last - end_layer, seconds=frames[LAST]),
        message_bytes=int(message_bytes(model, execution)),
        optimizer_seconds=optimizer,
        end_layer=replace(end_layer, seconds=layer_seconds) + gathered if end_layer is not layer else None,
    )


def device_name() -> str:
    """Return the name of what this process computes on."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _check(model: Model, execution: Execution, fake: bool) -> None:
    execution.check(model)
    if execution.cp > 1 and (not fake or execution.attention == "unfused"):
        raise UnsupportedError(
            "attention over a sequence shared by context-parallel ranks needs those ranks: profile with cp 1, or count bytes "
            "of fused attention with --fake"
        )
    if model.experts and model.moe_every > 1:
        raise UnsupportedError("a model with dense and expert layers has no one layer to measure; use --formulas")
    if model.experts and fake:
        raise UnsupportedError(
            "experts' shares of tokens depend on their values, and fake tensors have none; use --formulas"
        )


def _stage_part(
    model: Model, execution: Execution, position: int, layers: int, microbatches: int, gpu_norms: bool
) -> Part:
    stage = build_stage(model, execution, position, layers, gpu_norms)
    seen = run_stage(stage, model, execution, position, microbatches)
    # Of the second microbatch: the first one's may include what later ones share, like tables of rotations.
    changes = _changes(seen.entries)
    memory = {kind: change for kind, change in changes.items() if change}
    seconds: dict[Kind, list[float]] = {Kind.F: [], Kind.I: [], Kind.W: []}
    for traced in seen.actions:
        if traced.action.microbatch > 0:
            seconds[traced.action.kind].append(traced.end - traced.start)
    times = Passes(*(median(each) if each else 0.0 for each in seconds.values()))
    return Part(times, memory, seen.parameters)


def _changes(entries: Sequence[LedgerEntry]) -> dict[Kind, int]:
    """Return by how many bytes the actions of microbatch 1 changed what the stage holds."""
    befores = (0, *(entry.bytes for entry in entries))
    return {
        entry.action.kind: entry.bytes - before
        for before, entry in zip(befores, entries, strict=False)
        if entry.action.microbatch == 1
    }


def _excess(part: Part, layer: Passes) -> Passes:
    """Return what a stage of one layer takes beyond its layer; small frames may seem to take less than nothing."""
    over = part.seconds + layer * -1
    return Passes(max(0.0, over.forward), max(0.0, over.input), max(0.0, over.weight))


def _optimizer_seconds(parameters: int, repeats: int) -> float:
    """Return the seconds of one Adam step on fp32 parameters and gradients, per parameter."""
    weight = torch.nn.Parameter(torch.zeros(parameters, device=torch.cuda.current_device()))
    weight.grad = torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], fused=True)
    took = []
    for _ in range(1 + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        adam.step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return median(took[1:]) / parameters
