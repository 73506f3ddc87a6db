"""Experiment J: how much longer passes take beside messages that wait.

A posted message is a kernel of NCCL that occupies multiprocessors until the other end has come: four thread blocks of 640
threads (``runtime.transport.MESSAGE_CTAS``). While a device computes, .5 (``zb-h1``) to 2.3 (``gis``) of them wait on
average, and 3 to 6 at most. Kernels that spin on streams of high priority take their place here.

Claim: three waiting messages make F, I and W of two layers at most 5 % longer.

    python benchmarks/gpu/waiting_kernels.py [--rehearse]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import proof

if TYPE_CHECKING:
    from gpt_stack import Shape

ROUNDS = 12
BLOCKS = (0, 4, 8, 12, 24, 32)
"""Thread blocks of all waiting kernels: none, one to three messages, six, and a collective without a limit."""
CLAIMED_BLOCKS, LIMIT = 12, 1.05
THREADS = 640
MOST_MILLISECONDS = 4000
"""After this time a kernel ends by itself."""

_KERNEL = """
extern "C" __global__ void __launch_bounds__(640, 1) wait_for(int* stop, int milliseconds) {
    __shared__ char buffer[40 * 1024];
    buffer[threadIdx.x] = 0;
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*(volatile int*)stop == 0 && now - begin < 1000000ull * milliseconds);
    if (buffer[threadIdx.x] != 0) *stop = 2;
}
"""


def main() -> int:
    options = proof.arguments(__doc__, "waiting_kernels")
    from gpt_stack import Shape

    report = proof.Report(options.output, options.rehearse)
    shapes = [Shape(32, 2, 16)] if options.rehearse else [Shape(4096, 32, 4096), Shape(2048, 16, 2048)]
    for shape in shapes:
        report.measure(str(shape), partial(compare, shape, options.rehearse))
    return report.finish()


def compare(shape: Shape, rehearse: bool) -> tuple[dict[str, object], list[str]]:
    """Return the passes' milliseconds alone, and how many times as long they take beside waiting kernels."""
    passes = passes_of(shape)
    for _ in range(3):  # a first launch would wait for the waiting kernels
        measure(passes)
    alone = measure(passes)
    values: dict[str, object] = {f"{name}_ms": seconds * 1e3 for name, seconds in alone.items()}
    missed = []
    for blocks in BLOCKS[1:]:
        with nullcontext() if rehearse else waiting(blocks):
            beside = measure(passes)
        for name, seconds in beside.items():
            ratio = seconds / alone[name]
            values[f"{name}_beside_{blocks}_blocks"] = ratio
            if blocks <= CLAIMED_BLOCKS and ratio > LIMIT and not rehearse:
                missed.append(f"{name} takes {ratio:.3f} times as long beside {blocks} blocks")
    return values, missed


@contextmanager
def waiting(blocks: int) -> Iterator[None]:
    """Let kernels wait within a ``with`` block, of up to four thread blocks each, as posted messages do."""
    import torch

    from megatron_pipemem.runtime.transport import MESSAGE_CTAS

    kernel = torch.cuda._compile_kernel(_KERNEL, "wait_for")
    stop, one = (torch.full((1,), value, dtype=torch.int32, device="cuda") for value in (0, 1))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # loads the kernel and the copy that stops it
        kernel(grid=(1, 1, 1), block=(THREADS, 1, 1), args=[one, 1])
        stop.copy_(torch.zeros_like(stop))
    torch.cuda.synchronize()
    for first in range(0, blocks, MESSAGE_CTAS):
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            grid = (min(MESSAGE_CTAS, blocks - first), 1, 1)
            kernel(grid=grid, block=(THREADS, 1, 1), args=[stop, MOST_MILLISECONDS])
    try:
        yield
    finally:
        with torch.cuda.stream(side):
            stop.copy_(one)
        torch.cuda.synchronize()


def passes_of(shape: Shape) -> dict[str, Callable[[], object]]:
    """Return F, I and W of two layers, to be called in turn."""
    import torch
    from gpt_stack import make_inputs, make_stack

    from megatron_pipemem.mcore import on_cpu_ranks
    from megatron_pipemem.runtime.weight_gradients import WeightGradientQueue, collecting

    device = torch.device("cpu" if on_cpu_ranks() else "cuda")
    stack = make_stack(shape, device, recompute=False, layers=2)
    (input,) = make_inputs(shape, device, 1)
    gradient = torch.ones_like(input)
    queue = WeightGradientQueue()
    outputs: list[Any] = []

    def forward() -> None:
        with collecting(queue):
            outputs.append(stack(input))

    def backward() -> None:
        input.grad = None
        outputs.pop().backward(gradient)

    return {"F": forward, "I": backward, "W": queue.run}


def measure(passes: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of every pass.

    The host waits for events only, because the whole device would wait for the waiting kernels.
    """
    import torch

    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(ROUNDS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(passes) + 1)]
        marks[0].record()
        for mark, work in zip(marks[1:], passes.values(), strict=True):
            work()
            mark.record()
        marks[-1].synchronize()
        for name, begin, end in zip(passes, marks, marks[1:], strict=False):
            seconds[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(times[2:]) for name, times in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
