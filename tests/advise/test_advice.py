"""Ways are priced as the planner prices them, and what is proposed holds what it promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pipemem.advise.advice import AS_FAST, SAME_MEMORY, advise, changed_flags
from megatron_pipemem.config.loading import load
from megatron_pipemem.config.runs import Run
from megatron_pipemem.launch.command import all_flags
from megatron_pipemem.launch.feasibility import refusal
from megatron_pipemem.planner.planning import plan
from megatron_pipemem.planner.space import Limits
from tests.watching.refusals import refused

RUNS = Path(__file__).parents[2] / "configs" / "runs"


def stock(name: str, **changes) -> Run:
    """A run of this repository under Megatron's own 1F1B, with its layers shared out evenly."""
    run = load(RUNS / f"{name}.yaml", Run)
    megatron = {key: value for key, value in run.megatron.items() if "layout" not in key}
    choice = replace(run.schedule, name="stock")
    return replace(run, schedule=choice, megatron=megatron, parallelism=replace(run.parallelism, **changes))


LLAMA, QWEN = stock("llama3-70b-64xh100"), stock("qwen3-30b-a3b-16xh100")


@pytest.mark.parametrize("run", [LLAMA, QWEN], ids=["llama", "qwen"])
def test_proposals_hold_what_they_promise(run):
    advice = advise(run)
    today = advice.today
    assert advice.proposals and next(iter(advice.proposals.values())).order.name == "zb-h1"
    for kind, way in advice.proposals.items():
        assert refusal(way.run) is None
        if kind == "less memory":
            assert way.peak < today.peak and way.seconds <= today.seconds * (1 + AS_FAST)
        else:
            assert way.peak <= today.peak * (1 + SAME_MEMORY) and way.seconds < today.seconds


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
def test_prices_are_the_planners(name):
    cut = QWEN.parallelism
    allowed = {key: [getattr(cut, key)] for key in ("tp", "pp", "dp", "cp", "micro_batch")}
    limits = Limits({**allowed, "schedule": [name], "recompute": [QWEN.schedule.recompute], "variant": ["plain"]})
    (planned,) = plan(QWEN, memory=1e13, limits=limits, search_seconds=0).plans
    way = next(each for each in advise(QWEN).proposals.values() if each.order.name == name)
    assert (way.seconds, way.peaks) == (planned.seconds, planned.peaks)


def test_changed_flags_lead_from_one_run_to_the_other():
    for way in advise(QWEN).proposals.values():
        added, gone = changed_flags(QWEN, way.run)
        before, after = all_flags(QWEN), all_flags(way.run)
        assert before | added == before | {name: value for name, value in after.items() if name != "pipemem-report"}
        assert gone == {}


def test_a_long_step_stays_as_it_is():
    even = replace(LLAMA, parallelism=replace(LLAMA.parallelism, pp=2, tp=8, dp=4, global_batch=4 * 512))
    fast = [kind for kind in advise(even).proposals if kind != "less memory"]
    assert fast == []


def test_a_run_without_a_pipeline_has_no_schedule():
    with refused("no-pipeline"):
        advise(stock("llama3-70b-64xh100", pp=1, dp=8))


def test_what_cannot_work_as_it_stands_is_said_first():
    with refused("does-not-divide"):
        advise(stock("llama3-70b-64xh100", global_batch=63))


def test_refused_flags_are_named_with_the_schedules_that_they_keep_away():
    advice = advise(replace(LLAMA, megatron={**LLAMA.megatron, "cuda-graph-impl": "local"}))
    assert not advice.proposals
    assert any("zb-h1" in names for _, names in advice.refused.values())


def test_an_overlap_that_is_worth_more_than_the_bubble_stays():
    """Megatron hides messages to experts under its own schedules alone."""
    plain = stock("qwen3-30b-a3b-16xh100", chunks=2)
    overlapped = replace(plain, megatron={**plain.megatron, "overlap-moe-expert-parallel-comm": True})
    before, after = advise(plain), advise(overlapped)
    assert after.today.seconds < before.today.seconds
    assert all(way.gain(after.today) < way.gain(before.today) for way in after.proposals.values())
