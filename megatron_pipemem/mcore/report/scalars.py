"""Write numbers of every step for TensorBoard and W&B, through the writers that Megatron's own training loop has opened."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import parallel_state

from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.loop_arguments import open_writers, scalar_interval
from megatron_pipemem.mcore.report.run_record import STEPS, RunRecord
from megatron_pipemem.mcore.report.run_report import Step


class Scalars:
    """Writes what a run measures beside what Megatron logs, where and when Megatron does.

    Of the pipeline of the last rank, which is the rank that has the writers. A step's times are known one step later, so its
    numbers are written then, under its own iteration.

    Args:
        record: of the run.
    """

    def __init__(self, record: RunRecord):
        self._record = record
        self._iteration: int | None = None

    def before_log(self, iteration: int | None) -> None:
        """Write the step before. Every rank must call this when its loop is about to log ``iteration``.

        Args:
            iteration: ``None`` when no more come, and the last step's times have been read.
        """
        before, self._iteration = self._iteration, iteration
        if before is not None:
            self._write(before)

    def _write(self, iteration: int) -> None:
        interval = scalar_interval()
        if interval is None or iteration % interval:  # on every rank alike
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

    def _numbers(self) -> tuple[Step, int | None, float] | None:
        """Return the last step of this rank, its foretold peak and its planned bubble; ``None`` where it could not be
        measured.
        """
        record = self._record
        with record.guarded(STEPS):
            if record.is_whole and record.steps:
                return record.steps[-1], record.held.predicted_peak, record.last_plan.timeline.bubble_rate
        return None


def _of_pipeline(ranks: Sequence[tuple[Step, int | None, float]]) -> dict[str, float]:
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
