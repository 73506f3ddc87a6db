"""Turn a source of schedules into the validated program of one step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pipemem.choose.knowledge import Choice, MemoryDeltas, Shape
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.mcore.agreement import gather, is_first_rank
from megatron_pipemem.mcore.source import Source, announce
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.validator import validate_program

logger = logging.getLogger(__name__)

_KEPT = 16
"""Programs of single steps."""


@dataclass(frozen=True)
class MeasurementUpdate:
    """Say why and with what to plan anew.

    Args:
        reason: for the report.
        costs: seconds, or ``None`` when nothing was timed.
        changes: bytes, or ``None`` when nothing was counted.
        minimum_gain: the part of the makespan that a schedule must save to replace the one that runs.
    """

    reason: str
    costs: Costs | None
    changes: MemoryDeltas | None
    minimum_gain: float


class Compiled(NamedTuple):
    """A program, and the plan it came from; evaluation has none.

    Args:
        program: of most steps.
        plan: what was planned.
        in_one_queue: the same actions in an order for one hardware queue per rank, if some steps need it.
    """

    program: Program
    plan: Choice | None
    in_one_queue: Program | None = None

    def order(self, single_queue: bool) -> Program:
        """Return the program of a step that does or does not need the order for one hardware queue."""
        return self.in_one_queue if single_queue and self.in_one_queue is not None else self.program


def digest_of(*programs: Program) -> str:
    """Return the hash of all that ranks must agree on before they run these programs."""
    text = "".join(
        program.schedule.digest + "".join(f"{d}:{','.join(map(str, a))};" for d, a in enumerate(program.actions))
        for program in programs
    )
    return hashlib.sha256(text.encode()).hexdigest()


class ProgramCache:
    """Compiles programs on demand; batch-size ramp-up and evaluation change the number of microbatches between steps.

    Args:
        source: makes the schedules.

    Attributes:
        renewals: how often training has been planned anew.
    """

    def __init__(self, source: Source):
        self._source = source
        self.renewals = 0
        self._training: dict[Shape, Compiled] = {}
        self._evaluation: dict[Shape, Compiled] = {}
        self._outdated: dict[Shape, Compiled] = {}
        self._update: MeasurementUpdate | None = None
        self._of_steps: dict[tuple[Schedule, bool], Program] = {}

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def queues(self) -> tuple[bool, ...]:
        """The orders that schedules are lowered to, each as whether it is for one hardware queue per rank, and proved to
        end there. ``Compiled.program`` has the first one.
        """
        return self._source.queues

    @queues.setter
    def queues(self, queues: tuple[bool, ...]) -> None:
        if queues != self._source.queues:
            self.clear()
            self._source.queues = queues

    def compile(self, shape: Shape, *, forward_only: bool, agree: Callable[[str], None]) -> Compiled:
        """Return the validated program of one step.

        Args:
            shape: of the step.
            forward_only: evaluation.
            agree: called once per new program with its hash, to compare it with the other ranks'.

        Raises:
            UnsupportedError: there is no such schedule.
            ScheduleError: the schedule or its lowering is wrong; it is never executed.
        """
        programs = self._evaluation if forward_only else self._training
        if shape not in programs:
            before = None if forward_only else self._outdated.get(shape)
            compiled = self._build(shape, forward_only) if before is None else self._build_again(shape, before)
            agree(digest_of(*filter(None, (compiled.program, compiled.in_one_queue))))
            programs[shape] = compiled
            self._outdated.pop(shape, None)
            if compiled.plan is not None and compiled is not before:
                announce(compiled.plan)
        return programs[shape]

    def of_step(self, schedule: Schedule, base: Compiled, costs: Costs, single_queue: bool) -> Program:
        """Return the validated program of a schedule that was made for one step, from memory where it has run of late.

        Args:
            schedule: the same on every rank.
            base: what steps of this shape run otherwise.
            costs: what the places of messages in single queues are chosen for.
            single_queue: whether the step needs the order for one hardware queue per rank.

        Raises:
            ScheduleError: the schedule or its lowering is wrong; it is never executed.
        """
        if schedule == base.program.schedule:
            return base.order(single_queue)
        key = schedule, single_queue
        program = self._of_steps.pop(key, None) or self._proved(schedule, costs, single_queue)
        self._of_steps[key] = program
        if len(self._of_steps) > _KEPT:
            del self._of_steps[next(iter(self._of_steps))]
        return program

    def renew(self, update: MeasurementUpdate) -> None:
        """Plan again, with what is known now, whatever training steps come."""
        self._source.measured(update.costs, update.changes)
        self._update = update
        self.renewals += 1
        self._outdated |= self._training
        self._training.clear()

    def clear(self) -> None:
        for memory in (self._training, self._evaluation, self._outdated, self._of_steps):
            memory.clear()
        self._update = None

    def _build(self, shape: Shape, forward_only: bool) -> Compiled:
        if forward_only:
            return self._compiled(self._source.forwards(shape), None)
        first = not self._training and self._update is None
        plan = self._source.plan(shape, "start" if first else f"step of {shape.num_microbatches} microbatches")
        return self._compiled(plan.schedule, plan)

    def _build_again(self, shape: Shape, before: Compiled) -> Compiled:
        """Build by the update, or keep the program that has run so far: a plan that fails does not end a run that goes
        well.

        Raises:
            UnsupportedError: the bytes that were counted break the cap, whatever the schedule.
        """
        update, found, failure = self._update, before, None
        assert update is not None, "programs are outdated by an update"
        try:
            plan = self._source.plan(shape, update.reason, before.plan, update.minimum_gain)
            found = self._compiled(plan.schedule, plan)
        except Exception as error:  # the other ranks must hear of it, whatever it is
            failure = error
        code = failure.code if isinstance(failure, PipememError) else None
        failures = gather(None if failure is None else (f"{failure}", code))
        message, code = next((told for told in failures if told is not None), (None, None))
        if message is None:
            return found
        if code is not None and update.changes is not None:
            raise failure or UnsupportedError(code, message)
        if is_first_rank():
            logger.warning("could not plan again (%s): %s; the schedule stays", update.reason, message)
        return before

    def _compiled(self, schedule: Schedule, plan: Choice | None) -> Compiled:
        costs = self._source.costs if plan is None else plan.costs
        program, *others = (self._proved(schedule, costs, single_queue) for single_queue in self.queues)
        return Compiled(program, plan, *others)

    def _proved(self, schedule: Schedule, costs: Costs, single_queue: bool) -> Program:
        program = lower(schedule, single_queue=single_queue, costs=costs)
        validate_program(program, single_queue=single_queue)
        return program
