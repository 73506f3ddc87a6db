"""Host memory for activations: its pool, the amount that a process may take, and the speed of the link to it."""

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
from megatron_pipemem.features.offload.runtime.channels import Copy, CopyChannel, Ticket
from megatron_pipemem.runtime.host_traffic import Direction
from megatron_pipemem.schedule.prices import HostLink

ALIGNMENT = 256
"""Bytes. Every block begins and ends on a multiple."""


@dataclass(eq=False, slots=True)
class _Piece:
    """A run of bytes of one segment, with the transfers that may still read or write it."""

    segment: int
    start: int
    size: int
    after: tuple[Ticket, ...] = ()

    def pending(self) -> tuple[Ticket, ...]:
        self.after = tuple(ticket for ticket in self.after if not ticket.done())
        return self.after


@dataclass(frozen=True, eq=False)
class HostBlock:
    """``nbytes`` of host memory. Write to it only after the transfers in ``after``."""

    data: torch.Tensor
    after: tuple[Ticket, ...]
    _piece: _Piece

    @property
    def nbytes(self) -> int:
        return self.data.numel()


class HostPool:
    """Blocks of host memory, by best fit with merging of neighbours. Segments are allocated when needed, and then kept.

    Segments are powers of two, because pinned allocators round to these, so ``budget`` is the memory really taken.
    ``allocate`` makes host memory, as ``CopyChannel.host_memory`` does.
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
        """Take memory from the host until the pool has ``nbytes`` or its budget, rounded down to a power of two."""
        while (missing := min(nbytes, self.budget) - self.reserved_bytes) >= ALIGNMENT:
            self._add_segment(1 << (missing.bit_length() - 1))

    def take(self, nbytes: int, purpose: str) -> HostBlock:
        """Return a block of ``nbytes``, or raise an OffloadError with the ``purpose`` if the budget is too small."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        fitting = [piece for piece in self._free if piece.size >= size]
        # Among equal pieces, prefer one that no copy uses, so that no transfer has to wait.
        piece = min(fitting, key=lambda p: (p.size, len(p.pending()))) if fitting else self._grow(size, purpose)
        self._free.remove(piece)
        if piece.size > size:
            self._free.append(_Piece(piece.segment, piece.start + size, piece.size - size, piece.after))
            piece.size = size
        self.used_bytes += nbytes
        data = self._segments[piece.segment].narrow(0, piece.start, nbytes)
        return HostBlock(data, piece.pending(), piece)

    def give(self, block: HostBlock, after: Iterable[Ticket]) -> None:
        """Take a block back at once. Its next user waits for the transfers in ``after``."""
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


# By controller in /proc/self/cgroup (empty for version 2): the folder of its groups, and the names of three values: the limit,
# the usage, and the cached files in the usage, which the kernel frees on demand.
_LIMITS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the available memory in bytes: the least that the machine and the limits of all control groups leave.

    ``groups`` lists this process's control groups, see proc(5) and cgroups(7). ``mounted`` has their files, in version 1 or 2.
    """
    return max(0, min([psutil.virtual_memory().available, *_left_by_limits(groups, mounted)]))


def _left_by_limits(groups: Path, mounted: Path) -> Iterator[int]:
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & set(_LIMITS):
            folder, *names = _LIMITS[controller]
            group = mounted / folder
            # In a container the path may lie outside and be missing; then the limit is at the root.
            for part in ("", *(part for part in path.split("/") if part)):
                group /= part
                if (left := _left_in(group, *names)) is not None:
                    yield left


def _left_in(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """Return the bytes that a group may still take, or ``None`` if it has no limit."""
    try:
        most = (group / limit).read_text(encoding="utf-8").strip()
        used = int((group / usage).read_text(encoding="utf-8"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except OSError:
        return None
    return None if most == "max" else int(most) - used + int(statistics.get(cached, 0))


_BYTES = 1 << 23
_REPETITIONS = 3
_DUPLEX_FACTOR = 1.5  # the factor is 2 if only one direction runs at a time
_MATRIX = 8192  # large enough that products take longer than their launches


def measure_host_link(channel: CopyChannel, nbytes: int = _BYTES) -> HostLink:
    """Time transfers of ``nbytes`` each way and both ways at once. A run does so once at its start.

    Ranks that share a link should measure at the same time, so that contention is in the result.
    """
    ends = copy_ends(channel, nbytes)

    def seconds(*directions: Direction) -> float:
        return transfer_seconds(channel, [(direction, ends[direction]) for direction in directions], _REPETITIONS)

    out, back, both = seconds(Direction.OUT), seconds(Direction.IN), seconds(*Direction)
    return HostLink(nbytes / out, nbytes / back, both < _DUPLEX_FACTOR * max(out, back))


def measure_bandwidths(
    channel: CopyChannel, nbytes: int = 256 << 20, repeats: int = 5, matrix: int = _MATRIX
) -> dict[str, float]:
    """Return bytes per second: ``d2h``, ``h2d`` and ``both`` (each way), and the same during matrix products (``_computing``).

    One copy has ``nbytes``, and needs as much pinned host memory each way. The result is the median of ``repeats`` copies,
    after one that does not count. The products are of ``matrix`` rows and columns.
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
        # The products take longer than the copies, so that every copy overlaps one.
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
    """Return a copy of ``nbytes`` each way, with separate memory."""
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
    """Return the seconds until all transfers, started at the same time, are done.

    The result is the median of ``repeats``, after one that maps memory. ``copies`` has at most one copy each way, and
    ``beside`` starts other work of the device after the copies.
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
