"""Run the steps of a model with experts in pieces, so that the exchanges of tokens are hidden.

The model's own forward runs. Where tokens travel between experts, its graph is cut, and pieces of another microbatch's
backward run: one computes on one stream, while the tokens of the other travel on another. Weight gradients stay apart,
where the schedule has W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import get_comm_stream, set_streams

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.pairs.runtime import Pairs, Pieces
from megatron_pipemem.mcore.model.stages import ChunkStage, shadowed
from megatron_pipemem.mcore.model.transformer_engine import defer
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import LANGUAGE_MODULE, Replacements
from megatron_pipemem.runtime.executor import BackwardArguments, PairRunner, StepFeature
from megatron_pipemem.runtime.weight_gradients import LateWeightGradients, current_queue


def check_model(config: Any) -> None:
    """Raise an UnsupportedError if the layers of a model cannot run in pieces, or have no exchange to hide."""
    needed = (
        (
            (config.expert_model_parallel_size or 1) > 1,
            "experts on several ranks: --expert-model-parallel-size 2 or more",
        ),
        (
            config.moe_token_dispatcher_type != "allgather",
            "tokens sent to experts: --moe-token-dispatcher-type alltoall",
        ),
        (config.bf16 or config.fp16, "16-bit numbers: --bf16"),
    )
    for is_there, missing in needed:
        if not is_there:
            raise UnsupportedError(
                "unsupported-setting", f"--overlap-moe-expert-parallel-comm needs {missing}; or drop it"
            )


def extensions(*_: object) -> list[Extension]:
    """Return the extension of a run with pairs."""
    return [PairedSteps()]


class PairedSteps(Extension):
    """The extension that runs training steps in pieces."""

    only_trains = True

    def replacements(self) -> Replacements:
        return [(LANGUAGE_MODULE, self._build)]

    @staticmethod
    def _build(original: Callable, model: torch.nn.Module, config: Any, *args, **kwargs) -> None:
        check_model(config)
        # Megatron's own check of the flag allows interleaved placements alone.
        config.overlap_moe_expert_parallel_comm = True
        original(model, config, *args, **kwargs)

    def prepare(self, step: Step) -> None:
        set_streams(high_priority=step.context.config.high_priority_a2a_comm_stream)

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """Replace the stages of the step by stages that run in pieces."""
        for stage, runner in step.stages.items():
            step.stages[stage] = runner.recast(StageInPieces)
        return [Pairs(step.program.schedule.pairs, lambda: torch.cuda.stream(get_comm_stream()))]


@dataclass
class StageInPieces(ChunkStage):
    """A stage whose forwards and backwards run in pieces, alone or in pairs (``runtime.executor.PairRunner``)."""

    _layers: tuple[torch.nn.Module, ...] = field(init=False)
    _pieces: dict[int, Pieces] = field(default_factory=dict, init=False)  # by microbatch
    _backward: Iterator[None] = field(default=iter(()), init=False)
    """the pieces of the backward that runs with the next forward"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._layers = layers_with_experts(self.model)

    def run_pair(
        self, microbatch: int, input: torch.Tensor | None, other: PairRunner, arguments: BackwardArguments
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert isinstance(other, StageInPieces)
        other_input = arguments[1]
        self._backward = other.backward_in_pieces(*arguments)
        del arguments
        with other.as_chunk():
            next(self._backward, None)
        output = self.forward(microbatch, input)
        return output, None if other_input is None else other_input.grad

    def backward(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        with self.as_chunk():
            for _ in self.backward_in_pieces(microbatch, input, output, output_gradient):
                pass
        self.defer_weight_gradients()
        return None if input is None else input.grad

    def backward_in_pieces(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> Iterator[None]:
        """Run a backward, which leaves its result in ``input.grad``. It yields as ``Pieces.backward`` does."""
        self._megatrons_backward(input, output, output_gradient)
        del input, output, output_gradient
        yield from self._pieces.pop(microbatch).backward()

    def _megatrons_forward(self, microbatch: int, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        backward, self._backward = self._backward, iter(())
        queue = current_queue()
        run_late = partial(self._run_late, queue) if isinstance(queue, LateWeightGradients) else lambda: None

        def alternate() -> None:
            with _outside_of_quantisation(self.step.config):
                next(backward, None)

        pieces = Pieces(get_comm_stream(), run_late, alternate)
        output = None
        try:
            with ExitStack() as stack:
                for layer in self._layers:
                    stack.enter_context(_in_pieces(layer, pieces))
                output, num_tokens = super()._megatrons_forward(microbatch, *others)
        finally:
            pieces.end(output)
        for _ in backward:
            pass
        self._pieces[microbatch] = pieces
        return output, num_tokens

    def _run_late(self, queue: LateWeightGradients) -> None:
        """Run the weight gradients of a backward that is not split, while its tokens travel or its result does."""
        computing = torch.cuda.current_stream()
        defer(self.delayed, queue)
        for tensor in queue.tensors():
            # The stream of exchanges made some of them, and does not wait for this use.
            tensor.record_stream(computing)
        queue.run_part()


def _outside_of_quantisation(config: Any) -> AbstractContextManager:
    """Return a context in which layers compute as outside of a forward, where Megatron opens no context of fp8 or fp4.

    A backward that recomputes would otherwise do so in the numbers of another microbatch's layer.
    """
    if not (config.fp8 or getattr(config, "fp4", None)):
        return nullcontext()
    from transformer_engine.pytorch import fp8_autocast

    return fp8_autocast(enabled=False)


def layers_with_experts(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the layers of a model that exchange tokens, each with its experts as ``mlp``."""
    return tuple(layer for layer in model.modules() if hasattr(getattr(layer, "mlp", None), "routed_experts_compute"))


@contextmanager
def _in_pieces(layer: Any, pieces: Pieces) -> Iterator[None]:
    """Cut the forward of a layer with experts, within a ``with`` block, before and after tokens travel."""
    mlp, dispatcher, residual_add = layer.mlp, layer.mlp.token_dispatcher, layer.mlp_bda
    dispatch_tokens, compute, combine_tokens, finish = (getattr(mlp, name) for name in _PIECES)
    manager = getattr(dispatcher, "_comm_manager", None)  # DeepEP's, HybridEP's or NCCL EP's: it has probabilities too

    def dispatch(tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pieces.go_on(pieces.exchanging)
        own_tokens, own_probs = pieces.take(tokens), pieces.take(probs)
        _give_up(tokens)
        if manager is not None:
            manager.token_probs = own_probs
        return dispatch_tokens(own_tokens, own_probs)

    def routed_experts_compute(tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        pieces.go_on(pieces.computing)
        own_tokens, own_probs = pieces.take(tokens), pieces.take(probs)
        _give_up(tokens)
        if manager is not None:
            manager.dispatched_probs = own_probs
            for value in vars(manager).values():
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    value.record_stream(pieces.computing)
        output = compute(own_tokens, own_probs)
        if getattr(layer, "recompute_pre_mlp_layernorm", False):
            # Here, and not when Megatron does it: the norm would run again on the stream of exchanges.
            layer.pre_mlp_norm_checkpoint.discard_output_and_register_recompute(output[0])
            layer.pre_mlp_norm_checkpoint = SimpleNamespace(discard_output_and_register_recompute=lambda _: None)
        return output

    def combine(output: torch.Tensor) -> torch.Tensor:
        pieces.go_on(pieces.exchanging)
        own_output = pieces.take(output)
        _give_up(output)
        return combine_tokens(own_output)

    def postprocess(output: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        return finish(output, None if shared is None else pieces.take(shared, back=3))

    def mlp_bda(*settings: bool) -> Callable:
        def add(output: Any, residual: torch.Tensor, probability: float) -> torch.Tensor:
            hidden = residual_add(*settings)(output, pieces.take(residual, back=3), probability)
            pieces.go_on(pieces.computing)
            return pieces.take(hidden)

        return add

    replaced = (dispatch, routed_experts_compute, combine, postprocess)
    with shadowed(mlp, dict(zip(_PIECES, replaced, strict=True))), shadowed(layer, {"mlp_bda": mlp_bda}):
        yield


_PIECES = ("dispatch", "routed_experts_compute", "combine", "postprocess")


def _give_up(tensor: torch.Tensor) -> None:
    """Let a tensor's memory go if autograd does not keep it. The frames that called us hold the tensor much longer."""
    if tensor._base is None:
        tensor.data = tensor.new_empty((1,))
