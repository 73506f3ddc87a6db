"""Capture the passes of a program as CUDA graphs, one graph per pass, and replay them.

A step of a rank is a fixed list of actions. In the step that captures, every pass is captured when its turn comes, and then
replayed, so this step trains, too. Later steps only replay. The order of the passes is the same in all these steps, and
all graphs share one pool of memory. So a pass finds the pool as it was when the pass was captured, and the pool needs the
memory that a step without graphs needs.

A pass reads from outside only tensors at fixed addresses, which are filled before its replay: arguments of the model, the
input of the stage, and the gradient of its output. Its result is copied from the pool to a fixed tensor within the graph,
and from there to memory of its own after the replay. So the life of messages, losses and batches is that of a step without
graphs, and nothing outside of a pass reads the pool.

    F: fill arguments and input | graph of the forward       | copy of the output
    I: fill output's gradient   | graph of autograd          | copy of the input's gradient
    W:                          | graph of the queued works  |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction, Key
from megatron_pipemem.schedule.action import Kind

_HOST_QUERIES = {
    getattr(torch.ops.aten, name)
    for name in (
        *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"),
        *("_unique2", "unique_dim", "unique_consecutive", "bincount"),
    )
}
"""Operators for which the host waits for a value of the device."""
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)


class _Reads(TorchDispatchMode):
    """Notes the memory that captured operators read, and refuses those for which the host waits or that draw numbers."""

    def __init__(self, storages: WeakSet[torch.UntypedStorage]):
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        reads = operator.overloadpacket in _HOST_QUERIES
        if reads or _draws(operator, args, kwargs or {}):
            cause = "the host reads a value of the device" if reads else "random numbers are drawn"
            raise UnsupportedError(
                "graph-operator",
                f"{cause} within a captured pass ({operator}), which a replay would not repeat; pass --cuda-graph-impl none",
            )
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._storages.add(leaf.untyped_storage())
        return operator(*args, **(kwargs or {}))


def _draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws random numbers. Attention does not, if it drops nothing."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name in ("p", "dropout_p"):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return True


def _changed(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "graph-inputs",
        f"a captured forward cannot run with other inputs than in its capture: {reason}; keep all microbatches alike, or pass "
        "--cuda-graph-impl none",
    )


@dataclass(eq=False)
class FixedArguments:
    """The arguments of one captured call: tensors at fixed addresses, and constants, which must stay as they are."""

    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, graphs: GraphsOfStep, call: Any) -> FixedArguments:
        """Return fixed copies of the arguments of a call, or raise an UnsupportedError if some cannot be fixed."""
        leaves, structure = tree_flatten(call)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad:
                    raise _changed("an argument of the model needs a gradient")
            elif not isinstance(leaf, _CONSTANTS):
                raise _changed(
                    f"an argument of the model is a {type(leaf).__name__}, which may change from step to step"
                )
        return cls([graphs.fixed(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)

    @property
    def call(self) -> Any:
        return tree_unflatten(self.leaves, self.structure)

    def fill(self, call: Any) -> None:
        """Copy the arguments of another call into the fixed tensors, or raise an UnsupportedError if it differs."""
        leaves, structure = tree_flatten(call)
        if structure != self.structure:
            raise _changed("the model is called with other arguments")
        for own, leaf in zip(self.leaves, leaves, strict=True):
            if isinstance(own, torch.Tensor):
                _fill(own, leaf)
            elif type(leaf) is not type(own) or leaf != own:
                raise _changed(f"an argument of the model was {own} and is {leaf}")


def _fill(fixed: torch.Tensor, values: Any) -> None:
    if not isinstance(values, torch.Tensor) or (values.shape, values.dtype) != (fixed.shape, fixed.dtype):
        form = (tuple(values.shape), values.dtype) if isinstance(values, torch.Tensor) else values
        raise _changed(f"a tensor was {tuple(fixed.shape)}, {fixed.dtype} and is {form}")
    with torch.no_grad():
        fixed.copy_(values)


@dataclass(eq=False)
class PassGraphs:
    """The graphs of one microbatch on one stage, with their fixed tensors. ``None`` is not captured yet."""

    arguments: FixedArguments
    input: torch.Tensor | None  # of the stage; ``None`` on the stage that reads the data
    forward: torch.cuda.CUDAGraph | None = None
    backward: torch.cuda.CUDAGraph | None = None
    weights: torch.cuda.CUDAGraph | None = None
    result: torch.Tensor | None = None
    gradient: torch.Tensor | None = None  # of the output
    input_gradient: torch.Tensor | None = None
    logged: Mapping[str, Any] = field(default_factory=dict)  # entries of a log that the forward sets, except tensors
    # Between the captures of the forward and the backward: the output without its data, whose autograd graph the latter needs.
    output: torch.Tensor | None = None

    def fill(self, call: Any, input: torch.Tensor | None) -> None:
        """Copy the arguments of a call of the model, and the stage's input, to the fixed tensors of the forward."""
        self.arguments.fill(call)
        if self.input is not None:
            _fill(self.input, input)

    def fill_gradient(self, gradient: torch.Tensor) -> None:
        """Copy the gradient of the stage's output to the fixed tensor of the backward."""
        assert self.gradient is not None
        _fill(self.gradient, gradient)

    @property
    def fixed(self) -> Sequence[torch.Tensor]:
        """The tensors that other microbatches may use when the last pass of this one has run."""
        tensors = (*self.arguments.leaves, self.input, self.gradient)
        return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


@dataclass(eq=False)
class GraphsOfStep:
    """All captured passes of one rank's step, which share a pool of memory.

    ``order`` holds the passes in the order of the step that captures.
    """

    order: tuple[Any, ...]
    passes: dict[Key, PassGraphs] = field(default_factory=dict)
    _pool: Any = field(default_factory=lambda: torch.cuda.graph_pool_handle())
    _free: defaultdict[Any, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    _results: dict[Any, torch.Tensor] = field(default_factory=dict)
    _read: WeakSet[torch.UntypedStorage] = field(default_factory=WeakSet)
    _kept: list[torch.UntypedStorage] = field(default_factory=list)
    _scale: torch.Tensor | None = None
    is_complete: bool = False
    is_capturing: bool = False

    def fixed(self, like: torch.Tensor) -> torch.Tensor:
        """Return a fixed tensor with the values of ``like``. It is one that ``free`` got, if that has the same format."""
        free = self._free[like.shape, like.dtype, like.device]
        with torch.no_grad():
            tensor = free.pop() if free else torch.empty_like(like, memory_format=torch.contiguous_format)
            return tensor.copy_(like)

    def result(self, like: torch.Tensor) -> torch.Tensor:
        """Return the fixed tensor for all results of this format. Each is copied from it right after its replay."""
        key = like.shape, like.dtype, like.device
        if key not in self._results:
            self._results[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._results[key]

    def fill_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the fixed tensor for the scale of further losses, with the values of ``scale``."""
        if self._scale is None:
            self._scale = scale.clone()
        return self._scale.copy_(scale)

    def free(self, passes: PassGraphs) -> None:
        """Let captures of later passes use the fixed tensors of a microbatch."""
        for tensor in passes.fixed:
            tensor = tensor.detach()
            self._free[tensor.shape, tensor.dtype, tensor.device].append(tensor)

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture the kernels that ``run`` launches, replay them, and return the graph."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.is_capturing = True
        try:
            with _Reads(self._read):
                run()
        except BaseException:
            with suppress(RuntimeError):  # which says only that the capture has failed
                graph.capture_end()
            raise
        finally:
            self.is_capturing = False
        graph.capture_end()
        graph.replay()
        return graph

    def complete(self) -> None:
        """Keep all memory that the graphs read and that is still in use after the step, such as weights and tables."""
        self._kept, self.is_complete = [*self._read], True


@dataclass(eq=False)
class GraphedWeights:
    """The step feature that captures or replays the weight gradients of split backwards."""

    graphs: GraphsOfStep

    def extend(self, executor: Executor) -> Handlers:
        def weight_gradients(instruction: Instruction) -> None:
            passes, queue = self.graphs.passes[instruction.key], executor.queues.pop(instruction.key)
            with executor.measured(instruction.action):
                if passes.weights is None:
                    passes.weights = self.graphs.capture(queue.run)
                    self.graphs.free(passes)
                else:
                    passes.weights.replay()

        return {Kind.W: weight_gradients}
