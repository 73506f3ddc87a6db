"""Make windows of an asynchronous schedule, one for every call of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_pipemem.mcore.source import Source
from megatron_pipemem.schedule.core.simulator import Timeline
from megatron_pipemem.schedule.features.windows import Moment, Window, check_batch, family_window
from megatron_pipemem.schedule.knowledge import Shape
from megatron_pipemem.schedule.resolve import ChosenSchedule


@dataclass(frozen=True, kw_only=True)
class WindowPlan(ChosenSchedule):
    """A plan for the calls that stand at one moment of the stream."""

    window: Window

    @cached_property
    def timeline(self) -> Timeline:
        return self.window.simulate(self.costs)


def identity(source: Source) -> str:
    """Tells schedules apart whose older weights mean different things."""
    return f"{source.name} {sorted(source.request.options.items())}"


def window_plan(source: Source, shape: Shape, moment: Moment) -> WindowPlan:
    """Return the plan of a call.

    Args:
        source: of an asynchronous family.
        shape: of the call.
        moment: of the stream, at which the call stands.

    Raises:
        UnsupportedError: there is none for that many microbatches.
        ScheduleError: it is wrong; it is never executed.
    """
    batch = shape.num_microbatches
    check_batch(source.name, shape.num_devices, batch)
    window = family_window(
        source.name,
        shape.num_devices,
        batch,
        moment,
        memory_cap=source.request.cap_in_units,
        costs=source.costs,
        single_queue=source.single_queue,
        **source.request.options,
    )
    when = "start" if moment.before == 0 else "end" if moment.left == 0 else "no flush between steps"
    return WindowPlan(window.schedule, source.costs, source.knowledge.priced_by, when, window=window)
