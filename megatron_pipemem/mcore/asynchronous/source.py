"""Windows of an asynchronous schedule, one for every call of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_pipemem.mcore.sources import FamilySource, Plan, Shape
from megatron_pipemem.schedule.core.simulator import Timeline
from megatron_pipemem.schedule.features.windows import Moment, Window, check_batch, family_window, updates_per_batch


@dataclass(frozen=True, kw_only=True)
class WindowPlan(Plan):
    """A plan for the calls that stand at one moment of the stream."""

    window: Window

    @cached_property
    def timeline(self) -> Timeline:
        return self.window.simulate(self.costs)


class AsynchronousSource(FamilySource):
    """Schedules of a family whose weights change in the middle of them; arguments as of ``FamilySource``."""

    @property
    def loop_updates(self) -> bool:
        """Whether the optimizer steps once per call, by the training loop, and not once per microbatch."""
        return updates_per_batch(self.name)

    @property
    def identity(self) -> str:
        """Tells schedules apart whose older weights mean different things."""
        return f"{self.name} {sorted(self._options.items())}"

    def window_plan(self, shape: Shape, moment: Moment) -> WindowPlan:
        """The plan of a call.

        Raises:
            UnsupportedError: there is none for that many microbatches.
            ScheduleError: it is wrong; it is never executed.
        """
        batch = shape.num_microbatches
        check_batch(self.name, shape.num_devices, batch)
        cut = family_window(
            self.name,
            shape.num_devices,
            batch,
            moment,
            memory_cap=self._memory_cap,
            costs=self.costs,
            single_queue=self.single_queue,
            **self._options,
        )
        when = "start" if moment.before == 0 else "end" if moment.left == 0 else "no flush between steps"
        return WindowPlan(cut.schedule, self.costs, self.priced_by, when, window=cut)
