"""From a source of schedules to the validated program of one step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import NamedTuple

from megatron_pipemem.mcore.replanning import News
from megatron_pipemem.mcore.sources import Plan, Shape, Source
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.schedule import Program
from megatron_pipemem.schedule.validator import validate_program

logger = logging.getLogger(__name__)


class Compiled(NamedTuple):
    """A program, and the plan it came from; evaluation has none."""

    program: Program
    plan: Plan | None


def digest_of(program: Program) -> str:
    """Hash of all that ranks must agree on before they run it."""
    text = program.schedule.digest + "".join(f"{d}:{','.join(map(str, a))};" for d, a in enumerate(program.actions))
    return hashlib.sha256(text.encode()).hexdigest()


class ProgramCache:
    """Compiles programs on demand; batch-size ramp-up and evaluation change the number of microbatches between steps.

    Args:
        source: makes the schedules.
    """

    def __init__(self, source: Source):
        self._source = source
        self._training: dict[Shape, Compiled] = {}
        self._evaluation: dict[Shape, Compiled] = {}
        self._outdated: dict[Shape, Plan] = {}
        self._news: News | None = None

    @property
    def name(self) -> str:
        return self._source.name

    def compile(self, shape: Shape, *, forward_only: bool, agree: Callable[[str], None]) -> Compiled:
        """The validated program of one step.

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
            plan = None if forward_only else self._plan(shape)
            schedule = self._source.forwards(shape) if plan is None else plan.schedule
            program = lower(schedule)
            validate_program(program)
            agree(digest_of(program))
            logger.info(
                "compiled schedule %s for %d devices, %d microbatches (%d actions)",
                schedule.name,
                shape.num_devices,
                shape.num_microbatches,
                sum(map(len, program.actions)),
            )
            programs[shape] = Compiled(program, plan)
            self._outdated.pop(shape, None)
        return programs[shape]

    def renew(self, news: News) -> None:
        """Plan again, with what is known now, whatever training steps come."""
        self._source.measured(news.costs, news.changes)
        self._news = news
        self._outdated |= {shape: compiled.plan for shape, compiled in self._training.items()}
        self._training.clear()

    def clear(self) -> None:
        for memory in (self._training, self._evaluation, self._outdated):
            memory.clear()
        self._news = None

    def _plan(self, shape: Shape) -> Plan:
        before = self._outdated.get(shape)
        if before is None:
            first = not self._training and self._news is None
            return self._source.plan(shape, "start" if first else f"step of {shape.num_microbatches} microbatches")
        plan = self._source.plan(shape, self._news.reason, before, self._news.minimum_gain)
        logger.info("planned again (%s): %s", plan.reason, plan.schedule.name)
        return plan
