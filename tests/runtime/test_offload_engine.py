"""Gradients do not notice that activations were away, every byte is counted, and no memory is held or freed wrongly."""

from __future__ import annotations

import gc

import pytest
import torch
from offload_blocks import (
    MIN_BYTES,
    batch,
    closing,
    offloaded_gradients,
    plain_gradients,
    saved_bytes,
    stack,
)
from refusals import refused
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_pipemem.errors import OffloadError
from megatron_pipemem.features.offload.runtime import OffloadEngine
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.schedule.action import Action, Kind

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ANY = Action(Kind.F, 0, 0)
LENGTHS = (12, 5, 12, 9)


def make(device: str = "cpu", host_memory: int = 1 << 22, **options) -> OffloadEngine:
    return OffloadEngine.on(torch.device(device), host_memory, **{"min_bytes": MIN_BYTES, **options})


@pytest.fixture
def engine():
    with closing(make()) as engine, engine.step():
        yield engine


def away_and_back(engine, key):
    engine.offload(key)
    engine.wait(key)
    engine.reload(key)
    engine.wait(key)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_and_bytes(device, dtype, guard):
    model = stack(dtype, device)
    batches = [batch(i, length, dtype, device) for i, length in enumerate(LENGTHS)]
    expected, sizes = plain_gradients(model, batches), [saved_bytes(model, x) for x in batches]
    with closing(make(device, permanent=model.parameters(), guard=guard)) as engine:
        for _ in range(2):  # the second step runs on used host memory
            with engine.step():
                assert all(map(torch.equal, offloaded_gradients(model, engine, batches), expected))
                seen = engine.statistics()
                assert (engine.device_bytes, engine.host_bytes) == (0, 0)
            assert seen.bytes_out == seen.bytes_in == seen.host_peak_bytes == sum(sizes)
            assert seen.device_peak_bytes == expected_peak(sizes, [x.nbytes for x in batches])
            assert seen.held_elsewhere_bytes == 0


def expected_peak(sizes: list[int], kept: list[int]) -> int:
    """Of ``offloaded_gradients``: forwards meet the microbatch that is leaving, backwards the next one returning."""
    forwards = [sum(sizes[max(0, i - 1) : i + 1]) + sum(kept[: i + 1]) for i in range(len(sizes))]
    backwards = [sum(sizes[i : i + 2]) + sum(kept[i:]) for i in range(len(sizes))]
    return max(forwards + backwards)


def test_the_ledger_counts_what_is_really_on_the_device():
    model = stack()
    batches = [batch(i, length, torch.float32) for i, length in enumerate(LENGTHS)]
    moving = [saved_bytes(model, x) for x in batches]
    small = [saved_bytes(model, x, 1) - size for x, size in zip(batches, moving, strict=True)]
    ledger = ActivationLedger(model.parameters())
    ledger.exclude(batches)
    with closing(make()) as engine, engine.step(on_device=lambda tensor: ledger.hold(tensor)):
        offloaded_gradients(model, engine, batches, lambda: ledger.record(ANY))
    counted = [entry.bytes for entry in ledger.entries]
    last = len(batches) - 1
    expected = [moving[0] + small[0]]
    for i in range(1, last + 1):  # a forward, then the one before is gone
        expected += [moving[i - 1] + moving[i] + sum(small[: i + 1]), moving[i] + sum(small[: i + 1])]
    expected.append(sum(small))
    for i in range(last + 1):  # the next one has been asked for, then the backward
        returning = sum(moving[i + 1 : i + 2])
        expected += [moving[i] + returning + sum(small[i:]), returning + sum(small[i + 1 :])]
    assert min(small) > 0 and counted == expected


def test_views_of_one_storage_move_once_and_come_back_as_views(engine):
    whole = torch.arange(2048, dtype=torch.float32)
    q, k = whole[1100:1400].view(10, 30), whole[1200:1500].view(torch.int32)
    with engine.capture("a"):
        saved = [Saved(q), Saved(q.t()[3:5]), Saved(k), Saved(whole[1150])]
    copies = [tensor.clone() for tensor in (q, q.t()[3:5], k, whole[1150])]
    del q, k, whole
    away_and_back(engine, "a")
    back = [item.get() for item in saved]
    assert all(map(torch.equal, back, copies)) and back[2].dtype == torch.int32
    assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 1
    back[0][-1, -1] = -5.0  # element 1399
    assert back[2].view(torch.float32)[199] == -5.0
    # From the 512-byte boundary below element 1100 to that above element 1500.
    moved = -(-1500 * 4 // 512) * 512 - 1100 * 4 // 512 * 512
    assert engine.statistics().bytes_out == engine.statistics().bytes_in == moved


def test_a_slice_of_every_row_comes_back_with_the_end_of_the_last(engine):
    """Its memory is as large as before, so a prediction need not know which microbatches were away."""
    rows = torch.arange(1200, dtype=torch.float32).view(50, 24)
    with engine.capture("a"):
        saved = Saved(rows[:, :16])
    copy, before = rows[:, :16].clone(), rows.nbytes
    del rows
    away_and_back(engine, "a")
    assert torch.equal(saved.get(), copy)
    assert engine.device_bytes == before


def test_an_empty_view_keeps_no_memory(engine):
    """An expert without tokens saves one, of the storage with the tokens of all experts."""
    tokens = torch.randn(100, 4)
    with engine.capture("a"):
        saved = [Saved(part) for part in tokens.split([40, 0, 60])]
    reference = StorageWeakRef(tokens.untyped_storage())
    del tokens
    engine.offload("a")
    engine.wait("a")
    assert reference.expired() and engine.statistics().held_elsewhere_bytes == 0
    engine.reload("a")
    engine.wait("a")
    assert [item.get().shape for item in saved] == [(40, 4), (0, 4), (60, 4)]


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trigger, tensor):
        ctx.save_for_backward(tensor)
        return trigger * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Saved:
    """A tensor in the hands of autograd and nobody else."""

    def __init__(self, tensor: torch.Tensor):
        self.node = Keep.apply(torch.ones(1, requires_grad=True), tensor).grad_fn

    def get(self) -> torch.Tensor:
        return self.node.saved_tensors[0]


def test_a_storage_that_two_keys_share_leaves_with_the_last_and_returns_with_the_first(engine):
    shared = torch.randn(100)
    saved = {}
    for key in "ab":
        with engine.capture(key):
            saved[key] = Saved(shared)
    reference, values = StorageWeakRef(shared.untyped_storage()), shared.clone()
    del shared
    engine.offload("a")
    engine.wait("a")
    assert engine.statistics().bytes_out == 0 and torch.equal(saved["b"].get(), values)
    engine.offload("b")
    engine.wait("b")
    assert engine.statistics().bytes_out == 400 and reference.expired()
    engine.reload("a")
    engine.wait("a")
    assert torch.equal(saved.pop("a").get(), values)
    engine.reload("b")
    engine.wait("b")
    assert torch.equal(saved["b"].get(), values)
    assert engine.statistics().bytes_in == 400


def test_a_capture_whose_backward_is_over_holds_nothing(engine):
    shared = torch.randn(100)
    saved = {}
    for key in "ab":
        with engine.capture(key):
            saved[key] = Saved(shared)
    del saved["b"], shared
    engine.offload("a")
    engine.wait("a")
    assert engine.device_bytes == 0 and engine.host_bytes == 400


def test_memory_goes_with_the_wait_and_during_the_backward_as_without_offload(engine):
    first, second = torch.randn(50), torch.randn(60)
    references = [StorageWeakRef(t.untyped_storage()) for t in (first, second)]
    with engine.capture(0):
        saved = [Saved(first), Saved(second)]
    del first, second
    engine.offload(0)
    assert not any(r.expired() for r in references), "freed while being copied"
    engine.wait(0)
    assert all(r.expired() for r in references)
    engine.reload(0)
    engine.wait(0)
    assert engine.device_bytes == 440 and engine.host_bytes == 0
    del saved[0]
    assert engine.device_bytes == 240


def test_a_reload_before_the_offload_was_waited_for_moves_nothing_back(engine):
    values = torch.randn(100)
    with engine.capture(0):
        saved = Saved(values)
    engine.offload(0)
    engine.reload(0)
    engine.wait(0)
    assert torch.equal(saved.get(), values)
    assert (engine.statistics().bytes_in, engine.host_bytes) == (0, 0)
    away_and_back(engine, 0)
    assert torch.equal(saved.get(), values) and engine.statistics().bytes_in == 400


def test_use_while_away_is_an_error(engine):
    with engine.capture((3, 5)):
        saved = Saved(torch.randn(100))
    for act, where in (
        (engine.offload, "being offloaded"),
        (engine.wait, "offloaded"),
        (engine.reload, "being reloaded"),
    ):
        act((3, 5))
        with refused("used-while-away", "(3, 5)", where, kind=OffloadError):
            saved.get()
    engine.wait((3, 5))
    saved.get()


def test_calls_out_of_order_are_errors(engine):
    with engine.capture(0):
        saved = Saved(torch.randn(100))
    with refused("offload-order", 0, kind=OffloadError), engine.capture(0):
        pass
    with refused("offload-order", 0, kind=OffloadError):
        engine.reload(0)
    for act in (engine.offload, engine.reload, engine.wait):
        with refused("offload-order", 1, kind=OffloadError):
            act(1)
    engine.offload(0)
    with refused("offload-order", 0, kind=OffloadError):
        engine.offload(0)
    assert saved is not None


def test_what_stays(engine):
    weight = torch.nn.Parameter(torch.randn(30, 30))
    buffer, small, kept, moved = torch.randn(900), torch.randn(15), torch.randn(90), torch.randn(80)
    conjugate, sparse = torch.randn(40, dtype=torch.complex64).conj(), torch.eye(40).to_sparse()
    with closing(make(permanent=[buffer])) as own, own.step():
        with own.capture(0):
            tensors = (weight, weight.t(), buffer[3:], small, kept, moved, conjugate, sparse, buffer[:0])
            saved = [Saved(t) for t in tensors]
        own.stay(0, [kept])
        own.offload(0)
        own.wait(0)
        seen = own.statistics()
        assert seen.bytes_out == moved.nbytes == seen.held_elsewhere_bytes
        assert seen.stayed_bytes["permanent"] == 2 * weight.nbytes + buffer[3:].nbytes
        assert seen.stayed_bytes["small"] == small.nbytes
        assert set(seen.stayed_bytes) == {"permanent", "small", "unsupported"}
        own.reload(0)
        own.wait(0)
        for item, tensor in zip(saved, tensors, strict=True):
            assert torch.equal(item.get().to_dense(), tensor.to_dense())
        assert saved[4].get().data_ptr() == kept.data_ptr()


def test_what_a_step_says_stays(engine):
    """Named before it is known when the rest leaves; a batch is forgotten with the tensor that held it."""
    output, token_ids, moved = torch.randn(90), torch.arange(70), torch.randn(80)
    engine.exclude([token_ids])
    with engine.capture(0):
        saved = [Saved(tensor) for tensor in (output, token_ids, moved)]
    engine.stay(0, [output.view(9, 10), torch.randn(5)])
    assert engine.statistics().stayed_bytes["excluded"] == token_ids.nbytes
    away_and_back(engine, 0)
    assert engine.statistics().bytes_out == moved.nbytes
    assert saved[0].get().data_ptr() == output.data_ptr() and torch.equal(saved[2].get(), moved)
    with refused("offload-order", 1, kind=OffloadError):
        engine.stay(1, [output])


def test_a_storage_that_its_owner_has_emptied_is_left_to_it(engine):
    """As recomputation does that refills its outputs before their backward."""
    values = torch.randn(100)
    expected = values.clone()
    with engine.capture(0):
        saved = Saved(values)
    values.untyped_storage().resize_(0)
    away_and_back(engine, 0)
    assert engine.statistics().bytes_out == 0
    values.untyped_storage().resize_(expected.nbytes)
    values.copy_(expected)
    assert torch.equal(saved.get(), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers(reentrant):
    model = stack()
    batches = [batch(i, 12, torch.float32).requires_grad_() for i in range(3)]
    expected = plain_gradients(model, batches)

    def recomputing(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    with closing(make(permanent=model.parameters(), guard=True)) as engine, engine.step():
        recomputing.zero_grad, recomputing.parameters = model.zero_grad, model.parameters
        assert all(map(torch.equal, offloaded_gradients(recomputing, engine, batches), expected))
        # Of every microbatch the inputs of the second block and of the loss; that of the first block is kept.
        assert engine.statistics().bytes_out == 3 * 2 * batches[0].nbytes


@pytest.mark.parametrize("where", ["capture", "leaving", "away", "returning", "backward"])
def test_an_exception_leaves_nothing_behind(where):
    model = stack()
    x = batch(0, 12, torch.float32)
    with closing(make(permanent=model.parameters())) as engine:
        with pytest.raises(RuntimeError), engine.step():
            with engine.capture(0):
                output = model(x)
                if where == "capture":
                    raise RuntimeError("boom")
            engine.offload(0)
            if where == "leaving":
                raise RuntimeError("boom")
            engine.wait(0)
            if where == "away":
                raise RuntimeError("boom")
            engine.reload(0)
            if where == "returning":
                raise RuntimeError("boom")
            engine.wait(0)
            output.register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError("boom")))
            output.sum().backward()
        assert engine.host_bytes == 0
        if where not in ("capture", "backward"):
            with refused("used-while-away", kind=OffloadError):
                output.sum().backward()
        del output
        gc.collect()
        assert engine.device_bytes == 0
        expected = plain_gradients(model, [x])
        with engine.step():
            assert all(map(torch.equal, offloaded_gradients(model, engine, [x]), expected))


def test_an_exhausted_pool_says_so_and_changes_nothing():
    with closing(make(host_memory=4096)) as engine, engine.step():
        with engine.capture("first"):
            saved = [Saved(torch.randn(400)), Saved(torch.randn(700))]
        values = [item.get().clone() for item in saved]
        with refused("host-memory", 2816, 1600, 4096, kind=OffloadError):
            engine.offload("first")
        assert engine.host_bytes == 0 and engine.statistics().bytes_out == 0
        assert all(torch.equal(item.get(), value) for item, value in zip(saved, values, strict=True))


def test_guard_mode_shows_whoever_reads_memory_that_is_away():
    with closing(make(guard=True)) as engine, engine.step():
        activation = torch.randn(100)
        values, forgotten = activation.clone(), activation.data
        with engine.capture(0):
            saved = Saved(activation)
        del activation
        engine.offload(0)
        engine.wait(0)
        assert forgotten.isnan().all()
        assert engine.statistics().held_elsewhere_bytes == 400
        engine.reload(0)
        engine.wait(0)
        assert torch.equal(saved.get(), values)


@pytest.mark.parametrize("guard", [False, True])
def test_memory_that_is_saved_again_while_an_earlier_part_of_it_is_away(guard):
    """As in a V: an output leaves with its stage, and the next stage on the same device saves it as its input."""
    with closing(make(guard=guard)) as engine, engine.step():
        output = torch.randn(100)
        values = output.clone()
        with engine.capture(0):
            first = Saved(output[:40])
        engine.offload(0)
        with engine.capture(1):
            second = Saved(output)
        engine.wait(0)
        assert torch.equal(second.get(), values)
        engine.offload(1)
        engine.wait(1)
        for key, saved, expected in ((0, first, values[:40]), (1, second, values)):
            engine.reload(key)
            engine.wait(key)
            assert torch.equal(saved.get(), expected)


def test_guard_mode_notices_a_write_into_the_host_pool():
    with closing(make(guard=True)) as engine, engine.step():
        with engine.capture("a"):
            saved = Saved(torch.randn(101, dtype=torch.bfloat16))
        engine.offload("a")
        engine.wait("a")
        engine.pool._segments[0][201] += 1
        engine.reload("a")
        with refused("changed-while-away", kind=OffloadError):
            engine.wait("a")
        assert saved is not None


def test_a_device_without_a_channel_is_refused():
    with refused("offload-device", kind=OffloadError):
        OffloadEngine.on(torch.device("meta"), 1 << 20)
    with refused("bad-number", 0, kind=OffloadError):
        make(host_memory=0)
