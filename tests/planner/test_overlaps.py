"""What Megatron's own schedules hide behind computing: priced with them, and never given up without its cost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import pipemem

from megatron_pipemem.model.model import Execution
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.tools.config.cluster import Link
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.prices import layer
from megatron_pipemem.tools.planner.run_prices import request_of
from megatron_pipemem.tools.planner.space import Limits, is_stocks
from megatron_pipemem.tools.planner.step import price
from megatron_pipemem.tools.planner.ways import run_files
from tests.planner.small_run import CLUSTER, MODEL, RUN

TP, EP = "tp-comm-overlap", "overlap-moe-expert-parallel-comm"
EXPERTS = replace(MODEL, experts=8, experts_per_token=2, expert_ffn=1024, activation="swiglu", bias="none")
SLOW = replace(CLUSTER, intra_node=Link(40.0), inter_node=Link(10.0))


def test_a_ring_shows_one_part_at_least_and_what_no_product_hides():
    cut = Execution(tp=4, sequence_parallel=True)
    fast, slow = (replace(CLUSTER, intra_node=Link(speed, 0.0)) for speed in (1000.0, 1.0))
    for cluster, part in ((fast, 1 / 4), (slow, 0.97)):
        shown, hidden = (layer(MODEL, replace(cut, tp_overlap=overlap), cluster) for overlap in (False, True))
        assert hidden.communication_seconds.forward == pytest.approx(
            shown.communication_seconds.forward * part, rel=0.03
        )
        saved = shown.communication_seconds + hidden.communication_seconds * -1
        assert hidden.seconds.total == pytest.approx(shown.seconds.total - saved.total)
        assert hidden.seconds.weight == shown.seconds.weight
    assert layer(MODEL, Execution(tp_overlap=True), fast) == layer(MODEL, Execution(), fast)


def test_the_exchange_of_a_layer_follows_from_tokens_experts_and_link():
    layer_prices = [layer(EXPERTS, Execution(ep=ep), replace(CLUSTER, intra_node=Link(50.0, 0.0))) for ep in (1, 2, 4)]
    # Two all-to-all of 1,024 tokens for 2 experts each, of 2,048 channels of 2 bytes.
    whole = 2 * 1024 * 2 * 2048 * 2 / 50e9
    assert [layer_price.exchange_seconds.forward for layer_price in layer_prices] == pytest.approx(
        [0, whole / 2, whole * 3 / 4]
    )
    for layer_price in layer_prices:
        assert (
            layer_price.exchange_seconds == layer_price.communication_seconds
            and layer_price.exchange_seconds.forward == layer_price.exchange_seconds.input
        )


def planned(megatron, **limits):
    run = replace(RUN, cluster=SLOW, parallelism=Parallelism(global_batch=32), flags=megatron)
    limits = {"tp": (4,), "micro_batch": (1,), "recompute": ("none",), "variant": ("plain",)} | limits
    return plan(run, limits=Limits(limits), top=200, search_seconds=0).plans


def test_megatrons_orders_keep_the_overlap_and_all_are_weighed_without():
    plans = planned({TP: True})
    kept = [way for way in plans if way.hides_messages]
    assert {way.schedule for way in kept} == {"1f1b", "interleaved"}
    for way in plans:
        assert (way.run.schedule.name == "stock") >= way.hides_messages
        assert (TP in way.run.flags) == way.hides_messages
    alone = planned({})
    assert sorted(way.seconds for way in plans if not way.hides_messages) == pytest.approx(
        sorted(way.seconds for way in alone)
    )
    assert plans[0].hides_messages and plans[0].seconds < alone[0].seconds


def test_pairs_of_microbatches_need_chunks_and_experts_on_several_ranks():
    run = replace(RUN, model=EXPERTS, parallelism=Parallelism(global_batch=32, ep=2), flags={EP: True})
    limits = {"tp": (1,), "pp": (2,), "micro_batch": (1,), "variant": ("plain", "pairs")}
    plans = plan(run, limits=Limits(limits), top=200, search_seconds=0).plans
    kept = [way for way in plans if way.hides_messages and is_stocks(way.run)]
    assert {way.schedule for way in kept} == {"interleaved"}
    assert {way.run.schedule.recompute for way in kept} <= {"none", "selective"}
    alone = plan(
        replace(run, parallelism=Parallelism(global_batch=32)), limits=Limits(limits), top=200, search_seconds=0
    )
    assert not any(way.hides_messages for way in alone.plans)


def test_documented_shares():
    """They are of F and I of all stages."""
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
    (shares,) = re.findall(
        r"it is (\d+)% for DeepSeek-V3 on H100\nwith 64 expert-parallel ranks, and (\d+)% with 8", page
    )
    run = load(Path(__file__).parents[2] / "configs" / "runs" / "deepseek-v3-1024xh100.yaml", Run)
    for ep, share in zip((64, 8), shares, strict=True):
        step = price(replace(run, parallelism=replace(run.parallelism, ep=ep)), Placement.linear(16))
        passes = sum(map(sum, (step.costs.forward, step.costs.backward_input)))
        assert round(100 * sum(passes.total for passes in step.exchange_seconds) / passes) == int(share)


EXCHANGING = replace(RUN, model=EXPERTS, cluster=SLOW, parallelism=Parallelism(global_batch=32, ep=4), flags={EP: True})
"""Experts whose tokens travel for a third of a forward."""


def test_pairs_are_planned_and_run_as_planned(tmp_path):
    limits = Limits({"tp": (1,), "pp": (2,), "micro_batch": (1,), "recompute": ("none",)})
    plans = plan(EXCHANGING, limits=limits, top=200, search_seconds=0).plans
    paired = {way.schedule: way for way in plans if way.variant == "pairs" and not is_stocks(way.run)}
    alone = {way.schedule: way for way in plans if way.variant == "plain"}
    assert {"zbv", "dualpipe-v"} <= paired.keys() and "dualpipe-v" not in alone
    assert 0.2 < paired["zbv"].step.exchange_share < 0.5
    for name, way in paired.items():
        assert way.run.pairs and way.passes.pairs and way.saved_by_pairs > 0
        assert way.makespan == simulate(way.passes, way.step.costs).makespan
        assert sum(way.losses.values()) < way.seconds and min(way.losses.values()) > -1e-12
        if name in alone:
            assert way.seconds < alone[name].seconds
        (order, text), (_, run) = run_files(way, tmp_path / f"{name}.yaml").items()
        assert Schedule.from_csv(text).pairs == way.passes.pairs and order.name in run and EP.replace("-", "_") in run
    # The step in pairs takes no less than the bound by which the planner leaves out others.
    for way in plans:
        if way.variant == "pairs":
            cut, step = way.run.parallelism, way.step
            bound = lower_bound(step.placement, cut.microbatches, step.costs, pairs=True)
            assert bound <= way.makespan * (1 + 1e-9)
    assert not any(way.variant == "pairs" for way in plan(replace(EXCHANGING, flags={}), limits=limits).plans)


def test_a_search_for_an_order_with_pairs_keeps_them():
    limits = Limits(
        {"tp": (1,), "pp": (2,), "micro_batch": (1,), "recompute": ("none",), "schedule": ("zb-h1", "auto")}
    )
    plans = plan(EXCHANGING, limits=limits, top=200, search_seconds=0.2).plans
    searched = [way for way in plans if way.schedule == "auto" and way.run.pairs]
    assert searched and all(way.passes.pairs for way in searched)


def test_a_run_of_our_schedules_with_the_flag_runs_in_pairs():
    run = replace(RUN, flags={EP: True}, schedule=ScheduleChoice("v-half"))
    assert request_of(run).pairs and not request_of(replace(run, schedule=ScheduleChoice("stock"))).pairs


def test_the_command_says_what_the_overlap_is_worth(tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text(
        "model: {num_layers: 8, hidden_size: 2048, num_attention_heads: 16, vocab_size: 32000, seq_length: 1024,"
        " untie_embeddings_and_output_weights: true, attention_dropout: 0.0, hidden_dropout: 0.0}\n"
        "cluster: {base: h100-80g, nodes: 1, intra_node: {gb_per_s: 40}}\n"
        "global_batch: 16\ntp: 4\npp: 2\ntp_comm_overlap: true\n"
    )
    more = ["--only", "tp=4", "--only", "pp=2", "--only", "recompute=none", "--search-seconds", "0", "--top", "1"]
    text = pipemem("plan", source, *more)
    assert text.exit_code == 0 and "stay with stock" in " ".join(text.stdout.split()), text.output
    facts = json.loads(pipemem("plan", source, *more, "--json").stdout)
    assert facts["plans"][0]["hides_messages"] and not facts["without_overlap"]["hides_messages"]
    assert facts["plans"][0]["seconds"] < facts["without_overlap"]["seconds"]
    ours = pipemem("plan", source, *more, "--only", "schedule=zb-h1")
    assert "no listed plan keeps the overlap" in " ".join(ours.stdout.split()), ours.output
    source.write_text(source.read_text().replace("tp_comm_overlap", "sequence_parallel"))
    assert json.loads(pipemem("plan", source, *more, "--json").stdout)["without_overlap"] is None


def test_context_parallelism_is_chosen_where_it_is_left_open():
    free = planned({}, cp=(1, 2), tp=(1, 2))
    assert {way.run.parallelism.cp for way in free} == {1, 2}
    for way in free:
        cut = way.run.parallelism
        assert cut.tp * cut.cp * cut.pp * cut.dp == SLOW.num_devices
    assert {way.run.parallelism.cp for way in planned({}, tp=(1, 2))} == {1}
