"""The sharded head against torch's own cross entropy in fp64. The ranks are emulated in a loop, so every size is cheap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lanes import examples
from refusals import refused
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vocabulary_heads import (
    assert_close,
    gradients_of,
    heads_of,
    inputs_of,
    joined_gradient,
    losses_of,
    sharded,
    whole,
)
from vocabulary_model import Case, loss_gradient, whole_losses

from megatron_pipemem.errors import VocabularyError
from megatron_pipemem.features.vocabulary.runtime.head import HeadOptions, Normalised
from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition, WeightShard

BARRIERS = [1, 2]


@st.composite
def cases(draw) -> Case:
    shape = draw(st.sampled_from([(1, 1), (3, 2), (5,), (2, 1, 3), (4, 3)]))
    tokens = torch.Size(shape).numel()
    some = st.lists(st.integers(0, tokens - 1), max_size=tokens, unique=True).map(tuple)
    return Case(
        vocab_size=draw(st.integers(1, 60)),
        ranks=draw(st.integers(1, 5)),
        shape=shape,
        hidden=draw(st.integers(1, 9)),
        masked=draw(some),
        ignored=draw(some),
        per_token=draw(st.booleans()),
        loss_scale=draw(st.sampled_from([1.0, 1024.0])),
        seed=draw(st.integers(0, 1000)),
        options=HeadOptions(
            barriers=draw(st.sampled_from(BARRIERS)),
            piece_tokens=draw(st.sampled_from([None, 1, 2, 5])),
            scale=draw(st.sampled_from([1.0, 0.25])),
        ),
    )


def magnitudes(case: Case, weight: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
    """The largest sums of absolute terms in losses, dX and dW: what their rounding errors are relative to."""
    options, weight, x = case.options, weight.double(), x.double()
    logits = (x @ weight.t() * options.scale).requires_grad_()
    losses = whole_losses(logits, labels, replace(options, scale=1.0))
    losses.backward(loss_gradient(losses, case.loss))
    terms = logits.grad.abs() * options.scale
    sums = (
        losses.detach() + logits.detach().abs().amax(-1),
        terms @ weight.abs(),
        terms.flatten(0, -2).t() @ x.flatten(0, -2).abs(),
    )
    return tuple(total.abs().max().item() if total.numel() else 0.0 for total in sums)


@examples(60)
@given(cases())
@example(Case(2, 5))
@example(Case(11, 4, masked=tuple(range(6))))
@example(Case(11, 4, ignored=tuple(range(6)), options=HeadOptions(barriers=2)))
@example(Case(9, 4, shape=(0, 2)))
def test_losses_and_gradients_are_those_of_the_whole_matrix(case):
    inputs = inputs_of(case)
    sides = sharded(case, *inputs), whole(case, *inputs), magnitudes(case, *inputs)
    for what, result, wanted, magnitude in zip(("loss", "dX", "dW"), *sides, strict=True):
        assert result.shape == wanted.shape
        torch.testing.assert_close(result.double(), wanted, rtol=0, atol=1e-6 * magnitude, msg=what)


NEARLY_CERTAIN = (
    torch.tensor([[8.0, 1.0], [0.0, 3.0], *[[-1.0, 2.0]] * 6]),
    torch.tensor([[1.0, 0.0]]),
    torch.tensor([0]),
)
CERTAIN = torch.tensor([[20.0], [-1], [-2], [-1], [0], [-3]]), torch.ones(1, 1), torch.tensor([0])
OVERFLOWS = (
    torch.tensor([[1.0, 0.5]] * 2 + [[-400.0, -400.0]] * 2 + [[0.5, 2.0]] * 2),
    torch.full((2, 2), 300.0),
    torch.tensor([0, 5]),
)
EXTREME = inputs_of(Case(13, 4, per_token=True), spread=1e4)
HARD = {
    # Averaging rows in 16 bit and then subtracting the label's would leave rounding errors of the label's row only.
    "a nearly certain label in bf16": (Case(8, 2, (1,), 2, dtype=torch.bfloat16), NEARLY_CERTAIN, (None, 0.01, 0.01)),
    "a nearly certain label in fp16": (Case(8, 2, (1,), 2, dtype=torch.float16), NEARLY_CERTAIN, (None, 0.01, 0.01)),
    # Of 1 minus a probability of 1 - 1e-9, fp32 has no digit.
    "a certain label": (Case(6, 3, (1,), 1), CERTAIN, (1e-5, 1e-5, 1e-5)),
    # Logits of 1e4 in either direction: exponentials of all but one shard vanish, and none overflows.
    "extreme logits": (Case(13, 4, per_token=True), EXTREME, (1e-5, 1e-5, 1e-5)),
    # fp16 logits of one shard overflow downwards; the others' losses are finite, as those of the whole matrix are.
    "a shard of minus infinity": (Case(6, 3, (2,), 2, dtype=torch.float16), OVERFLOWS, (5e-3, 5e-3, 5e-3)),
}
"""Cases with their inputs, and the largest relative errors of losses, dX and dW."""


@pytest.mark.parametrize("barriers", BARRIERS)
@pytest.mark.parametrize("name", HARD)
def test_losses_and_gradients_of_hard_inputs_are_precise(name, barriers):
    case, (weight, x, labels), tolerances = HARD[name]
    case = replace(case, options=HeadOptions(barriers=barriers))
    inputs = weight.to(case.dtype), x.to(case.dtype), labels
    for result, expected, tolerance in zip(sharded(case, *inputs), whole(case, *inputs), tolerances, strict=True):
        assert result.isfinite().all()
        if tolerance is not None:
            largest = expected.abs().max().item()
            torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("barriers", BARRIERS)
def test_not_a_number_stays_one(barriers):
    """A loss scaler has to see it."""
    case = Case(7, 3, options=HeadOptions(barriers=barriers))
    weight, x, labels = inputs_of(case)
    weight[6] = float("nan")
    losses, dx, _ = sharded(case, weight, x, labels)
    assert losses.isnan().all() and dx.isnan().all()


def test_fp16_averages_neither_overflow_nor_vanish():
    """Even logits over a large vocabulary: bare exponentials sum to the number of rows, probabilities are subnormal.

    A shard's probabilities lie halfway between two numbers of fp16, half a percent from both.
    """
    rows = round(2**24 / 100.5)
    case = Case(2 * rows, 2, (1,), 1, dtype=torch.float16, options=HeadOptions())
    inputs = torch.full((2 * rows, 1), 8.0).half(), torch.zeros(1, 1).half(), torch.tensor([3])
    done = losses_of(heads_of(case, inputs[0]), *inputs[1:])
    parts = torch.stack([instruction.input_gradient() for instruction in done])
    assert parts[1].item() == pytest.approx(4.0, rel=1e-3), "half of the probability is in the second shard"
    assert parts.sum().item() == pytest.approx(0, abs=8e-3)


@pytest.mark.parametrize("barriers", BARRIERS)
def test_gradients_of_several_microbatches_add_up(barriers):
    """Three microbatches are in flight before the first T."""
    case = Case(11, 3, microbatches=3, options=HeadOptions(barriers=barriers))
    weight, x, _ = inputs_of(case)
    labels = [case.batch(i)[1] for i in range(3)]
    heads, total = heads_of(case, weight), 0
    for i, done in enumerate([losses_of(heads, x * (i + 1), labels[i]) for i in range(3)]):
        _, wanted_dx, wanted_dw = whole(case, weight, x * (i + 1), labels[i])
        assert_close(gradients_of(case, done), wanted_dx, 1e-6)
        total = total + wanted_dw
    assert_close(joined_gradient(heads), total, 1e-6)


def test_a_frozen_head_passes_the_input_gradient_on():
    for barriers in BARRIERS:
        case = Case(11, 3, options=HeadOptions(barriers=barriers))
        weight, x, labels = inputs_of(case)
        heads = heads_of(case, weight)
        for head in heads:
            head.shard.parameter.requires_grad_(False)
        assert_close(gradients_of(case, losses_of(heads, x, labels)), whole(case, weight, x, labels)[1], 1e-6)
        assert all(head.shard.parameter.grad is None for head in heads)


@pytest.mark.parametrize("barriers", BARRIERS)
def test_evaluation_keeps_nothing_and_has_no_gradients(barriers):
    case = Case(110, 3, options=HeadOptions(barriers=barriers))
    weight, x, labels = inputs_of(case)
    heads = heads_of(case, weight)
    done = losses_of(heads, x, labels, for_backward=False)
    assert_close(done[0].losses, whole(case, weight, x, labels)[0], 1e-6)
    most = max(x.numel(), Normalised.NUMBERS * labels.numel())
    assert all(tensor.numel() <= most < labels.numel() * 110 / 3 for tensor in done[0].tensors)
    with refused("taken-twice", "for_backward", kind=VocabularyError):
        gradients_of(case, done)


@pytest.mark.parametrize("barriers", BARRIERS)
def test_a_gradient_is_taken_once(barriers):
    case = Case(11, 2, options=HeadOptions(barriers=barriers))
    weight, x, labels = inputs_of(case)
    heads = heads_of(case, weight)
    done = losses_of(heads, x, labels)
    gradients_of(case, done)
    with refused("taken-twice", kind=VocabularyError):
        gradients_of(case, done)
    with refused("taken-twice", kind=VocabularyError):
        (done[0].add_weight_gradient if barriers == 1 else done[0].gradients)(torch.ones(case.shape))


class LargestBuffers(TorchDispatchMode):
    """Elements of the largest fp32 result of any operation, views and ``known`` storages left out."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.largest = max(self.largest, storage.nbytes() // 4)
        return result


def test_logits_are_scaled():
    case = Case(11, 3, options=HeadOptions(scale=0.5, piece_tokens=2))
    weight, x, _ = inputs_of(case)
    logits = torch.cat([head.logits(x) for head in heads_of(case, weight)], dim=-1)
    assert_close(logits, x.double() @ weight.double().t() * 0.5, 1e-6)


@pytest.mark.parametrize("barriers", BARRIERS)
@pytest.mark.parametrize("piece", [2, 8, None])
def test_fp32_logits_exist_for_one_piece_at_a_time(barriers, piece):
    tokens, rows, hidden = 64, 512, 8
    options = HeadOptions(barriers=barriers, piece_tokens=piece)
    case = Case(rows, 1, (tokens,), hidden, dtype=torch.bfloat16, options=options)
    weight, x, labels = inputs_of(case)
    (head,) = heads_of(case, weight)
    parameter = head.shard.parameter
    parameter.main_grad = torch.zeros(rows, hidden)
    with LargestBuffers(parameter, parameter.main_grad) as seen:
        done = losses_of([head], x, labels)
        held = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in done[0].tensors}
        gradients_of(case, done)
    assert seen.largest == max((piece or tokens) * rows, tokens * hidden)
    logits = tokens * rows * x.element_size()
    assert logits <= sum(held.values()) <= logits + 2 * x.nbytes + tokens * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"barriers": 3}, ("bad-number", 1, 2)),
        ({"piece_tokens": 0}, ("bad-number", 1)),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with refused(*message, kind=VocabularyError):
        HeadOptions(**options)


def test_tensors_that_do_not_fit_are_refused():
    case = Case(11, 2)
    weight, x, labels = inputs_of(case)
    head = heads_of(case, weight)[0]
    with refused("wrong-shape", kind=VocabularyError):
        head.score(x, labels.t())
    with refused("wrong-shape", 4, kind=VocabularyError):
        head.score(x[..., :3], labels)
    with refused("wrong-shape", kind=VocabularyError):
        head.logits(x.bfloat16())
    with refused("wrong-shape", kind=VocabularyError):
        losses_of([head], x, labels)[0].add_weight_gradient(torch.ones(1))
    with refused("wrong-shape", 6, kind=VocabularyError):
        WeightShard(torch.nn.Parameter(weight), VocabularyPartition(11, 2), 0)
