"""Defer weight gradients from the backward I to a later W.

A linear layer that splits its backward computes the input gradient when autograd reaches it. It puts the product for
the weight gradient into the queue of its stage and microbatch. This keeps no graph alive, unlike two runs of autograd
over a retained graph.

Under sequence parallelism, some backwards gather a tensor along the sequence, and ``remember`` its shard. A deferred
weight gradient that needs the gathered tensor calls ``shard_of``. It then keeps only the shard, which exists anyway,
and gathers it again.

A W adds to a parameter's gradient past autograd. It may do so only if autograd would do no more than that: see
``is_plain``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

GRADIENT_READY = "_pipemem_gradient_ready"
"""Attribute of a weight: the function to call when a microbatch's gradient of the weight is complete."""
EARLY = "_pipemem_early"
"""Attribute of a weight whose gradient pass I computes, and not W."""
HOOKED = "_pipemem_hooked"
"""Attribute of a parameter with hooks on the autograd node that adds to its gradient (``AccumulatorHooks``)."""
_SHARD = "_pipemem_shard"
"""Attribute of a gathered tensor: its ``Shard``."""

_GATHERS_AHEAD = 2
"""Number of GEMMs between the start of a gather and its own GEMM. A projection's GEMM is shorter than the next layer's gather,
but together with a long GEMM of the MLP it hides that gather."""


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the tensor that accumulates a parameter's gradient: ``main_grad``, or else ``grad``.

    If the parameter has neither, give it a ``grad`` of zeros.
    """
    main = getattr(parameter, "main_grad", None)
    if main is not None:
        return main
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class DeferredWeightGradient(Protocol):
    """Work that computes one or more deferred weight gradients, with its operands."""

    weight: torch.Tensor | None = None
    """The weight whose gradient this work adds to, as other works may; the queue calls its hooks after the last of them.

    ``None`` if the work calls the hooks of its parameters itself.
    """

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Return the parameters whose gradients are incomplete until this work has run."""
        return () if self.weight is None else (self.weight,)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that this work keeps in memory, for the activation ledger."""

    def begin(self) -> None:
        """Start this work's communication, if any, so that it overlaps other products. Called once, before ``run``."""
        return

    def run(self) -> None:
        """Compute each gradient and add it to its parameter's gradient. Called once, without grad mode."""


class WeightGradientQueue:
    """The deferred weight gradients of one stage and microbatch, in the order in which autograd found them."""

    def __init__(self) -> None:
        self._pending: list[DeferredWeightGradient] = []

    def put(self, work: DeferredWeightGradient) -> None:
        self._pending.append(work)

    @property
    def pending(self) -> Sequence[DeferredWeightGradient]:
        return self._pending

    def tensors(self) -> Iterator[torch.Tensor]:
        for work in self._pending:
            yield from work.tensors

    def parameters(self) -> set[torch.Tensor]:
        """Return the parameters whose gradients are incomplete until ``run``."""
        return {parameter for work in self._pending for parameter in work.parameters}

    def run(self) -> None:
        """Compute all deferred gradients, and empty the queue.

        Grad mode is off, because saved inputs have ``requires_grad``. A weight that the forward used several times is
        reported to DDP once, with the sum of its gradients, as in autograd.
        """
        pending, self._pending = self._pending, []
        pending.reverse()
        uses = Counter(id(work.weight) for work in pending)
        begun: deque[DeferredWeightGradient] = deque()
        with torch.no_grad():
            while pending or begun:
                while pending and len(begun) <= _GATHERS_AHEAD:
                    begun.append(pending.pop())
                    begun[-1].begin()
                work = begun.popleft()
                _run(work)
                uses[id(work.weight)] -= 1
                if work.weight is not None and not uses[id(work.weight)]:
                    _report(work.weight)
                del work  # frees its gathered tensor before the next gather


class ImmediateWeightGradients(WeightGradientQueue):
    """A queue that computes each weight gradient at once, within the backward.

    Layers then save only their input, although the backward is not split. A layer that can return its weight gradient
    to autograd does that instead.
    """

    def put(self, work: DeferredWeightGradient) -> None:
        with torch.no_grad():
            work.begin()
            _run(work)


class LateWeightGradients(WeightGradientQueue):
    """The queue of a backward that is not split, but whose weight gradients may run a little later within it.

    Example: while the next layer's gradient travels between ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unreported: dict[int, torch.Tensor] = {}

    def run_part(self) -> None:
        """Compute the gradients that are queued so far. DDP hears of them in ``run``, because a weight may come again."""
        pending, self._pending = self._pending, []
        with torch.no_grad():
            for work in pending:
                work.begin()
                _run(work)
                if work.weight is not None:
                    self._unreported[id(work.weight)] = work.weight

    def run(self) -> None:
        for work in self._pending:
            self._unreported.pop(id(work.weight), None)
        super().run()
        for weight in self._unreported.values():
            _report(weight)
        self._unreported.clear()


def _run(work: DeferredWeightGradient) -> None:
    work.run()
    for listen in _listeners:
        listen(work.parameters)


_listeners: list[Callable[[tuple[torch.Tensor, ...]], None]] = []


@contextmanager
def completing(listen: Callable[[tuple[torch.Tensor, ...]], None]) -> Iterator[None]:
    """Call ``listen`` within a ``with`` block with the parameters of every deferred weight gradient that has run."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def _report(weight: torch.Tensor) -> None:
    """Call DDP's function for a weight whose ``grad`` is complete, as autograd's hook would, if it has one."""
    ready = getattr(weight, GRADIENT_READY, None)
    if ready is not None:
        ready()


# The queue that split layers use while an action runs. It is global and not thread-local, because autograd runs recomputed
# forwards on its own threads.
_collecting: WeightGradientQueue | None = None


class collecting:
    """Let layers that run within a ``with`` block put their weight gradients into ``queue``.

    With ``None``, layers use their own backward.

    This is a class because every forward and backward uses it, and a generator would take three times as long.
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
    """Return the queue of the running action; ``None`` if layers use their own backward."""
    return _collecting


def is_early(weight: torch.Tensor) -> bool:
    """Return whether pass I computes the gradient of a weight, and not W: the weight is marked, or not plain."""
    return hasattr(weight, EARLY) or not is_plain(weight)


def is_plain(weight: torch.Tensor) -> bool:
    """Return whether autograd would only add a gradient to the weight's ``grad``, so that a W may do it instead.

    It would do more for a weight that is computed from other tensors, and for a parameter with hooks on its gradient.
    """
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and not hooks and not hasattr(weight, HOOKED)


class AccumulatorHooks:
    """Finds the hooks that a program has registered on the autograd nodes which add to the gradients of parameters.

    A parameter does not know these hooks, unlike those of ``Tensor.register_hook``. A handle that the registration
    returns refers to the dictionary of all hooks of the node. ``is_known`` says which hooks do not count.
    """

    def __init__(self, is_known: Callable[[Callable], bool]):
        self._is_known = is_known
        self._hooks: dict[torch.Tensor, tuple[Any, dict, dict]] = {}  # node, hooks after it, hooks before it

    def hooked(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters whose nodes have such hooks. A parameter that needs no gradient has no node."""
        return [
            parameter
            for parameter in parameters
            if parameter.requires_grad and any(map(self._counts, self._hooks_of(parameter)))
        ]

    def _hooks_of(self, parameter: torch.Tensor) -> Iterator[Callable]:
        if parameter not in self._hooks:
            node = accumulator_of(parameter)
            self._hooks[parameter] = (node, *map(_hooks_by, (node.register_hook, node.register_prehook)))
        _, after, before = self._hooks[parameter]
        yield from (*after.values(), *before.values())

    def _counts(self, hook: Callable) -> bool:
        return not self._is_known(hook)

    def forget_parameters(self) -> None:
        """Forget all parameters. Their hooks stay registered."""
        self._hooks.clear()


def accumulator_of(parameter: torch.Tensor) -> Any:
    """Return the autograd node that adds to the gradient of a parameter. It lives as long as something refers to it."""
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter)
    return view.grad_fn.next_functions[0][0]


@contextmanager
def hooks_left_out(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within a ``with`` block, let autograd add to the gradients of parameters without a call of the hooks on its nodes."""
    registered = [_hooks_by(accumulator_of(parameter).register_hook) for parameter in parameters]
    before = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in zip(registered, before, strict=True):
            hooks.update(kept)


def _hooks_by(register: Callable) -> dict:
    handle = register(lambda *_: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def defers() -> bool:
    """Return whether the weight gradients of the running forward or backward wait for a W."""
    return _collecting is not None and not isinstance(_collecting, (ImmediateWeightGradients, LateWeightGradients))


@dataclass(frozen=True)
class Arriving:
    """The result of a communication that may still run. It is complete after ``wait``."""

    tensor: Any
    work: dist.Work | None = None  # the communication; ``None`` if the tensor is complete
    source: Any = None  # the input of the communication, kept alive until the communication ends

    @property
    def is_complete(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait(self) -> Any:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor, and the function that gathers the parts of all ranks."""

    tensor: Any  # Transformer Engine's quantised tensors have a type of their own
    gather: Callable[
        [Any], Arriving
    ]  # starts to gather the parts of all ranks; ``Arriving`` itself if the tensor is whole

    def begin(self) -> Arriving:
        return self.gather(self.tensor)


def gather_rows(shard: torch.Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start to gather the shards ``[s/t, ...]`` of a group's ``t`` ranks into ``[s, ...]``, in the order of ranks.

    Every rank of the group gets the gathered tensor. It is complete after ``Arriving.wait``.
    """
    shard = shard.contiguous()
    gathered = torch.empty((shard.size(0) * group.size(), *shard.shape[1:]), dtype=shard.dtype, device=shard.device)
    return Arriving(gathered, dist.all_gather_into_tensor(gathered, shard, group=group, async_op=True), shard)


def remember(gathered: Any, shard: Shard) -> None:
    """Note on a tensor the shard from which it was gathered. The shard is kept as long as the tensor."""
    setattr(gathered, _SHARD, shard)


def shard_of(gathered: Any) -> Shard | None:
    """Return the shard from which a tensor was gathered; ``None`` if there is none."""
    return getattr(gathered, _SHARD, None)
