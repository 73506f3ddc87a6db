"""Run pipelines that are never flushed on Megatron's training loop: PipeDream and PipeDream-2BW."""

from __future__ import annotations

from megatron_pipemem.features.asynchronous.megatron.training import AsynchronousTraining
from megatron_pipemem.mcore.programs import Programs
from megatron_pipemem.mcore.step.extension import Extension
from megatron_pipemem.request import Request


def extensions(request: Request, programs: Programs, _: object) -> list[Extension]:
    """Return the extensions of an asynchronous schedule."""
    if not request.overlap_steps:
        return [AsynchronousTraining(programs, request.train_steps)]
    from megatron_pipemem.features.asynchronous.megatron.delayed import DelayedOptimizer, DelayedSteps

    delayed = DelayedOptimizer()
    return [DelayedSteps(delayed), AsynchronousTraining(programs, request.train_steps, delayed)]
