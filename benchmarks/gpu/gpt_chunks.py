"""Megatron's GPT, built as chunks of a pipeline without ``megatron.training``, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import megatron_pipemem
from megatron_pipemem.tools.megatron.profiling import FlashAttention


@dataclass(frozen=True)
class Size:
    """Of the model and its microbatches. ``layers`` are those of one pipeline rank."""

    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def message(self) -> dict[str, int]:
        """What a forward-backward function is told of the messages."""
        return {"seq_length": self.sequence, "micro_batch_size": self.batch}


def open_pipelines(devices: int, chunks: int, tensor: int = 1, experts: int = 1, graph: bool = False) -> None:
    """Make Megatron's groups for pipelines of ``devices`` ranks with ``chunks`` each, and seed its random numbers.

    Args:
        tensor: ranks that share each layer.
        experts: data-parallel ranks that share the experts of a layer.
        graph: draw the random numbers as CUDA graphs need it.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=devices,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        expert_model_parallel_size=experts,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=graph)


def make_config(size: Size, devices: int, chunks: int, layers: str, **options) -> TransformerConfig:
    """``chunks`` are those of one rank that Megatron knows of, ``layers`` as for ``builder``."""
    return TransformerConfig(
        **{
            "num_layers": size.layers * devices,
            "transformer_impl": "transformer_engine" if layers == "te" else "local",
            "hidden_size": size.hidden,
            "num_attention_heads": size.heads,
            "pipeline_model_parallel_size": devices,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
            "microbatch_group_size_per_vp_stage": devices if chunks > 1 else None,
            "params_dtype": size.dtype,
            "pipeline_dtype": size.dtype,
            "bf16": size.dtype is torch.bfloat16,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
            "deallocate_pipeline_outputs": True,
            "batch_p2p_comm": chunks == 1,
            "overlap_p2p_comm": chunks > 1,
            **options,
        }
    )


def builder(
    size: Size, config: TransformerConfig, layers: str, position: str = "learned_absolute"
) -> Callable[..., GPTModel]:
    """What ``megatron_pipemem.build_model_chunks`` calls for every chunk.

    Args:
        layers: ``local``, Megatron's own with fused attention, or ``te``, Transformer Engine's.
        position: ``GPTModel``'s kind of position embedding.
    """

    def build(*, pre_process: bool, post_process: bool, vp_stage: int | None = None, pg_collection) -> GPTModel:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=layers == "te", vp_stage=vp_stage)
        if layers == "local":
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = FlashAttention
        model = GPTModel(
            config,
            spec,
            size.vocabulary,
            size.sequence,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type=position,
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        ).cuda()
        return model.to(size.dtype)

    return build


def same_values(model: GPTModel, deviation: float = 0.1) -> None:
    """Give a chunk weights that depend on the global layer alone, so that every placement starts from the same model."""
    for name, parameter in model.named_parameters():
        key = name
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            key = f"{model.decoder.layers[int(local)].layer_number}.{rest}"
        if parameter.dim() == 1:
            continue
        generator = torch.Generator(parameter.device)
        generator.manual_seed(sum(ord(c) * 31**i for i, c in enumerate(key)) % 2**31)
        with torch.no_grad():
            values = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(values * deviation)


def training(
    size: Size, layers: str, devices: int, chunks: int, microbatches: int, position: str = "learned_absolute", **options
) -> Callable[[], None]:
    """Build this rank's chunks for the schedule that is enabled, and return what runs a step of one pipeline on them.

    Args:
        layers: as for ``builder``, like ``position``.
        options: of ``TransformerConfig``.
    """
    open_pipelines(devices, chunks, options.get("tensor_model_parallel_size", 1))
    config = make_config(size, devices, chunks, layers, **options)
    models = megatron_pipemem.build_model_chunks(builder(size, config, layers, position))
    data = [batches(size) for _ in models]

    def step() -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if chunks > 1 else data[0],
            model=models if chunks > 1 else models[0],
            num_microbatches=microbatches,
            **size.message,
        )

    return step


def batches(size: Size, step: int = 0) -> Iterator[dict[str, torch.Tensor | None]]:
    """Endless, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    device = torch.cuda.current_device()
    positions = torch.arange(size.sequence).repeat(size.batch, 1).to(device)
    while True:
        tokens = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=generator).to(device)
        yield {
            "input_ids": tokens[:, :-1],
            "position_ids": positions,
            "attention_mask": None,
            "labels": tokens[:, 1:].contiguous(),
        }


def forward_step(data, model, return_schedule_plan=False):
    """As training scripts write it."""
    forward = model.build_schedule_plan if return_schedule_plan else model
    return forward(**next(data)), partial(_loss)


def _loss(output: torch.Tensor):
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}
