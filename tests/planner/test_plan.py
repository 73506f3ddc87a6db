"""What the planner finds against every candidate priced on its own, its memory against sums by hand, and the command."""

from __future__ import annotations

import heapq
import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from commands import pipemem
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import nightly
from refusals import refused

from megatron_pipemem.errors import ConfigError, PipememError, UnsupportedError
from megatron_pipemem.features.offload.transfers import NO_HOST_MEMORY
from megatron_pipemem.model import layout
from megatron_pipemem.model.cut_flags import check_experts
from megatron_pipemem.model.model import Execution
from megatron_pipemem.part_costs import Passes
from megatron_pipemem.schedule.earlier_weights import with_earlier_weights
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, peaks, simulate
from megatron_pipemem.schedule.stream import LEAST_GAIN, consecutive_steps
from megatron_pipemem.schedule.validator import validate
from megatron_pipemem.tools.cli.plan import changes as plan_changes
from megatron_pipemem.tools.config.cluster import GIB, HostChannel
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.launch.feasibility import feasible, refused_settings
from megatron_pipemem.tools.planner import planning
from megatron_pipemem.tools.planner import variants as variants_module
from megatron_pipemem.tools.planner.early_wgrad import moves_weights
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.parameter_bytes import DISTRIBUTED
from megatron_pipemem.tools.planner.planning import WAITS, PlanningInterrupted, plan
from megatron_pipemem.tools.planner.prices import layer
from megatron_pipemem.tools.planner.pricing import is_stocks_order
from megatron_pipemem.tools.planner.profile import from_formulas
from megatron_pipemem.tools.planner.replay import family_options, family_schedule
from megatron_pipemem.tools.planner.space import Limits, cuts, orders
from megatron_pipemem.tools.planner.step import price
from megatron_pipemem.tools.planner.variants import PLAIN, Variant, register_variant, run_step
from megatron_pipemem.tools.planner.ways import Way, facts, first_as_fast, gibibytes, gibibytes_more
from tests.planner.small_run import CLUSTER, FAMILIES, MODEL, RUN


def candidates(run: Run, limits: Limits) -> list[tuple[float, str]]:
    """Seconds and variant of all that fits, each simulated on its own and with all microbatches."""
    fitting = []
    for cut in cuts(run, limits, Counter()):
        size = {"num_devices": cut.parallelism.pp, "num_microbatches": cut.parallelism.microbatches}
        for placement, several in orders(cut, limits, Counter()).items():
            varies = placement.replicas == 1 and cut.parallelism.pp > 1
            for order, variant in itertools.product(several, (None, *(variants_module.variants() if varies else ()))):
                if not limits.admits(variant=PLAIN if variant is None else variant.name):
                    continue
                try:
                    alone = build_schedule(order.name, **size, **family_options(order.chunks))
                    choice = cut.schedule if variant is None else variant.choice(cut.schedule)
                    step = run_step(replace(cut, schedule=choice), placement)
                    if moves_weights(cut) and variant in (None, variants_module.IN_PAIRS):
                        alone = with_earlier_weights(alone, step.costs)
                    room = step.room(run.cluster.memory_bytes)
                    if variant is not None and variant.frees_memory and fits(simulate(alone, step.costs), room):
                        continue
                    timeline = simulate(alone if variant is None else variant.apply(alone, step, room), step.costs)
                except PipememError:
                    continue
                if fits(timeline, room):
                    seconds = timeline.makespan + step.reduction_seconds + step.optimizer_seconds
                    fitting.append((seconds, PLAIN if variant is None else variant.name))
    return sorted(fitting)


def fits(timeline: Timeline, room: tuple[float, ...]) -> bool:
    return all(peak <= most for peak, most in zip(timeline.peaks, room, strict=True))


# With fast copies. Twenty and forty microbatches over two devices are more than the planner runs at first.
MANY = replace(RUN, cluster=replace(CLUSTER, host=HostChannel(200.0, 200.0)), parallelism=Parallelism(global_batch=40))
CUTS = {"tp": (1, 4), "micro_batch": (1, 2)}
ALONE = CUTS | {"variant": (PLAIN,)}
VARIED = CUTS | {"schedule": ("1f1b", "zb-h1", "v-half"), "pp": (2, 4), "recompute": ("none",)}
OF_REPLICAS = ALONE | {"schedule": ("1f1b", "v-half", "chimera", "gems", "dualpipe")}


@pytest.mark.parametrize(
    ("run", "limits", "memory_gib"),
    [
        (RUN, ALONE | {"schedule": FAMILIES}, 5.0),
        (RUN, OF_REPLICAS, 24.0),
        *((MANY, VARIED, memory) for memory in (3.0, 5.0)),  # offload is needed, or is not
        pytest.param(MANY, VARIED, 24.0, marks=nightly("the cases of 3 and 5 GiB")),
    ],
)
def test_the_listed_plans_are_the_best_of_all_candidates(run, limits, memory_gib):
    run, limits = replace(run, cluster=replace(run.cluster, memory_gib=memory_gib)), Limits(limits)
    wanted = candidates(run, limits)[:12]
    answer = plan(run, limits=limits, top=12, search_seconds=0)
    assert [way.seconds for way in answer.plans] == pytest.approx([seconds for seconds, _ in wanted])
    assert {way.variant for way in answer.plans} >= {name for _, name in wanted[:10]}
    assert all(way.peak <= run.cluster.memory_bytes for way in answer.plans)
    assert answer.considered == len(answer.plans) + answer.rejected.total()


@settings(max_examples=3)
@given(st.randoms(use_true_random=False), st.sampled_from(["none", "full", "selective"]))
def test_the_peak_that_a_plan_lists_is_a_limit_that_admits_it(dice, recompute):
    model = replace(
        MODEL,
        layers=dice.randint(4, 12),
        kv_heads=dice.choice([None, 2, 4]),
        vocabulary=dice.randint(1000, 60000),
        dropout=dice.choice([0.0, 0.1]),
    )
    cluster = replace(CLUSTER, nodes=1, devices_per_node=6, memory_gib=dice.uniform(8, 24))
    flags = {DISTRIBUTED: True} if dice.random() < 0.7 else {}
    run = Run(model, cluster, Parallelism(global_batch=dice.choice([12, 24, 96])), flags=flags)
    schedules = ("1f1b", "gpipe", "zb-h1", "v-half")
    limits = Limits({"schedule": schedules, "recompute": (recompute,), "micro_batch": (1,)})
    for best in plan(run, limits=limits, top=2, search_seconds=0).plans:
        for most in (best.peak, float(gibibytes(best.peak)) * GIB):
            again = plan(run, most, limits, top=1, search_seconds=0).plans
            assert again and again[0].seconds <= best.seconds


def test_the_first_plan_is_the_fastest_where_bounds_and_times_are_rounded_apart():
    """The bound of v-half adds up to the time that zb-h1 takes, by a rounding more than the time that v-half takes."""
    model, cluster = replace(MODEL, vocabulary=1823, dropout=0.1), replace(CLUSTER, nodes=1, devices_per_node=6)
    run = Run(model, cluster, Parallelism(global_batch=96), flags={DISTRIBUTED: True})
    chosen = {"schedule": ("zb-h1", "v-half"), "recompute": ("none",), "micro_batch": (1,), "pp": (1,), "tp": (1,)}
    first, both = (plan(run, limits=Limits(chosen), top=top, search_seconds=0).plans for top in (1, 2))
    assert {way.schedule for way in both} == {"v-half", "zb-h1"}
    assert first == both[:1]


@given(st.floats(1, 1e15))
def test_bytes_in_tables_are_rounded_up(nbytes):
    text = gibibytes(nbytes)
    assert nbytes <= float(text) * GIB
    assert float(text) * GIB <= nbytes * 1.11 + (nbytes > GIB) * 0.11 * GIB


@pytest.mark.parametrize(
    ("more", "base", "shown"),
    [(40.09, 20.01, "20.0"), (40.01, 20.09, "20.0"), (40.11, 20.01, "20.1"), (1.5, 0.123, "1.37")],
)
def test_a_difference_in_gib_is_that_of_the_numbers_in_the_table(more, base, shown):
    assert gibibytes_more(more * GIB, base * GIB) == shown


def test_two_copies_of_the_model_hold_it_twice_and_are_added_up():
    run = replace(RUN, parallelism=replace(RUN.parallelism, pp=4, dp=2))
    one, two = (
        price(run, Placement.linear(4)),
        price(run, Placement.bidirectional(4), layers=price(run, Placement.linear(4)).layers),
    )
    assert two.static_bytes == pytest.approx(
        [own + other for own, other in zip(one.static_bytes, one.static_bytes[::-1], strict=True)]
    )
    assert sum(two.work_seconds) == pytest.approx(sum(one.work_seconds))
    assert two.optimizer_seconds == pytest.approx(max(two.static_bytes) / max(one.static_bytes) * one.optimizer_seconds)
    assert two.reduction_seconds > 2 * one.reduction_seconds
    assert len(two.layers) == 4
    rejected: Counter[str] = Counter()
    assert all(placement.replicas == 1 for placement in orders(run, Limits(), rejected))
    assert rejected["gems: two replicas of the model take more memory than they save"] == 1


def test_a_plan_that_fails_in_full_gives_way_to_the_next(monkeypatch):
    def apply(order: Schedule, step, room):
        if order.num_microbatches == 40:
            raise UnsupportedError("too-large", "not so many")
        return order

    monkeypatch.setattr(variants_module, "_VARIANTS", {})
    register_variant(Variant("short", lambda choice: choice, apply))
    limits = {"schedule": ("1f1b",), "tp": (4,), "pp": (2,), "recompute": ("none",), "micro_batch": (1,)}
    answer = plan(
        replace(RUN, parallelism=Parallelism(global_batch=40)), limits=Limits(limits), top=2, search_seconds=0
    )
    assert [way.variant for way in answer.plans] == [PLAIN]
    assert answer.rejected == {"short cannot be combined with 1f1b: not so many": 1}


def test_offload_that_does_not_suffice_says_what_is_in_the_way():
    cluster = replace(CLUSTER, memory_gib=2.4, host=HostChannel(200.0, 200.0), host_memory_gib=0.01)
    limits = {"schedule": ("1f1b",), "tp": (1,), "pp": (4,), "recompute": ("none",), "micro_batch": (2,)}
    limits = Limits({**limits, "variant": ("offload",)})
    answer = plan(replace(RUN, cluster=cluster), limits=limits, search_seconds=0)
    assert not answer.plans
    assert answer.rejected.total() == 1
    assert NO_HOST_MEMORY in next(iter(answer.rejected))


def test_every_cut_of_the_devices_is_considered():
    wanted = {
        (tp, pp, 8 // (tp * pp), micro_batch)
        for tp, pp, micro_batch in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16))
        if 8 % (tp * pp) == 0 and 16 % (micro_batch * (8 // (tp * pp))) == 0
    }
    shapes = [cut.parallelism for cut in cuts(RUN, Limits({"recompute": ("none",)}), Counter())]
    assert len(shapes) == len(set(shapes))
    assert {(cut.tp, cut.pp, cut.dp, cut.micro_batch) for cut in shapes} == wanted


def test_what_is_refused_is_counted_by_reason():
    rejected: Counter[str] = Counter()
    three = replace(RUN, model=replace(MODEL, heads=2, layers=2))
    list(cuts(three, Limits({"recompute": ("none", "selective"), "micro_batch": (1,)}), rejected))
    # tp 4 with dp 2 and 1; eight pipeline ranks for two layers; the rest recomputes attention, which flash never keeps.
    assert rejected["tp 4 does not divide 2 heads"] == 2 * 2
    assert rejected["more pipeline ranks than layers, embedding and head"] == 1
    assert sum(count for reason, count in rejected.items() if "core_attn" in reason) == 6


def test_a_search_starts_where_families_leave_time(tmp_path):
    limits = Limits(
        {
            "schedule": ("1f1b", "auto"),
            "variant": (PLAIN,),  # only plain orders are searched
            "tp": (1,),
            "pp": (4,),
            "recompute": ("none",),
            "micro_batch": (1,),
        }
    )
    answer = plan(RUN, limits=limits, top=4, search_seconds=0.3)
    best = answer.plans[0]
    assert best.schedule == "auto" and best.seconds < min(way.seconds for way in answer.plans if way.passes is None)
    assert best.passes is not None
    validate(best.passes, best.step.costs)


CONFIG = """
model:
  {num_layers: 8, hidden_size: 2048, num_attention_heads: 16, vocab_size: 32000, seq_length: 1024,
   untie_embeddings_and_output_weights: true, attention_dropout: 0.0, hidden_dropout: 0.0}
cluster: {memory_gib: 24, tflops: 300, intra_node: {gb_per_s: 200}, inter_node: {gb_per_s: 20}, nodes: 2,
  devices_per_node: 4, host: {d2h_gb_per_s: 20, h2d_gb_per_s: 20}, host_memory_gib: 500}
global_batch: 16
lr: 1.0e-4
"""


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("schedule=v-hlf", "key schedule: cannot be 'v-hlf'; did you mean 'v-half'?"),
        ("variant=vocab-1", "did you mean 'vocabulary-1'?"),
        ("recompute=some", "known are full, none, selective"),
        ("tp=three", "possible on 8 devices are 1, 2, 4"),
        ("pp=3", "possible on 8 devices are 1, 2, 4, 8"),
        ("tp=[1", "cannot be '[1'"),
    ],
)
def test_limits_that_leave_nothing_are_refused_at_once(tmp_path, limit, words):
    source = tmp_path / "run.yaml"
    source.write_text(CONFIG)
    refused = pipemem("plan", source, "--only", limit)
    assert refused.exit_code == 2 and words in refused.stderr


def test_what_a_start_refuses_is_not_planned():
    """With attention scores that graphs cannot log, our schedules do not start; one pipeline rank takes stock's step."""
    limits = Limits({"pp": [1, 2], "tp": [4], "recompute": ["none"], "micro_batch": [1]})
    graphs = replace(RUN, flags={"cuda-graph-impl": "local", "log-max-attention-logit": True})
    answers = [plan(run, limits=limits, search_seconds=1, refusal=refused_settings) for run in (RUN, graphs)]
    assert [{way.run.parallelism.pp for way in answer.plans} for answer in answers] == [{2}, {1}]
    ours = replace(graphs, parallelism=replace(graphs.parallelism, pp=2), schedule=ScheduleChoice(name="zbv"))
    error = refused_settings(ours)
    assert error.code == "unsupported-setting" and str(error) in answers[1].rejected
    assert str(error) not in answers[0].rejected and refused_settings(replace(ours, flags={})) is None


def test_plans_without_a_barrier_between_steps_launch_so():
    free = Limits({"pp": [4], "recompute": ["none"], "schedule": ["zbv", "chimera", "pipedream-2bw"]})
    asked = replace(RUN, schedule=replace(RUN.schedule, overlap_steps=True))
    answer = plan(asked, limits=free, search_seconds=0, top=50)
    assert {way.schedule for way in answer.plans} == {"zbv"} and {way.variant for way in answer.plans} == {PLAIN}
    assert answer.rejected[WAITS]
    best = answer.plans[0]
    assert feasible(best.run) is None
    plain = replace(best.run, schedule=replace(best.run.schedule, overlap_steps=False))
    assert max(predicted_memory(best.run).device_bytes) == pytest.approx(best.peak)
    more = [
        ahead - without
        for ahead, without in zip(
            predicted_memory(best.run).device_bytes, predicted_memory(plain).device_bytes, strict=True
        )
    ]
    assert more == pytest.approx(best.step.rollback_bytes) and min(more) > 0


@pytest.mark.parametrize("name", ["1f1b", "zbv", "v-half", "interleaved"])
def test_a_plan_has_its_share_of_the_bytes_of_1f1b(name):
    """Of 1F1B's own stages, though the chunks of others may hold unequal layers."""
    size = {"pp": [4], "tp": [1], "micro_batch": [1], "recompute": ["none"], "variant": ["plain"]}
    (same,) = plan(RUN, limits=Limits(size | {"schedule": ["1f1b"]}), search_seconds=0).plans
    assert same.share_of_1f1b == pytest.approx(1)
    whole = max(peaks(family_schedule("1f1b", 4, same.run.parallelism.microbatches, None), same.step.costs))
    for way in plan(RUN, limits=Limits(size | {"schedule": [name]}), search_seconds=0).plans:
        schedule = family_schedule(name, 4, way.run.parallelism.microbatches, way.run.parallelism.chunks)
        assert way.share_of_1f1b == pytest.approx(max(peaks(schedule, way.step.costs)) / whole)
        assert facts(way)["share_of_1f1b"] == way.share_of_1f1b


def test_the_command_writes_a_run_that_launches(tmp_path):
    source, target = tmp_path / "run.yaml", tmp_path / "planned" / "best.yaml"
    source.write_text(CONFIG)
    limits = ["--only", "schedule=v-half,1f1b", "--only", "variant=plain", "--only", "pp=4", "--only", "tp=1"]
    command = ["plan", str(source), "--json", "--output", str(target), "--top", "3", "--memory", "8GiB", *limits]
    done = pipemem(*command)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    best = answer["plans"][0]
    assert len(answer["plans"]) == 3 and answer["considered"] == 3 + sum(answer["rejected"].values())
    assert max(best["peak_bytes"]) <= 8 * GIB and best["pp"] == 4 and sum(best["layers"]) == 8
    run = load(target, Run)
    assert (run.schedule.name, run.parallelism.micro_batch) == (best["schedule"], best["micro_batch"])
    assert run.flags["lr"] == 1e-4 and feasible(run) is None
    assert max(predicted_memory(run).device_bytes) == pytest.approx(max(best["peak_bytes"]))
    launched = pipemem("launch", target, "--print", "--node-rank", "0", "--master-addr", "h")
    assert launched.exit_code == 0 and f"--pipemem-schedule {best['schedule']}" in launched.stdout


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ({"auto": 1.0, "gis": 1.002, "interleaved": 1.009}, "interleaved"),
        ({"auto": 1.0, "gis": 1.009, "interleaved": 1.02}, "gis"),
        ({"auto": 1.0, "gis": 1.02, "interleaved": 1.03}, "auto"),
    ],
)
def test_the_first_row_changes_least_of_those_that_are_as_fast(seconds, first):
    limits = Limits(
        {
            "schedule": ["gis", "interleaved"],
            "pp": [4],
            "tp": [1],
            "variant": ["plain"],
            "chunks": [2],
            "micro_batch": [1],
        }
    )
    plans = {way.schedule: way for way in plan(RUN, limits=limits, search_seconds=0).plans}
    plans["auto"] = replace(plans["gis"], order=replace(plans["gis"].order, name="auto"))
    ways = [replace(plans[name], makespan=s - plans[name].step.outside_seconds) for name, s in seconds.items()]
    assert first_as_fast(sorted(ways, key=plan_changes), ways[0]).schedule == first


def test_orders_that_stock_runs_are_marked():
    limits = Limits({"schedule": ["1f1b", "interleaved", "gis"], "pp": [1, 4], "tp": [1], "recompute": ["none"]})
    ways = plan(RUN, limits=limits, top=200, search_seconds=0).plans
    of_stock = {(way.schedule, way.variant) for way in ways if is_stocks_order(way)}
    assert of_stock == {("1f1b", "plain"), ("interleaved", "plain")}
    late = plan(replace(RUN, schedule=replace(RUN.schedule, overlap_steps=True)), limits=limits, search_seconds=0).plans
    assert late and not any(is_stocks_order(way) for way in late if way.run.parallelism.pp > 1)
    odd = replace(RUN, parallelism=replace(RUN.parallelism, global_batch=5 * CLUSTER.num_devices // 4))
    five = plan(odd, limits=Limits({"schedule": ["interleaved"], "pp": [4], "tp": [1]}), search_seconds=0).plans
    assert five and not any(is_stocks_order(way) for way in five if way.run.parallelism.microbatches == 5)


def test_an_interrupt_keeps_the_plans_found_before_it(tmp_path, monkeypatch):
    limits = {"schedule": ["v-half", "1f1b"], "variant": ["plain"], "pp": [4], "tp": [1]}
    whole = plan(RUN, limits=Limits(limits), top=5, search_seconds=0).plans
    source, target = tmp_path / "run.yaml", tmp_path / "best.yaml"
    source.write_text(CONFIG)
    left = []  # of the plans before the interrupt

    def popped(queue):
        if not left:
            raise KeyboardInterrupt
        entry = heapq.heappop(queue)
        if isinstance(entry[2], Way):
            left.pop()
        return entry

    monkeypatch.setattr(planning, "heapq", SimpleNamespace(heappop=popped, heappush=heapq.heappush))
    left[:] = range(2)
    with pytest.raises(PlanningInterrupted) as stopped:
        plan(RUN, limits=Limits(limits), top=5, search_seconds=0)
    answer = stopped.value.answer
    seconds = [way.seconds for way in answer.plans]
    assert seconds[:2] == [way.seconds for way in whole[:2]] and seconds == sorted(seconds)
    assert answer.considered == len(seconds) + answer.rejected.total() and answer.rejected[planning.UNSEEN] > 0
    only = [word for key, values in limits.items() for word in ("--only", f"{key}={','.join(map(str, values))}")]
    for expected in (2, 0):  # without a plan there is no answer
        left[:] = range(expected)
        done = pipemem("plan", source, "--output", target, "--json", *only)
        assert done.exit_code == 130 and not target.exists()
        assert bool(done.stdout) == bool(expected)
        if expected:
            answer = json.loads(done.stdout)
            assert answer["interrupted"] and len(answer["plans"]) >= expected and answer["output"] == []


def test_the_answer_has_the_limit_of_memory_and_the_next_step(tmp_path):
    source, target = tmp_path / "run.yaml", tmp_path / "best.yaml"
    source.write_text(CONFIG)
    limits = ["--only", "schedule=1f1b", "--only", "variant=plain", "--only", "pp=4", "--only", "tp=1"]
    assert json.loads(pipemem("plan", source, "--json", "--memory", "8GiB", *limits).stdout)["memory_bytes"] == 8 * GIB
    said, written = (
        " ".join(pipemem("plan", source, "--memory", "8GiB", *limits, *more).stdout.split())
        for more in ((), ("--output", target))
    )
    assert (
        ", micro-batch " in said
        and "at most 8.0 GiB" in said
        and "--output best.yaml" in said
        and "pipemem launch best.yaml" in said
    )
    assert f"pipemem launch {target}" in written


def test_a_searched_order_is_written_beside_its_run(tmp_path):
    source, target = tmp_path / "run.yaml", tmp_path / "best.yaml"
    source.write_text(CONFIG)
    limits = ["--only", "schedule=1f1b,auto", "--only", "pp=4", "--only", "tp=1", "--only", "micro_batch=1"]
    done = pipemem("plan", source, "--output", target, "--search-seconds", "0.3", *limits)
    assert done.exit_code == 0 and "largest loss" in done.output, done.output
    assert done.output.startswith("answer"), "the fastest plan comes before the table"
    run = load(target, Run)
    assert run.schedule.name == str(tmp_path / "best.csv") and feasible(run) is None
    order = Schedule.from_csv((tmp_path / "best.csv").read_text())
    assert (order.num_devices, order.num_microbatches) == (4, run.parallelism.microbatches)


def test_where_nothing_fits_the_command_says_why(tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text(CONFIG)
    done = pipemem("plan", source, "--memory", "100MiB")
    assert done.exit_code == 2 and "parameters, gradients and optimizer alone exceed the memory" in done.output


def test_a_measured_profile_sets_the_pace(tmp_path):
    profile = from_formulas(MODEL, Execution(tp=2), CLUSTER)
    with refused("wrong-file", kind=ConfigError):
        profile.slowdown(CLUSTER)
    modelled = layer(MODEL, Execution(tp=2), CLUSTER)
    computing = modelled.seconds + modelled.communication_seconds * -1
    thrice = replace(profile, source="measured", layers={"*-": replace(profile.layer, seconds=computing * 3)})
    pace = thrice.slowdown(CLUSTER)
    assert pace.layer == Passes(*[pytest.approx(3)] * 3)
    slow = layer(MODEL, Execution(tp=4), CLUSTER, "*-", pace.layer)
    fast = layer(MODEL, Execution(tp=4), CLUSTER)
    assert slow.communication_seconds == fast.communication_seconds
    assert (slow.seconds + fast.communication_seconds * -1).total == pytest.approx(
        3 * (fast.seconds + fast.communication_seconds * -1).total
    )
    source, file = tmp_path / "run.yaml", tmp_path / "profile.json"
    source.write_text(CONFIG)
    file.write_text(json.dumps(thrice.to_json()))
    limits = [
        "--only",
        "schedule=1f1b",
        "--only",
        "pp=2",
        "--only",
        "recompute=none",
        "--search-seconds",
        "0",
        "--json",
    ]
    plans = []
    for more in ([], ["--profile", str(file)]):
        done = pipemem("plan", source, *limits, *more)
        assert done.exit_code == 0, done.output
        plans.append(json.loads(done.stdout)["plans"][0]["seconds"])
    assert 2 < plans[1] / plans[0] < 3


def test_ends_that_all_devices_share_are_shared():
    run = replace(RUN, parallelism=Parallelism(pp=4, dp=2, global_batch=8))
    whole, shared = (price(run, Placement.linear(4), shared_ends=shares) for shares in (False, True))
    assert sum(shared.static_bytes) == pytest.approx(sum(whole.static_bytes), rel=1e-6)
    assert shared.layers == (2, 2, 2, 2) and max(shared.static_bytes) - min(shared.static_bytes) == 0
    # What the shares compute is work of the devices, but no part of the stages' costs.
    assert sum(shared.work_seconds) == pytest.approx(sum(whole.work_seconds), rel=0.01)
    assert len(set(shared.costs.forward)) == 1


def test_registered_variants_are_planned(monkeypatch):
    monkeypatch.setattr(variants_module, "_VARIANTS", {})
    added = Variant("copies", lambda choice: replace(choice, offload="full"), lambda order, step, room: order)
    register_variant(added)
    with refused("exists-already", "copies", kind=UnsupportedError):
        register_variant(added)
    limits = {"schedule": ("1f1b", "zbv"), "recompute": ("none",), "variant": ("copies",)}
    best = plan(RUN, limits=Limits(limits), top=1, search_seconds=0).plans[0]
    assert best.variant == "copies" and best.run.schedule.offload == "full" and best.passes is not None
    assert best.step.costs.channel is not None


@pytest.mark.parametrize("variant", ["plain", "vocabulary-1"])
def test_every_rank_of_a_planned_hybrid_model_has_experts_where_megatron_waits_for_their_losses(variant):
    """The planner asks what a run is asked."""
    pattern = "*-*-*-*-*-*-EEEE"
    model = replace(MODEL, layers=len(pattern), pattern=pattern, experts=4, expert_ffn=64)
    limits = Limits({"pp": [2, 4, 8], "tp": [1], "micro_batch": [1], "recompute": ["none"], "variant": [variant]})
    run = replace(RUN, model=model, cluster=replace(CLUSTER, memory_gib=400.0))
    answer = plan(run, limits=limits, search_seconds=0)
    assert {way.run.parallelism.pp for way in answer.plans} <= {2, 4} and len(answer.plans) > 5
    assert any("fewer layers with experts" in reason for reason in answer.rejected)
    for way in answer.plans:
        check_experts(way.run.flags, way.run.flags[layout.PATTERN], way.step.placement)
    free = plan(replace(run, flags={"moe-router-load-balancing-type": "none"}), limits=limits, search_seconds=0)
    assert free.plans[0].seconds < answer.plans[0].seconds
    with refused("bad-layout", kind=UnsupportedError):
        check_experts({}, free.plans[0].run.flags[layout.PATTERN], free.plans[0].step.placement)


def test_plans_without_a_barrier_between_steps_are_ranked_by_their_period(tmp_path):
    run = replace(RUN, schedule=ScheduleChoice(overlap_steps=True))
    limits = {
        "schedule": ("1f1b", "zb-h2", "zbv"),
        "tp": (1,),
        "pp": (4, 8),
        "micro_batch": (1,),
        "recompute": ("none",),
    }
    ways = plan(run, limits=Limits(limits), top=6, search_seconds=0).plans
    assert len(ways) == 5 and all(way.run.schedule.overlap_steps for way in ways)
    for way in ways:
        cut = way.run.parallelism
        order = family_schedule(way.schedule, cut.pp, cut.microbatches, cut.chunks)
        expected = consecutive_steps(with_earlier_weights(order, way.step.costs), way.step.costs)
        assert way.seconds == pytest.approx(expected.period + way.step.outside_seconds)
        assert way.gain_without_barrier == facts(way)["gain_without_barrier"] == pytest.approx(expected.gain)
        assert (way.gain_without_barrier > LEAST_GAIN) == (way.schedule != "1f1b")
    source = tmp_path / "run.yaml"
    source.write_text(CONFIG)
    only = [f"--only={key}={','.join(map(str, values))}" for key, values in limits.items()]
    done = pipemem("plan", str(source), "--set=pipemem_overlap_steps=true", "--search-seconds", "0", *only)
    assert done.exit_code == 0 and "no barrier" in done.output and "1.000" in done.output, done.output
