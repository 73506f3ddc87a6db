"""The storages of tensors that autograd saved, on the device or on the host, and the rule which of them never leave."""

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
"""The copied bytes of a storage begin at a multiple of this number of bytes. So views have the same alignment after a
reload, and kernels make the same choices. The copied bytes end at a multiple too, or at the end of the storage.
Otherwise a view that ends before the last row's end would return with a smaller storage.
"""


class Place(Enum):
    DEVICE = "on the device"
    LEAVING = "being offloaded"
    HOST = "offloaded"
    RETURNING = "being reloaded"
    LOST = "dropped at the end of its step"


class FreedMemory(NamedTuple):
    """Memory that a freed ``SavedStorage`` counted: bytes, host block, and the transfer that wrote this block."""

    device_bytes: int
    host_bytes: int
    block: HostBlock | None
    departure: Ticket | None


class Hold:
    """A token that shows that a capture still needs its storages. The tensors saved in the capture keep it alive."""


class SavedStorage:
    """The bytes of one storage that saved tensors use, from the first to the last of these bytes.

    Saved tensors keep this object alive. The engine has only weak references, so a backward frees the memory as it
    would without offload. ``key`` names the capture that saved the storage first. When this object is freed, it adds
    its ``FreedMemory`` to ``ended``.
    """

    def __init__(self, storage: torch.UntypedStorage, key: Hashable, ended: deque[FreedMemory]):
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
        """The number of bytes that are copied."""
        return self.end - self.begin

    @property
    def memory(self) -> torch.UntypedStorage:
        """The storage in device memory. It is an error to ask while the storage is on the host."""
        assert self.storage is not None, f"activations of {self.key} are {self.place.value}"
        return self.storage

    @property
    def host_block(self) -> HostBlock:
        """The host memory of a storage that has been offloaded."""
        assert self.block is not None, f"activations of {self.key} are {self.place.value}"
        return self.block

    @property
    def left(self) -> Ticket:
        """The transfer that copied this storage to the host."""
        assert self.departure is not None, f"activations of {self.key} are {self.place.value}"
        return self.departure

    @property
    def is_emptied(self) -> bool:
        """Whether other code has shrunk the storage. Recomputation does so, and refills the same storage later."""
        return self.storage is not None and self.storage.nbytes() < self.end - self._origin

    def view(self, tensor: torch.Tensor, hold: Hold) -> SavedView:
        """Return the object that autograd keeps in place of ``tensor``, and add the tensor's bytes to later copies."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.begin = min(self.begin, start // ALIGNMENT * ALIGNMENT)
        end = start + (last + 1) * tensor.element_size()
        self.end = max(self.end, min(-(-end // ALIGNMENT) * ALIGNMENT, self._whole))
        return SavedView(self, hold, tensor.dtype, tensor.shape, tensor.stride(), start)

    def bytes(self) -> torch.Tensor:
        """Return the bytes to copy, as a ``uint8`` tensor in device memory."""
        run = torch.empty(0, dtype=torch.uint8, device=self.memory.device)
        return run.set_(self.memory, self.begin - self._origin, (self.nbytes,), (1,))

    def move_to(self, destination: torch.Tensor) -> None:
        """Use ``destination`` as the device memory of this storage. It has room for the copied bytes only."""
        self.storage = destination.untyped_storage()
        self.device_bytes = self.storage.nbytes()
        self._origin = self.begin
        self.reloaded = True

    def drop(self, place: Place) -> None:
        """Drop the reference to the device memory, and set the new ``place``."""
        self.storage, self.device_bytes, self.place = None, 0, place

    def remains(self) -> FreedMemory:
        return FreedMemory(self.device_bytes, self.host_bytes, self.block, self.departure)

    def restore(self, view: SavedView, channel: CopyChannel[Any]) -> torch.Tensor:
        """Return the tensor that ``view`` stands for. Raise an OffloadError if its storage is not on the device.

        ``channel`` is the channel that copied the storage back.
        """
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
    """The object that autograd's graph holds in place of a saved tensor."""

    home: SavedStorage
    hold: Hold  # the saved tensors of a capture keep this token alive
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]  # in elements
    start: int  # bytes from the beginning of the original storage


class Capture:
    """The storages that autograd saved in one forward, as weak references."""

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

    def has_other_holders(self, storage: SavedStorage) -> bool:
        return any(holder is not self._hold() for holder in storage.holders)


def checksum(run: torch.Tensor) -> torch.Tensor:
    """Return two sums over the bytes ``run``: of the complete 64-bit words, and of the remaining bytes."""
    words_end = run.numel() // 8 * 8
    return torch.stack((run[:words_end].view(torch.int64).sum(), run[words_end:].sum(dtype=torch.int64)))


class Residents:
    """Decides which saved tensors stay on the device, among them those whose storage has less than ``min_bytes``.

    ``stayed`` counts the bytes of the tensors that stay in this step, by reason.
    """

    def __init__(self, device: torch.device, min_bytes: int):
        self._device = device
        self._min_bytes = max(1, min_bytes)
        self.begin_step(())

    def begin_step(self, permanent: Iterable[torch.Tensor]) -> None:
        """Start a step in which the ``permanent`` tensors are not activations. The counts start at 0."""
        self._kept: dict[int, tuple[StorageWeakRef, str]] = {}
        self.exclude(permanent, "permanent")
        self.stayed: Counter[str] = Counter()

    def exclude(self, tensors: Iterable[torch.Tensor], reason: str = "excluded") -> None:
        """Keep the storages of these tensors on the device for the rest of the step."""
        for part in (part for tensor in tensors for part in data_of(tensor)):
            self._kept[storage_key(part)] = StorageWeakRef(part.untyped_storage()), reason

    def stays_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a saved tensor stays on the device, and if so count its bytes."""
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
        if tensor.untyped_storage().nbytes() < self._min_bytes:
            return "small"
        return self._whose(tensor)

    def _whose(self, tensor: torch.Tensor) -> str | None:
        kept = filter(None, (self._kept.get(storage_key(part)) for part in data_of(tensor)))
        return next((reason for storage, reason in kept if not storage.expired()), None)
