"""Lend blocks of one pool of host memory to all activations that are away, from microbatch to microbatch and step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime.channel import Ticket

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
