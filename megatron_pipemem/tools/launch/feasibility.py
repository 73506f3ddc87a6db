"""Check before a run starts, and without a GPU, that it can work: sizes, memory, flags, schedule and data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_pipemem.choose.model_cut import known_chunks
from megatron_pipemem.conflicts import check_barriers, check_replicas
from megatron_pipemem.errors import ConfigError, PipememError, UnsupportedError
from megatron_pipemem.gates import GateQuestion, check_gates, gates
from megatron_pipemem.model import cut_flags
from megatron_pipemem.refusals import flag_values
from megatron_pipemem.request import FILE_SUFFIX, Request
from megatron_pipemem.schedule.options import AUTO, STOCK
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.size import check_affordable, is_fitted
from megatron_pipemem.tools.config.cluster import GIB
from megatron_pipemem.tools.config.runs import Run, resolve_script
from megatron_pipemem.tools.launch.command import all_flags, min_nodes, script_flags
from megatron_pipemem.tools.planner.balance import laid_out
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.planning import check_asynchronous
from megatron_pipemem.tools.planner.run_prices import request_of, schedule_of
from megatron_pipemem.tools.planner.slices import part_tokens
from megatron_pipemem.tools.planner.space import check_stock_groups

DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Patterns of the files in ``/dev`` that exist if there are GPUs, for the drivers of NVIDIA, AMD and WSL."""


def refusal(run: Run, any_size: bool = False) -> PipememError | None:
    """Return the error that says why a run cannot work; ``None`` if no check fails.

    Without ``any_size``, a schedule that takes long to check is an error too.
    """
    try:
        run = laid_out(run)
        for check in _CHECKS if any_size else (_affordable, *_CHECKS):
            check(run)
    except PipememError as error:
        return error
    return None


def refused_settings(run: Run) -> PipememError | None:
    """Return the error by which a start refuses a run's flags for its schedule; ``None`` if they go together.

    Sizes, layers and memory are not checked, so the answer holds for all runs with these flags and this schedule.
    """
    try:
        return next(gates(_gate_question(run, request_of(run))), None)
    except PipememError as error:
        return error


def feasible(run: Run, any_size: bool = False) -> str | None:
    """Return the message of the error that ``refusal`` returns; ``None`` if no check fails."""
    error = refusal(run, any_size)
    return None if error is None else str(error)


def check_data(run: Run) -> None:
    """Raise a ConfigError if a file with a run's training data is not on this machine.

    Files in object storage are not checked.
    """
    words = run.data
    prefixes = words[1::2] if len(words) > 1 and all(map(_is_number, words[::2])) else words
    for prefix in prefixes:
        for suffix in () if "://" in prefix else (".bin", ".idx"):  # Megatron also reads from object storage
            if not Path(f"{prefix}{suffix}").is_file():
                message = f"there is no file {prefix}{suffix} on this machine"
                remedy = "give the prefix of a .bin and an .idx file, or leave the key out to train on made-up tokens"
                raise ConfigError("no-file", f"{message}; {remedy}", key="data_path")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_devices(run: Run, folder: Path = Path("/dev")) -> None:
    """Raise an UnsupportedError if a run needs GPUs and this machine has none.

    The check looks for device files, because torch takes long to import.
    """
    if run.on_cpu or any(any(folder.glob(pattern)) for pattern in DEVICES):
        return
    raise UnsupportedError(
        "no-gpu",
        "the cluster of the run has GPUs, and this machine has none; start the run on its cluster, print its command "
        "with --print, or train a small model on CPU ranks with --set cluster=cpu",
    )


def _affordable(run: Run) -> None:
    cut = run.parallelism
    if run.schedule.name != STOCK:
        size = f"a global batch of {cut.global_batch} on {cut.pp} pipeline ranks makes"
        check_affordable(cut.pp, cut.microbatches, cut.chunks or 2, size, is_fitted(run.schedule.name))


def check_sizes(run: Run) -> None:
    """Raise a ConfigError if the run's batch, experts or model cannot be shared among its ranks."""
    cut = run.parallelism
    batch = cut.micro_batch * cut.dp
    if cut.global_batch % batch:
        less = "is less than" if cut.global_batch < batch else "is not a multiple of"
        raise ConfigError(
            "does-not-divide",
            f"global_batch {cut.global_batch} {less} micro_batch x dp = {cut.micro_batch} x {cut.dp}, so ranks get no equal "
            f"number of microbatches; take a multiple of {batch}, or fewer ranks",
        )
    if (reason := cut.why_not_experts()) is not None:
        raise ConfigError("does-not-divide", reason)
    run.execution.check(run.model)


def _fits_on_cluster(run: Run) -> None:
    ranks, cluster = run.parallelism.ranks, run.cluster
    if ranks > cluster.num_devices:
        raise UnsupportedError(
            "does-not-fit",
            f"tp x pp x dp x cp = {ranks} devices, the cluster has {cluster.num_devices}; make one of the four smaller",
        )
    if min_nodes(run) > cluster.nodes:
        raise UnsupportedError(
            "does-not-divide",
            f"tp x pp x dp x cp = {ranks} ranks cannot be shared evenly by {cluster.nodes} nodes or fewer, with "
            f"{cluster.devices_per_node} devices each; change one of the four",
        )


def _has_command(run: Run) -> None:
    resolve_script(run)
    script_flags(run)


def _schedules(run: Run) -> None:
    choice, cut = run.schedule, run.parallelism
    if cut.pp == 1 and choice.name != STOCK:
        raise UnsupportedError(
            "no-pipeline", f"pp 1 leaves no pipeline for schedule {choice.name}; set schedule to {STOCK}"
        )
    request = request_of(run)
    schedule = None if choice.name == AUTO else schedule_of(run, request)
    check_gates(_gate_question(run, request, schedule))
    if choice.name != STOCK:
        _check_ours(run, schedule)
    elif schedule is not None:
        check_stock_groups(run)
        cut_flags.check_layers(run.flags, run.model.layers, cut.pp, known_chunks(schedule.placement))
    if schedule is not None:
        check_barriers(choice.name, schedule.vocabulary_barriers, choice.vocab_cut)
        check_replicas(schedule.placement)
        if not schedule.units.are_whole:
            part_tokens(run, schedule.units.parts)
    _fits_in_memory(run, request if schedule is None else replace(request, file=schedule))


def _gate_question(run: Run, request: Request, schedule: Schedule | None = None) -> GateQuestion:
    """Return the question that the gates of a start get: a run's request, with its flags and its schedule, if it is known."""
    flags = all_flags(run)
    fuses = run.model.position == "rope" and not run.on_cpu and not flags.get("no-rope-fusion")
    settings = flag_values(flags | {"apply-rope-fusion": fuses, "transformer-impl": run.implementation})
    if run.schedule.name == STOCK:
        return GateQuestion(replace(request, schedule=STOCK), settings, on_cpu=run.on_cpu)
    return GateQuestion(request, settings, schedule, on_cpu=run.on_cpu)


def _check_ours(run: Run, schedule: Schedule | None) -> None:
    """Raise an error if a run's sizes exclude schedules of this package, or this schedule.

    ``schedule`` is ``None`` if it is searched for when the run starts.
    """
    name, chunks = run.schedule.name, run.parallelism.chunks
    file = schedule if name.endswith(FILE_SUFFIX) else None
    if file is not None and chunks not in (None, file.placement.num_chunks):
        raise UnsupportedError(
            "needs-chunks",
            f"{name} has {file.placement.num_chunks} chunks per rank, not {chunks}; set chunks to the file's number",
        )
    if file is None and schedule is not None and family(name).asynchronous:
        check_asynchronous(run, name)
    cut_flags.possible_placements(run.flags, name, run.schedule_options, run.parallelism.pp, run.model.layers, file)


def _fits_in_memory(run: Run, request: Request) -> None:
    memory = predicted_memory(run, request)
    if memory is None:
        return
    there, most = run.cluster.memory_bytes, max(memory.device_bytes)
    if most > there:
        rank = memory.device_bytes.index(most)
        static = max(memory.static_bytes)
        if static > there:
            raise UnsupportedError(
                "does-not-fit",
                f"the parameters, gradients and optimizer of pipeline rank {memory.static_bytes.index(static)} alone need "
                f"{static / GIB:.1f} GiB of its device's {there / GIB:.1f} GiB; take more tensor or pipeline ranks, and as "
                "many more nodes",
            )
        raise UnsupportedError(
            "does-not-fit",
            f"pipeline rank {rank} needs {most / GIB:.1f} GiB{_if_even(run, request, rank)} of its device's "
            f"{there / GIB:.1f} GiB; cut the model further, recompute, or use a schedule with a lower peak",
        )
    if (most := max(memory.host_bytes)) > memory.host_limit_bytes:
        raise UnsupportedError(
            "does-not-fit",
            f"pipeline rank {memory.host_bytes.index(most)} offloads {most / GIB:.1f} GiB of activations and optimizer to its "
            f"host, which holds {memory.host_limit_bytes / GIB:.1f} GiB per rank; offload less, or cut the model further",
        )


def _if_even(run: Run, request: Request, rank: int) -> str:
    """Return a part of a sentence: the memory that a rank would need if all experts got equally many tokens.

    The text is empty if the run assumes that already.
    """
    load = run.execution.expert_load
    if load <= 1 or run.flags.get("moe-pad-expert-input-to-capacity"):
        return ""
    others = {name: value for name, value in run.flags.items() if name != "moe-expert-capacity-factor"}
    even = predicted_memory(replace(run, parallelism=replace(run.parallelism, expert_load=1.0), flags=others), request)
    assert even is not None, "the memory with uneven routing is known"
    needed = even.device_bytes[rank] / GIB
    return f" if its experts get {load:g} times an even share of tokens, and {needed:.1f} GiB with an even share,"


_CHECKS = (check_sizes, _fits_on_cluster, _has_command, _schedules)
