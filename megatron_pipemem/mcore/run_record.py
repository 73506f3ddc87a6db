"""What a run did, against what was predicted: bytes, bubbles, losses."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron_pipemem.report import save_timeline
from megatron_pipemem.runtime.activation_ledger import ActivationLedger, bytes_per_action, predict_peak_bytes
from megatron_pipemem.runtime.trace import Trace, TracedAction
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.schedule import Program
from megatron_pipemem.schedule.simulator import Timeline, count_messages, simulate

logger = logging.getLogger(__name__)


@dataclass
class StepRecord:
    """What watches one step on this rank."""

    ledger: ActivationLedger
    trace: Trace


@dataclass
class _Step:
    counted_peak_bytes: int
    traced: list[TracedAction]


@dataclass
class RunRecord:
    """Collects every training step of this rank and writes the report of all ranks.

    Args:
        report: JSON file of the report, or ``None``.
        trace: directory for pictures and traces of the last step, or ``None``.
        costs: prices for the predicted bubble.
    """

    report: Path | None
    trace: Path | None
    costs: Costs
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    schedule: str = ""
    _program: Program | None = None
    _device: int = 0
    _group: dist.ProcessGroup | None = None
    _changes: dict[Kind, tuple[int, ...]] | None = None
    _predicted_peak: int | None = None
    _steps: list[_Step] = field(default_factory=list)

    def add_step(
        self,
        schedule: str,
        program: Program,
        device: int,
        group: dist.ProcessGroup,
        observed: StepRecord,
        foretell: bool = True,
    ) -> None:
        """Note a finished training step; ``foretell`` says whether its peak follows from its first microbatches."""
        if self._changes is None:
            self._changes = bytes_per_action(observed.ledger.entries, program.placement.num_stages)
        if foretell and program is not self._program:
            predicted = predict_peak_bytes(program.actions[device], self._changes)
            self._predicted_peak = max(self._predicted_peak or 0, predicted)
        self.schedule, self._program, self._device, self._group = schedule, program, device, group
        self._steps.append(_Step(observed.ledger.peak, observed.trace.actions()))

    def add_losses(self, losses: dict[str, object], grad_norm: float | None) -> None:
        """Note what the training loop reports for one iteration; the first loss is the model's."""
        for value in losses.values():
            self.losses.append(float(value))
            break
        if losses and grad_norm is not None:
            self.grad_norms.append(float(grad_norm))

    def write(self) -> None:
        """Gather the records of all ranks and write report and pictures on rank 0. Every rank must call this."""
        gathered: list[dict | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self._summary())
        if dist.get_rank() != 0:
            return
        ranks = [summary for summary in gathered if summary is not None]
        if self.report is not None:
            self.report.parent.mkdir(parents=True, exist_ok=True)
            self.report.write_text(json.dumps(_report(ranks, self.schedule), indent=2) + "\n", encoding="utf-8")
            logger.info("wrote %s", self.report)
        if self.trace is not None and self._program is not None:
            self.trace.mkdir(parents=True, exist_ok=True)
            measured = self._measured_timeline(ranks)
            for name, timeline in (("plan", simulate(self._program.schedule, self.costs)), ("run", measured)):
                for suffix in ("png", "json"):
                    save_timeline(timeline, self.trace / f"{name}.{suffix}")
            logger.info("wrote the last step's timelines to %s", self.trace)

    def _summary(self) -> dict:
        """This rank's part of the report."""
        summary: dict = {"rank": dist.get_rank(), "losses": self.losses, "grad_norms": self.grad_norms}
        if not self._steps:
            return summary
        timeline = simulate(self._program.schedule, self.costs)
        last = self._steps[-1].traced
        finished = [None] * self._group.size()
        dist.all_gather_object(finished, [step.traced[-1].end for step in self._steps], group=self._group)
        rates = [
            1 - sum(t.end - t.start for t in step.traced) / max(rank[index] for rank in finished)
            for index, step in enumerate(self._steps)
        ]
        # The first step pays for lazily opened channels and allocator growth.
        steady = rates[1:] or rates
        return summary | {
            "predicted_peak_bytes": self._predicted_peak,
            "counted_peak_bytes": max(step.counted_peak_bytes for step in self._steps),
            "predicted_bubble_rate": 1 - timeline.work[self._device] / timeline.makespan,
            "measured_bubble_rate": sum(steady) / len(steady),
            "spans": [(t.start, t.end) for t in last],
            "actions": [str(t.action) for t in last],
        }

    def _measured_timeline(self, ranks: list[dict]) -> Timeline:
        """The last step as it ran, on the data-parallel and tensor-parallel peers of rank 0."""
        schedule = self._program.schedule
        members = dist.get_process_group_ranks(self._group)
        spans = tuple(tuple(map(tuple, ranks[rank]["spans"])) for rank in members)
        compute = tuple(
            tuple(Action.parse(a) for a in ranks[rank]["actions"]) for rank in members
        )
        assert compute == tuple(tuple(a for a in order if a.kind in COMPUTE) for order in schedule.orders)
        planned = simulate(schedule, self.costs)
        return Timeline(schedule, self.costs, spans, planned.peaks, count_messages(schedule))


def _report(ranks: list[dict], schedule: str) -> dict:
    fields = (
        "rank",
        "predicted_peak_bytes",
        "counted_peak_bytes",
        "predicted_bubble_rate",
        "measured_bubble_rate",
    )
    return {
        "schedule": schedule,
        "losses": next((summary["losses"] for summary in reversed(ranks) if summary["losses"]), []),
        "grad_norms": next((summary["grad_norms"] for summary in reversed(ranks) if summary["grad_norms"]), []),
        "ranks": [{key: summary.get(key) for key in fields} for summary in ranks],
    }
