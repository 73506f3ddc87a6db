"""Make initial weights and dropout independent of the schedule: each layer draws from random streams of its own.

Megatron seeds each pipeline rank differently, and all layers of a rank draw from the same random streams. So a run with
another placement starts with other weights, and another order of forwards drops other activations. Here each layer and
the embedding have their own streams. They are seeded by a *key*: when the layer is built, and again in each forward. A
key is a hash of the run's seed, the iteration, the microbatch, and the layer's number in the whole model.

A layer's key is derived from an enclosing key: that of the model being built, the microbatch being run, or an outer
layer. The enclosing key is stored among the states of Megatron's random tracker. Recomputation restores these states,
and so the key.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from types import SimpleNamespace
from weakref import WeakSet

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.gates import GateQuestion, check_gates
from megatron_pipemem.mcore.loop_arguments import iteration_and_seed
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import (
    BUILD_HYBRID_LAYER,
    BUILD_LAYER,
    BUILD_MTP_LAYER,
    EMBEDDING,
    EXPERTS,
    FORWARD_STEP,
    MLP,
    MODEL_INITS,
    Replacements,
)
from megatron_pipemem.refusals import of_several
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.executor import Executor, Handler, Handlers, Instruction, StepFeature
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.options import LAYERWISE, STOCK

_KEY = "pipemem-key"
"""Name of the key among the tracker's states."""


def derived(*parts: object) -> int:
    """Return a key: the hash of ``parts``.

    The first is a seed or the enclosing key. The others say what the key is for, for example a layer or a microbatch.
    """
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


def _enclosing() -> int | None:
    return random.get_cuda_rng_tracker().get_states().get(_KEY)


@contextmanager
def _within(key: int) -> Iterator[None]:
    """Set the enclosing key while the block runs, and then the outer one again. Random streams are not reset."""
    tracker = random.get_cuda_rng_tracker()
    outer = tracker.get_states()
    tracker.set_states({**outer, _KEY: key})
    try:
        yield
    finally:
        # The streams may have moved on: nothing but the key is put back.
        states = tracker.get_states()
        states.pop(_KEY, None)
        tracker.set_states(states | ({_KEY: outer[_KEY]} if _KEY in outer else {}))


@contextmanager
def _drawing(key: int, by_shard: bool = False, is_expert: bool = False) -> Iterator[None]:
    """Seed all random streams by ``key`` while the block runs, and restore the previous streams after it.

    With ``by_shard``, the default stream also differs between tensor-parallel ranks, for activations that are sharded
    along the sequence. With ``is_expert``, the key belongs to one expert. Its random numbers then do not depend on the
    expert-parallel rank that holds it.
    """
    tracker = random.get_cuda_rng_tracker()
    outer = random._get_all_rng_states()
    shard = derived(key, "tensor", parallel_state.get_tensor_model_parallel_rank())
    rank = None if is_expert else parallel_state.get_expert_model_parallel_rank()
    expert = derived(key, "expert", rank, parallel_state.get_expert_tensor_parallel_rank())
    seeds = {
        random._DATA_PARALLEL_RNG_TRACKER_NAME: key,
        random._MODEL_PARALLEL_RNG_TRACKER_NAME: shard,
        random._EXPERT_PARALLEL_RNG_TRACKER_NAME: expert,
    }
    try:
        states = tracker.get_states() | {_KEY: key}
        for name, seed in seeds.items():
            torch.cuda.manual_seed(seed)
            states[name] = torch.cuda.get_rng_state()
        tracker.set_states(states)
        torch.default_generator.manual_seed(key)
        torch.cuda.manual_seed(shard if by_shard else key)
        yield
    finally:
        random._set_all_rng_states(*outer)


def _draw_by_key(module: torch.nn.Module, by_shard: bool, *parts: object) -> None:
    """Make each training forward of ``module`` draw from streams with the key ``derived(enclosing key, *parts)``.

    A forward in evaluation, or without an enclosing key, draws from Megatron's streams.
    """
    running: list[ExitStack] = []

    def begin(module: torch.nn.Module, _: tuple) -> None:
        running.append(ExitStack())
        key = _enclosing()
        if key is not None and module.training:
            running[-1].enter_context(_drawing(derived(key, *parts), by_shard))

    def end(module: torch.nn.Module, _: tuple, output: object) -> None:
        running.pop().close()

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


class LayerwiseRandom(Extension):
    """The extension that makes initial weights and dropout the same for all schedules, Megatron's own included."""

    only_trains = True

    def __init__(self) -> None:
        self._models: WeakSet[torch.nn.Module] = WeakSet()
        self._experts: Iterator[int] | None = None
        """The numbers, in the whole model, of the experts that are being built."""
        self._number: int | None = None
        self._batch = 1
        self._order: Sequence[int] | None = None

    def replacements(self) -> Replacements:
        return [
            *((symbol, self._build_model) for symbol in MODEL_INITS),
            (EMBEDDING, _build_embedding),
            (BUILD_LAYER, functools.partial(_build_module, "layer", _number_in_model)),
            (BUILD_HYBRID_LAYER, functools.partial(_build_module, "layer", lambda named: named["layer_number"])),
            (BUILD_MTP_LAYER, functools.partial(_build_module, "mtp", lambda named: named["layer_number"])),
            (EXPERTS, self._build_experts),
            (MLP, self._build_mlp),
            (FORWARD_STEP, self._forward_step),
        ]

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        self._batch, self._order = step.shape.num_microbatches, step.context.order
        return [self]

    def extend(self, executor: Executor) -> Handlers:
        """Return handlers that store the number of the running microbatch for ``_forward_step``.

        In asynchronous schedules, the microbatch may belong to a later iteration.
        """

        def noting(handler: Handler) -> Handler:
            def run(instruction: Instruction) -> None:
                self._number = instruction.action.microbatch
                try:
                    handler(instruction)
                finally:
                    self._number = None

            return run

        return {kind: noting(executor.handlers[kind]) for kind in (Kind.F, Kind.R)}

    def _build_model(self, original: Callable, model, config, *args, **kwargs) -> None:
        _check(config)
        _, seed = iteration_and_seed()
        with _drawing(derived(seed, "build")):
            original(model, config, *args, **kwargs)
        self._models.add(model)

    def _build_experts(self, original: Callable, experts, num_local_experts, *args, **kwargs) -> None:
        self._experts = itertools.count(parallel_state.get_expert_model_parallel_rank() * num_local_experts)
        try:
            original(experts, num_local_experts, *args, **kwargs)
        finally:
            self._experts = None

    def _build_mlp(self, original: Callable, mlp, *args, **kwargs) -> None:
        key = _enclosing()
        if key is None or self._experts is None:
            return original(mlp, *args, **kwargs)
        with _drawing(derived(key, "expert", next(self._experts)), is_expert=True):
            return original(mlp, *args, **kwargs)

    def _forward_step(self, original: Callable, forward_step_func, data_iterator, model, *args, **kwargs):
        call = forward_step_func, data_iterator, model, *args
        if not model.training:
            return original(*call, **kwargs)
        if unwrap_model(model) not in self._models:
            raise UnsupportedError(
                "enabled-too-late",
                "layerwise random numbers need a GPTModel or a HybridModel that was built after enable(), and this "
                f"{type(unwrap_model(model)).__name__} is not one; build it after enable(), or leave --pipemem-rng out",
            )
        number = self._number
        later, microbatch = (0, int(kwargs["current_microbatch"])) if number is None else divmod(number, self._batch)
        if number is not None and self._order is not None:
            microbatch = self._order[microbatch]
        iteration, seed = iteration_and_seed()
        with _within(derived(seed, "train", iteration + later, microbatch)):
            return original(*call, **kwargs)


def extensions(*_: object) -> list[Extension]:
    """Return the extension of a run with layerwise random numbers. It also works with Megatron's own schedule."""
    return [LayerwiseRandom()]


def _check(config) -> None:
    """Raise an UnsupportedError if the configuration or Megatron's random tracker rules out a stream per layer."""
    tracker = random.get_cuda_rng_tracker()
    of_tracker = SimpleNamespace(  # its flags do not reach the configuration
        use_te_rng_tracker=not isinstance(tracker, random.CudaRNGStatesTracker),
        is_inference_rng_tracker=tracker.is_inference_rng_tracker,
    )
    check_gates(GateQuestion(Request(STOCK, rng=LAYERWISE), of_several(of_tracker, config)))


def _build_embedding(original: Callable, embedding, *args, **kwargs) -> None:
    key = _enclosing()
    if key is None:  # of a model that this package does not know
        return original(embedding, *args, **kwargs)
    with _drawing(derived(key, "embedding")):
        original(embedding, *args, **kwargs)
    return _draw_by_key(embedding, False, "embedding")  # it forks the tracker itself where it drops by shard


def _build_module(kind: str, number_of: Callable[[dict], int], original: Callable, spec, *args, **kwargs):
    """Build a layer with ``original`` (``build_module``). Its initial weights and dropout come from its own streams.

    A module without ``layer_number``, or without an enclosing key, draws from Megatron's streams. ``kind``
    distinguishes layers of two kinds that have the same number. ``number_of`` returns the layer's number in the whole
    model. Its argument has the keyword arguments of ``build_module``.
    """
    key = _enclosing()
    if key is None or "layer_number" not in kwargs:
        return original(spec, *args, **kwargs)
    parts = kind, number_of(kwargs)
    with _drawing(derived(key, *parts)):
        module = original(spec, *args, **kwargs)
    if isinstance(module, torch.nn.Module):
        _draw_by_key(module, kwargs["config"].sequence_parallel, *parts)
    return module


def _number_in_model(named: dict) -> int:
    """Return a layer's number in the whole model. ``named`` has the keyword arguments with which the layer is built."""
    offset = get_transformer_layer_offset(named["config"], named["vp_stage"], named["pg_collection"].pp.rank())
    return named["layer_number"] + offset
