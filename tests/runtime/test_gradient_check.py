"""The check that every parameter which autograd reaches gets its gradient."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from megatron_pipemem.runtime.gradient_check import GradientCheck
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient, WeightGradientQueue

KNOWN = "library.layers"


class Work(DeferredWeightGradient):
    tensors = ()

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def run(self) -> None:
        self.weight.grad = torch.ones_like(self.weight)


class Split(torch.autograd.Function):
    """A layer that hides its weight from autograd, and gives W to a queue."""

    __module__ = KNOWN

    @staticmethod
    def forward(ctx, x, weight, queue):
        ctx.deferred, ctx.queue = (weight,), queue
        return x * weight.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.queue.append(Work(ctx.deferred[0]))
        return gradient, None, None


class Stops(torch.autograd.Function):
    """A function of the user's that gives its second input no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def lost(backward, **parameters) -> list[str]:
    check = GradientCheck(parameters, (KNOWN,))
    engine = Variable._execution_engine
    with check.watching():
        backward()
    assert Variable._execution_engine is engine
    return check.lost()


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def run_queued(works: list[Work]) -> None:
    queue = WeightGradientQueue()
    for work in works:
        queue.put(work)
    queue.run()


def test_a_weight_that_waits_for_w_is_lost_without_it(weight, x):
    works: list[Work] = []

    def backward():
        Split.apply(x, weight, works).sum().backward()

    assert lost(backward, weight=weight) == ["weight"]

    def with_w():
        backward()
        run_queued(works)

    weight.grad = None
    assert lost(with_w, weight=weight) == []


def test_w_of_a_temporary_tensor_is_no_gradient_of_the_parameter(weight, x):
    """The weight is computed from the parameter, and W writes to the result."""
    works: list[Work] = []

    class Hides(torch.autograd.Function):
        __module__ = KNOWN

        @staticmethod
        def forward(ctx, x, weight):
            ctx.of = weight
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            works.append(Work(ctx.of))
            return gradient, None

    def backward():
        Hides.apply(x, weight * 1.5).sum().backward()
        run_queued(works)

    assert lost(backward, weight=weight) == ["weight"]


def test_autograds_gradients_and_unreached_parameters_are_not_lost(weight, x):
    unused = torch.nn.Parameter(torch.ones(2))

    def backward():
        (x * weight).sum().backward()

    assert lost(backward, weight=weight, unused=unused) == []


def test_a_function_of_the_program_may_keep_its_gradient(weight, x):
    assert lost(lambda: Stops.apply(x, weight).sum().backward(), weight=weight) == []
    assert lost(lambda: Stops.apply(x, (weight * 2).exp()).sum().backward(), weight=weight) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_checked(weight, x, reentrant):
    works: list[Work] = []

    def backward():
        checkpoint(lambda x: Split.apply(x, weight, works) * 2, x, use_reentrant=reentrant).sum().backward()

    assert lost(backward, weight=weight) == ["weight"]


def test_gradients_that_kernels_add_themselves_count(weight, x):
    weight.main_grad = torch.ones(2)
    assert lost(lambda: Split.apply(x, weight, []).sum().backward(), weight=weight) == []
