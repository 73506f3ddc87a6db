"""Sum the gradient norm over all ranks in the background, while the ranks compute."""

from __future__ import annotations

from functools import total_ordering

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer

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


class Norms:
    """Computes gradient norms in process groups of their own, so that no other communication waits for them.

    Every rank of the job must create and close this object at the same time. The new groups have the time-out of
    ``pipeline``, the process group of this rank's pipeline. With ``on_host`` they use Gloo. That is for devices on
    which a waiting kernel would block all other kernels.
    """

    def __init__(self, optimizer: ChainedOptimizer, pipeline: dist.ProcessGroup, on_host: bool):
        self._optimizer = optimizer
        backend = dist.Backend.GLOO if on_host else None
        members = dist.get_process_group_ranks(optimizer.get_grad_stats_parallel_group())
        everyone = list(range(dist.get_world_size()))
        (self._group,) = new_groups([members], pipeline, "PIPEMEM_NORM", backend=backend)
        self._world = self._group
        self._copies = len(everyone) // len(members)
        if self._copies > 1:
            (self._world,) = new_groups([everyone], pipeline, "PIPEMEM_EVERYONE", backend=backend)

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
        gradients = [each for part in self._optimizer.chained_optimizers for each in part.get_grads_for_grad_norm()]
        device = torch.cuda.current_device()
        if not gradients:
            return torch.zeros(1, dtype=torch.float, device=device)
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
        return norm**2.0

    def close(self) -> None:
        """Destroy the process groups. Call it when no sum is running."""
        destroy_groups({self._group, self._world})
