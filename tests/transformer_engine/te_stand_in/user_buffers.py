"""Transformer Engine's user buffers on the CPU: the GEMMs that overlap with collectives over tensor-parallel ranks.

A communicator has one buffer, which all layers of its name share. A gather leaves its result there. As soon as any layer
fills a buffer anew, the contents of all buffers are NaN: Transformer Engine documents a result as good only right after its
operation, because other operations may overwrite it. Communication here ends before its GEMM begins or begins after it has
ended, so the work that a GPU does at the same time is not shown.
"""

from __future__ import annotations

import weakref
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist


class CommOverlapType(IntEnum):
    """The collective that a GEMM overlaps with: a reduce-scatter or an all-gather."""

    RS = 0
    AG = 1


class CommOverlapHelper:
    """The ranks of a tensor-parallel group, of which user buffers learn."""

    def __init__(self, world: dist.ProcessGroup, domain: dist.ProcessGroup | None = None):
        self.group = domain or world


class CommOverlap:
    """A communicator with its buffer, ``shape``, of the whole sequence; rank r's chunk is the r-th part of the rows."""

    def __init__(self, shape, buffer_dtype, helper, tp_size, *_, **options: Any):
        assert tp_size == helper.group.size()
        self._group, self._size = helper.group, tp_size
        self._buffer = torch.empty(list(shape), dtype=buffer_dtype)
        self._atomic = bool(options.get("atomic_gemm"))
        _all.add(self)
        self._spoil()

    def _spoil(self) -> None:
        self._buffer.fill_(0xFF if self._buffer.dtype == torch.uint8 else float("nan"))

    def _chunk(self) -> torch.Tensor:
        return self._buffer.view(-1).chunk(self._size)[self._group.rank()]

    def copy_into_buffer(self, tensor: torch.Tensor, local_chunk: bool = False) -> None:
        """Begin an operation with this rank's chunk, or the whole tensor."""
        place = self._chunk() if local_chunk else self._buffer.view(-1)
        if tensor.numel() != place.numel() or tensor.element_size() != place.element_size():
            raise RuntimeError("Tried to copy an invalid tensor into a Userbuffers buffer")
        values = tensor.reshape(-1).view(place.dtype).clone()
        for other in _all:
            other._spoil()
        place.copy_(values)

    def get_buffer(self, local_chunk: bool = False, shape: list[int] | None = None) -> torch.Tensor:
        """Return the buffer itself, or this rank's chunk of it."""
        if local_chunk:
            rows, *others = self._buffer.shape
            return self._chunk().view(shape or (rows // self._size, *others))
        return self._buffer.view(shape or self._buffer.shape)

    def is_fp8_ubuf(self) -> bool:
        return self._buffer.element_size() == 1

    def is_atomic_gemm(self) -> bool:
        return self._atomic

    def with_cublasmp(self) -> bool:
        return False

    def get_communication_stream(self) -> tuple[None, None]:
        return None, None

    def all_gather(self) -> None:
        """Gather the chunks of all ranks in the buffer."""
        dist.all_gather_into_tensor(self._buffer.view(-1), self._chunk().clone(), group=self._group)

    def reduce_scatter(self, out: torch.Tensor | None) -> None:
        """Add the buffers of all ranks, and write this rank's part to ``out``; to its chunk if that is ``None``.

        Other chunks are NaN then.
        """
        gathered = self._buffer.new_empty((self._size, self._buffer.numel()))
        dist.all_gather_into_tensor(gathered.view(-1), self._buffer.view(-1), group=self._group)
        total = gathered.float().sum(0).to(self._buffer.dtype).chunk(self._size)[self._group.rank()]
        self._spoil()
        place = self._chunk() if out is None else out
        place.copy_(total.view_as(place))

    def write(self, product: torch.Tensor) -> None:
        self._buffer.view(-1).copy_(product.reshape(-1))


class CommOverlapP2P(CommOverlap):
    """A communicator whose ranks send to each other in a ring, with the same results."""


_all: weakref.WeakSet[CommOverlap] = weakref.WeakSet()


def bulk_overlap_ag_with_external_gemm(communicator: CommOverlap, *_: object) -> None:
    """Gather beside a GEMM that does not read the result."""
    communicator.all_gather()


def overlapped(gemm, communicator, kind, out, bulk):
    """Run a GEMM with the collective of its communicator, and return its results.

    Args:
        gemm: computes the product and three other results.
        out: of a reduce-scatter, where its result goes; of a gather, where a copy of this rank's chunk goes.
        bulk: whether the GEMM neither reads nor writes the tensor that travels.
    """
    if kind == CommOverlapType.AG:
        communicator.all_gather()
        if out is not None:
            out.copy_(communicator.get_buffer(local_chunk=True).view_as(out))
        return gemm()
    if bulk:
        communicator.reduce_scatter(out)
        return gemm()
    product, *others = gemm()
    for other in _all:
        other._spoil()
    communicator.write(product)
    communicator.reduce_scatter(out)
    return (torch.full_like(product, float("nan")), *others)  # only ``out`` is good
