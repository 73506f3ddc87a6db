"""Give an asynchronous stage an optimizer that it steps by itself, after every microbatch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_pipemem.config.refusals import asynchronous
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.refusals import check_config


class StageOptimizer:
    """Catches the optimizer that a training loop builds, and takes its steps in the loop's place."""

    def __init__(self) -> None:
        self._caught = None

    def catch(self, original: Callable) -> Callable:
        """Wrap ``get_megatron_optimizer``."""

        def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
            optimizer = original(config, model_chunks, *args, **kwargs)
            check_config(config, *asynchronous(per_batch=False))
            self.release()
            self._caught = optimizer
            # The loop steps once per batch. By then the stage has done so for every microbatch.
            optimizer.step = lambda: (True, None, None)
            return optimizer

        return get_megatron_optimizer

    def step(self, chunks: list[torch.nn.Module], reduce: Callable[[], None]) -> None:
        """Update the parameters with the gradients that are there, and clear those.

        Args:
            chunks: of this rank.
            reduce: sums the gradients over data-parallel ranks.
        """
        reduce()
        self._caught.prepare_grads()
        self._caught.step_with_ready_grads()
        for chunk in chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        self._caught.zero_grad()

    def require(self) -> None:
        """Raises:
        UnsupportedError: no optimizer has been caught.
        """
        if self._caught is None:
            raise UnsupportedError(
                "this schedule steps the optimizer after every microbatch, but none was built since enable(); call enable() "
                "before get_megatron_optimizer() is imported and called"
            )

    def release(self) -> None:
        """Give the loop its step back."""
        if self._caught is not None:
            del self._caught.step
            self._caught = None
