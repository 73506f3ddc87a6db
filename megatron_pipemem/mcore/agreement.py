"""Share decisions and numbers between ranks, so that all of them run the same step.

``Groups`` are Megatron's process groups along which a value reaches all ranks of a model, or of one copy of it. Nothing
is exchanged with other ranks of the job, because these may be in another step, or in none.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pipemem.errors import PipememError, UnsupportedError

Groups = Sequence[dist.ProcessGroup]


def groups_of_copy(groups: ProcessGroupCollection, pipeline: dist.ProcessGroup) -> Groups:
    """Return the tensor-, context- and pipeline-parallel groups of this rank that have more than one rank.

    If a value is broadcast along these groups, in this order, it reaches all ranks of a copy of the model.
    """
    return [group for group in (groups.tp, groups.cp, pipeline) if group is not None and group.size() > 1]


def groups_of_model(groups: ProcessGroupCollection, pipeline: dist.ProcessGroup) -> Groups:
    """Return the groups of ``groups_of_copy`` and the data-parallel group: they reach all ranks that train a model."""
    data = groups.dp if groups.dp is not None else groups.dp_cp
    return [*groups_of_copy(groups, pipeline), *([data] if data is not None and data.size() > 1 else [])]


def run_on_all_ranks[T](do: Callable[[], T], groups: Groups | None = None) -> T:
    """Run ``do`` on every rank, and return this rank's result when all ranks have succeeded.

    Every rank of the groups calls this at the same time; by default, every rank of the job. If ``do`` fails on a rank,
    that rank raises its own error, and all others an UnsupportedError, with the code of a PipememError or
    ``other-rank-failed``.
    """
    done: Any = None
    failure: Exception | None = None
    try:
        done = do()
    except Exception as error:  # the other ranks must hear of it, whatever it is
        failure = error
    failures = gather(None if failure is None else _refusal_of(failure), groups)
    if failure is not None:
        raise failure
    for refusal in failures:
        if refusal is not None:
            raise UnsupportedError(*refusal)
    return done


def _refusal_of(failure: Exception) -> tuple[str, str]:
    """Return the code and the message of this rank's failure, for other ranks."""
    if isinstance(failure, PipememError):
        return failure.code, f"{failure}"
    rank = dist.get_rank() if dist.is_initialized() else 0
    return "other-rank-failed", f"rank {rank} failed: {f'{failure}' or type(failure).__name__}"


def gather[T](contribution: T, groups: Groups | None = None) -> list[T]:
    """Return on every rank the contributions of all ranks that the groups reach, in one order.

    For one group, the order is that of its ranks. By default, all ranks of the job contribute. Without a process group,
    the result has only this process's contribution.
    """
    if not dist.is_initialized():
        return [contribution]
    seen = [contribution]
    for group in (dist.group.WORLD,) if groups is None else groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, seen, group=group)
        seen = [value for values in gathered for value in values]
    return seen


def is_on_one_host(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of the group are on one host. Every rank of it calls this at the same time."""
    return len(set(gather(socket.gethostname(), [group]))) == 1


def agree(digest: str, group: dist.ProcessGroup) -> None:
    """Raise an UnsupportedError if the ranks of the pipeline have different hashes of their next program.

    ``digest`` is the hash of this rank's program. Every rank of ``group``, the pipeline, calls this at the same time.
    """
    digests = gather(digest, [group])
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise UnsupportedError(
            "ranks-differ",
            f"pipeline ranks {different} built another schedule than rank 0; start every rank with the same "
            "--pipemem flags, CUDA and NCCL variables, package versions and number of microbatches",
        )


# Only the first rank of a tensor-parallel group reads data, and only on the first and the last stage. Facts about a batch
# that all ranks of a copy of the model need are sent in one small message along each of its tensor-parallel,
# context-parallel and pipeline groups.


_UNKNOWN, _KNOWN, _FAILED = range(3)


def agreed_numbers(
    what: str, tell: Callable[[], Sequence[float] | None], size: int, groups: Groups
) -> tuple[float, ...]:
    """Return on every rank of the groups the ``size`` numbers that at least one of the ranks knows.

    Every rank of the groups calls this at the same time. ``tell`` returns the numbers of this rank, or ``None`` if this
    rank does not know them. ``what`` names the numbers in messages, as in "factors of microbatches". Every rank raises
    an UnsupportedError if no rank knows the numbers, or two ranks disagree. If ``tell`` fails or returns another count
    of numbers on a rank, that rank raises its own error, and every other rank an UnsupportedError.
    """
    numbers, failure = None, None
    try:
        numbers = tell()
        if numbers is not None and len(numbers) != size:
            raise UnsupportedError(
                "wrong-count", f"this rank has {len(numbers)} {what}, and the step needs {size}; give as many"
            )
    except Exception as error:  # the other ranks must hear of it, whatever it is
        failure = error
    # Maxima of the numbers and of the negated numbers give the greatest and the least. If these differ, ranks disagree.
    shared = torch.full((1 + 2 * size,), -torch.inf, dtype=torch.float64)
    shared[0] = _FAILED if failure is not None else _UNKNOWN if numbers is None else _KNOWN
    if failure is None and numbers is not None:
        shared[1:] = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.float64)
    shared = shared.to(torch.cuda.current_device())
    for group in groups:
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    state, *values = shared.tolist()
    if state == _FAILED:
        _raise_everywhere(what, failure, groups)
    if state == _UNKNOWN:
        raise UnsupportedError(
            "data-iterator",
            f"no rank of this pipeline reads data from an iterator, so the {what} are unknown; pass a data "
            "iterator to the ranks of the first or the last stage",
        )
    greatest, least = values[:size], [-value for value in values[size:]]
    for number, (most, fewest) in enumerate(zip(greatest, least, strict=True)):
        if most != fewest:
            raise UnsupportedError(
                "ranks-differ",
                f"ranks that read the same batch disagree on the {what}: number {number} is {fewest:g} on one and {most:g} on "
                "another; let the first and the last stage, and all context-parallel ranks, read the same microbatches",
            )
    return tuple(greatest)


def largest_numbers(numbers: Sequence[float], group: dist.ProcessGroup) -> tuple[float, ...]:
    """Return on every rank of a group the elementwise maximum of the ranks' ``numbers``.

    Every rank of the group calls this at the same time, with equally many numbers.
    """
    largest = torch.tensor(numbers, dtype=torch.float64).to(torch.cuda.current_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return tuple(largest.tolist())


def decide_on_first_rank[T](decide: Callable[[], T], groups: Groups | None = None) -> T:
    """Run ``decide`` on the rank that is first in all groups, and return its result on every rank of the groups.

    Every rank of the groups calls this at the same time. By default there is one group, the whole job. A search ends
    after a time limit, so two ranks that search may find different schedules. The result is sent pickled. A
    PipememError of ``decide`` is raised on every rank. Any other error is raised on the rank that ran it, and an
    UnsupportedError elsewhere. Without a process group, this process runs ``decide`` itself.
    """
    if groups is None:
        world: Any = dist.group.WORLD
        groups = [world] if dist.is_initialized() else []
    payload: list[Any] = [None, None]
    failure: Exception | None = None
    if all(group.rank() == 0 for group in groups):
        try:
            payload[0] = decide()
        except Exception as error:  # the other ranks are waiting and must hear of it, whatever it is
            failure = error
            is_ours = isinstance(error, PipememError)
            payload[1] = error if is_ours else UnsupportedError("other-rank-failed", f"the first rank failed: {error}")
    for group in groups:
        dist.broadcast_object_list(payload, src=dist.get_global_rank(group, 0), group=group)
    decided, remote_failure = payload
    if remote_failure is not None:
        raise failure or remote_failure
    return decided


def _raise_everywhere(what: str, failure: Exception | None, groups: Groups) -> None:
    """Raise on every rank of the groups its own ``failure``, or an UnsupportedError with that of another rank."""
    refusals = gather(None if failure is None else _refusal_of(failure), groups)
    refusal = next(filter(None, refusals))
    if failure is not None:
        raise failure
    code, message = refusal
    raise UnsupportedError(code, f"the {what} are unknown: {message}")
