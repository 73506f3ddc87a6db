"""From a schedule's name to the validated program of one step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, family
from megatron_pipemem.schedule.schedule import Program, Schedule
from megatron_pipemem.schedule.validator import validate_program

logger = logging.getLogger(__name__)


@dataclass
class ProgramCache:
    """Compiles programs on demand; batch-size ramp-up and evaluation change the number of microbatches between steps.

    Args:
        name: schedule family.
        memory_cap: in activation units, or ``None``.
        options: options of the family.
    """

    name: str
    memory_cap: float | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    _programs: dict[tuple, Program] = field(default_factory=dict)

    def build(self, num_devices: int, chunks: int | None, num_microbatches: int, group_size: int | None = None) -> Schedule:
        """The schedule for a model with ``chunks`` chunks per rank.

        Raises:
            UnsupportedError: the family cannot be built so.
        """
        options = dict(self.options)
        accepted = family(self.name).options
        if group_size == num_devices:  # Megatron's default, and ours, which copes better with an odd last group
            group_size = None
        # Only where the user left them to us: Megatron's own flags then say how the model is cut.
        for option, value in (("chunks", chunks), ("group_size", group_size)):
            if option in accepted and value is not None:
                options.setdefault(option, value)
        return build_schedule(
            self.name,
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            memory_cap=self.memory_cap,
            **options,
        )

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        """The placement of the family's schedules, which does not depend on the number of microbatches."""
        return self.build(num_devices, chunks, 1).placement

    def compile(
        self,
        *,
        num_devices: int,
        chunks: int,
        num_microbatches: int,
        group_size: int | None,
        forward_only: bool,
        agree: Callable[[str], None],
    ) -> Program:
        """The validated program of one step.

        Args:
            num_devices: pipeline ranks.
            chunks: model chunks per rank.
            num_microbatches: microbatches of the step.
            group_size: microbatches per group of the interleaved schedule.
            forward_only: evaluation.
            agree: called once per new program with its hash, to compare it with the other ranks'.

        Raises:
            UnsupportedError: the family cannot be built so.
            ScheduleError: the schedule or its lowering is wrong; it is never executed.
        """
        key = (num_devices, chunks, num_microbatches, group_size, forward_only)
        if key not in self._programs:
            schedule = self.build(num_devices, chunks, num_microbatches, group_size)
            if forward_only:
                schedule = schedule.forward_only()
            program = lower(schedule)
            validate_program(program)
            text = schedule.digest + "".join(f"{device}:{','.join(map(str, a))};" for device, a in enumerate(program.actions))
            agree(hashlib.sha256(text.encode()).hexdigest())
            logger.info(
                "compiled schedule %s for %d devices, %d microbatches (%d actions)",
                schedule.name,
                num_devices,
                num_microbatches,
                sum(map(len, program.actions)),
            )
            self._programs[key] = program
        return self._programs[key]

    def clear(self) -> None:
        self._programs.clear()
