"""What activation offload costs on this GPU: bandwidths, k, and the slowdown of a real stack that offloads everything.

Claim: k is the time that a layer's activations take out and back, over the time of its F, I and W. Where it is at most 0.9,
offloading all of them slows a stack of GPT blocks by at most 1 %. It never changes a bit of the gradients, and memory
peaks where the engine says.

    python benchmarks/gpu/offload.py               # one CUDA GPU, torch and this package; a few minutes
    python benchmarks/gpu/offload.py --rehearse    # every line of it on CPU with tiny sizes; the numbers mean nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the comparison of gradients; read when CUDA starts

import proof
import torch
from gpt_stack import Loop, Shape, make_inputs, make_stack

from megatron_pipemem.features.offload.runtime import OffloadEngine
from megatron_pipemem.features.offload.runtime.channels import Copy, CopyChannel, CudaChannel, ThreadChannel
from megatron_pipemem.files import write_whole
from megatron_pipemem.runtime.trace import Direction
from megatron_pipemem.runtime.weight_gradients import WeightGradientQueue, collecting

MIB = 1 << 20
GOAL_K, GOAL_SLOWDOWN = 0.9, 0.01


@dataclass(frozen=True)
class Settings:
    device: str
    sizes: tuple[int, ...]
    volume: int
    matmul: int
    shapes: tuple[Shape, ...]
    repeats: int
    microbatches: int
    ahead: int
    slots: int
    host_memory: int


REAL = Settings(
    device="cuda",
    sizes=tuple(MIB << shift for shift in (0, 2, 4, 6, 8, 10)),
    volume=2 << 30,
    matmul=8192,
    shapes=(
        Shape(2048, 16, 4096, batch=2, layers=6),
        Shape(4096, 32, 4096, layers=4),
        Shape(5120, 40, 4096, layers=3),
        Shape(8192, 64, 4096, layers=2),
        Shape(8192, 64, 16384, layers=1),
    ),
    repeats=5,
    microbatches=24,
    ahead=8,
    slots=5,
    host_memory=48 << 30,
)
REHEARSAL = Settings(
    device="cpu",
    sizes=(MIB >> 4, MIB),
    volume=2 * MIB,
    matmul=64,
    shapes=(Shape(32, 2, 16), Shape(64, 4, 16, batch=2)),
    repeats=2,
    microbatches=9,
    ahead=4,
    slots=3,
    host_memory=64 * MIB,
)


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second for copies of one size. ``both`` are each way, ``computing`` beside matrix products."""

    nbytes: int
    out: float
    back: float
    both: float
    out_computing: float
    back_computing: float
    both_computing: float
    matmul_slowdown: float


@dataclass(frozen=True)
class LayerCost:
    """Of one layer and microbatch, seconds; ``k`` from the bandwidths beside computing, one way at a time and both."""

    shape: str
    recompute: bool
    forward: float
    input_gradient: float
    weight_gradient: float
    moved_bytes: int
    k: float
    k_duplex: float
    tflops: float


@dataclass(frozen=True)
class LoopCost:
    """Of the loop over a stack. Slowdown is that of full offload against none; memory in bytes, with all that is static."""

    shape: str
    recompute: bool
    k: float
    layers: int
    microbatches: int
    plain_seconds: float
    offload_seconds: float
    slowdown: float
    spread: float
    stall_seconds: float
    bit_identical: bool
    plain_peak: int
    offload_peak: int
    predicted_peak: int
    moved_bytes: int
    host_peak: int


class Machine:
    """The device under test: its clock, its memory and its channel."""

    def __init__(self, settings: Settings):
        self.device = torch.device(settings.device)
        self.is_gpu = self.device.type == "cuda"

    def channel(self) -> CopyChannel:
        return CudaChannel(self.device, timed=False) if self.is_gpu else ThreadChannel()

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def peak_of(self, work: Callable[[], object]) -> int:
        """By torch's own count; 0 without a GPU."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else 0

    @contextmanager
    def deterministic(self):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


class Copier:
    """Copies of one size in one direction, one after another."""

    def __init__(self, machine: Machine, channel: CopyChannel, direction: Direction, nbytes: int, volume: int):
        self.machine, self.channel, self.direction = machine, channel, direction
        self.count = max(1, volume // nbytes)
        on_device = torch.ones(nbytes, dtype=torch.uint8, device=machine.device)
        on_host = channel.host_memory(nbytes).fill_(2)
        ends = (on_host, on_device) if direction is Direction.OUT else (on_device, on_host)
        self.copies = [Copy(*ends)] * self.count
        self.nbytes = nbytes * self.count

    def start(self):
        return self.channel.start(self.direction, self.copies, ())


def rates(machine: Machine, copiers: list[Copier], beside: Callable[[], object] | None, repeats: int) -> float:
    """Median of the bytes per second of the slowest of ``copiers``, all at once, with ``beside`` enqueued after them."""
    seen = []
    for _ in range(repeats + 1):
        machine.synchronize()
        begin = time.perf_counter()
        tickets = [copier.start() for copier in copiers]
        if beside is not None:
            beside()
        while not all(ticket.query() for ticket in tickets):
            time.sleep(0)
        seen.append(time.perf_counter() - begin)
        for copier, ticket in zip(copiers, tickets, strict=True):
            copier.channel.join(ticket)
        machine.synchronize()
    return max(copier.nbytes for copier in copiers) / statistics.median(seen[1:])


def seconds_beside(machine: Machine, copiers: list[Copier], work: Callable[[], object]) -> float:
    """How long ``work`` takes while all of ``copiers`` are under way."""
    machine.synchronize()
    tickets = [copier.start() for copier in copiers]
    begin = time.perf_counter()
    work()
    if machine.is_gpu:
        torch.cuda.current_stream(machine.device).synchronize()
    seconds = time.perf_counter() - begin
    for copier, ticket in zip(copiers, tickets, strict=True):
        copier.channel.join(ticket)
    return seconds


def measure_bandwidths(machine: Machine, settings: Settings) -> list[Bandwidth]:
    channel, found = machine.channel(), []
    a, b = (torch.randn(settings.matmul, settings.matmul, device=machine.device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=product)

    multiply(3)
    one = machine.seconds(lambda: multiply(20)) / 20
    for nbytes in settings.sizes:
        out, back = (Copier(machine, channel, direction, nbytes, settings.volume) for direction in Direction)
        alone = [rates(machine, copiers, None, settings.repeats) for copiers in ([out], [back], [out, back])]
        # As many products as fit into the longest of the copies, and some more: no copy runs beside nothing.
        many = partial(multiply, int(1.5 * out.nbytes / min(alone) / one) + 1)
        busy = [rates(machine, copiers, many, settings.repeats) for copiers in ([out], [back], [out, back])]
        # And fewer, so that copies run all the while.
        few = partial(multiply, max(1, int(0.5 * out.nbytes / max(alone) / one)))
        plain = statistics.median(machine.seconds(few) for _ in range(settings.repeats))
        beside = [seconds_beside(machine, [out, back], few) for _ in range(settings.repeats)]
        rates_found = [*alone, *busy, statistics.median(beside) / plain - 1]
        found.append(Bandwidth(nbytes, *rates_found))
    machine.synchronize()
    channel.close()
    return found


def measure_layer(machine: Machine, settings: Settings, shape: Shape, recompute: bool, link: Bandwidth) -> LayerCost:
    """Times two layers, so that none of them is both first and last, and halves."""
    stack, (x,) = make_stack(shape, machine.device, recompute, layers=2), make_inputs(shape, machine.device, 1)
    gradient = torch.ones_like(x)
    rounds = []
    for _ in range(settings.repeats + 2):
        queue = WeightGradientQueue()
        kept: list[torch.Tensor] = []

        def run_forward(queue=queue, kept=kept) -> None:
            with collecting(queue):
                kept.append(stack(x))

        def run_backward(kept=kept) -> None:
            kept.pop().backward(gradient)

        rounds.append((machine.seconds(run_forward), machine.seconds(run_backward), machine.seconds(queue.run)))
    forward, input_gradient, weight_gradient = (
        statistics.median(column) / 2 for column in zip(*rounds[2:], strict=True)
    )
    engine = make_engine(machine, settings, stack)
    with engine.step():
        with collecting(WeightGradientQueue()), engine.capture(0):
            output = stack(x)
        engine.offload(0)
        engine.wait(0)
        # The input of a stage is its message's memory, and stays.
        moved = (engine.statistics().bytes_out - x.nbytes) // 2
        del output
    engine.close()
    total = forward + input_gradient + weight_gradient
    return LayerCost(
        str(shape),
        recompute,
        forward,
        input_gradient,
        weight_gradient,
        moved,
        k=moved * (1 / link.out_computing + 1 / link.back_computing) / total,
        k_duplex=2 * moved / link.both_computing / total,
        tflops=3 * shape.flops / total / 1e12,
    )


def make_engine(machine: Machine, settings: Settings, stack: torch.nn.Module) -> OffloadEngine:
    return OffloadEngine.on(
        machine.device, settings.host_memory, permanent=stack.parameters(), min_bytes=1 << 16 if machine.is_gpu else 128
    )


def measure_loop(machine: Machine, settings: Settings, shape: Shape, layer: LayerCost) -> LoopCost:
    stack = make_stack(shape, machine.device, layer.recompute)
    loop = Loop(stack, make_inputs(shape, machine.device, settings.microbatches), settings.ahead, settings.slots)
    engine = make_engine(machine, settings, stack)

    def plain() -> None:
        loop.run(None)

    def offloaded() -> None:
        with engine.step():
            loop.run(engine)

    with machine.deterministic():
        expected = [gradient.cpu() for gradient in loop.run(None)]
        with engine.step():
            bit_identical = all(torch.equal(a.cpu(), b) for a, b in zip(loop.run(engine), expected, strict=True))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(settings.repeats):  # in turn, so that a clock that drifts hits both
        for work, seconds in zip((plain, offloaded), times, strict=True):
            seconds.append(machine.seconds(work))
    with engine.step():
        loop.run(engine, move=False)
        captured_peak = engine.statistics().device_peak_bytes
    with engine.step():
        loop.run(engine)
        seen = engine.statistics()
    plain_peak, offload_peak = machine.peak_of(plain), machine.peak_of(offloaded)
    engine.close()
    plain_seconds, offload_seconds = map(statistics.median, times)
    return LoopCost(
        shape=str(shape),
        recompute=layer.recompute,
        k=layer.k,
        layers=shape.layers,
        microbatches=settings.microbatches,
        plain_seconds=plain_seconds,
        offload_seconds=offload_seconds,
        slowdown=offload_seconds / plain_seconds - 1,
        spread=max(max(seconds) / min(seconds) - 1 for seconds in times),
        stall_seconds=seen.stall_seconds,
        bit_identical=bit_identical,
        plain_peak=plain_peak,
        offload_peak=offload_peak,
        # Parameters, gradients and working memory are those of the plain loop; what autograd holds is the engine's count.
        predicted_peak=plain_peak - captured_peak + seen.device_peak_bytes,
        moved_bytes=seen.bytes_out,
        host_peak=seen.host_peak_bytes,
    )


def bandwidth_table(rows: list[Bandwidth]) -> str:
    head = "| copy | D2H | H2D | both, each way | D2H computing | H2D computing | both computing | products slowed by |"
    lines = [
        "| "
        + " | ".join(
            [
                f"{row.nbytes / MIB:g} MiB",
                *(
                    f"{rate / 1e9:.1f}"
                    for rate in (row.out, row.back, row.both, row.out_computing, row.back_computing, row.both_computing)
                ),
                f"{row.matmul_slowdown:.1%}",
            ]
        )
        + " |"
        for row in rows
    ]
    return "\n".join(["Bandwidths in GB/s, pinned memory:", "", head, "|---" * 8 + "|", *lines])


def layer_table(rows: list[LayerCost]) -> str:
    head = "| layer | recompute | F ms | I ms | W ms | TFLOP/s | MiB moved | k | k, both ways at once |"
    lines = [
        f"| {row.shape} | {'norm, GELU' if row.recompute else 'none'} | {row.forward * 1e3:.2f} | "
        f"{row.input_gradient * 1e3:.2f} | {row.weight_gradient * 1e3:.2f} | {row.tflops:.0f} | "
        f"{row.moved_bytes / MIB:.0f} | {row.k:.2f} | {row.k_duplex:.2f} |"
        for row in rows
    ]
    return "\n".join(["One layer and microbatch:", "", head, "|---" * 9 + "|", *lines])


def loop_table(rows: list[LoopCost]) -> str:
    head = (
        "| stack | layers | recompute | k | plain s | offload s | slowdown | spread | stalled s | bit-identical | "
        "peak GiB plain | offload | predicted | host GiB |"
    )
    lines = [
        f"| {row.shape} | {row.layers} | {'norm, GELU' if row.recompute else 'none'} | {row.k:.2f} | "
        f"{row.plain_seconds:.3f} | {row.offload_seconds:.3f} | {row.slowdown:+.2%} | {row.spread:.1%} | "
        f"{row.stall_seconds:.3f} | {'yes' if row.bit_identical else 'NO'} | {row.plain_peak / 2**30:.2f} | "
        f"{row.offload_peak / 2**30:.2f} | {row.predicted_peak / 2**30:.2f} | {row.host_peak / 2**30:.2f} |"
        for row in rows
    ]
    return "\n".join(["Everything offloaded, against nothing:", "", head, "|---" * 14 + "|", *lines])


def failures(rows: list[LoopCost], with_speed: bool) -> list[str]:
    """Where the claim does not hold."""
    found = [f"{row.shape}: gradients differ" for row in rows if not row.bit_identical]
    if with_speed:
        found += [
            f"{row.shape}: k = {row.k:.2f}, yet {row.slowdown:.2%} slower"
            for row in rows
            if row.k <= GOAL_K and row.slowdown > GOAL_SLOWDOWN
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on CPU, to see that the program works")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks/offload.json"))
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.stderr.write("no CUDA GPU here, so there is nothing to measure; --rehearse runs the program on CPU\n")
        return 2
    settings = REHEARSAL if options.rehearse else REAL
    machine = Machine(settings)
    name = proof.machine(options.rehearse)
    proof.say(f"{name}\n")
    earlier = proof.unfinished(options.output, options.rehearse)
    bandwidths = [Bandwidth(**row) for row in earlier.get("bandwidths", ())] or measure_bandwidths(machine, settings)
    proof.say(bandwidth_table(bandwidths) + "\n")
    loops = [LoopCost(**row) for row in earlier.get("loops", ())]
    done = {(loop.shape, loop.recompute) for loop in loops}
    layers = [each for row in earlier.get("layers", ()) if ((each := LayerCost(**row)).shape, each.recompute) in done]

    def write(complete: bool) -> None:
        result = {"machine": name, "rehearsal": options.rehearse, "complete": complete}
        result |= {"rows": [_row(loop, machine.is_gpu) for loop in loops]}
        result |= {"bandwidths": bandwidths, "layers": layers, "loops": loops}
        write_whole(options.output, json.dumps(result, default=asdict, indent=1) + "\n")

    write(complete=False)
    for shape in settings.shapes:
        for recompute in (True, False):
            if (str(shape), recompute) in done:
                continue
            try:
                layers.append(measure_layer(machine, settings, shape, recompute, bandwidths[-1]))
                loops.append(measure_loop(machine, settings, shape, layers[-1]))
            except torch.OutOfMemoryError:
                proof.say(f"{shape}{'' if recompute else ' without recompute'}: does not fit into this GPU, left out\n")
            write(complete=False)  # a run that is cut short keeps what it has
    write(complete=True)
    proof.say(layer_table(layers) + "\n")
    proof.say(loop_table(loops) + "\n")
    missed = failures(loops, with_speed=machine.is_gpu)
    for line in missed:
        proof.say(f"MISSED: {line}")
    return 1 if missed else 0


def _row(loop: LoopCost, with_speed: bool) -> proof.Row:
    """A loop in the table of all experiments."""
    values = {
        "k": loop.k,
        "slowdown": loop.slowdown,
        "bit_identical": loop.bit_identical,
        "plain_peak_bytes": loop.plain_peak,
        "offload_peak_bytes": loop.offload_peak,
        "predicted_peak_bytes": loop.predicted_peak,
    }
    case = f"{loop.shape}, {'norm and GELU recomputed' if loop.recompute else 'nothing recomputed'}"
    return proof.Row(case, values, tuple(failures([loop], with_speed)))


if __name__ == "__main__":
    sys.exit(main())
