"""Fills a run's record: from the steps of our schedules, and from what Megatron's own training loop logs."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch.distributed as dist

from megatron_pipemem.mcore.loop_arguments import saves_after
from megatron_pipemem.mcore.model.weight_memory import count_weights
from megatron_pipemem.mcore.patching import Replacements
from megatron_pipemem.mcore.report.run_record import LOSSES, STEPS, RunRecord
from megatron_pipemem.mcore.report.scalars import Scalars
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import SAVE_AND_TIME, TRAIN, TRAINING_LOG


class Recording(Extension):
    """Notes every training step, and writes the report when the training loop ends: after its last checkpoint.

    Args:
        record: of the run.
    """

    only_trains = True

    def __init__(self, record: RunRecord):
        self._record = record
        self._scalars = Scalars(record)
        self._is_due = False

    def prepare(self, step: Step) -> None:
        self._record.group = step.pipeline.group
        dist.barrier(group=step.pipeline.group)  # one origin of time for all ranks of the pipeline
        step.counts_bytes |= step.leaves_in_flight or self._record.counts(step.program)
        step.times_actions = True

    def after(self, step: Step) -> None:
        observation = step.observation
        with self._record.guarded(STEPS):
            observation.offload = step.offload_statistics()
            observation.weights = step.weight_bytes()
            if observation.weights is None and observation.ledger is not None:
                observation.weights = count_weights(step.chunks, step.pipeline.stages)
            program = step.recorded_program or step.program
            self._record.add_step(step.plan, program, step.pipeline.device, observation)

    def replacements(self) -> Replacements:
        return [(TRAINING_LOG, self._wrap_log), (TRAIN, self._wrap_train), (SAVE_AND_TIME, self._wrap_save)]

    def _wrap_log(self, original: Callable) -> Callable:
        signature = inspect.signature(original)

        def training_log(loss_dict, *args, **kwargs):
            with self._record.guarded(LOSSES):
                arguments = signature.bind(loss_dict, *args, **kwargs).arguments
                self._scalars.before_log(arguments["iteration"])  # first: it is collective
                self._record.add_losses(loss_dict, arguments["grad_norm"])
            return original(loss_dict, *args, **kwargs)

        return training_log

    def _wrap_save(self, original: Callable) -> Callable:
        def save_checkpoint_and_time(*args, **kwargs):
            result = original(*args, **kwargs)
            if self._is_due:
                self._write()
            return result

        return save_checkpoint_and_time

    def _wrap_train(self, original: Callable) -> Callable:
        def train(*args, **kwargs):
            try:
                result = original(*args, **kwargs)
            except SystemExit as stop:
                # Megatron leaves its loop this way too, on all ranks, when a time or iteration limit is reached. It has then
                # saved its checkpoint, and closed W&B.
                if not stop.code:
                    self._record.write()
                raise
            self._is_due = saves_after(result[0])
            if not self._is_due:
                self._write()
            return result

        return train

    def _write(self) -> None:
        self._is_due = False
        self._record.write()
        self._scalars.before_log(None)
