"""What a run did, against what was predicted: bytes, bubbles, losses."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_pipemem.files import write_whole
from megatron_pipemem.mcore.sources import Plan
from megatron_pipemem.mcore.weight_memory import WeightBytes, predict_weights
from megatron_pipemem.report import save_timeline
from megatron_pipemem.runtime.activation_ledger import (
    ActivationLedger,
    bytes_per_action,
    host_bytes_per_action,
    predict_peak_bytes,
)
from megatron_pipemem.runtime.offload import OffloadStatistics
from megatron_pipemem.runtime.offload.channel import Direction
from megatron_pipemem.runtime.trace import Trace, TracedAction
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind
from megatron_pipemem.schedule.schedule import Program
from megatron_pipemem.schedule.simulator import Timeline, count_messages

logger = logging.getLogger(__name__)


@dataclass
class StepRecord:
    """What watches one step on this rank."""

    ledger: ActivationLedger | None
    trace: Trace | None
    offload: OffloadStatistics | None = None
    weights: WeightBytes | None = None

    @property
    def on_device(self) -> Callable[[torch.Tensor], None] | None:
        """For an offload engine: how it tells the ledger what takes device memory."""
        ledger = self.ledger
        return None if ledger is None else lambda tensor: ledger.hold(tensor, "saved")


class _Step(NamedTuple):
    """When this rank ended a step, what it computed in it, in seconds, under which of the plans, and what it moved."""

    plan: int
    end: float
    work: float
    offload: OffloadStatistics | None


@dataclass
class RunRecord:
    """Collects every training step of this rank and writes the report of all ranks.

    Args:
        report: JSON file of the report, or ``None``.
        trace: directory for pictures and traces of the last step, or ``None``.
    """

    report: Path | None
    trace: Path | None
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    _plans: list[tuple[int, Plan]] = field(default_factory=list)
    _program: Program | None = None
    _device: int = 0
    _group: dist.ProcessGroup | None = None
    _changes: dict[Kind, list[int]] = field(default_factory=dict)
    _host_changes: dict[Kind, list[int]] = field(default_factory=dict)
    _learnt: set[tuple[Kind, int]] = field(default_factory=set)
    _treatments: dict[int, tuple[Kind | None, bool]] = field(default_factory=dict)
    _predicted_peak: int | None = None
    _counted_peak: int = 0
    _predicted_host_peak: int = 0
    _counted_host_peak: int = 0
    _weights: WeightBytes | None = None
    _steps: list[_Step] = field(default_factory=list)
    _last: list[TracedAction] = field(default_factory=list)
    _unread: tuple[int, StepRecord] | None = None

    def add_step(
        self,
        plan: Plan,
        program: Program,
        device: int,
        group: dist.ProcessGroup,
        observed: StepRecord,
        foretell: bool = True,
    ) -> None:
        """Note a finished training step; ``foretell`` says whether its peak follows from its first microbatches."""
        self._learn_bytes(program, device, observed.ledger)
        if foretell and program is not self._program:
            actions = program.actions[device]
            self._predicted_peak = max(self._predicted_peak or 0, predict_peak_bytes(actions, self._changes))
            away = predict_peak_bytes(actions, self._host_changes)
            self._predicted_host_peak = max(self._predicted_host_peak, away)
        self._weights = observed.weights
        self._program, self._device, self._group = program, device, group
        self._counted_peak = max(self._counted_peak, observed.ledger.peak)
        self._counted_host_peak = max(self._counted_host_peak, observed.ledger.host_peak)
        # A GPU's times are read one step later, when it has long passed them.
        self._read()
        number = next((number for number, (_, known) in enumerate(self._plans) if known is plan), len(self._plans))
        if number == len(self._plans):
            self._plans.append((len(self._steps), plan))
        self._unread = (number, observed)

    def add_losses(self, losses: dict[str, object], grad_norm: float | None) -> None:
        """Note what the training loop reports for one iteration; the first loss is the model's."""
        for value in losses.values():
            self.losses.append(float(value))
            break
        if losses and grad_norm is not None:
            self.grad_norms.append(float(grad_norm))

    def write(self) -> None:
        """Gather the records of all ranks and write report and pictures on rank 0. Every rank must call this."""
        self._read()
        gathered: list[dict | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self._summary())
        if dist.get_rank() != 0:
            return
        ranks = [summary for summary in gathered if summary is not None]
        if self.report is not None:
            write_whole(self.report, json.dumps(_report(ranks), indent=2, allow_nan=False) + "\n")
            logger.info("wrote %s", self.report)
        if self.trace is not None and self._program is not None:
            planned = self._plan.timeline
            for name, timeline in (("plan", planned), ("run", self._measured_timeline(ranks, planned))):
                for suffix in ("png", "json"):
                    save_timeline(timeline, self.trace / f"{name}.{suffix}")
            logger.info("wrote the last step's timelines to %s", self.trace)

    @property
    def _plan(self) -> Plan:
        """Of the last step."""
        return self._plans[self._steps[-1].plan][1]

    def _learn_bytes(self, program: Program, device: int, ledger: ActivationLedger) -> None:
        """What actions take and give back, from the first step that has such an action: later plans may fuse others.

        Learnt anew when a stage begins or ends to be recomputed or offloaded.
        """
        stages = program.placement.num_stages
        moved = {action.stage for action in program.actions[device] if action.kind is Kind.OFFLOAD}
        for stage in program.placement.stages[device]:
            treatment = (program.schedule.recomputed.get(stage), stage in moved)
            if self._treatments.get(stage, treatment) != treatment:
                self._learnt = {(kind, other) for kind, other in self._learnt if other != stage}
            self._treatments[stage] = treatment
        unknown = {(action.kind, action.stage) for action in program.actions[device]} - self._learnt
        if unknown:
            for changes, seen in (
                (self._changes, bytes_per_action(ledger.entries, stages)),
                (self._host_changes, host_bytes_per_action(ledger.entries, stages)),
            ):
                for kind, stage in unknown:
                    changes.setdefault(kind, [0] * stages)[stage] = seen[kind][stage]
            self._learnt |= unknown

    def _read(self) -> None:
        if self._unread is None:
            return
        (plan, observed), self._unread = self._unread, None
        self._last = observed.trace.actions()
        work = sum(traced.end - traced.start for traced in self._last)
        self._steps.append(_Step(plan, max((traced.end for traced in self._last), default=0.0), work, observed.offload))

    def _summary(self) -> dict:
        """This rank's part of the report."""
        summary: dict = {"rank": dist.get_rank(), "losses": self.losses, "grad_norms": self.grad_norms}
        if not self._steps:
            return summary
        timeline = self._plan.timeline
        placement, weights = self._plan.schedule.placement, self._weights
        gathered: list[Mapping[int, int]] = [{}] * self._group.size()
        dist.all_gather_object(gathered, weights.of_stages, group=self._group)
        of_stages = {stage: nbytes for each in gathered for stage, nbytes in each.items()}
        finished: list[list[float]] = [[]] * self._group.size()
        dist.all_gather_object(finished, [step.end for step in self._steps], group=self._group)
        makespans = [max(ends) for ends in zip(*finished, strict=True)]
        rates = [1 - step.work / makespan for step, makespan in zip(self._steps, makespans, strict=True)]
        # The first step pays for lazily opened channels and allocator growth.
        return summary | {
            "schedule": self._plan.schedule.name,
            "predicted_peak_bytes": self._predicted_peak,
            "counted_peak_bytes": self._counted_peak,
            "predicted_weight_bytes": predict_weights(placement, self._device, of_stages, weights.planned_versions),
            "counted_weight_bytes": weights.counted,
            "weight_versions": weights.versions,
            "predicted_host_peak_bytes": self._predicted_host_peak,
            "counted_host_peak_bytes": self._counted_host_peak,
            **_offload_summary([step.offload for step in self._steps]),
            "predicted_bubble_rate": 1 - timeline.work[self._device] / timeline.makespan,
            "measured_bubble_rate": fmean(rates[1:] or rates),
            "plans": [self._describe(number, makespans) for number in range(len(self._plans))],
            "spans": [(t.start, t.end) for t in self._last],
            "actions": [str(t.action) for t in self._last],
        }

    def _describe(self, number: int, makespans: list[float]) -> dict:
        """A plan as the report shows it. A plan's first step is not typical and counts only where it is the only one."""
        step, plan = self._plans[number]
        own = [makespan for each, makespan in zip(self._steps, makespans, strict=True) if each.plan == number]
        return {
            "step": step,
            "reason": plan.reason,
            "schedule": plan.schedule.name,
            "placement": plan.schedule.placement.name,
            "microbatches": plan.schedule.num_microbatches,
            "vocabulary_barriers": plan.schedule.vocabulary,
            "priced_by": plan.priced_by,
            "costs": _costs(plan),
            "planned_makespan": plan.timeline.makespan,
            "measured_makespan": fmean(own[1:] or own) if own else None,
            "lower_bound": plan.lower_bound,
            "search_seconds": plan.search_seconds,
            "notes": plan.notes,
        }

    def _measured_timeline(self, ranks: list[dict], planned: Timeline) -> Timeline:
        """The last step as it ran, on the data-parallel and tensor-parallel peers of rank 0."""
        schedule = planned.schedule
        members = dist.get_process_group_ranks(self._group)
        spans = tuple(tuple(map(tuple, ranks[rank]["spans"])) for rank in members)
        compute = tuple(tuple(Action.parse(a) for a in ranks[rank]["actions"]) for rank in members)
        assert compute == tuple(tuple(a for a in order if a.kind in COMPUTE) for order in schedule.orders)
        # Copies are not timed.
        return Timeline(
            replace(schedule, orders=compute), planned.costs, spans, planned.peaks, count_messages(schedule)
        )


def _offload_summary(steps: list[OffloadStatistics | None]) -> dict:
    """Bytes of the last step; seconds per step, on average. The first step is not typical here either."""
    typical = steps[1:] or steps
    waits: Counter[tuple[Kind, int]] = Counter()
    for step in typical:
        for stall in step.stalls if step is not None else ():
            kind = Kind.WAIT_OFFLOAD if stall.direction is Direction.OUT else Kind.WAIT_RELOAD
            waits[kind, stall.key[0]] += stall.seconds / len(typical)
    return {
        "offloaded_bytes": steps[-1].bytes_out if steps[-1] is not None else 0,
        "reloaded_bytes": steps[-1].bytes_in if steps[-1] is not None else 0,
        "stall_seconds": sum(waits.values()),
        "stalls": [
            {"waited_for": kind.value, "stage": stage, "seconds": seconds}
            for (kind, stage), seconds in sorted(waits.items(), key=lambda wait: -wait[1])
        ],
    }


def _costs(plan: Plan) -> dict:
    """One value per stage; the time of a message between every two neighbours."""
    placement, seconds = plan.schedule.placement, plan.costs.seconds(plan.schedule.placement)
    neighbours = sorted({tuple(sorted(pair)) for pair in zip(placement.devices, placement.devices[1:], strict=False)})
    links = {f"{a}-{b}": plan.costs.link_seconds(a, b) for a, b in neighbours if a != b}
    names = {"forward": Kind.F, "backward_input": Kind.I, "backward_weight": Kind.W}
    return {name: list(seconds[kind]) for name, kind in names.items()} | {"p2p": links}


def _report(ranks: list[dict]) -> dict:
    fields = (
        "rank",
        "predicted_peak_bytes",
        "counted_peak_bytes",
        "predicted_weight_bytes",
        "counted_weight_bytes",
        "weight_versions",
        "predicted_host_peak_bytes",
        "counted_host_peak_bytes",
        "offloaded_bytes",
        "reloaded_bytes",
        "stall_seconds",
        "stalls",
        "predicted_bubble_rate",
        "measured_bubble_rate",
    )

    def known(key: str, ranks_in_order: list[dict], otherwise: object) -> object:
        return next((summary[key] for summary in ranks_in_order if summary.get(key)), otherwise)

    first: Mapping[str, object] = ranks[0]
    return {
        "schedule": first.get("schedule", ""),
        "losses": _finite(known("losses", ranks[::-1], [])),
        "grad_norms": _finite(known("grad_norms", ranks[::-1], [])),
        "plans": first.get("plans", []),
        "ranks": [{key: summary.get(key) for key in fields} for summary in ranks],
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    """JSON has no number for what a step that diverged reports."""
    return [value if math.isfinite(value) else None for value in values]
