"""Step Megatron's optimizer without waiting for the gradient norm, and take back a step that should have been clipped."""

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
"""Steps in a row that must need no clipping before one is taken without waiting for its norm."""


class OverlappedOptimizer:
    """Takes the optimizer steps of a training loop.

    Without clipping, a step is taken, and its norm arrives later. With clipping, a step is taken without it and is
    *pending* until ``validate`` knows the norm. Until then the gradients stay, even if the loop zeroes them, because
    Megatron's own step may have to replace it.

    One sum over all ranks of the job decides whether a step was right. So every rank decides the same, and no rank
    waits for a message that another does not send.

    ``overlaps`` says whether steps may be taken without waiting, which the schedule must gain by. ``answers_locally``
    says whether the loop's questions to other ranks about the last step are answered here.
    """

    delays = False
    """Whether a step is taken when its norm is known, and never taken back."""

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
        """Build the optimizer as ``get_megatron_optimizer`` does, and take over its steps."""
        optimizer = original(config, model_chunks, *args, **kwargs)
        self.release(orderly=True)
        self._caught, self._chunks, self._step = optimizer, list(model_chunks), optimizer.step
        zero = optimizer.zero_grad
        optimizer.step = self.step
        optimizer.zero_grad = lambda *args, **kwargs: self._zero(partial(zero, *args, **kwargs))
        return optimizer

    @property
    def clip(self) -> float:
        """The largest norm that is not clipped; 0 where nothing is."""
        return self.require().config.clip_grad

    @property
    def takes_back(self) -> bool:
        """Whether a step may turn out to be wrong."""
        return self.clip > 0 and not self.delays

    @property
    def is_pending(self) -> bool:
        """Return whether the last optimizer step may still have to be undone."""
        return self._pending is not None

    def require(self) -> ChainedOptimizer:
        """Return the optimizer.

        Raises:
            UnsupportedError: none has been caught.
        """
        if self._caught is None:
            raise UnsupportedError(
                "enabled-too-late",
                "--pipemem-overlap-steps takes the optimizer's steps, but none was built since enable(); call enable() before "
                "get_megatron_optimizer() is imported and called",
            )
        return self._caught

    def open(self, pipeline: dist.ProcessGroup, on_host: bool) -> None:
        """Make the communicators of steps without waiting (``Norms``). Every rank of the job must call this at the same
        time.
        """
        self._norms = Norms(self._caught, pipeline, on_host)

    @torch.no_grad()
    def step(self) -> tuple[bool, LateNorm | float | None, int | None]:
        """Update the parameters, as Megatron's ``step``; the norm may be one that is not known yet."""
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
        """Step with gradients that are ready. Their norm may not be known yet."""
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
        """Return the result of a step that has not waited for its norm."""
        self.answers_locally = True
        self._ahead += 1
        return stepped, norm, None

    def total(self, own: float) -> LateSum:
        """Begin to sum a number up over all ranks of the job. Every rank must call this at the same time."""
        assert self._norms is not None, "open() comes before overlaps"
        return self._norms.total(own)

    def validate(self) -> bool:
        """Return whether the pending step is valid, the same on every rank. A valid step is no longer pending."""
        assert self._pending is not None
        if not self._is_clean(self._pending):
            return False
        self._pending = None
        self._pay()
        return True

    def redo(self) -> None:
        """Take the pending step back, and have Megatron's own taken in its place. Every rank must call this."""
        assert self._snapshot is not None and self._step is not None, "a step is pending"
        with self._snapshot.rolled_back():
            self._step()
        self._redone += 1
        self._pending = None
        self._pay()

    def settle(self) -> None:
        """Leave no step pending. Every rank must call this at the same time."""
        if self._pending is not None and not self.validate():
            self.redo()

    def zero_chunk(self, original: Callable, chunk: torch.nn.Module) -> None:
        """Run in the place of DDP's ``zero_grad_buffer``."""
        self._zero(partial(_zero_buffer, original, chunk)) if chunk in self._chunks else original(chunk)

    def release(self, orderly: bool) -> None:
        """Give the optimizer back to the loop. If it is ``orderly``, the other ranks are there, and a pending step is
        settled.
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
        """Return the statistics of the steps so far."""
        nbytes = 0 if self._snapshot is None else self._snapshot.nbytes
        return Overlap(self._ahead, self._redone, nbytes)

    def _is_clean(self, norm: LateNorm) -> bool:
        clean = norm.is_below(self.clip)
        self._clean = self._clean + 1 if clean else 0
        return clean

    def _zero(self, zero: Callable[[], None]) -> None:
        """Zero gradients, or owe it while they may yet be needed."""
        self._owed.append(zero) if self.is_pending else zero()

    def _pay(self) -> None:
        owed, self._owed = self._owed, []
        for zero in owed:
            zero()


def _zero_buffer(original: Callable, chunk: Any) -> None:
    """Zero a chunk's gradients, maybe in the middle of a step: whether it may reduce them by itself stays as it is."""
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    last = [group.is_last_microbatch for group in groups]
    original(chunk)
    for group, is_last in zip(groups, last, strict=True):
        group.is_last_microbatch = is_last
