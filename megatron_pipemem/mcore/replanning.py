"""Replace the costs that a run starts with: by the costs of its real layers, then by measured bytes and seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import gather
from megatron_pipemem.mcore.model.whole_model import layout_of
from megatron_pipemem.mcore.programs import MeasurementUpdate, ProgramStore
from megatron_pipemem.mcore.step.extension import Extension, Step
from megatron_pipemem.runtime.activation_ledger import bytes_per_action
from megatron_pipemem.runtime.trace import Stopwatch, Trace, TracedAction, average, drift
from megatron_pipemem.runtime.transport import Edge, MessageFormat, measure_links
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.measured import Medians, Pair, costs_from
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.units import WHOLE, Units

logger = logging.getLogger(__name__)

FIRST_STEPS = 2
WINDOW = 20
MINIMUM_GAIN = 0.01


class LayersOfStages(Extension):
    """Passes the number of layers of each built stage to the planner, which then prices each stage by them."""

    def __init__(self, programs: ProgramStore):
        self._programs = programs
        self._is_known = False

    def choose(self, step: Step) -> None:
        if not self._is_known:
            placement = step.pipeline.placement
            layout = layout_of(step.chunks, placement, step.groups.pp, lambda model: len(model.decoder.layers))
            self._programs.set_layers(tuple(map(int, layout[: placement.model_stages])))
            self._is_known = True


@dataclass(frozen=True)
class _RankMeasurements:
    """The measurements of one rank, or the failure that prevented them."""

    device: int  # position of the rank in its pipeline
    changes: dict[Kind, tuple[int, ...]] | None  # of held bytes, per stage and part (``bytes_per_action``)
    medians: Medians  # seconds of its passes
    links: dict[Edge, float]  # seconds of a message
    failure: str | None = None
    pairs: dict[Pair, float] = field(default_factory=dict)  # seconds of its pairs of passes


class Replanner(Extension):
    """Measures training steps, and plans again with the measurements, at the start of the same step on every rank.

    Bytes are counted in the first step, if a plan needs them. The times of later steps are read one step late, when the
    GPU has finished the step. After ``FIRST_STEPS`` timed steps, the measured times replace the initial costs. Then,
    every ``WINDOW`` steps, they are compared with the costs in use. If a rank cannot measure, the plan stays. Times are
    measured only if ``needs_seconds``.
    """

    only_trains = True

    def __init__(self, programs: ProgramStore, needs_seconds: bool):
        self._programs = programs
        self._needs_seconds = needs_seconds
        self._units = WHOLE
        self._has_seconds = False
        self._stopwatch = Stopwatch()
        self._warm = False
        self._unread: tuple[Trace, Container[Action]] | None = None
        """The trace of the last step, and the pairs of its schedule."""
        self._counted = False
        self._changes: dict[Kind, tuple[int, ...]] | None = None
        self._failure: str | None = None
        self._links: dict[Edge, float] | None = None
        self._message: MessageFormat | None = None
        """The message format of the last step. The format of the next step may be unknown when it is planned."""

    def choose(self, step: Step) -> None:
        """Plan the step again if the earlier steps gave new measurements."""

        def links() -> dict[Edge, float]:
            assert self._message is not None, "seconds are taken from earlier steps"
            if self._message.typical is None:
                tell(logger, "the shapes of messages are unknown, so their time is not measured and counts as 0")
                return {}
            return measure_links(step.pipeline, self._message)

        update = self.before_step(step.shape, step.pipeline.device, links)
        if update is not None:
            step.program_store.renew(update)

    def prepare(self, step: Step) -> None:
        step.counts_bytes |= self._programs.needs_bytes
        step.times_actions |= self._needs_seconds

    def after(self, step: Step) -> None:
        self._message, ledger = step.message, step.observation.ledger
        units = step.program.schedule.units
        if units.parts != self._units.parts:
            # Times of passes with another number of parts cannot be used.
            self._stopwatch, self._unread = Stopwatch(units), None
        self._units = units
        # All ranks must agree on whether bytes were counted or passes timed, even if this rank failed to do so.
        if self._programs.needs_bytes and ledger is not None:
            self._counted = True
            self._failure = self._failure or ledger.failure
            with self._noting_failure():
                num_stages = step.pipeline.placement.num_stages
                self._changes = bytes_per_action(ledger.entries, num_stages, units=units)
        if self._unread is not None:
            actions: list[TracedAction] = []
            with self._noting_failure():
                actions = self._unread[0].actions()
            self._stopwatch.add(actions, self._unread[1])
        # The first step takes longer, because channels open, kernels load and the allocator grows.
        trace = step.observation.trace if self._warm and self._needs_seconds else None
        self._unread = None if trace is None else (trace, step.program.schedule.pairs)
        self._warm = True

    def before_step(
        self, shape: Shape, device: int, measure_links: Callable[[], dict[Edge, float]]
    ) -> MeasurementUpdate | None:
        """Return the new measurements to plan with, the same on every rank; ``None`` to keep the plan.

        Every rank of the model calls this before every training step. ``shape`` is that of the coming step, and
        ``device`` is this rank's position in its pipeline. ``measure_links`` returns the seconds of a message on each
        link. It is called once per run, when passes have been timed.
        """
        counted = self._counted
        timed = self._needs_seconds and self._stopwatch.steps >= (WINDOW if self._has_seconds else FIRST_STEPS)
        if not counted and not timed:
            return None
        if timed and self._links is None:
            self._links = measure_links()
        watch, links = self._stopwatch, self._links or {}
        own = _RankMeasurements(device, self._changes, watch.medians(), links, self._failure, watch.of_pairs())
        contributions = gather(own, self._programs.deciding_groups)
        self._counted, self._changes, self._failure = False, None, None
        if timed:
            self._stopwatch.reset()
        placement = self._programs.placement(shape.num_devices, shape.chunks)
        failure = next((rank.failure for rank in contributions if rank.failure), None)
        try:
            if failure is None:
                return self._update(contributions, placement, counted, timed)
        except Exception as error:  # the same on every rank
            failure = f"{type(error).__name__}: {error}"
        tell(logger, "the measurements of the run cannot be used (%s); its plan stays", failure, level=logging.WARNING)
        return None

    def _update(
        self, ranks: Sequence[_RankMeasurements], placement: Placement, counted: bool, timed: bool
    ) -> MeasurementUpdate | None:
        changes = merge_bytes(ranks, placement, self._units) if counted else None
        if not timed:
            return MeasurementUpdate("bytes counted", None, changes, 0.0)
        links = average([rank.links for rank in ranks])
        medians = average([rank.medians for rank in ranks])
        pairs = average([rank.pairs for rank in ranks])
        costs = costs_from(medians, links, placement, self._programs.costs, self._units, pairs)
        if not self._has_seconds:
            self._has_seconds = True
            return MeasurementUpdate("costs measured", costs, changes, 0.0)
        moved = drift(self._programs.costs, costs, placement, self._units)
        return None if moved is None else MeasurementUpdate(moved, costs, changes, MINIMUM_GAIN)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"


def merge_bytes(
    ranks: Sequence[_RankMeasurements], placement: Placement, units: Units = WHOLE
) -> dict[Kind, tuple[int, ...]]:
    """Return the change of held bytes by each kind of action, one value per stage and part.

    The values of a stage's parts are consecutive. ``ranks`` are all ranks of the model. Ranks with the same pipeline
    rank have different batches. Of these ranks, the one whose forwards save the most bytes on the stage counts.
    """
    reports = [(rank.device, rank.changes) for rank in ranks if rank.changes]
    fullest = []
    for stage, device in enumerate(placement.devices):
        of_device = [changes for holder, changes in reports if holder == device]
        places = slice(stage * units.parts, (stage + 1) * units.parts)
        fullest += [max(of_device, key=lambda changes: sum(changes[Kind.F][places]))] * units.parts
    kinds = sorted({kind for _, changes in reports for kind in changes})
    return {kind: tuple(c[kind][at] if kind in c else 0 for at, c in enumerate(fullest)) for kind in kinds}
