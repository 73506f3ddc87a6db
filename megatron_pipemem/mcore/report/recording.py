"""Fill a run's record: from the steps of our schedules, and from what Megatron's own training loop logs.

Numbers of every step go to TensorBoard and W&B through the writers that this loop has opened.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.loop_arguments import open_writers, saves_after, scalar_interval
from megatron_pipemem.mcore.model.weight_memory import count_weights
from megatron_pipemem.mcore.patching import Replacements
from megatron_pipemem.mcore.report.run_record import LOSSES, STEPS, RunRecord
from megatron_pipemem.mcore.report.run_report import Step as MeasuredStep
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.mcore.symbols import SAVE_AND_TIME, TRAIN, TRAINING_LOG


class Recording(Extension):
    """Notes every training step, and writes the report when the training loop ends: after its last checkpoint.

    Of the pipeline of the last rank, which is the rank that has the loop's writers, it writes scalars where and when Megatron
    does. A step's times are known one step later, so its numbers are written then, under its own iteration.

    Args:
        record: of the run.
    """

    only_trains = True

    def __init__(self, record: RunRecord):
        self._record = record
        self._iteration: int | None = None
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
            self._record.add_step(step.plan, program, step.pipeline.device, observation, own_plan=step.own_plan)

    def replacements(self) -> Replacements:
        return [(TRAINING_LOG, self._training_log), (TRAIN, self._train), (SAVE_AND_TIME, self._save)]

    def _training_log(self, original: Callable, loss_dict, *args, **kwargs):
        with self._record.guarded(LOSSES):
            arguments = inspect.signature(original).bind(loss_dict, *args, **kwargs).arguments
            self.write_scalars(arguments["iteration"])  # first: it is collective
            self._record.add_losses(loss_dict, arguments["grad_norm"])
        return original(loss_dict, *args, **kwargs)

    def _save(self, original: Callable, *args, **kwargs):
        result = original(*args, **kwargs)
        if self._is_due:
            self._write()
        return result

    def _train(self, original: Callable, *args, **kwargs):
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

    def _write(self) -> None:
        self._is_due = False
        self._record.write()
        self.write_scalars(None)

    def write_scalars(self, following: int | None) -> None:
        """Write the numbers of the step before. Every rank must call this when its loop is about to log another one.

        Args:
            following: iteration of that one; ``None`` when no more come, and the last step's times have been read.
        """
        iteration, self._iteration = self._iteration, following
        interval = scalar_interval()
        if iteration is None or interval is None or iteration % interval:  # on every rank alike
            return
        with self._record.guarded("scalars"):
            everyones = gather(self._numbers(), parallel_state.get_pipeline_model_parallel_group())
            tensorboard, wandb = open_writers()
            if None in everyones:
                return
            scalars = _of_pipeline(everyones)
            if tensorboard is not None:
                for name, value in scalars.items():
                    tensorboard.add_scalar(name, value, iteration)
                tensorboard.flush()
            if wandb is not None:
                wandb.log(scalars, iteration)

    def _numbers(self) -> tuple[MeasuredStep, int | None, float] | None:
        """Return the last step of this rank, its foretold peak and its planned bubble; ``None`` where it could not be
        measured.
        """
        record = self._record
        with record.guarded(STEPS):
            if record.is_whole and record.steps:
                return record.steps[-1], record.held.predicted_peak_bytes, record.last_plan.timeline.bubble_rate
        return None


def _of_pipeline(ranks: Sequence[tuple[MeasuredStep, int | None, float]]) -> dict[str, float]:
    steps, predicted, planned = zip(*ranks, strict=True)
    makespan = max(step.end for step in steps)
    scalars = {
        "pipemem/peak-activation-bytes": max(step.peak for step in steps),
        "pipemem/bubble-rate": 1 - max(step.work for step in steps) / makespan,
        "pipemem/planned-bubble-rate": planned[0],
        "pipemem/makespan-seconds": makespan,
    }
    if None not in predicted:
        scalars["pipemem/predicted-peak-activation-bytes"] = max(predicted)
    return scalars
