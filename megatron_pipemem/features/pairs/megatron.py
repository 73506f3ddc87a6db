"""Run the steps of a model with experts in the pieces of Megatron's schedule plans, so that exchanges are hidden.

Megatron can run the layers of a forward and a backward in turn: ``combined_forward_backward_step`` computes on one
stream, and exchanges the tokens of experts on another. Here every forward, backward and pair of a training step is a
call of that function. Weight gradients stay apart, where the schedule has W.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import ScheduleNode, get_comm_stream, get_comp_stream, set_streams
from megatron.core.utils import unwrap_model

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.pairs.runtime import Pairs
from megatron_pipemem.mcore.model.stages import ChunkStage
from megatron_pipemem.mcore.model.transformer_engine import defer
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import COMBINED_STEP, LANGUAGE_MODULE, Replacements
from megatron_pipemem.runtime.executor import BackwardArguments, PairRunner, StepFeature
from megatron_pipemem.runtime.weight_gradients import LateWeightGradients, current_queue

_PLAN_ARGUMENT = "return_schedule_plan"


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
    """Return the extension of a run with pairs, or raise an UpstreamError if this Megatron runs no layers in pieces."""
    COMBINED_STEP.resolve()
    return [PairedSteps()]


class PairedSteps(Extension):
    """The extension that runs training steps in the pieces of Megatron's schedule plans."""

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
        if _PLAN_ARGUMENT not in inspect.signature(step.context.forward_step_func).parameters:
            raise UnsupportedError(
                "pairs-forward-step",
                f"the forward step has no argument {_PLAN_ARGUMENT}, with which it returns model.build_schedule_plan(...) in "
                "place of model(...), as Megatron's pretrain_gpt.py does; add it, or drop --overlap-moe-expert-parallel-comm",
            )
        for chunk in step.chunks:
            if not hasattr(unwrap_model(chunk), "build_schedule_plan"):
                raise UnsupportedError(
                    "unsupported-model",
                    f"{type(unwrap_model(chunk)).__name__} has no schedule plans in this version of Megatron; drop "
                    "--overlap-moe-expert-parallel-comm",
                )
        set_streams(high_priority=step.context.config.high_priority_a2a_comm_stream)

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """Replace the stages of the step by stages that run in pieces."""
        for stage, runner in step.stages.items():
            step.stages[stage] = runner.recast(PlanStage)
        return [Pairs(step.program.schedule.pairs, lambda: torch.cuda.stream(get_comm_stream()))]


@dataclass
class PlanStage(ChunkStage):
    """A stage whose forwards and backwards run in pieces, alone or in pairs (``runtime.executor.PairRunner``)."""

    _together: tuple[PlanStage, BackwardArguments] | None = None
    """the backward to run with the next forward"""
    _gradient: torch.Tensor | None = field(default=None, init=False)
    """the result of that backward"""

    def run_pair(
        self, microbatch: int, input: torch.Tensor | None, other: PairRunner, arguments: BackwardArguments
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert isinstance(other, PlanStage)
        self._together = other, arguments
        output = self.forward(microbatch, input)
        gradient, self._gradient = self._gradient, None
        return output, gradient

    def backward(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        with self.as_chunk():
            _, _, gradient = self._combined(None, None, [], (self, (input, output, output_gradient)))
        self.defer_weight_gradients()
        return gradient

    def _megatrons_forward(
        self, microbatch: int, arrived: int, input: torch.Tensor | None, data: Iterator | None, loss_data: list
    ) -> tuple[torch.Tensor, torch.Tensor]:
        together, self._together = self._together, None
        output, num_tokens, self._gradient = self._combined(
            input,
            data,
            loss_data,
            together,
            f_model=self.model,
            f_model_chunk_id=self._virtual_stage,
            is_first_microbatch=self._is_first,
            current_microbatch=arrived,
        )
        return output, num_tokens

    def _combined(
        self,
        input: torch.Tensor | None,
        data: Iterator | None,
        loss_data: list,
        backward: tuple[PlanStage, BackwardArguments] | None,
        f_model: torch.nn.Module | None = None,
        **others: Any,
    ) -> tuple[Any, Any, Any]:
        """Run a forward of ``f_model`` together with ``backward``, or one of the two if the other is ``None``.

        ``input``, ``data`` and ``loss_data`` are the forward's. Return the forward's output, its number of tokens, and
        the gradient of the backward's input.
        """
        step = self.step
        stage, (b_input, output, gradient) = backward or (None, (None, None, None))
        return COMBINED_STEP.resolve()(
            self._with_own_weight_gradients,
            data,
            f_model,
            step.num_microbatches,
            input,
            loss_data,
            None if stage is None else stage.model,
            b_input,
            output,
            gradient,
            step.config,
            collect_non_loss_data=step.collect_non_loss_data,
            **others,
        )

    def _with_own_weight_gradients(self, *arguments: Any, **named: Any) -> tuple[Any, Callable]:
        """Call the forward step, and return its plan and loss function.

        The plan is changed so that its pieces leave weight gradients to our queues. If the backward is not split, they
        run where Megatron's own late weight gradients do: while tokens travel, or the result of the backward.
        """
        plan, loss = self.step.forward_step_func(*arguments, **named)
        queue = current_queue()
        for layer in map(plan.get_layer, range(plan.num_layers())):
            for piece in vars(layer).values():
                if isinstance(piece, ScheduleNode):
                    piece.delay_wgrad_compute = False
                    if isinstance(queue, LateWeightGradients):
                        piece.backward_dw = partial(self._run_late, queue)
        return plan, loss

    def _run_late(self, queue: LateWeightGradients) -> None:
        computing = get_comp_stream()
        defer(self.delayed, queue)
        for tensor in queue.tensors():
            # The stream of exchanges made some of them, and does not wait for this use.
            tensor.record_stream(computing)
        with torch.cuda.stream(computing):
            queue.run_part()
