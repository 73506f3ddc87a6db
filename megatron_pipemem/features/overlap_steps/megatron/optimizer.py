"""Take Megatron's optimizer steps without waiting for the gradient norm, and redo steps that needed clipping.

The norm is summed over all ranks in the background, while the ranks compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, total_ordering
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.overlap_steps.megatron.snapshot import Snapshot
from megatron_pipemem.mcore.agreement import run_on_all_ranks
from megatron_pipemem.mcore.step.extension import OverlapStatistics
from megatron_pipemem.runtime.transport import destroy_groups, new_groups

MARGIN = 1e-4
"""A norm counts as below the limit only if it is smaller by this share of the limit. Megatron sums in another order, so
its norm may differ slightly.
"""


class LateSum:
    """The sum of a number over the ranks of a group. The communication runs in the background."""

    def __init__(self, own: torch.Tensor, group: dist.ProcessGroup):
        self._total = own.clone()
        self._work = dist.all_reduce(self._total, group=group, async_op=True)

    def result(self) -> torch.Tensor:
        """Wait until every rank of the group has given its number, and return the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total


def rounded(value: float) -> float:
    """Return a number rounded to fp32, as Megatron's reduction over ranks does."""
    return torch.tensor(value, dtype=torch.float).item()


@total_ordering
class LateNorm:
    """The gradient norm of a step, before its sum over the ranks has arrived. Reading the value waits for the sum.

    The value equals Megatron's norm bit for bit, because the same parts are summed over the same ranks.

    ``square`` is the squared norm of one copy of the model. ``everywhere`` is the sum of the squared norms of
    ``copies`` copies, that is, over all ranks of the job. With ``in_single`` the value is rounded to fp32.
    """

    def __init__(self, square: LateSum, everywhere: LateSum, copies: int, in_single: bool = False):
        self._square, self._everywhere, self._copies, self._in_single = square, everywhere, copies, in_single
        self._value: float | None = None

    def item(self) -> float:
        """Wait for the sum over the ranks, and return the norm."""
        if self._value is None:
            total = self._square.result()
            on_device = (
                clip_grads.multi_tensor_scale_tensor_impl is not None
            )  # Megatron takes the root there, and rounds
            value = total.pow(0.5).item() if on_device else total.item() ** 0.5
            self._value = rounded(value) if self._in_single else value
        return self._value

    def in_single(self) -> LateNorm:
        """Return this norm rounded to fp32, as Megatron's loop logs it."""
        return LateNorm(self._square, self._everywhere, self._copies, in_single=True)

    def is_below(self, limit: float) -> bool:
        """Return whether the norm is so far below ``limit`` that Megatron would not clip. ``False`` if the norm is NaN.

        It waits for one sum over all ranks of the job, so the result is the same on every rank.
        """
        return self._everywhere.result().item() / self._copies <= (limit * (1 - MARGIN)) ** 2

    def __float__(self) -> float:
        return self.item()

    def __format__(self, form: str) -> str:
        return format(self.item(), form)

    def __repr__(self) -> str:
        return repr(self.item())

    def __eq__(self, other: object) -> bool:
        return self.item() == other

    def __lt__(self, other: float) -> bool:
        return self.item() < other

    __hash__ = None  # type: ignore[assignment]  # how Python says that there is none


class GradientNorms:
    """Computes gradient norms in process groups of their own, so that no other communication waits for them.

    Every rank of the job must create and close this object at the same time. The new groups have the time-out of
    ``pipeline``, the process group of this rank's pipeline. With ``on_host`` they use Gloo. That is for devices on
    which a waiting kernel would block all other kernels.
    """

    def __init__(self, optimizer: ChainedOptimizer, pipeline: dist.ProcessGroup, on_host: bool):
        self._optimizer = optimizer
        backend = dist.Backend.GLOO if on_host else None
        callers = optimizer.get_grad_stats_parallel_group()
        members, everyone = dist.get_process_group_ranks(callers), list(range(dist.get_world_size()))
        (self._group,) = new_groups([members], pipeline, "PIPEMEM_NORM", backend=backend, callers=callers)
        self._world = self._group
        self._copies = len(everyone) // len(members)
        if self._copies > 1:
            callers = dist.group.WORLD
            (self._world,) = new_groups([everyone], pipeline, "PIPEMEM_EVERYONE", backend=backend, callers=callers)

    def start(self) -> LateNorm:
        """Start summing the norm of the ranks' present gradients, and return the norm, whose sum may still run."""
        own = self._own_square()
        square = LateSum(own, self._group)
        if self._world is self._group:
            return LateNorm(square, square, 1)
        return LateNorm(square, LateSum(own, self._world), self._copies)

    def total(self, own: float) -> LateSum:
        """Start summing a number over all ranks of the job. ``own`` is this rank's number."""
        return LateSum(torch.tensor([own], dtype=torch.float, device=torch.cuda.current_device()), self._world)

    def _own_square(self) -> torch.Tensor:
        """Return the squared norm of this rank's gradients, computed as Megatron does."""
        parts = self._optimizer.chained_optimizers
        gradients = [gradient for part in parts for gradient in part.get_grads_for_grad_norm()]
        device = torch.cuda.current_device()
        if not gradients:
            return torch.zeros(1, dtype=torch.float, device=device)
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
        return norm**2.0

    def close(self) -> None:
        """Destroy the process groups. Call it when no sum is running."""
        destroy_groups({self._group, self._world})


CLEAN_STEPS = 10
"""Consecutive steps that must need no clipping before a step is taken without waiting for its norm."""


class OverlappedOptimizer:
    """Takes the optimizer steps of Megatron's training loop, if possible without waiting for the gradient norm.

    If the run does not clip gradients, a step is final, and its norm is known later. If it does, a step is taken
    without clipping and is *pending*: ``validate`` says later whether its norm was below the limit. Until then the
    gradients are kept, even if the loop zeroes them, because ``redo`` may have to repeat the step with clipping.

    The decision follows from one sum over all ranks of the job. So it is the same on every rank, and no rank waits for
    a message that another does not send.

    ``overlaps`` says whether steps may be taken without waiting for the norm. ``answers_locally`` says whether
    ``TrainingLoop`` answers the loop's questions about the last step without communication.
    """

    delays = False
    """Whether each step waits until its norm is known, so that no step is ever undone."""

    def __init__(self) -> None:
        self.overlaps = self.answers_locally = False
        self._caught: ChainedOptimizer | None = None
        self._chunks: list[torch.nn.Module] = []
        self._step: Callable[[], tuple] | None = None
        self._norms: GradientNorms | None = None
        self._snapshot: Snapshot | None = None
        self._pending: LateNorm | None = None
        self._postponed_zeros: list[Callable[[], None]] = []
        self._clean_steps = self._ahead_steps = self._redone_steps = 0

    def catch(self, original: Callable, config, model_chunks: list[torch.nn.Module], *args, **kwargs):
        """Build the optimizer with ``original``, ``get_megatron_optimizer``. Replace its ``step`` and ``zero_grad``."""
        optimizer = original(config, model_chunks, *args, **kwargs)
        self.release(orderly=True)
        self._caught, self._chunks, self._step = optimizer, list(model_chunks), optimizer.step
        zero = optimizer.zero_grad
        optimizer.step = self.step
        optimizer.zero_grad = lambda *args, **kwargs: self._zero(partial(zero, *args, **kwargs))
        return optimizer

    @property
    def clip(self) -> float:
        """The norm above which gradients are clipped (``--clip-grad``), or 0 if the run does not clip."""
        return self.require().config.clip_grad

    @property
    def may_undo_steps(self) -> bool:
        """Whether steps of this run may have to be undone, because they are taken before their norm is known."""
        return self.clip > 0 and not self.delays

    @property
    def is_pending(self) -> bool:
        """Whether the last optimizer step may still have to be undone."""
        return self._pending is not None

    def require(self) -> ChainedOptimizer:
        """Return the optimizer that ``catch`` has built.

        Raises:
            UnsupportedError: no optimizer has been built since ``enable()``.
        """
        if self._caught is None:
            raise UnsupportedError(
                "enabled-too-late",
                "--pipemem-overlap-steps takes the optimizer's steps, but no optimizer was built since enable(); call "
                "enable() before get_megatron_optimizer() is imported and called",
            )
        return self._caught

    def open(self, pipeline: dist.ProcessGroup, on_host: bool) -> None:
        """Create the process groups for the gradient norm (``GradientNorms``), on every rank of the job at the same time."""
        self._norms = GradientNorms(self._caught, pipeline, on_host)

    @torch.no_grad()
    def step(self) -> tuple[bool, LateNorm | float | None, int | None]:
        """Take an optimizer step and return the same as Megatron's ``step``. The norm may be a ``LateNorm``.

        A step that is still pending is resolved first.
        """
        self.resolve()
        self.answers_locally = False
        optimizer, take_step = self.require(), self._step
        assert take_step is not None, "it is kept with the optimizer"
        if not self.overlaps:
            return take_step()
        optimizer.prepare_grads()
        assert self._norms is not None, "open() comes before overlaps"
        return self._take(self._norms.start(), take_step)

    def _take(self, norm: LateNorm, take_step: Callable[[], tuple]) -> tuple[bool, LateNorm | float | None, int | None]:
        """Take an optimizer step with gradients that Megatron's ``prepare_grads`` has prepared.

        If the run clips gradients, steps wait for the norm and may clip. After ``CLEAN_STEPS`` steps in a row that
        needed no clipping, a step does not wait, and is pending.
        """
        optimizer = self.require()
        if self.clip > 0:
            if self._clean_steps < CLEAN_STEPS:
                stepped = take_step()
                self._is_clean(norm)
                return stepped
            if self._snapshot is None:  # now that the most is known that steps leave of the device's memory
                self._snapshot = run_on_all_ranks(lambda: Snapshot(optimizer))
            self._snapshot.take()
            self._pending = norm
        optimizer.grad_norms_by_group = {}
        return self._ahead_of(norm, optimizer.step_with_ready_grads())

    def _ahead_of(self, norm: LateNorm, stepped: bool) -> tuple[bool, LateNorm, None]:
        """Count a step that has not waited for its norm, and return the result of Megatron's ``step`` for it."""
        self.answers_locally = True
        self._ahead_steps += 1
        return stepped, norm, None

    def total(self, own: float) -> LateSum:
        """Start summing a number over all ranks of the job. Every rank must call this at the same time."""
        assert self._norms is not None, "open() comes before overlaps"
        return self._norms.total(own)

    def validate(self) -> bool:
        """Wait for the norm of the pending step; if it needed no clipping, as all ranks see alike, the step is final."""
        assert self._pending is not None
        if not self._is_clean(self._pending):
            return False
        self._pending = None
        self._zero_postponed()
        return True

    def redo(self) -> None:
        """Undo the pending step, and take it again with Megatron's own ``step``, which clips. Every rank must call
        this.
        """
        assert self._snapshot is not None and self._step is not None, "a step is pending"
        with self._snapshot.rolled_back():
            self._step()
        self._redone_steps += 1
        self._pending = None
        self._zero_postponed()

    def resolve(self) -> None:
        """Make a pending step final, or redo it. Every rank must call this at the same time."""
        if self._pending is not None and not self.validate():
            self.redo()

    def zero_chunk(self, original: Callable, chunk: torch.nn.Module) -> None:
        """Replace DDP's ``zero_grad_buffer``: zero the gradients of this optimizer's chunk when no step is pending."""
        self._zero(partial(_zero_buffer, original, chunk)) if chunk in self._chunks else original(chunk)

    def release(self, orderly: bool) -> None:
        """Give the optimizer its own ``step`` and ``zero_grad`` again, and free the snapshot.

        If ``orderly``, all ranks take part, and a pending step is resolved first.
        """
        if self._caught is None:
            return
        if orderly:
            self.resolve()
            if self._norms is not None:
                self._norms.close()
        if self._snapshot is not None:
            self._snapshot.close()
        del self._caught.step, self._caught.zero_grad
        self._caught, self._chunks, self._step, self._norms, self._snapshot = None, [], None, None, None
        self._pending, self._postponed_zeros, self.overlaps, self.answers_locally = None, [], False, False
        self._clean_steps = self._ahead_steps = self._redone_steps = 0

    def statistics(self) -> OverlapStatistics:
        """Return how many steps did not wait for their norm, how many were redone, and the bytes of the snapshot."""
        nbytes = 0 if self._snapshot is None else self._snapshot.nbytes
        return OverlapStatistics(self._ahead_steps, self._redone_steps, nbytes)

    def _is_clean(self, norm: LateNorm) -> bool:
        clean = norm.is_below(self.clip)
        self._clean_steps = self._clean_steps + 1 if clean else 0
        return clean

    def _zero(self, zero: Callable[[], None]) -> None:
        """Call ``zero``, which zeroes gradients, now or after the pending step is final."""
        self._postponed_zeros.append(zero) if self.is_pending else zero()

    def _zero_postponed(self) -> None:
        owed, self._postponed_zeros = self._postponed_zeros, []
        for zero in owed:
            zero()


def _zero_buffer(original: Callable, chunk: Any) -> None:
    """Zero the gradients of a chunk, but keep DDP's ``is_last_microbatch``, which ``original`` sets to True.

    In the middle of a step, DDP would otherwise begin to reduce gradients too early.
    """
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    last = [group.is_last_microbatch for group in groups]
    original(chunk)
    for group, is_last in zip(groups, last, strict=True):
        group.is_last_microbatch = is_last
