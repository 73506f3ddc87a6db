"""Count the bytes that one rank holds between its actions, and predict them for other microbatches.

The ledger counts the storages of these tensors, each storage once:

- tensors kept for the backward, by autograd or by a shard of the LM head
- received inputs and gradients, and results that are not sent yet
- tensors handed to a neighbouring stage on the same device or to a collective
- tensors that a deferred weight gradient keeps beyond the saved activations

It does not count parameters and their gradients, the batch, temporaries within one action, tensors that outlive their
microbatch, or messages that are being sent. How long the transport keeps a sent message depends on its receiver, and
differs between runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import accumulate, pairwise
from operator import add, itemgetter
from typing import Any, Concatenate, NamedTuple
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.action_prices import held_after
from megatron_pipemem.schedule.units import WHOLE, Units

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LedgerEntry:
    """The bytes that a rank holds right after an action, and the tokens that the action sent to experts."""

    action: Action
    bytes: int  # on the device
    host_bytes: int = 0  # activations on the host
    routed: int = 0  # tokens that the action sent to experts, one per visit of an expert
    routable: int = 0  # the largest number that a capacity factor allows; 0 without one
    evenly: int = 0  # the number if all experts got equally many
    tokens: tuple[int, int] = (0, 0)  # number of sequences and their length, if microbatches differ


class _Held(ref[torch.UntypedStorage]):
    """A weak reference to a storage that is counted. ``freed`` gets this object when the storage has been freed.

    ``since`` is the number of entries before the first one that counts the storage. ``microbatch`` is the first one
    that held it, if an earlier step did, by its number in this step. ``nbytes`` are the bytes that the last entry has.
    """

    __slots__ = ("key", "microbatch", "nbytes", "since")

    def __new__(cls, storage: torch.UntypedStorage, freed: Callable[[_Held], object], since: int) -> _Held:
        return super().__new__(cls, storage, freed)

    def __init__(self, storage: torch.UntypedStorage, freed: Callable[[_Held], object], since: int):
        self.key, self.since, self.nbytes = storage._cdata, since, 0
        self.microbatch: int | None = None


class _Size(NamedTuple):
    """The size of a microbatch, compared by its tokens of experts first, then its tokens, then its length."""

    routed: int
    tokens: int
    length: int


def bytes_per_action(
    entries: Sequence[LedgerEntry],
    num_stages: int,
    of_largest: bool = True,
    on_host: bool = False,
    units: Units = WHOLE,
) -> dict[Kind, tuple[int, ...]]:
    """Return the bytes that each kind of action adds to the rank's memory, one value per stage and part.

    An action that frees more bytes than it takes has a negative value. ``num_stages`` counts the stages of all ranks,
    and stages of other ranks get 0. ``entries`` are those of one step, in order.

    If microbatches differ, the values are those of the largest, or with ``of_largest=False`` of the smallest. The largest is
    the one that gives most tokens to experts, then the one with most tokens. With a capacity factor, the largest is
    extrapolated to the tokens that the factor allows, if microbatches differ in tokens of experts. ``on_host`` returns
    bytes on the host. ``units`` are those of the step.
    """
    bytes_after = [entry.host_bytes if on_host else entry.bytes for entry in entries]
    forwards = {
        (entry.action.stage, entry.action.microbatch): entry for entry in entries if entry.action.kind is Kind.F
    }
    sizes_and_changes: dict[tuple[Kind, int], list[tuple[_Size, int]]] = {}
    routable: dict[int, int] = {}
    for entry, before, after in zip(entries, (0, *bytes_after), bytes_after, strict=False):
        kind, stage, microbatch = entry.action
        at = units.place(stage, microbatch)
        forward = forwards.get((stage, microbatch))
        (b, s), routed = entry.tokens, 0 if forward is None else forward.routed
        sizes_and_changes.setdefault((kind, at), []).append((_Size(routed, b * s, s), after - before))
        routable[at] = max(routable.get(at, 0), entry.routable)
    changes: dict[Kind, list[int]] = {}
    for (kind, at), of_microbatches in sizes_and_changes.items():
        least, low = min(of_microbatches, key=itemgetter(0))
        top, high = max(of_microbatches, key=itemgetter(0))
        change = high if of_largest else low
        if of_largest and least.routed < top.routed < routable[at]:
            change += round((high - low) * (routable[at] - top.routed) / (top.routed - least.routed))
        changes.setdefault(kind, [0] * (num_stages * units.parts))[at] = change
    return {kind: tuple(per_part) for kind, per_part in changes.items()}


def predict_peak_bytes(
    actions: Sequence[Action],
    changes: Mapping[Kind, Sequence[int]],
    units: Units = WHOLE,
    further: Sequence[int] | None = None,
) -> int:
    """Return the most bytes that a rank holds after any of these actions, which it runs in order.

    It holds none before the first. ``changes`` is the result of ``bytes_per_action``, with the same ``units``.
    ``further`` has bytes to add after each action.
    """
    return int(_peak(held_after(actions, changes, units=units), further))


def _peak(held: Sequence[float], further: Sequence[int] | None) -> float:
    return max(held if further is None else map(add, held, further), default=0)


def _counting[**P, T](
    count: Callable[Concatenate[ActivationLedger, P], T],
) -> Callable[Concatenate[ActivationLedger, P], T | None]:
    """Wrap a method of the ledger so that an error stops the counting and not the training.

    The error is noted in ``failure`` and not raised. From then on, wrapped methods do nothing and return ``None``.
    """

    @wraps(count)
    def counted(self: ActivationLedger, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self.failure is not None:
            return None
        try:
            return count(self, *args, **kwargs)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.warning("activations are no longer counted: %s", self.failure)
            return None

    return counted


class ActivationLedger:
    """Counts the activation bytes that one rank holds during a step.

    ``permanent`` are tensors that are not activations: parameters, gradient buffers, module buffers. ``tokens`` has
    ``(b, s)`` of every microbatch, its number of sequences and their length, if microbatches differ. ``failure`` is the
    error that ended the count, or ``None``.
    """

    def __init__(self, permanent: Iterable[torch.Tensor] = (), tokens: Sequence[tuple[int, int]] | None = None):
        self.entries: list[LedgerEntry] = []
        self.tokens = tokens
        self.failure: str | None = None
        # The weak references reserve the keys of the storages.
        self._excluded: dict[int, StorageWeakRef] = {}
        # An action frees few of the storages that a rank holds, and a deep pipeline holds many. So nothing goes through all
        # of them: storages say themselves that they are freed, and change their size in actions of their microbatch only.
        self._held: dict[int, _Held] = {}
        self._bytes = 0
        self._freed: list[_Held] = []  # since the last entry; any thread may append
        self._unmeasured: list[_Held] = []
        self._of_microbatch: dict[int | None, list[_Held]] = {}  # by the microbatch of their first action
        self._routed = self._routable = self._evenly = 0
        self._frees_later = False
        self.exclude(permanent)

    def continued(self, permanent: Iterable[torch.Tensor]) -> ActivationLedger:
        """Return a new ledger for the next step. It has no entries, and starts with the tensors still counted here.

        ``permanent`` are the tensors of the next step that are not activations. A failure is kept.
        """
        following = ActivationLedger(permanent)
        following._excluded |= {key: storage for key, storage in self._excluded.items() if not storage.expired()}
        following._held, following._bytes, following._freed = self._held, self._bytes, self._freed
        following._unmeasured, following._of_microbatch = self._unmeasured, self._of_microbatch
        following.failure = following.failure or self.failure
        return following

    @_counting
    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors from now on, because the caller keeps them in any case, such as the batch.

        Tensors that are counted already cease to be counted.
        """
        for part in (part for tensor in tensors for part in data_of(tensor)):
            self._excluded[storage_key(part)] = StorageWeakRef(part.untyped_storage())
            self._forget(part)

    @_counting
    def hold(self, tensor: torch.Tensor) -> bool:
        """Count the tensor's storage until it is freed or released. Return whether this call began to count it.

        It does not if the storage is counted already, permanent or excluded.
        """
        return any([self._hold(part) for part in data_of(tensor)])

    def _hold(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        excluded, counted = self._excluded.get(key), self._held.get(key)
        if (excluded is not None and not excluded.expired()) or (counted is not None and counted() is not None):
            return False
        held = self._held[key] = _Held(tensor.untyped_storage(), self._freed.append, len(self.entries))
        self._unmeasured.append(held)
        return True

    @_counting
    def release(self, tensor: torch.Tensor) -> None:
        """Stop counting a tensor, although a communication backend may keep it for a time that varies between runs."""
        for part in data_of(tensor):
            self._forget(part)

    def _forget(self, tensor: torch.Tensor) -> None:
        held = self._held.pop(storage_key(tensor), None)
        if held is not None:
            self._bytes -= held.nbytes
            held.nbytes = 0

    def _measure(self, storages: Iterable[_Held]) -> list[_Held]:
        """Read the present sizes of storages that still count, and return these."""
        counted = [held for held in storages if self._held.get(held.key) is held]
        for held in counted:
            storage = held()
            if storage is not None:
                nbytes = storage.nbytes()
                self._bytes += nbytes - held.nbytes
                held.nbytes = nbytes
        return counted

    def _drop_freed(self) -> None:
        while self._freed:
            held = self._freed.pop()
            self._bytes -= held.nbytes
            held.nbytes = 0
            if self._held.get(held.key) is held:  # a new storage may have its address
                del self._held[held.key]

    def route(self, tokens: int, most: int, evenly: int) -> None:
        """Add to the tokens that the running action sends to experts.

        The arguments are the fields ``routed``, ``routable`` and ``evenly`` of ``LedgerEntry``.
        """
        self._routed += tokens
        self._routable += most
        self._evenly += evenly

    @contextmanager
    def watch_saved(self) -> Iterator[None]:
        """Count the tensors that autograd saves within a ``with`` block, unless counting has failed."""
        if self.failure is not None:
            yield
            return

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.hold(tensor)
            # Not the tensor itself: if a node saves its own output, the output would never be freed.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @_counting
    def free_later(self) -> None:
        """Count all that is freed from now on until the next ``record`` as held in that record.

        A forward and a backward may run together. The bytes that the backward frees belong to its own record.
        """
        self._measure(self._unmeasured)
        self._drop_freed()
        self._frees_later = True

    @_counting
    def record(self, action: Action, host_bytes: int = 0) -> None:
        """Add an entry for ``action``, which has just run, with the bytes that the device holds now.

        ``host_bytes`` are the bytes of activations that the host holds now.
        """
        # Megatron's checkpoint without output empties storages that autograd keeps, and fills them again in the backward.
        counted = self._measure([*self._of_microbatch.pop(action.microbatch, ()), *self._unmeasured])
        if counted:
            self._of_microbatch[action.microbatch] = counted
        self._unmeasured = []
        if not self._frees_later:
            self._drop_freed()
        device_bytes = self._bytes
        self._drop_freed()
        self._frees_later = False
        routing = self._routed, self._routable, self._evenly
        self.entries.append(LedgerEntry(action, device_bytes, host_bytes, *routing, self.tokens_of(action)))
        self._routed = self._routable = self._evenly = 0

    @_counting
    def end_step(self, num_microbatches: int) -> None:
        """Take the tensors that outlive their microbatch out of all entries, at the end of a step.

        They are no activations, and later microbatches share them. An example is the offsets of sequences that
        Transformer Engine caches. ``num_microbatches`` have ended. Those with higher numbers are in flight, and their
        numbers are lower by ``num_microbatches`` in the next step.
        """
        microbatches = [*(entry.action.microbatch for entry in self.entries), None]
        surplus = [0] * len(microbatches)
        self._drop_freed()
        for held in [*self._held.values()]:
            first = microbatches[held.since] if held.microbatch is None else held.microbatch
            storage = held()
            if first is not None and first >= num_microbatches:
                held.since, held.microbatch = 0, first - num_microbatches
            elif storage is not None:
                surplus[held.since] += storage.nbytes()
                self._excluded[held.key] = StorageWeakRef(storage)
                del self._held[held.key]
        self._bytes = sum(held.nbytes for held in self._held.values())
        self._of_microbatch = {
            microbatch - num_microbatches: storages
            for microbatch, storages in self._of_microbatch.items()
            if microbatch is not None and microbatch >= num_microbatches
        }
        self.entries = [
            replace(entry, bytes=entry.bytes - more)
            for entry, more in zip(self.entries, accumulate(surplus), strict=False)
        ]

    def tokens_of(self, action: Action) -> tuple[int, int]:
        """Return the number of sequences of the action's microbatch, and their length.

        Return ``(0, 0)`` if all microbatches are equal, or if the action has no microbatch.
        """
        return (0, 0) if self.tokens is None or action.microbatch is None else self.tokens[action.microbatch]

    @property
    def peak(self) -> int:
        """The most bytes held on the device after any action of the step."""
        return max((entry.bytes for entry in self.entries), default=0)

    @property
    def host_peak(self) -> int:
        """The most bytes held on the host after any action of the step."""
        return max((entry.host_bytes for entry in self.entries), default=0)


@contextmanager
def saved_as_is(*counted: torch.Tensor) -> Iterator[None]:
    """Make autograd save tensors unchanged within a ``with`` block. A ledger counts only ``counted`` of them.

    Without this, ``watch_saved`` returns a saved parameter as another object, without its Python attributes. Some
    layers need these attributes to find the parameter's gradient. If no hooks for saved tensors are set, nothing
    changes.
    """
    autograd = torch._C._autograd
    hooks = autograd._top_saved_tensors_default_hooks(True) if torch.is_grad_enabled() else None
    if hooks is None:
        yield
        return
    pack, _ = hooks
    for tensor in counted:
        pack(tensor)
    autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        autograd._push_saved_tensors_default_hooks(*hooks)


def is_quantised(tensor: object) -> bool:
    """Return whether this is a quantised tensor of Transformer Engine, whose bytes are in several tensors."""
    return hasattr(tensor, "get_data_tensors")


def data_of(tensor: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold the bytes of a tensor: itself, or the data of a quantised tensor.

    A quantised tensor of Transformer Engine has no storage of its own. Each call of ``untyped_storage`` returns a new
    one, which is empty or as large as the values before quantisation. Tensors with an empty storage are left out,
    because its address is soon used again.
    """
    parts = tensor.get_data_tensors() if is_quantised(tensor) else (tensor,)
    listed = (parts,) if isinstance(parts, torch.Tensor) else parts
    return tuple(part for part in listed if part is not None and part.untyped_storage().nbytes())


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies the tensor's storage among all storages that are not freed."""
    return tensor.untyped_storage()._cdata


class BytesBySize:
    """The bytes that actions add to a rank's memory if microbatches differ in their numbers of sequences and lengths.

    Actions of the same kind, stage and size add the bytes of the first one that was counted. With ``on_host``, the
    bytes are those on the host.
    """

    def __init__(self, on_host: bool = False) -> None:
        self._on_host = on_host
        self._changes: dict[tuple[Kind, int, tuple[int, int]], int] = {}

    def learn(self, entries: Sequence[LedgerEntry]) -> None:
        """Add the bytes of a step's ledger entries, which are in the order of the actions."""
        bytes_after = [0, *(entry.host_bytes if self._on_host else entry.bytes for entry in entries)]
        for entry, (before, after) in zip(entries, pairwise(bytes_after), strict=True):
            self._changes.setdefault((entry.action.kind, entry.action.stage, entry.tokens), after - before)

    def peak(
        self,
        actions: Sequence[Action],
        tokens_of: Callable[[Action], tuple[int, int]],
        further: Sequence[int] | None = None,
    ) -> int:
        """Return the most bytes of a rank that runs these actions in order.

        ``tokens_of`` returns the number of sequences and their length of an action's microbatch. All sizes must have
        been learnt. ``further`` has bytes to add after each action.
        """
        changes = (self._changes[action.kind, action.stage, tokens_of(action)] for action in actions)
        return int(_peak(list(accumulate(changes)), further))
