"""Program of a rank: one training run through Megatron's own training loop, on stock schedules or on ours."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from argparse import Action, ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import cuda_graphs
import torch
import torch.distributed as dist
from changed_models import CHANGES
from emulate import emulated
from loops import digest
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import unwrap_model
from megatron.training import activation_logging, arguments, dgrad_logging, gpu_sniff_test, training

from megatron_pipemem import disable
from megatron_pipemem.features.offload.runtime.channels import ThreadChannel
from megatron_pipemem.features.overlap_steps.megatron import optimizer as overlapped_optimizer
from megatron_pipemem.mcore.launch import enable_from_command_line
from megatron_pipemem.mcore.step import extension, forward_backward
from megatron_pipemem.mcore.step.extension import LaunchOrders
from megatron_pipemem.runtime.trace import Direction, Trace
from megatron_pipemem.runtime.transport import Transport

ENTRY = Path(__file__).parents[2] / "scripts" / "gpt_pretraining.py"


def _build_parser_once() -> None:
    """Megatron builds three parsers of a thousand flags for every run, which takes longer than a step here."""
    add = arguments.add_megatron_arguments
    built: list[ArgumentParser] = []
    lists: dict[Action, list] = {}

    def from_memory(empty: ArgumentParser) -> ArgumentParser:
        if not built:
            built.append(add(empty))
            lists.update({action: action.default for action in empty._actions if isinstance(action.default, list)})
        for action, default in lists.items():
            action.default = list(default)  # whoever parses may change it
        return built[0]

    arguments.add_megatron_arguments = from_memory


_build_parser_once()
cuda_graphs.install()
arguments._print_args = lambda *_: None  # a thousand lines for every run
# Megatron's sizes are for GPUs.
gpu_sniff_test.STANDARD_GEMM_SHAPES = [(8, 8, 8)]
gpu_sniff_test.MSG_SIZES = [1 << 10]
# Without Transformer Engine, Megatron lists mocks in place of its classes.
for logging_module in (activation_logging, dgrad_logging):
    logging_module.LINEAR_TYPES = tuple(kind for kind in logging_module.LINEAR_TYPES if isinstance(kind, type))


def _load_entry() -> ModuleType:
    spec = importlib.util.spec_from_file_location(ENTRY.stem, ENTRY)
    module = importlib.util.module_from_spec(spec)
    sys.modules[ENTRY.stem] = module  # where the plugin replaces functions that it imports by name
    spec.loader.exec_module(module)
    return module


entry = _load_entry()


def run(case: dict) -> dict:
    """Train by the case's ``flags`` of Megatron and the plugin, which writes to ``report``. A case may also have:

    - ``initialise``: whether parameters get values that depend on their names alone, as they do without it. Runs with other
      placements start from the same model then.
    - ``by_provider``: a function of the script builds the model, as older scripts have it, and not Megatron.
    - ``changed``: a name of ``changed_models.CHANGES``; the user's program changes the model so.
    - ``gradients``: a folder for those of the first step.
    - ``sabotage``: one of ``SABOTAGE``, for rank 1.
    - ``emulate``: arguments of ``emulate.emulated``, for runs without a pipeline.
    - ``as_on_gpus``: hosts seem to wait for first launches, and wait where Megatron waits for a device.
    - ``gives_back``: the number of a step in which the allocator of rank 1 gives memory back. Two steps then run for one queue.
    - ``report``: ``None`` leaves it out.
    - ``clean``: with ``--pipemem-overlap-steps``, steps that must need no clipping before one does not wait for its norm.

    Returns what this rank has seen. ``replaced`` names the symbols of Megatron that are not the original ones afterwards.
    """
    _note_symbols()
    rows: list[int] = []
    reported = ["--pipemem-report", case["report"]] if case["report"] else []
    flags = enable_from_command_line([*case["flags"], *reported])
    sys.argv = [str(ENTRY), *flags]
    validation: list[dict[str, float]] = []
    if case.get("sabotage"):
        dist.barrier()  # rank 0 has checked the report's path before rank 1 takes it
    sabotage = SABOTAGE[case.get("sabotage") if dist.get_rank() == 1 else None]
    emulation = emulated(*case["emulate"]) if case.get("emulate") else nullcontext()
    change = CHANGES[case.get("changed")]
    chunks: list[torch.nn.Module] = []
    weights: list[str] = []
    single_queues: list[bool] = []
    packed: list[tuple[float, float]] = []
    replays = cuda_graphs.CUDAGraph.counts["replays"]
    if "--fp8-format" in case["flags"]:
        _support_fp8()
    try:
        with (
            _noted_evaluation(validation),
            _common_start(chunks, case.get("initialise", True), rows, change.built, case.get("gradients")),
            sabotage(case),
            _stand_in("torch.utils.tensorboard", SimpleNamespace(SummaryWriter=_Writer)),
            mock.patch.object(overlapped_optimizer, "CLEAN_STEPS", case["clean"]) if "clean" in case else nullcontext(),
            emulation,
            _model_by_provider(change.made) if case.get("by_provider") or change.made else nullcontext(),
            _launching_as_on_gpus(single_queues, case.get("gives_back")) if case.get("as_on_gpus") else nullcontext(),
            _noted_documents(packed),
            # Of which Megatron's SFT data needs one function.
            _stand_in("datasets", SimpleNamespace(load_dataset=_load_lines)),
        ):
            entry.main()
        weights += (digest(chunk.parameters()) for chunk in chunks)
        layers = {
            type(layer).__name__ for chunk in chunks for layer in chunk.modules() if type(layer).__name__[:2] == "TE"
        }
    finally:
        disable()
        while chunks:
            # Autograd's nodes hold DDP's hooks, the hooks the chunk, and it the optimizer and every process group of the case
            # with its threads and sockets. Python's collector cannot see that circle, so it is opened here.
            vars(chunks.pop()).clear()
        training.destroy_global_state()
        started = getattr(training, "_STARTUP_TIMESTAMPS", {})  # with them Megatron sums once more, and waits for ranks
        started.update(dict.fromkeys(started))  # that have none, because they were idle in the case
        destroy_moe_metrics_tracker()  # it is as long as the first model was deep
        MTPLossLoggingHelper.tracker.clear()
        activation_logging._LOGGER = None  # it keeps the folder of its first run
        if (base := sys.modules.get("transformer_engine.pytorch.module.base")) is not None:
            base.destroy_ub()
        for buffers in StaticBufferLoader.static_buffers.values():
            buffers.clear()
        for backend in ("FLASH", "FUSED", "UNFUSED"):  # Megatron refuses another than that of the case before
            os.environ.pop(f"NVTE_{backend}_ATTN", None)
        FullCudaGraphWrapper(None).reset_cuda_graph()  # which collects all garbage of the case
    dist.barrier()
    return {
        "report": json.loads(Path(case["report"]).read_text()) if reported and Path(case["report"]).is_file() else None,
        "scalars": list(_Writer.scalars),
        "validation": validation,
        "vocabulary_rows": rows,
        "weights": weights,
        "layers": sorted(layers),
        "single_queues": single_queues,
        "packed": packed,
        "replays": cuda_graphs.CUDAGraph.counts["replays"] - replays,
        "replaced": [name for name, (space, key, original) in _originals.items() if space.get(key) is not original],
    }


def _support_fp8() -> None:
    """Let Transformer Engine find a device that multiplies numbers of 8 bits, as ``te_stand_in`` does."""
    from transformer_engine.pytorch import quantization

    quantization._FP8_SUPPORT = quantization._MXFP8_SUPPORT = True, ""


@contextmanager
def _model_by_provider(change: Callable[[torch.nn.Module], None] | None) -> Iterator[None]:
    pretrain = entry.pretrain

    def with_provider(config, *args, **named) -> None:
        builder = config.model.get_builder_cls()(config.model)
        config.model = None

        def provider(pre_process, post_process, vp_stage=None, config=None, pg_collection=None) -> torch.nn.Module:
            model = builder.build_model(pg_collection, pre_process, post_process, vp_stage)
            if change is not None:
                change(model)
            return model

        pretrain(config, *args, model_provider=provider, **named)

    with mock.patch.object(entry, "pretrain", with_provider):
        yield


@contextmanager
def _noted_documents(noted: list[tuple[float, float]]) -> Iterator[None]:
    """Note what the loop computes FLOPs from, without the evaluation at the end of the case before."""
    consume = training.consume_seqlen_stats_in_iteration
    training._seqlen_stats_in_iteration, training._seqlen_stats_active = None, False

    def noting():
        noted.append(consume())
        return noted[-1]

    with mock.patch.object(training, "consume_seqlen_stats_in_iteration", noting):
        yield


def _load_lines(kind: str, data_files: str, split: str) -> list[dict]:
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


@contextmanager
def _launching_as_on_gpus(single_queues: list[bool], gives_back: int | None) -> Iterator[None]:
    """Note for every step whether it runs by the order for one hardware queue.

    A host that waits for its device waits for all receives that it has posted. ``memory_stats`` is asked before and after every
    step.
    """
    questions = count()
    is_single_queue = LaunchOrders.is_single_queue
    last: list[Transport] = []

    def made(*arguments, **named) -> Transport:
        last[:] = [Transport(*arguments, **named)]
        return last[0]

    def synchronize(device=None) -> None:
        for transport in last:
            transport.arrived(transport.take_in())

    def memory_stats(device=None) -> Counter[str]:
        is_over = gives_back is not None and next(questions) > 2 * gives_back
        return Counter(num_alloc_retries=int(is_over and dist.get_rank() == 1))

    def noting(orders: LaunchOrders, *step) -> bool:
        single_queues.append(is_single_queue(orders, *step))
        return single_queues[-1]

    with (
        mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
        mock.patch.object(extension, "can_make_hosts_wait", lambda device: True),
        mock.patch.object(forward_backward, "Transport", made),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        mock.patch.object(torch.cuda, "empty_cache", synchronize),
        mock.patch.object(torch.cuda, "memory_stats", memory_stats),
        mock.patch.object(extension, "LATE_STEPS", extension.LATE_STEPS if gives_back is None else 2),
        mock.patch.object(extension, "STEPS_BETWEEN_AGREEMENTS", 1),
        mock.patch.object(LaunchOrders, "is_single_queue", noting),
    ):
        yield


@contextmanager
def _copies_fail(case: dict) -> Iterator[None]:
    with mock.patch.object(ThreadChannel, "pace", side_effect=RuntimeError("the bus is gone")):
        yield


@contextmanager
def _copies_are_wrong(case: dict) -> Iterator[None]:
    carry = ThreadChannel._execute

    def carry_wrongly(channel: ThreadChannel, ticket) -> None:
        carry(channel, ticket)
        if ticket.direction is Direction.OUT:
            ticket.copies[0].destination[7] ^= 1

    with mock.patch.object(ThreadChannel, "_execute", carry_wrongly):
        yield


@contextmanager
def _report_is_lost(case: dict) -> Iterator[None]:
    """It could be written when the run began, and cannot when it ends."""
    Path(case["report"]).mkdir()
    yield


@contextmanager
def _clock_is_gone(case: dict) -> Iterator[None]:
    with mock.patch.object(Trace, "actions", side_effect=RuntimeError("the clock is gone")):
        yield


SABOTAGE = {
    None: nullcontext,
    "copies fail": _copies_fail,
    "copies are wrong": _copies_are_wrong,
    "report is lost": _report_is_lost,
    "clock is gone": _clock_is_gone,
}


class _Writer:
    """TensorBoard's, as far as Megatron knows it."""

    scalars: list[tuple[str, int, float]] = []

    def __init__(self, **settings: object):
        self.scalars.clear()

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars.append((name, iteration, float(value)))

    def add_text(self, *text: object, **others: object) -> None:
        pass

    def flush(self) -> None:
        pass


@contextmanager
def _stand_in(name: str, module: object) -> Iterator[None]:
    """Unlike ``mock.patch.dict`` it lets the modules stay that are imported meanwhile, of which others keep objects."""
    original = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if original is not None:
            sys.modules[name] = original


@contextmanager
def _noted_evaluation(noted: list[dict[str, float]]) -> Iterator[None]:
    evaluate = training.evaluate

    def noting(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        noted.append({name: float(value) for name, value in result[0].items()})
        return result

    with mock.patch.object(training, "evaluate", noting):
        yield


@contextmanager
def _common_start(
    built: list[torch.nn.Module],
    initialise: bool,
    rows: list[int],
    change: Callable[[torch.nn.Module], None] | None,
    gradients: str | None,
) -> Iterator[None]:
    """Note the chunks that are built, the rows of embedding and head, and in the folder ``gradients`` those of the first step.

    With ``initialise`` all parameters get values that depend on their names only. Megatron's own depend on the pipeline rank,
    so runs with other placements could not be compared.
    """
    get_megatron_optimizer = training.get_megatron_optimizer

    def after_initialising(config, chunks, *args, **kwargs):
        built.extend(chunks)
        for chunk in unwrap_model(chunks):
            rows.extend(p.size(0) for p in chunk.parameters() if getattr(p, "is_embedding_or_output_parameter", False))
            if initialise:
                _initialise(chunk.sharded_state_dict())
            if change is not None:
                change(chunk)
        optimizer = get_megatron_optimizer(config, chunks, *args, **kwargs)
        if gradients is not None:
            step = optimizer.step

            def note_and_step():
                optimizer.step = step
                _save_gradients(chunks, Path(gradients) / f"{dist.get_rank()}.pt")
                return step()

            optimizer.step = note_and_step
        return optimizer

    with mock.patch.object(training, "get_megatron_optimizer", after_initialising):
        yield


def _save_gradients(chunks: list[torch.nn.Module], path: Path) -> None:
    """Write this rank's complete gradients, with their places in the whole model's."""
    entries = []
    for chunk in unwrap_model(chunks):
        for shard in _shards(chunk.sharded_state_dict()):
            stacked = shard.prepend_axis_num  # checkpoints stack equal layers
            name = (shard.key, *shard.global_offset[:stacked])
            place = shard.global_shape[stacked:], _place(shard)[stacked:]
            if shard.data.requires_grad:
                entries.append((name, *place, shard.data.main_grad.clone()))
    torch.save(entries, path)


def _shards(entries) -> Iterator[ShardedTensor]:
    """All tensors of a sharded state dict."""
    for entry in entries.values() if isinstance(entries, dict) else entries:
        if isinstance(entry, (dict, list)):
            yield from _shards(entry)
        elif isinstance(entry, ShardedTensorFactory):
            yield from _shards(entry.build())
        elif isinstance(entry, ShardedTensor):
            yield entry


def _place(shard: ShardedTensor) -> tuple[int | slice, ...]:
    """Where a shard is in the whole tensor: its layer, if layers are stacked, and a slice of each of its own axes."""
    stacked = shard.prepend_axis_num
    own = zip(shard.global_offset[stacked:], shard.local_shape, strict=True)
    return *shard.global_offset[:stacked], *(slice(begin, begin + size) for begin, size in own)


_RANDOM_VECTORS = ("router.bias", ".A_log", "mixer.dt_bias", "mixer.conv1d", "softmax_offset")


@torch.no_grad()
def _initialise(entries) -> None:
    """Fill what begins random in a sharded state dict, each shard by its name and its place in the whole tensor."""
    for shard in _shards(entries):
        if shard.data.dim() > 1 or any(name in shard.key for name in _RANDOM_VECTORS):
            values = _initial_values(shard.key, shard.global_shape)[_place(shard)]
            shard.data.copy_(values)
            if hasattr(shard.data, "get_high_precision_init_val"):  # of 8 bits: the optimizer starts from these values
                shard.data.get_high_precision_init_val().copy_(values)


@lru_cache(maxsize=64)
def _initial_values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the initial values of a parameter; those of all layers, if the parameter's layers are stacked."""
    return 0.05 * torch.randn(
        shape, generator=torch.Generator().manual_seed(int.from_bytes(sha256(name.encode()).digest()[:8]))
    )


_originals: dict[str, tuple[Mapping[str, object], str, Callable]] = {}
_noted_modules: set[str] = set()


def _note_symbols() -> None:
    """Everything callable in Megatron's modules and their classes, and where it is found; once for every module."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.") or module is None or name in _noted_modules:
            continue
        _noted_modules.add(name)
        spaces = {name: vars(module)}
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                spaces[f"{name}.{value.__name__}"] = vars(value)
        for place, space in spaces.items():
            _originals.update(
                {f"{place}.{key}": (space, key, value) for key, value in space.items() if callable(value)}
            )
