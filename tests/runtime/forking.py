"""Ranks of a program that has imported PyTorch already, which takes longer than what they do."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import wait


def fork_ranks(count: int, run: Callable[..., None], *arguments: object) -> int:
    """Call ``run(*arguments)`` on every rank of a gloo job. A rank that fails ends the others, who may wait for it.

    Returns:
        An exit code: 0 if no rank failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run, args=(rank, count, port, run, arguments)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    running = ranks
    while running and not any(rank.exitcode for rank in ranks):
        wait([rank.sentinel for rank in running])
        running = [rank for rank in running if rank.is_alive()]
    for rank in running:
        rank.kill()
    return int(any(rank.exitcode != 0 for rank in ranks))


def _run(rank: int, count: int, port: int, run: Callable[..., None], arguments: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    run(*arguments)
    dist.barrier()
    dist.destroy_process_group()
