"""Schedules of another source, with vocabulary passes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.mcore.agreement import tell
from megatron_pipemem.mcore.sources import MemoryDeltas, Plan, Shape, Source, microbatches_of_the_run
from megatron_pipemem.mcore.vocabulary.build import cut_vocabulary, layout_of
from megatron_pipemem.mcore.vocabulary.choice import choose_barriers
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.placement import Placement
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.core.validator import validate
from megatron_pipemem.schedule.features.vocabulary.needs import BARRIERS, BARRIERS_OF_ALGORITHM, check_placement
from megatron_pipemem.schedule.features.vocabulary.passes import with_vocabulary
from megatron_pipemem.schedule.options import AUTO, OFF, VOCABULARY

logger = logging.getLogger(__name__)


def check_vocab_parallel(vocab_parallel: str, piece_tokens: int | None = None) -> None:
    """Raises:
    UnsupportedError: no such algorithm, or pieces of no tokens or of an uncut head.
    """
    if str(vocab_parallel) not in VOCABULARY:
        raise UnsupportedError(f"--pipemem-vocab-parallel {vocab_parallel!r} is none of {', '.join(VOCABULARY)}")
    if piece_tokens is None:
        return
    if piece_tokens < 1:
        raise UnsupportedError(f"--pipemem-vocab-piece-tokens {piece_tokens}: give at least 1")
    if vocab_parallel == OFF:
        raise UnsupportedError(
            "--pipemem-vocab-piece-tokens is about a head cut over the pipeline; pass --pipemem-vocab-parallel 1, 2 or auto, "
            "or leave it out"
        )


class VocabularySource(Source):
    """Adds the passes of vocabulary parallelism to whatever another source plans.

    Args:
        inner: plans without them, or with as many barriers as it is told.
        vocab_parallel: the paper's algorithm, ``1`` or ``2``, or ``auto``: decided for the model when that has been built.
        memory_cap: in activation units, for schedules with passes that ``inner`` does not know; ``None`` for no limit.
        piece_tokens: see ``HeadOptions``.
    """

    def __init__(
        self,
        inner: Source,
        vocab_parallel: str,
        memory_cap: float | Sequence[float] | None = None,
        piece_tokens: int | None = None,
    ):
        super().__init__(inner.name, inner.costs, inner.priced_by)
        self._inner = inner
        self.may_split = inner.may_split
        self.may_recompute = inner.may_recompute
        self.is_round_robin = inner.is_round_robin
        self.chunks = inner.chunks
        # What the inner source has planned for every shape, for it to compare with.
        self._without: dict[Shape, Plan] = {}
        self._memory_cap = memory_cap
        self._piece_tokens = piece_tokens
        barriers = inner.barriers if vocab_parallel == AUTO else BARRIERS_OF_ALGORITHM[int(vocab_parallel)]
        self._undecided = barriers == 0
        self._decide(barriers)

    @property
    def needs_bytes(self) -> bool:
        return self._inner.needs_bytes

    def placement(self, num_devices: int, chunks: int | None) -> Placement:
        placement = self._inner.placement(num_devices, chunks)
        if placement.replicas > 1:
            check_placement(placement)  # before the model is built
        return placement

    def cut(self, chunks: list[torch.nn.Module], placement: Placement, pg_collection) -> None:
        """Cut the vocabulary of a rank's chunks, if that is what is wanted. Every rank calls this when it has built them."""
        if placement.num_devices == 1:
            return
        if self._undecided:
            self._undecided = False
            model = get_attr_wrapped_model(chunks[0], "pre_process", return_model_obj=True)
            layout = layout_of(chunks, placement, pg_collection.pp)
            self._decide(choose_barriers(model, layout, self.costs, self._allowed(placement, len(chunks))))
        if self.barriers:
            cut_vocabulary(chunks, placement, pg_collection, self.barriers, self._piece_tokens)

    def plan(self, shape: Shape, reason: str, before: Plan | None = None, minimum_gain: float = 0.0) -> Plan:
        inner_before = None if before is None else self._without[shape]
        self._without[shape] = plan = self._inner.plan(shape, reason, inner_before, minimum_gain)
        return replace(plan, schedule=self._with_passes(plan.schedule, plan.costs))

    def forwards(self, shape: Shape) -> Schedule:
        return self._with_passes(self._inner.forwards(shape), self.costs)

    def measured(self, costs: Costs | None, changes: MemoryDeltas | None) -> None:
        self._inner.measured(costs, changes)
        self.costs, self.priced_by = self._inner.costs, self._inner.priced_by

    def _allowed(self, placement: Placement, chunks: int) -> dict[int, Schedule]:
        """What this run would do without passes and with those of either algorithm, where that is possible."""
        shape = Shape(placement.num_devices, chunks, microbatches_of_the_run() or 4 * placement.num_devices)
        allowed = {}
        for barriers in (0, *BARRIERS):
            self._decide(barriers)
            try:
                allowed[barriers] = self._with_passes(self._inner.likely(shape), self.costs)
            except (ScheduleError, UnsupportedError) as error:
                if not barriers:
                    raise
                tell(logger, "vocabulary: not with %d barriers: %s", barriers, error)
        return allowed

    def _decide(self, barriers: int) -> None:
        self.barriers = self._inner.barriers = barriers

    def _with_passes(self, schedule: Schedule, costs: Costs) -> Schedule:
        if not self.barriers or schedule.vocabulary_barriers == self.barriers:
            return schedule
        added = with_vocabulary(schedule, self.barriers, costs)
        if self._memory_cap is not None:
            validate(added, memory_cap=self._memory_cap)
        return added
