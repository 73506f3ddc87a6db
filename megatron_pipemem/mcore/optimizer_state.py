"""Make Megatron save the distributed optimizer's state correctly if gradient buckets are padded.

Any placement can then load it.

Stock Megatron removes the padding between buckets when it joins the ranks' parts of a buffer. It then cuts the buffer
at positions that still include the padding. So after a padded bucket, every parameter gets values of another one. A
tied embedding has its own bucket, and overlapped reductions have many. ``main`` fixed this after 0.19.2, in
https://github.com/NVIDIA/Megatron-LM/pull/5077.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from megatron_pipemem.mcore.compat import saves_padding
from megatron_pipemem.mcore.patching import Feature, Replacements
from megatron_pipemem.mcore.symbols import RESHARDABLE_STATE


class ReshardableState(Feature):
    """Makes Megatron cut the optimizer's state at positions without padding, in the versions with the fault."""

    def replacements(self) -> Replacements:
        return [(RESHARDABLE_STATE, _cut_without_padding)] if saves_padding() else []


def _cut_without_padding(original: Callable, optimizer, *args, **named):
    maps = [buffer.param_index_map for buffer in optimizer.buffers]
    try:
        for buffer in optimizer.buffers:
            buffer.param_index_map = places_without_padding(buffer)
        return original(optimizer, *args, **named)
    finally:
        for buffer, places in zip(optimizer.buffers, maps, strict=True):
            buffer.param_index_map = places


def places_without_padding(buffer) -> dict:
    """Return ``(begin, end, bucket)`` of each parameter in a gradient buffer, by parameter.

    ``begin`` and ``end`` are positions in elements, counted as if no bucket had padding. ``bucket`` is an index.
    """
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = list(accumulate(padding, initial=0))
    return {
        parameter: (begin - before[bucket], end - before[bucket], bucket)
        for parameter, (begin, end, bucket) in buffer.param_index_map.items()
    }
