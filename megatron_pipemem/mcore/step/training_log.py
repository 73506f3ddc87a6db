"""Correct two numbers of Megatron's log: FLOPs of packed sequences, and the theoretical activation memory.

Megatron's training scripts count the tokens of packed sequences in every forward step. A rank with several chunks would
count every microbatch several times, and so would recomputation. Megatron's memory is that of its own schedules.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch

from megatron_pipemem.mcore.model.stages import is_counted
from megatron_pipemem.mcore.patching import Replacements
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import COUNT_PACKED_TOKENS, REPORT_MEMORY
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import peaks

logger = logging.getLogger(__name__)


class TrainingLog(Extension):
    """Makes Megatron count packed tokens once per microbatch, and report the activation memory of the run's schedule."""

    only_trains = True

    def __init__(self) -> None:
        self._schedule: Schedule | None = None

    def replacements(self) -> Replacements:
        return [(COUNT_PACKED_TOKENS, _count_once), (REPORT_MEMORY, self._report_memory)]

    def after(self, step: Step) -> None:
        self._schedule = step.program.schedule

    def _report_memory(self, original: Callable, args, num_microbatches: int | None = None, verbose: bool = False):
        """Let Megatron report the memory under 1F1B, and log and return that under the run's schedule.

        The result is ``(weights, activations, total)`` in MB, as Megatron's. Before the first step, and for models for
        which Megatron has no numbers, it is Megatron's.
        """
        plain = copy.copy(args)
        plain.virtual_pipeline_model_parallel_size = None
        found = original(plain, num_microbatches=num_microbatches, verbose=verbose)
        if found is None or self._schedule is None:  # Megatron has no numbers for hybrid models
            return found
        weights, activations, _ = found
        under_1f1b = min(
            1.0, (num_microbatches or args.pipeline_model_parallel_size) / args.pipeline_model_parallel_size
        )
        share = max(peaks(self._schedule, Costs())) / under_1f1b
        logger.info(
            "the theoretical activation memory above is that of 1F1B; schedule %s holds at most %.3g times as much: "
            "activation=%.2f MB, total=%.2f MB",
            self._schedule.name,
            share,
            activations * share,
            weights + activations * share,
        )
        return weights, activations * share, weights + activations * share


def _count_once(original: Callable, cu_seqlens: torch.Tensor | None) -> None:
    if is_counted():
        original(cu_seqlens)
