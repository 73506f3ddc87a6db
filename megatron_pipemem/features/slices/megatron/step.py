"""Let schedules with sequence slices run on stages for slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from weakref import WeakKeyDictionary

import torch

from megatron_pipemem.config.refusals import SLICED
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.megatron.model import SlicedModel, boundaries
from megatron_pipemem.features.slices.megatron.stage import SlicedStage
from megatron_pipemem.features.slices.prices import slice_tokens
from megatron_pipemem.mcore.model.whole_model import model_of
from megatron_pipemem.mcore.refusals import check_config
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.planner.counts import attention_share
from megatron_pipemem.runtime.executor import StepFeature


class SequenceSlices(Extension):
    """Cuts the sequences of steps whose schedule has slices, and does nothing in other steps (``slice_tokens``)."""

    def __init__(self, cut: str) -> None:
        self._cut = cut
        self._models: WeakKeyDictionary[torch.nn.Module, SlicedModel] = WeakKeyDictionary()
        self._bounds: list[tuple[int, int]] = []

    def prepare(self, step: Step) -> None:
        """Say how long messages are.

        Raises:
            UnsupportedError: the model or its configuration cannot run in slices, or sequences cannot be cut into so many.
        """
        if step.program.schedule.slices == 1:
            return
        check_config(step.context.config, SLICED)
        if step.message_shape is None or step.tokens is None or step.message.shape is None:
            raise UnsupportedError(
                "slices-forward-step",
                "sequence slices need messages of [tokens, microbatch, hidden size]; drop the function that changes them "
                "(adjust_tensor_shapes_fn), or take a schedule without slices",
            )
        (b, s), config = step.tokens[0], step.context.config
        ranks = step.groups.tp.size() if config.sequence_parallel else 1
        share = attention_share(model_of(config, s))
        tokens = slice_tokens(s, step.program.schedule.slices, self._cut, share, multiple=ranks)
        self._bounds = boundaries(tokens)
        shapes = [step.message_shape(b, each) for each in tokens]
        if len(set(shapes)) == 1:
            step.message = replace(step.message, shape=shapes[0])
        else:
            step.message = replace(step.message, shape=None, shapes=shapes * len(step.tokens))
        for chunk in step.chunks:
            if chunk not in self._models:
                self._models[chunk] = SlicedModel(chunk)

    def extend_executor(self, step: Step) -> Sequence[StepFeature]:
        """Put other stages in the places of those that run whole microbatches."""
        if step.program.schedule.slices > 1:
            hold = _holder(step)
            for stage, runner in step.stages.items():
                given = {each.name: getattr(runner, each.name) for each in fields(runner) if each.init}
                sliced = self._models[runner.model]
                step.stages[stage] = SlicedStage(**given, sliced=sliced, bounds=self._bounds, hold=hold)
        return ()

    def around(self, step: Step) -> AbstractContextManager:
        return self._hooked(step) if step.program.schedule.slices > 1 else nullcontext()

    @contextmanager
    def _hooked(self, step: Step) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in step.chunks:
                stack.enter_context(self._models[chunk].hooked())
            yield


def _holder(step: Step) -> Callable[[torch.Tensor], object]:
    """Return a function that counts a tensor of several slices, and keeps it on the device."""
    ledger = step.observation.ledger

    def hold(tensor: torch.Tensor) -> None:
        if ledger is not None:
            ledger.hold(tensor)
        for counter in step.counters:
            counter.exclude([tensor])

    return hold
