"""Settings that make hosts wait: every schedule ends by the order that a run takes. The documents' table is the list."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import host_oracle
import pytest
import torch

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.mcore import loop_arguments
from megatron_pipemem.mcore.step import extension
from megatron_pipemem.mcore.step.extension import LATE_STEPS, LaunchKind, LaunchOrders
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Program

PAGE = Path(__file__).parents[2] / "benchmarks" / "notes" / "gpus.md"
TIMED, EVERYWHERE = (Kind.F, Kind.I, Kind.B), tuple(Kind)
KIND = LaunchKind(False, False, Shape(4, 2, 8), (4, 1, 8), 0)
# Beginnings of the table's second column, and what hosts then do in every step. The first that fits counts.
PLAYS: dict[str, Callable[[Program], list[str]] | None] = {
    "its device, around F, I and B": lambda program: host_oracle.left_by_waiting(program, TIMED),
    "its device, between steps": host_oracle.left_between_steps,
    "its device and all ranks, between steps": host_oracle.left_between_steps,
    "its device": lambda program: host_oracle.left_by_waiting(program, EVERYWHERE),
    "its stream, between steps": host_oracle.left_between_steps,
    "its stream": lambda program: host_oracle.left_by_waiting(program, EVERYWHERE, of_stream=True),
    "nothing": None,
}


def rows() -> list[tuple[str, str, str]]:
    table = PAGE.read_text().partition("| setting | the host waits for | order |\n|---|---|---|\n")[2]
    return [tuple(line.strip("| ").split(" | ")) for line in table.partition("\n\n")[0].splitlines()]


@cache
def programs(single_queue: bool) -> dict[tuple[str, int], Program]:
    return {
        (family.name, p): lower(
            build_schedule(family.name, num_devices=p, num_microbatches=2 * p, costs=Costs()), single_queue=single_queue
        )
        for family in families()
        for p in (4, 8)
    }


def play_of(wait: str) -> Callable[[Program], list[str]] | None:
    return next(PLAYS[start] for start in PLAYS if wait.startswith(start))


@cache
def hanging(play: Callable[[Program], list[str]] | None, single_queue: bool) -> frozenset[tuple[str, int]]:
    """The families and numbers of devices of which some actions never end."""
    return frozenset(key for key, program in programs(single_queue).items() if play is not None and play(program))


def orders_of_steps(monkeypatch, setting: str) -> list[bool]:
    """Whether training steps on a GPU run by the order for one queue, under the settings of a row."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    for name in re.findall(r"`([A-Z_]+)=1`", setting):
        monkeypatch.setenv(name, "1")
    if "compute-sanitizer" in setting:
        monkeypatch.setenv("NV_SANITIZER_INJECTION_PORT_BASE", "49152")
    flags = dict(re.findall(r"`--([a-z-]+)(?: (\d))?`", setting.replace("L1", "")))
    arguments = {flag.replace("-", "_"): int(value) if value else True for flag, value in flags.items()}
    monkeypatch.setattr(loop_arguments, "_arguments", lambda: SimpleNamespace(**arguments))
    config = SimpleNamespace(timers=None, num_moe_experts=arguments.get("num_experts"))
    orders, single_queues = LaunchOrders(), []
    for _ in range(LATE_STEPS + 1):
        queues = orders.queues(torch.device("cuda"), config)
        single_queues.append(orders.is_single_queue(queues, KIND))
        orders.ended(KIND)
    return single_queues


@pytest.mark.parametrize(("setting", "wait", "order"), rows())
def test_every_schedule_ends_if_hosts_wait_so(monkeypatch, setting, wait, order):
    steps = orders_of_steps(monkeypatch, setting)
    expected = {"one queue": LATE_STEPS + 1, f"one queue for {LATE_STEPS} steps": LATE_STEPS, "usual": 2}
    assert steps == [number < expected[order] for number in range(LATE_STEPS + 1)]
    assert not any(hanging(play_of(wait), single_queue) for single_queue in {*steps[:3]})


def test_the_usual_order_hangs_under_timers_of_level_two():
    """So the rows above would fail if such steps ran by it."""
    ends = {"gpipe", "1f1b-eager", "looped-bfs", "zb-h2", "gems"}
    names = {family.name for family in families()} - ends
    assert hanging(play_of("its device, around F, I and B"), False) == {(name, p) for name in names for p in (4, 8)}


@pytest.mark.parametrize(
    ("config", "late"),
    [
        ({}, False),
        ({"num_moe_experts": None}, False),
        ({"num_moe_experts": 8}, True),
        ({"num_moe_experts": 8, "moe_expert_capacity_factor": 1.0}, True),
        (
            {
                "num_moe_experts": 8,
                "moe_expert_capacity_factor": 1.0,
                "moe_pad_expert_input_to_capacity": True,
            },
            False,
        ),
    ],
)
def test_which_experts_may_need_a_kernel_late(config, late):
    orders = LaunchOrders()
    queues = orders.queues(torch.device("cuda"), SimpleNamespace(timers=None, **config))
    for _ in range(2):
        orders.ended(KIND)
    assert orders.is_single_queue(queues, KIND) is late


def test_steps_after_memory_was_given_back(monkeypatch):
    """Only what the allocator does within a step counts. Ranks agree on it every ten steps."""
    statistics = {"num_device_free": 0, "num_alloc_retries": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(statistics))
    orders, gpu = LaunchOrders(), torch.device("cuda")
    queues = orders.queues(gpu, SimpleNamespace(timers=None))

    def steps(number: int, within: str | None = None, between: str | None = None, device=gpu) -> list[bool]:
        single_queues = []
        for _ in range(number):
            orders.agree_on_returns(KIND.pipeline, [])
            single_queues.append(orders.is_single_queue(queues, KIND))
            with orders.watched(KIND.pipeline, device):
                if within:
                    statistics[within] += 1
            if between:
                statistics[between] += 1
            orders.ended(KIND)
        return single_queues

    assert steps(10, between="num_device_free") == [True] * 2 + [False] * 8
    for name in statistics:
        assert steps(1, within=name) + steps(9) == [False] * 10
        assert steps(LATE_STEPS + 10) == [True] * LATE_STEPS + [False] * 10
    assert steps(7) + steps(13, within="num_alloc_retries") == [False] * 10 + [True] * 10
    assert steps(LATE_STEPS + 10) == [True] * LATE_STEPS + [False] * 10, "as many after the last time"
    assert steps(20, within="num_device_free", device=torch.device("cpu")) == [False] * 20


def test_ranks_agree_on_returned_memory_pipeline_by_pipeline(monkeypatch):
    """A rank with other settings has one order, and would not answer before the first step."""
    asked = []

    def largest(numbers, group):
        asked.append((group, *numbers))
        return (1.0,)

    monkeypatch.setattr(extension, "largest_numbers", largest)
    orders, pipeline = LaunchOrders(), object()
    here, other = KIND._replace(pipeline=pipeline), KIND._replace(pipeline=object())
    orders.agree_on_returns(pipeline, ["tp", "pp"])
    for _ in range(10):
        orders.ended(here)
        orders.ended(other)
    assert asked == [] and not orders.is_single_queue((False, True), here)
    orders.agree_on_returns(pipeline, ["tp", "pp"])
    assert asked == [("tp", 0.0), ("pp", 1.0)]
    assert orders.is_single_queue((False, True), here) and not orders.is_single_queue((False, True), other)
