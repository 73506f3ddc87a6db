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
class GateQuestion:
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
    def schedule_request(self) -> Request:
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
        """Whether ``cuda_graph_impl`` asks for graphs of passes, which this package captures, but ``graphs`` is off."""
        return not self.request.graphs and self.schedule_request.captures_passes(self.value_of("cuda_graph_impl"))

    @property
    def leaves_experts_out(self) -> bool:
        """Whether passes are captured up to the experts of a layer, and after them."""
        return self.request.graphs and bool(self.value_of("num_moe_experts"))

    @property
    def may_be_captured(self) -> bool:
        return self.schedule_request.may_be_captured and not self.request.is_asynchronous

    @property
    def is_cut(self) -> bool:
        """Whether microbatches are cut into slices; false as long as a search may decide that."""
        return self.schedule_request.may_cut and not self.schedule_request.searches

    @property
    def reorders_forwards(self) -> bool:
        """Whether forwards run in another order than Megatron's own; false as long as the placement is not known."""
        placement = self.placement if self.schedule_request.file is None else self.schedule_request.file.placement
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


_GATES: tuple[tuple[Callable[[GateQuestion], object], Refusals | Rule], ...] = (
    (lambda question: question.is_ours, refusals.SCHEDULES),
    (lambda question: question.is_ours and not question.request.may_split, refusals.WHOLE_BACKWARD),
    (lambda question: question.is_ours and question.is_uncaptured, refusals.UNCAPTURED),
    (lambda question: question.request.graphs, refusals.GRAPHED),
    (
        lambda question: (
            question.request.graphs and question.value_of("experimental_attention_variant") == refusals.DELTA_NET
        ),
        refusals.GRAPHED_DELTA_NETS,
    ),
    (
        lambda question: question.request.graphs and question.value_of("recompute_granularity") == "selective",
        refusals.GRAPHED_MODULES,
    ),
    (
        lambda question: question.request.graphs and question.value_of("recompute_granularity"),
        refusals.GRAPHED_RECOMPUTATION,
    ),
    (lambda question: question.request.graphs and question.value_of("fp8"), refusals.GRAPHED_FP8),
    (lambda question: question.request.graphs and question.value_of("fp4"), refusals.GRAPHED_FP4),
    (lambda question: question.leaves_experts_out, refusals.EXPERT_MODULES),
    (lambda question: question.leaves_experts_out, refusals.GRAPHED_EXPERTS),
    (lambda question: question.is_ours and not question.may_be_captured, refusals.WHOLE_STEP),
    (lambda question: question.is_ours and question.has_graphs, refusals.CAPTURED),
    (lambda question: question.is_ours and not question.request.pairs, refusals.UNPAIRED),
    (lambda question: question.request.pairs, refusals.PAIRS),
    (lambda question: question.request.pairs, refusals.PAIRED_USER_BUFFERS),
    (lambda question: question.request.pairs, refusals.DELAYED_PAIRS),
    (lambda question: question.is_ours, refusals.PACKED),
    (lambda question: question.is_ours, refusals.BIASED_MLPS),
    (lambda question: question.is_ours and question.schedule_request.may_split, refusals.REPEATED_AGAIN),
    (lambda question: question.is_ours, refusals.SHARED_DOCUMENTS),
    (lambda question: question.request.overlap_steps, refusals.OVERLAPPED),
    (lambda question: question.request.overlap_steps and question.request.is_asynchronous, refusals.DELAYED),
    (lambda question: question.may_roll_back, refusals.ROLLED_BACK),
    (lambda question: question.may_roll_back, refusals.DELAYED_SCALES),
    (lambda question: question.reorders_forwards, refusals.REORDERED),
    (lambda question: question.request.is_asynchronous, refusals.ASYNCHRONOUS),
    (lambda question: is_updated_per_microbatch(question.request), refusals.PER_MICROBATCH),
    (lambda question: question.schedule_request.replicas > 1, refusals.REPLICAS),
    (lambda question: question.request.barriers, refusals.VOCABULARY),
    (lambda question: question.is_cut, refusals.SLICED),
    (lambda question: question.is_cut, refusals.SLICED_USER_BUFFERS),
    (lambda question: question.is_cut, refusals.FUSED_ROTARY),
    (lambda question: question.is_cut and question.shares_sequences, refusals.SHARED_SLICES),
    (lambda question: question.is_cut, refusals.AVERAGED_PARTS),
    (lambda question: question.is_cut and question.request.barriers, refusals.VOCABULARY_SLICED),
    (lambda question: question.request.rng == LAYERWISE, refusals.LAYERWISE),
    (lambda question: question.is_cut and question.request.rng == LAYERWISE, refusals.LAYERWISE_SLICED),
    (
        lambda question: question.uses_transformer_engine and question.schedule_request.may_recompute,
        refusals.DELAYED_SCALING,
    ),
    (
        lambda question: question.uses_transformer_engine and question.schedule_request.may_split,
        refusals.SPLIT_BACKWARD,
    ),
    (
        lambda question: question.uses_transformer_engine and question.schedule_request.may_split,
        refusals.QUANTISED_USER_BUFFERS,
    ),
    (lambda question: question.on_cpu, refusals.CPU),
)
"""The tables that are asked, each with the runs that it is for. The first refusal is the one that a user sees."""


def gates(question: GateQuestion) -> Iterator[UnsupportedError]:
    """Yield the errors that say why a run cannot start as asked: features that exclude each other, then settings."""
    yield from conflicts(question.request)
    for is_for, table in _GATES:
        if is_for(question):
            yield from table.errors(question.value_of)


def check_gates(question: GateQuestion) -> None:
    """Raise the first error of ``gates``, if there is one."""
    for error in gates(question):
        raise error


class StepGates:
    """The gates of a run's steps: to ask them takes longer than a step may wait, and to compare the values does not."""

    def __init__(self) -> None:
        self._gate_question: tuple[object, ...] = ()
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

        check_gates(GateQuestion(request, read, schedule, placement))
        self._gate_question = request, schedule, placement
        self._values = [
            (
                len(vars(configuration)),
                [(name, deepcopy(getattr(configuration, name))) for name in names & {*dir(configuration)}],
            )
            for configuration in configurations
        ]
        return True

    def _are_passed(self, question: tuple[object, ...], configurations: Sequence[object]) -> bool:
        if [*map(id, question)] != [*map(id, self._gate_question)] or len(configurations) != len(self._values):
            return False
        for configuration, (number, values) in zip(configurations, self._values, strict=True):
            if len(vars(configuration)) != number:
                return False
            for name, value in values:
                if getattr(configuration, name, None) != value:
                    return False
        return True
