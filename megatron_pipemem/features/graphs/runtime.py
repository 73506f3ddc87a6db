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

Parts of a stage whose sizes differ from step to step, such as experts, run between two graphs, without one. Such a *gap*
has an autograd graph of its own in every step. Tensors cross its borders through fixed ones, as those of a pass do.

    F: graph | copy out, gap, copy in | graph        I: graph | copy out, gap's autograd, copy in | graph
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.runtime.executor import Executor, Handlers, Instruction, Key
from megatron_pipemem.runtime.sections import Section, leaves_of, received
from megatron_pipemem.runtime.weight_gradients import WeightGradientQueue, hooks_left_out
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
    """Notes the memory that captured operators read, and refuses those for which the host waits.

    It also refuses random numbers while ``may_draw`` is false.
    """

    def __init__(self, storages: WeakSet[torch.UntypedStorage]):
        super().__init__()
        self._storages = storages
        self.may_draw = True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        reads = operator.overloadpacket in _HOST_QUERIES
        if reads or (not self.may_draw and _draws(operator, args, kwargs or {})):
            cause = (
                "the host reads a value of the device"
                if reads
                else "random numbers are drawn by a layer that runs again, or from a stream without a generator"
            )
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


_REMEDY = "pass --cuda-graph-impl none"


@dataclass(eq=False)
class Gap:
    """A part of a forward that runs in every step anew, between two graphs, with its backward.

    Args:
        run: computes the output from the inputs.
        inputs: fixed tensors, which the graph before the gap fills.
        need_gradients: for every input, whether it needs a gradient.
    """

    run: Callable[..., torch.Tensor]
    inputs: Sequence[torch.Tensor]
    need_gradients: Sequence[bool]
    # Fixed tensors. Each is ``None`` until the graph beside it is captured.
    output: torch.Tensor | None = None
    output_gradient: torch.Tensor | None = None
    input_gradients: Sequence[torch.Tensor | None] = ()
    shared: Collection[torch.Tensor] = ()
    """Parameters to whose gradients later parts of the backward add."""

    def forward(self, graphs: GraphsOfStep) -> GapOfStep:
        """Run the gap, and leave its output in the fixed tensor."""
        arrived: list[list[torch.Tensor]] = [[] for _ in self.inputs]
        inputs = [
            received(tensor.clone(), gradients) if needs else tensor.clone()
            for tensor, needs, gradients in zip(self.inputs, self.need_gradients, arrived, strict=True)
        ]
        output = self.run(*inputs)
        if not output.requires_grad:
            raise UnsupportedError(
                "graph-model", f"the experts of a layer are frozen, with all that comes before them; {_REMEDY}"
            )
        if self.output is None:
            self.output = graphs.result(output, "output of gap")
        _fill(self.output, output)
        section = Section(_REMEDY)
        return GapOfStep(self, section, section.end_at(output), arrived)


@dataclass(eq=False)
class GapOfStep:
    """A gap whose forward has run, until its backward."""

    gap: Gap
    section: Section
    output_gradients: list[torch.Tensor]
    arrived: Sequence[Sequence[torch.Tensor]]  # the gradients of the inputs, one each

    def backward(self, graphs: GraphsOfStep) -> None:
        """Run autograd, and leave the gradients of the inputs in fixed tensors."""
        gap = self.gap
        assert gap.output_gradient is not None
        self.output_gradients.append(gap.output_gradient.clone())
        with hooks_left_out(gap.shared):
            self.section.backward()
        if not gap.input_gradients:
            gap.input_gradients = [
                graphs.result(gradients[0], f"gradient {number} of gap") if gradients else None
                for number, gradients in enumerate(self.arrived)
            ]
        for fixed, gradients in zip(gap.input_gradients, self.arrived, strict=True):
            if len(gradients) != (fixed is not None):
                raise _changed(f"an input of the experts has {len(gradients)} gradients")
            if fixed is not None:
                _fill(fixed, gradients[0])


class _Border(NamedTuple):
    """Lists for the gradients of tensors that a graph gives to a gap and gets from it, while these are captured."""

    input_gradients: Sequence[list[torch.Tensor]]
    output_gradients: list[torch.Tensor]


@dataclass(eq=False)
class PassGraphs:
    """The graphs of one microbatch on one stage, with their fixed tensors. ``None`` is not captured yet.

    A forward with ``n`` gaps has ``n + 1`` graphs, and so has its backward, which begins with the last one.
    """

    arguments: FixedArguments
    input: torch.Tensor | None  # of the stage; ``None`` on the stage that reads the data
    forward: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    backward: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    weights: torch.cuda.CUDAGraph | None = None
    result: torch.Tensor | None = None
    gradient: torch.Tensor | None = None  # of the output
    input_gradient: torch.Tensor | None = None
    logged: Mapping[str, Any] = field(default_factory=dict)  # entries of a log that the forward sets, except tensors
    # Between the captures of the forward and the backward: the output without its data, whose autograd graph the latter needs,
    # the section of each graph, and the borders between them.
    output: torch.Tensor | None = None
    sections: list[Section] = field(default_factory=list)
    borders: list[_Border] = field(default_factory=list)
    works: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    """The weight gradients of the captured backward, until they are captured."""
    running: list[GapOfStep] = field(default_factory=list)
    """The gaps of this step whose backward has not run."""

    def capture_forward(self, graphs: GraphsOfStep, run: Callable[[], None]) -> None:
        """Capture a forward, in which ``run`` may call ``cut``."""
        self.sections.append(Section(_REMEDY))
        self.forward.append(graphs.capture(run, is_forward=True))
        if self.sections[-1].ends:
            raise UnsupportedError(
                "graph-model",
                f"the last graph of a forward hands a tensor over, whose gradient would be lost; {_REMEDY}",
            )

    def cut(self, graphs: GraphsOfStep, run: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Run a gap between two graphs of a forward that is being captured, and return its output for the next graph.

        The gap gets copies of the tensors, which are those of the running graph.
        """
        gap = Gap(
            run, [graphs.result(t, number) for number, t in enumerate(tensors)], [t.requires_grad for t in tensors]
        )
        for fixed, tensor in zip(gap.inputs, tensors, strict=True):
            _fill(fixed, tensor)
        border = _Border([self.sections[-1].end_at(tensor) if tensor.requires_grad else [] for tensor in tensors], [])
        self.borders.append(border)
        self.forward.append(graphs.end())
        self.gaps.append(gap)
        self.running.append(gap.forward(graphs))
        graphs.begin(is_forward=True)
        assert gap.output is not None
        self.sections.append(Section(_REMEDY))
        return received(gap.output.clone(), border.output_gradients)

    def replay_forward(self, graphs: GraphsOfStep) -> None:
        for graph, gap in zip(self.forward, self.gaps, strict=False):
            graph.replay()
            self.running.append(gap.forward(graphs))
        self.forward[-1].replay()

    def earlier(self, back: int) -> Section:
        """Return the section of the graph that was captured ``back`` graphs before the running one."""
        return self.sections[-1 - back]

    def capture_backward(
        self,
        graphs: GraphsOfStep,
        autograd: Callable[[], None],
        defer: Callable[[], None],
        captured: AbstractContextManager,
    ) -> None:
        """Capture a backward.

        ``autograd`` begins at the model's output. ``defer`` is called after every part, and within ``captured`` after those
        that are captured.
        """
        shared = self._shared_leaves()
        leaves = {leaf for of_part in shared for leaf in of_part}
        for number in reversed(range(len(self.forward))):
            with hooks_left_out(shared.pop()):
                self.backward.append(
                    graphs.capture(partial(self._backward_once, graphs, number, autograd, defer, captured))
                )
            if number:
                self.gaps[number - 1].shared = shared.pop()
                self.running.pop().backward(graphs)
                defer()
        if any(leaf.grad is not None for leaf in leaves):
            raise UnsupportedError(
                "graph-model", f"the loss depends on a weight's use after experts, and not on its use before; {_REMEDY}"
            )
        self.output = None

    def _shared_leaves(self) -> list[set[torch.Tensor]]:
        """Return for every part of the forward the leaves that earlier parts use, too.

        In the backward, the hooks on their gradients run after the earliest part, as if autograd summed all gradients.
        """
        *sections, _ = self.sections  # the last one ends at the output
        ends = [
            section.leaves
            for pair in zip(sections, self.running, strict=True)
            for section in (pair[0], pair[1].section)
        ]
        ends.append(leaves_of([cast(Any, self.output).grad_fn]))
        shared: list[set[torch.Tensor]] = []
        before: set[torch.Tensor] = set()
        for leaves in ends:
            shared.append(leaves & before)
            before |= leaves
        return shared

    def _backward_once(
        self,
        graphs: GraphsOfStep,
        number: int,
        autograd: Callable[[], None],
        defer: Callable[[], None],
        captured: AbstractContextManager,
    ) -> None:
        section = self.sections.pop()
        with captured:
            if number == len(self.gaps):
                autograd()
            else:
                for gradients, fixed in zip(
                    self.borders.pop().input_gradients, self.gaps[number].input_gradients, strict=True
                ):
                    if fixed is not None:
                        gradients.append(fixed.clone())
                section.backward()
            defer()
        if number:
            gap, gradients = self.gaps[number - 1], self.borders[-1].output_gradients
            if not gradients:
                raise UnsupportedError("graph-model", f"the loss does not depend on the experts of a layer; {_REMEDY}")
            gap.output_gradient = graphs.result(gradients[0], "gradient of gap")
            _fill(gap.output_gradient, gradients.pop())
        elif self.input is not None and self.input.grad is not None:
            self.input_gradient = graphs.result(self.input.grad)
            _fill(self.input_gradient, self.input.grad)
            self.input.grad = None

    def replay_backward(self, graphs: GraphsOfStep, defer: Callable[[], None]) -> None:
        *graphs_before_gaps, last = self.backward
        for graph in graphs_before_gaps:
            graph.replay()
            self.running.pop().backward(graphs)
            defer()
        last.replay()

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
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)
    """The random streams from which forwards may draw, besides the default generator. A replay draws as the forward would."""
    passes: dict[Key, PassGraphs] = field(default_factory=dict)
    weights: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """The tensors of each stage's quantised weights after its last capture. Compiled kernels read them unseen."""
    _pool: Any = field(default_factory=lambda: torch.cuda.graph_pool_handle())
    _free: defaultdict[Any, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    _results: dict[Any, torch.Tensor] = field(default_factory=dict)
    _read: WeakSet[torch.UntypedStorage] = field(default_factory=WeakSet)
    _kept: list[torch.UntypedStorage] = field(default_factory=list)
    _scales: dict[type, torch.Tensor] = field(default_factory=dict)
    is_complete: bool = False
    _open: tuple[torch.cuda.CUDAGraph, _Reads] | None = None

    def fixed(self, like: torch.Tensor) -> torch.Tensor:
        """Return a fixed tensor with the values of ``like``. It is one that ``free`` got, if that has the same format."""
        free = self._free[like.shape, like.dtype, like.device]
        with torch.no_grad():
            tensor = free.pop() if free else torch.empty_like(like, memory_format=torch.contiguous_format)
            return tensor.copy_(like)

    @property
    def is_capturing(self) -> bool:
        return self._open is not None

    def result(self, like: torch.Tensor, place: Any = 0) -> torch.Tensor:
        """Return the fixed tensor for all results of this format. Each is copied from it right after its replay.

        Results of one replay have different places.
        """
        key = place, like.shape, like.dtype, like.device
        if key not in self._results:
            self._results[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._results[key]

    def fix_scale(self, losses: Any) -> None:
        """Let captured backwards read the scale of further losses from a fixed tensor. It has the value of this step.

        ``losses`` is Megatron's class of autograd's function for these losses.
        """
        scale = losses.main_loss_backward_scale
        if losses not in self._scales:
            self._scales[losses] = scale.clone()
        losses.main_loss_backward_scale = self._scales[losses].copy_(scale)

    def has_moved(self, stage: int, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether the stage has captures, and they read quantised weights at other addresses than these."""
        captured = self.weights.get(stage)
        return captured is not None and [t.data_ptr() for t in captured] != [t.data_ptr() for t in weights]

    def free(self, passes: PassGraphs) -> None:
        """Let captures of later passes use the fixed tensors of a microbatch."""
        for tensor in passes.fixed:
            tensor = tensor.detach()
            self._free[tensor.shape, tensor.dtype, tensor.device].append(tensor)

    def capture(self, run: Callable[[], None], is_forward: bool = False) -> torch.cuda.CUDAGraph:
        """Capture the kernels that ``run`` launches, replay them, and return the graph.

        ``run`` may end the capture, and begin another one. The graph is then the last one.
        """
        self.begin(is_forward)
        try:
            run()
        except BaseException:
            if self._open is not None:
                with suppress(RuntimeError):  # which says only that the capture has failed
                    self._close().capture_end()
            raise
        return self.end()

    def begin(self, is_forward: bool = False) -> None:
        """Begin to capture kernels. Those of a forward may draw from the random streams."""
        graph, reads = torch.cuda.CUDAGraph(), _Reads(self._read)
        for generator in self.generators.values() if is_forward else ():
            graph.register_generator_state(generator)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        reads.__enter__()
        self._open = graph, reads

    @contextmanager
    def drawing_from(self, name: str) -> Iterator[None]:
        """Let kernels captured within a ``with`` block draw from a random stream. Without its generator, they may not draw."""
        assert self._open is not None
        _, reads = self._open
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        state, may_draw = default.graphsafe_get_state(), reads.may_draw
        default.graphsafe_set_state(self.generators.get(name, state))
        reads.may_draw = may_draw and name in self.generators
        try:
            yield
        finally:
            default.graphsafe_set_state(state)
            reads.may_draw = may_draw

    def refuse_draws(self) -> None:
        """Refuse random numbers until the capture ends, because a layer runs again and cannot repeat those of its first run."""
        assert self._open is not None
        self._open[1].may_draw = False

    def end(self) -> torch.cuda.CUDAGraph:
        """End the capture that has begun, replay its kernels, and return the graph."""
        graph = self._close()
        graph.capture_end()
        graph.replay()
        return graph

    def _close(self) -> torch.cuda.CUDAGraph:
        assert self._open is not None
        (graph, reads), self._open = self._open, None
        reads.__exit__(None, None, None)
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
                queue.run()  # of the gaps
                if passes.weights is None:
                    passes.weights = self.graphs.capture(passes.works.run)
                    self.graphs.free(passes)
                else:
                    passes.weights.replay()

        return {Kind.W: weight_gradients}
