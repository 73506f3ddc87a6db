"""Runs CUDA-only Megatron-Core on CPU ranks over gloo: for the quickstart, the tests and teaching.

Megatron asks ``torch.cuda`` for devices, streams and random generators, and NCCL for its process groups. `activate`
puts stand-ins in those places, for this process and until it ends:

* ``surface``         ``torch.cuda`` itself: one device per local rank, streams and events that never wait;
* ``redirect``        every request for a CUDA tensor becomes a CPU tensor;
* ``process_groups``  NCCL process groups become gloo process groups;
* ``quiet``           nothing: it leaves out of the log what Megatron says because there is no GPU;
* ``upstream``        what Megatron-Core insists on beyond PyTorch: compiled helpers and fused CUDA extensions.

The arithmetic is PyTorch's own on CPU tensors, so losses are those of a real training run. Memory and speed of a GPU
are not imitated.
"""

from __future__ import annotations

import os
import sys

from megatron_pipemem.cpu import quiet
from megatron_pipemem.errors import UnsupportedError

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores; one thread each also keeps the order of sums fixed
    "TORCHDYNAMO_DISABLE": "1",  # nothing to compile for; the import alone costs each rank seconds
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron demands it for tensor parallelism
}

_active = False


def is_active() -> bool:
    """Return whether `activate` has run in this process."""
    return _active


def activate(*, emulate_fused_gradients: bool = True, verbose: bool = False) -> None:
    """Make CUDA-only Megatron-Core run on this process's CPU. Calling it again changes nothing.

    It cannot be undone: run it in processes that train on CPU and nowhere else.

    Args:
        emulate_fused_gradients: also supply Apex's ``fused_weight_gradient_mlp_cuda``, so that Megatron's default
            ``--gradient-accumulation-fusion`` works.
        verbose: show Megatron's warnings about missing GPU packages.

    Raises:
        UnsupportedError: Megatron-Core is imported already; it has bound CUDA functions by name.
    """
    global _active
    if _active:
        return
    if "megatron.core" in sys.modules:
        raise UnsupportedError(
            "enabled-too-late",
            "megatron_pipemem.cpu.activate() came after `import megatron.core`, which keeps CUDA functions by name; "
            "call it first, or start the script with `pipemem run --cpu`",
        )
    if not verbose:
        quiet.ignore_missing_packages()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    import torch

    from megatron_pipemem.cpu import process_groups, redirect, surface, transformer_engine, upstream

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    surface.install()
    redirect.install()
    process_groups.install()
    transformer_engine.install()
    upstream.install(emulate_fused_gradients)
    _active = True
