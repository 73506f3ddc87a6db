"""Take Megatron's optimizer steps without waiting for the gradient norm, and redo steps that needed clipping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.overlap_steps.megatron.norm import LateNorm, LateSum, Norms
from megatron_pipemem.features.overlap_steps.megatron.snapshot import Snapshot
from megatron_pipemem.mcore.agreement import done_by_all
from megatron_pipemem.mcore.step.extension import Overlap

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
        self._norms: Norms | None = None
        self._snapshot: Snapshot | None = None
        self._pending: LateNorm | None = None
        self._owed: list[Callable[[], None]] = []
        self._clean = self._ahead = self._redone = 0

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
    def takes_back(self) -> bool:
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
        """Create the process groups for the gradient norm (``Norms``). Every rank of the job must call this at the same
        time.
        """
        self._norms = Norms(self._caught, pipeline, on_host)

    @torch.no_grad()
    def step(self) -> tuple[bool, LateNorm | float | None, int | None]:
        """Take an optimizer step and return the same as Megatron's ``step``. The norm may be a ``LateNorm``.

        A step that is still pending is settled first.
        """
        self.settle()
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
            if self._clean < CLEAN_STEPS:
                stepped = take_step()
                self._is_clean(norm)
                return stepped
            if self._snapshot is None:  # now that the most is known that steps leave of the device's memory
                self._snapshot = done_by_all(lambda: Snapshot(optimizer))
            self._snapshot.take()
            self._pending = norm
        optimizer.grad_norms_by_group = {}
        return self._ahead_of(norm, optimizer.step_with_ready_grads())

    def _ahead_of(self, norm: LateNorm, stepped: bool) -> tuple[bool, LateNorm, None]:
        """Count a step that has not waited for its norm, and return the result of Megatron's ``step`` for it.

        ``stepped`` is the success that the result reports.
        """
        self.answers_locally = True
        self._ahead += 1
        return stepped, norm, None

    def total(self, own: float) -> LateSum:
        """Start summing a number over all ranks of the job. Every rank must call this at the same time."""
        assert self._norms is not None, "open() comes before overlaps"
        return self._norms.total(own)

    def validate(self) -> bool:
        """Wait for the norm of the pending step, and return whether the step needed no clipping. If so, the step is
        final.

        The result is the same on every rank.
        """
        assert self._pending is not None
        if not self._is_clean(self._pending):
            return False
        self._pending = None
        self._pay()
        return True

    def redo(self) -> None:
        """Undo the pending step, and take it again with Megatron's own ``step``, which clips. Every rank must call
        this.
        """
        assert self._snapshot is not None and self._step is not None, "a step is pending"
        with self._snapshot.rolled_back():
            self._step()
        self._redone += 1
        self._pending = None
        self._pay()

    def settle(self) -> None:
        """Make a pending step final, or redo it. Every rank must call this at the same time."""
        if self._pending is not None and not self.validate():
            self.redo()

    def zero_chunk(self, original: Callable, chunk: torch.nn.Module) -> None:
        """Replace DDP's ``zero_grad_buffer``: postpone zeroing the gradients of ``chunk`` while a step is pending.

        Gradients of a chunk that is not of this optimizer are zeroed at once.
        """
        self._zero(partial(_zero_buffer, original, chunk)) if chunk in self._chunks else original(chunk)

    def release(self, orderly: bool) -> None:
        """Give the optimizer its own ``step`` and ``zero_grad`` again, and free the snapshot.

        If ``orderly``, all ranks take part, and a pending step is settled first.
        """
        if self._caught is None:
            return
        if orderly:
            self.settle()
            if self._norms is not None:
                self._norms.close()
        if self._snapshot is not None:
            self._snapshot.close()
        del self._caught.step, self._caught.zero_grad
        self._caught, self._chunks, self._step, self._norms, self._snapshot = None, [], None, None, None
        self._pending, self._owed, self.overlaps, self.answers_locally = None, [], False, False
        self._clean = self._ahead = self._redone = 0

    def told(self) -> Overlap:
        """Return how many steps did not wait for their norm, how many were redone, and the bytes of the snapshot."""
        nbytes = 0 if self._snapshot is None else self._snapshot.nbytes
        return Overlap(self._ahead, self._redone, nbytes)

    def _is_clean(self, norm: LateNorm) -> bool:
        clean = norm.is_below(self.clip)
        self._clean = self._clean + 1 if clean else 0
        return clean

    def _zero(self, zero: Callable[[], None]) -> None:
        """Call ``zero``, which zeroes gradients, now or after the pending step is final."""
        self._owed.append(zero) if self.is_pending else zero()

    def _pay(self) -> None:
        owed, self._owed = self._owed, []
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
