"""Keep the storages of which autograd saved views, wherever they are, and tell which saved tensors stay on the device."""

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
"""Bytes. What moves begins on a multiple, so that views come back as well aligned as they left and kernels choose alike. It
ends on one too, or with its storage: a slice of every row leaves out the end of the last, and would come back a little smaller.
"""


class Place(Enum):
    DEVICE = "on the device"
    LEAVING = "being offloaded"
    HOST = "offloaded"
    RETURNING = "being reloaded"
    LOST = "dropped at the end of its step"


class Remains(NamedTuple):
    """Hold what a saved storage leaves behind: bytes that it counted for, and a host block with the transfer that wrote
    it.
    """

    device_bytes: int
    host_bytes: int
    block: HostBlock | None
    departure: Ticket | None


class Hold:
    """One capture's claim on storages, alive as long as any tensor the capture saved."""


class SavedStorage:
    """The part of one storage that autograd's saved tensors span.

    Alive as long as a saved tensor refers to it; the engine knows it by weak references only, so that a backward frees its
    memory as it goes, as without offload.

    Args:
        storage: on the device.
        key: the capture that met it first.
        ended: gets what this object leaves behind.
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
        """Bytes that move."""
        return self.end - self.begin

    @property
    def memory(self) -> torch.UntypedStorage:
        """The storage, of what is on the device."""
        assert self.storage is not None, f"activations of {self.key} are {self.place.value}"
        return self.storage

    @property
    def host_block(self) -> HostBlock:
        """The memory on the host, of what is away."""
        assert self.block is not None, f"activations of {self.key} are {self.place.value}"
        return self.block

    @property
    def left(self) -> Ticket:
        """The transfer to the host, of what has left."""
        assert self.departure is not None, f"activations of {self.key} are {self.place.value}"
        return self.departure

    @property
    def emptied(self) -> bool:
        """Return whether its owner has taken the memory back, as recomputation does that refills storages in place."""
        return self.storage is not None and self.storage.nbytes() < self.end - self._origin

    def view(self, tensor: torch.Tensor, hold: Hold) -> SavedView:
        """Return a stand-in for a tensor of this storage; what moves will include it."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.begin = min(self.begin, start // ALIGNMENT * ALIGNMENT)
        end = start + (last + 1) * tensor.element_size()
        self.end = max(self.end, min(-(-end // ALIGNMENT) * ALIGNMENT, self._whole))
        return SavedView(self, hold, tensor.dtype, tensor.shape, tensor.stride(), start)

    def bytes(self) -> torch.Tensor:
        """Return the bytes that move, on the device."""
        run = torch.empty(0, dtype=torch.uint8, device=self.memory.device)
        return run.set_(self.memory, self.begin - self._origin, (self.nbytes,), (1,))

    def move_to(self, destination: torch.Tensor) -> None:
        """Make this ``destination``, which holds the moving bytes alone."""
        self.storage = destination.untyped_storage()
        self.device_bytes = self.storage.nbytes()
        self._origin = self.begin
        self.reloaded = True

    def drop(self, place: Place) -> None:
        """Let go of the device memory."""
        self.storage, self.device_bytes, self.place = None, 0, place

    def remains(self) -> Remains:
        return Remains(self.device_bytes, self.host_bytes, self.block, self.departure)

    def restore(self, view: SavedView, channel: CopyChannel[Any]) -> torch.Tensor:
        """Return the saved tensor, on the device.

        Args:
            view: of this storage.
            channel: brought the storage back, if it was away.

        Raises:
            OffloadError: it is away.
        """
        if self.place is not Place.DEVICE:
            raise OffloadError(
                "used-while-away",
                f"activations of {self.key} are used while {self.place.value}: reload them and wait for the reload before "
                "their backward",
            )
        offset = (view.start - self._origin) // view.dtype.itemsize
        tensor = torch.empty(0, dtype=view.dtype, device=self.memory.device)
        tensor.set_(self.memory, offset, view.shape, view.stride)
        if self.reloaded:
            channel.use(tensor)
        return tensor

    def __del__(self) -> None:
        # Runs on whichever thread drops the graph, hence only appends.
        self._ended.append(self.remains())


@dataclass(frozen=True, eq=False, slots=True)
class SavedView:
    """Stand for a saved tensor in autograd's graph.

    Args:
        home: the storage it is a view of.
        hold: which keeps that storage alive.
        dtype: of its elements.
        shape: of the tensor.
        stride: in elements.
        start: bytes from the beginning of the first storage.
    """

    home: SavedStorage
    hold: Hold
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int


class Capture:
    """Hold what one forward saved. Nothing here keeps any of it alive."""

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
    """Return the sum of the bytes' 64-bit words, and of what is left over."""
    whole = run.numel() // 8 * 8
    return torch.stack((run[:whole].view(torch.int64).sum(), run[whole:].sum(dtype=torch.int64)))


class Residents:
    """Tells the saved tensors that stay on the device from those that may leave it.

    Args:
        device: whose activations may leave.
        min_bytes: storages below this stay.

    Attributes:
        stayed: bytes of the tensors that stay, per reason, since the step began.
    """

    def __init__(self, device: torch.device, min_bytes: int):
        self._device = device
        self._min_bytes = max(1, min_bytes)
        self.begin_step(())

    def begin_step(self, permanent: Iterable[torch.Tensor]) -> None:
        """Forget the step before.

        Args:
            permanent: tensors that are no activations.
        """
        self._permanent = {storage_key(part) for tensor in permanent for part in data_of(tensor)}
        self._excluded: dict[int, StorageWeakRef] = {}
        self.stayed: Counter[str] = Counter()

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """These stay for the rest of the step, as long as they live."""
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
