"""Start fresh processes for the ranks of a benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable


def run_ranks(target: Callable[..., None], arguments: tuple, count: int) -> None:
    """Call ``target(rank, *arguments)`` in so many processes, and wait for them. They share the cores, one thread each.

    They are forked from a process that has imported Megatron on the CPU lane: imports would take longer than most of what is
    measured.

    Args:
        target: a function of a module.
        arguments: of it; must be picklable.
        count: of ranks.
    """
    from torch import multiprocessing

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # Megatron warns of every GPU package it misses, on every rank
    multiprocessing.set_forkserver_preload(["megatron_pipemem.cpu.warm"])
    multiprocessing.start_processes(target, arguments, nprocs=count, start_method="forkserver")
