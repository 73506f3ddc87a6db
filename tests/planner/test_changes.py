"""What a run could do otherwise, simulated with its own times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_steps import as_measured

from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.pairs.orders import with_exchanges, with_pairs
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.measured import IMBALANCE, LATE, SCHEDULE, idle_causes
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import peaks, simulate
from megatron_pipemem.schedule.stream import stream
from megatron_pipemem.tools.planner import changes
from megatron_pipemem.tools.planner.changes import (
    MORE_MEMORY,
    OFFLOAD,
    SAME_MEMORY,
    Case,
    Change,
    best_changes,
)
from megatron_pipemem.tools.planner.explanation import explain

HEAVY_HEAD = (1.0, 1.0, 1.0, 1.75)


def case(name: str = "1f1b", costs: Costs | None = None, m: int = 8, **more) -> Case:
    step = as_measured(build_schedule(name, num_devices=4, num_microbatches=m), costs)
    return Case(step, **{"layers": (4,) * step.schedule.num_stages, "search_seconds": 0.0} | more)


def by_kind(of: Case) -> dict[str, Change]:
    return {each.kind: each for each in best_changes(of)}


def test_the_layers_and_the_head_are_found_again():
    measured = case(costs=Costs(HEAVY_HEAD, HEAVY_HEAD, HEAVY_HEAD))
    assert measured.passes.head == pytest.approx(3 * 0.75) and measured.passes.embedding == pytest.approx(0)
    for counts in ((4, 4, 4, 4), (5, 4, 4, 3), (2,) * 8):
        seconds = measured.measured.with_parts(cut=counts).seconds(Placement.linear(len(counts)))
        assert seconds[Kind.F][-1] == pytest.approx(counts[-1] / 4 + 0.75)
        assert sum(seconds[Kind.F]) + sum(seconds[Kind.I]) == pytest.approx(2 * 4.75)
    assert measured.cut(Placement.linear(4)) == (4, 5, 5, 2)  # 1, 1.25, 1.25, 1.25


def test_a_run_in_pairs_is_told_of_orders_with_room_for_more():
    costs = with_exchanges(Costs(p2p=0.01), 0.4)
    ran = with_pairs(build_schedule("zbv", num_devices=4, num_microbatches=16), costs)
    measured = Case(as_measured(ran.schedule, costs), (4,) * 8, search_seconds=0.0)
    assert measured.own.makespan == pytest.approx(ran.makespan)
    (change,) = [each for each in best_changes(measured) if "dualpipe-v" in each.flags]
    other = with_pairs(build_schedule("dualpipe-v", num_devices=4, num_microbatches=16), costs)
    assert change.seconds == pytest.approx(other.makespan, rel=0.01) and change.seconds < ran.makespan
    for each in idle_causes(measured.step):
        assert sum(each.causes.values()) == each.idle
        assert each.causes[IMBALANCE] == each.causes[LATE] == 0 < each.causes[SCHEDULE]


def test_a_bare_pipeline_is_told_of_better_schedules_in_the_same_memory():
    found = by_kind(case(memory={Kind.F: (100.0,) * 4, Kind.B: (-100.0,) * 4}))
    change = found[SAME_MEMORY]
    assert change.peak <= 400 and "zbv" in change.flags and "--num-virtual-stages-per-pipeline-rank 2" in change.flags
    zbv = simulate(build_schedule("zbv", num_devices=4, num_microbatches=8))
    assert change.seconds == pytest.approx(zbv.makespan)
    assert "did not split" in change.note and "layout" not in found


def test_the_three_best_are_told_with_what_they_save():
    facts = explain(case(costs=Costs(HEAVY_HEAD, HEAVY_HEAD, HEAVY_HEAD)))
    saved = [each["saves"] for each in facts["changes"]]
    more = [each["peak"] > facts["peak"] for each in facts["changes"]]
    assert len(saved) == 3 and more == [False, False, True]
    assert saved[:2] == sorted(saved[:2], reverse=True) and saved[2] > saved[1]
    assert {each["kind"] for each in facts["changes"]} >= {SAME_MEMORY, "vocabulary"}
    assert facts["simulated_seconds"] == pytest.approx(facts["seconds"])


def test_layers_are_moved_away_from_the_head():
    change = by_kind(case(costs=Costs(HEAVY_HEAD, HEAVY_HEAD, HEAVY_HEAD)))["layout"]
    assert '"Et*4|(t*5|)*2t*2L"' in change.flags and change.what.startswith("other layers per stage: 4, 5, 5, 2")
    assert by_kind(case(costs=Costs(HEAVY_HEAD, HEAVY_HEAD, HEAVY_HEAD), layers=None)).keys().isdisjoint({"layout"})


def test_what_the_configuration_refuses_is_not_offered():
    costs = Costs(HEAVY_HEAD, HEAVY_HEAD, HEAVY_HEAD)
    assert set(by_kind(case(costs=costs, refused={"schedules": "CUDA graphs"}))) == {"layout"}
    whole = by_kind(case(costs=costs, refused={"split": "", "vocabulary": "", "v": ""}))
    assert "vocabulary" not in whole
    assert whole[SAME_MEMORY].flags.split()[1] in ("interleaved", "1f1b-eager") if SAME_MEMORY in whole else True
    one_chunk = by_kind(case(costs=costs, refused={"reordered": ""}))
    assert "--num-virtual" not in one_chunk[SAME_MEMORY].flags


def test_only_a_faster_one_may_take_more_memory():
    found = by_kind(case(costs=Costs(p2p=0.5), refused={"v": "", "reordered": ""}))
    assert found[MORE_MEMORY].seconds <= found[SAME_MEMORY].seconds * (1 - changes.WORTH)
    assert found[MORE_MEMORY].peak > 1 and "zb-h2" in found[MORE_MEMORY].flags


def test_offload_brings_a_faster_schedule_into_the_memory_of_the_run(monkeypatch):
    monkeypatch.setattr(changes, "ASSUMED_RATIO", 0.25)
    found = by_kind(case(refused={"v": "", "reordered": "", "split": ""}, m=16))
    assert found[OFFLOAD].peak <= 1 and "--pipemem-offload auto --pipemem-memory-cap 1" in found[OFFLOAD].flags
    assert "interleaved" in found[OFFLOAD].flags


def test_what_runs_again_or_waits_on_the_host_may_stay():
    base = build_schedule("1f1b", num_devices=4, num_microbatches=8)
    again = tuple(
        tuple(
            each
            for action in order
            for each in ((action._replace(kind=Kind.R), action) if action.kind is Kind.B else (action,))
        )
        for order in base.orders
    )
    one = Case(as_measured(replace(base, orders=again)), layers=(4,) * 4, search_seconds=0.0)
    assert by_kind(one)["recompute"].seconds == pytest.approx(simulate(base).makespan)
    moved = plan_offload(base, Costs(), "half").schedule
    assert "offload" not in by_kind(Case(as_measured(moved), search_seconds=0.0))  # copies were instant


def test_steps_without_a_barrier():
    found = by_kind(case("zbv", outside=1.0))["no barrier"]
    own = build_schedule("zbv", num_devices=4, num_microbatches=8)
    steps = stream(own, tails=[1.0] * 4)
    assert found.seconds == pytest.approx(simulate(own).makespan - (steps.synchronous - steps.period))
    assert found.flags == "--pipemem-overlap-steps"
    assert "no barrier" not in by_kind(case("zbv", refused={"overlap": "fp16"}))
    assert by_kind(case("zbv", is_stock=True))["no barrier"].flags.startswith("--pipemem-schedule ")


def test_microbatches_are_ordered_where_they_are_not(monkeypatch):
    monkeypatch.setattr(changes, "_ORDERING_SECONDS", 0.05)
    weights = MicrobatchWeights((1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 3.0, 1.0))
    one = case(costs=Costs(microbatch=weights))
    assert by_kind(one)["microbatches"].seconds < one.own.makespan
    assert "microbatches" not in by_kind(replace(one, ordered=True))


def test_a_run_that_nothing_helps():
    facts = explain(case("zbv", m=96, refused={"vocabulary": "tied to a stage"}))
    assert facts["changes"] == []
    assert best_changes(Case(as_measured(build_schedule("chimera", num_devices=4, num_microbatches=8)))) == []


@pytest.mark.parametrize("name", ["po-h", "vocabulary 1", "vocabulary 2", "dualpipe"])
def test_what_else_a_schedule_may_have_is_explained(name):
    alone = build_schedule("1f1b" if "vocabulary" in name else name, num_devices=4, num_microbatches=8)
    schedule = with_vocabulary(alone, int(name[-1]), Costs()) if "vocabulary" in name else alone
    facts = explain(Case(as_measured(schedule, Costs(p2p=0.1)), search_seconds=0.0))
    assert facts["simulated_seconds"] == pytest.approx(facts["seconds"], rel=0.05)
    assert all(sum(each["causes_ns"].values()) == each["idle_ns"] for each in facts["idle"])
    if "vocabulary" in name:
        assert any(each["kind"] == SAME_MEMORY for each in facts["changes"])


def test_a_run_of_slices_is_explained_with_the_times_and_bytes_of_each():
    """Keys and values of 8 bytes stay from the first slice's forward to its backward, their gradients from the last one's."""
    costs = Costs((1.0, 3.0) * 4, (1.0, 2.0) * 4, (1.0, 1.0) * 4)
    step = as_measured(build_schedule("seq1f1b", num_devices=4, num_microbatches=8, slices=2), costs)
    memory = {Kind.F: (18.0, 10.0) * 4, Kind.B: (-26.0, -2.0) * 4}
    found = explain(Case(step, memory=memory))
    assert found["stages"] == pytest.approx([9.0] * 4)
    assert found["simulated_seconds"] == pytest.approx(found["seconds"])
    counted = Costs(memory={Kind.F: (18, 10) * 4, Kind.B: (-26, -2) * 4})
    assert found["peak"] == max(peaks(step.schedule, counted)) == 82
    assert found["changes"] == []
