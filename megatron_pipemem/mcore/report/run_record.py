"""Record the measurements of a run and its predictions: bytes, bubbles, losses.

No error here stops the training. A value that cannot be measured or written is left out, with a warning. A rank that
could not measure still calls the collectives, so that other ranks do not hang.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_pipemem.choose.knowledge import Choice
from megatron_pipemem.errors import OutputError, with_code
from megatron_pipemem.files import write_whole
from megatron_pipemem.logs import is_first_rank
from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.report import run_report
from megatron_pipemem.mcore.report.action_bytes import ActionBytes, has_sizes
from megatron_pipemem.mcore.step.extension import Observation, OverlapStatistics, WeightBytes
from megatron_pipemem.results import lines, measured_bubble
from megatron_pipemem.runtime.trace import TracedAction
from megatron_pipemem.schedule.action import Action
from megatron_pipemem.schedule.message_memory import nccl_bytes
from megatron_pipemem.schedule.schedule import Program
from megatron_pipemem.schedule.simulator import Timeline
from megatron_pipemem.tools_by_flag import load_tool

logger = logging.getLogger(__name__)

_TIMELINES = ("html", "png", "json")
STEPS, LOSSES, FILES = "measuring of steps", "losses", "all of its files"
"""Parts of the record. If one fails, the others are still written."""


@dataclass
class RunRecord:
    """The measurements of this rank in every training step, from which the report of all ranks is written.

    ``report`` is the JSON file. ``trace`` is the folder for pictures and traces of the last step. Either may be
    ``None``.
    """

    report: Path | None
    trace: Path | None
    losses: list[float | None] = field(default_factory=list)
    grad_norms: list[Any] = field(default_factory=list)
    group: dist.ProcessGroup | None = None
    config: object | None = None
    steps: list[run_report.RecordedStep] = field(default_factory=list)
    peaks: run_report.RankEntry = field(default_factory=run_report.RankEntry)
    """This rank's entry of the report, so far with its peaks and its load of experts only."""
    overlap: Callable[[], OverlapStatistics] = OverlapStatistics
    last_plan: Choice | None = None
    """The schedule choice of the last step whose times have been read; ``None`` before the first."""
    _failures: dict[str, str] = field(default_factory=dict)
    _plans: list[tuple[int, Choice]] = field(default_factory=list)
    _program: Program | None = None
    _device: int = 0
    _bytes: ActionBytes = field(default_factory=ActionBytes)
    _weights: WeightBytes | None = None
    _counted: list[tuple[Action, int, int]] = field(default_factory=list)
    """Every action of the last counted step, with the bytes after it on the device and on the host."""
    _has_equal_counts: bool = False
    _last: list[TracedAction] = field(default_factory=list)
    _unread: tuple[int, Choice, Observation] | None = None
    _layers: dict[int, int] = field(default_factory=dict)
    _begun: list[float] = field(default_factory=list)
    _has_barrier: bool = True

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Catch exceptions within a ``with`` block; log the first for each ``what``, and note it in the report.

        ``what`` is the part of the report that the block makes. All files count as one part, because a missing folder
        or a full disk makes all of them fail.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, OutputError):
                what = FILES
            if what not in self._failures:
                self._failures[what] = f"{type(error).__name__}: {with_code(error)}"
                logger.warning("the run goes on without %s, which failed: %s", what, self._failures[what])

    def begin(self, group: dist.ProcessGroup, has_barrier: bool = True) -> None:
        """Note the start of a training step on the ranks of ``group``.

        With ``has_barrier``, all ranks of the pipeline first wait for each other, so that their times have the same
        origin. Without it, the step is left out of the data for ``pipemem explain``.
        """
        self.group, self._has_barrier = group, has_barrier
        if has_barrier:
            dist.barrier(group=group)
        self._begun.append(time.perf_counter())

    @property
    def is_whole(self) -> bool:
        """Whether every step so far was measured without an error."""
        return STEPS not in self._failures

    def counts(self, program: Program) -> bool:
        """Return whether the bytes of the next step of this program must be counted.

        Counting ends when two steps in a row held the same bytes after every action, because it costs host time in each
        action. It also ends when a measurement has failed. It never ends if routing or sequence lengths change from
        step to step.
        """
        return self.is_whole and not (self._has_equal_counts and program is self._program)

    def add_step(
        self,
        plan: Choice,
        program: Program,
        device: int,
        observed: Observation,
        predicts_peaks: bool = True,
        own_plan: Choice | None = None,
    ) -> None:
        """Add a finished training step. If its bytes were not counted, they equal those of the previous step.

        ``device`` is this rank's position in its pipeline. Without ``predicts_peaks``, no peak is predicted from the
        bytes of single actions. ``own_plan`` is the choice for this step alone, if it was planned for its own microbatches.
        After a failed measurement nothing is added.
        """
        if not self.is_whole:
            return
        with self.guarded(STEPS):
            if observed.ledger is not None:
                self._add_bytes(program, device, observed, predicts_peaks)
                self._weights = observed.weights
            self._program, self._device = program, device
            self._layers.update(observed.layers)
            # The times of a GPU are read one step later, when it has finished the step.
            self.read()
            number = next((number for number, (_, other) in enumerate(self._plans) if other is plan), len(self._plans))
            if number == len(self._plans):
                self._plans.append((len(self.steps), plan))
            self._unread = (number, own_plan or plan, observed)

    def _add_bytes(self, program: Program, device: int, observed: Observation, predicts_peaks: bool) -> None:
        ledger = observed.counter
        if ledger.failure is not None:
            raise ValueError(ledger.failure)
        self._bytes.learn(program, device, ledger)
        peaks, is_new = self.peaks, self._bytes.is_uneven or program is not self._program
        if has_sizes(ledger) or (predicts_peaks and is_new):
            least, most, on_host, with_sent = self._bytes.predict(program, device, ledger, observed.bytes_of_message)
            peaks.predicted_peak_bytes = max(peaks.predicted_peak_bytes or 0, most)
            if has_sizes(ledger):  # no routing, and so no range
                least = peaks.predicted_peak_bytes
            peaks.predicted_least_peak_bytes = max(peaks.predicted_least_peak_bytes or 0, least)
            peaks.predicted_host_peak_bytes = max(peaks.predicted_host_peak_bytes, on_host)
            if with_sent is not None:
                peaks.predicted_peak_with_messages = max(peaks.predicted_peak_with_messages or 0, with_sent)
        if observed.allocated is not None:
            peaks.predicted_nccl_bytes = nccl_bytes(program.placement, device)
            peaks.nccl_bytes = observed.opened_bytes
            if peaks.predicted_peak_with_messages is not None:
                # The last counted step: the optimizer allocates its state after the first one.
                peaks.predicted_allocated_bytes = observed.allocated + peaks.predicted_peak_with_messages
        loads = [entry.routed / entry.evenly for entry in ledger.entries if entry.evenly]
        peaks.expert_load = max([peaks.expert_load or 0.0, *loads]) if loads else peaks.expert_load
        peaks.counted_peak_bytes = max(peaks.counted_peak_bytes, ledger.peak)
        peaks.counted_host_peak_bytes = max(peaks.counted_host_peak_bytes, ledger.host_peak)
        counted = [(entry.action, entry.bytes, entry.host_bytes) for entry in ledger.entries]
        self._has_equal_counts = program is self._program and counted == self._counted
        self._counted = counted

    def add_losses(self, losses: dict[str, Any], grad_norm: Any) -> None:
        """Add the first loss and the gradient norm of one iteration. The first loss is the model's.

        A loss that is not a number becomes ``None``. Without losses, as in a skipped iteration, nothing is added.
        """
        for value in losses.values():
            self.losses.append(None)
            with self.guarded(LOSSES):
                self.losses[-1] = float(value)
            break
        if losses and grad_norm is not None:
            self.grad_norms.append(grad_norm)

    def read(self) -> None:
        """Read the times of the last step from the device and add it to ``steps``, unless they have been read."""
        if self._unread is None:
            return
        (plan, self.last_plan, observed), self._unread = self._unread, None
        self._last = observed.clock.actions()
        work = sum(traced.end - traced.start for traced in self._last)
        span = self._last[0].start if self._last else 0.0, max((traced.end for traced in self._last), default=0.0)
        peak = self.steps[-1].peak_bytes if observed.ledger is None else observed.ledger.peak
        planned = self.last_plan.timeline.makespan, self.last_plan.arrival_makespan
        self.steps.append(run_report.RecordedStep(plan, span, work, peak, *planned, observed.offload()))

    def write(self) -> None:
        """Gather the records of all ranks, and write the report and the pictures on rank 0. Every rank must call this.

        It raises no error. A file that cannot be written gives a warning.
        """
        with self.guarded("the report"):  # parts that may fail on one rank alone have guards of their own
            with self.guarded(STEPS):
                self.read()
            ranks = gather(self._summary(self._shared()))
            if not is_first_rank():
                return
            members = [] if self.group is None else dist.get_process_group_ranks(self.group)
            pipeline = [ranks[member] for member in members]
            report = run_report.report_of(ranks, self.trace) | {"bytes_of_1f1b": None, "last_step": None}
            with self.guarded(STEPS):
                if self.last_plan is not None and self.is_whole:
                    memory = run_report.memory_of(pipeline)
                    report["bytes_of_1f1b"] = run_report.bytes_of_1f1b(pipeline, self.last_plan, memory)
                    if self._has_barrier:
                        seconds = run_report.iteration_seconds(self._begun)
                        report["last_step"] = run_report.written_step(pipeline, self.last_plan, memory, seconds)
            written = []
            if self.report is not None:
                with self.guarded(str(self.report)):
                    write_whole(self.report, json.dumps(report, indent=2, allow_nan=False) + "\n")
                    written.append(f"wrote {self.report}")
            if self.trace is not None and self.last_plan is not None:
                bubble, of_1f1b = measured_bubble(report), report["bytes_of_1f1b"]
                plan = partial(run_report.planned_step, pipeline, self.last_plan, of_1f1b)
                run = partial(run_report.last_step, pipeline, self.last_plan, bubble, of_1f1b)
                if drawn := self._draw({"plan": plan, "run": run}, self.trace):
                    written.append(f"wrote the last step's timelines: {', '.join(drawn)} in {self.trace}")
            for line in [*lines(report), *written]:  # has_barrier: drawing logs lines of other packages
                logger.info("%s", line)

    def _draw(self, timelines: Mapping[str, Callable[[], Timeline]], folder: Path) -> list[str]:
        """Draw the last step of rank 0's pipeline, as planned and as it ran, and return the names of the files."""
        drawn = []
        for name, timeline in timelines.items():
            for suffix in _TIMELINES:
                path = folder / f"{name}.{suffix}"
                with self.guarded(str(path)):
                    drawn.append(load_tool("--pipemem-trace").save_timeline(timeline(), path).name)
        return drawn

    def _shared(self) -> list[run_report.SharedMeasurements] | None:
        """Return the weight bytes and step times of all ranks of this pipeline.

        The result is ``None`` if no step has begun, a rank could not measure, or ranks measured different numbers of
        steps. All ranks of the pipeline call this at the same time.
        """
        if self.group is None:  # no step has begun, on any rank
            return None
        own = None
        with self.guarded(STEPS):
            if self.is_whole and self.steps:
                assert self._weights is not None, "the first step was counted"
                own = run_report.SharedMeasurements(dict(self._weights.of_stages), [step.span for step in self.steps])
        ranks = gather(own, [self.group])
        shared = [rank for rank in ranks if rank is not None]
        return shared if len(shared) == len(ranks) and len({len(rank.spans) for rank in shared}) == 1 else None

    def _summary(self, shared: list[run_report.SharedMeasurements] | None) -> run_report.RankSummary:
        """Return this rank's part of the report, with the reason if something could not be measured."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        summary = run_report.RankSummary(rank, self.losses, list(map(self._number, self.grad_norms)), None)
        if self.steps:
            with self.guarded(STEPS):
                assert self.last_plan is not None and self._weights is not None, "steps have been measured"
                peaks = replace(self.peaks, **self.overlap()._asdict())
                if peaks.predicted_nccl_bytes is not None:
                    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                    peaks = replace(peaks, allocated_bytes=allocated, reserved_bytes=reserved)
                summary = replace(
                    summary,
                    measured=run_report.rank_entry(
                        self.steps, self.last_plan, self._device, peaks, self._weights, shared
                    ),
                    plans=[run_report.plan_entry(n, self._plans, self.steps, shared) for n in range(len(self._plans))],
                    steps=len(self.steps),
                    last=self._last,
                    bytes_after=run_report.bytes_after(self._last, self._counted),
                    layers=self._layers,
                    memory=self._bytes.changes,
                )
        failures = [f"no {what}: {why}" for what, why in self._failures.items()]
        return replace(summary, failure="; ".join(failures) or None)

    def _number(self, value: Any) -> float | None:
        with self.guarded(LOSSES):
            return float(value)
        return None
