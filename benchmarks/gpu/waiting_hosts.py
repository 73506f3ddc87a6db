"""Experiment G: a host that waits for its whole device hangs where the model of hosts says so, and nowhere else.

A message that has been posted is a kernel that runs until the other end has come. ``schedule.waits`` says before
which actions a host must then not wait for its device. Four NCCL ranks on one GPU run a program whose receives are posted one
compute action ahead, whatever their messages depend on, and the program as it is shipped. One rank waits for its device
(``torch.cuda.synchronize()``) before one compute action. Steps without a wait come first, two of them in the order for one
hardware queue, so that all kernels are loaded and all communicators are open. To rehearse on CPU, a rank waits for all receives
that it has posted.

Claims: each wait that the model refuses hangs, in fresh ranks; every other wait ends, in both programs.

    python benchmarks/gpu/waiting_hosts.py [--rehearse]
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import proof
from four_ranks import RANKS, Setting, await_result, start, stop

from megatron_pipemem.files import write_whole
from megatron_pipemem.schedule.action import COMPUTE, RECEIVES
from megatron_pipemem.schedule.dependencies import Dependencies
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Program
from megatron_pipemem.schedule.waits import refused_waits

SCHEDULES = {"v-half": 2, "gpipe": 1}
"""Names and chunks per rank."""
MICROBATCHES, WARM = 8, 3
START_SECONDS, STEP_SECONDS = 120, 15

Place = tuple[int, int]
"""A device and a position in its list, before which the device's host waits."""


class Nearest:
    """Takes the place of ``lowering.Horizons``: receives are posted one compute action ahead of what needs them."""

    def __init__(self, schedule) -> None:
        pass

    def place(self, device: int, position: int, other: int, least: int = 0) -> int:
        """Return ``least``: no message depends on anything."""
        return least


def program_of(name: str, early: bool) -> Program:
    """Return a program as it is shipped, or with its receives posted early."""
    schedule = build_schedule(name, num_devices=RANKS, num_microbatches=MICROBATCHES)
    if not early:
        return lower(schedule)
    with mock.patch("megatron_pipemem.schedule.lowering.Horizons", Nearest):
        return lower(schedule)


@dataclass(frozen=True)
class Model:
    """Where a host may wait for its device, by the model. All places are before compute actions.

    Args:
        hanging: a receive that has been posted needs a later action of the device.
        safe: every message that has been posted ends without later actions of the device.
    """

    hanging: tuple[Place, ...]
    safe: tuple[Place, ...]


def predict(program: Program) -> Model:
    """Return what the model says of all compute actions. A send that waits is no claim: NCCL may buffer a small one."""
    router = Router(program.placement)
    messages = [message for order in program.schedule.orders for a in order if (message := router.emitted(a))]
    sends = {message.receive: message.send for message in messages}

    def needs(action):
        receive = router.awaited(action) if action.kind in COMPUTE else None
        return [] if receive is None else [sends[receive]]

    found = Dependencies(program.actions, program.placement, needs)
    refused: set[Place] = set()
    hanging: set[Place] = set()
    for post, _, later in refused_waits(program, found):
        device = found.graph.lane_of[post]
        first = found.lanes[device].start
        places = {(device, node - first) for node in range(post + 1, later + 1)}
        refused |= places
        if found.actions[post].kind in RECEIVES:
            hanging |= places
    computing = [(d, i) for d, row in enumerate(program.actions) for i, a in enumerate(row) if a.kind in COMPUTE]
    return Model(tuple(p for p in computing if p in hanging), tuple(p for p in computing if p not in refused))


def main() -> int:
    if "--rank" in sys.argv:
        return run_rank(json.loads(sys.argv[sys.argv.index("--rank") + 1]))
    options = proof.arguments(__doc__, "waiting_hosts")
    report = proof.Report(options.output, options.rehearse)
    for name in ["v-half"] if options.rehearse else SCHEDULES:
        model = predict(program_of(name, early=True))
        for device, position in model.hanging:
            action = program_of(name, early=True).actions[device][position]
            case = f"{name}, receives posted early: device {device} waits before {action}"
            report.measure(case, partial(must_hang, name, (device, position), options.rehearse))
        safe = model.safe[:: len(model.safe) // 4] if options.rehearse else model.safe
        case = f"{name}, receives posted early: {len(safe)} other waits, one a step"
        report.measure(case, partial(must_end, name, True, safe, options.rehearse))
        shipped = predict(program_of(name, early=False)).safe
        shipped = shipped[:: len(shipped) // 4] if options.rehearse else shipped
        case = f"{name} as shipped: {len(shipped)} waits, one a step"
        report.measure(case, partial(must_end, name, False, shipped, options.rehearse))
    return report.finish()


def must_hang(name: str, place: Place, rehearse: bool) -> tuple[dict[str, object], list[str]]:
    ended, failure = run_steps(name, True, [place], rehearse)
    if ended == WARM and failure is None:
        return {"hangs": True}, []
    return {"hangs": False}, [failure or "the step ended, so the model is too strict"]


def must_end(name: str, early: bool, places: tuple[Place, ...], rehearse: bool) -> tuple[dict[str, object], list[str]]:
    ended, failure = run_steps(name, early, list(places), rehearse)
    values: dict[str, object] = {"steps_ended": ended - WARM}
    if ended == WARM + len(places):
        return values, []
    device, position = places[max(0, ended - WARM)]
    action = program_of(name, early).actions[device][position]
    return values, [failure or f"hangs where device {device} waits before {action}, so the model is too lax"]


def run_steps(name: str, early: bool, places: list[Place], rehearse: bool) -> tuple[int, str | None]:
    """Return how many steps fresh ranks have ended, and how they failed, if not by a hang in a step with a wait."""
    plan = {"name": name, "early": early, "places": places, "rehearse": rehearse}
    with TemporaryDirectory() as folder:
        ranks = start(Path(__file__), plan, Setting(8, bound=False), Path(folder))
        try:
            for step in range(WARM + len(places)):
                result = await_result(Path(folder) / str(step), ranks, STEP_SECONDS if step else START_SECONDS)
                if isinstance(result, str):
                    hung = step >= WARM and all(rank.poll() is None for rank in ranks)
                    return step, None if hung else f"step {step}: {result}"
        finally:
            stop(ranks)
    return WARM + len(places), None


@dataclass
class Sabotage:
    """Makes the executors of a rank, which run another program once there is a place to wait at.

    Args:
        program: the program to run.
        on_host: wait for the receives that were posted instead of the device, on CPU.
        place: where to wait; ``None`` runs the planned program without a wait.
    """

    program: Program
    on_host: bool
    place: Place | None = None

    def executor(self, program: Program, device: int, stages: Any, transport: Any, *more: Any, **named: Any):
        """Return what ``runtime.executor.Executor`` would be, with the wait in ``run``."""
        import torch

        from megatron_pipemem.runtime.executor import Executor

        if self.place is None:
            return Executor(program, device, stages, transport, *more, **named)
        (waiting, position), on_host = self.place, self.on_host

        class Waiting(Executor):
            def run(self, until: int | None = None) -> None:
                super().run(position)
                if on_host:
                    transport.arrived(transport.take_in())
                else:
                    torch.cuda.synchronize()
                super().run(until)

        kind = Waiting if device == waiting else Executor
        return kind(self.program, device, stages, transport, *more, **named)


def run_rank(plan: dict) -> int:
    """One rank: steps without a wait, then one with each. The first rank leaves a file when all ranks have ended a step."""
    if plan["rehearse"]:
        from megatron_pipemem.tools.cpu import activate

        activate()
    import torch
    import torch.distributed as dist
    from gpt_chunks import Size, training

    import megatron_pipemem

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    sabotage = Sabotage(program_of(plan["name"], plan["early"]), plan["rehearse"])
    megatron_pipemem.enable(plan["name"])
    chunks = SCHEDULES[plan["name"]]
    step = training(Size(64, 4, chunks, 32, 256, dtype=torch.float32), "local", RANKS, chunks, MICROBATCHES)
    with mock.patch("megatron_pipemem.mcore.step.forward_backward.Executor", sabotage.executor):
        for number, place in enumerate([None] * WARM + plan["places"]):
            begin = time.perf_counter()
            sabotage.place = place
            step()
            torch.cuda.synchronize()
            dist.barrier()
            if dist.get_rank() == 0:
                seconds = {"seconds": time.perf_counter() - begin}
                write_whole(Path(plan["folder"]) / str(number), json.dumps(seconds))
    megatron_pipemem.disable()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
