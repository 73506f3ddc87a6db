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
        assert hidden.communication.forward == pytest.approx(shown.communication.forward * part, rel=0.03)
        saved = shown.communication + hidden.communication * -1
        assert hidden.seconds.total == pytest.approx(shown.seconds.total - saved.total)
        assert hidden.seconds.weight == shown.seconds.weight
    assert layer(MODEL, Execution(tp_overlap=True), fast) == layer(MODEL, Execution(), fast)


def test_the_exchange_of_a_layer_follows_from_tokens_experts_and_link():
    found = [layer(EXPERTS, Execution(ep=ep), replace(CLUSTER, intra_node=Link(50.0, 0.0))) for ep in (1, 2, 4)]
    # Two all-to-all of 1,024 tokens for 2 experts each, of 2,048 channels of 2 bytes.
    whole = 2 * 1024 * 2 * 2048 * 2 / 50e9
    assert [each.exchange.forward for each in found] == pytest.approx([0, whole / 2, whole * 3 / 4])
    for each in found:
        assert each.exchange == each.communication and each.exchange.forward == each.exchange.input


def planned(megatron, **limits):
    run = replace(RUN, cluster=SLOW, parallelism=Parallelism(global_batch=32), flags=megatron)
    limits = {"tp": (4,), "micro_batch": (1,), "recompute": ("none",), "variant": ("plain",)} | limits
    return plan(run, limits=Limits(limits), top=200, search_seconds=0).plans


def test_megatrons_orders_keep_the_overlap_and_all_are_weighed_without():
    plans = planned({TP: True})
    kept = [each for each in plans if each.hides_messages]
    assert {each.schedule for each in kept} == {"1f1b", "interleaved"}
    for each in plans:
        assert (each.run.schedule.name == "stock") >= each.hides_messages
        assert (TP in each.run.flags) == each.hides_messages
    alone = planned({})
    assert sorted(each.seconds for each in plans if not each.hides_messages) == pytest.approx(
        sorted(each.seconds for each in alone)
    )
    assert plans[0].hides_messages and plans[0].seconds < alone[0].seconds


def test_pairs_of_microbatches_need_chunks_and_experts_on_several_ranks():
    run = replace(RUN, model=EXPERTS, parallelism=Parallelism(global_batch=32, ep=2), flags={EP: True})
    limits = {"tp": (1,), "pp": (2,), "micro_batch": (1,), "variant": ("plain", "pairs")}
    plans = plan(run, limits=Limits(limits), top=200, search_seconds=0).plans
    kept = [each for each in plans if each.hides_messages and is_stocks(each.run)]
    assert {each.schedule for each in kept} == {"interleaved"}
    assert {each.run.schedule.recompute for each in kept} <= {"none", "selective"}
    alone = plan(
        replace(run, parallelism=Parallelism(global_batch=32)), limits=Limits(limits), top=200, search_seconds=0
    )
    assert not any(each.hides_messages for each in alone.plans)


def test_documented_shares():
    """They are of F and I of all stages."""
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
    (shares,) = re.findall(
        r"it is (\d+) % for DeepSeek-V3 on H100\nwith 64 expert-parallel ranks, and (\d+) % with 8", page
    )
    run = load(Path(__file__).parents[2] / "configs" / "runs" / "deepseek-v3-1024xh100.yaml", Run)
    for ep, share in zip((64, 8), shares, strict=True):
        step = price(replace(run, parallelism=replace(run.parallelism, ep=ep)), Placement.linear(16))
        passes = sum(map(sum, (step.costs.forward, step.costs.backward_input)))
        assert round(100 * sum(each.total for each in step.exchange) / passes) == int(share)


EXCHANGING = replace(RUN, model=EXPERTS, cluster=SLOW, parallelism=Parallelism(global_batch=32, ep=4), flags={EP: True})
"""Experts whose tokens travel for a third of a forward."""


def test_pairs_are_planned_and_run_as_planned(tmp_path):
    limits = Limits({"tp": (1,), "pp": (2,), "micro_batch": (1,), "recompute": ("none",)})
    plans = plan(EXCHANGING, limits=limits, top=200, search_seconds=0).plans
    paired = {each.schedule: each for each in plans if each.variant == "pairs" and not is_stocks(each.run)}
    alone = {each.schedule: each for each in plans if each.variant == "plain"}
    assert {"zbv", "dualpipe-v"} <= paired.keys() and "dualpipe-v" not in alone
    assert 0.2 < paired["zbv"].step.exchange_share < 0.5
    for name, each in paired.items():
        assert each.run.pairs and each.passes.pairs and each.hides > 0
        assert each.makespan == simulate(each.passes, each.step.costs).makespan
        assert sum(each.losses.values()) < each.seconds and min(each.losses.values()) > -1e-12
        if name in alone:
            assert each.seconds < alone[name].seconds
        (order, text), (_, run) = run_files(each, tmp_path / f"{name}.yaml").items()
        assert Schedule.from_csv(text).pairs == each.passes.pairs and order.name in run and EP.replace("-", "_") in run
    # The step in pairs takes no less than the bound by which the planner leaves out others.
    for each in plans:
        if each.variant == "pairs":
            cut, step = each.run.parallelism, each.step
            bound = lower_bound(step.placement, cut.microbatches, step.costs, pairs=True)
            assert bound <= each.makespan * (1 + 1e-9)
    assert not any(each.variant == "pairs" for each in plan(replace(EXCHANGING, flags={}), limits=limits).plans)


def test_a_search_for_an_order_with_pairs_keeps_them():
    limits = Limits(
        {"tp": (1,), "pp": (2,), "micro_batch": (1,), "recompute": ("none",), "schedule": ("zb-h1", "search")}
    )
    plans = plan(EXCHANGING, limits=limits, top=200, search_seconds=0.2).plans
    found = [each for each in plans if each.schedule == "search" and each.run.pairs]
    assert found and all(each.passes.pairs for each in found)


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
    assert {each.run.parallelism.cp for each in free} == {1, 2}
    for each in free:
        cut = each.run.parallelism
        assert cut.tp * cut.cp * cut.pp * cut.dp == SLOW.num_devices
    assert {each.run.parallelism.cp for each in planned({}, tp=(1, 2))} == {1}
