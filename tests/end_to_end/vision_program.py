"""Megatron-Bridge builds and trains a small Qwen3-VL: a tower, its projections, and a language model."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import loops
import torch
import torch.distributed as dist
from loops import descend, forward_backward, tokens_of, without_sync
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import unwrap_model
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

DDP = DistributedDataParallelConfig()
HIDDEN, LAYERS, VOCABULARY, SEQUENCE = 32, 4, 64, 24
IMAGE, START = 60, 61
"""Tokens that an image replaces, and the token before it."""
PATCH = 4
GRIDS = ((4, 4), (2, 6), (), (4, 2))
"""Patches of the image of every microbatch, of which four become a token; one has no image."""
STEPS = 2


def train(case: dict) -> dict:
    """Train a few steps; return the losses, and for every weight by name a hash of its values and of its last gradient."""
    provider = Qwen3VLModelProvider(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        vocab_size=VOCABULARY,
        seq_length=SEQUENCE,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        share_embeddings_and_output_weights=case["tied"],
        mrope_section=[2, 1, 1],
        vision_config=Qwen3VLVisionConfig(
            depth=2,
            hidden_size=16,
            num_heads=2,
            intermediate_size=24,
            patch_size=PATCH,
            out_hidden_size=HIDDEN,
            num_position_embeddings=36,
            deepstack_visual_indexes=list(range(case["deepstack"])),
        ),
        image_token_id=IMAGE,
        vision_start_token_id=START,
        deallocate_pipeline_outputs=True,
        **dict.fromkeys(case["frozen"], True),
    )
    provider.apply_overrides_and_finalize(
        dtype=torch.float32,
        overrides={
            "pipeline_model_parallel_size": dist.get_world_size(),
            "virtual_pipeline_model_parallel_size": case["chunks"],
            "pipeline_dtype": torch.float32,
            "attention_backend": AttnBackend.unfused,
            "bias_activation_fusion": False,
            **dict.fromkeys(loops.FUSED, False),
        },
    )
    models = provider.provide_distributed_model(DDP, fp16=False, bf16=False)
    _initialise(models)
    provider.finalize_model_grads_func = finalize_model_grads
    provider.no_sync_func = without_sync(models)
    losses = []
    for step in range(STEPS):
        for model in models:
            model.zero_grad_buffer()
        data = [_microbatches(step, bool(case["frozen"])) for _ in models]
        reports = forward_backward(models, _forward_step, data, len(GRIDS) * 2, SEQUENCE, forward_only=False)
        losses += [report["loss"].item().hex() for report in reports]
        descend(models)
    weights = {
        name: (_hash(value), _hash(value.main_grad) if value.requires_grad else "") for name, value in _named(models)
    }
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (losses, weights))
    return {
        "losses": next(own for own, _ in gathered if own),
        "weights": {name: value for _, own in gathered for name, value in sorted(own.items())},
    }


def _named(models: list) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every parameter with its layer's number in the model."""
    for model in models:
        whole = unwrap_model(model)
        first = {
            f"language_model.decoder.layers.{at}.": layer.layer_number for at, layer in enumerate(whole.decoder.layers)
        }
        for name, parameter in whole.named_parameters():
            local = next((prefix for prefix in first if name.startswith(prefix)), None)
            yield (name if local is None else f"layer {first[local]}: {name.removeprefix(local)}"), parameter


def _initialise(models: list) -> None:
    """Give every weight values that depend on its name alone."""
    with torch.no_grad():
        for name, parameter in _named(models):
            generator = torch.Generator().manual_seed(int(sha256(_shared(name).encode()).hexdigest()[:8], 16))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm" in name))


def _shared(name: str) -> str:
    return name.replace("output_layer", "embedding.word_embeddings")


def _hash(values: torch.Tensor) -> str:
    if not values.any():
        return "zeros"
    return sha256(values.detach().numpy().tobytes()).hexdigest()


def _microbatches(step: int, frozen: bool) -> Iterator[dict[str, torch.Tensor]]:
    for index, grid in enumerate(GRIDS * 2):
        grid = grid or (2, 2) * frozen  # without an image, nothing would be trained
        tokens = tokens_of(100 * step + index, (1, SEQUENCE + 1), START - 2)
        batch = {"tokens": tokens}
        if grid:
            patches = grid[0] * grid[1]
            tokens[0, 2], tokens[0, 3 : 3 + patches // 4] = START, IMAGE
            generator = torch.Generator().manual_seed(step + index)
            batch["pixel_values"] = torch.randn(patches, 3 * 2 * PATCH**2, generator=generator)
            batch["image_grid_thw"] = torch.tensor([[1, *grid]])
        yield batch


def _forward_step(data: Iterator[dict], model: torch.nn.Module):
    batch = dict(next(data))
    tokens = batch.pop("tokens")
    output = model(input_ids=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), **batch)

    def mean(losses: torch.Tensor):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, mean
