"""What Megatron's own schedules hide behind computing: priced with them, and never given up without its cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from commands import pipemem

from megatron_pipemem.config.cluster import Link
from megatron_pipemem.config.model import Execution
from megatron_pipemem.config.runs import Parallelism, ScheduleChoice
from megatron_pipemem.planner.memory import request_of
from megatron_pipemem.planner.planning import plan
from megatron_pipemem.planner.prices import layer
from megatron_pipemem.planner.space import Limits
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


def test_tokens_for_experts_travel_while_the_other_microbatch_computes():
    cut = Execution(ep=4)
    fast, slow = (replace(CLUSTER, intra_node=Link(speed, 0.0)) for speed in (1000.0, 0.1))
    for cluster, hides in ((fast, True), (slow, False)):
        shown, hidden = (layer(EXPERTS, replace(cut, ep_overlap=overlap), cluster) for overlap in (False, True))
        assert (hidden.communication.total == 0) == hides
        assert hidden.communication.total < shown.communication.total
        computing = shown.seconds.total - shown.communication.total
        assert hidden.seconds.total >= computing * (1 - 1e-9)


def planned(megatron, **limits):
    run = replace(RUN, cluster=SLOW, parallelism=Parallelism(global_batch=32), megatron=megatron)
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
    run = replace(RUN, model=EXPERTS, parallelism=Parallelism(global_batch=32, ep=2), megatron={EP: True})
    limits = {"tp": (1,), "pp": (2,), "micro_batch": (1,), "variant": ("plain",)}
    plans = plan(run, limits=Limits(limits), top=200, search_seconds=0).plans
    kept = [each for each in plans if each.hides_messages]
    assert {each.schedule for each in kept} == {"interleaved"}
    assert {each.run.schedule.recompute for each in kept} <= {"none", "selective"}
    alone = plan(
        replace(run, parallelism=Parallelism(global_batch=32)), limits=Limits(limits), top=200, search_seconds=0
    )
    assert not any(each.hides_messages for each in alone.plans)


def test_a_run_of_our_schedules_with_the_flag_runs_in_pairs():
    run = replace(RUN, megatron={EP: True}, schedule=ScheduleChoice("v-half"))
    assert request_of(run).pairs and not request_of(replace(run, schedule=ScheduleChoice("stock"))).pairs


def test_the_command_says_what_the_overlap_is_worth(tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text(
        "model: {layers: 8, hidden: 2048, heads: 16, vocabulary: 32000, sequence: 1024}\n"
        "cluster: {base: h100-80g, nodes: 1, intra_node: {gb_per_s: 40}}\n"
        "parallelism: {global_batch: 16, tp: 4, pp: 2, dp: 1}\nmegatron: {tp-comm-overlap: true}\n"
    )
    more = ["--only", "tp=4", "--only", "pp=2", "--only", "recompute=none", "--search-seconds", "0", "--top", "1"]
    text = pipemem("plan", source, *more)
    assert text.exit_code == 0 and "stay with stock" in " ".join(text.stdout.split()), text.output
    facts = json.loads(pipemem("plan", source, *more, "--json").stdout)
    assert facts["plans"][0]["hides_messages"] and not facts["without_overlap"]["hides_messages"]
    assert facts["plans"][0]["seconds"] < facts["without_overlap"]["seconds"]
    ours = pipemem("plan", source, *more, "--only", "schedule=zb-h1")
    assert "no listed plan keeps the overlap" in " ".join(ours.stdout.split()), ours.output
    source.write_text(source.read_text().replace("tp-comm-overlap", "sequence-parallel"))
    assert json.loads(pipemem("plan", source, *more, "--json").stdout)["without_overlap"] is None


def test_context_parallelism_is_chosen_where_it_is_left_open():
    free = planned({}, cp=(1, 2), tp=(1, 2))
    assert {each.run.parallelism.cp for each in free} == {1, 2}
    for each in free:
        cut = each.run.parallelism
        assert cut.tp * cut.cp * cut.pp * cut.dp == SLOW.num_devices
    assert {each.run.parallelism.cp for each in planned({}, tp=(1, 2))} == {1}
