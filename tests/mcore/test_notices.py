"""What Megatron and its tools learn of a step: marks of actions, the order of graphs, numbers of the log."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core import utils
from refusals import refused

from megatron_pipemem.choose.knowledge import Choice
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.step.notices import GraphOrder, Markers, TrainingLog
from megatron_pipemem.runtime.executor import Instruction, rank_program
from megatron_pipemem.schedule.action import COMPUTE, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule

WAITING = Costs(memory={Kind.F: 4.0, Kind.I: 1.0, Kind.W: -5.0})
PROGRAM = lower(build_schedule("zb-h1", num_devices=2, num_microbatches=2))


def run() -> list[str]:
    """The actions of device 0, by handlers that do nothing but take note."""
    ran: list[str] = []

    def handler(instruction: Instruction) -> None:
        ran.append(str(instruction.action))

    instructions = rank_program(PROGRAM, 0).instructions
    handlers = {instruction.action.kind: handler for instruction in instructions}
    for feature in Markers().extend_executor(SimpleNamespace()):
        handlers |= feature.extend(SimpleNamespace(handlers=handlers))
    for instruction in instructions:
        handlers[instruction.action.kind](instruction)
    return ran


def test_without_a_flag_nothing_is_marked():
    assert run() == list(map(str, PROGRAM.actions[0]))


def test_nvtx_ranges_name_every_compute_action(monkeypatch):
    named, open_ranges = [], []
    monkeypatch.setattr(utils, "_nvtx_enabled", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (named.append(name), open_ranges.append(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: open_ranges.pop())
    ran = run()
    computed = [str(action) for action in PROGRAM.actions[0] if action.kind in COMPUTE]
    assert named == [f"PP:{action}" for action in computed] and not open_ranges
    assert len(ran) == len(PROGRAM.actions[0])


def test_spans_have_the_names_of_megatrons_own_communicator(monkeypatch):
    spans = []

    @contextmanager
    def managed_span(group: str, name: str):
        spans.append((group, name))
        yield

    helpers = ModuleType("nemo.lens.helpers")
    helpers.managed_span = managed_span
    for name, module in {"megatron.core.telemetry": ModuleType("telemetry"), "nemo.lens.helpers": helpers}.items():
        monkeypatch.setitem(sys.modules, name, module)
    run()
    assert spans.count(("communication", "megatron.p2p.send_forward")) == 2
    assert spans.count(("communication", "megatron.p2p.recv_backward")) == 2
    assert spans.count(("microbatch", "megatron.microbatch.weight_gradient")) == 2
    assert len(spans) == 6


@pytest.mark.parametrize(
    ("name", "m", "costs", "of_1f1b", "basis"),
    [
        ("1f1b", 8, Costs(), 1, "the order alone"),
        ("1f1b", 2, Costs(), 1, "the order alone"),
        ("v-half", 16, Costs(), 0.75, "the order alone"),
        ("v-half", 16, WAITING, 0.875, "predicted bytes"),
    ],
)
def test_theoretical_memory_is_that_of_the_schedule(name, m, costs, of_1f1b, basis, caplog):
    log, args = TrainingLog(), SimpleNamespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    asked = []

    def report(args, num_microbatches, verbose):
        asked.append((args.virtual_pipeline_model_parallel_size, num_microbatches, verbose))
        return 100.0, 40.0, 140.0

    assert log._report_memory(report, args, m, verbose=True) == (100, 40, 140), "no step has run"
    log.after(SimpleNamespace(planned=Choice(build_schedule(name, num_devices=4, num_microbatches=m), costs)))
    with caplog.at_level("INFO"):
        notice = log._report_memory(report, args, m, verbose=True)
    assert notice == pytest.approx((100, 40 * of_1f1b, 100 + 40 * of_1f1b))
    assert asked == [(None, m, True)] * 2 and args.virtual_pipeline_model_parallel_size == 2
    assert f"schedule {name} holds {of_1f1b:.3g} times as much (by {basis}" in caplog.text


def test_graphs_are_captured_in_the_order_of_a_step_with_as_many_microbatches():
    order = GraphOrder()
    ((_, captured),) = order.replacements()
    with refused("needs-option", "--cuda-graph-warmup-steps", kind=UnsupportedError):
        captured(None, 1, 1, [(0, 0)] * 4)
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=3)
    config = SimpleNamespace(cuda_graph_impl="transformer_engine")
    order.prepare(
        SimpleNamespace(
            context=SimpleNamespace(config=config),
            program=SimpleNamespace(schedule=schedule),
            pipeline=SimpleNamespace(device=0),
        )
    )
    assert captured(None, 1, 1, [(0, 0)] * 3) == [1, 1, -1, 1, -1, -1]
    with refused("wrong-count", kind=UnsupportedError):
        captured(None, 1, 1, [(0, 0)] * 4)
