"""Keep the programs of a run. A program is chosen with the measurements so far, then lowered and validated once.

The first rank of a model searches for schedules, and its other ranks take over the result. The placement is chosen when
the model is built, and later searches keep it, because layers cannot move. If the choice depends on bytes that are not
known beforehand (``Knowledge.lacks_bytes``), the first step counts them. That step runs one microbatch after another.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch.distributed as dist
from megatron.core import num_microbatches_calculator

from megatron_pipemem.choose.choice import choose, vocabulary_ways
from megatron_pipemem.choose.knowledge import MEASURED, Choice, Knowledge, MemoryDeltas, Shape
from megatron_pipemem.choose.model_cut import megatron_cut, placements_of
from megatron_pipemem.errors import PipememError, ScheduleError, UnsupportedError
from megatron_pipemem.logs import is_first_rank, tell
from megatron_pipemem.mcore.agreement import Groups, decide_on_first_rank, run_on_all_ranks
from megatron_pipemem.part_costs import PartCosts, head_seconds, with_cut_head
from megatron_pipemem.queues import starts_in_order
from megatron_pipemem.request import Request
from megatron_pipemem.results import announcement
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower, rows_of_rank
from megatron_pipemem.schedule.options import AUTO, OFF
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import HostLink
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.schedule.schedule import Order, Program, Schedule
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.schedule.vocabulary import check_placement

logger = logging.getLogger(__name__)

Key = tuple[Shape, dist.ProcessGroup | None]
"""The shape of a step and the pipeline that runs it: two pipelines of a rank need not take the same steps."""

_HOST_FILL = 0.8  # blocks of many sizes do not fill a pool
_STEP_PROGRAMS_KEPT = 16
"""The number of programs of single steps that are kept."""


def announce(plan: Choice) -> None:
    """Log on rank 0 the schedule of the coming steps and why, or the error if it cannot be simulated."""
    if not is_first_rank():
        return
    try:
        line = announcement(plan.timeline) + f"; {plan.notes}" * bool(plan.notes)
    except Exception as error:  # a line of the log ends no run
        line = f"{plan.schedule.name}, which cannot be simulated: {error}"
    logger.info("%s: %s", plan.why, line)


class Host(Protocol):
    """The host memory to which activations are offloaded. All ranks of the model call a method at the same time."""

    def budget(self) -> int:
        """Return the bytes of host memory that one rank may use."""

    def shared_links(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of pipeline devices that share a link to the host, such as ``((0, 1), (2, 3))``."""

    def links(self, num_devices: int) -> tuple[HostLink, ...]:
        """Return the measured link to the host of each pipeline device, in the order of the devices."""


@dataclass(frozen=True)
class MeasurementUpdate:
    """New measurements to plan with, and the reason for planning again."""

    reason: str
    costs: Costs | None
    """Measured costs in seconds, or ``None`` if nothing was timed."""
    changes: MemoryDeltas | None
    """Counted bytes, or ``None`` if nothing was counted."""
    minimum_gain: float
    """The fraction of the makespan that a schedule must save to replace the one that runs."""


class Compiled(NamedTuple):
    """The program of all steps of one shape, and the choice of its schedule.

    ``plan`` is ``None`` for evaluation.
    """

    program: Program
    plan: Choice | None
    in_one_queue: Program | None = None
    """The same actions in an order for one hardware queue per rank, if some steps need it."""
    digest: str = ""
    """The hash that the ranks compare: of the proved programs, with the actions that this rank reads as it has them."""

    def order(self, single_queue: bool) -> Program:
        """Return ``in_one_queue`` if ``single_queue`` and if it is not ``None``; else ``program``."""
        return self.in_one_queue if single_queue and self.in_one_queue is not None else self.program


def digest_of(*programs: Program) -> str:
    """Return the hash of the schedules and action lists of programs, which all ranks compare before they run them."""
    return _joined((program.schedule, map(_digest_of_row, program.actions)) for program in programs)


def _joined(programs: Iterable[tuple[Schedule, Iterable[str]]]) -> str:
    """Return the hash of programs, from their schedules and the hashes of their rows."""
    text = "".join(schedule.digest + "".join(rows) for schedule, rows in programs)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_of_row(actions: Order) -> str:
    return hashlib.sha256(",".join(map(str, actions)).encode()).hexdigest()


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause the garbage collector: a plan makes millions of objects that stay, and collections would double its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ProgramStore:
    """Makes the validated programs of a run's steps and keeps them.

    Batch-size ramp-up and evaluation change the number of microbatches, so a run has several programs. ``priced_by`` is
    the source of ``costs``, for the report.
    """

    def __init__(
        self,
        request: Request,
        costs: Costs | None = None,
        priced_by: str = "unit",
        host: Host | None = None,
    ):
        self.request = request
        self.host = host
        """``None`` if no activation is offloaded."""
        ratio, cache = request.offload_options.ratio, None
        if request.searches:
            from megatron_pipemem.search.result import ResultCache  # loads the search

            cache = ResultCache()
        self.knowledge = Knowledge(costs or Costs(), priced_by, is_measuring=True, offload_ratio=ratio, cache=cache)
        self.renewals = 0
        """The number of times that training has been planned again."""
        self.deciding_groups: Groups | None = None
        """The groups that reach all ranks of the model at hand; ``None``, before there is a model, for the whole job."""
        self._programs: dict[Key, Compiled] = {}
        self._outdated: dict[Key, Compiled] = {}
        self._update: MeasurementUpdate | None = None
        self._of_steps: dict[tuple[Schedule, bool], Program] = {}
        self._placements: dict[tuple[int, int], Placement] = {}
        self._answers: dict[tuple[Placement, int, int], Choice] = {}
        """Schedules that were found while the placement or the vocabulary was chosen."""

    def join(self, groups: Groups) -> None:
        """Let the ranks that these groups reach decide together from now on."""
        self.deciding_groups = groups

    @property
    def name(self) -> str:
        return self.request.schedule

    @property
    def costs(self) -> Costs:
        """Return the costs of actions: the initial ones, or measured ones as soon as there are any."""
        return self.knowledge.costs

    @property
    def needs_bytes(self) -> bool:
        """Return whether the next step must count the bytes of actions before a schedule can be planned."""
        return self.knowledge.lacks_bytes(self.request)

    @property
    def needs_seconds(self) -> bool:
        """Return whether the run must time its actions, because it offloads and has no speed of copies to the host.

        ``--pipemem-costs profile`` times them in any case.
        """
        return self.knowledge.lacks_seconds(self.request)

    @property
    def queues(self) -> tuple[bool, ...]:
        """The kinds of orders to which schedules are lowered: ``True`` is the order for one hardware queue per rank.

        Each order is validated. ``Compiled.program`` has the first of them. Setting other kinds drops all programs.
        """
        return self.knowledge.queues

    @queues.setter
    def queues(self, queues: tuple[bool, ...]) -> None:
        if queues != self.queues:
            self.clear()
            self.knowledge = replace(self.knowledge, queues=queues)

    def get(self, shape: Shape, agree: Callable[[str], None], pipeline: dist.ProcessGroup | None = None) -> Compiled:
        """Return the validated program of steps of this shape.

        The first rank of ``pipeline`` proves each new program for all of its ranks. Every other rank lowers the actions
        that it reads. ``agree`` is called with the hash of these and of the proved ones, and compares it between the ranks.

        Raises:
            UnsupportedError: the schedule does not exist for this shape.
            ScheduleError: the schedule or its lowering is wrong. It is not executed.
        """
        key = shape, pipeline
        if key not in self._programs:
            before = self._outdated.get(key)
            compiled = self._build(key) if before is None else self._build_again(key, before)
            agree(compiled.digest)
            self._programs[key] = compiled
            self._outdated.pop(key, None)
            if compiled.plan is not None and compiled is not before:
                announce(compiled.plan)
        return self._programs[key]

    def step_program(self, schedule: Schedule, base: Compiled, costs: Costs, single_queue: bool) -> Program:
        """Return the validated program of a schedule that was made for one step only; recent ones are kept.

        ``base`` is the program of the other steps, returned if its schedule is the same. With ``single_queue``,
        ``costs`` decide where messages are placed in the queue.

        Raises:
            ScheduleError: the schedule or its lowering is wrong. It is not executed.
        """
        if schedule == base.program.schedule:
            return base.order(single_queue)
        key = schedule, single_queue
        program = self._of_steps.pop(key, None) or self._proved(schedule, costs, single_queue)
        self._of_steps[key] = program
        if len(self._of_steps) > _STEP_PROGRAMS_KEPT:
            del self._of_steps[next(iter(self._of_steps))]
        return program

    def renew(self, update: MeasurementUpdate) -> None:
        """Use new measurements, and plan each training program again when a step needs it next.

        Programs of evaluation stay.
        """
        self.set_measurements(update.costs, update.changes)
        self._update = update
        self.renewals += 1
        training = {key: compiled for key, compiled in self._programs.items() if not key[0].forward_only}
        self._outdated |= training
        for key in training:
            del self._programs[key]

    def clear(self) -> None:
        for memory in (self._programs, self._outdated, self._of_steps):
            memory.clear()
        self._update = None

    def set_measurements(self, costs: Costs | None, changes: MemoryDeltas | None) -> None:
        """Set the measured seconds and bytes for later plans. ``None`` keeps the present ones."""
        self.knowledge = self.knowledge.with_measured(costs, changes)
        self._answers.clear()

    def set_layers(self, layers: tuple[int, ...]) -> None:
        """Set the number of layers of each stage, so that stages are priced by the costs of layers, embedding and head.

        Raises:
            CostsError: the costs belong to a model with another number of layers.
        """
        assert isinstance(self.costs, PartCosts), "other costs are those of stages"
        self.knowledge = replace(self.knowledge, costs=replace(self.costs, cut=layers))
        if len(set(layers)) > 1:  # results for even stages do not hold
            self._answers.clear()

    def set_predicted_bytes(self, memory: MemoryDeltas | None) -> None:
        """Set the predicted change of bytes by F, I and W of every stage; ``None`` if it is unknown."""
        if memory != self.knowledge.predicted_bytes:
            self.knowledge = replace(self.knowledge, predicted_bytes=memory)
            if not self.request.searches:  # searches do not read it
                self._answers.clear()

    def set_vocabulary_barriers(self, barriers: int, num_devices: int) -> None:
        """Set the number of vocabulary barriers (0: no cut) of later schedules, and price the cut head."""
        self.request = self.request.decided(barriers)
        head = head_seconds(self.costs)
        if barriers and head is not None and self.costs.vocabulary is None:
            costs = with_cut_head(self.costs, head, num_devices, barriers)
            self.knowledge = replace(self.knowledge, costs=costs)
            self._answers.clear()

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        """Return the placement for a model with ``chunks`` model chunks per rank.

        ``chunks`` is ``None`` if the number is unknown so far. Raise an UnsupportedError if the schedule has no
        placement on that many devices.
        """
        if self.request.file is not None:
            from megatron_pipemem.schedule.schedule_file import check_devices_of_file

            check_devices_of_file(self.request.file, num_devices)
            placement = self.request.file.placement
        elif self.request.searches:
            placement = self._searched_placement(num_devices, chunks)
        else:
            placement = self._family_placement(num_devices, chunks)
        if self.request.cuts_vocabulary and placement.replicas > 1:
            check_placement(placement)  # before the model is built
        return placement

    def plan(self, shape: Shape, why: str, before: Choice | None = None, minimum_gain: float = 0.0) -> Choice:
        """Choose a schedule for steps of this shape. Every rank of the model calls this at the same time.

        ``why`` is the reason for the log. ``before`` is the choice that ran so far. It stays unless the new schedule
        shortens the makespan by at least the fraction ``minimum_gain``, or ``before`` breaks the cap.

        Raises:
            UnsupportedError: the schedule does not exist for this shape.
        """
        placement = self.placement(shape.num_devices, shape.chunks)
        if shape.forward_only:
            return choose(self.request, shape, replace(self.knowledge, placement=placement))
        knowledge, counts = self._knowledge_of(placement), self.needs_bytes
        answer = self._answers.get((placement, shape.num_microbatches, self.request.barriers))
        choice = self._resolved(self.request, shape, knowledge) if answer is None or counts else answer
        if counts:
            return choice
        choice = replace(choice, why=why)
        # The earlier schedule may break the cap, if it was chosen before the bytes were known.
        if before is None or (
            knowledge.counted_bytes is not None and any(knowledge.excess(self.request, before.schedule, choice.costs))
        ):
            return choice
        if choice.schedule != before.schedule:
            why = f"{why}; no schedule is that much faster"
        earlier = replace(choice, schedule=before.schedule, why=why, notes=before.notes)
        return earlier if choice.timeline.makespan > earlier.timeline.makespan * (1 - minimum_gain) else choice

    def costs_of(self, plan: Choice) -> Costs:
        """Return the costs of a plan; if the run has a memory cap, with the memory in the unit of the cap."""
        if self.request.memory_cap is None:
            return plan.costs
        counted = self.knowledge.counted_costs(plan.schedule.placement, self.request.in_bytes)
        return replace(plan.costs, memory=counted.memory)

    def schedules_by_barriers(self, placement: Placement, chunks: int) -> dict[int, Schedule]:
        """Return the possible schedules by number of vocabulary barriers; 0 is without vocabulary parallelism.

        A number for which there is no schedule is logged and left out.
        """
        microbatches = microbatches_of_the_run() or 4 * placement.num_devices
        shape, knowledge = Shape(placement.num_devices, chunks, microbatches), self._knowledge_of(placement)

        def resolved(request: Request) -> Choice:
            if knowledge.lacks_bytes(request):  # the offload under the cap is not known yet
                return self._resolved(replace(request, memory_cap=None), shape, knowledge)
            choice = self._resolved(request, shape, knowledge)
            self._answers[placement, microbatches, request.barriers] = choice
            return choice

        def refused(barriers: int, error: PipememError) -> None:
            tell(logger, "vocabulary: not with %d barriers: %s", barriers, error)

        schedules_by_barriers = vocabulary_ways(self.request, resolved, refused)
        return {barriers: choice.schedule for barriers, choice in schedules_by_barriers.items()}

    def _family_placement(self, num_devices: int, chunks: int | None) -> Placement:
        options, chosen_family = self.request.options, family(self.name)
        cut = {"chunks": chunks} if "chunks" in chosen_family.options and chunks is not None else {}
        try:
            return chosen_family.placement_on(num_devices, {**cut, **options})
        except UnsupportedError:
            if chunks is not None:  # they may be wrong, and the user knows them by Megatron's names
                placements_of(self.name, options, num_devices, megatron_cut(chunks))
            raise

    def _searched_placement(self, num_devices: int, chunks: int | None) -> Placement:
        earlier = [placement for (devices, _), placement in self._placements.items() if devices == num_devices]
        if chunks is None and earlier:
            return earlier[-1]
        requested = self.request.options.get("chunks")
        if None not in (chunks, requested) and chunks != requested:
            raise UnsupportedError(
                "needs-chunks",
                f"the option chunks={requested} of schedule {AUTO} asks for {requested} model chunks per pipeline rank, "
                f"and the model has {chunks}; leave the option out, or cut the model accordingly "
                "(--num-virtual-stages-per-pipeline-rank)",
            )
        key = (num_devices, chunks or self.request.chunks)
        if key not in self._placements:
            self._placements[key] = self._choose(*key)
        return self._placements[key]

    def _choose(self, num_devices: int, chunks: int) -> Placement:
        """Return the fastest schedule's placement; the first candidate if a cap is in bytes and no bytes are known."""
        from megatron_pipemem.choose.searching import candidate_placements

        shape = Shape(num_devices, chunks, microbatches_of_the_run() or 4 * num_devices)
        knowledge = replace(self._knowledge_of(None), is_measuring=False)
        candidates = candidate_placements(self.request, shape, knowledge)
        if len(candidates) == 1:
            return candidates[0]
        if self.request.in_bytes and knowledge.counted_bytes is None and knowledge.costs.memory is None:
            return candidates[0]  # a V: the same bytes on every device, so the most is made of a cap not yet known
        request = self.request if self.request.chooses_offload else self.request.without_offload()
        choice = self._resolved(request, shape, knowledge)
        placement = choice.schedule.placement
        if request is self.request:
            self._answers[placement, shape.num_microbatches, request.barriers] = choice
        tell(logger, "placement %s for %d pipeline ranks with %d chunks each", placement.name, num_devices, chunks)
        return placement

    def _knowledge_of(self, placement: Placement | None) -> Knowledge:
        """Return the facts by which a schedule is chosen; with offload, these include facts about the host.

        Every rank of the model must call this at the same time.
        """
        knowledge = replace(self.knowledge, placement=placement)
        host = self.host
        if host is None or self.request.offload == OFF:
            return knowledge
        knowledge = replace(knowledge, shared_links=host.shared_links())
        counted = knowledge.counted_bytes is not None or knowledge.costs.memory is not None
        if counted and (self.request.memory_cap is None or self.request.in_bytes):
            knowledge = replace(knowledge, host_budget=_HOST_FILL * host.budget())
        if (
            placement is not None
            and knowledge.priced_by == MEASURED
            and knowledge.counted_bytes is not None
            and self.needs_seconds
        ):
            knowledge = replace(knowledge, host_links=host.links(placement.num_devices))
        return knowledge

    def _resolved(self, request: Request, shape: Shape, knowledge: Knowledge) -> Choice:
        """Choose a schedule: on the model's first rank if it is searched or offload is planned, else on each rank.

        A search ends after a time limit, so its result may differ between ranks.
        """
        if not (request.searches or request.plans_offload):
            return choose(request, shape, knowledge)
        choice = decide_on_first_rank(lambda: choose(request, shape, knowledge).alone, self.deciding_groups)
        if request.searches and not self.needs_bytes:
            choice = replace(choice, schedule=replace(choice.schedule, name=AUTO))
        return choice

    @_garbage_collection_paused()
    def _build(self, key: Key) -> Compiled:
        shape, pipeline = key
        first = self._update is None and all(shape.forward_only for shape, _ in self._programs)
        why = "start" if first else f"step of {shape.num_microbatches} microbatches"
        return self._compiled(self.plan(shape, why), shape, pipeline)

    @_garbage_collection_paused()
    def _build_again(self, key: Key, before: Compiled) -> Compiled:
        """Plan with the new measurements and return the program; if that fails, keep the program ``before``.

        Raises:
            UnsupportedError: with the counted bytes, no schedule keeps the memory cap.
        """
        (shape, pipeline), update = key, self._update
        assert update is not None, "programs are outdated by an update"
        try:
            plan = run_on_all_ranks(
                lambda: self.plan(shape, update.reason, before.plan, update.minimum_gain), self.deciding_groups
            )
            return run_on_all_ranks(lambda: self._compiled(plan, shape, pipeline), self.deciding_groups)
        except Exception as error:  # on all ranks
            is_refusal = isinstance(error, PipememError) and error.code != "other-rank-failed"
            if is_refusal and update.changes is not None:
                raise
            sentence = "could not plan again (%s): %s; the schedule stays"
            tell(logger, sentence, update.reason, error, level=logging.WARNING)
        return before

    def _compiled(self, plan: Choice, shape: Shape, pipeline: dist.ProcessGroup | None) -> Compiled:
        schedule, costs = plan.schedule, plan.costs
        _check_placement(schedule, self.placement(shape.num_devices, shape.chunks))
        groups = [pipeline] if pipeline is not None and pipeline.size() > 1 else []
        # The cut of a trial needs the actions of all devices.
        reads_all = not groups or self.request.overlap_steps
        devices = range(schedule.num_devices) if reads_all else rows_of_rank(schedule.placement, groups[0].rank())
        programs, own = {}, {}
        for single_queue in self.queues:
            programs[single_queue] = program = lower(
                schedule, single_queue=single_queue, costs=costs, on_demand=bool(groups)
            )
            own[single_queue] = {device: _digest_of_row(program.actions[device]) for device in devices}

        def prove() -> dict[bool, list[str]]:
            """Return for the programs that may run the hashes of all actions."""
            proved = {kind: program for kind, program in programs.items() if self._is_proved(program, kind)}
            return {kind: list(map(_digest_of_row, program.actions)) for kind, program in proved.items()}

        proved = decide_on_first_rank(prove, groups)
        # The usual order may need the order for one queue in its place.
        kinds = [kind if kind in proved else True for kind in self.queues]
        rows = ([own[kind].get(device, row) for device, row in enumerate(proved[kind])] for kind in kinds)
        digest = _joined((schedule, of_program) for of_program in rows)
        program, *others = (programs[kind] for kind in kinds)
        return Compiled(program, None if shape.forward_only else plan, others[0] if others else None, digest)

    def _proved(self, schedule: Schedule, costs: Costs, single_queue: bool) -> Program:
        """Return a schedule's program with its proof."""
        program = lower(schedule, single_queue=single_queue, costs=costs)
        return program if self._is_proved(program, single_queue) else self._proved(schedule, costs, single_queue=True)

    def _is_proved(self, program: Program, single_queue: bool) -> bool:
        """Prove a program. Return ``False`` if the order for one hardware queue must take its place.

        If both kinds of orders are needed and all launches share a queue, the usual order is proved for that, too.
        """
        shares_queue = not single_queue and len(self.queues) > 1 and starts_in_order(os.environ)
        try:
            validate_program(program, single_queue=single_queue, ordered_starts=shares_queue)
        except ScheduleError:
            if not shares_queue:
                raise
            return False
        return True


def _check_placement(schedule: Schedule, placement: Placement) -> None:
    """Raise an UnsupportedError if a family places the stages of this step on other devices than the model has them."""
    if schedule.placement.devices != placement.devices:
        raise UnsupportedError(
            "family-declaration",
            f"schedule {schedule.name} of {schedule.num_microbatches} microbatches has {schedule.placement}, but the model was "
            f"built for {placement}; let the family return one placement for every number of microbatches",
        )


def microbatches_of_the_run() -> int | None:
    """Return the number of microbatches per step from Megatron's calculator; ``None`` if no loop has set it up."""
    try:
        return num_microbatches_calculator.get_num_microbatches()
    except AttributeError:
        return None
