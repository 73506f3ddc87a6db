"""Let all ranks of a job agree at a step boundary."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_pipemem.errors import PipememError, UnsupportedError


def decided_by_rank_zero[T](decide: Callable[[], T]) -> T:
    """Return on every rank what world rank 0 decides. Every rank of the job must call this at the same time.

    A search stops by the clock, so two ranks that search may find different schedules.

    Args:
        decide: called on rank 0 alone, or on every process where there is no process group; its result is pickled.

    Raises:
        UnsupportedError: rank 0 could not decide; on every rank with the same message.
    """
    if not dist.is_initialized():
        return decide()
    decided: T | None = None
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            decided = decide()
        except Exception as error:  # the other ranks are waiting and must hear of it, whatever it is
            failure = error
    code = failure.code if isinstance(failure, PipememError) else None
    payload: list[Any] = [(decided, None if failure is None else f"{failure}", code)]
    dist.broadcast_object_list(payload, src=0)
    of_rank_zero, message, code = payload[0]
    if failure is not None and code is None:
        raise failure
    if message is not None:
        if code is None:
            code, message = "other-rank-failed", f"rank 0 failed to plan: {message}"
        raise UnsupportedError(code, message)
    return of_rank_zero


def done_by_all[T](do: Callable[[], T]) -> T:
    """Return what this rank does, once every rank has done it. Every rank of the job must call this at the same time.

    A rank that fails alone would leave the others waiting in the next collective.

    Args:
        do: called on every rank.

    Raises:
        UnsupportedError: another rank failed; that one raises what it failed with.
    """
    done: Any = None
    failure: Exception | None = None
    try:
        done = do()
    except Exception as error:  # the other ranks must hear of it, whatever it is
        failure = error
    failures = gather(None if failure is None else f"{failure}" or type(failure).__name__)
    if failure is not None:
        raise failure
    for rank, message in enumerate(failures):
        if message is not None:
            raise UnsupportedError("other-rank-failed", f"rank {rank} failed: {message}")
    return done


def is_first_rank() -> bool:
    """Return whether this process speaks for the job: world rank 0, also before there is a process group."""
    return dist.get_rank() == 0 if dist.is_initialized() else int(os.environ.get("RANK", 0)) == 0


def tell(logger: logging.Logger, message: str, *arguments: object, level: int = logging.INFO) -> None:
    """Log a message once for the whole job: every rank knows it, and there may be hundreds.

    Args:
        logger: of the module that tells it.
        message: with ``%`` placeholders.
        arguments: for these.
        level: of ``logging``.
    """
    if is_first_rank():
        logger.log(level, message, *arguments)


def gather[T](contribution: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's contribution, on every rank, in the order of the group's ranks; by default of the world's."""
    if not dist.is_initialized():
        return [contribution]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, contribution, group=group)
    return gathered


def agree(digest: str, group: dist.ProcessGroup) -> None:
    """Raises:
    UnsupportedError: the ranks of the pipeline are about to run different programs.
    """
    digests = gather(digest, group)
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise UnsupportedError(
            "ranks-differ",
            f"pipeline ranks {different} built another schedule than rank 0; start every rank with the same "
            "--pipemem flags, CUDA and NCCL variables, package versions and number of microbatches",
        )
