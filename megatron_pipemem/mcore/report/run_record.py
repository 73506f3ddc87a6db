"""Record what a run did, against what was predicted: bytes, bubbles, losses.

Nothing in here ends a training: what cannot be measured or written is warned of and left out, and collectives are entered by
every rank, whatever has become of what it has to say.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from megatron_pipemem.errors import OutputError
from megatron_pipemem.files import check_writable, write_whole
from megatron_pipemem.mcore.agreement import decided_by_rank_zero, gather, is_first_rank
from megatron_pipemem.mcore.model.weight_memory import WeightBytes
from megatron_pipemem.mcore.report import run_report
from megatron_pipemem.mcore.step.observation import Observation
from megatron_pipemem.report import save_timeline
from megatron_pipemem.report.run import lines
from megatron_pipemem.runtime.activation_ledger import (
    ActivationLedger,
    bytes_per_action,
    predict_peak_bytes,
)
from megatron_pipemem.runtime.bytes_by_tokens import BytesByTokens
from megatron_pipemem.runtime.trace import TracedAction
from megatron_pipemem.schedule.core.action import Action, Kind
from megatron_pipemem.schedule.core.schedule import Program
from megatron_pipemem.schedule.resolve import ChosenSchedule

logger = logging.getLogger(__name__)

_TIMELINES = ("html", "png", "json")
STEPS, LOSSES, FILES = "measuring of steps", "losses", "all of its files"
"""What may fail, each by itself."""


@dataclass
class RunRecord:
    """Collects every training step of this rank and writes the report of all ranks.

    Args:
        report: JSON file of the report, or ``None``.
        trace: directory for pictures and traces of the last step, or ``None``.
        losses: of every step; ``None`` where it is not known.
        grad_norms: of every step; ``None`` where it is not known.
        group: this rank's pipeline, set before its first step.
        steps: of this rank, with what was counted and timed.
        held: the most that this rank held so far.
    """

    report: Path | None
    trace: Path | None
    losses: list[float | None] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    group: dist.ProcessGroup | None = None
    steps: list[run_report.Step] = field(default_factory=list)
    held: run_report.OfRank = field(default_factory=run_report.OfRank)
    _failures: dict[str, str] = field(default_factory=dict)
    _plans: list[tuple[int, ChosenSchedule]] = field(default_factory=list)
    _program: Program | None = None
    _device: int = 0
    _changes: dict[bool, dict[Kind, list[int]]] = field(default_factory=lambda: {False: {}, True: {}})
    """of the microbatches that give experts the fewest tokens, and of those that give them most"""
    _host_changes: dict[Kind, list[int]] = field(default_factory=dict)
    _learnt: set[tuple[Kind, int]] = field(default_factory=set)
    _by_tokens: dict[tuple, tuple[BytesByTokens, BytesByTokens]] = field(default_factory=dict)
    """where microbatches differ: on the device and on the host, for every treatment of this rank's stages"""
    _uneven: bool = False
    """whether experts get other numbers of tokens in every microbatch"""
    _treatments: dict[int, tuple[Kind | None, bool]] = field(default_factory=dict)
    _weights: WeightBytes | None = None
    _counted: list[tuple[int, int]] = field(default_factory=list)
    _is_settled: bool = False
    _last: list[TracedAction] = field(default_factory=list)
    _last_plan: ChosenSchedule | None = None
    _unread: tuple[int, ChosenSchedule, Observation] | None = None

    def check_outputs(self) -> None:
        """Ask, before anything is trained, whether the outputs can be written. Rank 0 writes them, and asks.

        Raises:
            PipememError: they cannot; on every rank where there is a process group, else on rank 0.
        """
        paths = [] if self.report is None else [self.report]
        if self.trace is not None:
            paths.append(self.trace / "run.html")

        def ask() -> None:
            for path in paths:
                check_writable(path)

        if dist.is_initialized() or is_first_rank():
            decided_by_rank_zero(ask)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Leave out of the report whatever fails within this block, and say so there; the first failure is warned of.

        A file that cannot be written is warned of once for all files: a missing folder or a full disk takes them all.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, OutputError):
                what = FILES
            if what not in self._failures:
                self._failures[what] = f"{type(error).__name__}: {error}"
                logger.warning("the run goes on without %s, which failed: %s", what, self._failures[what])

    @property
    def is_whole(self) -> bool:
        """Whether every step so far could be measured."""
        return STEPS not in self._failures

    @property
    def last_plan(self) -> ChosenSchedule | None:
        """Plan of the last step whose times are known."""
        return self._last_plan

    def counts(self, program: Program) -> bool:
        """Return whether a step of this program must have a ledger: until two in a row have held the same after every
        action.

        Counting costs the host time in every action, and where routing or lengths differ it never ends.
        """
        return self.is_whole and not (self._is_settled and program is self._program)

    def add_step(
        self,
        plan: ChosenSchedule,
        program: Program,
        device: int,
        observed: Observation,
        foretell: bool = True,
        own_plan: ChosenSchedule | None = None,
    ) -> None:
        """Note a finished training step. A step without a ledger held what the last one held.

        Args:
            plan: that it followed.
            program: that ran.
            device: number of this rank in its pipeline.
            observed: what watched the step.
            foretell: whether its peak follows from its first microbatches.
            own_plan: of this step alone, where it began with ``plan`` and was planned for its own microbatches.
        """
        if not self.is_whole:
            return
        with self.guarded(STEPS):
            if observed.ledger is not None:
                self._add_bytes(program, device, observed.ledger, foretell)
                self._weights = observed.weights
            self._program, self._device = program, device
            # A GPU's times are read one step later, when it has long passed them.
            self.read()
            number = next((number for number, (_, known) in enumerate(self._plans) if known is plan), len(self._plans))
            if number == len(self._plans):
                self._plans.append((len(self.steps), plan))
            self._unread = (number, own_plan or plan, observed)

    def _add_bytes(self, program: Program, device: int, ledger: ActivationLedger, foretell: bool) -> None:
        if ledger.failure is not None:
            raise ValueError(ledger.failure)
        self._learn_bytes(program, device, ledger)
        held = self.held
        if ledger.tokens is not None and not any(entry.routed for entry in ledger.entries):
            self._foretell_by_tokens(program.actions[device], ledger)
        elif foretell and (self._uneven or program is not self._program):
            actions = program.actions[device]
            least, most = (predict_peak_bytes(actions, self._changes[most]) for most in (False, True))
            held.predicted_peak_bytes = max(held.predicted_peak_bytes or 0, most)
            held.predicted_least_peak_bytes = max(held.predicted_least_peak_bytes or 0, least)
            away = predict_peak_bytes(actions, self._host_changes)
            held.predicted_host_peak_bytes = max(held.predicted_host_peak_bytes, away)
        loads = [entry.routed / entry.evenly for entry in ledger.entries if entry.evenly]
        held.expert_load = max([held.expert_load or 0.0, *loads]) if loads else held.expert_load
        held.counted_peak_bytes = max(held.counted_peak_bytes, ledger.peak)
        held.counted_host_peak_bytes = max(held.counted_host_peak_bytes, ledger.host_peak)
        counted = [(entry.bytes, entry.host_bytes) for entry in ledger.entries]
        self._is_settled = program is self._program and counted == self._counted
        self._counted = counted

    def _foretell_by_tokens(self, actions: Sequence[Action], ledger: ActivationLedger) -> None:
        """Foretell the peaks of a step whose microbatches differ."""
        treatments = tuple(sorted(self._treatments.items()))
        on_device, on_host = self._by_tokens.setdefault(treatments, (BytesByTokens(), BytesByTokens(on_host=True)))
        for bytes_by_tokens in (on_device, on_host):
            bytes_by_tokens.learn(ledger.entries)
        held = self.held
        peak, away = (each.peak(actions, ledger.tokens_of) for each in (on_device, on_host))
        held.predicted_peak_bytes = max(held.predicted_peak_bytes or 0, peak)
        held.predicted_least_peak_bytes = held.predicted_peak_bytes
        held.predicted_host_peak_bytes = max(held.predicted_host_peak_bytes, away)

    def add_losses(self, losses: dict[str, object], grad_norm: object | None) -> None:
        """Note what the training loop reports for one iteration; the first loss is the model's."""
        for value in losses.values():
            self.losses.append(None)
            with self.guarded(LOSSES):
                self.losses[-1] = float(value)
            break
        if losses and grad_norm is not None:
            self.grad_norms.append(None)
            with self.guarded(LOSSES):
                self.grad_norms[-1] = float(grad_norm)

    def read(self) -> None:
        """Take the times of the last step, if nobody has."""
        if self._unread is None:
            return
        (plan, self._last_plan, observed), self._unread = self._unread, None
        self._last = observed.trace.actions()
        work = sum(traced.end - traced.start for traced in self._last)
        end = max((traced.end for traced in self._last), default=0.0)
        peak = self.steps[-1].peak if observed.ledger is None else observed.ledger.peak
        planned = self._last_plan.timeline.makespan, self._last_plan.arrival_makespan
        self.steps.append(run_report.Step(plan, end, work, peak, *planned, observed.offload))

    def write(self) -> None:
        """Gather the records of all ranks and write report and pictures on rank 0. Every rank must call this.

        Raises nothing: what cannot be written is warned of.
        """
        with self.guarded("the report"):  # all of it: what may fail on one rank alone has a guard of its own
            with self.guarded(STEPS):
                self.read()
            ranks = gather(self._summary(self._shared()))
            if not is_first_rank():
                return
            report = run_report.report_of(ranks, self.trace)
            for line in lines(report):
                logger.info("%s", line)
            if self.report is not None:
                with self.guarded(str(self.report)):
                    write_whole(self.report, json.dumps(report, indent=2, allow_nan=False) + "\n")
                    logger.info("wrote %s", self.report)
            if self.trace is not None and self.last_plan is not None:
                self._draw([ranks[member] for member in dist.get_process_group_ranks(self.group)])

    def _draw(self, pipeline: list[run_report.Summary]) -> None:
        """Draw the last step, planned and as it ran on the data-parallel and tensor-parallel peers of rank 0."""
        plan, drawn = self.last_plan, []
        for name, timeline in (("plan", lambda: plan.timeline), ("run", lambda: run_report.last_step(pipeline, plan))):
            for suffix in _TIMELINES:
                path = self.trace / f"{name}.{suffix}"
                with self.guarded(str(path)):
                    drawn.append(save_timeline(timeline(), path).name)
        if drawn:
            logger.info("wrote the last step's timelines: %s in %s", ", ".join(drawn), self.trace)

    def _shared(self) -> list[run_report.Shared] | None:
        """Return what the ranks of this pipeline tell each other; ``None`` where one of them has nothing to tell."""
        if self.group is None:  # no step has begun, on any rank
            return None
        own = None
        with self.guarded(STEPS):
            if self.is_whole and self.steps:
                own = run_report.Shared(dict(self._weights.of_stages), [step.end for step in self.steps])
        everyones = gather(own, self.group)
        if None in everyones or len({len(each.ends) for each in everyones}) > 1:
            return None
        return everyones

    def _summary(self, shared: list[run_report.Shared] | None) -> run_report.Summary:
        """Return this rank's part of the report."""
        found = run_report.Summary(dist.get_rank() if dist.is_initialized() else 0, self.losses, self.grad_norms, None)
        if self.steps:
            with self.guarded(STEPS):
                found = replace(
                    found,
                    measured=run_report.measured(
                        self.steps, self.last_plan, self._device, self.held, self._weights, shared
                    ),
                    plans=[run_report.described(n, self._plans, self.steps, shared) for n in range(len(self._plans))],
                    steps=len(self.steps),
                    last=self._last,
                )
        failures = [f"no {what}: {why}" for what, why in self._failures.items()]
        return replace(found, failure="; ".join(failures) or None)

    def _learn_bytes(self, program: Program, device: int, ledger: ActivationLedger) -> None:
        """Learn what actions take and give back, from the first step that has such an action: later plans may fuse
        others.

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
                *((self._changes[most], bytes_per_action(ledger.entries, stages, most)) for most in (False, True)),
                (self._host_changes, bytes_per_action(ledger.entries, stages, on_host=True)),
            ):
                for kind, stage in unknown:
                    changes.setdefault(kind, [0] * stages)[stage] = seen[kind][stage]
            self._learnt |= unknown
        if any(entry.routed for entry in ledger.entries):
            self._learn_routing(ledger, stages)

    def _learn_routing(self, ledger: ActivationLedger, stages: int) -> None:
        """Widen what is foretold by what this step's routing has shown: the next one's may be as uneven."""
        for most, known in self._changes.items():
            seen = bytes_per_action(ledger.entries, stages, most)
            for stage in range(stages):
                now, before = (
                    sum(max(0, changes[kind][stage]) for kind in seen if kind in (Kind.F, Kind.R))
                    for changes in (seen, known)
                )
                if (now > before) if most else (now < before):
                    self._uneven = True
                    for kind, change in seen.items():
                        known[kind][stage] = change[stage]
