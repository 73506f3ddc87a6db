"""Run asynchronous pipelines (PipeDream, PipeDream-2BW) in Megatron's training loop. They are not emptied between
steps.
"""

from __future__ import annotations

from megatron_pipemem.features.asynchronous.megatron.training import AsynchronousTraining
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.mcore.step.extension import Extension
from megatron_pipemem.request import Request


def extensions(request: Request, programs: ProgramStore, _: object) -> list[Extension]:
    """Return the extensions of a run with an asynchronous schedule."""
    if not request.overlap_steps:
        return [AsynchronousTraining(programs, request.train_steps)]
    from megatron_pipemem.features.asynchronous.megatron.delayed import DelayedOptimizer, DelayedSteps

    delayed = DelayedOptimizer()
    return [DelayedSteps(delayed), AsynchronousTraining(programs, request.train_steps, delayed)]
