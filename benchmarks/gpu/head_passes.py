"""Experiment E: the passes of a cut LM head, S and T, one operation at a time and compiled, against their matrix products.

One rank's share: 4096 tokens, hidden size 4096, 16384 rows, bf16 with fp32 gradients, one barrier. S is two products and what
makes the statistics of the logits, T one product and what makes the gradient of the logits. Times are those of the device,
medians of several rounds. Errors are relative to torch's cross entropy of the same weights in fp64.

The bytes per logit are counted, not measured, at the real size on any machine: what every operation but the products reads and
writes, and what one pass over the logits has to.

Claims: compiled, S and T take at most a fifth longer than their products and err no more than one operation at a time; the
weight gradient's product is added in fp32, unrounded.

    python benchmarks/gpu/head_passes.py [--rehearse]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import proof

LIMIT = 1.2
# Of a product of 4096 terms in fp32; rounded to bf16 it errs by 1.7e-3.
ADDED_ERROR = 1e-4


@dataclass(frozen=True)
class Size:
    tokens: int
    hidden: int
    rows: int


REAL = Size(4096, 4096, 16384)


def main() -> int:
    options = proof.arguments(__doc__, "head_passes")
    import torch

    report = proof.Report(options.output, options.rehearse)
    for barriers in (1, 2):
        case = f"bytes per logit, {barriers} barrier{'s' * (barriers > 1)}"
        report.measure(case, partial(count_bytes, barriers))
    size, rounds = (Size(64, 16, 96), 2) if options.rehearse else (REAL, 15)
    proof.say(f"{size.tokens} tokens, hidden size {size.hidden}, {size.rows} rows")
    inputs = inputs_of(size, torch.cuda.current_device())
    report.measure("times", lambda: compare_times(inputs, rounds, None if options.rehearse else LIMIT))
    report.measure("errors against fp64", lambda: compare_errors(inputs))
    return report.finish()


def count_bytes(barriers: int) -> tuple[dict[str, float], list[str]]:
    return bytes_per_logit(REAL, barriers), []


def compare_times(inputs, rounds: int, limit: float | None) -> tuple[dict[str, float], list[str]]:
    """The times, and whether the passes are within the limit of their products."""
    from megatron_pipemem.features.vocabulary.runtime import kernels

    times = measure(inputs, rounds)
    # The CPU lane compiles nothing; tests/runtime/test_vocabulary_kernels.py does.
    missed = ["the passes were not compiled"] if kernels.COMPILER.gave_up else []
    for phase in "ST":
        ratio = times[f"{phase}_compiled"] / times[f"{phase}_products"]
        if limit is not None and ratio > limit:
            missed.append(f"{phase} takes {ratio:.2f} of its products")
    return {f"{name}_milliseconds": seconds * 1e3 for name, seconds in times.items()}, missed


def compare_errors(inputs) -> tuple[dict[str, float], list[str]]:
    """The errors, and whether compiled passes err no more than eager ones."""
    errors = errors_against_fp64(inputs)
    missed = [
        f"{name} errs by {errors[f'{name}_compiled_error']:.2e} compiled, {errors[f'{name}_eager_error']:.2e} otherwise"
        for name in ("loss", "dX", "dW")
        if errors[f"{name}_compiled_error"] > 1.05 * errors[f"{name}_eager_error"] + 1e-6
    ]
    if errors["added_product_error"] > ADDED_ERROR:
        missed.append(f"a product is added with an error of {errors['added_product_error']:.2e}")
    return errors, missed


def bytes_per_logit(size: Size, barriers: int) -> dict[str, float]:
    """What the passes move for each logit of a bf16 head: operation by operation, and where each reads and writes once."""
    import torch

    from megatron_pipemem.features.vocabulary.runtime import kernels

    raw = torch.empty(size.tokens, size.rows, dtype=torch.bfloat16, device="meta")
    local, owned = (torch.empty(size.tokens, dtype=dtype, device="meta") for dtype in (torch.int64, torch.bool))
    per_token = [torch.empty(size.tokens, device="meta") for _ in range(3)]
    values = {}
    for phase, function, inputs, constants in (
        ("S", kernels.statistics, [raw, local, owned], {"softmax": barriers == 1}),
        ("T", kernels.logit_gradient, [raw, local, owned, *per_token], {}),
    ):
        with _counter() as counter:
            run_pass: Callable[..., Any] = function  # they take other tensors, and other constants
            results = run_pass(*inputs, scale=1.0, **constants)
        written = [raw] if results is None else [each for each in results if each is not None]
        fused = sum(tensor.nbytes for tensor in (*inputs, *written))
        values[f"{phase}_eager_bytes_per_logit"] = counter.bytes / raw.numel()
        values[f"{phase}_one_pass_bytes_per_logit"] = fused / raw.numel()
    return values


def _counter():
    """Counts the bytes of the tensors that each operation reads and writes; views and allocations touch none."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten

    class Counter(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            operation, tensors = function.overloadpacket, tree_leaves((args, kwargs, result))
            if function.is_view or operation in (aten.empty, aten.empty_like):
                return result
            if operation in (aten.gather, aten.scatter_):
                # Of the matrix they touch what the index names.
                tensors = [tensor for tensor in tensors[1:] if tensor is not args[0]] + [args[2]]
            elif operation is aten.copy_:
                tensors = args[:2]  # What is written is not read.
            self.bytes += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            return result

    return Counter()


def inputs_of(size: Size, device):
    """Weights ``[rows, hidden]``, the head's input ``[tokens, hidden]``, both in bf16, and labels, some of them ignored."""
    import torch

    torch.manual_seed(1)
    weight = torch.randn(size.rows, size.hidden, device=device) / size.hidden**0.5
    x = torch.randn(size.tokens, size.hidden, device=device)
    labels = torch.randint(size.rows, (size.tokens,), device=device)
    labels[::7] = -100
    return weight.bfloat16(), x.bfloat16(), labels


def head_of(weight, compiled: bool):
    import torch

    from megatron_pipemem.features.vocabulary.runtime.head import HeadOptions, VocabularyHead
    from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyPartition, WeightShard

    parameter: Any = torch.nn.Parameter(weight)
    parameter.main_grad = torch.zeros(weight.shape, device=weight.device)
    shard = WeightShard(parameter, VocabularyPartition(weight.size(0), 1), 0)
    return VocabularyHead(shard, HeadOptions(compiled=compiled))


def run(head, x, labels):
    """One microbatch: losses, dX, and seconds of S and T."""
    import torch

    from megatron_pipemem.features.vocabulary.runtime.head import combine, finish_input_gradient

    kept = []
    s = proof.seconds(lambda: kept.append(head.score(x, labels)))
    done: Any = combine(kept[0], kept[0].statistics.clone()[None])  # a OneBarrier, as the head's options say
    g = torch.ones_like(done.losses)  # of their sum
    dx = finish_input_gradient(done.input_gradient(), x.dtype, done.without_ignored(g))
    t = proof.seconds(lambda: done.add_weight_gradient(g))
    return done.losses, dx, {"S": s, "T": t}


def measure(inputs, rounds: int) -> dict[str, float]:
    """Median seconds of both phases, each way and of their matrix products alone."""
    import torch

    from megatron_pipemem.features.vocabulary.runtime.head import add_product

    weight, x, labels = inputs
    heads = {name: head_of(weight, name == "compiled") for name in ("eager", "compiled")}
    logits, average = x.new_empty(x.size(0), weight.size(0)), torch.empty_like(x)
    gradient = torch.zeros(weight.shape, device=weight.device)
    seen: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, head in heads.items():
            for phase, seconds in run(head, x, labels)[2].items():
                seen.setdefault(f"{phase}_{name}", []).append(seconds)

        def products_of_s() -> None:
            torch.mm(x, weight.t(), out=logits)
            torch.mm(logits, weight, out=average)

        seen.setdefault("S_products", []).append(proof.seconds(products_of_s))
        seen.setdefault("T_products", []).append(proof.seconds(lambda: add_product(gradient, logits, x)))
    # The first round compiles and warms up.
    return {name: statistics.median(times[1:]) for name, times in sorted(seen.items())}


def errors_against_fp64(inputs) -> dict[str, float]:
    """Norms of the errors relative to those of the results, and of one product added to an fp32 gradient."""
    import torch

    from megatron_pipemem.features.vocabulary.runtime.head import add_product

    weight, x, labels = inputs
    exact_weight, exact_x = weight.double().requires_grad_(), x.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(exact_x @ exact_weight.t(), labels, reduction="none")
    exact.sum().backward()
    wanted = {"loss": exact.detach(), "dX": exact_x.grad, "dW": exact_weight.grad}
    errors: dict[str, float] = {}
    for name in ("eager", "compiled"):
        head = head_of(weight, name == "compiled")
        losses, dx, _ = run(head, x, labels)
        found = {"loss": losses, "dX": dx, "dW": head.shard.parameter.main_grad}
        errors |= {f"{what}_{name}_error": _error(found[what], wanted[what]) for what in wanted}
    factor = torch.randn(x.size(0), weight.size(0), device=x.device).bfloat16()
    gradient = torch.zeros(weight.shape, device=weight.device)
    add_product(gradient, factor, x)
    return errors | {"added_product_error": _error(gradient, factor.double().t() @ x.double())}


def _error(found, wanted) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


if __name__ == "__main__":
    sys.exit(main())
