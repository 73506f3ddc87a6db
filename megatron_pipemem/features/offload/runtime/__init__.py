"""Move activations to host memory and back."""

from megatron_pipemem.features.offload.runtime.engine import OffloadEngine, OffloadStatistics, Stall

__all__ = ["OffloadEngine", "OffloadStatistics", "Stall"]
