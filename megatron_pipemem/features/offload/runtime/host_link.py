"""Measure how fast the channel between a device and its host is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from megatron_pipemem.choose.knowledge import HostLink
from megatron_pipemem.features.offload.runtime.channel import Copy, CopyChannel, Direction

_BYTES = 1 << 23
_REPETITIONS = 3
_DUPLEX_FACTOR = 1.5  # one direction at a time would take 2
_MATRIX = 8192  # large enough that products, and not their launches, take the time


def measure_host_link(channel: CopyChannel, nbytes: int = _BYTES) -> HostLink:
    """Time transfers of ``nbytes`` each way and both ways at once, as a run does once at its start.

    Whoever shares a link should measure at the same time: then contention is in the result.

    Raises:
        OffloadError: the channel fails.
    """
    ends = copy_ends(channel, nbytes)

    def seconds(*directions: Direction) -> float:
        return transfer_seconds(channel, [(direction, ends[direction]) for direction in directions], _REPETITIONS)

    out, back, both = seconds(Direction.OUT), seconds(Direction.IN), seconds(*Direction)
    return HostLink(nbytes / out, nbytes / back, both < _DUPLEX_FACTOR * max(out, back))


def measure_bandwidths(
    channel: CopyChannel, nbytes: int = 256 << 20, repeats: int = 5, matrix: int = _MATRIX
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


def _seconds(channel: CopyChannel, work: Callable[[], object]) -> float:
    synchronize(channel)
    begin = time.perf_counter()
    work()
    synchronize(channel)
    return time.perf_counter() - begin


def copy_ends(channel: CopyChannel, nbytes: int) -> dict[Direction, Copy]:
    """Return a copy of ``nbytes`` each way, between memory of their own."""
    ends = {}
    for direction in Direction:
        on_device = torch.ones(nbytes, dtype=torch.uint8, device=channel.device)
        on_host = channel.host_memory(nbytes).fill_(2)
        ends[direction] = Copy(on_host, on_device) if direction is Direction.OUT else Copy(on_device, on_host)
    return ends


def transfer_seconds(
    channel: CopyChannel,
    copies: Sequence[tuple[Direction, Copy]],
    repeats: int,
    beside: Callable[[], object] = lambda: None,
) -> float:
    """Return the seconds until all transfers, started at once, are done: the median of ``repeats``, after one that pays
    for lazily mapped memory.

    Args:
        channel: that makes the copies.
        copies: at most one each way.
        repeats: how often.
        beside: starts other work of the device when the copies have started; it is not waited for.

    Raises:
        OffloadError: the channel fails.
    """
    took = []
    for _ in range(1 + repeats):
        synchronize(channel)
        begin = time.perf_counter()
        tickets = [channel.start(direction, [copy], ()) for direction, copy in copies]
        beside()
        while not all(ticket.done() for ticket in tickets):
            time.sleep(0)
        took.append(time.perf_counter() - begin)
        for ticket in tickets:
            channel.join(ticket, lambda seconds: None)
    channel.forget_stalls()
    synchronize(channel)
    return median(took[1:])


def synchronize(channel: CopyChannel) -> None:
    """Wait for all work of the channel's device."""
    if channel.device.type == "cuda":
        torch.cuda.synchronize(channel.device)
