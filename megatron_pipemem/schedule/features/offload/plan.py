"""Build schedules whose activations spend the time between forward and backward on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.brief import brief
from megatron_pipemem.schedule.core.memory_cap import loosened
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.simulator import Timeline, simulate
from megatron_pipemem.schedule.features.offload.transfers import Key

NOT_NEEDED, RECOMPUTED = "not needed", "recomputed"
"""Why activations stay on their device, beside what ``plan_round_trips`` says."""


@dataclass(frozen=True)
class OffloadPlan:
    """A schedule with its activations' round trips to the host. Memory in activation units, or in that of the costs.

    Args:
        schedule: with actions on memory.
        base: the same without them.
        base_timeline: the simulated run of ``base``.
        kept: per ``(stage, microbatch)`` that does not leave its device, why: ``lifespan too short``, ``channel full``,
            ``host memory``, ``not needed``, or ``recomputed``.
        memory_cap: what was asked for, per device.
    """

    schedule: Schedule
    base: Schedule
    base_timeline: Timeline
    kept: Mapping[Key, str]
    memory_cap: tuple[float, ...] | None = None

    def __repr__(self) -> str:
        """Without what would have to be simulated first."""
        size = f"{self.base.num_devices} devices, {self.base.num_microbatches} microbatches"
        moved = f"{len(self.offloaded)} activations leave, {len(self.kept)} stay"
        return f"<OffloadPlan of {brief(self.base.name)}: {size}, {moved}>"

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated run of ``schedule``."""
        return simulate(self.schedule, self.base_timeline.costs)

    @property
    def peaks(self) -> tuple[float, ...]:
        return self.timeline.peaks

    @property
    def host_peaks(self) -> tuple[float, ...]:
        return self.timeline.host_peaks

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def delay(self) -> float:
        """Seconds by which the transfers make the step longer."""
        return max(0.0, self.timeline.makespan - self.base_timeline.makespan)

    @property
    def stall_seconds(self) -> tuple[float, ...]:
        """Per device, how long it stands still for transfers, idle time included."""
        return self.timeline.stall_seconds

    @cached_property
    def offloaded(self) -> tuple[Key, ...]:
        """Return what leaves its device."""
        return tuple(
            (action.stage, action.microbatch)
            for order in self.schedule.orders
            for action in order
            if action.kind is Kind.OFFLOAD
        )

    @property
    def keeps_cap(self) -> bool:
        if self.memory_cap is None:
            return True
        return all(peak <= loosened(cap) for peak, cap in zip(self.peaks, self.memory_cap, strict=True))

    @cached_property
    def obstacles(self) -> Counter[str]:
        """Return why, and how many, activations stay that would have to leave for a lower peak: on the devices that
        exceed their cap or, without one, on the fullest. Empty when the cap is kept or nothing stays for want of room.
        """
        if self.memory_cap is None:
            limits = (max(self.peaks) * (1 - 1e-9),) * len(self.peaks)
        else:
            limits = tuple(map(loosened, self.memory_cap))
        place = self.base.placement.devices
        return Counter(
            why
            for (stage, _), why in self.kept.items()
            if self.peaks[place[stage]] > limits[place[stage]] and why not in (NOT_NEEDED, RECOMPUTED)
        )

    @property
    def binds(self) -> str:
        """``obstacles`` in words, the most frequent first."""
        return ", ".join(f"{why} ({count} activations)" for why, count in self.obstacles.most_common())
