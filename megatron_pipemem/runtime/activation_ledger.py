"""Count the bytes that one rank holds between its actions, and predict them for other microbatches.

The ledger counts unique storages of these tensors:

- tensors kept for the backward, by autograd or by a shard of the LM head
- received inputs and gradients, and results that are not sent yet
- tensors handed to a neighbouring stage on the same device or to a collective
- tensors that a deferred weight gradient keeps beyond the saved activations

It does not count parameters and their gradients, the batch, temporaries within one action, or messages after they are posted.
How long the transport keeps a message depends on its receiver's timing, which differs between runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, Concatenate, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.schedule.action import Action, Kind, place
from megatron_pipemem.schedule.action_prices import held_after

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LedgerEntry:
    """The bytes held right after an action."""

    action: Action
    bytes: int  # on the device
    host_bytes: int = 0  # activations on the host
    routed: int = 0  # tokens that the action sent to experts, one per visit of an expert
    routable: int = 0  # the largest number that a capacity factor allows; 0 without one
    evenly: int = 0  # the number if all experts got equally many
    tokens: tuple[int, int] = (0, 0)  # ``(b, s)`` of the microbatch, if microbatches differ


class _Size(NamedTuple):
    """Size of a microbatch, to compare the bytes that it holds: tokens of experts first, then its tokens, then its length."""

    routed: int
    tokens: int
    length: int


def bytes_per_action(
    entries: Sequence[LedgerEntry], num_stages: int, most: bool = True, on_host: bool = False, slices: int = 1
) -> dict[Kind, tuple[int, ...]]:
    """Return the change in bytes of every kind of action, per stage and slice, stage by stage, for one microbatch.

    ``entries`` are those of one step, and stages of other ranks get 0. If microbatches differ, the largest one is taken, or
    the smallest with ``most=False``. If experts get more tokens from one microbatch than from another, the one with most is
    taken. Under a capacity factor, the result is extrapolated to the number of tokens that the factor allows. ``on_host``
    counts bytes on the host. With several ``slices``, the actions count the slices of all microbatches.
    """
    held = [entry.host_bytes if on_host else entry.bytes for entry in entries]
    forwards = {
        (entry.action.stage, entry.action.microbatch): entry for entry in entries if entry.action.kind is Kind.F
    }
    seen: dict[tuple[Kind, int], list[tuple[_Size, int]]] = {}
    routable: dict[int, int] = {}
    for entry, before, after in zip(entries, (0, *held), held, strict=False):
        kind, stage, microbatch = entry.action
        at = place(entry.action, slices)
        forward = forwards.get((stage, microbatch))
        (b, s), routed = entry.tokens, 0 if forward is None else forward.routed
        seen.setdefault((kind, at), []).append((_Size(routed, b * s, s), after - before))
        routable[at] = max(routable.get(at, 0), entry.routable)
    changes: dict[Kind, list[int]] = {}
    for (kind, at), of_microbatches in seen.items():
        (least, low), (top, high) = (extreme(of_microbatches, key=lambda each: each[0]) for extreme in (min, max))
        change = high if most else low
        if most and least.routed < top.routed < routable[at]:
            change += round((high - low) * (routable[at] - top.routed) / (top.routed - least.routed))
        changes.setdefault(kind, [0] * (num_stages * slices))[at] = change
    return {kind: tuple(per_slice) for kind, per_slice in changes.items()}


def predict_peak_bytes(actions: Sequence[Action], changes: Mapping[Kind, Sequence[int]], slices: int = 1) -> int:
    """Return the peak bytes of a rank that runs ``actions`` with the ``changes`` of ``bytes_per_action``."""
    return int(max(held_after(actions, changes, slices=slices), default=0))


def _counting[**P, T](
    count: Callable[Concatenate[ActivationLedger, P], T],
) -> Callable[Concatenate[ActivationLedger, P], T | None]:
    """Wrap a ledger's method so that a tensor that cannot be counted ends the count but not the training."""

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
    """Count the bytes of one step on one rank.

    ``permanent`` are tensors that are not activations: parameters, gradient buffers, module buffers. ``tokens`` are the
    ``(b, s)`` of every microbatch, if microbatches differ. ``failure`` is the error that ended the count, or ``None``.
    """

    def __init__(self, permanent: Iterable[torch.Tensor] = (), tokens: Sequence[tuple[int, int]] | None = None):
        self.entries: list[LedgerEntry] = []
        self.tokens = tokens
        self.failure: str | None = None
        self._permanent: set[int] = set()
        # The data iterator keeps the batch alive. The weak references reserve the keys of its storages.
        self._batch: dict[int, StorageWeakRef] = {}
        self._held: dict[int, StorageWeakRef] = {}
        self._routed = self._routable = self._evenly = 0
        self._leave_out(permanent)

    def continued(self, permanent: Iterable[torch.Tensor]) -> ActivationLedger:
        """Return the ledger of the next step, which begins with the tensors that this one still holds."""
        following = ActivationLedger(permanent)
        following._batch = {key: batch for key, batch in self._batch.items() if not batch.expired()}
        following._held = self._held
        following.failure = following.failure or self.failure
        return following

    @_counting
    def _leave_out(self, permanent: Iterable[torch.Tensor]) -> None:
        self._permanent = {storage_key(part) for tensor in permanent for part in data_of(tensor)}

    @_counting
    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stop counting tensors that the caller keeps in any case, for example the batch."""
        for part in (part for tensor in tensors for part in data_of(tensor)):
            self._batch[storage_key(part)] = StorageWeakRef(part.untyped_storage())
            self._held.pop(storage_key(part), None)

    @_counting
    def hold(self, tensor: torch.Tensor) -> bool:
        """Count the tensor's storage as long as it is alive. Return whether it was not counted before."""
        return any([self._hold(part) for part in data_of(tensor)])

    def _hold(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        if key in self._permanent:
            return False
        batch = self._batch.get(key)
        if batch is not None and not batch.expired():
            return False
        known = self._held.get(key)
        if known is not None and not known.expired():
            return False
        self._held[key] = StorageWeakRef(tensor.untyped_storage())
        return True

    @_counting
    def release(self, tensor: torch.Tensor) -> None:
        """Stop counting a tensor that only a communication backend still keeps, for a time that varies."""
        for part in data_of(tensor):
            self._held.pop(storage_key(part), None)

    def route(self, tokens: int, most: int, evenly: int) -> None:
        """Add tokens that the running action sends to experts; see the fields of ``LedgerEntry``."""
        self._routed += tokens
        self._routable += most
        self._evenly += evenly

    @contextmanager
    def watch_saved(self) -> Iterator[None]:
        """Count the tensors that autograd saves within this block. If counting has failed, leave autograd alone."""
        if self.failure is not None:
            yield
            return

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.hold(tensor)
            # Not the tensor itself: an output that its own node saves would keep itself alive.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @_counting
    def record(self, action: Action, host_bytes: int = 0) -> None:
        """Record the bytes held on the device, and ``host_bytes``, after ``action``."""
        # A checkpoint without output empties storages that autograd keeps, and refills them in the backward.
        sizes = {key: _size(known) for key, known in self._held.items()}
        self._held = {key: known for key, known in self._held.items() if sizes[key] is not None}
        held = sum(filter(None, sizes.values()))
        routing = self._routed, self._routable, self._evenly
        self.entries.append(LedgerEntry(action, held, host_bytes, *routing, self.tokens_of(action)))
        self._routed = self._routable = self._evenly = 0

    def tokens_of(self, action: Action) -> tuple[int, int]:
        """Return ``(b, s)`` of the action's microbatch, or zeros if microbatches are equal or the action has none."""
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
    """Make autograd save tensors unchanged within this block. A watching ledger counts only ``counted`` of them.

    A parameter that goes through ``watch_saved`` returns as another object without its Python attributes. Some layers need
    these attributes to find its gradient.
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
    """Return whether this is a quantised tensor of Transformer Engine, which consists of several tensors."""
    return hasattr(tensor, "get_data_tensors")


def data_of(tensor: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold a tensor's bytes: for a quantised tensor of Transformer Engine, its data.

    A quantised tensor has no storage of its own. Each call of ``untyped_storage`` returns a new one, which is empty or as
    large as the values before quantisation. Tensors with an empty storage are left out: its address is soon reused.
    """
    parts = tensor.get_data_tensors() if is_quantised(tensor) else (tensor,)
    listed = (parts,) if isinstance(parts, torch.Tensor) else parts
    return tuple(part for part in listed if part is not None and part.untyped_storage().nbytes())


def _size(storage: StorageWeakRef) -> int | None:
    """Return the current bytes of a storage, or ``None`` if it was freed."""
    found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return None if found is None else found.nbytes()


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a storage among all live ones."""
    return tensor.untyped_storage()._cdata


Tokens = tuple[int, int]
"""``(b, s)``: the sequences of a microbatch, and their length."""

_Row = list[Fraction]


def _terms(b: int, s: int) -> tuple[int, ...]:
    # Hidden states; scores of unfused attention; losses; one more token per sequence; positions; masks.
    return b * s, b * s * s, 1, b, s, s * s


class BytesByTokens:
    """Learn the change in bytes of every kind of action on every stage, as a polynomial of ``b`` and ``s``.

    The terms are ``bs``, ``bs^2``, ``1``, ``b``, ``s`` and ``s^2``. Each microbatch of a new size determines one more
    coefficient: the first one the bytes per token. If all microbatches have the same ``b``, three of them determine all.
    Until then, predictions for other sizes may be wrong, and the report shows the error. With ``on_host``, the bytes are
    those on the host.
    """

    def __init__(self, on_host: bool = False) -> None:
        self._on_host = on_host
        # Reduced rows of a linear system, by the column of their leading 1. The last column holds the bytes.
        self._rows: dict[tuple[Kind, int], dict[int, _Row]] = {}
        self._changes: dict[tuple[Kind, int], dict[Tokens, int]] = {}

    def learn(self, entries: Sequence[LedgerEntry]) -> None:
        """Learn from a step's ledger, whose entries have the tokens of their microbatches."""
        held = [0, *(entry.host_bytes if self._on_host else entry.bytes for entry in entries)]
        for entry, (before, after) in zip(entries, pairwise(held), strict=True):
            changes = self._changes.setdefault(entry.action[:2], {})
            if entry.tokens not in changes and self._teach(entry, after - before):
                changes.clear()

    def peak(self, actions: Sequence[Action], tokens_of: Callable[[Action], Tokens]) -> int:
        """Return the peak bytes of a rank's actions. ``tokens_of`` returns the ``(b, s)`` of an action's microbatch."""
        return max(accumulate(self._change(action, tokens_of(action)) for action in actions), default=0)

    def _teach(self, entry: LedgerEntry, change: int) -> bool:
        """Add an equation unless it follows from the earlier ones. Return whether it was added."""
        rows = self._rows.setdefault(entry.action[:2], {})
        row = [Fraction(each) for each in (*_terms(*entry.tokens), change)]
        for column, known in rows.items():
            row = _minus(row, known, column)
        leading = next((column for column, each in enumerate(row[:-1]) if each), None)
        if leading is None:
            return False
        row = [each / row[leading] for each in row]
        for column, known in rows.items():
            rows[column] = _minus(known, row, leading)
        rows[leading] = row
        return True

    def _change(self, action: Action, tokens: Tokens) -> int:
        changes = self._changes.setdefault(action[:2], {})
        if tokens not in changes:
            terms = _terms(*tokens)
            # Terms without a known coefficient are left out.
            known = (row[-1] * terms[column] for column, row in self._rows[action[:2]].items())
            changes[tokens] = round(sum(known, Fraction(0)))
        return changes[tokens]


def _minus(row: _Row, other: _Row, column: int) -> _Row:
    """Return the row minus the multiple of ``other``, which has 1 in ``column``, that makes the row 0 there."""
    factor = row[column]
    return [each - factor * its for each, its in zip(row, other, strict=True)] if factor else row
