"""Train a GPT in a loop of one's own on Megatron-Core, without megatron.training, under a schedule of this package.

torchrun --nproc-per-node 4 examples/training_loop.py
torchrun --nproc-per-node 4 -m megatron_pipemem run --cpu examples/training_loop.py     # without a GPU
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import megatron_pipemem

SEQUENCE, VOCABULARY, MICROBATCHES = 32, 128, 8
CHUNKS = 2  # of the model per rank: as many as the schedule needs


def configuration() -> TransformerConfig:
    return TransformerConfig(
        num_layers=8,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=dist.get_world_size(),
        virtual_pipeline_model_parallel_size=CHUNKS,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def batches(step: int) -> Iterator[torch.Tensor]:
    """Yield sequences that count upwards from a random token."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        first = torch.randint(VOCABULARY, (1, 1), generator=generator)
        yield (first + torch.arange(SEQUENCE + 1)).remainder(VOCABULARY).cuda()


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple:
    tokens = next(data)
    places = torch.arange(SEQUENCE, device=tokens.device)[None]
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)
    losses = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def train(steps: int = 20) -> list[float]:
    """Return the losses of the steps, on the last rank."""
    megatron_pipemem.enable("v-half")  # before the model is built, on every rank
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=dist.get_world_size(), virtual_pipeline_model_parallel_size=CHUNKS
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = configuration()
    chunks = megatron_pipemem.build_model_chunks(  # in place of a call of GPTModel
        lambda **ends: GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, **ends)
    )
    models = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk.cuda()) for chunk in chunks]
    config.no_sync_func = [model.no_sync for model in models]
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    losses = []
    for step in range(steps):
        for model in models:
            model.zero_grad_buffer()
        seen = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[batches(step) for _ in models],
            model=models,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
        )
        losses += [sum(value["loss"].item() for value in seen) / len(seen)] if seen else []
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        optimizer.step()
    return losses


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("this is a program for several ranks; start it with: torchrun --nproc-per-node 4 " + __file__)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for step, loss in enumerate(train()):
        print(f"step {step}: {loss:.4f}")
    dist.destroy_process_group()
