"""Give Transformer Engine the order of a schedule for the CUDA graphs of layers (``--cuda-graph-impl transformer_engine``).

Megatron captures one graph per layer, microbatch and direction, in the order of a training step. All graphs of a rank
share memory, so a step must replay them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.patching import Replacements
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import GRAPH_ORDER
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.schedule import Schedule


def signed_chunks(schedule: Schedule, device: int) -> list[float]:
    """Return a device's passes as Transformer Engine writes them: ``c + 1`` is a forward of chunk ``c``.

    ``-(c + 1)`` is its backward or I, and ``-(c + 1.5)`` its W. Call it only if the passes of one kind and
    chunk run in ascending order of microbatches.
    """
    number = {stage: chunk + 1 for chunk, stage in enumerate(schedule.placement.stages[device])}
    signs = {Kind.F: 1, Kind.B: -1, Kind.I: -1, Kind.W: -1}
    passes = (each for each in schedule.orders[device] if each.kind in signs)
    return [signs[each.kind] * number[each.stage] - (0.5 if each.kind is Kind.W else 0) for each in passes]


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

    def _captured(self, original: Callable, num_warmup: int, num_chunks: int, table: Sequence) -> list[float]:
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
