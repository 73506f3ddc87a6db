"""Start fresh processes for the ranks of a benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable


def run_ranks(target: Callable[..., None], arguments: tuple, count: int, *, has_imported_megatron: bool = True) -> None:
    """Call ``target(rank, *arguments)`` in ``count`` processes, and wait for them. They share the cores, one thread each.

    They are forked from a process that has imported Megatron on the CPU lane, because imports would take longer than most
    measurements. Without ``has_imported_megatron``, they have imported nothing, and ``target`` may change the module
    search path first. ``target`` is a function of a module, and ``arguments`` must be picklable.
    """
    from torch import multiprocessing

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # Megatron warns about every missing GPU package on every rank
    multiprocessing.set_forkserver_preload(["megatron_pipemem.tools.cpu.warm"])
    method = "forkserver" if has_imported_megatron else "spawn"
    multiprocessing.start_processes(target, arguments, nprocs=count, start_method=method)
