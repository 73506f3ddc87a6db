"""Run the training steps of a model on Megatron as CUDA graphs, one for every pass of a chunk.

Megatron's own graphs stay off: they hold single layers, and take every weight gradient for a part of a backward. Here the
forward of the model within Megatron's forward step is captured, autograd from the model's output to its input, and each W.
Batches, loss functions and the scaling of losses stay outside, so user code runs in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from megatron.core import fp8_utils
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.utils import unwrap_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.graphs.megatron.experts import experts_left_out, layers_with_experts
from megatron_pipemem.features.graphs.runtime import FixedArguments, GraphedWeights, GraphsOfStep, PassGraphs
from megatron_pipemem.mcore.model.language_model import is_language_model, pattern_of
from megatron_pipemem.mcore.model.stages import ChunkStage, shadowed
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import (
    GET_RNG_STATES,
    LANGUAGE_MODULE,
    RNG_TRACKER,
    SET_RNG_STATES,
    TE_RNG_STATE,
    Replacements,
)
from megatron_pipemem.runtime.activation_ledger import is_quantised
from megatron_pipemem.runtime.executor import StepFeature
from megatron_pipemem.runtime.weight_gradients import HOOKED, WeightGradientQueue, collecting, current_queue, defers
from megatron_pipemem.schedule.action import Kind

_PASSES = (Kind.F, Kind.I, Kind.B, Kind.W)
_RANDOM = ("attention_dropout", "hidden_dropout", "moe_router_force_load_balancing", "moe_input_jitter_eps")
"""The settings with which a forward draws random numbers."""
_KNOWN_HOOKS = ("megatron.", "megatron_pipemem.", "transformer_engine.")
"""Beginnings of the names of modules whose forward hooks do nothing that a replay must repeat."""


def extensions(*_: object) -> list[Extension]:
    """Return the extension of a run whose passes are CUDA graphs."""
    return [GraphedSteps()]


class GraphedSteps(Extension):
    """The extension that captures the passes of a training step after some steps without graphs, and then replays them.

    Steps that count bytes run without graphs. A step with another order of passes, for example with another number of
    microbatches, or with parameters at other addresses or frozen since, begins anew: some steps without graphs, then a capture.
    """

    only_trains = True

    def __init__(self) -> None:
        self._graphs: GraphsOfStep | None = None
        self._kind: tuple[Any, ...] | None = None
        """The order of passes, shapes of messages, and trained parameters with their addresses, for which the graphs hold."""
        self._sums: Mapping[str, torch.Tensor] = {}
        """The logged sums of routers to which the graphs add."""
        self._steps = 0
        """The number of steps without graphs, of this kind."""
        self._stream: torch.cuda.Stream | None = None
        """The stream of the model, if it would have been the default one."""
        self._trackers: list[tuple[Any, bool]] = []
        """The trackers of random streams, whose forks are those of the graphs in a capture, and whether they had generators."""

    def replacements(self) -> Replacements:
        return [
            (LANGUAGE_MODULE, self._build),
            (RNG_TRACKER, self._make_tracker),
            (GET_RNG_STATES, self._get_states),
            (SET_RNG_STATES, self._set_states),
            *(zip(TE_RNG_STATE, (self._get_state, self._set_states), strict=True) if random.HAVE_TE else ()),
        ]

    def _build(self, original: Callable, model: torch.nn.Module, config: Any, *args, **kwargs) -> None:
        """Build a model without Megatron's graphs, on a stream that can be captured.

        Autograd adds to the gradient of a parameter on the stream on which the parameter's node was made, and the default
        stream cannot be captured.
        """
        config.cuda_graph_impl = "none"
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            self._stream = torch.cuda.Stream()
            torch.cuda.set_stream(self._stream)
        original(model, config, *args, **kwargs)

    def _make_tracker(self, original: Callable, *args, **kwargs) -> None:
        """Make the random streams of Megatron with a generator each, which graphs can hold. A capture replaces their forks.

        Within a capture, the state of the default generator can be exchanged for that of another one, but not read or set.
        """
        original(*args, **kwargs)
        tracker: Any = random._CUDA_RNG_STATE_TRACKER
        if "fork" not in vars(tracker):
            has_generators = random.is_graph_safe_cuda_rng_tracker(tracker)
            if not has_generators:
                _hold_generators(tracker, True)
            tracker.fork = partial(self._fork, tracker.fork)
            self._trackers.append((tracker, has_generators))

    @property
    def _is_capturing(self) -> bool:
        return self._graphs is not None and self._graphs.is_capturing

    def _fork(
        self, original: Callable[[str], AbstractContextManager], name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME
    ) -> AbstractContextManager:
        if self._graphs is None or not self._graphs.is_capturing:
            return original(name)
        return self._graphs.drawing_from(name)

    def _get_states(self, original: Callable[[], tuple]) -> tuple:
        return (None,) * 3 if self._is_capturing else original()

    def _set_states(self, original: Callable[..., None], *states: Any, **named: Any) -> None:
        if self._graphs is None or not self._graphs.is_capturing:
            original(*states, **named)
        else:
            self._graphs.refuse_draws()

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        if step.observation.ledger is not None:
            return ()
        check_chunks_for_graphs(step.chunks)  # in every step, because a program may add a hook after the capture
        order = tuple(a for a in step.program.actions[step.pipeline.device] if a.kind in _PASSES)
        generators = _generators() if any(getattr(step.context.config, name, None) for name in _RANDOM) else {}
        kind = (order, step.message.shape, _addresses(step.chunks), tuple(generators))
        if kind != self._kind or (self._graphs is not None and self._reads_replaced(self._graphs, step)):
            self._graphs, self._kind, self._steps = None, kind, 0
        if self._graphs is None:
            self._steps += 1
            if self._steps <= step.context.config.cuda_graph_warmup_steps:
                return ()
            torch.cuda.empty_cache()  # captures can take no memory that steps without graphs have cached
            self._graphs, self._sums = GraphsOfStep(order, generators), _sums_of_experts()
        _draw_from(self._graphs.generators)
        for stage, runner in step.stages.items():
            step.stages[stage] = runner.recast(GraphedStage, graphs=self._graphs, stage=stage)
        step.replays_passes = True
        return [GraphedWeights(self._graphs)]

    def _get_state(self, original: Callable[..., Any], *args, **kwargs) -> Any:
        return None if self._is_capturing else original(*args, **kwargs)

    def _reads_replaced(self, graphs: GraphsOfStep, step: Step) -> bool:
        """Return whether the graphs read memory that was replaced since, such as quantised copies of weights."""
        return _are_replaced(self._sums) or any(
            graphs.has_moved(stage, _quantised_weights(runner.model)) for stage, runner in step.stages.items()
        )

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._graphs, self._kind = None, None
            raise

    def after(self, step: Step) -> None:
        if self._graphs is not None and not self._graphs.is_complete:
            self._graphs.complete()

    def close(self, orderly: bool) -> None:
        self._graphs, self._kind = None, None
        for tracker, had_generators in self._trackers:
            del tracker.fork
            if not had_generators:
                _hold_generators(tracker, False)
        self._trackers.clear()
        if self._stream is not None and torch.cuda.current_stream() == self._stream:
            torch.cuda.default_stream().wait_stream(self._stream)
            torch.cuda.set_stream(torch.cuda.default_stream())


def _hold_generators(tracker: Any, holds: bool) -> None:
    """Let a tracker of Megatron hold its random streams as generators, or as states of the default generator."""
    tracker.use_cudagraphable_rng = holds
    tracker.states_ = {name: random.convert_cuda_rng_state(state, holds) for name, state in tracker.states_.items()}


def _generators() -> dict[str, torch.Generator]:
    """Return the generators of Megatron's random streams, by name."""
    tracker: Any = random._CUDA_RNG_STATE_TRACKER
    return {} if tracker is None else tracker.get_states()


def _draw_from(generators: Mapping[str, torch.Generator]) -> None:
    """Let Megatron's random streams go on as the generators of graphs, because a program may have replaced theirs."""
    tracker: Any = random._CUDA_RNG_STATE_TRACKER
    for name, generator in generators.items():
        generator.set_state(tracker.states_[name].get_state())
        tracker.states_[name] = generator


def _quantised_weights(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the bytes and scales of quantised weights, and of the copies that Transformer Engine keeps of other weights.

    It updates copies in the first microbatch of a step, which is a part of the graphs of that microbatch.
    """
    weights = [parameter for parameter in model.parameters() if is_quantised(parameter)]
    copies = (copy for part in model.modules() for copy in getattr(part, "_fp8_workspaces", {}).values())
    return tuple(
        value
        for weight in (*weights, *filter(None.__ne__, copies))
        for value in cast(Any, weight).get_metadata().values()
        if isinstance(value, torch.Tensor)
    )


def _addresses(chunks: Sequence[torch.nn.Module]) -> tuple[tuple[bool, int, int], ...]:
    """Return for every parameter and buffer whether it trains, and the addresses of its data and its gradient."""
    models = [unwrap_model(chunk) for chunk in chunks]  # whose buffers are not those of gradients, as DDP's are
    parameters = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    gradients = [getattr(parameter, "main_grad", None) for parameter in parameters]
    return tuple(
        (
            parameter.requires_grad,
            0 if is_quantised(parameter) else parameter.data_ptr(),  # ``_quantised_weights`` has its bytes
            0 if gradient is None else gradient.data_ptr(),
        )
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )


def check_chunks_for_graphs(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise an UnsupportedError if a replay of the chunks' passes would do less than the passes themselves."""
    for chunk in chunks:
        model = unwrap_model(chunk)
        if not is_language_model(model) or pattern_of(model) is not None:
            raise UnsupportedError(
                "unsupported-model",
                f"passes of {type(model).__name__} are not captured, only those of Megatron's GPTModel; pass "
                "--cuda-graph-impl none",
            )
        for name, parameter in chunk.named_parameters():
            if is_quantised(parameter) and getattr(fp8_utils, "te_post_all_gather_processing", None) is None:
                raise UnsupportedError(
                    "graph-model",
                    f"{name} is kept in 8 bits, and this version of Transformer Engine transposes it in a forward, which a "
                    "replay need not repeat; install a version with post_all_gather_processing, drop --fp8-param-gather, or "
                    "pass --cuda-graph-impl none",
                )
            if parameter.requires_grad and getattr(parameter, "main_grad", None) is None:
                raise UnsupportedError(
                    "graph-model",
                    f"{name} has no main_grad, to whose memory a replay could add; wrap the model in Megatron's "
                    "DistributedDataParallel, or pass --cuda-graph-impl none",
                )
            hooks = (parameter._backward_hooks, cast(Any, parameter)._post_accumulate_grad_hooks)
            if any(hooks) or hasattr(parameter, HOOKED):
                raise UnsupportedError(
                    "graph-model",
                    f"{name} has hooks on its gradient, which a replay does not call; remove them, or pass "
                    "--cuda-graph-impl none",
                )
        for name, module in model.named_modules():
            for hook in (
                *module._forward_pre_hooks.values(),
                *module._forward_hooks.values(),
                *_backward_hooks(module),
            ):
                origin = getattr(hook, "func", hook)
                if not str(getattr(origin, "__module__", "")).startswith(_KNOWN_HOOKS):
                    raise UnsupportedError(
                        "graph-model",
                        f"{name or type(module).__name__} has a hook of {getattr(origin, '__module__', origin)}, which a "
                        "replay does not call; remove it, or pass --cuda-graph-impl none",
                    )


def _logged_since(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the process groups and settings of the log of multi-token prediction that a captured forward has noted.

    ``before`` is the log before the forward. Sums are tensors, to which a replay adds.
    """
    noted = {name: value for name, value in MTPLossLoggingHelper.tracker.items() if before.get(name) is not value}
    begun = {name for name, value in noted.items() if isinstance(value, torch.Tensor)}
    _check_begun(begun, "multi-token prediction")
    return noted


def _sums_of_experts() -> dict[str, torch.Tensor]:
    """Return the sums of Megatron's log of routers, such as auxiliary losses, by their names."""
    return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}


def _are_replaced(sums: Mapping[str, torch.Tensor]) -> bool:
    now = _sums_of_experts()
    return any(now.get(name) is not values for name, values in sums.items())


def _check_begun(sums: Collection[str], of: str) -> None:
    """Raise an UnsupportedError if a captured forward has begun sums of a log."""
    if sums:
        raise UnsupportedError(
            "graph-model",
            f"a captured forward began the sums {', '.join(sorted(sums))} of {of}, and every replay would begin them again; "
            "keep the log's tracker from step to step, or pass --cuda-graph-impl none",
        )


def _backward_hooks(module: torch.nn.Module) -> Iterator[Callable]:
    yield from module._backward_hooks.values()
    yield from module._backward_pre_hooks.values()


@dataclass
class GraphedStage(ChunkStage):
    """A stage that captures its passes at their first run, and replays them afterwards (``runtime.executor.StageRunner``)."""

    graphs: GraphsOfStep = field(kw_only=True)
    stage: int = field(kw_only=True)
    _outputs_of_model: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    """the model's output for a loss, by microbatch, until the backward"""
    _layers: tuple[torch.nn.Module, ...] = field(init=False)
    """the layers with experts"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._layers = layers_with_experts(self.model) if self._experts else ()

    def _megatrons_forward(
        self, microbatch: int, arrived: int, input: torch.Tensor | None, data: Iterator | None, loss_data: list
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._has_run:
            self._finish_parameter_gathers()
            if self.graphs.has_moved(self.stage, _quantised_weights(self.model)):
                raise UnsupportedError(
                    "graph-model",
                    "quantised weights have other addresses than in the capture, after they were gathered; pass "
                    "--cuda-graph-impl none",
                )
        model = unwrap_model(self.model)
        run = partial(self._run_model, model.forward, microbatch, input)
        with shadowed(model, {"forward": run}):
            return super()._megatrons_forward(microbatch, arrived, input, data, loss_data)

    def _finish_parameter_gathers(self) -> None:
        """Wait for the weights that the distributed optimizer gathers, as hooks on layers do without graphs."""
        if getattr(self.model, "remove_forward_pre_hook_handles", None):
            for group in self.model.bucket_groups + self.model.expert_parallel_bucket_groups:
                group.finish_param_sync()

    def _run_model(
        self, forward: Callable, microbatch: int, input: torch.Tensor | None, *arguments: Any, **named: Any
    ) -> torch.Tensor:
        """Capture or replay the model's forward, and return its output in memory of its own, apart from autograd's graph."""
        call, key = (arguments, named), (self.stage, microbatch)
        passes = self.graphs.passes.get(key)
        if passes is None:
            own = None if input is None else self.graphs.fixed(input).requires_grad_()
            passes = self.graphs.passes[key] = PassGraphs(FixedArguments.of(self.graphs, call), own)
            logged, sums = dict(MTPLossLoggingHelper.tracker), _sums_of_experts()
            cut = partial(self._cut, passes, current_queue())
            model = unwrap_model(self.model)
            with experts_left_out(model, self._layers, cut, passes.earlier), self._captured(passes):
                passes.capture_forward(self.graphs, partial(self._forward_once, forward, passes))
            self.graphs.weights[self.stage] = _quantised_weights(self.model)
            passes.logged = _logged_since(logged)
            _check_begun(_sums_of_experts().keys() - sums.keys(), "routers")
            assert passes.output is not None
            passes.output.data = passes.output.new_empty(1)
        else:
            passes.fill(call, input)
            passes.replay_forward(self.graphs)
            MTPLossLoggingHelper.tracker.update(passes.logged)
        if input is not None:
            input.data = input.new_empty(1)  # copied, and the executor keeps the tensor until the backward
        assert passes.result is not None
        output = passes.result.clone()
        if self._computes_loss(microbatch):
            self._outputs_of_model[microbatch] = output.requires_grad_()
        return output

    @staticmethod
    def _captured(passes: PassGraphs) -> AbstractContextManager:
        """Return a context in which weight gradients that wait for a W are captured. Those of gaps are not."""
        return collecting(passes.works) if defers() else nullcontext()

    def _cut(
        self,
        passes: PassGraphs,
        queue: WeightGradientQueue | None,
        run: Callable[..., torch.Tensor],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        with collecting(queue):
            return passes.cut(self.graphs, run, *tensors)

    def _forward_once(self, forward: Callable, passes: PassGraphs) -> None:
        self._set_input_tensor([passes.input])
        arguments, named = passes.arguments.call
        output = forward(*arguments, **named)
        if not isinstance(output, torch.Tensor):
            raise UnsupportedError(
                "graph-model", f"the model returns a {type(output).__name__}, not a tensor; pass --cuda-graph-impl none"
            )
        if passes.input is not None and output.untyped_storage() is passes.input.untyped_storage():
            output = output.clone()  # of a stage without layers, whose output is given up
        passes.output, passes.result = output, self.graphs.result(output)
        with torch.no_grad():
            passes.result.copy_(output)

    def backward(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        passes, of_model = self.graphs.passes[self.stage, microbatch], self._outputs_of_model.pop(microbatch, None)
        with self.as_chunk():
            if of_model is not None:
                output_gradient = schedules.backward_step(of_model, output, output_gradient, self.step.config)
            if output_gradient is None:
                raise UnsupportedError(
                    "graph-model", "the loss does not depend on the model's output; pass --cuda-graph-impl none"
                )
            # The backward of further losses reads their scales.
            if self.step.config.mtp_num_layers:
                self.graphs.fix_scale(MTPLossAutoScaler)
            if self._layers:
                self.graphs.fix_scale(MoEAuxLossAutoScaler)
            if not passes.backward:
                passes.gradient = self.graphs.fixed(output_gradient)
                autograd = partial(schedules.custom_backward, passes.output, passes.gradient)
                passes.capture_backward(self.graphs, autograd, self.defer_weight_gradients, self._captured(passes))
                if not defers():
                    self.graphs.free(passes)
            else:
                passes.fill_gradient(output_gradient)
                passes.replay_backward(self.graphs, self.defer_weight_gradients)
        return None if passes.input_gradient is None else passes.input_gradient.clone()
