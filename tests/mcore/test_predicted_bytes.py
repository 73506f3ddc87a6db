"""A training run describes its model to the planner with the sizes on which bytes of activations depend."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pipemem.mcore.step import predicted_bytes
from megatron_pipemem.mcore.step.predicted_bytes import PredictedBytes, described
from megatron_pipemem.model.activations import embedding_bytes, head_bytes, layer_bytes, stage_bytes
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.megatron import profiling
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

LAYERS = (1, GPT.pieces - 1)


def step_of(model: Model, execution: Execution) -> Any:
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
    built.config = config
    group = SimpleNamespace(size=lambda: execution.tp)
    return SimpleNamespace(
        chunks=[built],
        context=SimpleNamespace(config=config),
        groups=SimpleNamespace(tp=group, cp=SimpleNamespace(size=lambda: execution.cp)),
        full_microbatch=SimpleNamespace(sequences=execution.micro_batch, length=model.sequence),
        shape=SimpleNamespace(num_microbatches=4),
        pipeline=SimpleNamespace(placement=Placement.linear(2), group=None),
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_described_model_keeps_as_many_bytes(name):
    model, execution = MODELS[name]
    same, description = described(step_of(model, execution), Request("zb-h1"), True)
    assert same.all_kinds == model.all_kinds and same.pieces == model.pieces
    for kind in dict.fromkeys(model.all_kinds):
        assert layer_bytes(same, description, kind) == layer_bytes(model, execution, kind)
    assert head_bytes(same, description) == head_bytes(model, execution)
    assert embedding_bytes(same, description) == embedding_bytes(model, execution)


@pytest.mark.parametrize(("together", "kept"), [(True, "sharded"), (False, "gathered")])
def test_gathered_inputs_wait_where_ranks_are_on_several_hosts(together, kept):
    _, execution = described(step_of(*MODELS["llama"]), Request("zb-h1"), together)
    assert execution.wgrad_inputs == kept


@pytest.fixture
def one_rank(monkeypatch):
    """A copy of the model on this process alone, on one host."""
    monkeypatch.setattr(predicted_bytes, "groups_of_copy", lambda groups, pipeline: [])
    monkeypatch.setattr(predicted_bytes, "is_on_one_host", lambda group: True)


class ProgramStore:
    """Stands for the programs of a run, which take the bytes over."""

    def __init__(self) -> None:
        self.memory: Any = "not set"

    def set_predicted_bytes(self, memory) -> None:
        self.memory = memory


def test_the_programs_hear_of_the_bytes_once_for_each_model(monkeypatch, one_rank):
    monkeypatch.setattr(predicted_bytes, "_pieces_of_stages", lambda step: LAYERS)
    model, execution = MODELS["gpt"]
    step, extension = step_of(model, execution), PredictedBytes(Request("zb-h1"))
    step.program_store = ProgramStore()
    extension.choose(step)
    assert step.program_store.memory == stage_bytes(model, execution, LAYERS)
    step.context.config = None  # is not read again
    extension.choose(step)
    assert step.program_store.memory == stage_bytes(model, execution, LAYERS)
    step.shape.num_microbatches = 1
    extension.choose(step)
    assert step.program_store.memory is None, "nothing waits"


def test_a_model_without_sizes_keeps_every_w(monkeypatch, caplog, one_rank):
    """A configuration of another program lacks what a description needs; training goes on."""
    for layers, named in ((None, "no numbers"), ((9, 9), "18 layers"), (LAYERS, "params_dtype")):
        monkeypatch.setattr(predicted_bytes, "_pieces_of_stages", lambda step, layers=layers: layers)
        step = step_of(*MODELS["gpt"])
        step.program_store = ProgramStore()
        if named == "params_dtype":
            step.context.config = SimpleNamespace(recompute_granularity=None)
        with caplog.at_level("INFO", logger=predicted_bytes.__name__):
            PredictedBytes(Request("zb-h1")).choose(step)
        assert step.program_store.memory is None and named in caplog.text
