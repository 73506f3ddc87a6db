"""Move what a forward saved for its backward to the host and back, when told to.

The caller decides when, because it knows the schedule; for every key, which is one forward:

    with engine.capture(key): ...forward...
    engine.offload(key)     # starts the copy to the host
    engine.wait(key)        # computing goes on after that copy, and the device memory is free
    engine.reload(key)      # allocates device memory and starts the copy back
    engine.wait(key)        # computing goes on after that copy
    ...backward...

No call blocks the host on a GPU; between these calls the caller computes whatever hides the copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
    Direction,
    ThreadChannel,
    Ticket,
)
from megatron_pipemem.features.offload.runtime.host import HostBlock, HostPool
from megatron_pipemem.features.offload.runtime.saved import (
    Capture,
    Hold,
    Place,
    Remains,
    Residents,
    SavedStorage,
    SavedView,
    checksum,
)
from megatron_pipemem.runtime.activation_ledger import storage_key
from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction
from megatron_pipemem.schedule.action import Kind

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stall:
    """Say how long computing stood still for one transfer.

    Args:
        key: of the forward whose activations moved.
        direction: to the host or back.
        nbytes: of the transfer.
        seconds: of standing still.
    """

    key: Hashable
    direction: Direction
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class OffloadStatistics:
    """Hold bytes and seconds since the step began.

    Args:
        bytes_out: moved to the host.
        bytes_in: moved back.
        device_peak_bytes: the most that captured storages took on the device at once, reloads included from the moment
            their memory is allocated. What deferred weight gradients keep longer than the graph is not in it.
        host_peak_bytes: payload, from its offload until its reload was waited for.
        host_reserved_bytes: host memory behind it. It stays for later steps, and may be less, because a block is lent
            again while it is being read.
        held_elsewhere_bytes: moved in vain: somebody else still held the storage when the engine let go of it.
        stayed_bytes: saved tensors that were never candidates, per reason.
        stalls: every time that computing stood still.
    """

    bytes_out: int
    bytes_in: int
    device_peak_bytes: int
    host_peak_bytes: int
    host_reserved_bytes: int
    held_elsewhere_bytes: int
    stayed_bytes: Mapping[str, int]
    stalls: tuple[Stall, ...]

    @property
    def stall_seconds(self) -> float:
        return sum(stall.seconds for stall in self.stalls)


@dataclass(eq=False)
class StartedTransfer:
    """Hold copies under way, and their tensors until computing has been ordered after them.

    The memory of a tensor freed earlier could go to the next kernel while it is still being read.

    Args:
        key: of the forward whose activations move.
        direction: to the host or back.
        ticket: of the channel.
        copies: runs of bytes with their source and destination.
        moving: storages that move.
    """

    key: Hashable
    direction: Direction
    ticket: Ticket
    copies: tuple[Copy, ...]
    moving: WeakSet[SavedStorage]

    @property
    def nbytes(self) -> int:
        return sum(copy.source.numel() for copy in self.copies)


class Traffic:
    """The transfers of one device.

    Args:
        channel: carries them.

    Attributes:
        transfers: that nobody has joined.
        bytes_out: moved to the host since the step began.
        bytes_in: moved back.
        stalls: every time that computing stood still for one.
    """

    def __init__(self, channel: CopyChannel[Any]):
        self._channel = channel
        self.transfers: list[StartedTransfer] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Count anew."""
        self._channel.forget_stalls()
        self.bytes_out = self.bytes_in = 0
        self.stalls: list[Stall] = []

    def take_stalls(self) -> Callable[[], tuple[Stall, ...]]:
        """Return a function that reads the stalls of the step so far. Calling it may wait for the device."""
        read, stalls = self._channel.take_stalls(), self.stalls
        return lambda: (read(), tuple(stalls))[1]

    def start(
        self,
        key: Hashable,
        direction: Direction,
        copies: Sequence[Copy],
        after: Sequence[Ticket],
        moving: Sequence[SavedStorage],
    ) -> Ticket | None:
        """Start a transfer, and return what tells its end; ``None`` if there is nothing to move.

        Args:
            key: of the forward whose activations move.
            direction: to the host or back.
            copies: runs of bytes.
            after: tickets of transfers that must have ended before.
            moving: the storages that the runs belong to.
        """
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
        """Order computing after the transfer, and return the storages that no later transfer has taken over.

        Raises:
            OffloadError: the copy failed.
        """
        nbytes = transfer.nbytes

        def stalled(seconds: float) -> None:
            self.stalls.append(Stall(transfer.key, transfer.direction, nbytes, seconds))

        self._channel.join(transfer.ticket, stalled)
        self.transfers.remove(transfer)
        arrived = [storage for storage in transfer.moving if storage.transfer is transfer]
        transfer.copies = ()
        for storage in arrived:
            storage.transfer = None
        return arrived

    def drop(self) -> None:
        """Wait for all transfers, and forget them, whatever has become of them."""
        transfers, self.transfers = self.transfers, []
        for transfer in transfers:
            try:
                self._channel.join(transfer.ticket, lambda seconds: None)
            except OffloadError:
                _log.warning(
                    "an unfinished %s of %s was dropped", transfer.direction.value, transfer.key, exc_info=True
                )


POISON = 0xFF
"""In every byte: a NaN in all floating-point formats of 16 bits and more."""


class OffloadEngine:
    """Captured activations of one device. All methods are called from one thread; backwards may run on others.

    What stays on the device: parameters and ``permanent`` tensors, storages below ``min_bytes``, tensors of another device,
    tensor subclasses, and what a caller names in ``keep``. A storage that several saved tensors view moves once, as the one
    run of bytes that spans them, and every view comes back as a view of it. One that several keys share leaves with the last
    of them and returns with the first.

    A deferred weight gradient takes its input from the graph during I, when everything is back, and then owns it until
    its W: such inputs are away between F and I like the rest, and on the device between I and W.

    Args:
        channel: to the host.
        pool: host memory.
        permanent: tensors that are no activations: parameters, gradient buffers, module buffers.
        min_bytes: storages below this stay; a copy costs the host a few microseconds however small it is.
        guard: overwrite device memory with NaN when it is let go, and again when it is allocated for a reload, and compare
            checksums of what left and what returned. Finds users of memory that is away; waits for the device.

    Attributes:
        channel: as given.
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
        self._ended: deque[Remains] = deque()
        self._captures: dict[Hashable, Capture] = {}
        self._by_storage: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        self._traffic = Traffic(channel)
        self._device_bytes = self._host_bytes = 0
        self._device_peak = self._host_peak = 0
        self._begin_step()

    @classmethod
    def on(cls, device: torch.device, host_memory: int, *, bandwidth: float | None = None, **options) -> OffloadEngine:
        """Return an engine for ``device`` with at most ``host_memory`` bytes on its host.

        Args:
            device: a GPU, or ``cpu`` to copy within host memory by threads.
            host_memory: budget in bytes.
            bandwidth: bytes per second to pretend on ``cpu``, each way.
            options: those of the class.

        Raises:
            OffloadError: a device or budget that cannot work.
        """
        if device.type not in ("cuda", "cpu"):
            raise OffloadError(
                "offload-device", f"activations cannot be offloaded from a {device.type} device, only from cuda and cpu"
            )
        channel: CopyChannel[Any] = CudaChannel(device) if device.type == "cuda" else ThreadChannel(bandwidth)
        return cls(channel, HostPool(host_memory, channel.host_memory), **options)

    @contextmanager
    def step(
        self, permanent: Iterable[torch.Tensor] = (), on_device: Callable[[torch.Tensor], object] | None = None
    ) -> Iterator[OffloadEngine]:
        """Enclose one training step. Whatever happens within, nothing captured survives it, and statistics begin anew.

        Args:
            permanent: of this step, beside those of the engine.
            on_device: called with whatever takes device memory: every saved tensor and every reloaded run of bytes.

        Raises:
            OffloadError: a copy failed that nobody had waited for.
        """
        self._begin_step(permanent)
        self._on_device = on_device
        try:
            yield self
            for transfer in list(self._traffic.transfers):
                self._settle(transfer)
        finally:
            self._drop_everything()

    @contextmanager
    def capture(self, key: Hashable) -> Iterator[None]:
        """Hold what autograd saves within this context under ``key``, which must not be in use.

        Raises:
            OffloadError: activations of this key are still alive.
        """
        known = self._captures.get(key)
        if known is not None and known.storages:
            raise OffloadError(
                "offload-order", f"activations of {key} are captured twice; their backward has not run yet"
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
        """Let these stay for the rest of the step: the batch, which somebody else keeps anyway."""
        self._residents.exclude(tensors)

    def stay(self, key: Hashable, tensors: Iterable[torch.Tensor]) -> None:
        """Let storages that ``key`` captured stay wherever the key goes: somebody goes on using them.

        Raises:
            OffloadError: unknown key.
        """
        if key not in self._captures:
            raise _unknown(key)
        self._captures[key].staying.update(self._saved(tensors))

    def offload(self, key: Hashable, keep: Iterable[torch.Tensor] = ()) -> None:
        """Start moving what ``key`` captured to the host.

        Args:
            key: captured and on the device.
            keep: as for ``stay``, known this late.

        Raises:
            OffloadError: unknown key, or one that is away; or the pool is exhausted, and then nothing has changed.
        """
        captured = self._known(key, away=False)
        staying = {*captured.staying, *self._saved(keep)}
        leaving = [
            storage
            for storage in list(captured.storages.values())
            if storage.place is Place.DEVICE
            and storage not in staying
            and not storage.emptied
            and not captured.held_by_others(storage)
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
        captured.unclaim(staying)
        copies = []
        for storage, block in zip(leaving, blocks, strict=True):
            source = storage.bytes()
            # Somebody may save another part of the same memory while this part is away: that is a new storage then.
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
        """Start moving what ``key`` captured back. Its device memory is taken now, its host memory is free for others.

        Raises:
            OffloadError: unknown key, or one that is not away.
        """
        captured = self._known(key, away=True)
        captured.away = False
        captured.claim()
        self._collect_ended()
        coming, copies = [], []
        for storage in list(captured.storages.values()):
            if storage.place is Place.LEAVING:
                # Nobody has waited for it to be gone, so it never left.
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
        if ticket is not None:  # something comes
            for storage in coming:
                self.pool.give(storage.host_block, (ticket,))
                storage.block = None

    def wait(self, key: Hashable) -> None:
        """Order computing after what moves for ``key``: frees the memory of an offload, makes a reload usable.

        Raises:
            OffloadError: unknown key, or the copy failed.
        """
        if key not in self._captures:
            raise _unknown(key)
        moving = {id(storage.transfer) for storage in list(self._captures[key].storages.values())}
        # Transfers that another key has started move some of its storages too.
        for transfer in [each for each in self._traffic.transfers if each.key == key or id(each) in moving]:
            self._settle(transfer)

    @property
    def device_bytes(self) -> int:
        """Bytes of the storages that captures hold on the device now."""
        self._collect_ended()
        return self._device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that are away now, from their ``offload`` until the ``wait`` for their reload.

        The pool may already have lent a block again while its reload is read from it.
        """
        self._collect_ended()
        return self._host_bytes

    def statistics(self) -> OffloadStatistics:
        """Return the statistics since the step began. On a GPU the call waits until computing has got here."""
        return self.statistics_for_later()()

    def statistics_for_later(self) -> Callable[[], OffloadStatistics]:
        """Return a function that returns the statistics of the step so far. It waits for the device; this call does not."""
        stalls = self._traffic.take_stalls()
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
        """Drop everything and give up threads and streams."""
        self._drop_everything()
        self.channel.close()

    def _begin_step(self, permanent: Iterable[torch.Tensor] = ()) -> None:
        self._drop_everything()
        self._traffic.begin_step()
        self._residents.begin_step((*self._permanent, *permanent))
        self._held_elsewhere = 0
        self._device_peak, self._host_peak = self._device_bytes, self._host_bytes

    def _pack(self, tensor: torch.Tensor, key: Hashable, captured: Capture, hold: Hold) -> torch.Tensor | SavedView:
        if self._residents.stays(tensor):
            if tensor.layout is torch.strided and self._on_device is not None:
                self._on_device(tensor)
            # Never an output itself: saved by its own node it would keep itself alive for ever.
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

    def _saved(self, tensors: Iterable[torch.Tensor]) -> list[SavedStorage]:
        """Return those of the tensors' storages that some capture knows."""
        known = (self._by_storage.get(storage_key(tensor)) for tensor in tensors)
        return [saved for saved in known if saved is not None]

    def _known(self, key: Hashable, away: bool) -> Capture:
        captured = self._captures.get(key)
        if captured is None:
            raise _unknown(key)
        if captured.away != away:
            raise OffloadError(
                "offload-order",
                f"activations of {key} are to be {'reloaded, but were not offloaded' if away else 'offloaded twice'}",
            )
        return captured

    def _settle(self, transfer: StartedTransfer) -> None:
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
                    f"activations of {storage.key} came back from the host with other bytes than they left with; "
                    "something wrote into memory that was away",
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
            _log.debug("%d bytes of activations of %s were offloaded while somebody holds them", nbytes, storage.key)

    def _returned(self, storage: SavedStorage) -> None:
        self._host_bytes -= storage.host_bytes
        storage.host_bytes = 0

    def _arrived(self, tensor: torch.Tensor, nbytes: int) -> None:
        self._device_bytes += nbytes
        self._device_peak = max(self._device_peak, self._device_bytes)
        if self._on_device is not None:
            self._on_device(tensor)

    def _collect_ended(self) -> None:
        """Book what saved storages left behind when their graph went."""
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


def _unknown(key: Hashable) -> OffloadError:
    return OffloadError("offload-order", f"nothing was captured under {key} in this step")


class OffloadActions:
    """Captures what the forwards of stages that move keep, and moves it when the program says so.

    Args:
        engine: within its ``step()`` while the executor runs.
    """

    def __init__(self, engine: OffloadEngine):
        self._engine = engine

    def extend(self, executor: Executor) -> Handlers:
        """See ``StepFeature``."""
        engine, others = self._engine, dict(executor.handlers)
        executor.host_bytes = lambda: engine.host_bytes

        def captured(each: Instruction) -> None:
            run = others[each.action.kind]
            # A forward that is run again keeps nothing but its input; what moves is made by the R.
            if not each.offloaded or (each.again is Kind.R and each.action.kind is Kind.F):
                run(each)
                return
            with engine.capture(each.key):
                run(each)
            engine.stay(each.key, executor.kept(each))

        return {
            Kind.F: captured,
            Kind.R: captured,
            Kind.OFFLOAD: lambda each: engine.offload(each.key),
            Kind.RELOAD: lambda each: engine.reload(each.key),
            Kind.WAIT_OFFLOAD: lambda each: engine.wait(each.key),
            Kind.WAIT_RELOAD: lambda each: engine.wait(each.key),
        }
