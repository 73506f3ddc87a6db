"""Program of a rank: the same training twice on megatron.core alone, with and without a barrier between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from unittest import mock

import torch
import torch.distributed as dist
from loops import config_of, digest, forward_backward, outputs, session, tokens_of, without_sync
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module

import megatron_pipemem
from megatron_pipemem.features.overlap_steps.megatron import optimizer as overlapped_optimizer
from megatron_pipemem.features.overlap_steps.megatron import steps as overlapped_steps
from megatron_pipemem.features.overlap_steps.megatron.optimizer import LateNorm, OverlappedOptimizer

SEQUENCE, VOCABULARY = 16, 64
CLIPS = {"off": 0.0, "never": 1e6, "always": 1e-3, "spikes": 20.0}
SPIKE = 100.0
STEPS = 6
KINDS = ("synchronous", "overlapped")


def run(case: dict, training: type[Training] | None = None, kinds: Sequence[str] = KINDS) -> dict:
    """Train as the case says, once with Megatron's own end of every step and once overlapped.

    Args:
        case: ``schedule``, and optionally ``chunks`` of every rank, ``microbatches``, ``steps``, ``clean`` (steps that must
            need no clipping before one is taken without waiting), ``dtype``, ``tp``, ``distributed`` (the optimizer),
            ``gather`` (parameters while others compute), ``tied``, ``dropout``, ``clip`` (one of ``CLIPS``), ``spikes``
            (steps whose gradients are a hundred times as large), ``evaluates`` (steps after which there is an evaluation),
            ``ahead`` (whether steps read data of the next one) and ``runs_ahead``: a step from which on the last rank of the
            pipeline ends none, overlapped, before the first rank has run a forward of the next one.
        training: what trains, in the place of ``Training``.
        kinds: of these trainings.

    Returns:
        What both trainings showed on this rank, and how many steps were taken without waiting and how many taken back.
    """
    shown = {}
    for kind in kinds:
        settings = {"overlap_steps": True} if kind == "overlapped" else {}
        if case.get("ahead"):
            settings["train_steps"] = case.get("steps", STEPS)
        groups = {
            "tensor_model_parallel_size": case.get("tp", 1),
            "pipeline_model_parallel_size": case["pp"],
            "distributed_timeout_minutes": case.get("timeout_minutes", 30),
        }
        with (
            session(case["schedule"], settings, case.get("chunks"), **groups),
            mock.patch.object(overlapped_optimizer, "CLEAN_STEPS", case.get("clean", 2)),
        ):
            ahead = case.get("runs_ahead") if kind == "overlapped" else None
            shown[kind] = (training or Training)(case, ahead).run()
    return shown


class Training:
    def __init__(self, case: dict, runs_ahead: int | None):
        self.case, self.runs_ahead = case, runs_ahead
        self.microbatches, self.steps = case.get("microbatches", 8), case.get("steps", STEPS)
        torch.manual_seed(1)
        dtype = getattr(torch, case.get("dtype", "float32"))
        bf16 = dtype is torch.bfloat16
        dropout = 0.1 if case.get("dropout") else 0.0
        self.config = config_of(
            case["pp"],
            case.get("chunks"),
            case.get("tp", 1),
            num_layers=case["pp"] * max(2, case.get("chunks", 1)),
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=bf16,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            finalize_model_grads_func=finalize_model_grads,
        )
        models = megatron_pipemem.build_model_chunks(self._build)
        if bf16:
            models = [Float16Module(self.config, model) for model in models]
        distributed, gather = case.get("distributed", False), case.get("gather", False)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=True, overlap_param_gather=gather
        )
        self.chunks = [DistributedDataParallel(self.config, ddp, model) for model in models]
        self.config.no_sync_func = without_sync(self.chunks)
        self.optimizer = optimizers.get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.1,
                bf16=bf16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
                overlap_param_gather=gather,
                clip_grad=CLIPS[case.get("clip", "off")],
            ),
            self.chunks,
        )
        self._stream = chain.from_iterable(self._batches(step) for step in range(self.steps))

    def _build(self, **ends) -> GPTModel:
        return GPTModel(
            self.config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            SEQUENCE,
            share_embeddings_and_output_weights=bool(self.case.get("tied")),
            **ends,
        )

    def run(self) -> dict:
        losses, norms, evaluations = [], [], []
        spikes, evaluates = self.case.get("spikes", ()), self.case.get("evaluates", ())
        with (
            mock.patch.object(overlapped_steps, "gain_without_barrier", lambda *_: 2.0),
            _spied("redo") as redo,
            _spied("validate") as validate,
        ):
            for step in range(self.steps):
                for chunk in self.chunks:
                    chunk.zero_grad_buffer()
                self.optimizer.zero_grad()
                losses.append(self._forward_backward(step, SPIKE if step in spikes else 1.0))
                if self._is_ahead(step):
                    _store().wait([_begun(step + 1)])
                _, norm, _ = self.optimizer.step()
                norms.append(norm)
                for group in self.optimizer.param_groups:
                    group["lr"] = 1e-2 / (step + 2)
                    group["weight_decay"] = 0.1 * (step % 3)
                if step in evaluates:
                    evaluations.append(self._forward_backward(1000 + step, 1.0, forward_only=True))
        megatron_pipemem.settle()
        if self.case.get("gather"):  # as the next forward would
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return {
            "losses": losses,
            "evaluations": evaluations,
            "norms": [float(norm).hex() for norm in norms],
            "weights": [digest(chunk.parameters()) for chunk in self.chunks],
            "state": digest(_state(self.optimizer)),
            "groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
            ],
            "validated": validate.call_count,
            "redone": redo.call_count,
            "late": sum(isinstance(norm, LateNorm) for norm in norms),
        }

    def _is_ahead(self, step: int) -> bool:
        begins = self.steps if self.runs_ahead is None else self.runs_ahead
        return begins <= step < self.steps - 1 and parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def _forward_backward(self, step: int, scale: float, forward_only: bool = False) -> list[str]:
        hooked = self.chunks if self.case.get("gather") and forward_only else ()
        if hooked:
            megatron_pipemem.settle()
        for chunk in hooked:
            chunk.disable_forward_pre_hook()
        goes_on = self.case.get("ahead") and not forward_only
        data = [self._stream if goes_on else self._batches(step) for _ in self.chunks]
        function = partial(_forward_step, scale, step)
        reports = forward_backward(self.chunks, function, data, self.microbatches, SEQUENCE, forward_only=forward_only)
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        return [report["loss"].item().hex() for report in reports]

    def _batches(self, step: int) -> Iterator[torch.Tensor]:
        for microbatch in range(self.microbatches):
            seed = 10000 * step + 100 * microbatch + parallel_state.get_data_parallel_rank()
            yield tokens_of(seed, (1, SEQUENCE + 1), VOCABULARY)


def _spied(method: str):
    original = getattr(OverlappedOptimizer, method)
    return mock.patch.object(OverlappedOptimizer, method, autospec=True, side_effect=original)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _begun(step: int) -> str:
    return f"{step} in the pipeline of data-parallel rank {parallel_state.get_data_parallel_rank()}"


def _forward_step(scale: float, step: int, data, model):
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        _store().set(_begun(step), "")
    losses = outputs(model, next(data), labels=True)
    return losses, lambda losses: (scale * losses.mean(), {"loss": losses.mean().detach()})


def _state(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                for _, value in sorted(part.optimizer.state[parameter].items()):
                    yield value if isinstance(value, torch.Tensor) else torch.tensor(value)
