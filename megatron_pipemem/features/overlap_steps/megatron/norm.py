"""Sum the gradient norm over all ranks while they compute."""

from __future__ import annotations

from functools import total_ordering

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_pipemem.runtime.transport import destroy_groups, new_groups

MARGIN = 1e-4
"""Part of the limit that a norm must stay below it, to be sure that Megatron, which sums in another order, clips nothing."""


class LateSum:
    """A number that is summed over the ranks of a group while they compute."""

    def __init__(self, own: torch.Tensor, group: dist.ProcessGroup):
        self._total = own.clone()
        self._work = dist.all_reduce(self._total, group=group, async_op=True)

    def result(self) -> torch.Tensor:
        """Wait until every rank of the group has told its part, and return the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total


def rounded(value: float) -> float:
    """Return a number in single precision, as it comes back from other ranks."""
    return torch.tensor(value, dtype=torch.float).item()


@total_ordering
class LateNorm:
    """The gradient norm of a step, known when every rank has ended it. Reading the value waits until then.

    It equals Megatron's norm to the bit: the same parts, summed over the same ranks. ``everywhere`` is the sum of the
    squares of all copies of the model, ``copies`` of them for each one in ``square``. With ``in_single`` the norm is
    rounded to single precision.
    """

    def __init__(self, square: LateSum, everywhere: LateSum, copies: int, in_single: bool = False):
        self._square, self._everywhere, self._copies, self._in_single = square, everywhere, copies, in_single
        self._value: float | None = None

    def item(self) -> float:
        """Return the norm."""
        if self._value is None:
            total = self._square.result()
            on_device = (
                clip_grads.multi_tensor_scale_tensor_impl is not None
            )  # Megatron takes the root there, and rounds
            value = total.pow(0.5).item() if on_device else total.item() ** 0.5
            self._value = rounded(value) if self._in_single else value
        return self._value

    def in_single(self) -> LateNorm:
        """Return it rounded to single precision, as Megatron's loop logs it."""
        return LateNorm(self._square, self._everywhere, self._copies, in_single=True)

    def is_below(self, limit: float) -> bool:
        """Return whether the norm is so far below the limit that Megatron clips nothing. ``False`` if the norm is NaN.

        The answer comes from one sum over all ranks of the job, so it is the same on every rank.
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
    """Computes norms on communicators of their own, so that nothing else waits for them.

    Every rank of the job must make and close this at the same time. ``pipeline`` is the process group of this rank's
    pipeline, whose time-out the new groups have. With ``on_host`` the host's network carries the norms, for devices on
    which a waiting kernel would block all others.
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
        """Begin to sum up the norm of the gradients as they are now."""
        own = self._own_square()
        square = LateSum(own, self._group)
        if self._world is self._group:
            return LateNorm(square, square, 1)
        return LateNorm(square, LateSum(own, self._world), self._copies)

    def total(self, own: float) -> LateSum:
        """Begin to sum a number up over all ranks of the job."""
        return LateSum(torch.tensor([own], dtype=torch.float, device=torch.cuda.current_device()), self._world)

    def _own_square(self) -> torch.Tensor:
        """Return the square of the norm of this rank's part, computed as Megatron does."""
        gradients = [each for part in self._optimizer.chained_optimizers for each in part.get_grads_for_grad_norm()]
        device = torch.cuda.current_device()
        if not gradients:
            return torch.zeros(1, dtype=torch.float, device=device)
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
        return norm**2.0

    def close(self) -> None:
        """Close the communicators: nothing is under way on them."""
        destroy_groups({self._group, self._world})
