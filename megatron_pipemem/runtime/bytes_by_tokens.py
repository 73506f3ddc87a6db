"""Foretell what a rank holds where microbatches differ in their number of sequences and in length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from megatron_pipemem.runtime.activation_ledger import LedgerEntry
from megatron_pipemem.schedule.action import Action, Kind

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
