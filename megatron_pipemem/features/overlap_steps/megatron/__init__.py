"""Let steps follow each other without a barrier between them."""

from __future__ import annotations

from megatron_pipemem.features.overlap_steps.megatron.optimizer import OverlappedOptimizer
from megatron_pipemem.features.overlap_steps.megatron.steps import OverlappedSteps
from megatron_pipemem.mcore.step.extension import Extension


def extensions(*_: object) -> list[Extension]:
    """Return the extensions of a run without a barrier between steps."""
    return [OverlappedSteps(OverlappedOptimizer())]
