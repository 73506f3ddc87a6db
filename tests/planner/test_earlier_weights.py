"""Plans, advice and layouts run W earlier where a rank would otherwise hold more than the fullest rank of 1F1B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pipemem.model import layout
from megatron_pipemem.model.activations import stage_bytes
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule.baseline import bytes_of_1f1b
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.tools.cli.advise import _name
from megatron_pipemem.tools.cli.plan import _table
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import SHIPPED, load
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.balance import balance
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.pricing import as_it_stands
from megatron_pipemem.tools.planner.space import Limits
from megatron_pipemem.tools.planner.step import price

CLUSTER = load("h100-80g", Cluster)
MODELS = sorted(path.stem for path in (SHIPPED / Model.config_folder).glob("*.yaml"))


def run_of(name: str, devices: int, schedule: str = "zb-h1", early_wgrad: str = "auto") -> Run:
    model = load(name, Model)
    sizes = {"tp": 4, "dp": 2, "ep": 8, "etp": 1} if model.experts else {"tp": 8}
    cut = Parallelism(pp=devices, sequence_parallel=True, **sizes).with_microbatches(2 * devices)
    cluster = replace(CLUSTER, nodes=cut.ranks // CLUSTER.devices_per_node)
    return Run(model, cluster, cut, ScheduleChoice(name=schedule, early_wgrad=early_wgrad))


def shares(run: Run) -> tuple[float, float]:
    """The peak over that of 1F1B, with W as published and with W as early as needed."""
    order = build_schedule(run.schedule.name, num_devices=run.parallelism.pp, num_microbatches=2 * run.parallelism.pp)
    costs = price(run, order.placement, layout.even(run.model, order.placement.model_stages)).costs
    whole = bytes_of_1f1b(costs, order.placement, order.num_microbatches)
    assert whole is not None
    moved = with_earlier_weights(order, costs)
    return max(peaks(order, costs)) / whole, max(peaks(moved, costs)) / whole


@pytest.mark.parametrize(
    ("name", "devices", "published"),
    [
        ("llama3-70b", 4, 1.062),
        ("llama3-70b", 8, 1.112),
        ("llama3-70b", 16, 1.211),
        ("qwen3-32b", 8, 1.111),
        ("gemma2-9b", 8, 1.750),
        ("gpt-oss-20b", 8, 1.502),
        ("nemotron-h-8b", 4, 1.150),
        ("deepseek-v3", 8, 1.260),
    ],
)
def test_zb_h1_holds_no_more_than_1f1b(name, devices, published):
    assert shares(run_of(name, devices)) == pytest.approx((published, 1.0), abs=6e-4)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("llama3-70b", "zbv"),  # nothing waits while the rank of the head is fullest
        ("llama3-70b", "v-half"),  # less than 1F1B in any case
    ],
)
def test_w_stays_where_moving_it_would_not_help(name, schedule):
    published, moved = shares(run_of(name, 8, schedule))
    assert published == moved


def test_unequal_stages_hold_no_more_than_1f1b_either():
    """1F1B's first rank, which holds most microbatches, has fewer layers than ranks in the middle."""
    way = as_it_stands(run_of("llama3.1-405b", 8))
    assert way.step.layers == (15, *[16] * 6, 15)
    assert way.has_earlier_weights and way.share_of_1f1b == pytest.approx(1.0)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_predicts_the_bytes_of_its_stages_as_the_planner_does(name):
    run = run_of(name, 4)
    for stages in (4, 8):
        order = build_schedule("zb-h1", num_devices=stages, num_microbatches=4)
        layers = layout.even(run.model, stages)
        assert stage_bytes(run.model, run.execution, layers) == price(run, order.placement, layers).costs.memory


def only(run: Run) -> Limits:
    cut = run.parallelism
    sizes = {key: [getattr(cut, key)] for key in ("tp", "pp", "dp", "cp", "micro_batch")}
    return Limits(
        {**sizes, "schedule": [run.schedule.name], "recompute": ["none"], "variant": ["plain"], "slices": [1]}
    )


def test_plans_and_advice_say_that_w_run_earlier_and_keep_auto():
    run = run_of("llama3-70b", 8)
    (way,) = plan(run, memory=1e13, limits=only(run), search_seconds=0).plans
    order = build_schedule("zb-h1", num_devices=8, num_microbatches=16)
    timeline = simulate(with_earlier_weights(order, way.step.costs), way.step.costs)
    assert (way.makespan, way.peak_bytes) == (timeline.makespan, way.step.held(timeline.peaks))
    assert way.makespan > simulate(order, way.step.costs).makespan
    assert way.share_of_1f1b == pytest.approx(1.0) and way.run.schedule.early_wgrad == "auto"
    assert [cells[0] for cells, _ in _table([way], None, None)._rows] == ["zb-h1, W earlier"]
    assert _name(as_it_stands(run)).endswith(", W earlier")


@pytest.mark.parametrize("asked", ["none", "head", "experts_fc2"])
def test_a_users_choice_stays(asked):
    run = run_of("llama3-70b", 8, early_wgrad=asked)
    (way,) = plan(run, memory=1e13, limits=only(run), search_seconds=0).plans
    assert way.run.schedule.early_wgrad == asked and not way.has_earlier_weights


def test_the_memory_and_the_layouts_of_a_run_are_those_with_earlier_w():
    run = run_of("llama3-70b", 8)
    auto, none = (replace(run, schedule=replace(run.schedule, early_wgrad=text)) for text in ("auto", "none"))
    of_auto, of_none = predicted_memory(auto), predicted_memory(none)
    assert of_auto is not None and of_none is not None and max(of_auto.device_bytes) < max(of_none.device_bytes)
    even = balance(auto).even
    assert even.layers == layout.even(run.model, 8) and even.peak_bytes == of_auto.device_bytes
    assert even.seconds > balance(none).even.seconds


def test_a_run_that_frees_memory_otherwise_keeps_every_w():
    run = run_of("llama3-70b", 8)
    for changes in (
        {"offload": "half"},
        {"recompute": "selective", "recompute_modules": ("core_attn", "layernorm", "activation")},
    ):
        assert not as_it_stands(replace(run, schedule=replace(run.schedule, **changes))).has_earlier_weights
