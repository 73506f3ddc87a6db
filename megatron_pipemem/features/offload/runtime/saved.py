"""The storages of tensors that autograd saved, on the device or on the host, and the choice of those that stay."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime.channels import CopyChannel, Ticket
from megatron_pipemem.features.offload.runtime.host import HostBlock
from megatron_pipemem.runtime.activation_ledger import data_of, is_quantised, storage_key

ALIGNMENT = 512
"""Bytes. A moving run begins on a multiple, so that views return with equal alignment and kernels choose alike. It ends on one
too, or with its storage: a slice of every row lacks the end of the last row, and would return a little smaller.
"""


class Place(Enum):
    DEVICE = "on the device"
    LEAVING = "being offloaded"
    HOST = "offloaded"
    RETURNING = "being reloaded"
    LOST = "dropped at the end of its step"


class Remains(NamedTuple):
    """Bytes that a freed storage was counted with, and its host block with the transfer that wrote it."""

    device_bytes: int
    host_bytes: int
    block: HostBlock | None
    departure: Ticket | None


class Hold:
    """One capture's claim on storages. It lives as long as a tensor that the capture saved."""


class SavedStorage:
    """The part of one storage that autograd's saved tensors span.

    It lives as long as a saved tensor refers to it. The engine holds only weak references, so a backward frees its memory as
    without offload. ``key`` is the first capture that saved it, and ``ended`` gets its ``Remains``.
    """

    def __init__(self, storage: torch.UntypedStorage, key: Hashable, ended: deque[Remains]):
        self.place = Place.DEVICE
        self.storage: torch.UntypedStorage | None = storage
        self.key = key
        self.holders: WeakSet[Hold] = WeakSet()
        self.begin = storage.nbytes()
        self.end = 0
        self.device_bytes = storage.nbytes()
        self.host_bytes = 0
        self.block: HostBlock | None = None
        self.departure: Ticket | None = None
        self.transfer: object | None = None
        self.checksum: torch.Tensor | None = None
        self.reloaded = False
        self._origin, self._whole = 0, storage.nbytes()
        self._ended = ended

    @property
    def nbytes(self) -> int:
        """The number of bytes that move."""
        return self.end - self.begin

    @property
    def memory(self) -> torch.UntypedStorage:
        """The storage, which must be on the device."""
        assert self.storage is not None, f"activations of {self.key} are {self.place.value}"
        return self.storage

    @property
    def host_block(self) -> HostBlock:
        """The memory on the host, of a storage that is away."""
        assert self.block is not None, f"activations of {self.key} are {self.place.value}"
        return self.block

    @property
    def left(self) -> Ticket:
        """The transfer to the host, of a storage that has left."""
        assert self.departure is not None, f"activations of {self.key} are {self.place.value}"
        return self.departure

    @property
    def emptied(self) -> bool:
        """Return whether other code has freed its memory. Recomputation does so, and refills storages in place."""
        return self.storage is not None and self.storage.nbytes() < self.end - self._origin

    def view(self, tensor: torch.Tensor, hold: Hold) -> SavedView:
        """Return a stand-in for a tensor of this storage, whose bytes will move with it."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.begin = min(self.begin, start // ALIGNMENT * ALIGNMENT)
        end = start + (last + 1) * tensor.element_size()
        self.end = max(self.end, min(-(-end // ALIGNMENT) * ALIGNMENT, self._whole))
        return SavedView(self, hold, tensor.dtype, tensor.shape, tensor.stride(), start)

    def bytes(self) -> torch.Tensor:
        """Return the moving bytes on the device."""
        run = torch.empty(0, dtype=torch.uint8, device=self.memory.device)
        return run.set_(self.memory, self.begin - self._origin, (self.nbytes,), (1,))

    def move_to(self, destination: torch.Tensor) -> None:
        """Use ``destination``, which holds only the moving bytes, as this storage."""
        self.storage = destination.untyped_storage()
        self.device_bytes = self.storage.nbytes()
        self._origin = self.begin
        self.reloaded = True

    def drop(self, place: Place) -> None:
        """Free the device memory."""
        self.storage, self.device_bytes, self.place = None, 0, place

    def remains(self) -> Remains:
        return Remains(self.device_bytes, self.host_bytes, self.block, self.departure)

    def restore(self, view: SavedView, channel: CopyChannel[Any]) -> torch.Tensor:
        """Return the saved tensor, or raise an OffloadError if it is away. ``channel`` brought its storage back."""
        if self.place is not Place.DEVICE:
            raise OffloadError(
                "used-while-away",
                f"activations of {self.key} are used while {self.place.value}; reload them and wait for the reload before "
                "their backward",
            )
        offset = (view.start - self._origin) // view.dtype.itemsize
        tensor = torch.empty(0, dtype=view.dtype, device=self.memory.device)
        tensor.set_(self.memory, offset, view.shape, view.stride)
        if self.reloaded:
            channel.use(tensor)
        return tensor

    def __del__(self) -> None:
        # This runs on any thread that drops the graph, so it only appends.
        self._ended.append(self.remains())


@dataclass(frozen=True, eq=False, slots=True)
class SavedView:
    """A stand-in for a saved tensor in autograd's graph."""

    home: SavedStorage
    hold: Hold  # keeps the storage alive
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]  # in elements
    start: int  # bytes from the beginning of the first storage


class Capture:
    """The storages that one forward saved, by weak references only."""

    def __init__(self, hold: Hold):
        self.storages: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        self.staying: WeakSet[SavedStorage] = WeakSet()
        self.away = False
        self._hold = ref(hold)

    def claim(self) -> None:
        hold = self._hold()
        for storage in list(self.storages.values()):
            if hold is not None:
                storage.holders.add(hold)

    def unclaim(self, staying: Iterable[SavedStorage] = ()) -> None:
        hold, staying = self._hold(), set(staying)
        for storage in list(self.storages.values()):
            if hold is not None and storage not in staying:
                storage.holders.discard(hold)

    def held_by_others(self, storage: SavedStorage) -> bool:
        return any(holder is not self._hold() for holder in storage.holders)


def checksum(run: torch.Tensor) -> torch.Tensor:
    """Return the sum of the 64-bit words and the sum of the remaining bytes."""
    whole = run.numel() // 8 * 8
    return torch.stack((run[:whole].view(torch.int64).sum(), run[whole:].sum(dtype=torch.int64)))


class Residents:
    """Decide which saved tensors stay on the device. ``stayed`` has their bytes since the step began, by reason."""

    def __init__(self, device: torch.device, min_bytes: int):
        self._device = device
        self._min_bytes = max(1, min_bytes)
        self.begin_step(())

    def begin_step(self, permanent: Iterable[torch.Tensor]) -> None:
        """Start a new step with these tensors that are not activations."""
        self._permanent = {storage_key(part) for tensor in permanent for part in data_of(tensor)}
        self._excluded: dict[int, StorageWeakRef] = {}
        self.stayed: Counter[str] = Counter()

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep these tensors on the device for the rest of the step, as long as they live."""
        for part in (part for tensor in tensors for part in data_of(tensor)):
            self._excluded[storage_key(part)] = StorageWeakRef(part.untyped_storage())

    def stays(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor stays, and count it if so."""
        reason = self._reason_to_stay(tensor)
        if reason is not None and tensor.layout is torch.strided:
            self.stayed[reason] += sum(part.nbytes for part in data_of(tensor))
        return reason is not None

    def _reason_to_stay(self, tensor: torch.Tensor) -> str | None:
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return "permanent"
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        if is_quantised(tensor):
            return self._whose(tensor) or "unsupported"
        if not plain or tensor.is_conj() or tensor.is_neg():
            return "unsupported"
        if tensor.device != self._device:
            return "other device"
        if tensor.numel() == 0 or tensor.untyped_storage().nbytes() < self._min_bytes:
            return "small"
        return self._whose(tensor)

    def _whose(self, tensor: torch.Tensor) -> str | None:
        for key in map(storage_key, data_of(tensor)):
            if key in self._permanent:
                return "permanent"
            excluded = self._excluded.get(key)
            if excluded is not None and not excluded.expired():
                return "batch"
        return None
