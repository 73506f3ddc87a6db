"""What a step takes: bytes of ranks against sums by hand, seconds, replays of schedules, layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from megatron_pipemem.model import layout
from megatron_pipemem.model.activations import head_bytes, layer_bytes
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.schedule.action import RECEIVES, Kind
from megatron_pipemem.schedule.action_prices import held_after
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.message_memory import sent_bytes
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.cluster import GIB, Cluster, HostChannel, Link
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, ScheduleChoice
from megatron_pipemem.tools.launch.command import script_flags
from megatron_pipemem.tools.launch.feasibility import feasible
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.parameter_bytes import DISTRIBUTED
from megatron_pipemem.tools.planner.prices import all_reduce, embedding, head, layer
from megatron_pipemem.tools.planner.profile import from_formulas
from megatron_pipemem.tools.planner.step import price
from megatron_pipemem.tools.planner.variants import run_step
from tests.planner.small_run import CLUSTER, MODEL, RUN


def parameters_of_halves() -> tuple[int, int]:
    """Of the two stages of the small model."""
    h, s, v = 2048, 1024, 32000
    per_layer = 12 * h * h + 13 * h
    return 4 * per_layer + v * h + s * h, 4 * per_layer + v * h + 2 * h


def test_bytes_of_ranks_by_hand():
    cut = Parallelism(pp=2, dp=2, global_batch=8)
    run = replace(RUN, parallelism=cut, flags={DISTRIBUTED: True}, schedule=ScheduleChoice("1f1b"))
    h, s, v = 2048, 1024, 32000
    parameters = parameters_of_halves()
    # 16-bit parameters and fp32 gradients; master parameters and two moments on one of two ranks.
    static = [count * (2 + 4) + count * 12 / 2 for count in parameters]
    kept, last = layer_bytes(MODEL, Execution()).saved, head_bytes(MODEL, Execution()).saved
    message, nccl = s * h * 2, 4 * (524_288 + 4_915_200 + 4_194_304)
    # Rank 0 has sent both outputs when it gets the first gradient.
    first = static[0] + 2 * (4 * kept + message) + 2 * message + nccl
    expected = (first, static[1] + 4 * kept + last + 2 * message + s * v * 4 + nccl)
    assert predicted_memory(run).device_bytes == pytest.approx(expected)


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize(
    "name", [family.name for family in families() if not family.asynchronous and family.slices == 1]
)
def test_the_fullest_rank_has_room_for_the_messages_of_its_program(name, p, layers):
    """The oracle counts the messages of the lowered program after every action."""
    schedule = build_schedule(name, num_devices=p, num_microbatches=3 * p)
    program, placement = lower(schedule), schedule.placement
    run = replace(
        RUN,
        model=replace(MODEL, layers=layers * placement.model_stages, vocabulary=1024),
        cluster=replace(CLUSTER, memory_gib=1e6),
        parallelism=Parallelism(pp=p, global_batch=3 * p),
    )
    step, message = price(run, placement), 1024 * 2048 * 2
    changes = step.costs.memory_changes(placement)
    needed = []
    for device, actions in enumerate(program.actions):
        arrived = accumulate(
            (action.kind in RECEIVES) - (Router(placement).awaited(action) is not None) for action in actions
        )
        sent, kept = sent_bytes(program, device, lambda action: message), held_after(actions, changes)
        besides = step.static_bytes[device] + step.buffer_bytes[device] - 2 * message * len(placement.stages[device])
        needed.append(besides + max(map(sum, zip(kept, sent, (message * count for count in arrived), strict=True))))
    predicted = max(step.held(peaks(schedule, step.costs)))
    assert 0.998 * max(needed) <= predicted <= 1.02 * max(needed)


def test_without_the_distributed_optimizer_every_rank_holds_all_of_it():
    cut = Parallelism(dp=4, global_batch=8)
    shared = price(replace(RUN, parallelism=cut, flags={DISTRIBUTED: True}), Placement.linear(1))
    alone = price(replace(RUN, parallelism=cut), Placement.linear(1))
    parameters = 8 * (12 * 2048**2 + 13 * 2048) + 2 * 32000 * 2048 + 1024 * 2048 + 2 * 2048
    assert alone.static_bytes[0] - shared.static_bytes[0] == pytest.approx(parameters * 12 * 3 / 4)
    assert alone.optimizer_seconds == pytest.approx(4 * shared.optimizer_seconds)


def test_a_layer_takes_its_products_its_tensors_and_its_messages():
    execution = Execution(tp=4, sequence_parallel=True)
    part, alone = layer(MODEL, execution, CLUSTER), layer(MODEL, Execution(), CLUSTER)
    nbytes = 1024 * 2048 * 2
    assert part.communication_seconds.forward == pytest.approx(4 * (10e-6 + nbytes * 3 / 4 / 200e9))
    assert part.communication_seconds.forward == pytest.approx(2 * all_reduce(nbytes, 4, Link(200.0)))
    assert alone.communication_seconds.total == 0
    # A quarter of the work and more: smaller products are slower.
    assert part.seconds.total - part.communication_seconds.total > alone.seconds.total / 4
    again = layer(MODEL, Execution(recompute="full"), CLUSTER)
    assert again.recompute_seconds == pytest.approx(alone.seconds.forward)
    assert again.seconds.input == pytest.approx(alone.seconds.input + alone.seconds.forward)


@pytest.mark.parametrize(
    "cut",
    [
        Parallelism(pp=3, global_batch=8),
        Parallelism(tp=4, pp=3, global_batch=8, sequence_parallel=True),
        Parallelism(tp=2, pp=3, cp=2, micro_batch=2, global_batch=8),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_profile_by_formulas_and_the_planner_price_stages_alike(cut, recompute):
    run = replace(RUN, parallelism=cut, schedule=ScheduleChoice("1f1b", recompute=recompute))
    planned = price(run, Placement.linear(3), layers=(3, 3, 2)).costs
    profiled = replace(from_formulas(run.model, run.execution, run.cluster).costs(), cut=(3, 3, 2))
    expected, from_profile = (costs.seconds(Placement.linear(3)) for costs in (planned, profiled))
    for kind in (Kind.F, Kind.I, Kind.W):
        assert from_profile[kind] == pytest.approx(expected[kind])


def test_messages_between_nodes_are_slower():
    step = price(replace(RUN, parallelism=Parallelism(tp=2, pp=4, global_batch=8)), Placement.linear(4))
    nbytes = 1024 * 2048 * 2
    assert step.costs.link_seconds(0, 1) == pytest.approx(10e-6 + nbytes / 200e9)
    assert step.costs.link_seconds(1, 2) == pytest.approx(10e-6 + nbytes / 20e9)


def test_reduction_hides_behind_backwards_that_are_long_enough():
    def reduction(link: float) -> float:
        cluster = replace(CLUSTER, intra_node=Link(link, 0.0))
        run = replace(RUN, cluster=cluster, parallelism=Parallelism(dp=2, global_batch=8), flags={DISTRIBUTED: True})
        return price(run, Placement.linear(1)).reduction_seconds

    ends = [head(MODEL, Execution(), CLUSTER), embedding(MODEL, Execution(), CLUSTER)]
    parts = [layer(MODEL, Execution(), CLUSTER)] * 8 + ends
    parameters = sum(part.parameters for part in parts)
    forward = sum(part.seconds.forward for part in parts)
    backward = sum(part.seconds.total for part in parts) - forward
    assert reduction(1e6) == 0
    assert reduction(1.0) == pytest.approx((4 + 2) * parameters / 2 / 1e9 - backward - forward)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(sum))
def test_layouts_are_read_as_written(counts):
    model = replace(MODEL, layers=sum(counts))
    text = layout.written(counts)
    assert run_layout.pieces_of(replace(RUN, model=model, flags={layout.FLAG: text}), len(counts)) == tuple(counts)


def test_runs_that_do_not_fit_are_refused_with_the_rank():
    cut = Parallelism(pp=4, dp=2, micro_batch=2, global_batch=16)
    run = replace(RUN, parallelism=cut, schedule=ScheduleChoice("1f1b"))
    assert feasible(run) is None
    reason = feasible(replace(run, cluster=replace(CLUSTER, memory_gib=3.0)))
    assert reason is not None and {"rank", "0", "3.0"} <= set(reason.split())


@pytest.mark.parametrize(
    ("devices", "stride", "gb_per_s", "latency_us"),
    [(8, 1, 240, 70), (16, 1, 160, 160), (4, 8, 20, 60), (8, 2, 80, 80), (4, 2, 240, 30), (1, 1, 240, 0)],
)
def test_a_ring_crosses_nodes_on_the_adapters_of_all_its_devices(devices, stride, gb_per_s, latency_us):
    cluster = load("a100-80g", Cluster)  # 240 GB/s and 10 us within nodes of 8, 20 GB/s and 20 us an adapter
    assert cluster.ring(devices, stride) == Link(gb_per_s, latency_us)


def test_what_offload_and_a_cut_vocabulary_change_is_counted():
    cut = Parallelism(pp=4, dp=2, micro_batch=2, global_batch=64)
    cluster = replace(CLUSTER, host=HostChannel(200.0, 200.0))  # fast enough to be worth it
    run = replace(RUN, cluster=cluster, parallelism=cut, schedule=ScheduleChoice("1f1b"))
    whole, away, shared, spread = (
        predicted_memory(replace(run, schedule=replace(run.schedule, **more)))
        for more in ({}, {"offload": "full"}, {"vocab_cut": "1"}, {"vocab_cut": "auto"})
    )
    assert away.device_bytes[0] < whole.device_bytes[0] and away.host_bytes[0] > 0 == max(whole.host_bytes)
    # Its parameters leave the ends for all ranks; the two microbatches more that wait come on top.
    assert shared.device_bytes[3] < whole.device_bytes[3] and shared.device_bytes[1] > whole.device_bytes[1]
    assert max(spread.device_bytes) <= min(max(shared.device_bytes), max(whole.device_bytes))
    both = replace(run, schedule=replace(run.schedule, offload="full", vocab_cut="1"))
    assert "not planned together with vocabulary passes" in feasible(both)
    between = (max(away.device_bytes) + max(whole.device_bytes)) / 2 / GIB
    small = replace(run, cluster=replace(cluster, memory_gib=between))
    offloading = replace(small, schedule=replace(run.schedule, offload="full"))
    assert "needs" in feasible(small) and feasible(offloading) is None
    # The plan moves less where the host has less, until the device no longer has room for what stays.
    little = replace(offloading, flags={"pipemem-host-memory": "1GiB"})
    assert max(predicted_memory(little).host_bytes) <= GIB / 4 and "of" in feasible(little)


def test_the_state_to_roll_back_to_is_counted():
    cut = Parallelism(pp=2, dp=2, global_batch=8)
    flags = {DISTRIBUTED: True, "rerun-mode": "disabled"}
    run = replace(RUN, parallelism=cut, flags=flags, schedule=ScheduleChoice("1f1b"))
    overlapped = replace(run, schedule=replace(run.schedule, overlap_steps=True))
    plain, ahead = predicted_memory(run), predicted_memory(overlapped)
    # A parameter in fp32 and two moments, of the rank's half.
    state = [count * 12 / 2 for count in parameters_of_halves()]
    kept = [with_state - without for with_state, without in zip(ahead.device_bytes, plain.device_bytes, strict=True)]
    assert kept == pytest.approx(state) and ahead.host_bytes == plain.host_bytes == (0, 0)
    assert predicted_memory(replace(overlapped, flags={**flags, "clip-grad": 0})).device_bytes == plain.device_bytes

    in_fp32 = {**flags, "bf16": False}
    in_single = (
        predicted_memory(replace(overlapped, flags=in_fp32)).device_bytes[0]
        - predicted_memory(replace(run, flags=in_fp32)).device_bytes[0]
    )
    assert in_single == pytest.approx(state[0])

    tight = replace(CLUSTER, memory_gib=(ahead.device_bytes[0] - 1) / GIB)
    assert feasible(overlapped) is None is feasible(replace(run, cluster=tight))
    assert "needs" in feasible(replace(overlapped, cluster=tight))


def test_layouts_of_models_that_predict_ahead():
    """All of it is one piece behind the layers, on the last stage where nothing else is said."""
    model = replace(MODEL, mtp_layers=2)
    run = replace(RUN, model=model)
    assert run_layout.pieces_of(run, 4) == (2, 2, 2, 3) and layout.flags(model, (2, 2, 2, 3)) == {}
    with refused("bad-number", "eight"):
        run_layout.pieces_of(
            replace(run, model=replace(model, mtp_layers=0), flags={layout.FIRST_OR_LAST[0]: "eight"}), 4
        )
    assert layout.flags(model, (3, 3, 2, 1)) == {layout.FLAG: "Et*3|t*3|t*2|m*2L"}
    for counts in ((3, 3, 2, 1), (4, 4, 1, 0)):
        assert run_layout.pieces_of(replace(run, flags=layout.flags(model, counts)), 4) == counts


def test_a_hybrid_models_layers_are_shared_out_by_its_pattern():
    """By what they take, with the head and what predicts ahead on the last stage."""
    model = replace(MODEL, pattern="----****", ffn=6 * MODEL.hidden, mtp_layers=1, mtp_pattern="*")
    run = replace(RUN, model=model, parallelism=Parallelism(pp=2, global_batch=16))
    step = price(run, Placement.linear(2))
    assert sum(step.layers) == 8 and max(step.work_seconds) < max(price(run, Placement.linear(2), (4, 4)).work_seconds)
    flags = layout.flags(model, step.layers)
    assert flags == {layout.PATTERN: f"{'----****'[: step.layers[0]]}|{'----****'[step.layers[0] :]}/*"}
    assert run_layout.pieces_of(replace(run, flags=flags), 2) == step.layers
    words = script_flags(replace(run, flags=flags))
    assert words.count("--hybrid-layer-pattern") == 1 and flags[layout.PATTERN] in words and "--num-layers" not in words


def test_uneven_routing_is_priced_at_its_worst():
    sparse = replace(MODEL, experts=8, experts_per_token=2)
    run = replace(RUN, model=sparse, parallelism=Parallelism(pp=2, dp=4, ep=4, global_batch=16))
    worse = replace(run, parallelism=replace(run.parallelism, expert_load=1.5))
    assert worse.execution.expert_load == 1.5
    assert replace(worse, flags={"moe-expert-capacity-factor": 1.25}).execution.expert_load == 1.25
    assert replace(worse, parallelism=replace(worse.parallelism, ep=1)).execution.expert_load == 1
    even, uneven = (price(loaded, Placement.linear(2)) for loaded in (run, worse))
    assert all(b > a for a, b in zip(even.costs.memory[Kind.F], uneven.costs.memory[Kind.F], strict=True))


def test_a_run_that_does_not_fit_at_its_worst_is_told_what_it_needs_at_its_best():
    sparse = replace(MODEL, experts=8, experts_per_token=2)
    run = replace(RUN, model=sparse, parallelism=Parallelism(pp=4, dp=2, ep=2, global_batch=64, expert_load=3.0))
    run = replace(run, schedule=ScheduleChoice("1f1b"), flags={"moe-expert-capacity-factor": 2.5})
    evenly = replace(run, parallelism=replace(run.parallelism, expert_load=1.0), flags={})
    most, least = (max(predicted_memory(loaded).device_bytes) / GIB for loaded in (run, evenly))
    assert least < most
    reason = feasible(replace(run, cluster=replace(CLUSTER, memory_gib=(least + most) / 2)))
    assert (
        f"needs {most:.1f} GiB if its experts get 2.5 times an even share of tokens, and {least:.1f} GiB with" in reason
    )
    assert feasible(replace(evenly, cluster=replace(CLUSTER, memory_gib=(least + most) / 2))) is None


def test_deepseek_v3_is_shared_out_at_least_as_evenly_as_by_hand():
    """Over 16 ranks of two stages, where recipes take E and three layers, 29 stages of two, and a stage each for m and L."""
    cluster = replace(load("h100-80g", Cluster), nodes=128)
    cut = Parallelism(pp=16, dp=64, ep=64, chunks=2, global_batch=1024)
    run = replace(RUN, model=load("deepseek-v3", Model), cluster=cluster, parallelism=cut)
    placement = Placement.interleaved(16, 2)
    own, by_hand = price(run, placement), price(run, placement, (3, *[2] * 29, 1, 0))
    assert max(own.work_seconds) <= max(by_hand.work_seconds)
    assert run_layout.pieces_of(replace(run, flags=layout.flags(run.model, own.layers)), 32) == own.layers


def test_what_predicts_ahead_stays_with_the_head_in_a_v_and_where_the_head_is_cut():
    """There its embedding is on the first stage's device, and its outputs go into one head."""
    run = replace(RUN, model=replace(MODEL, mtp_layers=1), parallelism=Parallelism(pp=4, global_batch=16))
    loaded = replace(run, model=replace(run.model, vocabulary=1_000_000))
    assert price(loaded, Placement.linear(4)).layers[-1] == 0
    assert price(loaded, Placement.v_shape(4)).layers[-1] >= 1
    loaded = replace(loaded, schedule=ScheduleChoice("1f1b", vocab_cut="2"))
    plain, ahead = (run_step(replace(loaded, model=model), Placement.linear(4)) for model in (MODEL, run.model))
    assert ahead.layers[-1] >= 1
    costs = [step.costs.vocabulary for step in (plain, ahead)]
    latency = 1e-6 * loaded.cluster.ring(4).latency_us
    bytes_alone, bytes_ahead = (cost.collectives[Kind.BCAST_X] - latency for cost in costs)
    assert bytes_ahead == pytest.approx(2 * bytes_alone)
    assert costs[1].collectives[Kind.REDUCE_E] == pytest.approx(2 * costs[0].collectives[Kind.REDUCE_E])
    assert costs[1].seconds(4)[Kind.S][0] == pytest.approx(2 * costs[0].seconds(4)[Kind.S][0], rel=0.1)
