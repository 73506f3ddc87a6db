"""``auto`` computes the head's weight gradient in I where a schedule would otherwise hold more than 1F1B, and that helps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pipemem.model import layout
from megatron_pipemem.model.model import Model
from megatron_pipemem.schedule.baseline import bytes_of_1f1b
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.tools.cli.plan import _table
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.early_head import has_early_head, with_early_head
from megatron_pipemem.tools.planner.memory import held
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.space import Limits
from megatron_pipemem.tools.planner.step import price

CLUSTER = load("h100-80g", Cluster)


def run_of(name: str, devices: int, schedule: str = "zb-h1", early_weights: str = "auto") -> Run:
    model = load(name, Model)
    sizes = {"tp": 4, "dp": 2, "ep": 8, "etp": 1} if model.experts else {"tp": 8}
    cut = Parallelism(pp=devices, sequence_parallel=True, **sizes).with_microbatches(2 * devices)
    cluster = replace(CLUSTER, nodes=cut.ranks // CLUSTER.devices_per_node)
    return Run(model, cluster, cut, ScheduleChoice(name=schedule, early_weights=early_weights))


def order_of(name: str, devices: int) -> Schedule:
    return build_schedule(name, num_devices=devices, num_microbatches=2 * devices)


def decision(run: Run, name: str = "zb-h1", layers: tuple[int, ...] | None = None) -> bool:
    order = order_of(name, run.parallelism.pp)
    return has_early_head(run, order, layers or layout.even(run.model, order.placement.model_stages))


@pytest.mark.parametrize(
    ("name", "devices", "waiting", "early"),
    [
        ("llama3-70b", 4, 1.062, 1.024),
        ("llama3-70b", 8, 1.112, 1.024),
        ("llama3-70b", 16, 1.211, 1.024),
        ("qwen3-32b", 8, 1.111, 1.0),
        ("gemma2-9b", 8, 1.750, 1.143),
        ("gpt-oss-20b", 8, 1.502, 1.0),
        ("nemotron-h-8b", 4, 1.150, 1.0),
        ("deepseek-v3", 8, 1.260, 1.130),
    ],
)
def test_a_large_vocabulary_has_an_early_head(name, devices, waiting, early):
    run, order = run_of(name, devices), order_of("zb-h1", devices)
    layers = layout.even(run.model, devices)
    steps = [price(each, order.placement, layers).costs for each in (run, with_early_head(run))]
    whole = bytes_of_1f1b(steps[0], order.placement, order.num_microbatches)
    assert whole is not None
    assert [max(peaks(order, each)) / whole for each in steps] == pytest.approx([waiting, early], abs=6e-4)
    assert decision(run)


@pytest.mark.parametrize(
    ("name", "devices", "schedule"),
    [
        ("llama3.1-405b", 8, "zb-h1"),  # another rank is fuller
        ("po-83.8b", 8, "zb-h1"),  # a small vocabulary
        ("kimi-k2", 8, "zb-h1"),
        ("llama3-70b", 8, "zbv"),  # nothing of the head waits while its rank is fullest
        ("llama3-70b", 8, "v-half"),  # less than 1F1B in any case
        ("llama3-70b", 8, "1f1b"),  # no W
        ("llama3-70b", 8, "gis"),
    ],
)
def test_a_head_waits_where_an_early_one_would_not_help(name, devices, schedule):
    assert not decision(run_of(name, devices), schedule)


def test_fewer_layers_beside_the_head_leave_room_for_it():
    run = run_of("llama3-70b", 8)
    assert decision(run) and not decision(run, layers=(10, 11, 11, 11, 10, 10, 9, 8))


@pytest.mark.parametrize("asked", ["none", "head", "experts_fc2"])
def test_a_users_choice_stays(asked):
    run = run_of("llama3-70b", 8, early_weights=asked)
    assert not decision(run)
    (found,) = plan(run, memory=1e13, limits=only(run), search_seconds=0).plans
    assert found.run.schedule.early_weights == asked


def only(run: Run) -> Limits:
    cut = run.parallelism
    sizes = {key: [getattr(cut, key)] for key in ("tp", "pp", "dp", "cp", "micro_batch")}
    return Limits(
        {**sizes, "schedule": [run.schedule.name], "recompute": ["none"], "variant": ["plain"], "slices": [1]}
    )


@pytest.mark.parametrize(("name", "early"), [("llama3-70b", "head"), ("qwen3-30b-a3b", "head,experts_fc2")])
def test_a_plan_names_the_head_and_keeps_experts_early(name, early):
    run = run_of(name, 8)
    (found,) = plan(run, memory=1e13, limits=only(run), search_seconds=0).plans
    assert decision(run, layers=found.step.layers)
    assert found.run.schedule.early_weights == early
    assert [cells[0] for cells, _ in _table([found], None)._rows] == ["zb-h1, early head"]


def test_the_memory_of_a_run_is_that_of_its_early_head():
    run = run_of("llama3-70b", 8)
    auto, head, none = (
        held(replace(run, schedule=replace(run.schedule, early_weights=text))) for text in ("auto", "head", "none")
    )
    assert auto == head and none is not None and head is not None
    assert max(none.device) > max(head.device)
