"""Move activations to host memory and back."""

from megatron_pipemem.runtime.offload.engine import OffloadEngine
from megatron_pipemem.runtime.offload.traffic import OffloadStatistics, Stall

__all__ = ["OffloadEngine", "OffloadStatistics", "Stall"]
