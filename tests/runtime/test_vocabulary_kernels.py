"""The passes over logits: compiled against what they are run one operation at a time.

Graphs are made as on a GPU but run by torch's own operations, so equal graphs give equal bits; generating code takes minutes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lanes import nightly
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary_heads import assert_close, heads_of, inputs_of, losses_of, sharded
from vocabulary_model import Case, loss_gradient

from megatron_pipemem.features.vocabulary.runtime import kernels
from megatron_pipemem.features.vocabulary.runtime.head import HeadOptions, add_product


@pytest.fixture
def graphs(monkeypatch):
    """Compiles on CPU; ``frame_count`` counts the graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(kernels, "COMPILER", kernels.Compiler(["cpu"], counter))
    yield counter
    torch._dynamo.reset()


def lines_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == kernels.logger.name]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, HeadOptions(barriers=1, scale=0.25)),
        pytest.param(torch.float32, HeadOptions(barriers=2), marks=nightly("the same in 16 bit")),
        pytest.param(torch.bfloat16, HeadOptions(barriers=1), marks=nightly("the same in fp32")),
        (torch.bfloat16, HeadOptions(barriers=2, scale=0.25)),
    ],
)
def test_compiled_passes_are_whole_serve_any_number_of_tokens_and_change_no_bit(graphs, caplog, dtype, options):
    """Ignored labels, labels of other shards, pieces of 7, 7 and 4 tokens, then 2 and 12 at a time; a rank has one shard."""
    for shape, piece in ((18,), 7), ((2,), None), ((4, 3), None):
        case = Case(8, 4, shape, 5, ignored=(0, 1), dtype=dtype, options=replace(options, piece_tokens=piece))
        inputs = inputs_of(case)
        results = sharded(case, *inputs)
        eager = sharded(replace(case, options=replace(case.options, compiled=False)), *inputs)
        for tensor, wanted in zip(results, eager, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
    assert graphs.frame_count == 2, "one for S and one for T"
    assert not lines_of(caplog)


def test_only_what_is_asked_for_is_compiled(graphs):
    case = Case(9, 2, options=HeadOptions(compiled=False))
    sharded(case, *inputs_of(case))
    assert graphs.frame_count == 0
    assert "cpu" not in kernels.Compiler()._devices


@pytest.mark.parametrize("reason", ["torch.compile failed", "torch.compile is disabled"])
def test_without_a_compiler_the_passes_run_as_they_are_and_one_line_says_so(monkeypatch, caplog, reason):
    attempts = []

    def broken(graph, example_inputs):
        attempts.append(graph)
        raise OSError("no compiler here")

    torch._dynamo.reset()
    monkeypatch.setattr(kernels, "COMPILER", kernels.Compiler(["cpu"], broken))
    if "disabled" in reason:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    case = Case(9, 2, dtype=torch.bfloat16)
    inputs = inputs_of(case)
    results = sharded(case, *inputs)
    assert len(attempts) == (0 if "disabled" in reason else 1)
    (line,) = lines_of(caplog)
    assert reason in line
    eager = sharded(replace(case, options=HeadOptions(compiled=False)), *inputs)
    for tensor, wanted in zip(results, eager, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [HeadOptions(), HeadOptions(piece_tokens=3)])
def test_an_fp32_gradient_gets_products_of_16_bit_factors_unrounded(dtype, options):
    """Many small products upon a large gradient: rounding each to the factors' dtype would leave 2**-9 or 2**-11 of them."""
    case = Case(9, 1, (8,), 16, dtype=dtype, options=options)
    weight, x, labels = inputs_of(case)
    (head,) = heads_of(case, weight)
    gradient = head.shard.parameter.main_grad
    (done,) = losses_of([head], x, labels)
    g = loss_gradient(done.losses, case.loss)
    factors = torch.cat([done._logit_gradient(piece, g).clone() for piece in done.pieces])
    (again,) = losses_of([head], x, labels)
    again.add_weight_gradient(g)
    assert_close(gradient, factors.double().t() @ x.double(), 1e-6)


def test_on_cuda_a_product_is_added_by_the_matrix_product_itself():
    """No device is needed to see which operation is called, and that it takes what it is given."""
    if not hasattr(torch.ops.aten.addmm, "dtype_out"):
        pytest.skip("torch before 2.8 has no product of 16-bit factors in fp32")
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode():
        gradient = torch.empty(9, 4, device="cuda")
        factors = (torch.empty(6, size, dtype=torch.bfloat16, device="cuda") for size in (9, 4))
        with Calls():
            add_product(gradient, *factors)
    assert torch.ops.aten.addmm.dtype_out in called
    assert not {call.overloadpacket for call in called} & {torch.ops.aten._to_copy, torch.ops.aten.add_}
