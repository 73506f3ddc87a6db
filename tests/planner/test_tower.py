"""A vision tower takes time and memory of the first stage, which gets fewer layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pipemem.model.counts import model_flops
from megatron_pipemem.model.model import Execution
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import known_model, load
from megatron_pipemem.tools.config.runs import FREEZES, Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.launch.command import command
from megatron_pipemem.tools.planner.balance import balance
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.prices import tower_price
from megatron_pipemem.tools.planner.profile import from_formulas
from megatron_pipemem.tools.planner.slices import why_not_sliced
from megatron_pipemem.tools.planner.space import Limits
from megatron_pipemem.tools.planner.step import price
from tests.watching.refusals import refused

H100 = load("h100-80g", Cluster)


def run(name: str, schedule: str = "zb-h1", images: int = 4, **flags: bool) -> Run:
    model = known_model(name)
    model = replace(model, tower=replace(model.tower, images=images), sequence=4096)
    cut = Parallelism(tp=4, pp=4, micro_batch=1, global_batch=16)
    return Run(model, replace(H100, nodes=2), cut, ScheduleChoice(name=schedule), flags=flags)


def without(asked: Run) -> Run:
    return replace(asked, model=replace(asked.model, tower=None))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half"])
def test_the_first_stage_gets_fewer_layers(schedule):
    asked = run("qwen2.5-vl-32b", schedule)
    with_tower, plain = balance(asked), balance(without(asked))
    assert sum(with_tower.best.layers) == sum(plain.best.layers) == 64
    assert with_tower.best.layers[0] < plain.best.layers[0]
    assert with_tower.best.seconds < with_tower.even.seconds


def test_seconds_and_bytes_of_the_tower_are_those_of_the_first_stage():
    asked, placement = run("qwen3-vl-32b"), Placement.linear(4)
    layers = (16,) * 4
    step, plain = price(asked, placement, layers), price(without(asked), placement, layers)
    tower = tower_price(asked.model, asked.execution, H100)
    assert [a - b for a, b in zip(step.work_seconds, plain.work_seconds, strict=True)] == pytest.approx(
        [tower.seconds.total, 0, 0, 0]
    )
    assert [a - b for a, b in zip(step.saved_bytes, plain.saved_bytes, strict=True)] == pytest.approx(
        [tower.kept_bytes.saved, 0, 0, 0]
    )
    assert step.static_bytes[0] - plain.static_bytes[0] == pytest.approx(tower.parameters * (2 + 4 + 12))
    assert from_formulas(asked.model, asked.execution, H100).first.parameters > tower.parameters
    per_patch = 27 * (4 * 1152**2 + 2 * 1152 * 4304 + 2 * 1024 * 1152)
    per_token = 4 * 4608 * (4608 + 5120)
    images = model_flops(asked.model) - model_flops(without(asked).model)
    assert images == 4 * 6 * (1024 * per_patch + 256 * per_token)


def test_more_images_take_longer_and_need_no_more_parameters():
    few, many = (tower_price(run("gemma-3-27b", images=count).model, Execution(), H100) for count in (1, 8))
    assert many.seconds.total > 7 * few.seconds.total and many.kept_bytes.saved == pytest.approx(
        8 * few.kept_bytes.saved, rel=0.02
    )
    assert many.parameters == few.parameters
    assert many.seconds.weight == many.kept_bytes.after_input == 0  # its weight gradients are computed in I


def test_layers_to_which_the_tower_adds_stay_on_the_first_stage():
    asked = run("qwen3-vl-8b", "v-half", images=64)
    layouts = balance(asked)
    assert layouts.best.layers[0] == 3 and layouts.even.layers[0] >= 3
    with refused("too-few-layers", "3"):
        price(asked, Placement.linear(4), (2, 11, 11, 12))


def test_what_is_frozen_has_no_weight_gradients():
    whole = run("qwen3-vl-8b")
    frozen = replace(whole, flags={FREEZES["language"]: True, FREEZES["tower"]: True})
    step, plain = (price(model, Placement.linear(4), (9,) * 4) for model in (frozen, whole))
    assert set(step.costs.backward_weight) == {0} != set(plain.costs.backward_weight)
    assert 0 < step.costs.backward_input[0] - step.costs.backward_input[1] < plain.costs.backward_weight[0] / 10
    assert all(a < b for a, b in zip(step.saved_bytes, plain.saved_bytes, strict=True))
    assert step.static_bytes[1] == pytest.approx(step.weight_bytes[1]) and step.weight_bytes == plain.weight_bytes
    assert step.optimizer_seconds < plain.optimizer_seconds / 10


def test_sequences_and_vocabulary_stay_whole():
    asked = run("qwen3-vl-8b")
    assert "whole sequences" in why_not_sliced(replace(asked, schedule=ScheduleChoice(name="auto", slices=2)))
    with refused("vocabulary-model"):
        predicted_memory(replace(asked, schedule=ScheduleChoice(name="zb-h1", vocab_cut="1")))
    answer = plan(asked, limits=Limits({"schedule": ["zb-h1"], "pp": [4], "tp": [4], "dp": [1]}))
    assert answer.plans and all("vocabulary" not in way.variant for way in answer.plans)


def test_our_own_script_trains_no_tower():
    with refused("unsupported-model", "model.tower"):
        command(run("qwen3-vl-8b"))
