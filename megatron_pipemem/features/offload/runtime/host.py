"""Host memory for activations: its pool, how much of it a process may take, and how fast the link to it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime.channels import Copy, CopyChannel, Direction, Ticket
from megatron_pipemem.features.offload.transfers import HostLink

ALIGNMENT = 256
"""Bytes. Every block begins and ends on a multiple of it."""


@dataclass(eq=False, slots=True)
class _Piece:
    """A run of bytes of one segment, and the transfers that may still be reading or writing it."""

    segment: int
    start: int
    size: int
    after: tuple[Ticket, ...] = ()

    def pending(self) -> tuple[Ticket, ...]:
        self.after = tuple(ticket for ticket in self.after if not ticket.done())
        return self.after


@dataclass(frozen=True, eq=False)
class HostBlock:
    """``nbytes`` of host memory, to be written only when the transfers in ``after`` have ended."""

    data: torch.Tensor
    after: tuple[Ticket, ...]
    _piece: _Piece

    @property
    def nbytes(self) -> int:
        return self.data.numel()


class HostPool:
    """Best fit with merging of neighbours, in segments that are allocated when first needed and then kept.

    Segments are powers of two, because that is what pinned allocators round to: the budget then is what they really take.

    Args:
        budget: bytes this pool may ever take from the host.
        allocate: makes host memory; ``CopyChannel.host_memory``.
        segment: bytes to take from the host at a time, rounded up to a power of two.
    """

    def __init__(self, budget: int, allocate: Callable[[int], torch.Tensor], segment: int = 1 << 28):
        if budget < 1:
            raise OffloadError(
                "bad-number", f"the host memory budget is {budget} bytes; activation offload needs a positive one"
            )
        self.budget = budget
        self.used_bytes = 0
        self._allocate = allocate
        self._segment = _power_of_two_above(segment)
        self._segments: list[torch.Tensor] = []
        self._free: list[_Piece] = []

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.numel() for segment in self._segments)

    def reserve(self, nbytes: int) -> None:
        """Take memory from the host until the pool has ``nbytes`` or its whole budget, to the power of two below."""
        while (missing := min(nbytes, self.budget) - self.reserved_bytes) >= ALIGNMENT:
            self._add_segment(1 << (missing.bit_length() - 1))

    def take(self, nbytes: int, purpose: str) -> HostBlock:
        """Return a block for ``nbytes``.

        Raises:
            OffloadError: the budget does not allow it. ``purpose`` says in the message what the block was for.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        fitting = [piece for piece in self._free if piece.size >= size]
        # Of equal pieces, one that no copy uses any more: nothing has to wait for it.
        piece = min(fitting, key=lambda p: (p.size, len(p.pending()))) if fitting else self._grow(size, purpose)
        self._free.remove(piece)
        if piece.size > size:
            self._free.append(_Piece(piece.segment, piece.start + size, piece.size - size, piece.after))
            piece.size = size
        self.used_bytes += nbytes
        data = self._segments[piece.segment].narrow(0, piece.start, nbytes)
        return HostBlock(data, piece.pending(), piece)

    def give(self, block: HostBlock, after: Iterable[Ticket]) -> None:
        """Take a block back at once; its next user will wait for the transfers in ``after``."""
        self.used_bytes -= block.nbytes
        piece = block._piece
        merged = _Piece(piece.segment, piece.start, piece.size, tuple(after))
        for other in [p for p in self._free if p.segment == merged.segment]:
            if other.start + other.size == merged.start or merged.start + merged.size == other.start:
                self._free.remove(other)
                merged.start = min(merged.start, other.start)
                merged.size += other.size
                merged.after += other.pending()
        self._free.append(merged)

    def _grow(self, size: int, purpose: str) -> _Piece:
        left = self.budget - self.reserved_bytes
        segment = max(self._segment, _power_of_two_above(size))
        if segment > left:
            segment = 1 << (left.bit_length() - 1) if left > 0 else 0
        if segment < size:
            largest = max((piece.size for piece in self._free), default=0)
            raise OffloadError(
                "host-memory",
                f"the host pool has no room for {size} bytes of {purpose}: {self.used_bytes} bytes of its budget of "
                f"{self.budget} are in use, the largest free piece has {largest} and the budget leaves {segment} for a "
                "new segment; raise the host memory budget or offload fewer activations",
            )
        return self._add_segment(segment)

    def _add_segment(self, size: int) -> _Piece:
        self._segments.append(self._allocate(size))
        piece = _Piece(len(self._segments) - 1, 0, size)
        self._free.append(piece)
        return piece


def _power_of_two_above(nbytes: int) -> int:
    return 1 << max(nbytes - 1, ALIGNMENT - 1).bit_length()


# By controller in /proc/self/cgroup, which is empty for version 2: the folder of its groups, and the names of a group's limit,
# of what it uses, and of the part of that which is cached files and given up on demand.
_LIMITS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the least of what the machine has available and what the limits of all control groups around this process
    leave.

    Args:
        groups: lists them, as proc(5) and cgroups(7) say.
        mounted: where their files are, in version 1 or 2.
    """
    return max(0, min([psutil.virtual_memory().available, *_left_by_limits(groups, mounted)]))


def _left_by_limits(groups: Path, mounted: Path) -> Iterator[int]:
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & set(_LIMITS):
            folder, *names = _LIMITS[controller]
            group = mounted / folder
            # In a container the path may be one outside of it, which is not there; the limit is then at the root.
            for part in ("", *(part for part in path.split("/") if part)):
                group /= part
                if (left := _left_in(group, *names)) is not None:
                    yield left


def _left_in(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """Return what a group may still take; ``None`` where it has no limit."""
    try:
        most = (group / limit).read_text(encoding="utf-8").strip()
        used = int((group / usage).read_text(encoding="utf-8"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except OSError:
        return None
    return None if most == "max" else int(most) - used + int(statistics.get(cached, 0))


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
