"""Keep Megatron's own training loop from joining all ranks at the end of every step.

The loop's questions to other ranks about a step are answered here without them. Its log lines, evaluations, checkpoints
and exits run when no step is pending. A gradient norm that is not printed goes to TensorBoard and W&B one step later,
under its own iteration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_pipemem.features.overlap_steps.megatron.norm import LateNorm, LateSum, rounded
from megatron_pipemem.features.overlap_steps.megatron.optimizer import OverlappedOptimizer
from megatron_pipemem.mcore.loop_arguments import consumed_samples, is_last, prints_log, scalar_interval, write_scalars
from megatron_pipemem.mcore.patching import Replacements
from megatron_pipemem.mcore.symbols import (
    ALL_OF_PIPELINE,
    DECIDE_EXIT,
    EVALUATE,
    MOST_OF_PIPELINE,
    SAVE,
    SAVE_AND_TIME,
    SIGNALS,
    STOP_GATHERING,
    TRAIN,
    TRAINING_LOG,
)


class _Unwritten(NamedTuple):
    """A norm that is not yet in TensorBoard and W&B."""

    iteration: int  # of its step
    samples: int  # consumed until then
    norm: LateNorm  # maybe not known yet


class TrainingLoop:
    """Replaces functions of Megatron's training loop."""

    def __init__(self, optimizer: OverlappedOptimizer):
        self._optimizer = optimizer
        self._unwritten: _Unwritten | None = None
        self._signals: LateSum | None = None

    def replacements(self) -> Replacements:
        """Return the replacements in ``megatron.training``."""
        return [
            (ALL_OF_PIPELINE, self._all_of_pipeline),
            (MOST_OF_PIPELINE, self._most_of_pipeline),
            (TRAINING_LOG, self._training_log),
            *((symbol, self._settled) for symbol in (SAVE_AND_TIME, SAVE, EVALUATE, STOP_GATHERING)),
            (DECIDE_EXIT, self._decide_exit),
            (SIGNALS, self._signals_received),
            (TRAIN, self._train),
        ]

    def _all_of_pipeline(self, original: Callable, value: bool, *args, **kwargs) -> bool:
        """Every rank has taken its step."""
        return value if self._optimizer.answers_locally else original(value, *args, **kwargs)

    def _most_of_pipeline(self, original: Callable, value: LateNorm | float | None, *args, **kwargs):
        """Every rank has the norm, and every rank's learning rate is the same."""
        if not self._optimizer.answers_locally:
            return original(value, *args, **kwargs)
        if isinstance(value, LateNorm):
            return value.in_single()
        return value if value is None else rounded(value)

    def _training_log(self, original: Callable, *args, **kwargs):
        self._write_norm()
        bound = inspect.signature(original).bind(*args, **kwargs)
        told = bound.arguments
        iteration, norm = told["iteration"], told["grad_norm"]
        if prints_log(iteration, told.get("is_first_iteration", False)) or is_last(iteration):
            self._optimizer.settle()
            self._optimizer.answers_locally = False
            told["grad_norm"] = norm.item() if isinstance(norm, LateNorm) else norm
        elif isinstance(norm, LateNorm):
            told["grad_norm"] = None
            self._unwritten = _Unwritten(iteration, consumed_samples(), norm)
        return original(*bound.args, **bound.kwargs)

    def _write_norm(self) -> None:
        """Write the norm of the step before, which every rank has ended by now."""
        unwritten, self._unwritten = self._unwritten, None
        interval = scalar_interval()
        if unwritten is None or interval is None or unwritten.iteration % interval:
            return
        value = unwritten.norm.item()
        write_scalars({"grad-norm": value}, unwritten.iteration)
        write_scalars({"grad-norm vs samples": value}, unwritten.samples, wandb=False)

    def _settled(self, original: Callable, *args, **kwargs):
        self._optimizer.settle()
        return original(*args, **kwargs)

    def _decide_exit(self, original: Callable, *args, **kwargs):
        leaves = original(*args, **kwargs)
        if leaves:
            self._optimizer.settle()
            self._write_norm()
        return leaves

    def _signals_received(self, original: Callable[[Any], list], handler: Any) -> list:
        """Report a signal one step after a rank has received it, when all ranks know it."""
        if not self._optimizer.overlaps:
            return original(handler)
        earlier, self._signals = self._signals, self._optimizer.total(float(handler._signal_received))
        return [] if earlier is None else [earlier.result().item() > 0]

    def finish(self) -> None:
        """Leave nothing under way between ranks."""
        if self._signals is not None:
            self._signals.result()
            self._signals = None

    def _train(self, original: Callable, *args, **kwargs):
        result = original(*args, **kwargs)
        self._optimizer.settle()
        return result
