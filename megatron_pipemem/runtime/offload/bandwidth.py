"""Measures what the channel between a GPU and its host carries: each way, both ways, and while computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from megatron_pipemem.runtime.offload.channel import Channel, Copy, Direction

_MATRIX = 8192  # large enough that products, and not their launches, take the time


def measure_bandwidths(
    channel: Channel, nbytes: int = 256 << 20, repeats: int = 5, matrix: int = _MATRIX
) -> dict[str, float]:
    """Bytes per second: ``d2h``, ``h2d`` and ``both`` (each way), and the same with ``_computing`` beside matrix products.

    Args:
        channel: of the device that is measured.
        nbytes: of one copy; pinned host memory of twice as much is taken.
        repeats: copies of which the median counts, after one that does not.
        matrix: rows and columns of the products.
    """
    ends = {direction: _ends(channel, direction, nbytes) for direction in Direction}
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
        alone = _copy_seconds(channel, copies, lambda: None, repeats)
        # Products for longer than the copies take, so that none of them runs beside nothing.
        beside = partial(multiply, int(2 * alone / one) + 1)
        found[name] = nbytes / alone
        found[f"{name}_computing"] = nbytes / _copy_seconds(channel, copies, beside, repeats)
    return found


def _ends(channel: Channel, direction: Direction, nbytes: int) -> Copy:
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=channel.device)
    on_host = channel.host_memory(nbytes).fill_(2)
    return Copy(on_host, on_device) if direction is Direction.OUT else Copy(on_device, on_host)


def _copy_seconds(
    channel: Channel, copies: Sequence[tuple[Direction, Copy]], beside: Callable[[], object], repeats: int
) -> float:
    took = []
    for _ in range(1 + repeats):
        _synchronize(channel)
        begin = time.perf_counter()
        tickets = [channel.start(direction, [copy], ()) for direction, copy in copies]
        beside()
        while not all(ticket.done() for ticket in tickets):
            time.sleep(0)
        took.append(time.perf_counter() - begin)
        for ticket in tickets:
            channel.join(ticket, lambda seconds: None)
    channel.forget_stalls()
    _synchronize(channel)
    return median(took[1:])


def _seconds(channel: Channel, work: Callable[[], object]) -> float:
    _synchronize(channel)
    begin = time.perf_counter()
    work()
    _synchronize(channel)
    return time.perf_counter() - begin


def _synchronize(channel: Channel) -> None:
    if channel.device.type == "cuda":
        torch.cuda.synchronize(channel.device)
