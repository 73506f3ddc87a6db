"""Weight gradients that wait for their W.

A linear layer that splits its backward computes the input gradient when autograd reaches it. It puts the weight-gradient
GEMM into the queue of its stage and microbatch. A split at the layer keeps no graph alive, unlike two runs of autograd over
a retained graph.

With sequence parallelism, a linear layer gathers its input along the sequence. The layer then calls ``remember``. A queue
that must keep the gathered tensor calls ``shard_of``, keeps only the shard, which exists anyway, and gathers it again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

GRADIENT_READY = "_pipemem_gradient_ready"
"""Attribute of a weight: the function to call when a microbatch's gradient of the weight is complete."""
EARLY = "_pipemem_early"
"""Attribute of a weight whose gradient is computed in I."""

_AHEAD = 2
"""Number of GEMMs between the start of a gather and its own GEMM. A projection's GEMM is shorter than the next layer's gather,
but together with a long GEMM of the MLP it hides that gather."""


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the tensor in which a parameter's gradient accumulates: Megatron's ``main_grad``, or else ``grad``."""
    main = getattr(parameter, "main_grad", None)
    if main is not None:
        return main
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class DeferredWeightGradient(Protocol):
    """One weight-gradient GEMM, ready to run."""

    weight: torch.Tensor | None = None
    """The weight whose gradient other works may add to; ``None`` if this work alone completes the gradient."""

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Return the parameters whose gradients are complete only after this work."""
        return () if self.weight is None else (self.weight,)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the work keeps alive, for the activation ledger."""

    def begin(self) -> None:
        """Start the work's communication, if any, so that it overlaps other GEMMs. Called once, before ``run``."""
        return

    def run(self) -> None:
        """Compute the gradient and add it to the accumulated one. Called once, without grad mode."""


class WeightGradientQueue:
    """The deferred weight gradients of one stage and microbatch, in the order autograd reached their layers."""

    def __init__(self) -> None:
        self._pending: list[DeferredWeightGradient] = []

    def put(self, work: DeferredWeightGradient) -> None:
        self._pending.append(work)

    def tensors(self) -> Iterator[torch.Tensor]:
        for work in self._pending:
            yield from work.tensors

    def parameters(self) -> set[torch.Tensor]:
        """Return the parameters whose gradients are complete only after ``run``."""
        return {parameter for work in self._pending for parameter in work.parameters}

    def run(self) -> None:
        """Run and drop all pending works, without grad mode because saved inputs have ``requires_grad``.

        A weight that the forward used several times is reported once, with the sum of its gradients, as in autograd.
        """
        pending, self._pending = self._pending, []
        pending.reverse()
        uses = Counter(id(work.weight) for work in pending)
        begun: deque[DeferredWeightGradient] = deque()
        with torch.no_grad():
            while pending or begun:
                while pending and len(begun) <= _AHEAD:
                    begun.append(pending.pop())
                    begun[-1].begin()
                work = begun.popleft()
                work.run()
                uses[id(work.weight)] -= 1
                if work.weight is not None and not uses[id(work.weight)]:
                    _report(work.weight)
                del work  # frees its gathered tensor before the next gather


class ImmediateWeightGradients(WeightGradientQueue):
    """Run each work at once, within the backward, so that layers save only their input although nothing is split.

    Layers that can return their weight's gradient to autograd do that instead.
    """

    def put(self, work: DeferredWeightGradient) -> None:
        with torch.no_grad():
            work.begin()
            work.run()


def _report(weight: torch.Tensor) -> None:
    """Report a complete ``grad``, as the hook after AccumulateGrad would."""
    ready = getattr(weight, GRADIENT_READY, None)
    if ready is not None:
        ready()


# The queue that split layers use while an action runs. It is global and not thread-local, because autograd runs recomputed
# forwards on its own threads.
_collecting: WeightGradientQueue | None = None


class collecting:
    """Make ``queue`` the queue of layers that run within this block; ``None`` for no split.

    A class, because every forward and backward enters one and a generator would take three times as long.
    """

    __slots__ = ("_outer", "_queue")

    def __init__(self, queue: WeightGradientQueue | None):
        self._queue = queue

    def __enter__(self) -> None:
        global _collecting
        self._outer, _collecting = _collecting, self._queue

    def __exit__(self, *exception: object) -> None:
        global _collecting
        _collecting = self._outer


def current_queue() -> WeightGradientQueue | None:
    """Return the queue of the running action, or ``None`` if its backward is not split."""
    return _collecting


def is_early(weight: torch.Tensor) -> bool:
    """Return whether a weight's gradient is computed in I."""
    return hasattr(weight, EARLY)


def defers() -> bool:
    """Return whether the weight gradients of the running action wait for a W."""
    return _collecting is not None and not isinstance(_collecting, ImmediateWeightGradients)


@dataclass(frozen=True)
class Arriving:
    """A tensor that may still be arriving. It is complete after ``wait``."""

    tensor: Any
    work: dist.Work | None = None  # the communication; ``None`` if the tensor is complete
    source: Any = None  # the input of the communication, kept alive until the communication ends

    def wait(self) -> Any:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor."""

    tensor: Any  # Transformer Engine's quantised tensors have a type of their own
    gather: Callable[
        [Any], Arriving
    ]  # starts to gather the parts of all ranks; ``Arriving`` itself if the tensor is whole

    def begin(self) -> Arriving:
        return self.gather(self.tensor)


def gather_rows(shard: torch.Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start to gather the shards ``[s/t, ...]`` of a group's ``t`` ranks into ``[s, ...]``."""
    shard = shard.contiguous()
    whole = torch.empty((shard.size(0) * group.size(), *shard.shape[1:]), dtype=shard.dtype, device=shard.device)
    return Arriving(whole, dist.all_gather_into_tensor(whole, shard, group=group, async_op=True), shard)


# A shard is kept only as long as the tensor that was gathered from it.
_shards: Any = WeakIdKeyDictionary()


def remember(whole: Any, shard: Shard) -> None:
    """Remember the shard of a gathered tensor, as long as the tensor lives."""
    _shards[whole] = shard


def shard_of(whole: Any) -> Shard | None:
    """Return the shard of a gathered tensor, or ``None`` if it is unknown."""
    return None if whole is None else _shards.get(whole)
