"""Every family, run by the executor on four gloo ranks, against the same model run in one process. No Megatron."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import toy
from lanes import rest_nightly

from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.transport import MessageFormat, Transport
from megatron_pipemem.runtime.weight_gradients import current_queue
from megatron_pipemem.schedule.action import COMPUTE, Kind
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule, families

NAMES = [
    family.name for family in families() if not (family.asynchronous or family.slices > 1) and family.replicas == 1
]
CASES = [
    {"schedule": name, "microbatches": m, "forward_only": forward_only, "variable": variable}
    for name, (m, forward_only, variable) in product(
        NAMES,
        [(1, False, ""), (3, False, ""), (9, False, ""), (5, True, ""), (6, False, "message"), (6, False, "step")],
    )
]
MOVING = [
    {"schedule": name, "microbatches": 9, "forward_only": False, "variable": ""} | extra
    for name in ("1f1b", "zb-h1", "interleaved", "zbv", "v-half", "gis")
    for extra in (
        {"offload": list(range(8))},
        {"offload": [0, 1, 2, 3], "every": 2},
        {"recompute": list(range(8))},
        {"recompute": [0, 2, 3], "offload": [1, 4, 5, 6, 7]},
        {"selective": list(range(8))},
        {"selective": list(range(8)), "offload": list(range(0, 8, 2))},
        {"offload": list(range(8)), "forward_only": True},
        {"offload": list(range(8)), "variable": "message"},
        {"offload": list(range(8)), "variable": "step"},
    )
]
# 12 microbatches, with which several families hang in single queues otherwise (tests/schedule/test_waits.py).
QUEUED = [
    {"schedule": name, "microbatches": 12, "forward_only": False, "single_queue": True, "variable": variable}
    for name in NAMES
    for variable in ("", "message")
]
CASES += [*MOVING, *QUEUED, *({**case, "single_queue": True} for case in MOVING[:4])]
FEATURES = ("offload", "recompute", "selective")


def in_full_lane(case: dict) -> bool:
    """Whether the full lane runs a case: every family in one way, v-half in every way, and fused backwards in most."""
    name, moved = case["schedule"], [feature for feature in FEATURES if feature in case]
    if name == "v-half" or case["microbatches"] == 9 and not moved:
        return True
    if case.get("single_queue"):
        return name in ("1f1b", "interleaved") and not case["variable"] and moved in ([], ["offload", "recompute"])
    if not moved:
        return name == "1f1b" or name == "interleaved" and bool(case["variable"])
    return name == "1f1b" and len(moved) == 1 and len(case[moved[0]]) == 8 and not case["variable"]


def case_id(case: dict) -> str:
    flavour = (
        "forward-only" if case["forward_only"] else f"variable-{case['variable']}" if case["variable"] else "train"
    )
    moving = "".join(f"-{feature}{len(case[feature])}" for feature in FEATURES if feature in case)
    queued = "-queued" if case.get("single_queue") else ""
    return f"{case['schedule']}-m{case['microbatches']}-{flavour}{moving}{queued}"


@pytest.fixture(scope="module")
def seen_by_executor(rank_files: Path) -> dict[str, list[dict]]:
    """``seen_by_executor[case][rank]``."""
    cases = json.loads((rank_files / "cases.json").read_text())
    ranks = [json.loads((rank_files / f"rank{rank}.json").read_text()) for rank in range(toy.DEVICES)]
    return dict(zip(map(case_id, cases), zip(*ranks, strict=True), strict=True))


def alone(case: dict, num_stages: int):
    """The same stages in one process without any pipeline: losses and gradients per stage."""
    stages = [toy.Stage(index) for index in range(num_stages)]
    losses = []
    for microbatch in range(case["microbatches"]):
        x = toy.batch(microbatch, toy.rows_of(microbatch, case["variable"])).requires_grad_()
        for stage in stages:
            x = stage(x)
        loss = x.square().sum()
        losses.append(loss.item())
        loss.backward()
    return losses, [[p.grad.flatten() for p in stage.parameters()] for stage in stages]


@pytest.mark.parametrize(
    "case",
    rest_nightly(CASES, [*filter(in_full_lane, CASES)], "the same way to run with v-half or 1f1b"),
    ids=case_id,
)
def test_executes_as_scheduled_and_equals_one_process(seen_by_executor, case):
    schedule = toy.make_schedule(case, toy.DEVICES)
    if case["forward_only"]:
        schedule = schedule.forward_only()
    losses, gradients = alone(case, schedule.num_stages)
    for device, order in enumerate(schedule.orders):
        here = seen_by_executor[case_id(case)][device]
        assert here["actions"] == [str(action) for action in order if action.kind in COMPUTE]
        assert here["left_bytes"] == here["left_away_bytes"] == 0, "the step left activations behind"
        if device == schedule.placement.devices[schedule.num_stages - 1]:
            assert here["losses"] == losses, "losses are bit-identical"
        if case["forward_only"]:
            continue
        assert set(here["reductions"].values()) == {1}
        for stage, gradient in here["gradients"].items():
            for one, other in zip(gradient, gradients[int(stage)], strict=True):
                assert torch.equal(torch.tensor(one), other), f"stage {stage}"
        moves = {a.stage for a in order if a.kind is Kind.OFFLOAD}
        assert bool(moves) == (here["bytes_out"] > 0) and here["bytes_in"] == here["bytes_out"]
        assert here["in_vain"] == 0, "somebody held what was offloaded"
        if case["variable"] != "message":
            assert here["predicted_peak"] == here["counted_peak"] > 0
            assert here["predicted_host_peak"] == here["counted_host_peak"] == here["ledger_host_peak"]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
def test_an_error_names_the_action_and_the_next_step_runs(name):
    program = lower(build_schedule(name, num_devices=1, num_microbatches=3))
    with pytest.raises(RuntimeError) as error:
        toy.run_step(program, toy.alone(program.placement), fail_at=2)
    assert str(error.value) == "boom"
    (note,) = error.value.__notes__
    position = program.actions[0].index(next(a for a in program.actions[0] if str(a) == "0F2"))
    assert f"device 0 failed at position {position}, action 0F2, of schedule {name}" in note
    assert current_queue() is None
    runners, ledger, _ = toy.run_step(program, toy.alone(program.placement))
    assert ledger.entries[-1].bytes == 0
    assert sum(len(runner.losses) for runner in runners.values()) == 3


def test_a_profile_names_every_compute_action():
    schedule = build_schedule("zbv", num_devices=1, num_microbatches=2)
    message = MessageFormat((toy.ROWS, toy.WIDTH), torch.float32, torch.device("cpu"))
    runners = {stage: toy.Runner(stage, schedule.num_stages) for stage in schedule.placement.stages[0]}
    transport = Transport(toy.alone(schedule.placement), message)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Executor(lower(schedule), 0, runners, transport).run()
    named = [event.name for event in profile.events() if event.name.startswith("PP:")]
    assert sorted(named) == sorted(f"PP:{action}" for action in schedule.orders[0])
