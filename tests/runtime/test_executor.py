"""Every family, run by the executor on four gloo ranks, against the same model run in one process. No Megatron."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import toy

from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.transport import MessageFormat, Transport
from megatron_pipemem.runtime.weight_gradients import current_queue
from megatron_pipemem.schedule.action import COMPUTE, Kind
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule, families

TOY = Path(__file__).with_name("toy.py")
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
# 12 microbatches, with which several families hang in single queues otherwise (tests/schedule/test_single_queue.py).
QUEUED = [
    {"schedule": name, "microbatches": 12, "forward_only": False, "single_queue": True, "variable": variable}
    for name in NAMES
    for variable in ("", "message")
]
CASES += [*MOVING, *QUEUED, *({**case, "single_queue": True} for case in MOVING[:4])]


def launch(tmp_path: Path, cases: list[dict]) -> list[list[dict]]:
    """``seen[rank][case]``."""
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(TOY), str(tmp_path / "cases.json"), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(toy.DEVICES)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[list[dict]]:
    return launch(tmp_path_factory.mktemp("toy"), CASES)


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


def case_id(index: int) -> str:
    case = CASES[index]
    flavour = (
        "forward-only" if case["forward_only"] else f"variable-{case['variable']}" if case["variable"] else "train"
    )
    moving = "".join(f"-{what}{len(case[what])}" for what in ("offload", "recompute", "selective") if what in case)
    queued = "-queued" if case.get("single_queue") else ""
    return f"{case['schedule']}-m{case['microbatches']}-{flavour}{moving}{queued}"


@pytest.mark.parametrize("index", range(len(CASES)), ids=case_id)
def test_executes_as_scheduled_and_equals_one_process(seen, index):
    case = CASES[index]
    schedule = toy.make_schedule(case, toy.DEVICES)
    if case["forward_only"]:
        schedule = schedule.forward_only()
    losses, gradients = alone(case, schedule.num_stages)
    for device, order in enumerate(schedule.orders):
        here = seen[device][index]
        assert here["actions"] == [str(action) for action in order if action.kind in COMPUTE]
        assert here["left_bytes"] == here["left_away_bytes"] == 0, "the step left activations behind"
        if device == schedule.placement.devices[schedule.num_stages - 1]:
            assert here["losses"] == losses, "losses are bit-identical"
        if case["forward_only"]:
            continue
        assert set(here["reductions"].values()) == {1}
        for stage, found in here["gradients"].items():
            for one, other in zip(found, gradients[int(stage)], strict=True):
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
