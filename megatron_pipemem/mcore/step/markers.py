"""Mark actions for profilers as Megatron marks its own steps: with NVTX ranges and OpenTelemetry spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module

from megatron.core import utils

from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.runtime.executor import Executor, Handler, Handlers, Instruction, StepFeature
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind

_SPANS = {
    Kind.SEND_F: ("communication", "megatron.p2p.send_forward"),
    Kind.SEND_I: ("communication", "megatron.p2p.send_backward"),
    Kind.RECV_F: ("communication", "megatron.p2p.recv_forward"),
    Kind.RECV_I: ("communication", "megatron.p2p.recv_backward"),
    Kind.W: ("microbatch", "megatron.microbatch.weight_gradient"),
}
"""Span groups and names of Megatron's own communicator, which is not called here. Forwards and backwards have spans already."""


class Markers(Extension):
    """Adds NVTX ranges to computing actions (``--nvtx-ranges``), and spans to messages and W (``--otel-enabled``)."""

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        return [self]

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers that open a range or span around those of the marked kinds."""
        handlers, managed_span = dict(executor.handlers), _spans_of_megatron()
        if managed_span is not None:
            for kind in _SPANS.keys() & handlers.keys():
                handlers[kind] = _within(lambda action: managed_span(*_SPANS[action.kind]), handlers[kind])
        if utils._nvtx_enabled:
            for kind in COMPUTE & handlers.keys():
                handlers[kind] = _within(_nvtx_range, handlers[kind])
        return handlers


def _within(mark: Callable[[Action], AbstractContextManager], handler: Handler) -> Handler:
    def run(each: Instruction) -> None:
        with mark(each.action):
            handler(each)

    return run


@contextmanager
def _nvtx_range(action: Action):
    name = f"PP:{action}"
    utils.nvtx_range_push(name)
    yield
    utils.nvtx_range_pop(name)


def _spans_of_megatron() -> Callable[..., AbstractContextManager] | None:
    """Return Megatron's function that opens a span; ``None`` if it has none or ``nemo.lens`` is not installed."""
    try:
        import_module("megatron.core.telemetry")
        return import_module("nemo.lens.helpers").managed_span
    except ImportError:
        return None
