"""What Megatron and its tools learn of a step: marks for profilers, the order of CUDA graphs, and numbers of the log.

Actions are marked as Megatron marks its own steps: with NVTX ranges and OpenTelemetry spans. Transformer Engine gets the
order of a schedule for the CUDA graphs of layers (``--cuda-graph-impl transformer_engine``): one graph is captured per
layer, microbatch and direction, in the order of a training step. All graphs of a rank share memory, so a step must
replay them in the same order. Two numbers of the log are corrected: FLOPs of packed sequences, whose tokens Megatron
counts in every forward step and so several times on a rank with several chunks, and the theoretical activation memory.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module

import torch
from megatron.core import utils

from megatron_pipemem.choose.knowledge import Choice
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.model.stages import is_counted
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import COUNT_PACKED_TOKENS, GRAPH_ORDER, REPORT_MEMORY, Replacements
from megatron_pipemem.runtime.executor import Executor, Handler, Handlers, Instruction, StepFeature
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind
from megatron_pipemem.schedule.baseline import planned_share_of_1f1b
from megatron_pipemem.schedule.schedule import Schedule

logger = logging.getLogger(__name__)

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
    def run(instruction: Instruction) -> None:
        with mark(instruction.action):
            handler(instruction)

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


def signed_chunks(schedule: Schedule, device: int) -> list[int]:
    """Return a device's passes as Transformer Engine writes them: ``c + 1`` is a forward of chunk ``c``.

    ``-(c + 1)`` is its backward. Call it only if the passes of one kind and chunk run in ascending order of
    microbatches, and backwards are not split.
    """
    number = {stage: chunk + 1 for chunk, stage in enumerate(schedule.placement.stages[device])}
    signs = {Kind.F: 1, Kind.B: -1}
    return [signs[action.kind] * number[action.stage] for action in schedule.orders[device] if action.kind in signs]


class GraphOrder(Extension):
    """Replaces the order of Transformer Engine's graphs of layers by that of the last training step's schedule."""

    only_trains = True

    def __init__(self) -> None:
        self._last: tuple[Schedule, int] | None = None
        """of the last training step: its schedule, and this rank's device in the schedule"""

    def replacements(self) -> Replacements:
        return [(GRAPH_ORDER, self._captured)]

    def prepare(self, step: Step) -> None:
        self._last = step.program.schedule, step.pipeline.device

    def _captured(self, original: Callable, num_warmup: int, num_chunks: int, table: Sequence) -> list[int]:
        if self._last is None:
            raise UnsupportedError(
                "needs-option",
                "CUDA graphs are captured in the order of a schedule that a training step has run; pass "
                "--cuda-graph-warmup-steps 1 or more",
            )
        order = signed_chunks(*self._last)
        if len(order) != 2 * len(table):
            raise UnsupportedError(
                "wrong-count",
                f"CUDA graphs are captured for {len(table) // num_chunks} microbatches, and the last step had "
                f"{len(order) // (2 * num_chunks)}; keep the batch size the same in all steps",
            )
        return order


class TrainingLog(Extension):
    """Makes Megatron count packed tokens once per microbatch, and report the activation memory of the run's schedule."""

    only_trains = True

    def __init__(self) -> None:
        self._plan: Choice | None = None

    def replacements(self) -> Replacements:
        return [(COUNT_PACKED_TOKENS, _count_once), (REPORT_MEMORY, self._report_memory)]

    def after(self, step: Step) -> None:
        self._plan = step.planned

    def _report_memory(self, original: Callable, args, num_microbatches: int | None = None, verbose: bool = False):
        """Let Megatron report the memory under 1F1B, and log and return that under the run's schedule.

        The result is ``(weights, activations, total)`` in MB, as Megatron's. Before the first step, and for models for
        which Megatron has no numbers, it is Megatron's.
        """
        plain = copy.copy(args)
        plain.virtual_pipeline_model_parallel_size = None
        memory = original(plain, num_microbatches=num_microbatches, verbose=verbose)
        if memory is None or self._plan is None:  # Megatron has no numbers for hybrid models
            return memory
        weights, activations, _ = memory
        share, basis = planned_share_of_1f1b(self._plan.schedule, self._plan.costs)
        logger.info(
            "the theoretical activation memory above is that of 1F1B; schedule %s holds %.3g times as much (%s): "
            "activation=%.2f MB, total=%.2f MB",
            self._plan.schedule.name,
            share,
            basis,
            activations * share,
            weights + activations * share,
        )
        return weights, activations * share, weights + activations * share


def _count_once(original: Callable, cu_seqlens: torch.Tensor | None) -> None:
    if is_counted():
        original(cu_seqlens)
