"""Take the optimizer steps of double-buffered weights (PipeDream-2BW) when an action needs the new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS, ChainedOptimizer
from megatron.core.utils import get_model_config

from megatron_pipemem.features.asynchronous.runtime import WeightVersions
from megatron_pipemem.features.overlap_steps.megatron.optimizer import LateNorm, OverlappedOptimizer
from megatron_pipemem.features.overlap_steps.megatron.snapshot import hyperparameters
from megatron_pipemem.features.overlap_steps.megatron.steps import OverlappedSteps
from megatron_pipemem.mcore.step.extension import OverlapStatistics, Step, untimed
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.stream import gain_without_barrier


class _PostponedStep(NamedTuple):
    """The gradients of a batch whose optimizer step has not been taken, with their norm and settings."""

    norm: LateNorm  # the norm of these gradients, which may not have arrived yet
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]  # pairs of a parameter of the optimizer and its gradient
    # The optimizer's parameter groups, each with the settings that it had at the end of the batch.
    hyperparameters: Sequence[tuple[dict, dict]]


class DelayedOptimizer(OverlappedOptimizer):
    """Postpones the optimizer steps of a training loop until an action needs the new weights.

    With double-buffered weights, the batch after the next one is the first that needs the updated weights. Until then
    the gradients are kept in memory of their own, because the next batch accumulates into Megatron's buffers.
    ``resolve`` then takes Megatron's own step with them, and with the norm and the settings of their batch. So no step
    has to be undone.
    """

    delays = True

    def __init__(self) -> None:
        super().__init__()
        self.weights: WeightVersions | None = None
        self._waiting: _PostponedStep | None = None
        self._kept: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def has_postponed_step(self) -> bool:
        """Whether an optimizer step is postponed and not yet taken."""
        return self._waiting is not None

    def open(self, pipeline: dist.ProcessGroup, on_host: bool) -> None:
        """Create the process groups for the gradient norm. Every rank of the job must call this at the same time.

        Megatron also asks all ranks here, for the whole run, which groups of parameters have a norm of their own.
        """
        super().open(pipeline, on_host)
        # Megatron asks all ranks once whether any has such parameters. In the middle of a batch, not all could answer.
        for name in SEPARATE_GRAD_NORM_GROUPS:
            self.require().has_grad_norm_group(name)

    def _take(self, norm: LateNorm, take_step: Callable[[], tuple]) -> tuple[bool, LateNorm, None]:
        """Keep the gradients and the optimizer's settings for the postponed step, and return as if it had been taken."""
        optimizer = self.require()
        self._waiting = _PostponedStep(norm, self._keep(optimizer), hyperparameters(optimizer.param_groups))
        return self._ahead_of(norm, True)

    def resolve(self) -> None:
        """Take the postponed optimizer step, if there is one, when its norm has arrived: the next version of the
        weights.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        optimizer, weights, take_step = self.require(), self.weights, self._step
        assert weights is not None and take_step is not None, "a batch has run"
        weights.advance([weights.newest])
        for parameter, gradient in waiting.gradients:
            parameter.grad = gradient
        with (
            untimed(get_model_config(self._chunks[0]), optimizer),
            _earlier_settings(waiting.hyperparameters),
            _methods_replaced(optimizer, prepare_grads=lambda: False, get_grad_norm=waiting.norm.item),
        ):
            take_step()
        for parameter, _ in waiting.gradients:
            parameter.grad = None
        weights.forget_updates()

    def statistics(self) -> OverlapStatistics:
        """Return the base class's statistics, with the bytes of the kept gradients filled in."""
        waiting = sum(gradient.nbytes for gradient in self._kept.values())
        return super().statistics()._replace(waiting_gradient_bytes=waiting)

    def release(self, orderly: bool) -> None:
        if not orderly:
            self._waiting = None
        super().release(orderly)
        self._kept.clear()

    def _keep(self, optimizer: ChainedOptimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take ``grad`` from each parameter that has one, and return the pairs of parameter and gradient.

        Gradients in buffers that the next batch overwrites are copied.
        """
        chunks: list[Any] = self._chunks  # of DistributedDataParallel
        shared = {
            buffer.grad_data.untyped_storage().data_ptr()
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        }
        taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in optimizer.get_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.untyped_storage().data_ptr() in shared:
                kept = self._kept.setdefault(parameter, torch.empty_like(gradient))
                copied.append((kept, gradient))
                gradient = kept
            taken.append((parameter, gradient))
        if copied:
            torch._foreach_copy_([kept for kept, _ in copied], [gradient for _, gradient in copied])
        return taken


class DelayedSteps(OverlappedSteps):
    """The extension that lets a rank of double-buffered weights (PipeDream-2BW) begin the next batch early."""

    def _gain(self, step: Step) -> float:
        shape, planned = step.shape, step.planned
        name, p, m = planned.schedule.name, shape.num_devices, shape.num_microbatches
        return gain_without_barrier(
            build_schedule(name, num_devices=p, num_microbatches=m, update_every=m), planned.costs
        )


@contextmanager
def _methods_replaced(optimizer: ChainedOptimizer, **functions: Callable) -> Iterator[None]:
    """Replace methods of the optimizer by ``functions`` while the block runs."""
    vars(optimizer).update(functions)
    try:
        yield
    finally:
        for name in functions:
            delattr(optimizer, name)


@contextmanager
def _earlier_settings(groups: Sequence[tuple[dict, dict]]) -> Iterator[None]:
    """Set parameter groups to earlier settings while the block runs. Other changes that the block makes to them are
    kept.
    """
    now = [
        (group, {name: group[name] for name, value in earlier.items() if group[name] != value})
        for group, earlier in groups
    ]
    for group, earlier in groups:
        group.update(earlier)
    try:
        yield
    finally:
        for group, later in now:
            group.update(later)
