"""Copy the tensors that autograd saved in a forward to the host and back, at times that the caller chooses.

The caller knows the schedule. It calls these methods for each forward, which it names by a ``key``:

    with engine.capture(key): ...forward...
    engine.offload(key)     # start the copy to the host
    engine.wait(key)        # make later work wait for that copy, and drop the device memory
    engine.reload(key)      # allocate device memory, and start the copy back
    engine.wait(key)        # make later work wait for that copy
    ...backward...

On a GPU no call blocks the host. Other work that the caller launches between these calls hides the copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime.channels import (
    Copy,
    CopyChannel,
    CudaChannel,
    ThreadChannel,
    Ticket,
)
from megatron_pipemem.features.offload.runtime.host import HostBlock, HostPool
from megatron_pipemem.features.offload.runtime.saved import (
    Capture,
    FreedMemory,
    Hold,
    Place,
    Residents,
    SavedStorage,
    SavedView,
    checksum,
)
from megatron_pipemem.runtime.activation_ledger import storage_key
from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction
from megatron_pipemem.runtime.trace import Direction, OffloadStatistics, Stall
from megatron_pipemem.schedule.action import Kind

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class StartedTransfer:
    """Copies that have been started, and their tensors, which are kept until later work waits for the copies.

    A tensor that is freed earlier could give its memory to the next kernel while a copy still reads it.
    """

    key: Hashable  # names the forward whose activations move
    direction: Direction
    ticket: Ticket
    copies: tuple[Copy, ...]
    moving: WeakSet[SavedStorage]  # the storages that the copies move

    @property
    def nbytes(self) -> int:
        return sum(copy.source.numel() for copy in self.copies)


class Traffic:
    """The running transfers of one device, and the bytes and waiting times of the current step's transfers."""

    def __init__(self, channel: CopyChannel[Any]):
        self._channel = channel
        self.transfers: list[StartedTransfer] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Set the byte counts to 0, and drop all waiting times."""
        self.bytes_out = self.bytes_in = 0
        self._waits: list[tuple[Hashable, Direction, int, Callable[[], float]]] = []

    def stalls_for_later(self) -> Callable[[], tuple[Stall, ...]]:
        """Return a function that returns the waiting times of the step so far. The function may wait for the device."""
        waits = list(self._waits)
        return lambda: tuple(Stall(key, to, nbytes, waited()) for key, to, nbytes, waited in waits)

    def start(
        self,
        key: Hashable,
        direction: Direction,
        copies: Sequence[Copy],
        after: Sequence[Ticket],
        moving: Sequence[SavedStorage],
    ) -> Ticket | None:
        """Start a transfer of the storages ``moving`` after those of ``after``; no ticket if there is nothing to copy."""
        if not copies:
            return None
        ticket = self._channel.start(direction, copies, after)
        transfer = StartedTransfer(key, direction, ticket, tuple(copies), WeakSet(moving))
        for storage in moving:
            storage.transfer = transfer
        self.transfers.append(transfer)
        if direction is Direction.OUT:
            self.bytes_out += transfer.nbytes
        else:
            self.bytes_in += transfer.nbytes
        return ticket

    def join(self, transfer: StartedTransfer) -> list[SavedStorage]:
        """Make later work on the device wait for the transfer, and return the storages that it moved.

        A storage is left out if a later transfer moves it too, or if a reload has cancelled its way to the host. A
        failed copy raises an OffloadError.
        """
        waited = self._channel.join(transfer.ticket)
        if waited is not None:
            self._waits.append((transfer.key, transfer.direction, transfer.nbytes, waited))
        self.transfers.remove(transfer)
        arrived = [storage for storage in transfer.moving if storage.transfer is transfer]
        transfer.copies = ()
        for storage in arrived:
            storage.transfer = None
        return arrived

    def drop(self) -> None:
        """Make later work wait for all running transfers, and forget them. A failed one is only logged."""
        transfers, self.transfers = self.transfers, []
        for transfer in transfers:
            try:
                self._channel.join(transfer.ticket)
            except OffloadError:
                _log.warning(
                    "an unfinished %s of %s was dropped", transfer.direction.value, transfer.key, exc_info=True
                )


POISON = 0xFF
"""A byte value that makes NaN in all floating-point formats of 16 bits and more."""


class OffloadEngine:
    """Holds the tensors that autograd saves on one device, and copies them to the host and back.

    One thread calls all methods. Backwards may run on other threads.

    These tensors stay on the device: parameters and the tensors in ``permanent``; tensors with a storage of less than
    ``min_bytes``; subclasses of ``Tensor``; tensors on another device; and tensors that a caller excludes.
    ``permanent`` holds tensors that are not activations, such as parameters, gradient buffers and module buffers. Small
    storages stay because even a small copy costs the host microseconds.

    If several saved tensors are views of one storage, the storage is copied once, and all of them are views of one
    storage again afterwards. If several forwards have saved a storage, it leaves with the last of them and returns with
    the first.

    A deferred weight gradient takes its input from the graph in the I pass, after the reload, and holds it until its W
    pass. So this input is on the host between F and I, and on the device between I and W.

    ``guard`` finds code that uses tensors while they are on the host. It fills freed and newly allocated device memory
    with NaN, and compares checksums from before and after. This makes the host wait for the device.
    """

    def __init__(
        self,
        channel: CopyChannel[Any],
        pool: HostPool,
        *,
        permanent: Iterable[torch.Tensor] = (),
        min_bytes: int = 1 << 16,
        guard: bool = False,
    ):
        self.channel = channel
        self.pool = pool
        self._permanent = tuple(permanent)
        self._residents = Residents(channel.device, min_bytes)
        self._guard = guard
        self._on_device: Callable[[torch.Tensor], object] | None = None
        self._ended: deque[FreedMemory] = deque()
        self._captures: dict[Hashable, Capture] = {}
        self._by_storage: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        self._traffic = Traffic(channel)
        self._device_bytes = self._host_bytes = 0
        self._device_peak = self._host_peak = 0
        self._begin_step()

    @classmethod
    def on(cls, device: torch.device, host_memory: int, *, bandwidth: float | None = None, **options) -> OffloadEngine:
        """Return an engine for a CUDA device, or for a CPU, where threads copy at most ``bandwidth`` bytes per second."""
        if device.type not in ("cuda", "cpu"):
            raise OffloadError(
                "offload-device",
                f"activations cannot be offloaded from a {device.type} device; use cuda or cpu, or turn offload off",
            )
        channel: CopyChannel[Any] = CudaChannel(device) if device.type == "cuda" else ThreadChannel(bandwidth)
        return cls(channel, HostPool(host_memory, channel.host_memory), **options)

    @contextmanager
    def step(
        self, permanent: Iterable[torch.Tensor] = (), on_device: Callable[[torch.Tensor], object] | None = None
    ) -> Iterator[OffloadEngine]:
        """Enclose one training step. At its end all captured tensors are dropped, also after an error.

        ``permanent`` adds tensors that are not activations. ``on_device`` is called with each tensor that begins to
        occupy device memory: those that autograd saves, and the destinations of reloads.
        """
        self._begin_step(permanent)
        self._on_device = on_device
        try:
            yield self
            for transfer in list(self._traffic.transfers):
                self._complete(transfer)
        finally:
            self._drop_everything()

    @contextmanager
    def capture(self, key: Hashable) -> Iterator[None]:
        """Take the tensors that autograd saves within this block into the engine, under the name ``key``.

        Raise an OffloadError if ``key`` still holds tensors of another forward.
        """
        earlier = self._captures.get(key)
        if earlier is not None and earlier.storages:
            raise OffloadError(
                "offload-order",
                f"activations of {key} are captured a second time before their backward has run; run it first, or capture "
                "under another key",
            )
        hold = Hold()
        captured = self._captures[key] = Capture(hold)

        def pack(tensor: torch.Tensor) -> torch.Tensor | SavedView:
            return self._pack(tensor, key, captured, hold)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
        except BaseException:
            captured.unclaim()
            del self._captures[key]
            raise

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the storages of these tensors on the device for the rest of the step, for example the batch."""
        self._residents.exclude(tensors)

    def stay(self, key: Hashable, tensors: Iterable[torch.Tensor]) -> None:
        """Leave these tensors out of later offloads of ``key``, because other code still uses them.

        Tensors that the engine has not captured are ignored. Raise an OffloadError if this step has not captured ``key``.
        """
        storages = (self._by_storage.get(storage_key(tensor)) for tensor in tensors)
        self._capture_of(key).staying.update(saved for saved in storages if saved is not None)

    def offload(self, key: Hashable) -> None:
        """Start copying the tensors of ``key`` to the host, except those given to ``stay``.

        Storages that another forward on the device needs stay too. Raise an OffloadError if ``key`` was not captured or
        is offloaded already, or if the host pool has no room. Then nothing has changed.
        """
        captured = self._capture_of(key, away=False)
        leaving = [
            storage
            for storage in list(captured.storages.values())
            if storage.place is Place.DEVICE
            and storage not in captured.staying
            and not storage.is_emptied
            and not captured.has_other_holders(storage)
        ]
        self._collect_ended()
        blocks: list[HostBlock] = []
        try:
            for storage in leaving:
                blocks.append(self.pool.take(storage.nbytes, f"activations of {key}"))
        except BaseException:
            for block in blocks:
                self.pool.give(block, block.after)
            raise
        captured.away = True
        captured.unclaim(captured.staying)
        copies = []
        for storage, block in zip(leaving, blocks, strict=True):
            source = storage.bytes()
            # If another part of the same memory is saved while this part is away, it is a new storage.
            self._by_storage.pop(storage.memory._cdata, None)
            if self._guard:
                storage.checksum = checksum(source)
            storage.place, storage.block = Place.LEAVING, block
            storage.host_bytes = block.nbytes
            self._host_bytes += block.nbytes
            copies.append(Copy(block.data, source))
        self._host_peak = max(self._host_peak, self._host_bytes)
        after = [ticket for block in blocks for ticket in block.after]
        ticket = self._traffic.start(key, Direction.OUT, copies, after, leaving)
        for storage in leaving:
            storage.departure = ticket

    def reload(self, key: Hashable) -> None:
        """Allocate device memory for the tensors of ``key``, and start copying them back.

        A tensor whose offload has not been waited for is still on the device, and is not copied. Host memory can be
        lent again at once. Its next user waits for the copy. Raise an OffloadError if ``key`` is not offloaded.
        """
        captured = self._capture_of(key, away=True)
        captured.away = False
        captured.claim()
        self._collect_ended()
        coming, copies = [], []
        for storage in list(captured.storages.values()):
            if storage.place is Place.LEAVING:
                # No wait has freed its device memory, so it never left.
                self.pool.give(storage.host_block, (storage.left,))
                storage.place, storage.block, storage.transfer = Place.DEVICE, None, None
                self._returned(storage)
            elif storage.place is Place.HOST:
                destination = torch.empty(storage.nbytes, dtype=torch.uint8, device=self.channel.device)
                if self._guard:
                    destination.fill_(POISON)
                storage.move_to(destination)
                storage.place = Place.RETURNING
                coming.append(storage)
                copies.append(Copy(destination, storage.host_block.data))
                self._arrived(destination, storage.device_bytes)
        departures = list(dict.fromkeys(storage.left for storage in coming))
        ticket = self._traffic.start(key, Direction.IN, copies, departures, coming)
        if ticket is not None:  # some storages come back
            for storage in coming:
                self.pool.give(storage.host_block, (ticket,))
                storage.block = None

    def wait(self, key: Hashable) -> None:
        """Make later work on the device wait for the transfers of ``key``.

        After an offload, the engine no longer holds the device memory of the tensors. After a reload, that work can use
        the tensors. Raise an OffloadError if ``key`` was not captured, or if a copy has failed.
        """
        moving = {id(storage.transfer) for storage in list(self._capture_of(key).storages.values())}
        for transfer in list(self._traffic.transfers):
            # Some of its storages may move in a transfer of another key.
            if transfer.key == key or id(transfer) in moving:
                self._complete(transfer)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the captured storages occupy now."""
        self._collect_ended()
        return self._device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of captured storages on the host, counted from ``offload`` to the ``wait`` after ``reload``.

        The host pool may have lent the memory of a storage again while the reload still reads it.
        """
        self._collect_ended()
        return self._host_bytes

    def statistics(self) -> OffloadStatistics:
        """Return the bytes and waiting times since the step began. Block until the device has passed each ``wait``."""
        return self.statistics_for_later()()

    def statistics_for_later(self) -> Callable[[], OffloadStatistics]:
        """Return a function that returns the statistics up to now, and blocks as ``statistics`` does."""
        stalls = self._traffic.stalls_for_later()
        counted = partial(
            OffloadStatistics,
            bytes_out=self._traffic.bytes_out,
            bytes_in=self._traffic.bytes_in,
            device_peak_bytes=self._device_peak,
            host_peak_bytes=self._host_peak,
            host_reserved_bytes=self.pool.reserved_bytes,
            held_elsewhere_bytes=self._held_elsewhere,
            stayed_bytes=dict(self._residents.stayed),
        )
        return lambda: counted(stalls=stalls())

    def close(self) -> None:
        """Drop all captured tensors, and close the channel."""
        self._drop_everything()
        self.channel.close()

    def _begin_step(self, permanent: Iterable[torch.Tensor] = ()) -> None:
        self._drop_everything()
        self._traffic.begin_step()
        self._residents.begin_step((*self._permanent, *permanent))
        self._held_elsewhere = 0
        self._device_peak, self._host_peak = self._device_bytes, self._host_bytes

    def _pack(self, tensor: torch.Tensor, key: Hashable, captured: Capture, hold: Hold) -> torch.Tensor | SavedView:
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() == 0:
            # Not the tensor itself: the part of an expert without tokens would keep the storage of all experts' tokens.
            return tensor.new_empty(tensor.shape)
        if self._residents.stays_on_device(tensor):
            if tensor.layout is torch.strided and self._on_device is not None:
                self._on_device(tensor)
            # Not the tensor itself: an output that its own node saves would keep itself alive.
            return tensor if tensor.is_leaf else tensor.detach()
        storage = tensor.untyped_storage()
        saved = self._by_storage.get(storage._cdata)
        if saved is None:
            saved = self._by_storage[storage._cdata] = SavedStorage(storage, key, self._ended)
            self._collect_ended()
            self._arrived(tensor, saved.device_bytes)
        captured.storages[id(saved)] = saved
        saved.holders.add(hold)
        return saved.view(tensor, hold)

    def _capture_of(self, key: Hashable, away: bool | None = None) -> Capture:
        """Return the capture of ``key``. Raise an OffloadError if there is none, or if it is not where ``away`` says."""
        captured = self._captures.get(key)
        if captured is None:
            raise OffloadError(
                "offload-order",
                f"this step has captured no activations of {key}; run their forward within capture() first",
            )
        if away is not None and captured.away != away:
            raise OffloadError(
                "offload-order",
                f"activations of {key} cannot be "
                + ("reloaded, because they are not on the host" if away else "offloaded a second time")
                + "; offload them once, and reload them once after that",
            )
        return captured

    def _complete(self, transfer: StartedTransfer) -> None:
        for storage in self._traffic.join(transfer):
            if transfer.direction is Direction.OUT:
                self._release(storage)
                continue
            storage.place = Place.DEVICE
            self._returned(storage)
            written = storage.checksum
            if self._guard and not (written is not None and torch.equal(checksum(storage.bytes()), written)):
                raise OffloadError(
                    "changed-while-away",
                    f"activations of {storage.key} returned from the host with other bytes: some code wrote to their memory "
                    "while they were on the host; find that code, or turn offload off",
                )

    def _unpack(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        return saved.home.restore(saved, self.channel) if isinstance(saved, SavedView) else saved

    def _release(self, storage: SavedStorage) -> None:
        if self._guard and storage.memory._cdata not in self._by_storage:
            storage.bytes().fill_(POISON)
        reference, nbytes = StorageWeakRef(storage.memory), storage.device_bytes
        self._device_bytes -= nbytes
        storage.drop(Place.HOST)
        if not reference.expired():
            self._held_elsewhere += nbytes
            _log.debug(
                "%d bytes of activations of %s were offloaded in vain: other code holds them", nbytes, storage.key
            )

    def _returned(self, storage: SavedStorage) -> None:
        self._host_bytes -= storage.host_bytes
        storage.host_bytes = 0

    def _arrived(self, tensor: torch.Tensor, nbytes: int) -> None:
        self._device_bytes += nbytes
        self._device_peak = max(self._device_peak, self._device_bytes)
        if self._on_device is not None:
            self._on_device(tensor)

    def _collect_ended(self) -> None:
        """Subtract the bytes of storages that a backward has freed, and return their host memory to the pool."""
        while self._ended:
            nbytes, away, block, departure = self._ended.popleft()
            self._device_bytes -= nbytes
            self._host_bytes -= away
            if block is not None:
                self.pool.give(block, block.after if departure is None else (departure,))

    def _drop_everything(self) -> None:
        self._traffic.drop()
        for captured in self._captures.values():
            for storage in list(captured.storages.values()):
                self._ended.append(storage.remains())
                storage.drop(Place.LOST)
                storage.block = storage.transfer = None
                storage.host_bytes = 0
                storage.holders.clear()
        self._captures.clear()
        self._by_storage.clear()
        self._collect_ended()


class OffloadActions:
    """The step feature that captures the activations of offloaded stages, and executes OFFLOAD and RELOAD."""

    def __init__(self, engine: OffloadEngine):
        self._engine = engine

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers that wrap F and R, and handlers for OFFLOAD, RELOAD and the waits for them."""
        engine, others = self._engine, dict(executor.handlers)
        executor.host_bytes = lambda: engine.host_bytes

        def captured(instruction: Instruction) -> None:
            run = others[instruction.action.kind]
            # A forward that runs again saves only its input; the R makes the tensors that move.
            runs_again = instruction.recompute_kind is Kind.R and instruction.action.kind is Kind.F
            if runs_again or not instruction.is_offloaded:
                run(instruction)
                return
            with engine.capture(instruction.key):
                run(instruction)
            engine.stay(instruction.key, executor.kept_tensors(instruction))

        return {
            Kind.F: captured,
            Kind.R: captured,
            Kind.OFFLOAD: lambda instruction: engine.offload(instruction.key),
            Kind.RELOAD: lambda instruction: engine.reload(instruction.key),
            Kind.WAIT_OFFLOAD: lambda instruction: engine.wait(instruction.key),
            Kind.WAIT_RELOAD: lambda instruction: engine.wait(instruction.key),
        }
