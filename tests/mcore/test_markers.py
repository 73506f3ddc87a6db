"""Actions carry the marks that Megatron's flags ask for: NVTX ranges, and OpenTelemetry spans."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import torch
from megatron.core import utils

from megatron_pipemem.mcore.step.notices import Markers
from megatron_pipemem.runtime.executor import Instruction, settle
from megatron_pipemem.schedule.action import COMPUTE
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule

PROGRAM = lower(build_schedule("zb-h1", num_devices=2, num_microbatches=2))


def run() -> list[str]:
    """The actions of device 0, by handlers that do nothing but take note."""
    ran: list[str] = []

    def handler(each: Instruction) -> None:
        ran.append(str(each.action))

    instructions = settle(PROGRAM, 0).instructions
    handlers = {each.action.kind: handler for each in instructions}
    for feature in Markers().extend_executor(SimpleNamespace()):
        handlers |= feature.extend(SimpleNamespace(handlers=handlers))
    for each in instructions:
        handlers[each.action.kind](each)
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
