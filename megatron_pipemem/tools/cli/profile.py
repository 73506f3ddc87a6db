"""``pipemem profile``: measure the seconds and bytes of a model's layers, or compute them by formulas.

``pipemem layout`` uses the same options for the model's parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.files import check_writable, write_whole
from megatron_pipemem.model.model import Execution, Model, kind_name
from megatron_pipemem.schedule.display import doing
from megatron_pipemem.tools.cli.common import Shown, console, print_answer, print_facts, report_note, showing
from megatron_pipemem.tools.cli.options import Json, takes_group
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER, Cluster
from megatron_pipemem.tools.config.loading import load, locate, read_raw, typed
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.prices import cheap_recompute, offload_ratio
from megatron_pipemem.tools.planner.profile import Bandwidths, Part, Profile, from_formulas
from megatron_pipemem.tools.report.terminal import FittingTable

ClusterName = Annotated[
    str | None, typer.Option(help=f"A cluster by name or YAML file. Default: the run's, else {DEFAULT_CLUSTER}.")
]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens per sequence, if not the model's.")]


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """The options for the fields of ``Execution``, which checks their values."""

    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")] = 1
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Cut norms over the tensor-parallel ranks too.")
    ] = False
    cp: Annotated[int, typer.Option("--cp", help="Context-parallel ranks.")] = 1
    ep: Annotated[int, typer.Option("--ep", help="Expert-parallel ranks.")] = 1
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Sequences per microbatch.")] = 1
    recompute: Annotated[
        str,
        typer.Option(metavar="none|selective|full", help="Parts of a layer that run again before its backward."),
    ] = "none"
    precision: Annotated[
        str, typer.Option(metavar="bf16|fp16|fp32", help="Element type of weights and activations.")
    ] = "bf16"


@dataclass(frozen=True, kw_only=True)
class _ProfiledCut(CutOptions):
    """The options of ``pipemem profile`` for the fields of ``Execution``."""

    attention: Annotated[str, typer.Option(metavar="flash|unfused", help="Kind of attention of the layers.")] = "flash"


def check_runs_own(context: typer.Context, cut: CutOptions) -> None:
    """Raise an UnsupportedError if an option of ``cut`` is given, because the run file has its value."""
    for parameter in context.command.params:
        origin = context.get_parameter_source(parameter.name)
        if hasattr(cut, parameter.name) and origin is not None and origin.name == "COMMANDLINE":
            raise UnsupportedError(
                "conflicting-options",
                f"{parameter.opts[0]} is set by the run; change the run, or give a model in place of the run",
            )


def cluster_name(cluster: object) -> str:
    """Return the name of a run file's cluster, which may be a mapping that changes another cluster."""
    if not isinstance(cluster, dict):
        return str(cluster or "the run's cluster")
    if "base" not in cluster:
        return "the run's own cluster"
    return str(cluster["base"]) if cluster.keys() <= _SIZES else f"{cluster['base']} as the run changes it"


_SIZES = {"base", "nodes", "devices_per_node"}


MIB = 1 << 20


@takes_group
def profile(
    context: typer.Context,
    cut: _ProfiledCut,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="A run file with model, cluster and parallelism.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model by name or YAML file, instead of a run.")] = None,
    cluster: ClusterName = None,
    sequence: SequenceLength = None,
    formulas: Annotated[
        bool, typer.Option("--formulas", help="Compute the costs without Megatron, and run nothing.")
    ] = False,
    offload: Annotated[bool, typer.Option("--offload", help="Measure also the copies to the host and back.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed microbatches.")] = 5,
    output: Annotated[Path | None, typer.Option(help="JSON file for --pipemem-costs and the planner.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show Megatron's warnings about missing GPU packages.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure or compute the seconds and bytes of one layer, of the embedding and of the head.

    The file prices every pipeline of the model. ``simulate``, ``pareto``, ``plan`` and runs combine the parts into the
    stages of their schedule.

    Examples:
        # measure on this device
        pipemem profile run.yaml --output profile.json
        # compute without Megatron
        pipemem profile --model llama3-8b --tp 2 --formulas
    """
    if (run is None) == (model is None):
        raise UnsupportedError("missing-option", "the model to profile is missing; give a run file, or --model NAME")
    if output is not None:
        check_writable(output)
    if run is not None:
        check_runs_own(context, cut)
        loaded_run = load(run, Run)
        shape, execution = loaded_run.model, loaded_run.execution
        machine = load(cluster, Cluster) if cluster else loaded_run.cluster
        named = cluster_name(cluster or read_raw(locate(str(run), Run)).get("cluster"))
    else:
        assert model is not None, "it is one of the two"
        named = cluster or DEFAULT_CLUSTER
        shape, machine = load(model, Model), load(named, Cluster)
        execution = typed(asdict(cut), Execution)
    if sequence is not None:
        shape = replace(shape, sequence=sequence)
    execution.check(shape)
    with showing("loading Megatron"):
        prices = from_formulas(shape, execution, machine) if formulas else _run(shape, execution, repeats, verbose)
        if offload:
            prices = replace(prices, bandwidths=_bandwidths())
    result = prices.to_json(machine.inter_node if machine.nodes > 1 else machine.intra_node)
    result["profile"]["offload_ratio"] = ratios = _ratios(prices, machine)
    print_answer(result, _shown(prices, ratios, run or model, named), as_json)
    if output is not None:
        write_whole(output, json.dumps(result, indent=2, allow_nan=False) + "\n")
    if not as_json:
        file = output or "FILE.json"
        uses = f"simulate, show and pareto take it as --costs {file}, plan and advise as --profile {file}"
        print_facts(console(), [("next", uses if output is not None else f"add --output {file}; {uses}")])


def _run(model: Model, execution: Execution, repeats: int, verbose: bool) -> Profile:
    from megatron_pipemem.mcore import INSTALL, is_installed

    if not is_installed():
        raise UnsupportedError("not-installed", f"{INSTALL}, or give --formulas, which runs without Megatron")
    import torch

    if not torch.cuda.is_available():
        from megatron_pipemem.tools.cpu import activate, missing_packages

        activate(verbose=verbose)
        if not verbose and (missing := missing_packages()) is not None:
            report_note(missing)
        report_note(
            "no GPU here: this takes minutes, the seconds are of this CPU, and its kernels save other bytes than a GPU's; "
            "--formulas computes those of a GPU in seconds"
        )
    from megatron_pipemem.tools.megatron.profiling import profile as profile_stages

    return profile_stages(model, execution, repeats)


def _bandwidths() -> Bandwidths | None:
    import torch

    from megatron_pipemem.mcore import on_cpu_ranks

    if on_cpu_ranks() or not torch.cuda.is_available():
        report_note(
            "no GPU here: the link to the host was not measured, and the offload ratio comes from the cluster file"
        )
        return None
    from megatron_pipemem.features.offload.runtime.channels import CudaChannel
    from megatron_pipemem.features.offload.runtime.host import measure_bandwidths

    with doing("measuring the link to the host"):
        measured = measure_bandwidths(CudaChannel(torch.device("cuda"), timed=False))
    return Bandwidths(**{name: rate / 1e9 for name, rate in measured.items()})


def _ratios(prices: Profile, cluster: Cluster) -> dict[str, float]:
    """Return the offload ratio k of a layer as it runs, and with recomputed norms and activation functions.

    k is the seconds of copying a layer's activations out and back, per second of its F, I and W. Bandwidths are
    measured, or those of the cluster.
    """
    executions = {"as_is": prices.execution, "cheap_recomputed": cheap_recompute(prices.execution)}
    channel, sharing, seconds = cluster.host, cluster.sharing(0), prices.layer.seconds.total
    if (measured := prices.bandwidths) is not None:
        channel, sharing = replace(channel, d2h_gb_per_s=measured.d2h_computing, h2d_gb_per_s=measured.h2d_computing), 1
    return {
        name: offload_ratio(prices.model, execution, cluster.flops, channel, sharing, seconds)
        for name, execution in executions.items()
    }


def _shown(prices: Profile, ratios: dict[str, float], name: object, cluster: str) -> Iterator[Shown]:
    columns = ("part", "F ms", "I ms", "W ms", "saved MiB", "freed by I MiB", "parameters")
    tokens = f"{prices.execution.micro_batch} x {prices.model.sequence:,} tokens"
    how = "by formulas" if prices.source == "formulas" else prices.source
    table = FittingTable(columns, text=("part",), title=f"{name}: per microbatch of {tokens} and rank, {how}")
    rows: list[tuple[str, Part]] = [
        *((f"layer: {kind_name(kind)}", layer) for kind, layer in prices.layers.items()),
        ("embedding" + ", vision tower" * (prices.model.tower is not None), prices.first - prices.middle),
        ("head, loss" + ", prediction ahead" * (prices.model.mtp_layers > 0), prices.last - prices.middle),
    ]
    for label, part in rows:
        times = (part.seconds.forward, part.seconds.input, part.seconds.weight)
        table.add_row(
            label,
            *(f"{1e3 * seconds:.3f}" for seconds in times),
            f"{part.saved / MIB:z.2f}",
            f"{part.released_at_input / MIB:z.2f}",
            f"{part.parameters:,}",
        )
    yield table
    yield (
        "F: forward; I: input gradient; W: weight gradient; saved: activations kept from F on; freed by I: the part of them "
        "that I frees; W frees the rest"
    )
    measured = prices.source == "measured"
    of_cluster = f"cluster {cluster} (--cluster NAME prices another)"
    seconds = f"computing alone, on {prices.device}"
    if not measured:
        seconds = f"formulas, with messages within a layer, at {prices.device}, for {of_cluster}"
    rates = prices.bandwidths
    recomputed = f"{ratios['cheap_recomputed']:.2f} times if norms and activation functions are recomputed"
    link = f"; link of {of_cluster}" if rates is None and measured else ""
    yield [
        ("seconds", seconds),
        ("message", f"{prices.message_bytes / MIB:.2f} MiB between two stages"),
        ("optimizer", f"{prices.optimizer_seconds * 1e9:.3f} ns per parameter"),
        (
            "offload ratio",
            f"activations of a layer ({kind_name(prices.model.main_kind)}) take {ratios['as_is']:.2f} times as long "
            f"to the host and back as its F, I and W ({recomputed}); at 1 or less, computing hides all copies{link}",
        ),
    ]
    if rates is not None:
        yield (
            f"host link, GB/s: D2H {rates.d2h:.1f}, H2D {rates.h2d:.1f}, both {rates.both:.1f} each way; while computing "
            f"{rates.d2h_computing:.1f}, {rates.h2d_computing:.1f}, {rates.both_computing:.1f}"
        )
