"""Start ranks on this machine at once: fork them from a process that has imported Megatron.

Importing Megatron takes ten seconds of a core, and torchrun pays that for every rank of every run. Here it is paid once, by
`multiprocessing`'s fork server, which neither trains nor starts threads. Every run gets new processes all the same.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["megatron_pipemem.cpu.warm"])
_NEW = multiprocessing.get_context("spawn")


def start_ranks(
    target: Callable[..., object], arguments: Sequence[tuple], logs: Sequence[Path], *, forked: bool = True
) -> list[BaseProcess]:
    """Start one process per rank, with the environment that torchrun gives its ranks and what it prints appended to its log.

    ``target`` is a function of a module, not of a script. Forked ranks have Megatron imported and the CPU lane active, others
    are new interpreters. Each process leads a session of its own: `end_ranks` ends what it started, too.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = len(arguments)
    processes: list[BaseProcess] = []
    for rank, (own, log) in enumerate(zip(arguments, logs, strict=True)):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = (_FORKED if forked else _NEW).Process(
            target=_run, args=(environment, str(log), target, own), name=f"rank {rank}"
        )
        process.start()
        processes.append(process)
    return processes


def end_ranks(processes: Sequence[BaseProcess]) -> None:
    """Kill what still runs, with everything that it started: Megatron's checkpoint writer is a process of its own."""
    for process in processes:
        assert process.pid is not None, "it has been started"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def _run(environment: dict[str, str], log: str, target: Callable[..., object], arguments: tuple) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.close(file)
    os.environ.update(environment)
    target(*arguments)
