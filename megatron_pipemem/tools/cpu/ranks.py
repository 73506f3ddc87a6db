"""Start and kill the ranks of a run on this machine.

By default, ranks are forks of a process that has imported Megatron. The import takes ten seconds of a core, and with
torchrun every rank of every run repeats it. The fork server of `multiprocessing` imports it once. The server neither
trains nor starts threads, and every run still gets new processes.
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
_FORKED.set_forkserver_preload(["megatron_pipemem.tools.cpu.warm"])
_NEW = multiprocessing.get_context("spawn")


def start_ranks(
    target: Callable[..., object], arguments: Sequence[tuple], logs: Sequence[Path], *, forked: bool = True
) -> list[BaseProcess]:
    """Start one process per rank, with the environment variables of torchrun, and append its output to its log.

    Return the running processes, in the order of ranks. ``arguments`` and ``logs`` have one entry per rank: the
    arguments of ``target``, and the file of the log. ``target`` must be a function of a module, not of a script. Forked
    ranks have Megatron imported and `cpu.activate` called. Without ``forked``, ranks are new interpreters. Each process
    leads its own session, so `end_ranks` also ends the processes that it started.
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
    """Kill the ranks and the processes that they started, such as a checkpoint writer, and wait for the ranks."""
    for process in processes:
        assert process.pid is not None, "the process has been started"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # a rank that has just started leads no session yet
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
