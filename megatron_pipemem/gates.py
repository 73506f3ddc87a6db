"""What goes with what: ``gates`` asks every table of conflicts and refusals about one run.

A start asks about its flags, and the tools about the flags of each way to run. A training rank asks again about
Megatron's configuration when a model is built and when it takes its first step, because programs other than Megatron's
training loop have no flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_pipemem import refusals
from megatron_pipemem.conflicts import conflicts, is_updated_per_microbatch
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.refusals import Refusals, Rule, of_several
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.options import LAYERWISE
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import megatrons_own
from megatron_pipemem.schedule.schedule import Schedule


@dataclass(frozen=True)
class Wish:
    """A request for a schedule, with the settings of Megatron under which it is to run."""

    request: Request
    value_of: Callable[[str], Any]
    """Returns the value of an attribute of Megatron's configuration, or ``None`` if the attribute is not known here."""
    schedule: Schedule | None = None
    """``None`` before the schedule is chosen. The request then tells what the schedule may have."""
    placement: Placement | None = None
    """The model's placement, if it is known before the schedule."""
    on_cpu: bool = False

    @cached_property
    def chosen(self) -> Request:
        """The request for the schedule itself."""
        return self.request if self.schedule is None else replace(self.request, file=self.schedule)

    @property
    def is_ours(self) -> bool:
        return not self.request.is_stock

    @property
    def has_graphs(self) -> bool:
        return self.request.graphs or self.value_of("cuda_graph_impl") not in (None, "none")

    @property
    def is_uncaptured(self) -> bool:
        """Whether Megatron is asked for graphs that only this package can capture, and the request does not know."""
        return not self.request.graphs and self.chosen.captures_passes(self.value_of("cuda_graph_impl"))

    @property
    def may_be_captured(self) -> bool:
        return self.chosen.may_be_captured and not self.request.is_asynchronous

    @property
    def slices(self) -> int:
        """The slices of a microbatch; 1 as long as a search may choose their number."""
        return 1 if self.chosen.searches else self.chosen.slices

    @property
    def reorders(self) -> bool:
        """Whether forwards run in another order than Megatron's own; false as long as the placement is not known."""
        placement = self.placement if self.chosen.file is None else self.chosen.file.placement
        chunks = 1 if placement is None else placement.num_chunks
        return self.request.microbatch_costs is not None or (
            chunks > 1 and self.request.schedule != megatrons_own(chunks)
        )

    @property
    def may_roll_back(self) -> bool:
        """Whether a step may run again, because it was begun before the gradients' norm was known."""
        delays = self.request.is_asynchronous
        return self.request.overlap_steps and not delays and (self.value_of("clip_grad") or 0) > 0

    @property
    def shares_sequences(self) -> bool:
        return (self.value_of("context_parallel_size") or 1) > 1

    @property
    def uses_transformer_engine(self) -> bool:
        return self.value_of("transformer_impl") == "transformer_engine"


_GATES: tuple[tuple[Callable[[Wish], object], Refusals | Rule], ...] = (
    (lambda wish: wish.is_ours, refusals.SCHEDULES),
    (lambda wish: wish.is_ours and wish.is_uncaptured, refusals.UNCAPTURED),
    (lambda wish: wish.request.graphs, refusals.GRAPHED),
    (lambda wish: wish.is_ours and not wish.may_be_captured, refusals.WHOLE_STEP),
    (lambda wish: wish.is_ours and wish.has_graphs, refusals.CAPTURED),
    (lambda wish: wish.is_ours and not wish.request.pairs, refusals.UNPAIRED),
    (lambda wish: wish.request.pairs, refusals.PAIRS),
    (lambda wish: wish.request.pairs, refusals.DELAYED_PAIRS),
    (lambda wish: wish.is_ours, refusals.PACKED),
    (lambda wish: wish.is_ours, refusals.BIASED_MLPS),
    (lambda wish: wish.is_ours, refusals.SHARED_DOCUMENTS),
    (lambda wish: wish.request.overlap_steps, refusals.OVERLAPPED),
    (lambda wish: wish.request.overlap_steps and wish.request.is_asynchronous, refusals.DELAYED),
    (lambda wish: wish.may_roll_back, refusals.ROLLED_BACK),
    (lambda wish: wish.may_roll_back, refusals.DELAYED_SCALES),
    (lambda wish: wish.reorders, refusals.REORDERED),
    (lambda wish: wish.request.is_asynchronous, refusals.ASYNCHRONOUS),
    (lambda wish: is_updated_per_microbatch(wish.request), refusals.PER_MICROBATCH),
    (lambda wish: wish.chosen.replicas > 1, refusals.REPLICAS),
    (lambda wish: wish.request.barriers, refusals.VOCABULARY),
    (lambda wish: wish.slices > 1, refusals.SLICED),
    (lambda wish: wish.slices > 1, refusals.FUSED_ROTARY),
    (lambda wish: wish.slices > 1 and wish.shares_sequences, refusals.SHARED_SLICES),
    (lambda wish: wish.slices > 1, refusals.AVERAGED_PARTS),
    (lambda wish: wish.slices > 1 and wish.request.barriers, refusals.VOCABULARY_SLICED),
    (lambda wish: wish.request.rng == LAYERWISE, refusals.LAYERWISE),
    (lambda wish: wish.slices > 1 and wish.request.rng == LAYERWISE, refusals.LAYERWISE_SLICED),
    (lambda wish: wish.uses_transformer_engine and wish.chosen.may_recompute, refusals.DELAYED_SCALING),
    (lambda wish: wish.uses_transformer_engine and wish.chosen.may_split, refusals.SPLIT_BACKWARD),
    (lambda wish: wish.on_cpu, refusals.CPU),
)
"""The tables that are asked, each with the wishes that it is for. The first refusal is the one that a user sees."""


def gates(wish: Wish) -> Iterator[UnsupportedError]:
    """Yield the errors that say why the wish cannot be granted: features that exclude each other, then settings."""
    yield from conflicts(wish.request)
    for is_for, table in _GATES:
        if is_for(wish):
            yield from table.errors(wish.value_of)


def check_gates(wish: Wish) -> None:
    """Raise the first error of ``gates``, if there is one."""
    for error in gates(wish):
        raise error


class StepGates:
    """The gates of a run's steps: to ask them takes longer than a step may wait, and to compare the values does not."""

    def __init__(self) -> None:
        self._wish: tuple[object, ...] = ()
        self._values: list[tuple[int, list[tuple[str, Any]]]] = []
        """Of each configuration, the number of its attributes, and those that the gates have read."""

    def check(
        self,
        request: Request,
        configurations: Sequence[object],
        schedule: Schedule | None = None,
        placement: Placement | None = None,
    ) -> bool:
        """Ask the gates unless none of the values that they read has changed, and return whether they were asked.

        ``configurations`` are objects of Megatron (``of_several``). Raise an UnsupportedError as ``check_gates`` does.
        """
        if self._are_passed((request, schedule, placement), configurations):
            return False
        value_of, names = of_several(*configurations), set()

        def read(attribute: str) -> Any:
            names.add(attribute)
            return value_of(attribute)

        check_gates(Wish(request, read, schedule, placement))
        self._wish = request, schedule, placement
        self._values = [
            (
                len(vars(configuration)),
                [(name, deepcopy(getattr(configuration, name))) for name in names & {*dir(configuration)}],
            )
            for configuration in configurations
        ]
        return True

    def _are_passed(self, wish: tuple[object, ...], configurations: Sequence[object]) -> bool:
        if [*map(id, wish)] != [*map(id, self._wish)] or len(configurations) != len(self._values):
            return False
        for configuration, (number, values) in zip(configurations, self._values, strict=True):
            if len(vars(configuration)) != number:
                return False
            for name, value in values:
                if getattr(configuration, name, None) != value:
                    return False
        return True
