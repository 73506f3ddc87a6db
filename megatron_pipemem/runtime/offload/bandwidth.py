"""Measure what the channel between a GPU and its host carries: each way, both ways, and while computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from megatron_pipemem.runtime.offload.channel import Channel, Direction
from megatron_pipemem.runtime.offload.host_link import copy_ends, synchronize, transfer_seconds

_MATRIX = 8192  # large enough that products, and not their launches, take the time


def measure_bandwidths(
    channel: Channel, nbytes: int = 256 << 20, repeats: int = 5, matrix: int = _MATRIX
) -> dict[str, float]:
    """Return the bytes per second: ``d2h``, ``h2d`` and ``both`` (each way), and the same with ``_computing`` beside
    matrix products.

    Args:
        channel: of the device that is measured.
        nbytes: of one copy; pinned host memory of twice as much is taken.
        repeats: copies of which the median counts, after one that does not.
        matrix: rows and columns of the products.
    """
    ends = copy_ends(channel, nbytes)
    a = torch.randn(matrix, matrix, device=channel.device).to(torch.bfloat16)
    product = torch.empty_like(a)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a, out=product)

    multiply(3)
    one = _seconds(channel, lambda: multiply(10)) / 10
    ways = {"d2h": (Direction.OUT,), "h2d": (Direction.IN,), "both": tuple(Direction)}
    found = {}
    for name, directions in ways.items():
        copies = [(direction, ends[direction]) for direction in directions]
        alone = transfer_seconds(channel, copies, repeats)
        # Products for longer than the copies take, so that none of them runs beside nothing.
        beside = partial(multiply, int(2 * alone / one) + 1)
        found[name] = nbytes / alone
        found[f"{name}_computing"] = nbytes / transfer_seconds(channel, copies, repeats, beside)
    return found


def _seconds(channel: Channel, work: Callable[[], object]) -> float:
    synchronize(channel)
    begin = time.perf_counter()
    work()
    synchronize(channel)
    return time.perf_counter() - begin
