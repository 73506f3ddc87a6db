"""Moves activations to host memory and back. No schedule uses it yet."""

from megatron_pipemem.runtime.offload.engine import OffloadEngine
from megatron_pipemem.runtime.offload.statistics import OffloadStatistics, Stall

__all__ = ["OffloadEngine", "OffloadStatistics", "Stall"]
