"""Run CUDA-only Megatron-Core on CPU ranks over gloo: for the quickstart, the tests and teaching.

Megatron asks ``torch.cuda`` for devices, streams and random generators, and NCCL for its process groups. `activate`
replaces these in this process, until the process ends:

* ``cuda``            ``torch.cuda``: one device per local rank, streams and events that never wait, and CPU tensors;
* ``process_groups``  gloo process groups in place of NCCL's;
* ``upstream``        compiled helpers and fused CUDA extensions that Megatron-Core needs, and attention without them.

The arithmetic is PyTorch's own on CPU tensors, so losses are those of a real training run. Memory and speed of a GPU
are not imitated.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from typing import Any

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore import mark_cpu_ranks, on_cpu_ranks
from megatron_pipemem.tools.cpu.flags import cpu_flags

__all__ = ["activate", "cpu_flags", "ignore_missing_packages", "missing_packages", "shorten_log"]

logger = logging.getLogger(__name__)

_MISSING = (
    ".*(Apex|Transformer Engine|transformer-engine|absl.logging|no accelerator is found|full scope is deprecated)"
)
_RANDOM = "megatron.core.tensor_parallel.random"
_ABOUT_EVERY_RANK = ("megatron.core.distributed", "megatron.core.datasets")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores, and one thread each keeps the order of sums fixed
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled, and the import alone takes seconds per rank
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron requires it for tensor parallelism
}


def activate(*, emulate_fused_gradients: bool = True, verbose: bool = False) -> None:
    """Make CUDA-only Megatron-Core run on this process's CPU. A second call changes nothing.

    It cannot be undone, so call it only in processes that train on CPU. ``emulate_fused_gradients`` emulates Apex's
    ``fused_weight_gradient_mlp_cuda`` for Megatron's default ``--gradient-accumulation-fusion``. ``verbose`` shows
    warnings about missing GPU packages. Raise an UnsupportedError if ``megatron.core`` is imported already.
    """
    if on_cpu_ranks():
        return
    if "megatron.core" in sys.modules:
        raise UnsupportedError(
            "enabled-too-late",
            "megatron_pipemem.tools.cpu.activate() came after `import megatron.core`, which binds CUDA functions by name; "
            "call it first, or start the script with `pipemem run --cpu`",
        )
    if not verbose:
        ignore_missing_packages()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    import torch

    from megatron_pipemem.tools.cpu import cuda, process_groups, upstream

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cuda.install()
    process_groups.install()
    if "transformer_engine_torch" not in sys.modules:  # it needs a GPU, so Megatron must not import its package
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    upstream.install(emulate_fused_gradients)
    mark_cpu_ranks()


def ignore_missing_packages() -> None:
    """Ignore the warnings of Megatron and PyTorch about packages and devices that CPU ranks do not use."""
    warnings.filterwarnings("ignore", _MISSING, UserWarning, r"megatron\.|torch\.utils\.data\.")
    logging.getLogger(_RANDOM).addFilter(_is_about_a_gpu)


def missing_packages() -> str | None:
    """Return a line for the log that names the GPU packages that are not installed; ``None`` if all are."""
    missing = [name for name in ("apex", "transformer_engine") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{' and '.join(missing)}: not found and not needed here; --verbose shows Megatron's warnings about it"


def _is_about_a_gpu(record: logging.LogRecord) -> bool:
    """Return whether to log a record: all but Megatron's warning of a changed CPU random state, intended here."""
    return not record.getMessage().startswith("CPU RNG state changed")


def shorten_log() -> None:
    """Shorten this rank's log: one line each for Megatron's list of arguments and for missing GPU packages.

    Ranks other than 0 show no INFO lines of ``megatron.core.distributed`` and ``megatron.core.datasets``.
    """
    if (said := missing_packages()) is not None:
        logger.info("CPU ranks: %s", said)
    if os.environ.get("RANK", "0") != "0":
        for name in _ABOUT_EVERY_RANK:
            logging.getLogger(name).setLevel(logging.WARNING)
    if (arguments := sys.modules.get("megatron.training.arguments")) is not None:
        arguments.__dict__["_print_args"] = _count_arguments


def _count_arguments(title: str, arguments: Any) -> None:
    logger.info("Megatron has %d %s; --verbose lists them", len(vars(arguments)), title)
