"""A profile of a run shows the actions under the names torch's own pipeline runtime uses."""

from __future__ import annotations

import torch
import toy

from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.transport import MessageFormat, Transport
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule


def test_a_profile_names_every_compute_action():
    schedule = build_schedule("zbv", num_devices=1, num_microbatches=2)
    message = MessageFormat((toy.ROWS, toy.WIDTH), torch.float32, torch.device("cpu"))
    runners = {stage: toy.Runner(stage, schedule.num_stages) for stage in schedule.placement.stages[0]}
    transport = Transport(toy.alone(schedule.placement), message)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Executor(lower(schedule), 0, runners, transport).run()
    named = [event.name for event in profile.events() if event.name.startswith("PP:")]
    assert sorted(named) == sorted(f"PP:{action}" for action in schedule.orders[0])
