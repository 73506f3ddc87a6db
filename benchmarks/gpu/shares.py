"""Divide one GPU's multiprocessors into equal shares, one per pipeline rank, and measure whether the shares are apart.

There are two ways. ``green_streams`` makes streams of green contexts within one process. A kernel on such a stream runs
on the multiprocessors of its context alone. ``mps`` starts CUDA's multi-process service, under which kernels of several
processes run at once, and each process may use a share of the multiprocessors. Without the service, a GPU gives its time
to one process after the other, and the idle time of a process does not show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

GRANULE = 8
"""Multiprocessors of a share are a multiple of this number on Hopper GPUs."""
_FOLDERS = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/sbin", "/opt/nvidia/bin", "/usr/local/cuda/bin")
"""Where the driver's programs may be."""


def share_size(multiprocessors: int, ranks: int) -> int:
    """Return the multiprocessors of one of ``ranks`` equal shares."""
    return multiprocessors // ranks // GRANULE * GRANULE


def green_streams(ranks: int) -> list[Any]:
    """Return one stream per rank. Each runs its kernels on multiprocessors of its own.

    The green contexts live as long as the process.
    """
    import torch
    from cuda.bindings import driver

    def checked(result: tuple) -> Any:
        status, *values = result
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"green contexts: {status}")
        return values[0] if len(values) == 1 else values

    torch.zeros(1, device="cuda")  # the primary context must be active
    device = checked(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    resource = checked(driver.cuDeviceGetDevResource(device, kind))
    size, number = share_size(torch.cuda.get_device_properties(0).multi_processor_count, ranks), 0
    while number < ranks:
        if size <= 0:
            raise RuntimeError(f"the GPU's multiprocessors cannot be divided among {ranks} ranks")
        # Some GPUs give whole clusters only, and so fewer groups than asked for.
        groups, number, _ = checked(driver.cuDevSmResourceSplitByCount(ranks, resource, 0, size))
        size -= GRANULE
    streams = []
    for group in groups[:ranks]:
        description = checked(driver.cuDevResourceGenerateDesc([group], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = checked(driver.cuGreenCtxCreate(description, device, flags))
        handle = checked(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        streams.append(torch.cuda.ExternalStream(int(handle)))
    return streams


_KERNEL = """
extern "C" __global__ void where(int* number, int cycles) {
    unsigned int id;
    asm volatile("mov.u32 %0, %smid;" : "=r"(id));
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
    if (threadIdx.x == 0) number[blockIdx.x] = (int)id;
}
"""
_BLOCKS, _CYCLES = 1024, 100_000


def multiprocessors_of(stream: Any) -> frozenset[int]:
    """Return the numbers of the multiprocessors on which a stream's kernel runs."""
    import torch

    kernel = torch.cuda._compile_kernel(_KERNEL, "where")
    with torch.cuda.stream(stream):
        numbers = torch.full((_BLOCKS,), -1, dtype=torch.int32, device="cuda")
        kernel(grid=(_BLOCKS, 1, 1), block=(1024, 1, 1), args=[numbers, _CYCLES])
        torch.cuda.current_stream().synchronize()
    return frozenset(numbers.tolist()) - {-1}


def overlaps(shares: Sequence[frozenset[int]]) -> tuple[dict[str, object], list[str]]:
    """Return the sizes of shares and the number of multiprocessors in several, and a sentence if there are any."""
    shared = sum(map(len, shares)) - len(frozenset().union(*shares))
    values: dict[str, object] = {"multiprocessors": [len(share) for share in shares], "shared": shared}
    return values, [f"{shared} multiprocessors are in several shares"] if shared else []


def _matrix_products() -> Callable[[], object]:
    import torch

    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    return lambda: [matrix @ matrix for _ in range(20)]


def _passes_over_memory() -> Callable[[], object]:
    import torch

    wide = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    return lambda: [wide.add_(1) for _ in range(20)]


WORKS = {"matrix_products": _matrix_products, "passes_over_memory": _passes_over_memory}
"""What is timed alone and while all ranks do it. Each makes the work of one rank."""


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time of work on the current stream, by the device's clock, after one repeat that warms up."""
    import torch

    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[1:])


def mps_control() -> str | None:
    """Return the program that starts CUDA's multi-process service; ``None`` if there is none. The driver brings it."""
    return shutil.which("nvidia-cuda-mps-control", path=os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS]))


@contextmanager
def mps(limit: int | None) -> Iterator[Mapping[str, str]]:
    """Start CUDA's multi-process service, and yield the environment of processes that use it.

    Each of them may use ``limit`` percent of the multiprocessors. The service changes no setting of the GPU, and ends
    with the block.
    """
    program = mps_control()
    assert program is not None, "prove.py has looked for it"
    with tempfile.TemporaryDirectory(prefix="pipemem-mps-") as folder:
        environment = {f"CUDA_MPS_{name}_DIRECTORY": f"{folder}/{name}" for name in ("PIPE", "LOG")}
        for path in environment.values():
            Path(path).mkdir()

        def control(*arguments: str, text: str = "") -> None:
            # Output goes to a file, because the service would keep a pipe open.
            with Path(folder, "output").open("a") as output:
                command = [program, *arguments]
                own = os.environ | environment
                subprocess.run(
                    command, env=own, input=text, text=True, stdout=output, stderr=output, timeout=20, check=True
                )

        control("-d")
        try:
            time.sleep(1)
            share = {} if limit is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(limit)}
            yield environment | share
        finally:
            control(text="quit\n")
