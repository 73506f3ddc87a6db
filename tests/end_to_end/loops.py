"""What programs that train on megatron.core alone share: a session of the plugin, a configuration, a step, and SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import megatron_pipemem
from megatron_pipemem.runtime.activation_ledger import is_quantised

# What needs a GPU.
FUSED = ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "persist_layer_norm")


@contextmanager
def session(schedule: str, settings: dict | None = None, chunks: int | None = None, **groups: object) -> Iterator[None]:
    """Enable a schedule and make Megatron's groups, by default for a pipeline of all ranks; at the end, undo both."""
    if schedule != "stock":
        megatron_pipemem.enable(schedule, **settings or {})
    parallel_state.initialize_model_parallel(
        **{"pipeline_model_parallel_size": dist.get_world_size()} | groups,
        virtual_pipeline_model_parallel_size=chunks if chunks and chunks > 1 else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        megatron_pipemem.disable()
        parallel_state.destroy_model_parallel()


def config_of(pipeline: int, chunks: int | None = None, tp: int = 1, **settings: object) -> TransformerConfig:
    return TransformerConfig(
        **{
            "hidden_size": 32,
            "num_attention_heads": 2,
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "pipeline_model_parallel_size": pipeline,
            "virtual_pipeline_model_parallel_size": chunks if chunks and chunks > 1 else None,
            "pipeline_dtype": torch.float32,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "deallocate_pipeline_outputs": True,
            **dict.fromkeys(FUSED, False),
        }
        | settings
    )


def tokens_of(seed: int, shape: tuple[int, int], vocabulary: int) -> torch.Tensor:
    """Random tokens, which are the same whenever they are read."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def outputs(model: torch.nn.Module, tokens: torch.Tensor, labels: bool = False, **more: object) -> torch.Tensor:
    """The model's logits for ``[b, s + 1]`` tokens but the last ones, or with ``labels`` the losses of predicting the next.

    ``more`` are other arguments of the model.
    """
    inputs = tokens[:, :-1]
    s = inputs.shape[1]
    mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    return model(inputs, torch.arange(s).expand_as(inputs), mask, labels=tokens[:, 1:] if labels else None, **more)


def log_probs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of each of ``[b, s + 1]`` tokens but the first ones, by the logits at the token before it."""
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]


def forward_backward(models: Sequence, step: Callable, data: Sequence, microbatches: int, length: int, **how) -> list:
    """Call Megatron's function with lists where there are several chunks."""
    how = {"micro_batch_size": 1} | how
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[*data] if len(models) > 1 else data[0],
        model=[*models] if len(models) > 1 else models[0],
        num_microbatches=microbatches,
        seq_length=length,
        **how,
    )


def without_sync(models: Sequence) -> object:
    """The value of ``no_sync_func`` for chunks in their DDP."""
    functions = [model.no_sync for model in models]
    return functions if len(functions) > 1 else functions[0]


@torch.no_grad()
def descend(models: Sequence[torch.nn.Module]) -> None:
    """Take a step of SGD."""
    for model in models:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter -= 0.1 * getattr(parameter, "main_grad", parameter.grad)


def digest(tensors) -> str:
    """A hash of the tensors' bits, or of the values that quantised ones stand for."""
    state = sha256()
    for tensor in tensors:
        values = tensor.dequantize() if is_quantised(tensor) else tensor
        state.update(values.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
