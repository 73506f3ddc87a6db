"""Run one chunk of the model on the slices of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.slices.megatron.model import KeyValueCaches, SlicedModel
from megatron_pipemem.mcore.model.stages import ChunkStage, Tape


@dataclass(eq=False)
class _OpenSequence:
    """The shared data of the slices of one microbatch in flight."""

    caches: KeyValueCaches  # keys and values of its earlier slices
    data: Tape | None  # read by its first slice; ``None`` if the stage reads none
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """of the last stage, by slice: the model's output, without its graph"""
    running: torch.Tensor | None = None
    """its output for the slice that runs, with its graph"""
    joined: torch.Tensor | None = None
    """the outputs of all slices, as the loss function gets them"""
    gradients: Sequence[torch.Tensor] = ()
    """of the loss by the output of every slice"""


@dataclass
class SlicedStage(ChunkStage):
    """A stage that runs slices. They are numbered through, and take the place of microbatches.

    Every slice calls the user's forward step, which reads the same batch each time. The loss function runs once per
    microbatch, after the last slice, on the model's outputs for all of them. So the loss and its report are those of
    the whole sequence.
    """

    sliced: SlicedModel = field(kw_only=True)
    bounds: Sequence[tuple[int, int]] = field(kw_only=True)  # of every slice: its first token, and the end
    # gets every tensor that is kept in addition to autograd's
    hold: Callable[[torch.Tensor], object] = field(kw_only=True)
    _open: dict[int, _OpenSequence] = field(default_factory=dict)

    def forward(self, microbatch: int, input: torch.Tensor | None, will_recompute: bool = False) -> torch.Tensor:
        number, part = divmod(microbatch, len(self.bounds))
        if part == 0:
            data = None if self.data_iterator is None else Tape(self.data_iterator)
            self._open[number] = _OpenSequence(KeyValueCaches(self.bounds[-1][1], self.hold), data)
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
        """Find the loss's gradient by the output of every slice: slices run backward one after the other."""
        (gradient,) = torch.autograd.grad(loss, joined, allow_unused=True)
        if gradient is None:
            raise UnsupportedError(
                "slices-forward-step",
                "the loss function does not use its argument, and sequence slices are joined there; compute the loss from "
                "that argument, or take a schedule without slices",
            )
        self.hold(gradient)
        sequence.gradients = gradient.split([end - begin for begin, end in self.bounds], dim=1)

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
