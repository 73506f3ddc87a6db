"""Replace the functions of Megatron's training loop at which all ranks wait for each other after every step.

The loop asks other ranks about each step. These questions are answered here without communication. Log lines,
evaluations, checkpoints and exits run only when no optimizer step is pending. If a gradient norm is not printed, it is
written to TensorBoard and W&B one step later, under its own iteration.
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
    """A gradient norm that has not been written to TensorBoard and W&B."""

    iteration: int  # the iteration of the norm's step
    samples: int  # samples that the run has consumed by the end of this step
    norm: LateNorm  # the sum over ranks may not have arrived yet


class TrainingLoop:
    """The replacements of functions of Megatron's training loop in a run with overlapping steps."""

    def __init__(self, optimizer: OverlappedOptimizer):
        self._optimizer = optimizer
        self._unwritten: _Unwritten | None = None
        self._signals: LateSum | None = None

    def replacements(self) -> Replacements:
        """Return each replaced symbol of ``megatron.training`` with its replacement."""
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
        """Return ``value``, this rank's success of the step, in place of a logical AND over the pipeline's ranks.

        Every rank takes its step, so the result is the same. After a step that waited for its norm, call ``original``.
        """
        return value if self._optimizer.answers_locally else original(value, *args, **kwargs)

    def _most_of_pipeline(self, original: Callable, value: LateNorm | float | None, *args, **kwargs):
        """Return ``value``, a norm or learning rate, rounded to fp32, in place of a maximum over the pipeline's ranks.

        The value is the same on every rank. After a step that waited for its norm, call ``original``.
        """
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
        """Write the gradient norm of the previous step to TensorBoard and W&B. By now every rank has ended that step.

        Do nothing if that norm was printed, or if its iteration is not one for which the loop writes scalars.
        """
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
        """Return ``[whether any rank had an exit signal one step ago]``, and start asking for this step.

        The first list is empty. If the steps keep their barrier, call ``original``.
        """
        if not self._optimizer.overlaps:
            return original(handler)
        earlier, self._signals = self._signals, self._optimizer.total(float(handler._signal_received))
        return [] if earlier is None else [earlier.result().item() > 0]

    def finish(self) -> None:
        """Wait for the sum over ranks that ``_signals_received`` has started."""
        if self._signals is not None:
            self._signals.result()
            self._signals = None

    def _train(self, original: Callable, *args, **kwargs):
        result = original(*args, **kwargs)
        self._optimizer.settle()
        return result
