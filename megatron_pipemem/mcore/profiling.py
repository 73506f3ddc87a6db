"""Measure the time and memory of a model's stages on this device, each run alone (``lone_stage``)."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import median

import torch

from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.model import Execution, Model, Passes, Sublayer
from megatron_pipemem.cpu import is_active
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.lone_stage import FIRST, LAST, MIDDLE, build_stage, changes, lone_rank, run_stage
from megatron_pipemem.planner.activations import gathered_bytes, message_bytes
from megatron_pipemem.planner.profile import Part, Profile, from_formulas, speed
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.display import doing


def profile(model: Model, execution: Execution, cluster: Cluster | None, repeats: int = 5) -> Profile:
    """Measure the time and bytes of each kind of layer and of the embedding and the head, and return a profile.

    This runs stages of one and of two layers, with the embedding, with the head and without either. The bytes of a
    layer are those of two layers less those of one. With a cluster, bytes are counted with fake tensors, and seconds
    are the planner's formulas for the cluster. Without one, the stages run on this device, and ``repeats`` microbatches
    after a first one are timed. A layer's seconds are then half those of two. Raise an UnsupportedError with the remedy
    if the model cannot run this way.
    """
    fake = cluster is not None
    _check(model, execution, fake)
    with lone_rank(execution, fake):
        microbatches = 2 if fake else 1 + repeats
        gpu_norms = cluster is not None and cluster.backend == "nccl"

        @functools.cache
        def part(role: int, *kinds: str) -> Part:
            name = ("the first", "a middle", "the last")[role]
            count = f"{len(kinds)} layer{'s' if len(kinds) > 1 else ''} {kinds[0]}"
            with doing(f"running {name} stage with {count}, {microbatches} microbatches"):
                return _stage_part(model, execution, role, kinds, microbatches=microbatches, gpu_norms=gpu_norms)

        main, final = model.main_kind, model.kinds[-1]  # multi-token prediction repeats the last layer
        twos = {kind: part(MIDDLE, kind, kind) for kind in dict.fromkeys(model.kinds)}
        layers = {kind: two - part(MIDDLE, kind) for kind, two in twos.items()}
        first, last = part(FIRST, main), part(LAST, final)
        ends = layers
        if execution.attention == "unfused":
            ends = {kind: part(FIRST, kind, kind) - part(FIRST, kind) for kind in twos}
    if cluster is not None:
        priced = from_formulas(model, execution, cluster)
        optimizer, seconds = priced.optimizer_seconds, {kind: each.seconds for kind, each in priced.layers.items()}
        frames = {FIRST: priced.first.seconds, MIDDLE: priced.middle.seconds, LAST: priced.last.seconds}
    else:
        optimizer = _optimizer_seconds(twos[main].parameters, repeats)
        # Half of the time of two layers, because the difference of two times would be noise for small layers.
        seconds = {kind: two.seconds * 0.5 for kind, two in twos.items()}
        frames = {FIRST: _excess(first, seconds[main]), MIDDLE: Passes(), LAST: _excess(last, seconds[final])}

    def timed(kind: str, layer: Part) -> Part:
        # The modules that ran are Megatron's own.
        grown = round(gathered_bytes(model, execution, kind))
        gathered = Part(memory={Kind.I: grown, Kind.W: -grown} if grown else {})
        return replace(layer, seconds=seconds[kind]) + gathered

    return Profile(
        model=model,
        execution=execution,
        source="fake tensors" if fake else "measured",
        device=device_name() if cluster is None else speed(cluster),
        layers={kind: timed(kind, layer) for kind, layer in layers.items()},
        first=replace(first - ends[main], seconds=frames[FIRST]),
        middle=replace(twos[main] - layers[main] * 2, seconds=frames[MIDDLE]),
        last=replace(last - ends[final], seconds=frames[LAST]),
        message_bytes=int(message_bytes(model, execution)),
        optimizer_seconds=optimizer,
        end_layers={kind: timed(kind, layer) for kind, layer in ends.items()} if ends is not layers else None,
    )


def device_name() -> str:
    """Return the name of this process's GPU or CPU and the version of torch."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _check(model: Model, execution: Execution, fake: bool) -> None:
    execution.check(model)
    kinds = "".join(model.all_kinds)
    alone = execution.cp == 1 or (fake and (execution.attention == "flash" or is_active()))
    for cannot, why in (
        (
            execution.fp8 != "none",
            "8-bit products run in Transformer Engine's layers, and profiling builds local ones; give --formulas",
        ),
        (
            model.tower is not None or execution.adapters,
            "a vision tower and adapters belong to their program, and profiling builds language models; give --formulas",
        ),
        (
            model.expert_latent or {*"GDd"} & {*kinds},
            "gated delta nets, sparse attention and experts in a latent are made of Transformer Engine's layers, and "
            "profiling builds local ones; give --formulas",
        ),
        (
            not alone,
            "attention over a sequence shared by context-parallel ranks needs those ranks: profile with cp 1, or give "
            "--formulas",
        ),
        (
            Sublayer.MAMBA in kinds and (fake or find_spec("mamba_ssm") is None),
            "Mamba layers run with the package mamba_ssm, on a GPU; profile on a GPU, or give --formulas",
        ),
    ):
        if cannot:
            raise UnsupportedError("cannot-profile", why)


def _stage_part(
    model: Model, execution: Execution, position: int, kinds: Sequence[str], microbatches: int, gpu_norms: bool
) -> Part:
    stage = build_stage(model, execution, position, kinds, gpu_norms)
    seen = run_stage(stage, model, execution, position, microbatches)
    memory: dict[Kind, float] = {kind: change for kind, change in changes(seen.counter.entries).items() if change}
    seconds: dict[Kind, list[float]] = {Kind.F: [], Kind.I: [], Kind.W: []}
    for traced in seen.clock.actions():
        if traced.action.microbatch > 0:
            seconds[traced.action.kind].append(traced.end - traced.start)
    times = Passes(*(median(each) if each else 0.0 for each in seconds.values()))
    return Part(times, memory, sum(parameter.numel() for parameter in stage.parameters()))


def _excess(part: Part, layer: Passes) -> Passes:
    """Return the seconds of each pass of a stage of one layer, less those of the layer; at least 0 despite noise."""
    over = part.seconds + layer * -1
    return Passes(max(0.0, over.forward), max(0.0, over.input), max(0.0, over.weight))


def _optimizer_seconds(parameters: int, repeats: int) -> float:
    """Return the seconds of an Adam step per parameter, measured on this many fp32 parameters.

    It is the median of ``repeats`` steps after a first one.
    """
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
