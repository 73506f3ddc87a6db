"""Experiment F: which operations of a host wait for a kernel that runs on another stream.

A receive that has been posted is such a kernel. In its place, one that spins runs on a stream of its own, while the host does
one operation of a training run and the time that it takes is compared with what the kernel runs. No other rank and no NCCL is
needed, and nothing can hang.

Claims: a synchronisation waits, and the launch of a kernel that is loaded does not. The other rows say what a host that posts
receives early is exposed to: the model of hosts that wait is needed for those that wait.

    python benchmarks/gpu/device_waits.py [--rehearse]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import proof

MIB = 1 << 20
SPIN_SECONDS = 1.0
CONTROLS = {"synchronize()": True, "a kernel that is loaded": False}
"""Operations of which it is known whether they wait."""


def main() -> int:
    options = proof.arguments(__doc__, "device_waits")
    report = proof.Report(options.output, options.rehearse)
    spin = sleep_on_cpu if options.rehearse else spin_on_gpu()
    for name, operation in operations(options.rehearse).items():
        report.measure(name, partial(measure, name, operation, spin))
    return report.finish()


def measure(
    name: str, operation: Callable[[], object], spin: Callable[[], Callable[[], None]]
) -> tuple[dict, list[str]]:
    """Host seconds of the operation while a kernel spins, and whether it waited for the kernel.

    Args:
        name: of the operation.
        operation: what the host does.
        spin: starts the kernel and returns what waits for its end.
    """
    begin = time.perf_counter()
    wait = spin()
    middle = time.perf_counter()
    operation()
    end = time.perf_counter()
    wait()
    spun = time.perf_counter() - begin
    waits = end - begin > 0.9 * spun
    missed = [f"waits: {waits}, which cannot be"] if waits != CONTROLS.get(name, waits) else []
    if spun < SPIN_SECONDS / 2:
        missed.append(f"the kernel ran for {spun:.2g} s only")
    return {"waits": waits, "host_seconds": end - middle, "kernel_seconds": spun}, missed


def spin_on_gpu() -> Callable[[], Callable[[], None]]:
    """Return what starts a kernel of a second on a stream of its own, which is loaded."""
    import torch

    stream, cycles = torch.cuda.Stream(), 10**8
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        cycles = int(cycles * SPIN_SECONDS / proof.seconds(partial(torch.cuda._sleep, cycles)))

    def spin() -> Callable[[], None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        return stream.synchronize

    return spin


def sleep_on_cpu() -> Callable[[], None]:
    """The kernel of a rehearsal: it ends when so much time has passed."""
    end = time.perf_counter() + SPIN_SECONDS
    return lambda: time.sleep(max(0.0, end - time.perf_counter()))


def operations(rehearse: bool) -> dict[str, Callable[[], object]]:
    """What a host does in a step, by name; most of it for the first time in this process."""
    import torch

    if rehearse:  # no device waits on CPU
        return {"synchronize()": partial(time.sleep, SPIN_SECONDS), "a kernel that is loaded": lambda: None}
    x = torch.ones(1 << 20, device="cuda")
    out = torch.add(x, x)
    matrix = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    cached = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")]
    found: dict[str, Callable[[], object]] = {
        "a kernel that is loaded": lambda: torch.add(x, x, out=out),
        "synchronize()": torch.cuda.synchronize,
        "the first launch of a kernel": lambda: torch.atan2(x, x, out=out),
        "another kernel of that file": lambda: torch.nextafter(x, x, out=out),
        "a kernel that torch compiles when it is first used": lambda: torch.special.bessel_j0(x, out=out),
        "the first matrix product": lambda: matrix @ matrix,
        "a matrix product of another shape": lambda: matrix[:, :8] @ matrix[:8],
        "device memory: 512 MiB that are not cached": lambda: torch.empty(512 * MIB, dtype=torch.uint8, device="cuda"),
        "device memory: 64 MiB given back": partial(give_back, cached),
        "device memory: the allocator retries": retry,
        "256 MiB of pinned memory": lambda: torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True),
        "a copy to pageable memory": lambda: x[:1].cpu(),
    }
    torch.cuda.synchronize()
    return found


def give_back(cached: list) -> None:
    """Free blocks and return their memory to the device."""
    import torch

    cached.clear()
    torch.cuda.empty_cache()


def retry() -> None:
    """Ask for memory that is there only when cached blocks have been given back, as a fragmented allocator does."""
    import torch

    torch.cuda.empty_cache()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 32 * MIB) / total)
    try:
        del block
        torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    sys.exit(main())
