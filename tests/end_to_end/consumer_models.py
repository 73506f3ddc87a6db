"""What programs that train with Megatron are given in the tests: a model in a folder of Hugging Face, and batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from loops import descend, digest, forward_backward, log_probs_of, outputs, tokens_of, without_sync
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file, save_file

HIDDEN, INNER, VOCABULARY, LAYERS = 32, 48, 64, 4
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
STEPS = ((5, 9, 16), (3,), (12, 7))
"""Lengths of the sequences of every second microbatch: another number of microbatches per step."""


def configuration(kind: str, tied: bool, layers: int = LAYERS):
    from transformers import AutoConfig  # takes seconds, which processes that only collect tests need not spend

    return AutoConfig.for_model(
        kind,
        architectures=[ARCHITECTURES[kind]],
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.0,
        tie_word_embeddings=tied,
    )


def write_model(folder: Path, kind: str, tied: bool, layers: int = LAYERS) -> dict:
    """Write configuration and weights; return what a case needs to know of them."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    heads = {"q": HIDDEN, "k": HIDDEN // 2, "v": HIDDEN // 2}
    for layer in range(layers):
        own = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            **{f"self_attn.{name}_proj.weight": (size, HIDDEN) for name, size in heads.items()},
            **{f"self_attn.{name}_proj.bias": (size,) for name, size in heads.items() if kind == "qwen2"},
            "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            **{f"mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")},
            "mlp.down_proj.weight": (HIDDEN, INNER),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    generator = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 + ("norm" in name) for name, shape in shapes.items()}
    configuration(kind, tied, layers).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return {"kind": kind, "tied": tied, "weights": str(folder)}


def microbatches(step: int) -> Iterator[torch.Tensor]:
    for index, length in enumerate(STEPS[step] * 2):
        yield tokens_of(100 * step + index, (1, length + 1), VOCABULARY)


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module):
    tokens = next(data)

    def log_probabilities(logits: torch.Tensor):
        own = log_probs_of(logits, tokens)
        return -own.mean(), {"log_probs": own.detach().clone(), "tokens": tokens.shape[1] - 1}

    return outputs(model, tokens), log_probabilities


def train(models: list, config, weights: str, export) -> dict:
    """Export, then for every step compute log-probabilities and train the chunks in their DDP, then export again.

    Returns the names of what was exported otherwise than it was loaded, the log-probabilities, and a hash of the trained
    weights.
    """
    loaded, exported = load_file(f"{weights}/model.safetensors"), _copied(export())
    wrong = sorted(name for name in loaded | exported if not _equal(loaded.get(name), exported.get(name)))
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = without_sync(models)
    seen = []
    for step, lengths in enumerate(STEPS):
        for forward_only in (True, False):
            for model in models:
                model.zero_grad_buffer()
            data = [microbatches(step) for _ in models]
            reports = forward_backward(models, forward_step, data, 2 * len(lengths), 1, forward_only=forward_only)
            seen.append([[report["tokens"], report["log_probs"].tolist()] for report in reports])
        descend(models)
    trained = _copied(export())
    return {"wrong": wrong, "seen": seen, "trained": digest(trained[name] for name in sorted(trained))}


def _copied(exported) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in exported}


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
