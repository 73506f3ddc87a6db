"""Megatron-Bridge builds a model from a folder of Hugging Face, loads its weights, and exports them again."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import consumer_models
import loops
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend

import megatron_pipemem

DDP = DistributedDataParallelConfig()


def train(case: dict) -> dict:
    bridge = AutoBridge.from_hf_pretrained(case["weights"])
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.apply_overrides_and_finalize(
        dtype=torch.float32,
        overrides={
            "pipeline_model_parallel_size": dist.get_world_size(),
            "virtual_pipeline_model_parallel_size": case["chunks"],
            "pipeline_dtype": torch.float32,
            "variable_seq_lengths": True,
            "attention_backend": AttnBackend.unfused,
            "moe_token_dispatcher_type": "alltoall",
            "apply_rope_fusion": False,
            **dict.fromkeys(loops.FUSED, False),
        },
    )
    if case["by_provider"]:
        place = megatron_pipemem.place_model_chunks if case["placed"] else nullcontext
        with place():
            adapt = _with_adapters if case.get("adapters") else None
            models = provider.provide_distributed_model(DDP, fp16=False, bf16=False, pre_wrap_hook=adapt)
    else:
        chunks = megatron_pipemem.build_model_chunks(partial(_provide, provider))
        models = [DistributedDataParallel(provider, DDP, chunk) for chunk in chunks]
    bridge.load_hf_weights(models, case["weights"])
    export = partial(bridge.export_hf_weights, models, cpu=True, show_progress=False)
    return consumer_models.train(models, provider, case["weights"], export)


def _with_adapters(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Freeze the chunks, and give their linear layers adapters whose values depend on their shapes alone."""
    models = LoRA(dim=4, alpha=8)(models, training=True)
    for model in models:
        for parameter in model.parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(parameter.numel())
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return models


def _provide(provider, pg_collection, **chunk) -> torch.nn.Module:
    provider._pg_collection = pg_collection  # where it takes the groups of a model from
    return provider.provide(**chunk)
