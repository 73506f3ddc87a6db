"""Say whether a run can work, as far as that can be known without a device."""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.config import layout
from megatron_pipemem.config.cluster import GIB
from megatron_pipemem.config.refusals import flag_values, refuse_asynchronous, refuse_transformer_engine
from megatron_pipemem.config.runs import Run, resolve_script
from megatron_pipemem.errors import ConfigError, PipememError, UnsupportedError
from megatron_pipemem.launch import cut_flags
from megatron_pipemem.launch.command import min_nodes, script_flags
from megatron_pipemem.planner.memory import held, request_of, schedule_of
from megatron_pipemem.schedule.model_cut import check_cut, placements_of
from megatron_pipemem.schedule.options import AUTO, STOCK
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.request import FILE_SUFFIX, Request, check_barriers, check_replicas
from megatron_pipemem.schedule.size import check_affordable, is_fitted


def feasible(run: Run, any_size: bool = False) -> str | None:
    """Return why a run cannot work, in one sentence, or ``None``. It looks at everything that can be known without a
    device.

    Args:
        run: what is asked about.
        any_size: look also at schedules that take long to look at, which are refused otherwise.
    """
    try:
        for check in _CHECKS if any_size else (_affordable, *_CHECKS):
            check(run)
    except PipememError as error:
        return str(error)
    return None


def _affordable(run: Run) -> None:
    cut = run.parallelism
    if run.schedule.name != STOCK:
        what = f"a global batch of {cut.global_batch} on {cut.pp} pipeline ranks makes"
        check_affordable(cut.pp, cut.microbatches, cut.chunks or 2, what, is_fitted(run.schedule.name))


def _divides(run: Run) -> None:
    cut = run.parallelism
    batch = cut.micro_batch * cut.dp
    if cut.global_batch % batch:
        raise ConfigError(
            f"global_batch {cut.global_batch} is no multiple of micro_batch x dp = {cut.micro_batch} x {cut.dp}"
        )
    if (cut.dp * cut.cp) % cut.ep:
        raise ConfigError(f"dp x cp = {cut.dp * cut.cp} is no multiple of ep {cut.ep}")
    run.execution.check(run.model)


def _fits_on_cluster(run: Run) -> None:
    ranks, cluster = run.parallelism.ranks, run.cluster
    if ranks > cluster.num_devices:
        raise UnsupportedError(f"tp x pp x dp x cp = {ranks} devices, the cluster has {cluster.num_devices}")
    if min_nodes(run) > cluster.nodes:
        raise UnsupportedError(
            f"tp x pp x dp x cp = {ranks} ranks cannot be shared evenly by {cluster.nodes} nodes or fewer, with "
            f"{cluster.devices_per_node} devices each"
        )


def _has_command(run: Run) -> None:
    resolve_script(run)
    script_flags(run)


def _schedules(run: Run) -> None:
    choice, cut = run.schedule, run.parallelism
    if cut.pp == 1 and choice.name != STOCK:
        raise UnsupportedError(f"pp 1 leaves no pipeline for schedule {choice.name}; set schedule.name to {STOCK}")
    request, options = request_of(run), run.schedule_options
    recomputes = request.recompute != "none"
    asked = cut_flags.cut_of(run.flags, cut.pp, run.model.layers)
    if choice.name == AUTO:
        placements = placements_of(AUTO, options, cut.pp, asked)
        cut_flags.check_placements(run.flags, AUTO, placements)
        _stages_hold_layers(run, placements[0].num_chunks)
        _check_transformer_engine(run, True, recomputes)
        _fits_in_memory(run, request)
        return
    schedule = schedule_of(run, request)
    placements = (schedule.placement,)
    if choice.name != STOCK:
        _check_transformer_engine(run, schedule.splits_backward, recomputes or bool(schedule.recomputed))
    if choice.name.endswith(FILE_SUFFIX):
        if cut.chunks not in (None, schedule.placement.num_chunks):
            raise UnsupportedError(
                f"{choice.name} has {schedule.placement.num_chunks} chunks per rank, not {cut.chunks}"
            )
        if asked is not None:
            check_cut(asked, choice.name, schedule.placement)
    elif choice.name != STOCK:
        if family(choice.name).asynchronous:
            refuse_asynchronous(run, choice.name)
        placements = placements_of(choice.name, options, cut.pp, asked)
    if choice.name != STOCK:
        cut_flags.check_placements(run.flags, choice.name, placements)
    check_barriers(choice.name, schedule.vocabulary_barriers, choice.vocab_parallel)
    check_replicas(schedule.placement)
    _stages_hold_layers(run, schedule.placement.model_stages // cut.pp)
    _fits_in_memory(run, replace(request, file=schedule))


def _check_transformer_engine(run: Run, splits: bool, recomputes: bool) -> None:
    if run.implementation == "transformer_engine":
        refuse_transformer_engine(flag_values(run.flags), splits, recomputes)


def _stages_hold_layers(run: Run, chunks: int) -> None:
    stages = run.parallelism.pp * chunks
    if any(cut_flags.given(run.flags, name) for name in cut_flags.CUTS):
        return
    proposed = cut_flags.uneven_layers(run.flags, run.model.layers, stages)
    if proposed is not None:
        raise UnsupportedError(
            f"{cut_flags.counted_layers(run.flags, run.model.layers)} cannot be split evenly over {stages} stages (pp "
            f"{run.parallelism.pp} x {chunks} chunks); say how by {layout.FLAG} under the training script's flags, for example "
            f"{proposed!r}"
        )


def _fits_in_memory(run: Run, request: Request) -> None:
    found = held(run, request)
    if found is None:
        return
    there, most = run.cluster.memory_bytes, max(found.device)
    if most > there:
        raise UnsupportedError(
            f"pipeline rank {found.device.index(most)} needs {most / GIB:.1f} GiB of {there / GIB:.1f} GiB; cut the model "
            "further, recompute, or take a schedule with a lower peak"
        )
    if (most := max(found.host)) > found.room:
        raise UnsupportedError(
            f"pipeline rank {found.host.index(most)} sends {most / GIB:.1f} GiB to its host, which has {found.room / GIB:.1f} "
            "GiB for each rank; offload less, or cut the model further"
        )


_CHECKS = (_divides, _fits_on_cluster, _has_command, _schedules)
