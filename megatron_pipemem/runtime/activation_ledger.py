"""Count the bytes that one rank holds between its actions, and predict them for microbatches that differ.

Counted are unique storages: what is kept for the backward, by autograd or by a shard of the LM head; received inputs and
gradients, results that have not been sent yet, and tensors handed to a neighbouring stage on the same device or to a
collective; and what a deferred weight gradient keeps beyond the saved activations.

Not counted are parameters and their gradients, the batch itself, temporaries within one action, and outgoing messages from
the moment they are posted: how long the transport keeps one depends on when its receiver gets there, which no two runs
share.
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
    """Say what is held right after an action.

    Args:
        action: that has run.
        bytes: on the device.
        host_bytes: activations that are away on the host.
        routed: tokens that experts got in it, one for each visit of an expert.
        routable: the most that they could have got under a capacity factor; 0 without one.
        evenly: what they would have got if all experts got as many.
        tokens: ``(b, s)`` of its microbatch, where microbatches differ.
    """

    action: Action
    bytes: int
    host_bytes: int = 0
    routed: int = 0
    routable: int = 0
    evenly: int = 0
    tokens: tuple[int, int] = (0, 0)


class _Size(NamedTuple):
    """What makes one microbatch hold more than another: most of all what experts get, then its tokens, then its length."""

    routed: int
    tokens: int
    length: int


def bytes_per_action(
    entries: Sequence[LedgerEntry], num_stages: int, most: bool = True, on_host: bool = False, slices: int = 1
) -> dict[Kind, tuple[int, ...]]:
    """Return by how many bytes every kind of action changes what this rank holds, per stage and slice, stage by stage, as
    its first microbatch shows.

    Stages of other ranks get 0. One microbatch of every stage is the whole probe: the rest of the step is foretold from it.
    Where microbatches differ, it is the largest one. Where experts get more tokens of one microbatch than of another, it is the
    one that gives them most, and under a capacity factor what would be if they got all that this allows.

    Args:
        entries: of one step.
        num_stages: of the pipeline.
        most: ``False`` asks for the microbatch that gives experts the fewest tokens, or is the smallest.
        on_host: ask for what this rank has away on its host instead.
        slices: sequence slices of a microbatch; the actions of the entries then count those of all microbatches.
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
    """Return the most bytes a rank holds after any of its actions, messages included; of ``changes`` of the host,
    there.

    Args:
        actions: of the rank, in its order.
        changes: bytes per kind, stage and slice, as ``bytes_per_action`` returns them.
        slices: sequence slices of a microbatch.
    """
    return int(max(held_after(actions, changes, slices=slices), default=0))


def _counting[**P, T](
    count: Callable[Concatenate[ActivationLedger, P], T],
) -> Callable[Concatenate[ActivationLedger, P], T | None]:
    """Wrap methods of a ledger that training calls: a tensor that cannot be counted ends the count, not the training."""

    @wraps(count)
    def counted(self: ActivationLedger, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self.failure is not None:
            return None
        try:
            return count(self, *args, **kwargs)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.warning("cannot count activations any more: %s", self.failure)
            return None

    return counted


class ActivationLedger:
    """Watches one step of one rank.

    Args:
        permanent: tensors that are no activations: parameters, gradient buffers, module buffers.
        tokens: ``(b, s)`` of every microbatch, where they differ.

    Attributes:
        failure: what made it stop counting, ``None`` as long as nothing has.
    """

    def __init__(self, permanent: Iterable[torch.Tensor] = (), tokens: Sequence[tuple[int, int]] | None = None):
        self.entries: list[LedgerEntry] = []
        self.tokens = tokens
        self.failure: str | None = None
        self._permanent: set[int] = set()
        # The batch lives as long as the data iterator keeps it; held here so that its keys stay taken.
        self._batch: dict[int, StorageWeakRef] = {}
        self._held: dict[int, StorageWeakRef] = {}
        self._routed = self._routable = self._evenly = 0
        self._leave_out(permanent)

    def continued(self, permanent: Iterable[torch.Tensor]) -> ActivationLedger:
        """Return the ledger for the step after this one, which begins with what this one still holds.

        Args:
            permanent: what is no activation now.
        """
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
        """Do not count these tensors, from now on: others keep them anyway, for example the batch."""
        for part in (part for tensor in tensors for part in data_of(tensor)):
            self._batch[storage_key(part)] = StorageWeakRef(part.untyped_storage())
            self._held.pop(storage_key(part), None)

    @_counting
    def hold(self, tensor: torch.Tensor) -> bool:
        """Count the tensor's storage for as long as anything keeps it alive.

        Returns:
            Whether it was not counted before, so that who holds it may ``release`` it too.
        """
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
        """Stop counting a tensor whose remaining life is a communication backend's business and depends on timing."""
        for part in data_of(tensor):
            self._held.pop(storage_key(part), None)

    def route(self, tokens: int, most: int, evenly: int) -> None:
        """Note tokens that the experts of a layer get in the action that is running.

        Args:
            tokens: one for each visit of an expert.
            most: that it could have been under a capacity factor; 0 without one.
            evenly: if all experts got as many.
        """
        self._routed += tokens
        self._routable += most
        self._evenly += evenly

    @contextmanager
    def watch_saved(self) -> Iterator[None]:
        """Count everything that autograd saves within this context; once counting has failed, leave autograd alone."""
        if self.failure is not None:
            yield
            return

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.hold(tensor)
            # Never the tensor itself: an output saved by its own node would keep itself alive for ever.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @_counting
    def record(self, action: Action, host_bytes: int = 0) -> None:
        """Note what is held now that ``action`` has ended, and what is away."""
        # A checkpoint without output empties storages that autograd keeps, and fills them again in the backward.
        sizes = {key: _size(known) for key, known in self._held.items()}
        self._held = {key: known for key, known in self._held.items() if sizes[key] is not None}
        held = sum(filter(None, sizes.values()))
        routing = self._routed, self._routable, self._evenly
        self.entries.append(LedgerEntry(action, held, host_bytes, *routing, self.tokens_of(action)))
        self._routed = self._routable = self._evenly = 0

    def tokens_of(self, action: Action) -> tuple[int, int]:
        """Return ``(b, s)`` of the action's microbatch; zeros where microbatches are alike, and for what is of none of them."""
        return (0, 0) if self.tokens is None or action.microbatch is None else self.tokens[action.microbatch]

    @property
    def peak(self) -> int:
        """The most bytes held after any action of the step."""
        return max((entry.bytes for entry in self.entries), default=0)

    @property
    def host_peak(self) -> int:
        """The most bytes away after any action of the step."""
        return max((entry.host_bytes for entry in self.entries), default=0)


@contextmanager
def saved_as_is(*counted: torch.Tensor) -> Iterator[None]:
    """Let autograd keep the very objects that it is given, within this block; of them, a ledger that is watching counts
    only ``counted``.

    A parameter that has gone through ``watch_saved`` comes back as another object without its Python attributes, and some
    layers tell their surroundings through those where the gradient is.
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
    """Return whether this is a quantised tensor of Transformer Engine, which consists of several."""
    return hasattr(tensor, "get_data_tensors")


def data_of(tensor: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold a tensor's bytes: for a quantised tensor of Transformer Engine, its data.

    Such a tensor has no storage of its own. It returns a new empty storage at every call, or one of the size that the values
    would have without quantisation. An empty storage holds no bytes, and its address is soon that of another one.
    """
    parts = tensor.get_data_tensors() if is_quantised(tensor) else (tensor,)
    listed = (parts,) if isinstance(parts, torch.Tensor) else parts
    return tuple(part for part in listed if part is not None and part.untyped_storage().nbytes())


def _size(storage: StorageWeakRef) -> int | None:
    """Return the bytes that a storage has now; ``None`` if it is gone."""
    found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return None if found is None else found.nbytes()


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells a storage from all others that are alive."""
    return tensor.untyped_storage()._cdata


Tokens = tuple[int, int]
"""``(b, s)``: sequences of a microbatch, and their length."""

_Row = list[Fraction]


def _terms(b: int, s: int) -> tuple[int, ...]:
    # Hidden states; scores of attention that is not fused; losses; one more token per sequence; positions; masks.
    return b * s, b * s * s, 1, b, s, s * s


class BytesByTokens:
    """Learns by how many bytes actions change what is held, as polynomials of ``b`` and ``s``.

    Every kind of action on every stage has one, of the terms ``bs``, ``bs^2``, ``1``, ``b``, ``s`` and ``s^2``. A microbatch
    teaches what those before it have left open, and nothing else: the first one bytes per token, and where all have one
    ``b``, the third one the last that is to be learnt. What is foretold of the others may be wrong, and the report would
    show it.

    Args:
        on_host: of what is away on the host, and not of what the device holds.
    """

    def __init__(self, on_host: bool = False) -> None:
        self._on_host = on_host
        # The reduced rows of a system of linear equations, by the column of their leading 1; the last column is bytes.
        self._rows: dict[tuple[Kind, int], dict[int, _Row]] = {}
        self._changes: dict[tuple[Kind, int], dict[Tokens, int]] = {}

    def learn(self, entries: Sequence[LedgerEntry]) -> None:
        """Take note of a step, from the entries of its ledger, which knows the tokens of microbatches."""
        held = [0, *(entry.host_bytes if self._on_host else entry.bytes for entry in entries)]
        for entry, (before, after) in zip(entries, pairwise(held), strict=True):
            changes = self._changes.setdefault(entry.action[:2], {})
            if entry.tokens not in changes and self._teach(entry, after - before):
                changes.clear()

    def peak(self, actions: Sequence[Action], tokens_of: Callable[[Action], Tokens]) -> int:
        """Return the most bytes that a rank holds after any of its actions.

        Args:
            actions: in their order, of kinds and stages that have been learnt.
            tokens_of: returns those of an action's microbatch.
        """
        return max(accumulate(self._change(action, tokens_of(action)) for action in actions), default=0)

    def _teach(self, entry: LedgerEntry, change: int) -> bool:
        """Add an equation, unless it follows from those that there are. Returns whether it was added."""
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
            # Terms that nothing has been learnt about count nothing.
            known = (row[-1] * terms[column] for column, row in self._rows[action[:2]].items())
            changes[tokens] = round(sum(known, Fraction(0)))
        return changes[tokens]


def _minus(row: _Row, other: _Row, column: int) -> _Row:
    """Return the row less as much of another one as leaves nothing in a column, where that one has 1."""
    factor = row[column]
    return [each - factor * its for each, its in zip(row, other, strict=True)] if factor else row
