"""Run training steps on Megatron without a barrier between two steps."""

from megatron_pipemem.features.overlap_steps.megatron.steps import extensions

__all__ = ["extensions"]
