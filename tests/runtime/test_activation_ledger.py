"""The ledger counts what autograd really holds, once, for as long as it holds it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from quantised import Quantised, WithEmptyStorage, eight_bits
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.features.offload.runtime.saved import Residents
from megatron_pipemem.runtime.activation_ledger import (
    ActivationLedger,
    BytesBySize,
    LedgerEntry,
    bytes_per_action,
    predict_peak_bytes,
)
from megatron_pipemem.schedule.action import Action, Kind

F0, B0 = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)


def saved(ledger: ActivationLedger) -> int:
    ledger.record(F0)
    return ledger.entries[-1].bytes


def test_counts_saved_tensors_until_the_graph_is_gone():
    weight = torch.nn.Parameter(torch.randn(16, 8))
    ledger = ActivationLedger([weight])
    x = torch.randn(4, 8)
    with ledger.watch_saved():
        y = torch.tanh(x @ weight.t()).sum()
    # The input of the product and the output of tanh; the weight is no activation, the sum saves nothing.
    assert saved(ledger) == 4 * (4 * 8 + 4 * 16)
    y.backward()
    del y
    assert saved(ledger) == 4 * 4 * 8, "x itself is still ours"
    del x
    assert saved(ledger) == 0
    assert ledger.peak == 4 * (4 * 8 + 4 * 16)


def test_views_of_one_storage_count_once():
    ledger = ActivationLedger()
    qkv = torch.randn(6, 4, requires_grad=True)
    with ledger.watch_saved():
        mixed = qkv * 2
        q, k = mixed.chunk(2)
        (q * k).sum()
        kept = q * k
    assert kept is not None
    assert saved(ledger) == mixed.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", [Quantised, WithEmptyStorage])
def test_quantised_tensors_count_for_their_data(kind):
    """Neither for the size of their values, nor for the address of an empty storage that another tensor has by now."""
    weight, cached, activation = (kind(eight_bits(size)) for size in (100, 50, 10))
    ledger = ActivationLedger([weight])
    others = []
    for _ in range(200):
        assert not ledger.hold(weight)
        others.append(torch.empty(3))
        assert ledger.hold(others[-1]), "it is no weight"
    assert saved(ledger) == 200 * 12
    assert ledger.hold(cached) and not ledger.hold(cached) and ledger.hold(activation)
    assert saved(ledger) == 200 * 12 + 50 + 10
    ledger.exclude([cached])
    assert not ledger.hold(cached)
    assert saved(ledger) == 200 * 12 + 10
    ledger.release(activation)
    assert saved(ledger) == 200 * 12


@pytest.mark.parametrize("kind", [Quantised, WithEmptyStorage])
def test_offload_tells_which_quantised_tensors_stay(kind):
    weight, cached, activation = (kind(eight_bits(size)) for size in (100, 50, 10))
    residents = Residents(torch.device("cpu"), min_bytes=1)
    residents.begin_step([weight])
    residents.exclude([cached])
    assert all(map(residents.stays_on_device, (weight, cached, activation)))
    assert residents.stayed == {"permanent": 100, "excluded": 50, "unsupported": 10}


@pytest.mark.parametrize("excluded", [True, False])
def test_the_batch_is_not_an_activation(excluded):
    ledger = ActivationLedger()
    mask = torch.ones(4, 4)
    if excluded:
        ledger.exclude([mask])
    with ledger.watch_saved():
        y = torch.randn(4, 4, requires_grad=True) * mask  # the product's backward needs the mask only
    assert y is not None
    assert saved(ledger) == (0 if excluded else 4 * 16)


def test_an_output_saved_by_its_own_node_does_not_live_for_ever():
    ledger = ActivationLedger()
    with ledger.watch_saved():
        y = torch.tanh(torch.randn(4, requires_grad=True))
    node = weakref.ref(y)
    del y
    gc.collect()
    assert node() is None and saved(ledger) == 0


def test_a_storage_counts_once_whoever_holds_views_of_it():
    ledger = ActivationLedger()
    received, gradient = torch.randn(8), torch.randn(2)
    ledger.hold(received)
    ledger.hold(received.view(2, 4))
    ledger.hold(gradient)
    ledger.record(F0)
    assert ledger.entries[-1].bytes == 32 + 8
    ledger.release(received)
    assert saved(ledger) == 8


def test_a_table_that_all_microbatches_share_is_no_activation():
    """As one that a module keeps after the first microbatch, while a tensor of the step before counts to its end."""
    earlier, table, own = torch.randn(3), torch.randn(4), [torch.randn(8), torch.randn(8)]
    before = ActivationLedger()
    before.hold(earlier)
    ledger = before.continued(())
    program = [Action.parse(text) for text in ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2")]
    for action in program:
        if action.kind is Kind.F:
            ledger.hold(table)
            own.append(torch.randn(8))
            ledger.hold(own[-1])
        else:
            own.pop()
        ledger.record(action)
    own.clear()
    assert [entry.bytes for entry in ledger.entries] == [60, 92, 60, 92, 60, 28]
    ledger.end_step(3)
    assert [entry.bytes for entry in ledger.entries] == [32, 64, 32, 64, 32, 0]
    many = [action for _ in range(9) for action in program]
    assert predict_peak_bytes(many, bytes_per_action(ledger.entries, 1)) == ledger.peak == 64


def test_microbatches_in_flight_count_and_tables_that_outlive_them_do_not():
    """Two steps of two microbatches. The first step leaves two in flight, and they have made the second table."""
    ledger, own, tables = ActivationLedger(), {}, [torch.randn(4), torch.randn(2)]
    steps = [
        (("0F0", "0F1", "0B0", "0F2", "0B1", "0F3"), [32, 64, 32, 72, 40, 72]),
        (("0B0", "0B1", "0F2"), [32, 0, 32]),
    ]
    for actions, expected in steps:
        ledger = ledger.continued(())
        for action in map(Action.parse, actions):
            if action.kind is Kind.F:
                own[action.microbatch] = torch.randn(8)
                for tensor in (own[action.microbatch], *tables[: 1 + (action.microbatch > 1)]):
                    ledger.hold(tensor)
            else:
                del own[action.microbatch]
            ledger.record(action)
        ledger.end_step(2)
        own = {microbatch - 2: tensor for microbatch, tensor in own.items()}
        assert [entry.bytes for entry in ledger.entries] == expected


def test_a_reused_address_is_a_new_storage():
    ledger = ActivationLedger()
    for _ in range(20):
        ledger.hold(torch.randn(32))  # freed at once; the allocator gives the same block again
    tensor = torch.randn(32)
    ledger.hold(tensor)
    assert saved(ledger) == 128


def entries(*held: tuple[str, int]) -> list[LedgerEntry]:
    return [LedgerEntry(Action.parse(action), count) for action, count in held]


def test_the_first_microbatch_of_every_stage_foretells_the_rest():
    probe = entries(("0F0", 10), ("1F0", 17), ("0F1", 27), ("1B0", 20), ("0B0", 10), ("0B1", 0))
    changes = bytes_per_action(probe, num_stages=2)
    assert changes == {Kind.F: (10, 7), Kind.B: (-10, -7)}
    program = [Action.parse(text) for text in ("0F0", "1F0", "0F1", "1F1", "0F2", "1B0", "0B0")]
    assert predict_peak_bytes(program, changes) == 44
    assert predict_peak_bytes([], changes) == 0


@pytest.mark.parametrize(("routable", "top"), [(0, 26), (10, 26), (20, 46)])
def test_uneven_routing_is_foretold_as_a_range(routable, top):
    """Of microbatches whose experts get 5, 4 and 10 tokens; a microbatch holds 6 bytes and 2 for each token."""
    held = (("0F0", 16, 5), ("0B0", 0, 0), ("0F1", 14, 4), ("0F2", 40, 10), ("0B1", 26, 0), ("0B2", 0, 0))
    probe = [LedgerEntry(Action.parse(name), nbytes, nbytes, tokens, routable) for name, nbytes, tokens in held]
    for on_host in (False, True):
        assert bytes_per_action(probe, 1, of_largest=False, on_host=on_host) == {Kind.F: (14,), Kind.B: (-14,)}
        assert bytes_per_action(probe, 1, on_host=on_host) == {Kind.F: (top,), Kind.B: (-top,)}


def test_tokens_are_noted_with_the_action_that_routes_them():
    ledger = ActivationLedger()
    ledger.route(7, 9, 6)
    ledger.route(5, 9, 6)
    ledger.record(F0)
    ledger.record(B0)
    assert [(entry.routed, entry.routable, entry.evenly) for entry in ledger.entries] == [(12, 18, 12), (0, 0, 0)]


def test_a_tensor_that_cannot_be_counted_ends_the_count_and_nothing_else(caplog):
    ledger = ActivationLedger()
    ledger.record(Action(Kind.F, 0, 0))
    with ledger.watch_saved():
        ledger.hold(torch.eye(2).to_sparse())
        weight = torch.ones(2, requires_grad=True)
        (weight * weight).sum().backward()
    ledger.release(torch.ones(1))
    ledger.record(Action(Kind.B, 0, 0))
    assert weight.grad.tolist() == [2.0, 2.0] and len(ledger.entries) == 1
    assert "NotImplementedError" in ledger.failure and ledger.continued([]).failure == ledger.failure
    assert len(caplog.records) == 1 and "activations are no longer counted" in caplog.text
    assert ActivationLedger([torch.eye(2).to_sparse()]).failure is not None


def test_a_storage_counts_for_what_it_has_now():
    """A checkpoint without output empties its storages after F, and fills them in the backward."""
    ledger, kept = ActivationLedger(), torch.ones(8)
    ledger.hold(kept)
    ledger.record(Action(Kind.F, 0, 0))
    kept.untyped_storage().resize_(0)
    ledger.record(Action(Kind.F, 1, 0))
    kept.untyped_storage().resize_(32)
    ledger.record(Action(Kind.B, 0, 0))
    del kept
    ledger.record(Action(Kind.B, 0, 1))
    assert [entry.bytes for entry in ledger.entries] == [32, 0, 32, 0]


TERMS = st.tuples(*[st.integers(0, 50)] * 6)
LENGTHS = st.integers(1, 40)


def bytes_of(terms, tokens) -> int:
    b, s = tokens
    return sum(c * t for c, t in zip(terms, (b * s, b * s * s, 1, b, s, s * s), strict=True))


def entries_of(tokens, terms) -> list[LedgerEntry]:
    """All forwards, then all backwards."""
    entries, held = [], 0
    for kind, sign in ((Kind.F, 1), (Kind.B, -1)):
        for microbatch, token in enumerate(tokens):
            held += sign * bytes_of(terms, token)
            entries.append(LedgerEntry(Action(kind, 0, microbatch), held, tokens=token))
    return entries


def check(known: BytesBySize, tokens, terms) -> None:
    entries = entries_of(tokens, terms)
    foretold = known.peak([entry.action for entry in entries], lambda action: tokens[action.microbatch])
    assert foretold == max(entry.bytes for entry in entries)


@examples(25)
@given(TERMS, st.lists(st.tuples(st.integers(1, 3), LENGTHS), min_size=1, max_size=8), st.data())
def test_what_has_been_seen_is_exact(terms, tokens, data):
    """However few microbatches there were, and in whatever order they come again."""
    known = BytesBySize()
    known.learn(entries_of(tokens, terms))
    check(known, data.draw(st.permutations(tokens)), terms)


def test_the_largest_microbatch_stands_for_all_where_one_must():
    entries = entries_of([(1, 8), (2, 16), (1, 4)], (1, 0, 0, 0, 0, 0))
    assert bytes_per_action(entries, 1) == {Kind.F: (32,), Kind.B: (-32,)}
    assert bytes_per_action(entries, 1, of_largest=False) == {Kind.F: (4,), Kind.B: (-4,)}


def test_a_ledger_notes_the_tokens_of_every_action():
    ledger = ActivationLedger((), [(1, 8), (2, 4)])
    ledger.record(Action(Kind.F, 0, 1))
    ledger.record(Action(Kind.REDUCE_GRAD, 0, None))
    assert [entry.tokens for entry in ledger.entries] == [(2, 4), (0, 0)]


def test_what_the_backward_of_a_pair_frees_counts_until_its_own_record():
    ledger, earlier = ActivationLedger(), torch.ones(10)
    ledger.hold(earlier)
    ledger.record(Action(Kind.F, 0, 0))
    ledger.free_later()
    later = torch.ones(3)
    ledger.hold(later)
    del earlier
    ledger.record(Action(Kind.F, 0, 1))
    ledger.record(Action(Kind.I, 0, 0))
    assert [entry.bytes for entry in ledger.entries] == [40, 52, 12]


class EverythingScanned:
    """What a ledger counts, by going through all storages after every action."""

    def __init__(self):
        self.storages: dict[int, StorageWeakRef] = {}
        self.unfreed: dict[int, int] | None = None

    def sizes(self) -> dict[int, int]:
        alive = {key: torch.UntypedStorage._new_with_weak_ptr(w.cdata) for key, w in self.storages.items()}
        return {key: storage.nbytes() for key, storage in alive.items() if storage is not None}

    def count(self) -> int:
        sizes = self.sizes()
        return sum(sizes.values()) + sum(size - sizes.get(key, 0) for key, size in (self.unfreed or {}).items())


@examples(200)
@given(st.randoms(use_true_random=False))
def test_counts_what_a_scan_of_all_storages_counts(draw):
    """Tensors of random microbatches are made, shared, released, excluded, emptied, filled and freed in any order."""
    ledger, oracle = ActivationLedger(), EverythingScanned()
    tensors: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    aliases: list[torch.Tensor] = []
    for _ in range(draw.randint(1, 12)):
        microbatch = draw.randrange(3)
        if draw.randrange(4) == 0:  # this action is the first of a pair
            ledger.free_later()
            oracle.unfreed = oracle.sizes()
        for _ in range(draw.randint(0, 6)):
            others, own = tensors[draw.randrange(3)], tensors[microbatch]
            what = draw.choice(["new", "new", "alias", "free", "release", "exclude", "resize"])
            if what == "new" or not others:
                own.append(torch.ones(draw.randint(1, 9)))
                ledger.hold(own[-1])
                storage = own[-1].untyped_storage()
                oracle.storages[storage._cdata] = StorageWeakRef(storage)
            elif what == "alias":
                aliases.append(others[-1].view(-1))
            elif what == "free":
                freed = draw.choice([others, aliases])
                del freed[draw.randrange(len(freed) + 1) :]
            elif what == "resize" and own and oracle.unfreed is None:
                own[-1].untyped_storage().resize_(4 * draw.randrange(10))
            elif what in ("release", "exclude") and oracle.unfreed is None:
                tensor = draw.choice(others)
                if not tensor.untyped_storage().nbytes():  # such tensors are left out
                    continue
                ledger.release(tensor) if what == "release" else ledger.exclude([tensor])
                oracle.storages.pop(tensor.untyped_storage()._cdata, None)
        ledger.record(Action(Kind.F, 0, microbatch))
        assert ledger.entries[-1].bytes == oracle.count()
        oracle.unfreed = None
    assert ledger.failure is None
