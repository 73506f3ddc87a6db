"""What an experiment needs of the machine, and the sentence for a machine that lacks it, before anything starts."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
from collections.abc import Callable

import shares

NCCL_NEEDED = (2, 30)
"""The first NCCL that lets ranks share a GPU."""
MULTIPROCESSORS_NEEDED = 64
"""With fewer, a share of eight ranks is smaller than ``shares.GRANULE``."""


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def multiprocessors() -> int:
    import torch

    return torch.cuda.get_device_properties(0).multi_processor_count


def other_processes() -> list[str]:
    """Return the processes that use the GPU, other than this one and the one that has started it."""
    import torch

    gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", "-i", gpu, "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    own = {str(os.getpid()), str(os.getppid())}
    return [process for process in listed if process.split(",")[0] not in own]


def nccl_version() -> tuple[int, ...]:
    """Return the version of the library that is loaded. ``torch.cuda.nccl.version()`` is that of torch's headers."""
    import torch  # noqa: F401, loads NCCL

    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10000)
    return major, *divmod(rest, 100)


def gpu_fault() -> str | None:
    return None if has_gpu() else "no CUDA GPU here, so there is nothing to measure; --rehearse runs the program on CPU"


def size_fault() -> str | None:
    count = multiprocessors()
    if count >= MULTIPROCESSORS_NEEDED:
        return None
    return f"the GPU has {count} multiprocessors, too few to divide among ranks; take one with {MULTIPROCESSORS_NEEDED}"


def company_fault() -> str | None:
    try:
        others = other_processes()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"nvidia-smi does not say which processes use the GPU: {error}"
    if not others:
        return None
    return f"other processes use the GPU, and would change the times; end them first: {'; '.join(others)}"


def bindings_fault() -> str | None:
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"):
        return None
    return "cuda-bindings is missing, which makes green contexts; pip install cuda-bindings"


def mps_fault() -> str | None:
    if shares.mps_control() is not None:
        return None
    return (
        "nvidia-cuda-mps-control is missing, without which processes take turns on the GPU; it comes with NVIDIA's "
        "driver, and the container must be given it"
    )


def nccl_fault() -> str | None:
    version = nccl_version()
    if version[:2] >= NCCL_NEEDED:
        return None
    return (
        f"NCCL {'.'.join(map(str, version))} refuses ranks that share a GPU, 2.30 takes them: "
        "pip install --no-deps --target nccl 'nvidia-nccl-cu13>=2.30', "
        "then LD_PRELOAD=$PWD/nccl/nvidia/nccl/lib/libnccl.so.2; without a network build NCCL there with "
        "make -j src.build NVCC_GENCODE=-gencode=arch=compute_90,code=sm_90"
    )


FAULTS: dict[str, tuple[Callable[[], str | None], ...]] = {
    "one_process": (company_fault, size_fault, bindings_fault),
    "processes": (company_fault, size_fault, mps_fault, nccl_fault),
    "waiting_kernels": (company_fault, size_fault),
    "four_ranks": (nccl_fault,),
    "waiting_hosts": (nccl_fault,),
}
"""By program, beside the GPU that all need."""


def fault(program: str) -> str | None:
    """Return why this machine cannot run a program, and what to do; ``None`` if it can."""
    return next(filter(None, (check() for check in (gpu_fault, *FAULTS.get(program, ())))), None)
