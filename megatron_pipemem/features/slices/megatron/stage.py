"""Run the steps of schedules with sequence slices on Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from weakref import WeakKeyDictionary

import torch

from megatron_pipemem.config.refusals import refuse_sliced
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.megatron.model import KeyValueCaches, SlicedModel, boundaries
from megatron_pipemem.features.slices.prices import slice_tokens
from megatron_pipemem.mcore.model.stages import ChunkStage, Tape
from megatron_pipemem.mcore.model.whole_model import model_of
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.planner.counts import attention_share
from megatron_pipemem.runtime.executor import StepFeature


@dataclass(eq=False)
class _OpenSequence:
    """The data that the slices of one microbatch share until the last backward."""

    caches: KeyValueCaches  # keys and values of the slices that have run
    data: Tape | None  # the data that its first slice read; ``None`` if the stage reads no data
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """the outputs of the last stage by slice, without their graph"""
    running: torch.Tensor | None = None
    """the output of the last stage for the slice that runs now, with its graph"""
    joined: torch.Tensor | None = None
    """the outputs of all slices in one tensor, as the loss function gets them"""
    gradients: Sequence[torch.Tensor] = ()
    """the gradient of the loss with respect to the output of each slice"""


@dataclass
class SlicedStage(ChunkStage):
    """A stage that runs slices in place of microbatches. With n slices, slice i of microbatch k has the number ``k * n
    + i``.

    Each slice calls the user's forward step, which reads the same batch each time. The loss function runs once for each
    microbatch: after its last slice, with the model's outputs for all slices. So the loss and its report are those of
    whole sequences.
    """

    sliced: SlicedModel = field(kw_only=True)
    bounds: Sequence[tuple[int, int]] = field(kw_only=True)  # ``(first token, end)`` of each slice
    # Called with each tensor that is kept in addition to those that autograd saves.
    hold: Callable[[torch.Tensor], object] = field(kw_only=True)
    _open: dict[int, _OpenSequence] = field(default_factory=dict)

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        number, part = divmod(microbatch, len(self.bounds))
        if part == 0:
            data = None if self.data_iterator is None else Tape(self.data_iterator)
            self._open[number] = _OpenSequence(KeyValueCaches(self.bounds[-1][1], self.hold, self._leave_out), data)
        output = super().forward(microbatch, input, will_recompute)
        if self.step.forward_only and part == len(self.bounds) - 1:
            del self._open[number]
        return output

    def backward(
        self,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        number, part = divmod(microbatch, len(self.bounds))
        sequence = self._open[number]
        if self.is_last:
            # A scalar, as of a whole microbatch: Megatron scales its gradient.
            output = (output * sequence.gradients[part]).sum()
        with self.sliced.running(*self.bounds[part], sequence.caches):
            gradient = super().backward(microbatch, input, output, output_gradient)
        if part == 0:
            del self._open[number]
        return gradient

    def _run(
        self, microbatch: int, input: torch.Tensor | None, data: Iterator | None, loss_data: list
    ) -> tuple[torch.Tensor, torch.Tensor]:
        number, part = divmod(microbatch, len(self.bounds))
        sequence = self._open[number]
        with self.sliced.running(*self.bounds[part], sequence.caches):
            output, num_tokens = super()._run(microbatch, input, data, loss_data)
        if not self.is_last:
            return output, num_tokens
        running, joined = sequence.running, sequence.joined
        sequence.running = sequence.joined = None
        if joined is not None and joined.requires_grad:
            self._begin_backward(sequence, output, joined)
        assert running is not None, "the forward step has run"
        return running, num_tokens

    def _begin_backward(self, sequence: _OpenSequence, loss: torch.Tensor, joined: torch.Tensor) -> None:
        """Compute the gradient of the loss with respect to the output of each slice, for their later backwards.

        ``joined`` has the outputs of all slices. The gradients are stored in ``sequence``. Raise an UnsupportedError if
        the loss does not depend on ``joined``.
        """
        (gradient,) = torch.autograd.grad(loss, joined, allow_unused=True)
        if gradient is None:
            raise UnsupportedError(
                "slices-forward-step",
                "the loss function does not use its argument, which has the outputs of all sequence slices; compute the "
                "loss from that argument, or take a schedule without slices",
            )
        self.hold(gradient)
        sequence.gradients = gradient.split([end - begin for begin, end in self.bounds], dim=1)

    def _leave_out(self, tensor: torch.Tensor) -> None:
        for counter in self.counters:
            counter.exclude([tensor])

    def _data(self, microbatch: int) -> Iterator | None:
        number, part = divmod(microbatch, len(self.bounds))
        data = self._open[number].data
        return data if data is None or part == 0 else data.again()

    def _number(self, microbatch: int) -> int:
        return microbatch // len(self.bounds)

    def _computes_loss(self, microbatch: int) -> bool:
        return self.is_last and (microbatch + 1) % len(self.bounds) == 0

    def _forward_step(self, microbatch: int) -> Callable:
        if not self.is_last:
            return self.step.forward_step_func
        number, part = divmod(microbatch, len(self.bounds))
        sequence, (begin, end) = self._open[number], self.bounds[part]

        def joining(*arguments):
            output, loss_function = self.step.forward_step_func(*arguments)
            if not isinstance(output, torch.Tensor) or output.dim() < 2 or output.size(1) != end - begin:
                shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                raise UnsupportedError(
                    "slices-forward-step",
                    f"the forward step returns {shape} for {end - begin} tokens, and sequence slices are joined along "
                    "dimension 1; return the model's output unchanged and do the rest in the loss function, or take a schedule "
                    "without slices",
                )
            sequence.running, sequence.outputs[part] = output, output.detach()
            if not self._computes_loss(microbatch):
                return output, loss_function
            sequence.joined = torch.cat([sequence.outputs[each] for each in range(len(self.bounds))], dim=1)
            if not self.step.forward_only:
                sequence.joined.requires_grad_(torch.is_grad_enabled())
            return sequence.joined, loss_function

        return joining


class SequenceSlices(Extension):
    """The extension that cuts sequences into slices in steps whose schedule has slices. It does nothing in other
    steps.
    """

    def __init__(self, cut: str) -> None:
        self._cut = cut
        self._models: WeakKeyDictionary[torch.nn.Module, SlicedModel] = WeakKeyDictionary()
        self._bounds: list[tuple[int, int]] = []

    def prepare(self, step: Step) -> None:
        """Choose the tokens of each slice of this step, and set the shapes of the slices' messages.

        Raises:
            UnsupportedError: the model or its configuration cannot run in slices, or the sequences cannot be cut into
                so many slices.
        """
        if step.program.schedule.slices == 1:
            return
        refuse_sliced(lambda attribute: getattr(step.context.config, attribute, None))
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
        """Replace the stages of the step by stages that run slices."""
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
    """Return a function that counts a tensor of several slices in the ledger, and excludes it from offload."""
    ledger = step.observation.ledger

    def hold(tensor: torch.Tensor) -> None:
        if ledger is not None:
            ledger.hold(tensor)
        for counter in step.counters:
            counter.exclude([tensor])

    return hold
