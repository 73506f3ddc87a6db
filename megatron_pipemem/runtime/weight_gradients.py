"""Hold weight gradients that wait for their W.

A linear layer that splits its backward computes the input gradient when autograd reaches it and leaves the
weight-gradient GEMM in the queue of its stage and microbatch. Splitting at the layer keeps no graph alive, unlike
running autograd twice over a retained graph.

Sequence parallelism gathers what a linear layer multiplies along the sequence. A layer that gathers calls ``remember``. A
queue that has to keep the gathered tensor asks ``shard_of``, keeps the shard, which exists anyway, and gathers it again.
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
"""Set on a weight to what wants to be told when a microbatch's gradient of it is complete."""
EARLY = "_pipemem_early"
"""Set on a weight whose gradient is computed in I."""

_AHEAD = 2
"""How many GEMMs before its own a gather starts. A projection's GEMM is shorter than the gather for the next layer, and the
long GEMMs of the MLP hide both."""


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return where the gradient of a parameter accumulates: Megatron's ``main_grad``, or ``grad``, which is made if there is
    none.
    """
    main = getattr(parameter, "main_grad", None)
    if main is not None:
        return main
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class DeferredWeightGradient(Protocol):
    """One weight-gradient GEMM, ready to run."""

    weight: torch.Tensor | None = None
    """Whose ``grad`` the GEMM adds to, when others may follow; ``None`` when the work is complete by itself."""

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Return the parameters whose gradients are complete only after this work."""
        return () if self.weight is None else (self.weight,)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what the work keeps alive, for the activation ledger."""

    def begin(self) -> None:
        """Start what has to be communicated, to run beside other GEMMs. Called once, before ``run``."""
        return  # nothing, for most

    def run(self) -> None:
        """Compute the gradient and hand it to whatever accumulates it. Called once, without grad mode."""


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
        """Run and drop everything pending. Saved inputs carry ``requires_grad``, hence no grad mode.

        A weight that the forward used several times is reported once, with the sum of its gradients, as autograd does.
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
                del work  # and what it has gathered, before the next gather


class ImmediateWeightGradients(WeightGradientQueue):
    """Runs what it is given at once, within the backward: no split, but layers that save nothing but their input.

    Layers that can give autograd their weight's gradient do that instead.
    """

    def put(self, work: DeferredWeightGradient) -> None:
        with torch.no_grad():
            work.begin()
            work.run()


def _report(weight: torch.Tensor) -> None:
    """Say, as the hook behind AccumulateGrad would have done, that ``grad`` is complete."""
    ready = getattr(weight, GRADIENT_READY, None)
    if ready is not None:
        ready()


# The queue that split layers should feed. Process-wide and not thread-local on purpose: autograd runs recomputed forwards
# on its own threads. Set only while an action runs.
_collecting: WeightGradientQueue | None = None


class collecting:
    """Make ``queue`` the one that layers run within this context split their backward into; ``None`` for no split.

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
    """Return the queue of the action that is running, or ``None`` when its backward is not split."""
    return _collecting


def is_early(weight: torch.Tensor) -> bool:
    """Return whether a weight's gradient is computed in I."""
    return hasattr(weight, EARLY)


def defers() -> bool:
    """Return whether the weight gradients of the action that is running wait for a W."""
    return _collecting is not None and not isinstance(_collecting, ImmediateWeightGradients)


@dataclass(frozen=True)
class Arriving:
    """A tensor that may still be arriving.

    Args:
        tensor: complete after ``wait``.
        work: the communication, or ``None`` if the tensor is complete.
        source: what the communication reads, which must stay alive until it ends.
    """

    tensor: Any
    work: dist.Work | None = None
    source: Any = None

    def wait(self) -> Any:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor.

    Args:
        tensor: the part. Transformer Engine's quantised tensors are no torch tensors.
        gather: starts to gather the parts of all ranks. ``Arriving`` itself for a tensor that is whole.
    """

    tensor: Any
    gather: Callable[[Any], Arriving]

    def begin(self) -> Arriving:
        return self.gather(self.tensor)


def gather_rows(shard: torch.Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start to gather ``[s/t, ...]`` of the ``t`` ranks of a group into ``[s, ...]``."""
    shard = shard.contiguous()
    whole = torch.empty((shard.size(0) * group.size(), *shard.shape[1:]), dtype=shard.dtype, device=shard.device)
    return Arriving(whole, dist.all_gather_into_tensor(whole, shard, group=group, async_op=True), shard)


# A shard is kept no longer than the tensor that was gathered from it.
_shards: Any = WeakIdKeyDictionary()


def remember(whole: Any, shard: Shard) -> None:
    """Remember which shard a tensor was gathered from, as long as the tensor lives."""
    _shards[whole] = shard


def shard_of(whole: Any) -> Shard | None:
    """Return the shard that a tensor was gathered from, or ``None`` if it is not known."""
    return None if whole is None else _shards.get(whole)
