"""Slices in the planner: their seconds and bytes against sums made by hand, and plans that choose them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from refusals import refused

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.features.slices.prices import slice_tokens
from megatron_pipemem.features.vocabulary.orders import with_barriers
from megatron_pipemem.model.counts import attention_share
from megatron_pipemem.model.model import Execution
from megatron_pipemem.part_costs import Passes
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.tools.config.runs import Parallelism, ScheduleChoice
from megatron_pipemem.tools.launch.command import planned_flags
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.planning import LITTLE, plan
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown, layer
from megatron_pipemem.tools.planner.slices import (
    LEAST_SLICED_GAIN,
    SHORTEST_SLICE,
    doubt_of,
    part_tokens,
    sliced_step,
    why_not_sliced,
    with_slices,
)
from megatron_pipemem.tools.planner.space import Limits
from megatron_pipemem.tools.planner.step import price
from megatron_pipemem.tools.planner.variants import BESIDE_COLLECTIVES, run_step
from megatron_pipemem.tools.planner.ways import facts
from tests.planner.small_run import CLUSTER, MODEL, RUN

GROUPED = replace(MODEL, kv_heads=4, norm="rmsnorm", position="rope", bias="none")
CUT = Parallelism(tp=2, pp=2, dp=2, micro_batch=2, global_batch=16, sequence_parallel=True)


def sliced(n: int, cut: Parallelism = CUT, recompute: str = "none", **changes):
    return replace(
        RUN,
        model=GROUPED,
        parallelism=cut,
        schedule=ScheduleChoice("seq1f1b", slices=n, recompute=recompute),
        **changes,
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("n", [2, 4])
def test_causal_attention_grows_from_slice_to_slice(n: int, recompute: str):
    """By counting pairs of queries and keys, in the units of the whole sequence's square."""
    step = sliced_step(sliced(n, recompute=recompute), Placement.linear(2), layers=(4, 4))
    b, s, width, tp = 2, 1024, 16 * 128, 2
    square = 4 * 4 * b * s * s * width / tp / CLUSTER.flops  # scores and values of the four layers, not halved
    forward, back = step.costs.forward, step.costs.backward_input
    again = 1 if recompute == "full" else 0
    part = s // n
    for stage in range(2):
        for at in range(1, n):
            # Queries of the slice times all keys up to its own: causal pairs are half of what is counted.
            more = 2 * part * part / s**2 * square
            place = stage * n + at
            assert forward[place] - forward[place - 1] == pytest.approx(more, rel=1e-6)
            assert back[place] - back[place - 1] == pytest.approx((2 + again) * more, rel=1e-6)
    assert step.costs.backward_weight[0] == pytest.approx(step.costs.backward_weight[1])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_all_slices_take_what_the_whole_takes_and_what_small_products_lose(recompute: str):
    placement, n = Placement.linear(2), 4
    step = sliced_step(sliced(n, recompute=recompute), placement, layers=(4, 4))
    whole = price(sliced(1, recompute=recompute), placement, layers=(4, 4))
    for of_slices, of_whole in zip(step.work_seconds, whole.work_seconds, strict=True):
        assert of_whole < of_slices < 1.5 * of_whole
    # Without latencies and half-empty waves nothing is lost: products as large as these make waves next to nothing.
    large = replace(GROUPED, layers=2, hidden=16384, heads=128, ffn=65536, sequence=2**17, vocabulary=256)
    quick = replace(CLUSTER, intra_node=replace(CLUSTER.intra_node, latency_us=0.0))
    cut = Parallelism(tp=4, pp=2, global_batch=4, sequence_parallel=True)
    runs = [replace(sliced(count, cut, recompute), model=large, cluster=quick) for count in (n, 1)]
    step, whole = sliced_step(runs[0], placement, layers=(1, 1)), price(runs[1], placement, layers=(1, 1))
    assert step.work_seconds == pytest.approx(whole.work_seconds, rel=2e-3)
    assert step.recompute_seconds == pytest.approx(whole.recompute_seconds, rel=2e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_keys_and_values_stay_from_the_first_forward_to_the_last_backward(recompute: str):
    placement, n = Placement.linear(2), 4
    step = sliced_step(sliced(n, recompute=recompute), placement, layers=(4, 4))
    takes, gives, rest = (step.costs.memory[kind] for kind in (Kind.F, Kind.I, Kind.W))
    keys = 4 * 2 * (4 // 2) * 128 * 1024 * 2 * 2  # layers, keys and values, groups, channels, tokens, sequences, bytes
    whole = price(sliced(1, recompute=recompute), placement, layers=(4, 4))
    for stage, saved in enumerate(whole.saved_bytes):
        own = slice(stage * n, stage * n + n)
        assert sum(takes[own]) == pytest.approx(saved + (keys if recompute == "full" else 0))
        assert sum(takes[own]) + sum(gives[own]) + sum(rest[own]) == pytest.approx(0)
        first, *others = takes[own]
        assert first - others[0] == pytest.approx(keys)
        assert others == pytest.approx([others[0]] * (n - 1))
        middle = gives[own][1:-1]
        assert gives[own][-1] - middle[0] == pytest.approx(keys)
        assert gives[own][0] - middle[0] == pytest.approx(-2 * keys)


def test_a_plan_chooses_slices():
    """One sequence on many ranks: whole microbatches leave all of them but one idle."""
    run = replace(RUN, parallelism=Parallelism(global_batch=2))
    limits = {"pp": [4], "dp": [2], "tp": [1], "variant": ["plain"]}
    answer = plan(run, limits=Limits(limits | {"slices": [1, 2, 4]}), top=40, search_seconds=0.0)
    best, whole = answer.plans[0], plan(run, limits=Limits(limits), top=1, search_seconds=0.0).plans[0]
    assert best.run.schedule.slices == 4
    assert best.seconds < whole.seconds * 0.8
    assert (whole.run.schedule.slices or 1) == 1
    for way in answer.plans:
        if (n := way.run.schedule.slices or 1) == 1:
            continue
        cut = way.run.parallelism
        options = way.run.schedule_options
        assert options["slices"] == n
        schedule = build_schedule(way.schedule, num_devices=cut.pp, num_microbatches=cut.microbatches, **options)
        schedule = with_earlier_weights(schedule, way.step.costs)
        validate(schedule, way.step.costs)
        timeline = simulate(schedule, way.step.costs)
        assert way.makespan == pytest.approx(timeline.makespan)
        assert way.peak_bytes == pytest.approx(way.step.held(timeline.peaks))
        bound = lower_bound(way.step.placement, Units.equal(cut.microbatches, n), way.step.costs)
        assert bound <= way.makespan * (1 + 1e-9)
    assert {way.run.schedule.slices for way in answer.plans} >= {2, 4}


@pytest.mark.parametrize(
    ("changes", "proposed"),
    [
        ({"global_batch": 2}, True),
        ({"global_batch": 16}, False),  # many microbatches
        ({"global_batch": 2, "sequence": 2**12}, False),
        ({"global_batch": 2, "slices": 1}, False),  # the run names its slices
    ],
)
def test_a_plan_tries_slices_by_itself_where_they_may_pay(changes: dict, proposed: bool):
    sequence, slices = changes.get("sequence", 2**15), changes.get("slices")
    run = replace(RUN, model=replace(GROUPED, sequence=sequence), schedule=ScheduleChoice(slices=slices))
    run = replace(run, parallelism=Parallelism(global_batch=changes["global_batch"]))
    limits = {"pp": [4], "dp": [1], "tp": [2], "micro_batch": [1], "variant": ["plain"]}
    free, whole, named = (
        plan(run, limits=Limits(limits | more), top=5, search_seconds=0.0)
        for more in ({}, {"slices": [1]}, {"slices": [1, 2, 4, 8]})
    )
    if proposed:
        assert free.plans[0].run.schedule.slices in (2, 4, 8)
        assert free.plans[0].seconds < 0.8 * whole.plans[0].seconds
        assert [facts(way) for way in free.plans] == [facts(way) for way in named.plans]
    else:
        assert [facts(way) for way in free.plans] == [facts(way) for way in whole.plans]
        assert (free.considered, free.rejected) == (whole.considered, whole.rejected)


def test_slices_that_gain_little_are_proposed_to_nobody():
    """With 2 microbatches per rank only the best of them gains enough; with 3, none. A user may still name them."""
    for batch, sliced_plans in ((8, 1), (12, 0)):
        run = replace(RUN, model=replace(GROUPED, sequence=2**15), parallelism=Parallelism(global_batch=batch))
        limits = {"pp": [4], "dp": [1], "tp": [2], "micro_batch": [1], "variant": ["plain"]}
        free, whole, named = (
            plan(run, limits=Limits(limits | more), top=5, search_seconds=0.0)
            for more in ({}, {"slices": [1]}, {"slices": [1, 2, 4, 8]})
        )
        assert [facts(way) for way in free.plans[sliced_plans:]] == [facts(way) for way in whole.plans][
            : 5 - sliced_plans
        ]
        assert (
            sum(way.units.parts > 1 for way in free.plans)
            == sliced_plans
            < sum(way.units.parts > 1 for way in named.plans)
        )
        most = whole.plans[0].seconds * (1 - LEAST_SLICED_GAIN)
        assert all(way.seconds < most for way in free.plans[:sliced_plans]) and free.rejected[LITTLE] > 0
        assert named.plans[sliced_plans].seconds > most


def test_slices_shorter_than_timed_kernels_are_in_doubt():
    lengths = {SHORTEST_SLICE: None, SHORTEST_SLICE // 2: f"{SHORTEST_SLICE // 2:,} tokens"}
    for tokens, words in lengths.items():
        run = with_slices(replace(RUN, model=replace(GROUPED, sequence=4 * tokens)), 4)
        doubt = doubt_of([RUN, run])
        assert doubt is None if words is None else words in doubt


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": {"moe-expert-capacity-factor": 1.0}},
        {"model": replace(GROUPED, sequence=2**15, dropout=0.1)},
        {"parallelism": Parallelism(cp=2, global_batch=2), "flags": {"cp-comm-type": "p2p"}},
    ],
)
def test_a_plan_says_why_there_can_be_no_slices(changes: dict):
    run = replace(RUN, model=replace(GROUPED, sequence=2**15), parallelism=Parallelism(global_batch=2))
    run = replace(run, **changes)
    limits = {"pp": [2], "tp": [2], "micro_batch": [1], "variant": ["plain"], "schedule": ["1f1b"]}
    answer = plan(run, memory=1e13, limits=Limits(limits), search_seconds=0.0)
    assert answer.plans and all(way.run.schedule.slices is None for way in answer.plans)
    (cut,) = {way.run.parallelism for way in answer.plans}
    reason = why_not_sliced(with_slices(replace(run, parallelism=cut), 2))
    assert answer.rejected[reason] > 0


def test_a_searched_order_of_slices_is_no_slower_than_its_families():
    run = replace(RUN, parallelism=Parallelism(global_batch=4))
    only = {"pp": [2], "dp": [2], "tp": [2], "micro_batch": [1], "recompute": ["none"], "slices": [2]}
    known = plan(run, limits=Limits(only), top=1, search_seconds=0.0).plans[0]
    way = plan(run, limits=Limits(only), top=1, search_seconds=0.3).plans[0]
    assert way.seconds <= known.seconds * (1 + 1e-9)
    if way.passes is not None:
        assert way.passes.units.parts == 2
        validate(way.passes, way.step.costs, way.step.room(run.cluster.memory_bytes))


LONG = replace(GROUPED, sequence=2**16)


def test_slices_of_equal_flops_take_as_long_forward():
    """Up to what the planner thinks linear layers lose, and attention does not."""
    run = replace(sliced(8), model=LONG)
    run = replace(run, schedule=replace(run.schedule, slice_cut="flops"))
    tokens, share = part_tokens(run, 8), attention_share(LONG)
    assert tokens == slice_tokens(2**16, 8, "flops", share, multiple=2) and tokens[0] > 2 * tokens[-1]
    step = sliced_step(run, Placement.linear(2), layers=(4, 4))
    forward = step.costs.forward
    assert max(forward[:8]) < 1.15 * min(forward[:8])
    even = sliced_step(
        replace(run, schedule=replace(run.schedule, slice_cut="tokens")), Placement.linear(2), layers=(4, 4)
    )
    assert max(even.costs.forward[:8]) > 2 * min(even.costs.forward[:8])
    assert step.work_seconds == pytest.approx(even.work_seconds, rel=0.01)
    assert step.recompute_seconds == pytest.approx(even.recompute_seconds, rel=0.01)
    for kind in (Kind.F, Kind.I, Kind.W):
        assert sum(step.costs.memory[kind][:8]) == pytest.approx(sum(even.costs.memory[kind][:8]))
    assert all(mine >= theirs for mine, theirs in zip(step.buffer_bytes, even.buffer_bytes, strict=True))
    by_tokens = {link: seconds for link, seconds in even.costs.p2p.items()}
    assert step.costs.p2p == pytest.approx(by_tokens, rel=0.01)


def test_a_plan_chooses_how_to_cut():
    run = replace(RUN, model=LONG, parallelism=Parallelism(global_batch=2))
    limits = {"pp": [4], "dp": [1], "tp": [2], "variant": ["plain"], "slices": [8]}
    counted = {}
    for ways in (["tokens"], ["flops"], ["tokens", "flops"]):
        counted[len(ways), ways[0]] = plan(
            run, limits=Limits(limits | {"slice_cut": ways}), top=1, search_seconds=0.0
        ).plans[0]
    even, flops, best = counted.values()
    assert flops.seconds < even.seconds and best.seconds == pytest.approx(flops.seconds)
    assert best.run.schedule.slice_cut == "flops"
    assert "--pipemem-slice-cut flops" in " ".join(planned_flags(best.run))
    with refused("bad-choice", "slice_cut", kind=ConfigError):
        Limits({"slice_cut": ["time"]}).check(RUN)


SHARED = replace(CUT, cp=2, dp=1)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_context_parallel_ranks_keep_the_keys_of_whole_sequences(recompute: str):
    """Each gathers them slice by slice, over links whose bytes are counted here."""
    n, placement = 4, Placement.linear(2)
    alone, shared = (
        sliced_step(sliced(n, cut, recompute), placement, layers=(4, 4)) for cut in (replace(CUT, dp=1), SHARED)
    )
    keys = 4 * 2 * (4 // 2) * 128 * 1024 * 2 * 2  # layers, keys and values, groups, channels, tokens, sequences, bytes
    for kind, (first, others), times in ((Kind.F, (0, 1), 1), (Kind.I, (0, 1), -2), (Kind.I, (3, 1), 1)):
        for step in (alone, shared):
            changes = step.costs.memory[kind]
            assert changes[first] - changes[others] == pytest.approx(times * keys)
    for step in (alone, shared):
        total = sum(sum(step.costs.memory[kind][:n]) for kind in (Kind.F, Kind.I, Kind.W))
        assert total == pytest.approx(0)
    half = replace(sliced(n, replace(CUT, dp=1), recompute), model=replace(GROUPED, sequence=512))
    half = sliced_step(half, placement, layers=(4, 4))
    sent = 4 * CLUSTER.link(2, 2).seconds(keys / 4 / n / 2)  # of a layer and slice to the other rank
    square = 4 * 4 * 2 * 1024**2 * 16 * 128 / 2 / CLUSTER.flops / 2  # a rank's share of scores and values
    for at in range(n):
        pairs = (2 * at + 1) / n**2  # of queries and keys
        of_half = half.costs.forward[at] - square / 2 * pairs
        assert shared.costs.forward[at] == pytest.approx(of_half + square * pairs + sent, rel=1e-6)


def test_a_plan_combines_slices_with_context_parallelism():
    run = replace(RUN, model=replace(GROUPED, sequence=2**16), parallelism=Parallelism(cp=2, global_batch=2))
    limits = {"pp": [4], "dp": [1], "tp": [1], "micro_batch": [1], "variant": ["plain"], "recompute": ["none"]}
    free, whole = (
        plan(run, memory=1e13, limits=Limits(limits | more), top=1, search_seconds=0.0).plans[0]
        for more in ({}, {"slices": [1]})
    )
    assert free.units.parts in (2, 4, 8) and free.seconds < whole.seconds * (1 - LEAST_SLICED_GAIN)
    flags = " ".join(planned_flags(free.run))
    assert "--context-parallel-size 2" in flags and "--cp-comm-type all_gather" in flags
    assert "cp-comm-type" not in " ".join(planned_flags(whole.run))
    assert doubt_of([free.run]) is None and "2,048 tokens" in doubt_of([with_slices(free.run, 16)])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallelism": replace(CUT, pp=1)}, "several pipeline ranks"),
        ({"parallelism": replace(CUT, cp=2), "flags": {"cp-comm-type": "a2a"}}, "all_gather"),
        ({"model": replace(GROUPED, mtp_layers=1)}, "plain attention"),
        ({"model": replace(GROUPED, kv_lora_rank=64)}, "plain attention"),
        ({"model": replace(GROUPED, sequence=1026)}, "4 equal slices"),
    ],
)
def test_what_is_not_cut_into_slices(changes: dict, why: str):
    run = replace(sliced(4), **changes)
    assert why in why_not_sliced(run)
    rejected = plan(
        replace(run, parallelism=replace(run.parallelism, dp=1)),
        limits=Limits({"slices": [4], "tp": [1], "micro_batch": [1]}),
        search_seconds=0.0,
    )
    assert any(why in reason for reason in rejected.rejected)


def test_slices_of_a_configuration():
    run = sliced(4)
    assert run.schedule_options == {"slices": 4}
    assert "slices=4" in " ".join(planned_flags(run))
    whole, again = run.with_parts(1), run.with_parts(2)
    assert (whole.units.are_whole, whole.schedule.name) == (True, run.schedule.name)
    assert (again.units.parts, again.schedule.name) == (2, "auto")
    with refused("no-slices", kind=ConfigError):
        ScheduleChoice("stock", slices=2)
    with refused("bad-choice", 3, kind=ConfigError):
        Limits({"slices": [3]}).check(RUN)
    with pytest.raises(ConfigError):
        ScheduleChoice("seq1f1b", slices=0)


@pytest.mark.parametrize(("algorithm", "barriers"), [("off", 0), ("1", 2), ("2", 1)])
def test_what_a_run_of_slices_holds(algorithm: str, barriers: int):
    run = replace(sliced(4), schedule=ScheduleChoice("v-half", slices=4, vocab_cut=algorithm))
    placement, layers = Placement.v_shape(2), (2, 2, 2, 2)
    slowdown = MeasuredSlowdown(layer=Passes(*[BESIDE_COLLECTIVES] * 3)) if barriers else None
    plain, step = sliced_step(run, placement, layers, slowdown), run_step(run, placement, layers)
    middle = slice(4, 12)
    assert step.costs.memory[Kind.F][middle] == plain.costs.memory[Kind.F][middle], (
        "keys and values with the first slice"
    )
    assert step.costs.forward[middle] == plain.costs.forward[middle]
    base = build_schedule("v-half", num_devices=2, num_microbatches=run.parallelism.microbatches, slices=4)
    timeline = simulate(with_barriers(base, barriers, step.costs), step.costs)
    assert predicted_memory(run).device_bytes == pytest.approx(step.held(timeline.peaks))
    whole = replace(run, schedule=ScheduleChoice("v-half", vocab_cut=algorithm))
    assert max(predicted_memory(run).device_bytes) < max(predicted_memory(whole).device_bytes)


def test_context_parallel_messages_pass_twice_backward():
    """Keys and values again, and their gradients; over links so slow that attention hides next to nothing."""
    slow = replace(CLUSTER, inter_node=replace(CLUSTER.inter_node, gb_per_s=0.001))
    price_of = layer(GROUPED, Execution(cp=8), slow)
    nbytes = 2 * 4 * 128 * 1024 / 8 * 2
    ring = 7 * slow.inter_node.seconds(nbytes)
    assert price_of.communication_seconds.forward == pytest.approx(ring, rel=0.01)
    assert price_of.communication_seconds.input == pytest.approx(2 * price_of.communication_seconds.forward)
