"""Run training steps on Megatron without a barrier between two steps."""

from __future__ import annotations

from megatron_pipemem.features.overlap_steps.megatron.optimizer import OverlappedOptimizer
from megatron_pipemem.features.overlap_steps.megatron.steps import OverlappedSteps
from megatron_pipemem.mcore.step.extension import Extension


def extensions(*_: object) -> list[Extension]:
    """Return the extension that lets training steps overlap."""
    return [OverlappedSteps(OverlappedOptimizer())]
