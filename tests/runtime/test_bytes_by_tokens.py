"""Bytes of microbatches that differ follow from those of a few."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pipemem.runtime.activation_ledger import (
    ActivationLedger,
    BytesByTokens,
    LedgerEntry,
    bytes_per_action,
)
from megatron_pipemem.schedule.action import Action, Kind

TERMS = st.tuples(*[st.integers(0, 50)] * 6)
LENGTHS = st.integers(1, 40)


def bytes_of(terms, tokens) -> int:
    b, s = tokens
    return sum(c * t for c, t in zip(terms, (b * s, b * s * s, 1, b, s, s * s), strict=True))


def entries_of(tokens, terms) -> list[LedgerEntry]:
    """All forwards, then all backwards."""
    entries, held = [], 0
    for kind, sign in ((Kind.F, 1), (Kind.B, -1)):
        for microbatch, each in enumerate(tokens):
            held += sign * bytes_of(terms, each)
            entries.append(LedgerEntry(Action(kind, 0, microbatch), held, tokens=each))
    return entries


def check(known: BytesByTokens, tokens, terms) -> None:
    entries = entries_of(tokens, terms)
    foretold = known.peak([entry.action for entry in entries], lambda action: tokens[action.microbatch])
    assert foretold == max(entry.bytes for entry in entries)


@settings(max_examples=25)
@given(TERMS, st.lists(st.tuples(st.integers(1, 3), LENGTHS), min_size=1, max_size=8), st.data())
def test_what_has_been_seen_is_exact(terms, tokens, data):
    """However few microbatches there were, and in whatever order they come again."""
    known = BytesByTokens()
    known.learn(entries_of(tokens, terms))
    check(known, data.draw(st.permutations(tokens)), terms)


@settings(max_examples=25)
@given(
    TERMS,
    st.integers(1, 4),
    st.lists(LENGTHS, min_size=3, max_size=3, unique=True),
    st.lists(LENGTHS, min_size=1, max_size=5),
)
def test_three_lengths_foretell_all_others(terms, b, lengths, others):
    known = BytesByTokens()
    known.learn(entries_of([(b, s) for s in lengths], terms))
    check(known, [(b, s) for s in others], terms)


def test_one_microbatch_tells_bytes_per_token():
    known, per_token = BytesByTokens(), (3, 0, 0, 0, 0, 0)
    known.learn(entries_of([(2, 8)], per_token))
    check(known, [(1, 100), (3, 2)], per_token)


def test_the_largest_microbatch_stands_for_all_where_one_must():
    entries = entries_of([(1, 8), (2, 16), (1, 4)], (1, 0, 0, 0, 0, 0))
    assert bytes_per_action(entries, 1) == {Kind.F: (32,), Kind.B: (-32,)}
    assert bytes_per_action(entries, 1, most=False) == {Kind.F: (4,), Kind.B: (-4,)}


def test_a_ledger_notes_the_tokens_of_every_action():
    ledger = ActivationLedger((), [(1, 8), (2, 4)])
    ledger.record(Action(Kind.F, 0, 1))
    ledger.record(Action(Kind.REDUCE_GRAD, 0, None))
    assert [entry.tokens for entry in ledger.entries] == [(2, 4), (0, 0)]
