"""Run the slices of a sequence one after the other through Megatron's models."""

from __future__ import annotations

from megatron_pipemem.features.slices.megatron.step import SequenceSlices
from megatron_pipemem.mcore.step.extension import Extension
from megatron_pipemem.request import Request


def extensions(request: Request, *_: object) -> list[Extension]:
    """Return the extension of a run with sequence slices."""
    return [SequenceSlices(request)]
