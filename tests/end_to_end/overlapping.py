"""Program of a rank: the same training twice on megatron.core alone, with and without a barrier between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from itertools import chain
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import megatron_pipemem
from megatron_pipemem.features.overlap_steps.megatron import optimizer as overlapped_optimizer
from megatron_pipemem.features.overlap_steps.megatron import steps as overlapped_steps
from megatron_pipemem.features.overlap_steps.megatron.optimizer import LateNorm, OverlappedOptimizer

SEQUENCE, VOCABULARY, HIDDEN = 16, 64, 32
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
            (steps whose gradients are a hundred times as large), ``evaluates`` (steps behind which there is an evaluation),
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
            settings = {**settings, "train_steps": case.get("steps", STEPS)}
        megatron_pipemem.enable(case["schedule"], **settings)
        chunks = case.get("chunks", 1)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.get("tp", 1),
            pipeline_model_parallel_size=case["pp"],
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            distributed_timeout_minutes=case.get("timeout_minutes", 30),
        )
        try:
            ahead = case.get("runs_ahead") if kind == "overlapped" else None
            with mock.patch.object(overlapped_optimizer, "CLEAN_STEPS", case.get("clean", 2)):
                shown[kind] = (training or Training)(case, ahead).run()
        finally:
            megatron_pipemem.disable()
            parallel_state.destroy_model_parallel()
    return shown


class Training:
    def __init__(self, case: dict, runs_ahead: int | None):
        self.case, self.runs_ahead = case, runs_ahead
        tp = case.get("tp", 1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        dtype = getattr(torch, case.get("dtype", "float32"))
        bf16 = dtype is torch.bfloat16
        dropout = 0.1 if case.get("dropout") else 0.0
        self.config = TransformerConfig(
            num_layers=case["pp"] * max(2, case.get("chunks", 1)),
            hidden_size=HIDDEN,
            num_attention_heads=2,
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            pipeline_model_parallel_size=case["pp"],
            virtual_pipeline_model_parallel_size=case["chunks"] if case.get("chunks", 1) > 1 else None,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=bf16,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            deallocate_pipeline_outputs=True,
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
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
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
        steps = range(case.get("steps", STEPS))
        self._stream = chain.from_iterable(_batches(step, case.get("microbatches", 8)) for step in steps)

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
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(overlapped_steps, "gain_without_barrier", lambda *_: 2.0))
            redo = stack.enter_context(
                mock.patch.object(OverlappedOptimizer, "redo", autospec=True, side_effect=OverlappedOptimizer.redo)
            )
            validate = stack.enter_context(
                mock.patch.object(
                    OverlappedOptimizer, "validate", autospec=True, side_effect=OverlappedOptimizer.validate
                )
            )
            steps = self.case.get("steps", STEPS)
            for step in range(steps):
                for chunk in self.chunks:
                    chunk.zero_grad_buffer()
                self.optimizer.zero_grad()
                losses.append(self._forward_backward(step, SPIKE if step in spikes else 1.0))
                if self._is_ahead(step, steps):
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
            "weights": [_digest(chunk.parameters()) for chunk in self.chunks],
            "state": _digest(_state(self.optimizer)),
            "groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
            ],
            "validated": validate.call_count,
            "redone": redo.call_count,
            "late": sum(isinstance(norm, LateNorm) for norm in norms),
        }

    def _is_ahead(self, step: int, steps: int) -> bool:
        begins = steps if self.runs_ahead is None else self.runs_ahead
        return begins <= step < steps - 1 and parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def _forward_backward(self, step: int, scale: float, forward_only: bool = False) -> list[str]:
        if self.case.get("gather") and forward_only:
            megatron_pipemem.settle()
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()
        number = self.case.get("microbatches", 8)
        goes_on = self.case.get("ahead") and not forward_only
        data = [self._stream] if goes_on else [_batches(step, number) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, scale, step),
            data_iterator=data if len(data) > 1 else data[0],
            model=self.chunks if len(data) > 1 else self.chunks[0],
            num_microbatches=number,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if self.case.get("gather") and forward_only:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()
        return [loss["loss"].item().hex() for loss in losses]


def _batches(step: int, number: int) -> Iterator[torch.Tensor]:
    for microbatch in range(number):
        generator = torch.Generator().manual_seed(
            10000 * step + 100 * microbatch + parallel_state.get_data_parallel_rank()
        )
        yield torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=generator)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _begun(step: int) -> str:
    return f"{step} in the pipeline of data-parallel rank {parallel_state.get_data_parallel_rank()}"


def _forward_step(scale: float, step: int, data, model):
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        _store().set(_begun(step), "")
    tokens = next(data)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, lambda output: (scale * output.mean(), {"loss": output.mean().detach()})


def _state(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                for _, value in sorted(part.optimizer.state[parameter].items()):
                    yield value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _digest(tensors) -> str:
    found = sha256()
    for tensor in tensors:
        found.update(tensor.detach().double().numpy().tobytes())
    return found.hexdigest()
