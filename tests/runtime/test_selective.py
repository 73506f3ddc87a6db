"""Forwards that drop what is cheap and make it again: the same gradients, less memory in between."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch.nn import functional

from megatron_pipemem.runtime.activation_ledger import ActivationLedger, saved_as_is
from megatron_pipemem.runtime.selective import Recorder, is_recording, region
from megatron_pipemem.schedule.action import Action, Kind

WIDTH, INNER, ROWS = 16, 64, 8
cheap = partial(region, replay=lambda: nullcontext)


@contextmanager
def numbers_from(state: torch.Tensor):
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


def remember():
    return partial(numbers_from, torch.get_rng_state())


class Block(torch.nn.Module):
    """``x + B(dropout(gelu(A(tanh(norm(x))))))``: two regions in a row, linear layers, and one with random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.a, self.b = torch.nn.Linear(WIDTH, INNER), torch.nn.Linear(INNER, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = cheap(torch.tanh)(cheap(self._norm)(x))
        y = region(lambda x: functional.dropout(functional.gelu(x), 0.3), remember)(self.a(y))
        return x + self.b(y)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x)


def run(selective: bool, blocks: int = 2):
    """Gradients of input and parameters; bytes held after F, after RS and after I; how often the first norm ran."""
    model = torch.nn.Sequential(*(Block() for _ in range(blocks)))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ledger = ActivationLedger([*model.parameters(), x])
    recorder = Recorder(lambda tensor: ledger.hold(tensor))
    torch.manual_seed(2)
    with ledger.watch_saved(), recorder.record() if selective else nullcontext():
        output = model(x)
    after_forward = torch.get_rng_state()
    ledger.record(Action(Kind.F, 0, 0))
    if selective:
        recorder.run_again()
    ledger.record(Action(Kind.RS, 0, 0))
    assert torch.equal(torch.get_rng_state(), after_forward), "whoever draws next draws what it would have drawn"
    output.square().sum().backward()
    del output
    ledger.record(Action(Kind.I, 0, 0))
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return gradients, [entry.bytes for entry in ledger.entries], model[0].calls


def test_gradients_are_the_same_and_less_is_held() -> None:
    (plain, held, _), (gradients, selective, calls) = run(False), run(True)
    assert all(map(torch.equal, gradients, plain))
    assert selective[1] == held[1] and selective[2] == held[2] == 0
    # What two linear layers made, and the input of the second block; the first one's is no activation here.
    assert selective[0] == 4 * ROWS * (2 * INNER + WIDTH) < held[0] / 2
    assert calls == 2 and not is_recording()


def test_a_result_that_was_overwritten_is_kept_as_it_became() -> None:
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    recorder = Recorder(lambda tensor: None)
    with recorder.record():
        y = cheap(lambda x: x + 1)(x)
        y.mul_(2)
        z = y * weight
    recorder.run_again()
    z.sum().backward()
    assert torch.equal(weight.grad, 2 * (x.detach() + 1)) and torch.equal(x.grad, 2 * weight.detach())


def test_a_region_that_returns_its_input_drops_nothing() -> None:
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    kept = []
    noting = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with noting, Recorder(lambda tensor: None).record():
        (cheap(lambda x: x)(x * 1) * weight).sum().backward()
    assert len(kept) == 3, "the input of the region, and both factors"


def test_the_hooks_of_others_are_as_before_and_whoever_lifts_them_lifts_all() -> None:
    weight = torch.randn(3, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with Recorder(lambda tensor: None).record(), saved_as_is():
            weight * weight
        assert not kept
        weight * weight
    assert len(kept) == 2


def test_without_a_recording_a_region_is_its_function() -> None:
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad(), Recorder(lambda tensor: None).record():
        assert cheap(torch.exp)(x).grad_fn is None
    assert torch.equal(cheap(torch.exp)(x), torch.exp(x))


def test_a_backward_without_it_is_an_error() -> None:
    x = torch.randn(3, requires_grad=True)
    with Recorder(lambda tensor: None).record():
        y = cheap(torch.exp)(x)
    with pytest.raises(RuntimeError):
        y.sum().backward()


def test_a_region_that_does_something_else_is_an_error() -> None:
    x, times = torch.randn(3, requires_grad=True), iter((1, 2))
    recorder = Recorder(lambda tensor: None)
    with recorder.record():
        y = cheap(lambda x: x**3 if next(times) == 1 else x + 1)(x)
    with pytest.raises(RuntimeError) as raised:
        recorder.run_again()
    assert "--pipemem-recompute full" in str(raised.value)
    del y
