"""Run training steps of a model on Megatron as CUDA graphs."""

from megatron_pipemem.features.graphs.megatron.step import extensions

__all__ = ["extensions"]
