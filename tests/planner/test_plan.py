"""What the planner finds against every candidate priced on its own, its memory against sums by hand, and the command."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_pipemem.cli.app import app
from megatron_pipemem.errors import ConfigError, PipememError, UnsupportedError
from megatron_pipemem.planner.activations import head_bytes, layer_bytes
from megatron_pipemem.planner.cluster import GIB, Cluster, HostChannel, Link
from megatron_pipemem.planner.feasibility import feasible
from megatron_pipemem.planner.loading import load
from megatron_pipemem.planner.model import Execution, Model, Passes
from megatron_pipemem.planner.profile import from_formulas
from megatron_pipemem.planner.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.planner.search import layout
from megatron_pipemem.planner.search import variants as variants_module
from megatron_pipemem.planner.search.memory import held
from megatron_pipemem.planner.search.output import gibibytes
from megatron_pipemem.planner.search.planning import SEARCHED, plan
from megatron_pipemem.planner.search.prices import Pace, all_reduce, embedding, head, layer
from megatron_pipemem.planner.search.replay import Replay, measured
from megatron_pipemem.planner.search.space import Limits, cuts, orders
from megatron_pipemem.planner.search.step import DISTRIBUTED, least_seconds, least_static, price
from megatron_pipemem.planner.search.variants import PLAIN, Variant, register_variant
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, synchronous_schedules
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate
from megatron_pipemem.schedule.validator import validate

MODEL = Model(layers=8, hidden=2048, heads=16, vocabulary=32000, sequence=1024)
CLUSTER = Cluster(
    memory_gib=24.0,
    tflops=300.0,
    intra_node=Link(200.0),
    inter_node=Link(20.0),
    host=HostChannel(20.0, 20.0),
    host_memory_gib=500.0,
    nodes=2,
    devices_per_node=4,
)
RUN = Run(MODEL, CLUSTER, Parallelism(global_batch=16))
FAMILIES = ("1f1b", "interleaved", "zb-h1", "gis-h", "zbv", "v-half", "v-min", "1f1b-v")


def tiny(memory_gib: float) -> Run:
    return replace(RUN, cluster=replace(CLUSTER, memory_gib=memory_gib))


def everything(run: Run, names: tuple[str, ...]) -> list[tuple[float, float]]:
    """Seconds and peak bytes of every plain candidate, each simulated on its own."""
    found = []
    for cut in cuts(run, Limits(), Counter()):
        for placement, several in orders(cut, Limits({"schedule": names}), Counter()).items():
            step = price(cut, placement)
            for order in several:
                options = {} if order.chunks is None else {"chunks": order.chunks}
                size = {"num_devices": cut.parallelism.pp, "num_microbatches": cut.parallelism.microbatches}
                try:
                    timeline = simulate(build_schedule(order.name, **size, **options), step.costs)
                except PipememError:
                    continue
                held = zip(timeline.peaks, step.static, step.buffers, strict=True)
                found.append((timeline.makespan + step.reduction + step.optimizer, max(map(sum, held))))
    return found


@pytest.mark.parametrize(
    ("memory_gib", "families"), [(5.0, FAMILIES), (24.0, FAMILIES), (24.0, ("chimera", "gems", "dualpipe"))]
)
def test_the_listed_plans_are_the_best_of_all_candidates(memory_gib, families):
    run = tiny(memory_gib)
    fits = sorted(seconds for seconds, peak in everything(run, families) if peak <= run.cluster.memory_bytes)
    found = plan(run, limits=Limits({"schedule": families, "variant": (PLAIN,)}), top=12, search_seconds=0)
    assert [each.seconds for each in found.plans] == pytest.approx(fits[:12])
    assert all(each.peak <= run.cluster.memory_bytes for each in found.plans)
    assert found.considered == len(found.plans) + found.rejected.total()


@settings(max_examples=8, deadline=None)
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
    run = Run(model, cluster, Parallelism(global_batch=dice.choice([12, 24, 96])), megatron=flags)
    schedules = ("1f1b", "gpipe", "zb-h1", "v-half")
    limits = Limits({"schedule": schedules, "recompute": (recompute,), "micro_batch": (1,)})
    for best in plan(run, limits=limits, top=2, search_seconds=0).plans:
        for most in (best.peak, float(gibibytes(best.peak)) * GIB):
            again = plan(run, most, limits, top=1, search_seconds=0).plans
            assert again and again[0].seconds <= best.seconds


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("family", ["1f1b", "gpipe", "interleaved"])
def test_so_does_that_of_a_plan_that_recomputes_everything(family, pp):
    """There I takes memory, but in a full backward."""
    chosen = {"schedule": (family,), "recompute": ("full",), "pp": (pp,), "tp": (1, 2), "variant": (PLAIN,)}
    limits = Limits({**chosen, "micro_batch": (1,)})
    run = replace(tiny(80.0), model=replace(MODEL, vocabulary=2000))
    (best,) = plan(run, limits=limits, top=1, search_seconds=0).plans
    (again,) = plan(run, best.peak, limits, 1, 0).plans
    assert again.seconds <= best.seconds


@given(st.floats(1, 1e15))
def test_bytes_in_tables_are_rounded_up(nbytes):
    text = gibibytes(nbytes)
    assert nbytes <= float(text) * GIB
    assert float(text) * GIB <= nbytes * 1.11 + (nbytes > GIB) * 0.11 * GIB


def test_two_copies_of_the_model_hold_it_twice_and_are_added_up():
    run = replace(RUN, parallelism=replace(RUN.parallelism, pp=4, dp=2))
    one, two = (
        price(run, Placement.linear(4)),
        price(run, Placement.bidirectional(4), layers=price(run, Placement.linear(4)).layers),
    )
    assert two.static == pytest.approx([own + other for own, other in zip(one.static, one.static[::-1], strict=True)])
    assert sum(two.work) == pytest.approx(sum(one.work))
    assert two.optimizer == pytest.approx(max(two.static) / max(one.static) * one.optimizer)
    assert two.reduction > 2 * one.reduction
    assert len(two.layers) == 4
    rejected: Counter[str] = Counter()
    assert all(placement.replicas == 1 for placement in orders(run, Limits(), rejected))
    assert rejected["gems: two copies of the model take more memory than they save"] == 1


def every_variant(run: Run, limits: Limits) -> list[tuple[float, str]]:
    """Seconds and variant of all that fits, each simulated with all microbatches."""
    found = []
    for cut in cuts(run, limits, Counter()):
        size = {"num_devices": cut.parallelism.pp, "num_microbatches": cut.parallelism.microbatches}
        for placement, several in orders(cut, limits, Counter()).items():
            for order in several:
                alone = build_schedule(order.name, **size)
                for variant in (None, *variants_module.variants()):
                    step = price(cut, placement) if variant is None else variant.prepare(cut, placement, None)
                    room = step.room(run.cluster.memory_bytes)
                    if variant is not None and variant.frees_memory and fits(simulate(alone, step.costs), room):
                        continue
                    try:
                        timeline = simulate(alone if variant is None else variant.apply(alone, step, room), step.costs)
                    except PipememError:
                        continue
                    if fits(timeline, room):
                        seconds = timeline.makespan + step.outside
                        found.append((seconds, PLAIN if variant is None else variant.name))
    return sorted(found)


def fits(timeline: Timeline, room: tuple[float, ...]) -> bool:
    return all(peak <= most for peak, most in zip(timeline.peaks, room, strict=True))


@pytest.mark.parametrize("memory_gib", [3.0, 5.0, 24.0])
def test_the_listed_plans_are_the_best_of_all_variants(memory_gib):
    cluster = replace(CLUSTER, memory_gib=memory_gib, host=HostChannel(200.0, 200.0))
    # Twenty and forty microbatches over two devices are more than the planner runs at first.
    run = replace(RUN, cluster=cluster, parallelism=Parallelism(global_batch=40))
    limits = {"schedule": ("1f1b", "zb-h1", "v-half"), "tp": (1, 4), "pp": (2, 4), "recompute": ("none",)}
    limits = Limits({**limits, "micro_batch": (1, 2)})
    wanted = every_variant(run, limits)
    found = plan(run, limits=limits, top=10, search_seconds=0)
    assert [each.seconds for each in found.plans] == pytest.approx([seconds for seconds, _ in wanted[:10]])
    assert {each.variant for each in found.plans} >= {name for _, name in wanted[:10]}
    assert not any(each.extended for each in found.plans)
    assert found.considered == len(found.plans) + found.rejected.total()


def test_a_plan_that_fails_in_full_gives_way_to_the_next(monkeypatch):
    def apply(order: Schedule, step, room):
        if order.num_microbatches == 40:
            raise UnsupportedError("not so many")
        return order

    monkeypatch.setattr(variants_module, "_VARIANTS", {})
    register_variant(Variant("short", lambda choice: choice, lambda *asked: price(*asked[:2]), apply))
    limits = {"schedule": ("1f1b",), "tp": (4,), "pp": (2,), "recompute": ("none",), "micro_batch": (1,)}
    found = plan(replace(RUN, parallelism=Parallelism(global_batch=40)), limits=Limits(limits), top=2, search_seconds=0)
    assert [each.variant for each in found.plans] == [PLAIN]
    assert found.rejected == {"short cannot be had with 1f1b: not so many": 1}


def test_offload_that_does_not_suffice_says_what_is_in_the_way():
    cluster = replace(CLUSTER, memory_gib=2.4, host=HostChannel(200.0, 200.0), host_memory_gib=0.01)
    limits = {"schedule": ("1f1b",), "tp": (1,), "pp": (4,), "recompute": ("none",), "micro_batch": (2,)}
    limits = Limits({**limits, "variant": ("offload",)})
    found = plan(replace(RUN, cluster=cluster), limits=limits, search_seconds=0)
    assert not found.plans
    assert found.rejected == {"offload cannot be had with 1f1b: too much has to stay on a device (host memory)": 1}


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
    assert rejected["recomputing core_attn saves next to nothing here"] == 6


def test_more_memory_is_never_slower_and_the_least_is_said():
    best = []
    for memory_gib in (1.0, 3.0, 5.0, 8.0, 24.0):
        found = plan(RUN, memory=memory_gib * GIB, limits=Limits({"schedule": FAMILIES}), top=1, search_seconds=0)
        best.append(found.plans[0].seconds if found.plans else float("inf"))
        assert found.plans or any("exceed the memory" in reason for reason in found.rejected)
    assert best == sorted(best, reverse=True)
    assert best[0] == float("inf") and best[-1] < best[1]


def test_bounds_before_anything_is_placed_hold():
    for cut in cuts(RUN, Limits({"micro_batch": (1, 2)}), Counter()):
        for placement in orders(cut, Limits({"schedule": FAMILIES}), Counter()):
            step = price(cut, placement)
            assert least_seconds(cut) <= max(step.work) * cut.parallelism.microbatches * (1 + 1e-9)
            assert least_static(cut) <= max(step.static) * (1 + 1e-9)


def test_bytes_of_ranks_by_hand():
    cut = Parallelism(pp=2, dp=2, global_batch=8)
    run = replace(RUN, parallelism=cut, megatron={DISTRIBUTED: True}, schedule=ScheduleChoice("1f1b"))
    h, s, v = 2048, 1024, 32000
    per_layer = 12 * h * h + 13 * h
    parameters = (4 * per_layer + v * h + s * h, 4 * per_layer + v * h + 2 * h)
    # 16-bit parameters and fp32 gradients; master parameters and two moments on one of two ranks.
    static = [count * (2 + 4) + count * 12 / 2 for count in parameters]
    kept, last = layer_bytes(MODEL, Execution()).saved, head_bytes(MODEL, Execution()).saved
    messages = 4 * s * h * 2
    expected = (static[0] + 2 * 4 * kept + messages, static[1] + 4 * kept + last + messages + s * v * 4)
    assert held(run).device == pytest.approx(expected)


def test_without_the_distributed_optimizer_every_rank_holds_all_of_it():
    cut = Parallelism(dp=4, global_batch=8)
    shared = price(replace(RUN, parallelism=cut, megatron={DISTRIBUTED: True}), Placement.linear(1))
    alone = price(replace(RUN, parallelism=cut), Placement.linear(1))
    parameters = 8 * (12 * 2048**2 + 13 * 2048) + 2 * 32000 * 2048 + 1024 * 2048 + 2 * 2048
    assert alone.static[0] - shared.static[0] == pytest.approx(parameters * 12 * 3 / 4)
    assert alone.optimizer == pytest.approx(4 * shared.optimizer)


def test_a_layer_takes_its_products_its_tensors_and_its_messages():
    execution = Execution(tp=4, sequence_parallel=True)
    part, alone = layer(MODEL, execution, CLUSTER), layer(MODEL, Execution(), CLUSTER)
    nbytes = 1024 * 2048 * 2
    assert part.communication.forward == pytest.approx(4 * (10e-6 + nbytes * 3 / 4 / 200e9))
    assert part.communication.forward == pytest.approx(2 * all_reduce(nbytes, 4, Link(200.0)))
    assert alone.communication.total == 0
    # A quarter of the work and more: smaller products are slower.
    assert part.seconds.total - part.communication.total > alone.seconds.total / 4
    again = layer(MODEL, Execution(recompute="full"), CLUSTER)
    assert again.again == pytest.approx(alone.seconds.forward)
    assert again.seconds.input == pytest.approx(alone.seconds.input + alone.seconds.forward)


def test_messages_between_nodes_are_slower():
    step = price(replace(RUN, parallelism=Parallelism(tp=2, pp=4, global_batch=8)), Placement.linear(4))
    nbytes = 1024 * 2048 * 2
    assert step.costs.link_seconds(0, 1) == pytest.approx(10e-6 + nbytes / 200e9)
    assert step.costs.link_seconds(1, 2) == pytest.approx(10e-6 + nbytes / 20e9)


def test_reduction_hides_behind_backwards_that_are_long_enough():
    def reduction(link: float) -> float:
        cluster = replace(CLUSTER, intra_node=Link(link, 0.0))
        run = replace(RUN, cluster=cluster, parallelism=Parallelism(dp=2, global_batch=8), megatron={DISTRIBUTED: True})
        return price(run, Placement.linear(1)).reduction

    ends = [head(MODEL, Execution(), CLUSTER), embedding(MODEL, Execution(), CLUSTER)]
    parts = [layer(MODEL, Execution(), CLUSTER)] * 8 + ends
    parameters = sum(part.parameters for part in parts)
    forward = sum(part.seconds.forward for part in parts)
    backward = sum(part.seconds.total for part in parts) - forward
    assert reduction(1e6) == 0
    assert reduction(1.0) == pytest.approx((4 + 2) * parameters / 2 / 1e9 - backward - forward)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32))
def test_a_replay_is_a_simulation(devices, microbatches, seed):
    rng = random.Random(seed)
    for schedule in synchronous_schedules(devices, microbatches):
        per_stage = [[rng.uniform(0.1, 2) for _ in range(schedule.num_stages)] for _ in range(3)]
        hops = {
            (a, b): rng.uniform(0, 0.3) for a, b in itertools.product(range(schedule.num_devices), repeat=2) if a != b
        }
        costs = Costs(*per_stage, p2p=hops, memory={Kind.F: per_stage[0], Kind.B: [-x for x in per_stage[0]]})
        timeline, found = simulate(schedule, costs), Replay(schedule)
        assert found.makespan(costs) == pytest.approx(timeline.makespan)
        assert found.peaks(costs) == timeline.peaks


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("microbatches", [48, 51])
def test_long_steps_are_extended(name, microbatches):
    costs = Costs(1.0, 1.2, 0.8, p2p=0.05)
    timeline = simulate(build_schedule(name, num_devices=4, num_microbatches=microbatches), costs)
    seconds, peaks = measured(name, 4, microbatches, None, costs)
    assert seconds == pytest.approx(timeline.makespan, rel=0.01)
    assert peaks == pytest.approx(timeline.peaks)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(sum))
def test_layouts_are_read_as_written(counts):
    model = replace(MODEL, layers=sum(counts))
    text = layout.written(counts)
    assert layout.layers_of(replace(RUN, model=model, megatron={layout.FLAG: text}), len(counts)) == tuple(counts)


def test_layouts_in_megatrons_words():
    assert layout.written((3, 4, 4, 4, 3)) == "Et*3|(t*4|)*3t*3L"
    assert layout.written((0, 1, 1, 0, 2)) == "E|(t|)*2|t*2L"
    assert layout.written((2,)) == "Et*2L"
    first = replace(RUN, megatron={"decoder_first_pipeline_num_layers": 3})
    assert layout.layers_of(first, 2) is None
    assert layout.layers_of(RUN, 4) == (2, 2, 2, 2)


def test_runs_that_do_not_fit_are_refused_with_the_rank():
    cut = Parallelism(pp=4, dp=2, micro_batch=2, global_batch=16)
    run = replace(RUN, parallelism=cut, schedule=ScheduleChoice("1f1b"))
    assert feasible(run) is None
    reason = feasible(replace(run, cluster=replace(CLUSTER, memory_gib=3.0)))
    assert reason is not None and reason.startswith("pipeline rank 0 needs") and "of 3.0 GiB" in reason


def test_what_offload_and_a_cut_vocabulary_change_is_counted():
    cut = Parallelism(pp=4, dp=2, micro_batch=2, global_batch=64)
    cluster = replace(CLUSTER, host=HostChannel(200.0, 200.0))  # fast enough to be worth it
    run = replace(RUN, cluster=cluster, parallelism=cut, schedule=ScheduleChoice("1f1b"))
    whole, away, shared, spread = (
        held(replace(run, schedule=replace(run.schedule, **more)))
        for more in ({}, {"offload": "full"}, {"vocab_parallel": "1"}, {"vocab_parallel": "auto"})
    )
    assert away.device[0] < whole.device[0] and away.host[0] > 0 == max(whole.host)
    # Its parameters leave the ends for all ranks; the two microbatches more that wait come on top.
    assert shared.device[3] < whole.device[3] and shared.device[1] > whole.device[1]
    assert max(spread.device) <= min(max(shared.device), max(whole.device))
    both = replace(run, schedule=replace(run.schedule, offload="full", vocab_parallel="1"))
    assert "not planned together with vocabulary passes" in feasible(both)
    between = (max(away.device) + max(whole.device)) / 2 / GIB
    small = replace(run, cluster=replace(cluster, memory_gib=between))
    offloading = replace(small, schedule=replace(run.schedule, offload="full"))
    assert "needs" in feasible(small) and feasible(offloading) is None
    # The plan moves less where the host has less, until the device no longer has room for what stays.
    little = replace(offloading, megatron={"pipemem-host-memory": "1GiB"})
    assert max(held(little).host) <= GIB / 4 and "of" in feasible(little)


def test_a_search_starts_where_families_leave_time(tmp_path):
    limits = Limits(
        {
            "schedule": ("1f1b", SEARCHED),
            "variant": (PLAIN,),  # only plain orders are searched
            "tp": (1,),
            "pp": (4,),
            "recompute": ("none",),
            "micro_batch": (1,),
        }
    )
    found = plan(RUN, limits=limits, top=4, search_seconds=1)
    best = found.plans[0]
    assert best.schedule == SEARCHED and best.seconds < min(each.seconds for each in found.plans if each.order is None)
    assert best.order is not None
    validate(best.order, best.step.costs)


def test_unknown_keys_cannot_be_limited():
    with pytest.raises(ConfigError, match="did you mean 'micro_batch'"):
        Limits({"micro-batch": (1,)})


CONFIG = """
model: {layers: 8, hidden: 2048, heads: 16, vocabulary: 32000, sequence: 1024}
cluster: {memory_gib: 24, tflops: 300, intra_node: {gb_per_s: 200}, inter_node: {gb_per_s: 20}, nodes: 2,
  devices_per_node: 4, host: {d2h_gb_per_s: 20, h2d_gb_per_s: 20}, host_memory_gib: 500}
parallelism: {global_batch: 16}
megatron: {lr: 1.0e-4}
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
    refused = CliRunner().invoke(app, ["plan", str(source), "--only", limit])
    assert refused.exit_code == 2 and words in refused.stderr


def test_the_command_writes_a_run_that_launches(tmp_path):
    source, target = tmp_path / "run.yaml", tmp_path / "planned" / "best.yaml"
    source.write_text(CONFIG)
    limits = ["--only", "schedule=v-half,1f1b", "--only", "variant=plain", "--only", "pp=4", "--only", "tp=1"]
    command = ["plan", str(source), "--json", "--output", str(target), "--top", "3", "--memory", "8GiB", *limits]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    best = answer["plans"][0]
    assert len(answer["plans"]) == 3 and answer["considered"] == 3 + sum(answer["rejected"].values())
    assert max(best["peak_bytes"]) <= 8 * GIB and best["pp"] == 4 and sum(best["layers"]) == 8
    run = load(target, Run)
    assert (run.schedule.name, run.parallelism.micro_batch) == (best["schedule"], best["micro_batch"])
    assert run.megatron["lr"] == 1e-4 and feasible(run) is None
    assert max(held(run).device) == pytest.approx(max(best["peak_bytes"]))
    launched = CliRunner().invoke(app, ["launch", str(target), "--print", "--node-rank", "0", "--master-addr", "h"])
    assert launched.exit_code == 0 and f"--pipemem-schedule {best['schedule']}" in launched.stdout


def test_a_searched_order_is_written_beside_its_run(tmp_path):
    source, target = tmp_path / "run.yaml", tmp_path / "best.yaml"
    source.write_text(CONFIG)
    limits = ["--only", "schedule=1f1b,search", "--only", "pp=4", "--only", "tp=1", "--only", "micro_batch=1"]
    done = CliRunner().invoke(app, ["plan", str(source), "--output", str(target), "--search-seconds", "1", *limits])
    assert done.exit_code == 0 and "binds" in done.output, done.output
    run = load(target, Run)
    assert run.schedule.name == str(tmp_path / "best.csv") and feasible(run) is None
    order = Schedule.from_csv((tmp_path / "best.csv").read_text())
    assert (order.num_devices, order.num_microbatches) == (4, run.parallelism.microbatches)


def test_where_nothing_fits_the_command_says_why(tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text(CONFIG)
    done = CliRunner().invoke(app, ["plan", str(source), "--memory", "100MiB"])
    assert done.exit_code == 2 and "parameters, gradients and optimizer alone exceed the memory" in done.output


def test_a_measured_profile_sets_the_pace(tmp_path):
    profile = from_formulas(MODEL, Execution(tp=2), CLUSTER)
    with pytest.raises(ConfigError, match="from formulas, not measured"):
        Pace.of(profile, CLUSTER)
    modelled = layer(MODEL, Execution(tp=2), CLUSTER)
    computing = modelled.seconds + modelled.communication * -1
    thrice = replace(profile, source="measured", layer=replace(profile.layer, seconds=computing * 3))
    pace = Pace.of(thrice, CLUSTER)
    assert pace.layer == Passes(*[pytest.approx(3)] * 3)
    slow = layer(MODEL, Execution(tp=4), CLUSTER, False, pace.layer)
    fast = layer(MODEL, Execution(tp=4), CLUSTER)
    assert slow.communication == fast.communication
    assert (slow.seconds + fast.communication * -1).total == pytest.approx(
        3 * (fast.seconds + fast.communication * -1).total
    )
    source, file = tmp_path / "run.yaml", tmp_path / "profile.json"
    source.write_text(CONFIG)
    file.write_text(json.dumps(thrice.to_json([4, 4])))
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
        done = CliRunner().invoke(app, ["plan", str(source), *limits, *more])
        assert done.exit_code == 0, done.output
        plans.append(json.loads(done.stdout)["plans"][0]["seconds"])
    assert 2 < plans[1] / plans[0] < 3


def test_ends_that_all_devices_share_are_shared():
    run = replace(RUN, parallelism=Parallelism(pp=4, dp=2, global_batch=8))
    whole, shared = (price(run, Placement.linear(4), shared_ends=each) for each in (False, True))
    assert sum(shared.static) == pytest.approx(sum(whole.static), rel=1e-6)
    assert shared.layers == (2, 2, 2, 2) and max(shared.static) - min(shared.static) == 0
    # What the shares compute is work of the devices, but no part of the stages' costs.
    assert sum(shared.work) == pytest.approx(sum(whole.work), rel=0.01)
    assert len(set(shared.costs.forward)) == 1


def test_registered_variants_are_planned(monkeypatch):
    def faster(run: Run, placement: Placement, pace: Pace | None):
        step = price(run, placement, pace=pace)
        half = [[seconds / 2 for seconds in each] for each in (step.costs.forward, step.costs.backward_input)]
        return replace(step, costs=replace(step.costs, forward=half[0], backward_input=half[1]))

    monkeypatch.setattr(variants_module, "_VARIANTS", {})
    added = Variant("faster", lambda choice: replace(choice, offload="full"), faster, lambda order, step, room: order)
    register_variant(added)
    with pytest.raises(UnsupportedError, match="'faster' is registered already"):
        register_variant(added)
    limits = {"schedule": ("1f1b", "zbv"), "recompute": ("none",)}
    best = plan(RUN, limits=Limits(limits), top=1, search_seconds=0).plans[0]
    assert best.variant == "faster" and best.run.schedule.offload == "full" and best.order is not None
    plain = plan(RUN, limits=Limits({**limits, "variant": (PLAIN,)}), top=1, search_seconds=0).plans[0]
    assert plain.variant == PLAIN and plain.seconds > best.seconds
