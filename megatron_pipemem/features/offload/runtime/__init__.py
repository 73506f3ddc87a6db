"""Execute the copies of activations to host memory and back."""

from megatron_pipemem.features.offload.runtime.engine import OffloadEngine

__all__ = ["OffloadEngine"]
