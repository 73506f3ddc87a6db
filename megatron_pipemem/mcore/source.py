"""Keep the schedules of a run: what the user asked, resolved with what the run has measured so far."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.choose.choice import choose, vocabulary_ways
from megatron_pipemem.choose.knowledge import MEASURED, Choice, HostLink, Knowledge, MemoryDeltas, Shape
from megatron_pipemem.choose.model_cut import placements_of
from megatron_pipemem.choose.searching import searched
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.features.vocabulary.megatron.build import cut_vocabulary, layout_of
from megatron_pipemem.features.vocabulary.megatron.choice import choose_barriers
from megatron_pipemem.launch.cut_flags import as_built
from megatron_pipemem.mcore.agreement import decided_by_rank_zero, is_first_rank, tell
from megatron_pipemem.report.run import announcement
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.options import AUTO, OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.schedule_file import check_devices_of_file
from megatron_pipemem.schedule.vocabulary import check_placement
from megatron_pipemem.search.result import ResultCache

logger = logging.getLogger(__name__)

_HOST_FILL = 0.8  # blocks of many sizes do not fill a pool


def announce(plan: Choice) -> None:
    """Log what is about to run, once for the job."""
    if not is_first_rank():
        return
    try:
        line = announcement(plan.timeline)
    except Exception as error:  # a line of the log ends no run
        line = f"{plan.schedule.name}, which cannot be simulated: {error}"
    logger.info("%s: %s", plan.why, line)


class Host(Protocol):
    """What activations may leave the device for. All ranks of the job ask at the same time."""

    def budget(self) -> int:
        """Bytes of host memory that every rank may take."""

    def switches(self) -> tuple[tuple[int, ...], ...]:
        """Places in the pipeline that share a channel to the host."""

    def links(self, num_devices: int) -> tuple[HostLink, ...]:
        """The link of every place in the pipeline, measured."""


class Source:
    """Makes the schedules of a run. What is searched for is resolved on world rank 0, and the others take it over.

    The placement of a search is chosen when the model is built, because layers cannot move afterwards; all later searches
    keep it. Unless everything is known beforehand, the first step of a cap in bytes or of offload runs one microbatch after
    another, so that its bytes can be counted.

    Args:
        request: what the user asked for.
        costs: prices of plans; measured ones may take their place in the run.
        priced_by: where ``costs`` are from.
        host: of the run; ``None`` where nothing leaves the device beside what a schedule says itself.
    """

    queues: tuple[bool, ...] = (False,)
    """The orders that schedules are lowered to, each as whether it is for ranks that serve everything in one queue."""

    def __init__(
        self,
        request: Request,
        costs: Costs | None = None,
        priced_by: str = "unit",
        host: Host | None = None,
    ):
        self.request = request
        self._host = host
        ratio = request.offload_options.ratio
        self.knowledge = Knowledge(costs or Costs(), priced_by, measures=True, ratio=ratio, cache=ResultCache())
        self._chosen: dict[tuple[int, int], Placement] = {}
        # What the choice of the placement or of the vocabulary has found already.
        self._answers: dict[tuple[Placement, int, int], Choice] = {}

    @property
    def name(self) -> str:
        return self.request.schedule

    @property
    def costs(self) -> Costs:
        """Of actions, as far as they are known."""
        return self.knowledge.costs

    @property
    def needs_bytes(self) -> bool:
        """Whether it cannot plan before somebody has counted what actions take and give back."""
        return self.knowledge.lacks_bytes(self.request)

    @property
    def needs_seconds(self) -> bool:
        """Whether it plans better when somebody has timed actions, whatever costs the user has named."""
        return self.knowledge.lacks_seconds(self.request)

    def measured(self, costs: Costs | None, changes: MemoryDeltas | None) -> None:
        """Plan from now on with what the run itself has shown.

        Args:
            costs: seconds, or ``None`` when nothing was timed.
            changes: bytes, or ``None`` when nothing was counted.
        """
        self.knowledge = self.knowledge.with_measured(costs, changes)
        self._answers.clear()

    def cut_is(self, layers: tuple[int, ...]) -> None:
        """Price stages of a built model, if the costs are those of its parts.

        Args:
            layers: of every stage.

        Raises:
            CostsError: the costs are of a model with another number of layers.
        """
        self.knowledge = replace(self.knowledge, costs=self.costs.with_parts(cut=layers))
        if len(set(layers)) > 1:  # what has been found for even stages is no answer
            self._answers.clear()

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        """Return the placement for a model with that many chunks per rank; ``None`` where nobody knows them yet.

        Raises:
            UnsupportedError: there is none on that many devices.
        """
        if self.request.file is not None:
            check_devices_of_file(self.request.file, num_devices)
            placement = self.request.file.placement
        elif self.request.searches:
            placement = self._searched_placement(num_devices, chunks)
        else:
            placement = self._family_placement(num_devices, chunks)
        if self.request.cuts_vocabulary and placement.replicas > 1:
            check_placement(placement)  # before the model is built
        return placement

    def plan(self, shape: Shape, reason: str, before: Choice | None = None, minimum_gain: float = 0.0) -> Choice:
        """Return a schedule for training steps of this shape. Every rank of the job calls this at the same time.

        Args:
            shape: of the step.
            reason: why a plan is wanted.
            before: the plan so far, if there is one.
            minimum_gain: the part of its makespan that another schedule must save to take its place.

        Raises:
            UnsupportedError: there is no such schedule.
        """
        placement = self.placement(shape.num_devices, shape.chunks)
        known, counts = self._known(placement), self.needs_bytes
        answer = self._answers.get((placement, shape.num_microbatches, self.request.barriers))
        found = self._resolved(self.request, shape, known) if answer is None or counts else answer
        if counts:
            return found
        found = replace(found, why=reason)
        # What ran before the bytes were known need not keep the cap.
        if before is None or (
            known.changes is not None and any(known.excess(self.request, before.schedule, found.costs))
        ):
            return found
        if found.schedule != before.schedule:
            reason = f"{reason}; no schedule is that much faster"
        kept = replace(found, schedule=before.schedule, why=reason, notes=before.notes)
        return kept if found.timeline.makespan > kept.timeline.makespan * (1 - minimum_gain) else found

    def priced(self, plan: Choice) -> Costs:
        """Return the costs of a plan, with the memory that the run's cap is about, if it has one."""
        if self.request.memory_cap is None:
            return plan.costs
        counted = self.knowledge.counted_costs(plan.schedule.placement, self.request.in_bytes)
        return replace(plan.costs, memory=counted.memory)

    def forwards(self, shape: Shape) -> Schedule:
        """Return a schedule for evaluation steps of this shape."""
        placement = self.placement(shape.num_devices, shape.chunks)
        known = replace(self.knowledge, placement=placement)
        return choose(self.request, shape._replace(forward_only=True), known).schedule

    def cut(
        self, chunks: list[torch.nn.Module], placement: Placement, pg_collection: ProcessGroupCollection | None
    ) -> None:
        """Cut the vocabulary of a rank's chunks, if that is what is wanted. Every rank calls this when it has built
        them.

        Args:
            chunks: of this rank.
            placement: of the stages.
            pg_collection: Megatron's process groups.
        """
        if not self.request.cuts_vocabulary or placement.num_devices == 1:
            return
        if self.request.vocab_parallel == AUTO:
            model = get_attr_wrapped_model(chunks[0], "pre_process", return_model_obj=True)
            assert pg_collection is not None, "whoever builds the model has made them"
            layout = layout_of(chunks, placement, pg_collection.pp)
            barriers = choose_barriers(model, layout, self.costs, self._ways(placement, len(chunks)))
            self.request = self.request.decided(barriers)
        parts = self.costs.part_prices
        if self.request.barriers and parts is not None and self.costs.vocabulary is None:
            costs = self.costs.with_cut_head(parts.head, placement.num_devices, self.request.barriers)
            self.knowledge = replace(self.knowledge, costs=costs)
            self._answers.clear()
        if self.request.barriers:
            cut_vocabulary(chunks, placement, pg_collection, self.request.barriers, self.request.vocab_piece_tokens)

    def _ways(self, placement: Placement, chunks: int) -> dict[int, Schedule]:
        """Return what most training steps would run without vocabulary passes and with those of either algorithm, where
        that is possible.
        """
        microbatches = microbatches_of_the_run() or 4 * placement.num_devices
        shape, known = Shape(placement.num_devices, chunks, microbatches), self._known(placement)

        def resolved(request: Request) -> Choice:
            if known.lacks_bytes(request):  # nobody knows yet how much of it the cap will allow
                return self._resolved(replace(request, memory_cap=None), shape, known)
            found = self._resolved(request, shape, known)
            self._answers[placement, microbatches, request.barriers] = found
            return found

        def refused(barriers: int, error: PipememError) -> None:
            tell(logger, "vocabulary: not with %d barriers: %s", barriers, error)

        ways = vocabulary_ways(self.request, resolved, refused)
        return {barriers: found.schedule for barriers, found in ways.items()}

    def _family_placement(self, num_devices: int, chunks: int | None) -> Placement:
        request = self.request.without_offload().decided(0)
        fewest = family(self.name).fewest_microbatches(num_devices)
        try:
            return choose(request, Shape(num_devices, chunks, fewest), self.knowledge).schedule.placement
        except UnsupportedError:
            if chunks is not None:  # which may be what is wrong, and the user knows them by Megatron's names
                placements_of(self.name, request.options, num_devices, as_built(chunks))
            raise

    def _searched_placement(self, num_devices: int, chunks: int | None) -> Placement:
        chosen = [placement for (devices, _), placement in self._chosen.items() if devices == num_devices]
        if chunks is None and chosen:
            return chosen[-1]
        asked = self.request.options.get("chunks")
        if None not in (chunks, asked) and chunks != asked:
            raise UnsupportedError(
                "needs-chunks",
                f"the option chunks={asked} of schedule {AUTO} asks for {asked} model chunks per pipeline rank, and the model "
                f"has {chunks}; leave the option out, or cut the model accordingly (--num-virtual-stages-per-pipeline-rank)",
            )
        key = (num_devices, chunks or self.request.chunks)
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def _choose(self, num_devices: int, chunks: int) -> Placement:
        """That of the fastest schedule, for the costs known so far."""
        shape = Shape(num_devices, chunks, microbatches_of_the_run() or 4 * num_devices)
        known = replace(self._known(None), measures=False)
        candidates = searched(self.request, shape, known)
        if len(candidates) == 1:
            return candidates[0]
        if self.request.in_bytes and known.changes is None and known.costs.memory is None:
            return candidates[0]  # a V: the same bytes on every device, so the most is made of a cap not yet known
        request = self.request if self.request.chooses_offload else self.request.without_offload()
        found = self._resolved(request, shape, known)
        placement = found.schedule.placement
        if request is self.request:
            self._answers[placement, shape.num_microbatches, request.barriers] = found
        tell(logger, "placement %s for %d pipeline ranks with %d chunks each", placement.name, num_devices, chunks)
        return placement

    def _known(self, placement: Placement | None) -> Knowledge:
        """With what the host can do, where anything is to be sent there. Every rank of the job asks at the same time."""
        known = replace(self.knowledge, placement=placement, queues=self.queues)
        host = self._host
        if host is None or self.request.offload == OFF:
            return known
        known = replace(known, switches=host.switches())
        counted = known.changes is not None or known.costs.memory is not None
        if counted and (self.request.memory_cap is None or self.request.in_bytes):
            known = replace(known, host_budget=_HOST_FILL * host.budget())
        if placement is not None and known.priced_by == MEASURED and known.changes is not None and self.needs_seconds:
            known = replace(known, links=host.links(placement.num_devices))
        return known

    def _resolved(self, request: Request, shape: Shape, known: Knowledge) -> Choice:
        """As every rank would build it, or as rank 0 finds it: a search stops by the clock."""
        if not (request.searches or request.plans_offload):
            return choose(request, shape, known)
        found = decided_by_rank_zero(lambda: choose(request, shape, known).alone)
        if request.searches and not self.needs_bytes:
            found = replace(found, schedule=replace(found.schedule, name=AUTO))
        return found


def microbatches_of_the_run() -> int | None:
    """Return what Megatron's own calculator says, where a training loop has set it up."""
    try:
        return num_microbatches_calculator.get_num_microbatches()
    except AttributeError:
        return None
