"""Host memory for activations: the pool that lends it, the bytes that a process may use, and the speed of the link."""

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
from megatron_pipemem.runtime.trace import Direction
from megatron_pipemem.schedule.prices import HostLink

ALIGNMENT = 256
"""Each block begins and ends at a multiple of this number of bytes."""


@dataclass(eq=False, slots=True)
class _Piece:
    """A range of bytes of one segment of the pool, with the transfers that may still read or write these bytes."""

    segment: int
    start: int
    size: int
    after: tuple[Ticket, ...] = ()

    def pending(self) -> tuple[Ticket, ...]:
        self.after = tuple(ticket for ticket in self.after if not ticket.query())
        return self.after


@dataclass(frozen=True, eq=False)
class HostBlock:
    """Host memory that the pool has lent. Write to ``data`` only after the transfers in ``after`` have ended."""

    data: torch.Tensor
    after: tuple[Ticket, ...]
    _piece: _Piece

    @property
    def nbytes(self) -> int:
        return self.data.numel()


class HostPool:
    """Lends blocks of host memory. It takes the smallest free piece that fits, and merges neighbouring pieces that are
    free.

    The pool allocates large segments when it needs them, and keeps them. Their sizes are powers of two, because
    allocators of pinned memory round up to these. So at most ``budget`` bytes are really allocated. ``allocate``
    returns a new segment of a given number of bytes, as ``CopyChannel.host_memory`` does. ``segment`` is the number of
    bytes of a new segment. It is larger if a block needs more, and smaller if the budget leaves less.
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
        """Allocate segments of powers of two until the pool has ``nbytes``, or its budget if that is less."""
        while (missing := min(nbytes, self.budget) - self.reserved_bytes) >= ALIGNMENT:
            self._add_segment(1 << (missing.bit_length() - 1))

    def take(self, nbytes: int, purpose: str) -> HostBlock:
        """Return a block of ``nbytes``, or raise an OffloadError that names the ``purpose``."""
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
        """Give a block back, to be lent again at once. Its next user waits for the transfers in ``after``."""
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
_FILES_OF_CONTROLLER = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that this process can still take on this machine and within its control groups.

    ``groups`` is the file that lists this process's control groups, see proc(5) and cgroups(7). ``mounted`` is the
    folder with their limits, of cgroups version 1 or 2.
    """
    return max(0, min([psutil.virtual_memory().available, *_bytes_left_by_limits(groups, mounted)]))


def _bytes_left_by_limits(groups: Path, mounted: Path) -> Iterator[int]:
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & set(_FILES_OF_CONTROLLER):
            folder, *names = _FILES_OF_CONTROLLER[controller]
            group = mounted / folder
            # In a container the path may lie outside and be missing; then the limit is at the root.
            for part in ("", *(part for part in path.split("/") if part)):
                group /= part
                if (left := _bytes_left_in(group, *names)) is not None:
                    yield left


def _bytes_left_in(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """Return the bytes that a control group's processes can still take; ``None`` if it has no limit or no such files."""
    try:
        maximum = (group / limit).read_text(encoding="utf-8").strip()
        used = int((group / usage).read_text(encoding="utf-8"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except OSError:
        return None
    return None if maximum == "max" else int(maximum) - used + int(statistics.get(cached, 0))


_PROBE_BYTES = 1 << 23
_REPETITIONS = 3
COPY_DIRECTIONS = {"d2h": (Direction.OUT,), "h2d": (Direction.IN,), "both": tuple(Direction)}
_DUPLEX_FACTOR = 1.5  # the factor is 2 if only one direction runs at a time
_MATRIX = 8192  # large enough that products take longer than their launches


def measure_host_link(channel: CopyChannel, nbytes: int = _PROBE_BYTES) -> HostLink:
    """Measure bytes per second to the host and back, and whether copies in both directions can run at once.

    Each copy has ``nbytes``. Ranks that share a link should measure at the same time, so that the result includes their
    contention.
    """
    ends = copies_by_direction(channel, nbytes)
    out, back, both = (
        transfer_seconds(channel, [(direction, ends[direction]) for direction in directions], _REPETITIONS)
        for directions in COPY_DIRECTIONS.values()
    )
    return HostLink(nbytes / out, nbytes / back, both < _DUPLEX_FACTOR * max(out, back))


def measure_bandwidths(
    channel: CopyChannel, nbytes: int = 256 << 20, repeats: int = 5, matrix: int = _MATRIX
) -> dict[str, float]:
    """Return bytes per second by direction, measured with an idle device and while the device multiplies matrices.

    The keys are ``d2h`` (to the host), ``h2d`` (back) and ``both`` (each of two simultaneous copies). ``d2h_computing``
    and so on are measured during matrix products of ``matrix`` rows and columns. Each result is the median of
    ``repeats`` copies of ``nbytes``, after one copy that is not counted. Two times ``nbytes`` of pinned host memory are
    needed.
    """
    ends = copies_by_direction(channel, nbytes)
    a = torch.randn(matrix, matrix, device=channel.device).to(torch.bfloat16)
    product = torch.empty_like(a)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a, out=product)

    multiply(3)
    one = _seconds(channel, lambda: multiply(10)) / 10
    bandwidths = {}
    for name, directions in COPY_DIRECTIONS.items():
        copies = [(direction, ends[direction]) for direction in directions]
        alone = transfer_seconds(channel, copies, repeats)
        # The products take longer than the copies, so that every copy overlaps one.
        multiply_meanwhile = partial(multiply, int(2 * alone / one) + 1)
        bandwidths[name] = nbytes / alone
        bandwidths[f"{name}_computing"] = nbytes / transfer_seconds(channel, copies, repeats, multiply_meanwhile)
    return bandwidths


def _seconds(channel: CopyChannel, work: Callable[[], object]) -> float:
    synchronize(channel)
    begin = time.perf_counter()
    work()
    synchronize(channel)
    return time.perf_counter() - begin


def copies_by_direction(channel: CopyChannel, nbytes: int) -> dict[Direction, Copy]:
    """Return one ``Copy`` of ``nbytes`` for each direction, each with new device and host memory."""
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
    queue_work: Callable[[], object] = lambda: None,
) -> float:
    """Start all copies at the same time, queue other work, and return the median seconds until the last one has ended."""
    took = []
    for _ in range(1 + repeats):
        synchronize(channel)
        begin = time.perf_counter()
        tickets = [channel.start(direction, [copy], ()) for direction, copy in copies]
        queue_work()
        while not all(ticket.query() for ticket in tickets):
            time.sleep(0)
        took.append(time.perf_counter() - begin)
        for ticket in tickets:
            channel.join(ticket)
    synchronize(channel)
    return median(took[1:])


def synchronize(channel: CopyChannel) -> None:
    """Wait for all work queued on the channel's device, if it is a GPU."""
    if channel.device.type == "cuda":
        torch.cuda.synchronize(channel.device)
