"""Save the distributed optimizer's state in the form that any placement can load.

Megatron joins the ranks' parts of a gradient buffer without the padding between buckets, and then cuts it into
parameters by their places with that padding. If a bucket was padded, every parameter from the second bucket on gets the
values of another. A tied embedding has a bucket of its own, and overlapped reductions have many. Megatron fixed this
after 0.19.2, in https://github.com/NVIDIA/Megatron-LM/pull/5077.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from megatron_pipemem.mcore.patching import Feature, Replacements, megatron_version
from megatron_pipemem.mcore.symbols import RESHARDABLE_STATE

_AFFECTED = ("0.19.0", "0.19.1", "0.19.2")


class ReshardableState(Feature):
    """Cuts the state where its parameters are."""

    def replacements(self) -> Replacements:
        release = megatron_version().partition("+")[0]  # without the commit that it was built from
        return [(RESHARDABLE_STATE, _cut_without_padding)] if release in _AFFECTED else []


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
    """Return begin, end and bucket of every parameter in one of Megatron's buffers, as if its buckets had no padding."""
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = list(accumulate(padding, initial=0))
    return {
        parameter: (begin - before[bucket], end - before[bucket], bucket)
        for parameter, (begin, end, bucket) in buffer.param_index_map.items()
    }
