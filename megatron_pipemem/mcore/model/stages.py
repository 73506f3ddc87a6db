"""Run a model chunk as a stage of the pipeline, with Megatron's own forward and backward steps.

It also frees memory that experts keep, and marks the parts of a forward that can run again alone (``regions_of``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.compat import layers_with_streams, release_activations
from megatron_pipemem.mcore.model.linear import logged_before
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.model.transformer_engine import defer
from megatron_pipemem.refusals import GRAPHS_OF_LAYERS
from megatron_pipemem.runtime.selective import Replay, is_recording, region
from megatron_pipemem.runtime.weight_gradients import ImmediateWeightGradients, current_queue

# Mixtures of experts: the tensors that a microbatch leaves in them, and the tokens that each expert gets.


def expert_layers(model: torch.nn.Module) -> tuple[MoELayer, ...]:
    """Return the mixture-of-experts layers of a model."""
    return tuple(module for module in model.modules() if isinstance(module, MoELayer))


def attributes_of(dispatcher: Any) -> tuple[dict[str, Any], ...]:
    """Return the attributes of a token dispatcher, and those of its manager of DeepEP, HybridEP or NCCL EP, if it is flex.

    A flex dispatcher keeps in its manager what others keep themselves.
    """
    manager = getattr(dispatcher, "_comm_manager", None)
    return (vars(dispatcher),) if manager is None else (vars(dispatcher), vars(manager))


@contextmanager
def nothing_left_behind(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Clear, after a ``with`` block, the tensors that the block has left in the token dispatchers of layers.

    Megatron's dispatchers keep the probabilities and the routing of the last microbatch, and so its graph and the
    stage's input. Without this, they keep them until the next microbatch, which may be long after the backward.
    """
    keepers = [attributes for layer in layers for attributes in attributes_of(layer.token_dispatcher)]
    before = [dict(now) for now in keepers]
    yield
    for now, earlier in zip(keepers, before, strict=True):
        for name in [name for name, value in now.items() if isinstance(value, torch.Tensor)]:
            if now[name] is not earlier.get(name):
                now[name] = None


@contextmanager
def routing_noted(models: Iterable[torch.nn.Module], note: Callable[[int, int, int], None]) -> Iterator[None]:
    """Call ``note(tokens, most, even)`` within a ``with`` block for every forward of a layer's experts.

    All three are numbers of tokens in one forward of one layer, and a token counts once per expert. ``tokens`` is the
    number that the experts of this rank get. ``most`` is the largest possible number with a capacity factor, and 0
    without one. ``even`` is the number if all experts got equally many.
    """

    def tell(layer: MoELayer, experts: torch.nn.Module, arguments: tuple) -> None:
        visits = math.prod(layer.token_dispatcher.hidden_shape[:-1]) * layer.config.moe_router_topk
        note(arguments[0].size(0), _most_tokens(layer, visits), visits)

    hooks = [
        layer.experts.register_forward_pre_hook(partial(tell, layer))
        for model in models
        for layer in expert_layers(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _most_tokens(layer: MoELayer, visits: int) -> int:
    config, dispatcher = layer.config, layer.token_dispatcher
    if config.moe_expert_capacity_factor is None:
        return 0
    capacity = get_capacity(visits, config.num_moe_experts, config.moe_expert_capacity_factor)
    # No rank sends more than it has.
    return min(capacity * layer.num_local_experts, visits) * dispatcher.ep_size * dispatcher.tp_size


# Selective recomputation drops the outputs of norms, of an MLP's activation function and of unfused core attention.


@contextmanager
def random_numbers_again(states: tuple) -> Iterator[None]:
    """Use earlier states of the random number generators within a ``with`` block, to draw the same numbers again.

    ``states`` are from ``random._get_all_rng_states``. The present states continue after the block.
    """
    with random._fork_rng():
        random._set_all_rng_states(*states)
        yield


@contextmanager
def regions_of(model: torch.nn.Module) -> Iterator[None]:
    """Within a ``with`` block, let forwards of the model record its cheap parts, so that these can run again alone.

    The recording is done by ``runtime.selective``. There are three kinds of cheap parts: norms that Transformer Engine
    does not fuse with a linear layer; the part of an MLP between its two linear layers; and Megatron's unfused
    attention between its projections, which saves ``s x s`` scores. Parts that run under a checkpoint of Megatron's
    ``--recompute-*`` flags record nothing.
    """
    norms = {
        child
        for parent in model.modules()
        for name, child in parent.named_children()
        if name.endswith("norm") and not isinstance(child, IdentityOp)
    }
    with ExitStack() as stack:
        for module in model.modules():
            forward = None
            if module in norms:
                forward = _as_region(module.forward, lambda: nullcontext)
            elif isinstance(module, DotProductAttention):
                forward = _as_region(module.forward, _remember_random_numbers)
            elif getattr(module.forward, "__func__", None) is MLP.forward:
                forward = partial(_mlp, module)
            if forward is not None:
                stack.enter_context(shadowed(module, {"forward": forward}))
        yield


@contextmanager
def shadowed(module: torch.nn.Module, stand_ins: Mapping[str, object]) -> Iterator[None]:
    """Replace attributes of a module within a ``with`` block. Hooks on the module run as usual."""
    before = {name: module.__dict__[name] for name in stand_ins if name in module.__dict__}
    module.__dict__.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del module.__dict__[name]
        module.__dict__.update(before)


def _as_region(forward: Callable, replay: Callable[[], Replay]) -> Callable:
    def run(*arguments, **named):
        # The closure must not hold the tensors, which would then stay in memory as long as the closure.
        number, names = len(arguments), tuple(named)

        def positional(*values):
            return forward(*values[:number], **dict(zip(names, values[number:], strict=True)))

        return region(positional, replay)(*arguments, *named.values())

    return run


def _remember_random_numbers() -> Replay:
    return partial(random_numbers_again, random._get_all_rng_states())


class _StandIn(torch.nn.Module):
    """A module whose forward is the given function."""

    def __init__(self, forward: Callable):
        super().__init__()
        self.forward = forward


def _mlp(mlp: MLP, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **named):
    """Run ``MLP.forward`` with the part between its two linear layers recorded, so that it can run again alone.

    With a scale per token and biases, the MLP runs unrecorded.
    """
    if per_token_scale is not None and mlp.config.add_bias_linear:
        # The bias is then scaled and added after the second layer, in Megatron's own code.
        return MLP.forward(mlp, hidden_states, per_token_scale, **named)

    def between(*of_first_layer_and_scale):
        *of_first_layer, scale = of_first_layer_and_scale
        stand_ins = {
            "linear_fc1": _StandIn(lambda _: tuple(of_first_layer)),
            "linear_fc2": _StandIn(lambda activated: (activated, None)),
        }
        with shadowed(mlp, stand_ins):
            return MLP.forward(mlp, hidden_states=None, per_token_scale=scale, **named)[0]

    activated = region(between, lambda: nullcontext)(*mlp.linear_fc1(hidden_states), per_token_scale)
    return mlp.linear_fc2(activated)


_NOTHING = nullcontext()
_counting = [True]


def is_counted() -> bool:
    """Return whether Megatron may count the tokens of the running forward step; ``False`` in ``counted_before()``."""
    return _counting[-1]


@contextmanager
def counted_before() -> Iterator[None]:
    """Do not count tokens within a ``with`` block, because another forward step counts those of the microbatch."""
    _counting.append(False)
    try:
        yield
    finally:
        _counting.pop()


@dataclass
class StepContext:
    """The data that all chunks of a rank share within one call of the forward-backward function."""

    config: Any
    forward_step_func: Callable
    num_microbatches: int  # per update of the weights
    cp_group_size: int  # context-parallel size, for loss scaling
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    force_all_reduce: bool  # reduce gradients fully, also under the distributed optimizer
    loss_data: list = field(default_factory=list)  # the reports of the loss function, microbatch by microbatch
    # tokens of this rank's losses, a whole number in a tensor without dimensions
    num_tokens: torch.Tensor = field(kw_only=True)
    # index: the number of a microbatch in the schedule; value: its place in the data iterator; ``None`` if equal
    order: Sequence[int] | None = None


@contextmanager
def needs_batches(num_microbatches: int) -> Iterator[None]:
    """Raise an UnsupportedError if the data iterator ends within this block, which reads batches of a step."""
    try:
        yield
    except StopIteration as error:
        raise UnsupportedError(
            "data-iterator",
            f"the data iterator ended within a step of {num_microbatches} microbatches; give one that yields a batch per "
            "microbatch",
        ) from error


@dataclass
class ChunkStage:
    """Runs a model chunk as a stage, with stock Megatron (``runtime.executor.StageRunner``)."""

    step: StepContext
    model: Any  # the chunk of the training loop, wrapped by DDP or not
    data_iterator: Iterator | None
    chunk: int  # index among the rank's chunks
    num_chunks: int  # chunks of this rank that Megatron sees
    is_last: bool  # whether this stage computes the loss
    placement: ChunkPlacement
    delayed: tuple[torch.nn.Module, ...]  # Transformer Engine modules of this chunk whose weight gradients wait
    excludes: Sequence[Exclude] = ()  # of all that count or move the tensors that autograd saves
    _again: dict[int, _Again] = field(default_factory=dict)
    _has_run: bool = False
    """Whether a forward has run in this step: the first one makes quantised weights, and is not always microbatch 0."""
    _set_input_tensor: Callable[[list], None] = field(init=False)
    _experts: tuple[torch.nn.Module, ...] = field(init=False)
    _keeping: tuple[torch.nn.Module, ...] = field(init=False)

    def __post_init__(self) -> None:
        has_experts = getattr(self.step.config, "num_moe_experts", None)
        self._experts = expert_layers(self.model) if has_experts else ()
        self._keeping = layers_with_streams(self.model, self.step.config)
        self._set_input_tensor = get_attr_wrapped_model(self.model, "set_input_tensor")

    def recast[S: ChunkStage](self, kind: type[S], **changes: Any) -> S:
        """Return a stage of the class ``kind`` with the fields of this one and ``changes``.

        If this one's class has methods of its own, the new class has them too, below those of ``kind``.
        """
        if not issubclass(kind, type(self)):
            kind = make_dataclass(kind.__name__, (), bases=(kind, type(self)))
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return kind(**arguments | changes)

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        """Return the stage's output for a microbatch, with Megatron's own forward step (``StageRunner.forward``).

        It adds the reports of the loss function to ``step.loss_data``, and on the last stage the tokens to
        ``step.num_tokens``.
        """
        step, data = self.step, self._data(microbatch)
        if will_recompute:
            data = None if data is None else Tape(data)
            self._again[microbatch] = _Again(data, random._get_all_rng_states())
        output, num_tokens = self._run(microbatch, input, data, step.loss_data)
        if self.is_last:
            step.num_tokens += num_tokens
        return output

    def recompute(self, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        data, states = self._again.pop(microbatch)
        if data is not None:
            data.rewind()
        with random_numbers_again(states), logged_before(), counted_before():
            output, _ = self._run(microbatch, input, data, [])
        return output

    def _run(
        self, microbatch: int, input: torch.Tensor | None, data: Iterator | None, loss_data: list
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self.step
        number = self._number(microbatch)
        arrived = number if step.order is None else step.order[number]
        regions = regions_of(self.model) if is_recording() else _NOTHING
        # Every rank counts a microbatch once, in the first of its stages that Megatron sees.
        counters = counted_before() if self.chunk % self.num_chunks else _NOTHING
        with self.as_chunk(), regions, counters:
            result = self._megatrons_forward(microbatch, arrived, input, data, loss_data)
        if not self._has_run:
            self._leave_out_weights()
        self._has_run = True
        # The module would hold its input until its next forward.
        self._set_input_tensor([None])
        release_activations(self._keeping)
        if result[0] is input:
            # A hybrid model's segment without layers. The output is given up and gets its gradient apart from the input.
            return input.clone(), result[1]
        return result

    def _megatrons_forward(
        self, microbatch: int, arrived: int, input: torch.Tensor | None, data: Iterator | None, loss_data: list
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self.step
        with needs_batches(step.num_microbatches):
            return schedules.forward_step(
                self._forward_step(microbatch),
                data,
                self.model,
                step.num_microbatches,
                input,
                loss_data,
                step.config,
                step.cp_group_size,
                collect_non_loss_data=step.collect_non_loss_data,
                is_first_microbatch=self._is_first,
                current_microbatch=arrived,
                vp_stage=self._virtual_stage,
                is_last_stage=self._computes_loss(microbatch),
            )

    @property
    def _is_first(self) -> bool | None:
        return schedules.check_first_val_step(self.step.first_val_step, self.step.forward_only, not self._has_run)

    @property
    def _virtual_stage(self) -> int | None:
        return self.chunk if self.num_chunks > 1 else None

    def _leave_out_weights(self) -> None:
        """Exclude from the counters the quantised weights that Transformer Engine makes in the first forward.

        Every microbatch saves these weights for its backward.
        """
        if not self.excludes:  # to go through all modules takes milliseconds
            return
        kept = [
            weight
            for part in self.model.modules()
            for weight in getattr(part, "_fp8_workspaces", {}).values()
            if weight is not None
        ]
        if kept:
            for exclude in self.excludes:
                exclude(kept)

    def _data(self, microbatch: int) -> Iterator | None:
        return self.data_iterator

    def _number(self, microbatch: int) -> int:
        # Within its own batch: asynchronous schedules run forwards of later ones as well.
        return microbatch % self.step.num_microbatches

    def _computes_loss(self, microbatch: int) -> bool:
        return self.is_last

    def _forward_step(self, microbatch: int) -> Callable:
        return self.step.forward_step_func

    def release_output(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.step.config.deallocate_pipeline_outputs)

    def backward(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run a backward by Megatron's own step, and return the input's gradient (``StageRunner.backward``).

        It is ``None`` on the stage that reads the data. The weight gradients that Transformer Engine's modules keep are
        then queued.
        """
        with self.as_chunk():
            gradient = self._megatrons_backward(input, output, output_gradient)
        self.defer_weight_gradients()
        if gradient is not None and getattr(self.step.config, "cuda_graph_impl", None) == GRAPHS_OF_LAYERS:
            # It lies in memory of a graph that the next backward may overwrite before the gradient has been sent.
            return gradient.clone()
        return gradient

    def _megatrons_backward(
        self, input: torch.Tensor | None, output: torch.Tensor, output_gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        return schedules.backward_step(input, output, output_gradient, self.step.config)

    def defer_weight_gradients(self) -> None:
        """Queue the weight gradients that Transformer Engine's modules keep; without a queue, compute them."""
        if self.delayed:
            defer(self.delayed, current_queue() or ImmediateWeightGradients())

    def reduce_gradients(self) -> None:
        ddp_config = getattr(self.model, "ddp_config", None)
        if ddp_config is not None and ddp_config.overlap_grad_reduce:
            for group in self.model.bucket_groups + self.model.expert_parallel_bucket_groups:
                group.start_grad_sync(force_all_reduce=self.step.force_all_reduce)
        elif ddp_config is None and self.step.config.grad_sync_func is not None:
            functions = self.step.config.grad_sync_func
            function = functions[self.chunk] if isinstance(functions, list) else functions
            function(self.model.parameters())

    def as_chunk(self) -> AbstractContextManager:
        """Return a context in which Megatron sees the pipeline rank of this chunk.

        When it ends, experts hold no tensors of the microbatch.
        """
        chunk = self.placement.chunk(self.chunk)
        return self._leaving_nothing(chunk) if self._experts else chunk

    @contextmanager
    def _leaving_nothing(self, chunk: AbstractContextManager) -> Iterator[None]:
        with chunk, nothing_left_behind(self._experts):
            yield


@contextmanager
def no_gradient_sync(config) -> Iterator[None]:
    """Keep DDP from reducing gradients within a ``with`` block, because actions of the program start reductions."""
    functions = config.no_sync_func
    with ExitStack() as stack:
        for function in functions if isinstance(functions, list) else [functions]:
            if function is not None:
                stack.enter_context(function())
        yield


Exclude = Callable[[Iterable[torch.Tensor]], object]
"""A function that takes tensors that are no activations, like those of a batch, so that these are not counted or moved."""


@contextmanager
def shared_left_out(models: Iterable[torch.nn.Module], excludes: Callable[[], Iterable[Exclude]]) -> Iterator[None]:
    """Exclude, within a ``with`` block, the outputs of modules whose ``forward`` is cached by ``functools``.

    All microbatches share these tensors, for example the tables of rotary embeddings, which fused kernels save.
    """

    def leave_out(module: torch.nn.Module, arguments: tuple, output: object) -> None:
        for exclude in excludes():
            exclude(tensors_in(output))

    with ExitStack() as stack:
        for module in (module for model in models for module in model.modules()):
            if hasattr(module.forward, "cache_info"):
                stack.callback(module.register_forward_hook(leave_out).remove)
        yield


def watch_batches(data_iterator, *excludes: Exclude):
    """Return an iterator over the same batches whose tensors are excluded.

    A list of iterators gives a list. Without functions, the iterator itself is returned.
    """
    if isinstance(data_iterator, list):
        return [watch_batches(iterator, *excludes) for iterator in data_iterator]
    return data_iterator if data_iterator is None or not excludes else _BatchWatcher(data_iterator, excludes)


class IteratorWrapper:
    """Base class of iterators that replace another iterator and have all its attributes."""

    def __init__(self, iterator: Iterator):
        self._iterator = iterator

    def __iter__(self) -> Iterator:
        return self

    def __getattr__(self, name: str):
        return getattr(self._iterator, name)


class _BatchWatcher(IteratorWrapper):
    def __init__(self, iterator: Iterator, excludes: Sequence[Exclude]):
        super().__init__(iterator)
        self._excludes = excludes

    def __next__(self):
        batch = next(self._iterator)
        for exclude in self._excludes:
            exclude(tensors_in(batch))
        return batch


class Tape(IteratorWrapper):
    """Yields the items of an iterator and keeps them. After ``rewind()`` it yields the same items again.

    It raises an UnsupportedError if the data cannot be read by ``next``, because other calls cannot be repeated.
    """

    def __init__(self, iterator: Iterator):
        innermost = iterator
        while isinstance(innermost, IteratorWrapper):
            innermost = innermost._iterator
        if not hasattr(innermost, "__next__"):
            raise UnsupportedError(
                "data-iterator",
                f"this run reads batches again, but a {type(innermost).__name__} cannot be read by next(); give the data "
                "iterator a __next__, or train without --pipemem-recompute (Megatron's own recomputation goes on "
                "working), without sequence slices and without --pipemem-overlap-steps",
            )
        super().__init__(iterator)
        self._seen: list = []
        self._rewound = False

    def __next__(self):
        if self._rewound:
            if not self._seen:
                raise RuntimeError("the second forward of a microbatch asked for more data than the first")
            return self._seen.pop(0)
        batch = next(self._iterator)
        self._seen.append(copy.copy(batch))  # a reader may remove entries of a batch
        return batch

    def rewind(self) -> None:
        self._rewound = True

    def second_tape(self) -> Tape:
        """Return a second tape that yields the kept items. This tape keeps its own items."""
        tape = Tape(self._iterator)
        tape._seen = [copy.copy(batch) for batch in self._seen]
        tape.rewind()
        return tape


class _Again(NamedTuple):
    """The data and the random generators' states with which a forward runs the second time."""

    data: Tape | None
    random_states: tuple


def tensors_in(data) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dictionaries, lists and tuples."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from tensors_in(value)
    elif isinstance(data, Sequence) and not isinstance(data, str):
        for value in data:
            yield from tensors_in(value)
