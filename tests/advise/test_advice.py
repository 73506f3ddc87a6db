"""Ways are priced as the planner prices them, and what is proposed holds what it promises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from measured_steps import as_measured

from megatron_pipemem.model import layout
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import Timeline
from megatron_pipemem.tools.advise import advice as advice_module
from megatron_pipemem.tools.advise.advice import AS_FAST, CUT, ROOM, SAME_MEMORY, Advice, _best, advise, changed_flags
from megatron_pipemem.tools.advise.consumers import BRIDGE, NEMO_RL, SWIFT, VERL, changes
from megatron_pipemem.tools.config.cluster import GIB
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import all_flags
from megatron_pipemem.tools.launch.feasibility import refusal
from megatron_pipemem.tools.planner.balance import at_start
from megatron_pipemem.tools.planner.explanation import measured_slowdown_of
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.pricing import as_it_stands
from megatron_pipemem.tools.planner.replay import Replay
from megatron_pipemem.tools.planner.slices import LEAST_SLICED_GAIN
from megatron_pipemem.tools.planner.space import Limits
from tests.watching.refusals import refused

RUNS = Path(__file__).parents[2] / "configs" / "runs"


def stock(name: str, **changes) -> Run:
    """A run of this repository under Megatron's own 1F1B, with its layers shared out evenly."""
    run = load(RUNS / f"{name}.yaml", Run)
    flags = {key: value for key, value in run.flags.items() if "layout" not in key}
    choice = replace(run.schedule, name="stock")
    return replace(run, schedule=choice, flags=flags, parallelism=replace(run.parallelism, **changes))


LLAMA, QWEN = stock("llama3-70b-64xh100"), stock("qwen3-30b-a3b-16xh100")


NEAR = replace(LLAMA, cluster=replace(LLAMA.cluster, memory_gib=as_it_stands(LLAMA).peak / 0.97 / GIB, reserved_gib=0))
"""A run that leaves 3 % of its devices' memory free."""
FEW = ("1f1b", "zb-h1", "zbv", "v-half")
"""Schedules without the many numbers of chunks of Megatron's interleaved one, which take seconds to compare."""


def of_many_queues(run: Run) -> Run:
    """The run on devices of which Megatron demands no single hardware queue, so that the planner's prices are the answer's."""
    return replace(run, cluster=replace(run.cluster, max_connections=None))


def check_proposals(advice: Advice) -> None:
    assert advice.proposals and next(iter(advice.proposals.values())).order.name == "zb-h1"
    for kind, way in advice.proposals.items():
        assert refusal(way.run) is None
        if kind == "less memory":
            assert way.peak < advice.today.peak and way.seconds <= advice.today.seconds * (1 + AS_FAST)
        else:
            assert way.peak <= advice.today.peak * (1 + SAME_MEMORY) and way.seconds < advice.today.seconds


def test_proposals_hold_what_they_promise_at_the_planners_prices():
    """One of them computes the head's weight gradient in I, and one runs W earlier, so that they fit the run's memory."""
    near = of_many_queues(NEAR)
    advice = advise(near, names=FEW)
    check_proposals(advice)
    ways = {way.order.name: way for way in advice.proposals.values()}
    assert {name: way.run.schedule.early_wgrad for name, way in ways.items()} == {
        "zb-h1": "auto", "zbv": "auto", "v-half": "head"
    }  # fmt: skip
    assert {name for name, way in ways.items() if way.has_earlier_weights} == {"zb-h1"}
    cut = LLAMA.parallelism
    allowed = {key: [getattr(cut, key)] for key in ("tp", "pp", "dp", "cp", "micro_batch")}
    for name, way in ways.items():
        run = replace(near, schedule=replace(LLAMA.schedule, early_wgrad=way.run.schedule.early_wgrad))
        named = {"schedule": [name], "recompute": [run.schedule.recompute], "variant": ["plain"]}
        (planned,) = plan(run, memory=1e13, limits=Limits({**allowed, **named}), search_seconds=0).plans
        assert (way.seconds, way.peak_bytes) == (planned.seconds, planned.peak_bytes)
        added, gone = changed_flags(NEAR, way.run)
        before, after = all_flags(NEAR), all_flags(way.run)
        assert before | added == before | {name: value for name, value in after.items() if name != "pipemem-report"}
        assert gone == {}


def test_the_flag_for_pairs_is_named_where_experts_are_far_apart():
    far = replace(QWEN.cluster, devices_per_node=2, nodes=8)
    sizes = replace(QWEN.parallelism, ep=8, dp=4, pp=4, global_batch=64, etp=1)
    run = replace(QWEN, cluster=far, parallelism=replace(sizes, ep=4))
    near, alone = advise(QWEN, names=("1f1b", "zb-h1"), may_pair_passes=True), advise(run, names=("1f1b", "zb-h1"))
    advice = advise(run, names=("1f1b", "zb-h1"), may_pair_passes=True)
    paired = advice.proposals["pairs"]
    assert advice.verdict == "pairs" and not any(way.run.pairs for way in (*alone.proposals.values(), alone.today))
    added, _ = changed_flags(run, paired.run)
    assert added["overlap-moe-expert-parallel-comm"] is True and added["moe-token-dispatcher-type"] == "alltoall"
    assert refusal(paired.run) is None
    assert paired.gain(advice.today) > max(way.gain(alone.today) for way in alone.proposals.values()) + AS_FAST
    assert near.today.step.exchange_share < advice.today.step.exchange_share
    flag = {"overlap-moe-expert-parallel-comm": True}
    kept = replace(run, flags=run.flags | flag, schedule=paired.run.schedule)
    kept = advise(kept, names=("1f1b", "zb-h1"))
    assert kept.today.run.pairs and kept.verdict != "pairs"


def of_large_vocabulary(**settings: object) -> Run:
    """A model of eight layers and a head that takes as long as four of them, on four ranks."""
    model = replace(LLAMA.model, layers=8, vocabulary=400_000, **settings)
    return replace(LLAMA, model=model, parallelism=replace(LLAMA.parallelism, pp=4, dp=2, global_batch=16))


def test_a_large_vocabulary_is_cut_where_that_is_faster():
    run = of_many_queues(of_large_vocabulary())
    whole, advice = advise(run, names=FEW), advise(run, names=FEW, may_cut_vocabulary=True)
    cut = advice.proposals[CUT]
    assert advice.best is cut and CUT not in whole.proposals
    others = [way for way in (whole.stock, *whole.proposals.values()) if way is not None]
    assert cut.seconds < min(way.seconds for way in others) - AS_FAST * advice.today.seconds
    added, _ = changed_flags(run, cut.run)
    assert added["pipemem-vocab-cut"] == cut.run.schedule.vocab_cut and refusal(cut.run) is None
    # As the planner prices it.
    sizes = run.parallelism
    allowed = {key: [getattr(sizes, key)] for key in ("tp", "pp", "dp", "cp", "micro_batch")}
    named = {"schedule": [cut.order.name], "recompute": ["none"], "variant": [cut.variant]}
    planned = plan(run, memory=1e13, limits=Limits({**allowed, **named}), search_seconds=0).plans
    assert cut.seconds in [way.seconds for way in planned]


def test_a_cut_vocabulary_is_priced_only_where_equal_ranks_would_gain_by_it(monkeypatch):
    monkeypatch.setattr(advice_module, "with_cut_vocabulary", None)  # calling it would raise
    assert CUT not in advise(of_many_queues(LLAMA), names=FEW, may_cut_vocabulary=True).proposals


def test_few_microbatches_of_long_sequences_are_cut_into_slices():
    cut = LLAMA.parallelism
    sizes = replace(cut, micro_batch=1, global_batch=2 * cut.dp)
    run = of_many_queues(replace(LLAMA, model=replace(LLAMA.model, sequence=2**17), parallelism=sizes))
    assert "same memory, slices" not in advise(run).proposals
    advice = advise(run, may_slice=True)
    way = advice.proposals["same memory, slices"]
    assert way.units.parts > 1 and refusal(way.run) is None
    assert way.peak <= advice.today.peak * (1 + SAME_MEMORY)
    whole = [proposal.seconds for proposal in advice.proposals.values() if proposal.units.are_whole]
    assert whole and way.seconds < min(whole) * (1 - LEAST_SLICED_GAIN)
    flag = "variable-seq-lengths"
    unequal = advise(replace(run, flags=run.flags | {flag: True}), may_slice=True)
    assert "same memory, slices" not in unequal.proposals and flag in unequal.why_whole and advice.why_whole is None
    allowed = {key: [getattr(sizes, key)] for key in ("tp", "pp", "dp", "cp", "micro_batch")}
    named = {"schedule": [way.order.name], "slices": [way.units.parts], "slice_cut": ["tokens"]}
    limits = Limits({**allowed, **named, "recompute": [run.schedule.recompute], "variant": ["plain"]})
    (planned,) = plan(run, memory=1e13, limits=limits, search_seconds=0).plans
    assert (way.seconds, way.peak_bytes) == (planned.seconds, planned.peak_bytes)


@pytest.mark.parametrize(("microbatches", "usual", "demanded"), [(8, ["gis"], ["zbv"]), (30, ["gis"], [])])
def test_proposals_are_those_of_the_order_that_devices_demand(microbatches, usual, demanded):
    """The fastest order in many queues is not the fastest in one, or not faster than stock's, which stays as long."""
    run = stock("98b-40xa100", chunks=2, global_batch=microbatches)
    free, queued = (advise(one, names=("gis", "zbv")) for one in (of_many_queues(run), run))
    for advice, names in ((free, usual), (queued, demanded)):
        assert [way.order.name for way in advice.proposals.values()] == names
        assert all(way.seconds < advice.today.seconds * (1 - AS_FAST) for way in advice.proposals.values())
    assert free.today.seconds == queued.today.seconds and free.one_queue is None
    assert (queued.one_queue is not None) == bool(demanded)


def test_a_long_step_stays_as_it_is():
    even = replace(LLAMA, parallelism=replace(LLAMA.parallelism, pp=2, tp=8, dp=4, global_batch=4 * 512))
    fast = [kind for kind in advise(even).proposals if kind != "less memory"]
    assert fast == []


def test_few_layouts_are_simulated_where_a_partition_leaves_a_stage_empty(monkeypatch):
    """With 28 and 32 stages for 48 layers, the whole search of ``layout`` would simulate about 300 layouts for each."""
    simulated, timeline = [], Replay.timeline

    def counted(replay: Replay, *costs) -> Timeline:
        simulated.append(replay.schedule.name)
        return timeline(replay, *costs)

    monkeypatch.setattr(Replay, "timeline", counted)
    advice = advise(QWEN, names=("interleaved",))
    assert advice.today.seconds > 0 and len(simulated) < 200


def test_a_run_without_a_pipeline_has_no_schedule():
    with refused("no-pipeline"):
        advise(stock("llama3-70b-64xh100", pp=1, dp=8))


def test_what_cannot_work_as_it_stands_is_said_first():
    with refused("does-not-divide"):
        advise(stock("llama3-70b-64xh100", global_batch=63))


@pytest.mark.parametrize(
    "choice",
    [
        {"name": "stock"},
        {"name": "zb-h1"},
        {"name": "auto", "options": {"placement": "linear"}},
        {"name": "seq1f1b", "options": {"slices": 4}},
    ],
    ids=lambda choice: choice["name"],
)
def test_layout_auto_is_priced_as_computed(choice):
    run = uneven(layers=30, pipemem_layout="auto", no_rope_fusion=True, transformer_impl="local")
    run = of_many_queues(replace(run, schedule=replace(run.schedule, **choice)))
    computed, today = at_start(run).best, advise(run, names=()).today
    assert today.step.layers == computed.layers != layout.even(run.model, len(computed.layers))
    assert today.seconds == pytest.approx(computed.seconds, rel=1e-9)
    assert layout.FLAG in today.run.flags and "pipemem-layout" not in today.run.flags
    assert refusal(run) is None


def uneven(layers: int, **flags) -> Run:
    """A run of few microbatches with this number of layers on four pipeline ranks."""
    run = stock("llama3-70b-64xh100", pp=4, dp=1, global_batch=8)
    cluster = replace(run.cluster, memory_gib=1000)
    flags = run.flags | {name.replace("_", "-"): value for name, value in flags.items()}
    return replace(run, cluster=cluster, model=replace(run.model, layers=layers), flags=flags)


@pytest.mark.parametrize(
    ("layers", "flags", "removed"),
    [
        (6, {}, ()),
        (22, {"account-for-loss-in-pipeline-split": True}, ("account-for-loss-in-pipeline-split",)),
        (24, {"decoder-last-pipeline-num-layers": 5}, ("decoder-last-pipeline-num-layers",)),
    ],
)
def test_a_run_that_megatron_cannot_cut_gets_a_layout(layers, flags, removed):
    run = uneven(layers, **flags)
    advice = advise(run, names=())
    assert str(layers) in advice.fails and advice.verdict not in ("stay", "overlap")
    added, gone = changed_flags(run, advice.today.run)
    counts = layout.read(added[layout.FLAG])
    assert sum(counts) == layers and min(counts[1:-1]) > 0 and tuple(gone) == removed


def test_flags_for_the_ends_are_priced_as_they_cut():
    def layers(total: int, chunks=None, **flags) -> tuple[int, ...]:
        run = uneven(total, **flags)
        return as_it_stands(replace(run, parallelism=replace(run.parallelism, chunks=chunks))).step.layers

    assert layers(30, decoder_first_pipeline_num_layers=12, decoder_last_pipeline_num_layers=4) == (12, 7, 7, 4)
    assert layers(30, 2, decoder_last_pipeline_num_layers=6) == (4, 4, 4, 3) * 2
    accounted = {f"account_for_{part}_in_pipeline_split": True for part in ("embedding", "loss")}
    assert layers(30, **accounted) == (7, 8, 8, 7)


def test_refused_flags_are_named_with_the_schedules_that_they_keep_away():
    advice = advise(replace(LLAMA, flags={**LLAMA.flags, "cuda-graph-impl": "local", "log-max-attention-logit": True}))
    assert not advice.proposals
    assert any("zb-h1" in names for _, names in advice.refused.values())


def test_an_overlap_that_is_worth_more_than_the_bubble_stays():
    """Megatron hides messages to experts under its own schedules alone."""
    plain = stock("qwen3-30b-a3b-16xh100", chunks=2)
    overlapped = replace(plain, flags={**plain.flags, "overlap-moe-expert-parallel-comm": True})
    before, after = (advise(run, names=("zb-h1", "v-half")) for run in (plain, overlapped))
    assert after.today.seconds < before.today.seconds and (after.verdict, after.best) == ("overlap", None)
    assert before.best.gain(before.today) > AS_FAST and before.best.gain(after.today) < AS_FAST


def measured_twice_as_slow(run: Run, path: Path) -> Path:
    """A report of a step of this run in which every pass took twice its predicted seconds."""
    today = as_it_stands(run)
    placement = today.step.placement
    seconds = today.step.costs.seconds(placement)
    links = {link: 3 * seconds for link, seconds in today.step.costs.p2p.items()}
    slow = Costs(*(tuple(2 * duration for duration in seconds[kind]) for kind in (Kind.F, Kind.I, Kind.W)), p2p=links)
    schedule = build_schedule("1f1b", num_devices=run.parallelism.pp, num_microbatches=8)
    names = ("forward", "backward_input", "backward_weight")
    prices = {name: list(getattr(slow, name)) for name in names}
    last = {
        "schedule": "1f1b",
        "microbatches": 8,
        "orders": schedule.to_csv(),
        "spans": [" ".join(f"{a}-{b}" for a, b in spans) for spans in as_measured(schedule, slow).spans],
        "layers": None,
        "memory": None,
        "iteration_seconds": None,
    }
    path.write_text(json.dumps({"plans": [{"costs": prices, "priced_by": "profile"}], "last_step": last, "ranks": []}))
    return path


def test_a_report_of_the_run_gives_measured_prices(tmp_path):
    path = measured_twice_as_slow(LLAMA, tmp_path / "report.json")
    before, after = as_it_stands(LLAMA), as_it_stands(LLAMA, measured_slowdown_of(path, LLAMA))
    assert sum(after.step.work_seconds) == pytest.approx(2 * sum(before.step.work_seconds), rel=0.01)
    assert after.step.communication_seconds == before.step.communication_seconds
    assert after.step.costs.p2p == pytest.approx(
        {link: 3 * duration for link, duration in before.step.costs.p2p.items()}, rel=1e-3
    )
    with refused("other-model", path):
        measured_slowdown_of(path, stock("llama3-70b-64xh100", pp=8, dp=1))
    path.write_text(json.dumps({"plans": [], "last_step": None}))
    with refused("wrong-file"):
        measured_slowdown_of(path, LLAMA)


def test_verdicts():
    """Every answer, on a run for which it is the right one."""
    plain = stock("qwen3-30b-a3b-16xh100", chunks=2)
    overlapped = replace(plain, flags={**plain.flags, "overlap-moe-expert-parallel-comm": True})
    long = replace(LLAMA, parallelism=replace(LLAMA.parallelism, pp=2, tp=8, dp=4, global_batch=4 * 512))
    wasted = replace(LLAMA, flags={**LLAMA.flags, "pipeline-model-parallel-layout": "Et*35|t*15|t*15|t*15L"})
    recomputed = replace(LLAMA, schedule=replace(LLAMA.schedule, recompute="full"))
    answers = {
        "ours": advise(LLAMA, names=FEW),
        "recompute": advise(recomputed, names=("1f1b",)),
        "stay": advise(long, names=("1f1b",)),
        "layout": advise(wasted, names=("1f1b",)),
        "stock": advise(LLAMA, names=("1f1b", "interleaved")),
        "overlap": advise(overlapped, names=("v-half",)),
    }
    assert {name: advice.verdict for name, advice in answers.items()} == {name: name for name in answers}


def test_a_run_that_does_not_fit_by_its_prices_is_compared_all_the_same():
    small = replace(LLAMA, cluster=replace(LLAMA.cluster, memory_gib=36))
    advice, usual = advise(small), advise(LLAMA)
    check_proposals(usual)
    assert advice.excess == pytest.approx(usual.today.peak - small.cluster.memory_bytes)
    assert advice.proposals["same memory"].seconds == usual.proposals["same memory"].seconds
    assert advice.proposals["fits"].peak <= small.cluster.memory_bytes


def test_the_answer_is_the_fastest_row_that_fits_with_room():
    advice = advise(LLAMA)
    rows = [way for way in (advice.stock, *advice.proposals.values()) if way is not None]
    assert max(way.gain(advice.today) for way in rows) <= advice.best.gain(advice.today) + AS_FAST
    assert max(way.peak for way in rows) <= LLAMA.cluster.memory_bytes * (1 - ROOM)
    assert "less memory" not in advice.proposals  # a run with room needs no more of it
    tight = advise(NEAR)
    assert tight.best.peak <= tight.today.peak * (1 + SAME_MEMORY) and "more memory" not in tight.proposals


def test_of_equally_fast_rows_the_answer_is_the_one_with_the_fewest_changes():
    """Tuned stock at 0.9 % and a schedule of this package at 1.0 %."""
    today, tuned, ours = (
        SimpleNamespace(gain=lambda _, gain=gain: gain, seconds=1 - gain, peak=1.0) for gain in (0.0, 0.009, 0.01)
    )
    assert _best(today, tuned, None, {"same memory": ours}, memory=2.0) is tuned
    assert _best(today, None, None, {"same memory": ours}, memory=2.0) is ours
    assert _best(today, tuned, None, {}, memory=2.0) is None


def test_recomputation_that_memory_does_not_need_is_left_out():
    run = replace(LLAMA, schedule=replace(LLAMA.schedule, recompute="full"))
    advice = advise(run, names=FEW)
    assert advice.needless.run.schedule.recompute == advice.best.run.schedule.recompute == "none"
    assert set(changed_flags(run, advice.needless.run)[1]) == {
        f"recompute-{name}" for name in ("granularity", "method", "num-layers")
    }
    for consumer, word in {BRIDGE: "config.model.recompute_granularity = None", SWIFT: "none"}.items():
        assert word in changes(consumer, run, advice.needless, {})[0]
    assert changes(VERL, run, advice.needless, {})[0][-1].endswith(".recompute_granularity=null")
    assert changes(NEMO_RL, run, advice.needless, {})[0] == ["++policy.megatron_cfg.activation_checkpointing=false"]
    small = replace(run, cluster=replace(run.cluster, memory_gib=advice.today.peak * 1.1 / GIB, reserved_gib=0))
    assert advise(small, names=FEW).needless is None


@pytest.mark.parametrize(
    ("batch", "group", "starts"), [(6, None, False), (3, None, False), (8, None, True), (13, 5, False), (14, 5, True)]
)
def test_microbatches_that_do_not_fill_megatrons_groups(batch, group, starts):
    """By the rule of its interleaved schedule, on four ranks with two chunks each."""
    flags = {} if group is None else {"microbatch-group-size-per-virtual-pipeline-stage": group}
    run = stock("llama3-70b-64xh100", pp=4, dp=1, chunks=2, global_batch=batch)
    run = replace(run, cluster=replace(run.cluster, memory_gib=1000), flags={**run.flags, **flags})
    advice = advise(run, names=("zb-h1",))
    assert (advice.fails is None, advice.today.run.parallelism.chunks) == ((True, 2) if starts else (False, None))
    error = refusal(run)
    assert (error and error.code) == (None if starts else "needs-microbatches")


def test_a_batch_smaller_than_its_ranks_is_refused_before_it_is_priced():
    with refused("does-not-divide", "1 x 2"):
        advise(stock("llama3-70b-64xh100", global_batch=1))
