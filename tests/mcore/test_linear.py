"""The split linear layer computes what Megatron's own computes, only later."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_pipemem.mcore.model import linear
from megatron_pipemem.mcore.model.linear import attach_ddp_hooks, split_linear
from megatron_pipemem.runtime.weight_gradients import (
    GRADIENT_READY,
    AccumulatorHooks,
    ImmediateWeightGradients,
    LateWeightGradients,
    WeightGradientQueue,
    accumulator_of,
    collecting,
)

STOCK = layers.linear_with_grad_accumulation_and_async_allreduce


class OneRank:
    """A tensor-parallel group of one; with it neither function communicates."""

    def size(self):
        return 1

    def rank(self):
        return 0


def run(function, queue=None, bias=True, requires_grad=True, passes=1, dtype=torch.float32):
    """One layer over ``[s, b, h]``. Returns output, and the gradients of input, bias and weight before any W ran."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(5, 4, generator=generator, dtype=dtype))
    offset = torch.nn.Parameter(torch.randn(5, generator=generator, dtype=dtype)) if bias else None
    for _ in range(passes):
        x = torch.randn(3, 2, 4, generator=generator, dtype=dtype, requires_grad=requires_grad)
        with collecting(queue):
            y = function(x, weight, offset, False, False, False, tp_group=OneRank())
            y.square().sum().backward()
    return y.detach(), x.grad, None if offset is None else offset.grad, weight


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What the layers communicate and compute, in order; with a group of one, communication is a copy."""
    events: list[str] = []

    class Work:
        def __init__(self, what):
            events.append(what)
            self.what = what

        def wait(self):
            events.append(f"has {self.what}")

    def copies(what):
        def communicate(output, input, group, async_op=False):
            output.copy_(input)
            return Work(what) if async_op else events.append(f"blocking {what}")

        return communicate

    monkeypatch.setattr(linear.dist, "all_gather_into_tensor", copies("gather"))
    monkeypatch.setattr(linear.dist, "reduce_scatter_tensor", copies("scatter"))
    monkeypatch.setattr(linear, "get_tensor_model_parallel_group_if_none", lambda group: group)
    original = linear._LinearWeightGradient.gradient

    def noted(work):
        gradient = original(work)
        events.append("W")
        return gradient

    monkeypatch.setattr(linear._LinearWeightGradient, "gradient", noted)
    return events


def sequence_parallel_layers(queue) -> list[torch.nn.Parameter]:
    weights = [torch.nn.Parameter(torch.full((4, 4), 0.1 * number)) for number in (1, 2, 3, 4)]
    y = torch.ones(3, 2, 4, requires_grad=True)
    with collecting(queue):
        for weight in weights:
            y = partial(split_linear, STOCK)(y, weight, None, False, False, True, tp_group=OneRank())
        y.sum().backward()
    return weights


def test_w_gathers_two_layers_ahead_of_its_gemms(events):
    queue = WeightGradientQueue()
    sequence_parallel_layers(queue)
    assert events[8:] == ["scatter", "has scatter"] * 4
    events.clear()
    queue.run()
    assert events == [*["gather"] * 3, "has gather", "W", "gather", *["has gather", "W"] * 3]


def test_a_backward_that_is_not_split_communicates_beside_its_gemms(events):
    weights = sequence_parallel_layers(ImmediateWeightGradients())
    assert events[8:] == ["gather", "scatter", "has gather", "W", "has scatter"] * 4
    split = sequence_parallel_layers(queue := WeightGradientQueue())
    queue.run()
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(weights, split, strict=True))


def test_late_weight_gradients_run_in_parts_and_are_told_once():
    weight, told = torch.nn.Parameter(torch.ones(2, 2)), []
    setattr(weight, GRADIENT_READY, lambda: told.append(weight.grad.clone()))
    queue = LateWeightGradients()
    x = torch.ones(1, 1, 2, requires_grad=True)
    with collecting(queue):
        for _ in range(2):
            partial(split_linear, STOCK)(x, weight, None, False, False, False, tp_group=OneRank()).sum().backward()
            queue.run_part()
    assert not told and torch.equal(weight.grad, torch.full((2, 2), 2.0))
    queue.run()
    queue.run()
    (at,) = told
    assert torch.equal(at, weight.grad)


def test_every_weight_of_a_ddp_model_is_marked_once():
    class Wrapped(torch.nn.Linear):
        made = 0

        def _make_backward_post_hook(self, parameter):
            Wrapped.made += 1
            return lambda: None

    chunk = Wrapped(2, 2)
    chunk.bias.requires_grad_(False)
    marked = attach_ddp_hooks([chunk, torch.nn.Linear(2, 2)])
    assert marked == [chunk.weight]
    assert attach_ddp_hooks([chunk]) == [] and Wrapped.made == 1


def test_a_layer_that_asks_for_something_new_is_left_to_stock_and_told_once(caplog):
    def newer(*args, output_dtype=None, **kwargs):
        return STOCK(*args, **kwargs)

    queue = WeightGradientQueue()
    for _ in range(2):
        output, *_, weight = run(
            lambda *args, **kw: split_linear(newer, *args, output_dtype=torch.float32, **kw), queue
        )
    assert torch.equal(output, run(STOCK)[0])
    assert weight.grad is not None and len(caplog.records) == 1
    assert "output_dtype keep their weight gradients in the input's backward" in caplog.text


def changed(change, queue) -> torch.Tensor:
    """The weight's gradient, where ``change`` gets the weight and returns what the layer multiplies by."""
    weight = torch.nn.Parameter(torch.arange(20.0).view(5, 4) / 10)
    used = change(weight)
    x = torch.arange(24.0).view(3, 2, 4).requires_grad_()
    with collecting(queue):
        layer = STOCK if queue is None else partial(split_linear, STOCK)
        layer(x, used(), None, False, False, False, tp_group=OneRank()).square().sum().backward()
    if queue is not None:
        assert list(queue.tensors()) == [], "nothing waits for W"
        queue.run()
    return weight.grad


def with_hook(register):
    def change(weight):
        register(weight)
        return lambda: weight

    return change


@pytest.mark.parametrize("queue", [WeightGradientQueue, ImmediateWeightGradients, LateWeightGradients])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: lambda: weight * 1.5,
        lambda weight: lambda: weight[:],
        with_hook(lambda weight: weight.register_hook(torch.sign)),
        with_hook(
            lambda weight: weight.register_post_accumulate_grad_hook(lambda of: setattr(of, "grad", of.grad * 2))
        ),
    ],
    ids=["computed", "view", "hook", "hook after accumulation"],
)
def test_a_weight_that_is_not_plain_gets_its_gradient_from_autograd(change, queue):
    assert torch.equal(changed(change, queue()), changed(change, None))


def test_hooks_on_autograds_nodes_are_found():
    def known(*_):
        pass

    hooked, before, free, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    frozen.requires_grad_(False)
    nodes = [accumulator_of(parameter) for parameter in (hooked, before, free)]
    nodes[2].register_hook(known)
    hooks = AccumulatorHooks(lambda hook: hook is known)
    assert hooks.hooked([hooked, before, free, frozen]) == []
    nodes[0].register_hook(lambda *_: None)
    handle = nodes[1].register_prehook(lambda gradients: None)
    modules = hooks.hooked([hooked, before, free, frozen])
    assert [id(module) for module in modules] == [id(hooked), id(before)]
    handle.remove()
    assert [id(module) for module in hooks.hooked([hooked, before, free])] == [id(hooked)]


def test_unplain_weights_have_names():
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    chunk[1].weight.register_hook(lambda gradient: gradient)
    assert [*linear.named_unplain(chunk)] == ["1.weight"]
