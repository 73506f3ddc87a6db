"""Asynchronous schedules in plans: only where they are named, with all versions of the weights and a step's real end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron_pipemem.tools.config.runs import Parallelism, Run
from megatron_pipemem.tools.launch.feasibility import feasible
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.planning import asynchronous, plan
from megatron_pipemem.tools.planner.space import Limits
from tests.planner.small_run import CLUSTER, MODEL

NODE = replace(CLUSTER, nodes=1)
RUN = Run(MODEL, NODE, Parallelism(global_batch=32))


def answer(name: str, run: Run = RUN, **limits):
    shape = {"pp": [4], "dp": [1], "tp": [1], "micro_batch": [1], "recompute": ["none"], "variant": ["plain"]}
    allowed = {"schedule": [name], **shape, **{key: [value] for key, value in limits.items()}}
    return plan(run, limits=Limits(allowed), search_seconds=0)


def best(name: str, run: Run = RUN, **limits):
    return answer(name, run, **limits).plans[0]


def test_versions_and_the_end_of_a_step_are_priced():
    synchronous, late, per_microbatch = best("1f1b"), best("pipedream-2bw"), best("pipedream")
    busiest = synchronous.step.work_seconds.index(max(synchronous.step.work_seconds))
    assert late.step.layers == synchronous.step.layers
    # It saves a fill of three forwards at least, and still ends with the backwards.
    forwards = min(synchronous.step.costs.forward)
    assert synchronous.makespan - late.makespan >= 3 * forwards * 0.99
    assert late.makespan > late.work_seconds == pytest.approx(32 * synchronous.step.work_seconds[busiest])
    weights = late.step.weight_bytes
    for rank in range(4):
        assert late.peak_bytes[rank] - synchronous.peak_bytes[rank] == pytest.approx(weights[rank])
        assert per_microbatch.peak_bytes[rank] - synchronous.peak_bytes[rank] == pytest.approx(
            (3 - rank) * weights[rank]
        )
    assert per_microbatch.step.optimizer_seconds == pytest.approx(32 * late.step.optimizer_seconds)


def test_without_a_barrier_the_drain_is_gone_and_a_second_batch_of_gradients_there():
    drained = best("pipedream-2bw").run
    late = replace(drained, schedule=replace(drained.schedule, overlap_steps=True))
    assert feasible(late) is None
    limits = Limits({"schedule": ["pipedream-2bw"]})
    ((before, drain, _),) = asynchronous(drained, limits, None, Counter())
    ((after, period, _),) = asynchronous(late, limits, None, Counter())
    backwards = min(
        map(sum, zip(after.group.step.costs.backward_input, after.group.step.costs.backward_weight, strict=True))
    )
    assert drain - period >= 3 * backwards * 0.99 and period >= max(after.group.step.work_seconds)
    assert not any(after.group.step.rollback_bytes)
    for rank in range(4):
        gradients = after.group.step.weight_bytes[rank] / RUN.execution.element * 4
        assert after.group.step.static_bytes[rank] - before.group.step.static_bytes[rank] == pytest.approx(gradients)
        assert predicted_memory(late).device_bytes[rank] - predicted_memory(drained).device_bytes[
            rank
        ] == pytest.approx(gradients)
    refused = Counter()
    per_microbatch = replace(late, schedule=replace(late.schedule, name="pipedream"))
    assert not list(asynchronous(per_microbatch, Limits({"schedule": ["pipedream"]}), None, refused))
    assert any("not once per step" in reason for reason in refused)


def test_replicas_reduce_for_themselves():
    late, per_microbatch = (best(name, dp=2, pp=2) for name in ("pipedream-2bw", "pipedream"))
    assert "use-distributed-optimizer" not in late.run.flags and late.run.flags["overlap-grad-reduce"]
    assert "overlap-grad-reduce" not in per_microbatch.run.flags
    assert per_microbatch.step.reduction_seconds > late.step.reduction_seconds


def test_nobody_gets_one_without_asking():
    answer = plan(
        RUN, limits=Limits({"pp": [4], "recompute": ["none"], "variant": ["plain"]}), search_seconds=0, top=50
    )
    assert not {"pipedream", "pipedream-2bw"} & {way.schedule for way in answer.plans}


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_planned_flags_pass_the_refusals_of_the_run(name):
    asked = {"use_distributed_optimizer": True, "overlap-grad-reduce": True}
    planned = best(name, replace(RUN, flags=asked), dp=2, pp=2).run
    assert (planned.schedule.name, feasible(planned)) == (name, None)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (replace(RUN, model=replace(RUN.model, tied=True)), "tie the embedding to the head"),
        (replace(RUN, flags={"fp16": True}), "use bf16 or fp32"),
        (replace(RUN, flags={"calculate-per-token-loss": True}), "drop --calculate-per-token-loss"),
        (replace(RUN, flags={"clip-grad": 1.0}), "pass --clip-grad 0"),
    ],
)
def test_what_cannot_update_by_the_microbatch_is_not_planned(run, reason):
    refused = answer("pipedream", run)
    assert not refused.plans
    assert [why for why in refused.rejected if why.startswith("pipedream: ") and reason in why]
    assert answer("pipedream-2bw", run).plans


def test_two_versions_need_a_microbatch_for_every_rank():
    refused = answer("pipedream-2bw", replace(RUN, parallelism=Parallelism(global_batch=3)))
    assert not refused.plans and any("as many microbatches per step as" in why for why in refused.rejected)
