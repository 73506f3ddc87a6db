"""mbridge builds a model from a Hugging Face configuration, loads weights, and exports them again."""

from __future__ import annotations

from contextlib import nullcontext

import consumer_models
import loops
import torch
from megatron.core.transformer.enums import ModelType

import megatron_pipemem

ModelType.encoder_and_decoder = (
    object()
)  # gone from Megatron-Core 0.19; without virtual stages this mbridge asks for it

import mbridge  # noqa: E402


def train(case: dict) -> dict:
    config = consumer_models.configuration(case["kind"], case["tied"])
    config.rope_theta = 10000.0  # where this mbridge looks for it; transformers 5 has it elsewhere
    bridge = mbridge.AutoBridge.from_config(config, dtype=torch.float32)
    bridge.set_extra_args(attention_backend="unfused", **dict.fromkeys(loops.FUSED, False))
    place = megatron_pipemem.place_model_chunks if case["placed"] else nullcontext
    with place():
        models = bridge.get_model(
            wrap_with_ddp=True,
            fp16=False,
            bf16=False,
            ddp_config={"use_distributed_optimizer": False, "overlap_grad_reduce": False},
        )
    bridge.load_weights(models, case["weights"], memory_efficient=True)
    return consumer_models.train(models, bridge.config, case["weights"], lambda: bridge.export_weights(models))
