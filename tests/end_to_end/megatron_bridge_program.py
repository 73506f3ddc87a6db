"""Megatron-Bridge builds a model from a folder of Hugging Face, loads its weights, and exports them again."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import consumer_models
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
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
            **dict.fromkeys(consumer_models.FUSED, False),
        },
    )
    if case["by_provider"]:
        place = megatron_pipemem.place_model_chunks if case["placed"] else nullcontext
        with place():
            models = provider.provide_distributed_model(DDP, fp16=False, bf16=False)
    else:
        chunks = megatron_pipemem.build_model_chunks(partial(_provide, provider))
        models = [DistributedDataParallel(provider, DDP, chunk) for chunk in chunks]
    bridge.load_hf_weights(models, case["weights"])
    export = partial(bridge.export_hf_weights, models, cpu=True, show_progress=False)
    return consumer_models.train(models, provider, case["weights"], export)


def _provide(provider, pg_collection, **chunk) -> torch.nn.Module:
    provider._pg_collection = pg_collection  # where it takes the groups of a model from
    return provider.provide(**chunk)
