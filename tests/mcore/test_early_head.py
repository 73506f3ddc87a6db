"""A training run describes its model to the planner with the sizes on which bytes of activations depend."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_pipemem.mcore.step import early_head
from megatron_pipemem.mcore.step.early_head import described, has_early_head
from megatron_pipemem.mcore.step.extension import Step
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.tools.megatron import profiling
from megatron_pipemem.tools.planner.activations import embedding_bytes, head_bytes, layer_bytes
from tests.planner.test_profile import EXPERTS, FINE, GPT, HYBRID, LATENT, LLAMA, ODD

SHARED = Execution(micro_batch=2, tp=2, sequence_parallel=True, attention="unfused", precision="fp32")
MODELS = {
    "gpt": (replace(GPT, dropout=0.1, tied=True), Execution(tp=2, attention="unfused")),
    "llama": (LLAMA, replace(SHARED, rotary_percent=0.5)),
    "biases": (replace(LLAMA, bias="qkv_only", qk_norm=True), replace(SHARED, cp=2, precision="bf16")),
    "latent": (LATENT, replace(SHARED, recompute="selective", recompute_modules=("mla_up_proj", "mlp"))),
    "experts": (EXPERTS, replace(SHARED, ep=2, etp=1)),
    "odd experts": (ODD, replace(SHARED, ep=2, etp=1, recompute="full")),
    "fine": (FINE, replace(SHARED, ep=2, etp=1)),
    "hybrid": (HYBRID, SHARED),
}


def step_of(model: Model, execution: Execution) -> Step:
    """A step of a stage that Megatron would build for the model, without its layers."""
    built: Any = torch.nn.Linear(2, 2)
    built.pre_process, built.vocab_size = True, execution.vocabulary_rows(model) * execution.tp
    built.position_embedding_type = {"learned": "learned_absolute"}.get(model.position, model.position)
    built.rotary_percent = execution.rotary_percent
    if model.pattern is not None:
        cut = [model.pattern[:1], model.pattern[1:]]
        built.hybrid_layer_pattern = "/".join(("|".join(cut), *[model.mtp_pattern or ""] * model.mtp_layers))
    config = profiling._config(model, execution, model.kinds, profiling.LAST)
    config.transformer_impl = execution.implementation
    group = SimpleNamespace(size=lambda: execution.tp)
    return cast(
        Step,
        SimpleNamespace(
            chunks=[built],
            context=SimpleNamespace(config=config),
            groups=SimpleNamespace(tp=group, cp=SimpleNamespace(size=lambda: execution.cp)),
            full_microbatch=SimpleNamespace(sequences=execution.micro_batch, length=model.sequence),
            shape=SimpleNamespace(num_microbatches=4),
        ),
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_described_model_keeps_as_many_bytes(name):
    model, execution = MODELS[name]
    run = described(step_of(model, execution), Request("zb-h1"), lambda group: True)
    assert run.model.all_kinds == model.all_kinds and run.model.pieces == model.pieces
    found = run.execution
    for kind in dict.fromkeys(model.all_kinds):
        assert layer_bytes(run.model, found, kind) == layer_bytes(model, execution, kind)
    assert head_bytes(run.model, found) == head_bytes(model, execution)
    assert embedding_bytes(run.model, found) == embedding_bytes(model, execution)


@pytest.mark.parametrize(("together", "kept"), [(True, "sharded"), (False, "gathered")])
def test_gathered_inputs_wait_where_ranks_are_on_several_hosts(together, kept):
    run = described(step_of(*MODELS["llama"]), Request("zb-h1"), lambda group: together)
    assert run.execution.weight_inputs == kept


def test_a_model_without_sizes_has_a_head_that_waits(monkeypatch, caplog):
    """A configuration of another program lacks what a description needs; training goes on."""
    monkeypatch.setattr(early_head, "_pieces_of_stages", lambda step: (3, 3))
    step: Any = step_of(*MODELS["gpt"])
    step.program = SimpleNamespace(schedule=build_schedule("zb-h1", num_devices=2, num_microbatches=4))
    step.chunks[0].vocab_size = 100_000
    assert has_early_head(step, Request("zb-h1"), lambda group: True)
    step.context.config = SimpleNamespace(recompute_granularity=None)
    with caplog.at_level("INFO", logger=early_head.__name__):
        assert not has_early_head(step, Request("zb-h1"), lambda group: True)
    assert "transformer_impl" in caplog.text
