"""A pipeline device whose passes are timed sleeps: one class of stage that every runtime runs.

A sleeping rank needs no processor, so eight devices fit on two cores and the time between passes is what the runtime
itself and its messages cost.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient, WeightGradientQueue, current_queue
from megatron_pipemem.schedule.action import Action, Kind

ROWS, WIDTH = 2, 8
"""Tokens and features of a message: as small as can be, links are not what is emulated."""

_PR_SET_TIMERSLACK = 29
_SPIN = 1e-4
"""Seconds before the end of a pass from which the clock is watched: the kernel wakes sleepers this much late."""


def sharpen_timer() -> None:
    """Let sleeps of this process end within microseconds. Linux's default lets them oversleep by 50 us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def sleep_until(moment: float) -> float:
    """Return at a time of ``perf_counter``, or at once if it has passed. The result is the time of the return."""
    time.sleep(max(moment - time.perf_counter() - _SPIN, 0.0))
    while (now := time.perf_counter()) < moment:
        pass
    return now


class Device:
    """What one rank did in one step: its passes, and the activations that autograd really kept.

    Args:
        price: seconds of a pass, given its kind, its stage (or device) and its microbatch.
        tokens: how many activations each forward of a stage counts for, in order; left out, each counts for one.

    Attributes:
        scale: what durations are multiplied with; 0 for a step that only warms up.
        passes: ``(action, start, end)`` of every pass of the step, as they ran, a B as I and W. Microbatches, or slices of
            them, have the number of their forward on this stage.
        peak: the most that was kept right after a forward had begun, in activations of one stage. What a backward holds for a
            moment is not part of it.
    """

    def __init__(self, price: Callable[[Kind, int, int], float], tokens: Sequence[float] = ()):
        self._price, self._tokens = price, tokens
        self.scale = 1.0
        self.reset()

    def reset(self) -> None:
        """Forget the last step."""
        self.passes: list[tuple[Action, float, float]] = []
        self.peak = 0.0
        self._counts: dict[tuple[Kind, int], int] = defaultdict(int)
        self._alive: list[tuple[StorageWeakRef, float]] = []

    def new_activation(self, stage: int) -> tuple[torch.Tensor, int]:
        """Return what a forward leaves behind until its weight gradient is done, and the forward's number."""
        activation, number = torch.empty(1), self._counts[Kind.F, stage]
        self.hold(activation, self._tokens[number] if self._tokens else 1)
        self._alive = [(reference, held) for reference, held in self._alive if not reference.expired()]
        self.peak = max(self.peak, sum(held for _, held in self._alive))
        return activation, number

    def hold(self, tensor: torch.Tensor, size: float) -> None:
        """Count a tensor as so many activations, for as long as anything keeps it."""
        self._alive.append((StorageWeakRef(tensor.untyped_storage()), size))

    def work(self, kind: Kind, stage: int, since: float, number: int | None = None) -> None:
        """Be busy until the pass that began at ``since`` has taken its time.

        Args:
            kind: of the pass.
            stage: its stage, or its device.
            since: when it began.
            number: of its forward; left out, passes of a kind are counted.
        """
        if number is None:
            number = self._counts[kind, stage]
        deadline = since + self.scale * self._price(kind, stage, number)
        end = sleep_until(deadline)
        self.passes.append((Action(kind, stage, number), since, end))
        self._counts[kind, stage] += 1


class SleepingStage(torch.nn.Module):
    """One stage: ``output = input + weight``, by two paths through autograd.

    A full backward walks the input path, which sleeps I, and then the weight path, which sleeps W. A runtime that splits
    backwards through autograd's graph walks them one at a time; one that collects weight gradients in a queue finds W there.
    What the stage does besides sleeping is part of its passes.

    Args:
        device: takes the time of the passes.
        stage: its number.
    """

    def __init__(self, device: Device, stage: int):
        super().__init__()
        self.device, self.stage = device, stage
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH))
        # As in a real model: the first stage has an input gradient to compute although nobody receives it.
        self.embedding = torch.nn.Parameter(torch.zeros(WIDTH)) if stage == 0 else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        since = time.perf_counter()
        if self.embedding is not None:
            input = input + self.embedding
        activation, number = self.device.new_activation(self.stage)
        ran, queue = _Forward(self, number), current_queue()
        if queue is not None:
            output = _InputPath.apply(input, activation, ran, queue)
        else:
            # Built first, because autograd runs the newest node first.
            weight = _WeightPath.apply(self.weight, activation, ran)
            output = _InputPath.apply(input, activation, ran, None) + weight
        self.device.work(Kind.F, self.stage, since)
        return output


class _Forward(NamedTuple):
    """Say which forward a backward belongs to."""

    stage: SleepingStage
    number: int

    def work(self, kind: Kind, since: float) -> None:
        self.stage.device.work(kind, self.stage.stage, since, self.number)


class _InputPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input: torch.Tensor, activation: torch.Tensor, ran: _Forward, queue: WeightGradientQueue | None):
        ctx.save_for_backward(activation)
        ctx.ran, ctx.queue = ran, queue
        return input.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        since = time.perf_counter()
        (activation,) = ctx.saved_tensors
        if ctx.queue is not None:
            ctx.queue.put(_DeferredWeight(ctx.ran, activation, gradient))
        gradient = gradient.contiguous()  # that of a sum is not, and not every runtime can send it
        ctx.ran.work(Kind.I, since)
        return gradient, None, None, None


class _WeightPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: torch.Tensor, activation: torch.Tensor, ran: _Forward):
        ctx.save_for_backward(activation)
        ctx.ran = ran
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.ran.work(Kind.W, time.perf_counter())
        return gradient, None, None


class _DeferredWeight(DeferredWeightGradient):
    """A W that waits in the queue."""

    def __init__(self, ran: _Forward, activation: torch.Tensor, gradient: torch.Tensor):
        self._ran, self._activation, self._gradient = ran, activation, gradient

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._activation, self._gradient

    def run(self) -> None:
        since = time.perf_counter()
        weight = self._ran.stage.weight
        gradient = self._gradient.sum_to_size(weight.shape)
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._ran.work(Kind.W, since)
