"""Plan every training step for the costs of its own microbatches: the order of the microbatches and the schedule.

A microbatch's *weight* is its cost relative to that of a full microbatch. If the costs are measured, its time is
relative to that of the median microbatch.

A step is planned when it begins, and not during the previous step. Planning earlier would read the next batch early.
But only the training loop knows whether there is a next batch, its number of microbatches and its iterator. And a
checkpoint must say how far the data have been read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from megatron.core.utils import unwrap_model

from megatron_pipemem.choose.knowledge import MEASURED
from megatron_pipemem.errors import CostsError, PipememError, UnsupportedError
from megatron_pipemem.logs import tell
from megatron_pipemem.mcore.agreement import (
    agree,
    agreed_numbers,
    decide_on_first_rank,
    groups_of_copy,
    largest_numbers,
)
from megatron_pipemem.mcore.loop_arguments import argument
from megatron_pipemem.mcore.model.language_model import model_of_chunk
from megatron_pipemem.mcore.programs import Compiled, ProgramStore
from megatron_pipemem.mcore.step.batches import Dealer
from megatron_pipemem.mcore.step.extension import Extension, FullMicrobatch, Step
from megatron_pipemem.model.counts import attention_share
from megatron_pipemem.request import MicrobatchCosts, Request
from megatron_pipemem.schedule.action import COMPLETING, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.costs_file import FileFactors, FunctionName, read_microbatch_costs
from megatron_pipemem.schedule.options import FLOPS, TOKENS
from megatron_pipemem.schedule.prices import WEIGHED, MicrobatchFactors
from megatron_pipemem.schedule.registry import import_target
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.search.step_plan import StepPlan, plan_step

logger = logging.getLogger(__name__)

SHARE = 0.01
"""The longest time to plan a step, as a share of the previous step's seconds."""
LEAST_SECONDS, MOST_SECONDS = 0.02, 0.2
"""The limits of the time to plan a step, however long the previous step took."""

_KINDS = tuple(sorted(WEIGHED))
_NONE = -1.0
"""The number that stands for a missing weight in the list that ranks exchange."""


class UnequalMicrobatches(Extension):
    """The extension that plans each training step for the factors of its microbatches, and reorders its batches.

    The data iterator and the training loop number microbatches in the order of reading. A schedule numbers them by
    their position in the step.
    """

    only_trains = True

    def __init__(self, programs: ProgramStore, weigh: Weigher):
        self._programs = programs
        self._weigh = weigh
        self._steps = 0
        self._dealers: list[tuple[Iterator, Dealer]] = []
        """Iterators with the batches that have been read for this step, or for a step that was refused."""
        self._began = self._seconds = 0.0
        self._has_warned = False

    def choose(self, step: Step) -> Compiled:
        """Return the program for the weights of this step's microbatches.

        It is the program for equal microbatches in three cases: all weights are equal (and at most 1, if there is a
        memory cap), planning for the weights fails, or the step counts the bytes of microbatches.

        Raises:
            PipememError: batches cannot be weighed, ranks disagree on weights, or no schedule keeps the memory cap. All
                ranks of this copy of the model raise an error, before any action has run.
        """
        self._began = time.perf_counter()
        pipeline = step.pipeline.group
        base = step.program_store.get(step.shape, partial(agree, group=pipeline), pipeline)
        if self._programs.needs_bytes:  # this step counts them, one microbatch after another
            return base
        groups, m = groups_of_copy(step.groups, pipeline), step.shape.num_microbatches
        numbers = agreed_numbers("factors of microbatches", lambda: self._own(step), m * (2 + len(_KINDS)), groups)
        others = getattr(step.groups, "dp", None)
        has_peers = others is not None and others.size() > 1
        if others is not None and has_peers and (step.context.config.expert_model_parallel_size or 1) > 1:
            # Experts are exchanged between pipelines, so all of these do the same at the same time.
            numbers, groups = largest_numbers(numbers, others), [others, *groups]
        weights = _unpacked(numbers, m)
        exceeds_prices = self._programs.request.memory_cap is not None and max(weights.tokens) > 1  # and maybe the cap
        if _are_alike(weights) and not exceeds_prices:
            return base
        plan = base.plan
        assert plan is not None, "training is planned"
        costs = replace(self._programs.costs_of(plan), microbatch=weights)
        of_step = decide_on_first_rank(lambda: self._planned(plan.schedule, costs, weights, has_peers), groups)
        try:
            if isinstance(of_step, Exception):
                raise of_step
            program = step.program_store.step_program(of_step.schedule, base, costs, step.single_queue)
        except Exception as error:  # alike on every rank: a step that runs in arrival order must not end for it
            self._warn(error)
            return base
        step.context.order = of_step.order
        by_position = replace(costs, microbatch=weights.reordered(of_step.order))
        step.own_plan = replace(
            plan,
            schedule=of_step.schedule,
            costs=by_position,
            bound=of_step.bound,
            arrival_makespan=of_step.arrival_makespan,
        )
        return Compiled(program, plan)

    def prepare(self, step: Step) -> None:
        """Replace the data iterators by iterators that return the batches in the order of the schedule."""
        m, placement = step.shape.num_microbatches, step.pipeline.placement
        order = step.context.order or range(m)
        dealt = []
        for chunk, iterator in enumerate(step.iterators):
            stage = step.pipeline.stages[chunk]
            by_position = [
                action.microbatch
                for action in step.program.schedule.orders[step.pipeline.device]
                if action.kind is Kind.F and action.stage == stage
            ]
            # Two replicas share one stream, which ``ReplicaSteps`` deals to them.
            positions = by_position if placement.replicas == 1 else range(m)
            dealt.append(
                None if iterator is None else self._dealer(iterator, m).iterator_over([order[i] for i in positions])
            )
        step.iterators = dealt
        self._dealers.clear()

    def after(self, step: Step) -> None:
        self._steps += 1
        self._seconds = time.perf_counter() - self._began

    def close(self, orderly: bool) -> None:
        self._dealers.clear()

    def _dealer(self, iterator: Iterator, num_microbatches: int) -> Dealer:
        """Return the dealer that has read batches from this iterator, or make one."""
        for stream, dealer in self._dealers:
            if stream is iterator:
                return dealer
        self._dealers.append((iterator, Dealer(iterator, num_microbatches)))
        return self._dealers[-1][1]

    def _own(self, step: Step) -> list[float] | None:
        """Return the weights of this step's microbatches in the order of reading (``_packed``), if this rank reads
        data.
        """
        placement, m = step.pipeline.placement, step.shape.num_microbatches
        for iterator in step.iterators:
            if iterator is not None and not hasattr(iterator, "__next__"):
                raise UnsupportedError(
                    "data-iterator",
                    f"the data iterator is a {type(iterator).__name__} without __next__, so its microbatches cannot be "
                    "reordered; give the forward-backward function an iterator, or drop --pipemem-microbatch-costs",
                )
        for iterator, stage in zip(step.iterators, step.pipeline.stages, strict=False):
            if iterator is None or not (stage == 0 or placement.next_stage(stage) is None):
                continue
            running = argument("curr_iteration")
            iteration = self._steps if running is None else running
            batches = self._dealer(iterator, m).all_batches()
            weights = self._weigh(batches, step.full_microbatch, unwrap_model(step.chunks[0]), iteration)
            if self._programs.knowledge.priced_by == MEASURED:
                weights = _relative_to_median(weights)
            return _packed(weights)
        return None

    def _planned(
        self, base: Schedule, costs: Costs, weights: MicrobatchFactors, has_peers: bool
    ) -> StepPlan | Exception:
        """Return the plan of a step for these weights, or the error that prevents planning; with a cap, raise ours.

        ``has_peers`` says that other pipelines sum their gradients with this one. Their plans may differ, but the
        stages of a device must end in the same order in all. If they would not, the result has ``base``, in the planned
        order of microbatches or in that of arrival.
        """
        cap = self._programs.request.memory_cap
        try:
            plan = plan_step(base, costs, cap, min(max(SHARE * self._seconds, LEAST_SECONDS), MOST_SECONDS))
            if not has_peers or _ends_of_stages(plan.schedule) == _ends_of_stages(base):
                return plan
            # Sums over pipelines meet in the order in which the stages of a device end, so that is to be the same in all.
            makespan = simulate(base, replace(costs, microbatch=weights.reordered(plan.order))).makespan
            if makespan < plan.arrival_makespan:
                return replace(plan, schedule=base, makespan=makespan)
            in_arrival = tuple(range(base.num_microbatches))
            return replace(plan, order=in_arrival, schedule=base, makespan=plan.arrival_makespan)
        except Exception as error:
            if cap is not None and isinstance(error, PipememError):
                raise
            return error

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            why = f"{error}" if isinstance(error, PipememError) else f"{type(error).__name__}: {error}"
            tell(
                logger,
                "could not plan for unequal microbatches (%s); they run in arrival order",
                why,
                level=logging.WARNING,
            )


def extensions(request: Request, programs: ProgramStore, _: object) -> list[Extension]:
    """Return the extension of a run with ``--pipemem-microbatch-costs``."""
    assert request.microbatch_costs is not None, "the request wants the feature"
    return [UnequalMicrobatches(programs, weigher_of(request.microbatch_costs))]


def _ends_of_stages(schedule: Schedule) -> list[list[int]]:
    """Return, for each device, its stages sorted by their last weight gradient, the latest stage first."""
    return [
        list(dict.fromkeys(action.stage for action in reversed(order) if action.kind in COMPLETING))
        for order in schedule.orders
    ]


def _packed(weights: MicrobatchFactors) -> list[float]:
    """Return all weights as one list of fixed length: rows of times, of memories, and of each kind, or -1 without
    weights.
    """
    absent = (_NONE,) * len(weights)
    rows = (weights.time, weights.memory or absent, *(weights.kinds.get(kind, absent) for kind in _KINDS))
    return [weight for row in rows for weight in row]


def _unpacked(numbers: Sequence[float], num_microbatches: int) -> MicrobatchFactors:
    rows = [tuple(numbers[start : start + num_microbatches]) for start in range(0, len(numbers), num_microbatches)]
    time_, memory, *kinds = rows
    return MicrobatchFactors(
        time_,
        memory if _is_known(memory) else None,
        {kind: row for kind, row in zip(_KINDS, kinds, strict=True) if _is_known(row)},
    )


def _is_known(row: tuple[float, ...]) -> bool:
    return row[0] != _NONE


def _are_alike(weights: MicrobatchFactors) -> bool:
    return all(len(set(row)) == 1 for row in (weights.time, weights.tokens, *weights.kinds.values()))


def _relative_to_median(weights: MicrobatchFactors) -> MicrobatchFactors:
    """Return the weights with all times divided by their median, because measured costs are the median microbatch's."""
    middle = median(weights.time)
    if middle == 0:
        return weights

    def moved(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(weight / middle for weight in row)

    return replace(weights, time=moved(weights.time), kinds={kind: moved(row) for kind, row in weights.kinds.items()})


class Weigher(Protocol):
    """A function that returns the factors of a step's microbatches.

    ``batches`` are the items of the data iterator. Weights are relative to a ``full`` microbatch. ``model`` is a chunk of
    the model. ``iteration`` is the number of the training step, from 0. It raises a PipememError if it cannot weigh a batch.
    """

    def __call__(
        self, batches: Sequence[object], full: FullMicrobatch, model: object, iteration: int
    ) -> MicrobatchFactors: ...


def weigher_of(value: MicrobatchCosts) -> Weigher:
    """Return the function that weighs microbatches by tokens, by FLOPs, by a file or by a user's function."""
    if callable(value):
        return partial(_by_function, f"the function of microbatch_costs, {getattr(value, '__name__', value)},", value)
    source = read_microbatch_costs(value)
    if isinstance(source, FileFactors):
        return lambda batches, full, model, iteration: source.of_step(iteration, len(batches))
    if isinstance(source, FunctionName):
        return partial(_by_function, f"--pipemem-microbatch-costs {value}", _function(source))
    return {TOKENS: _by_tokens, FLOPS: _by_flops}[source]


@dataclass(frozen=True)
class _Contents:
    """The numbers of tokens of a microbatch on which the times of its layers depend."""

    tokens: float  # number of tokens, without the padding that an attention mask marks
    squares: float  # sum of the squared lengths of its documents; attention is within a document

    @classmethod
    def of(cls, batch: object, number: int) -> _Contents:
        """Count the tokens of a batch that has the form of Megatron's data sets or of frameworks based on Megatron.

        The batch has ``tokens`` or ``input_ids``, ``[b, s]`` or ``[s]``. A padding mask ``attention_mask`` of the same
        shape gives the length of each sequence, which is then one document. Otherwise the ends of its documents follow
        from ``cu_seqlens``, ``packed_seq_params``, or ``position_ids`` that start again. ``number`` is the microbatch's, for
        messages.
        """
        fields = batch if isinstance(batch, Mapping) else {}
        tokens = next((fields[name] for name in ("tokens", "input_ids") if fields.get(name) is not None), None)
        if not isinstance(tokens, torch.Tensor) or tokens.dim() not in (1, 2):
            raise UnsupportedError(
                "cannot-weigh",
                f"the data iterator yields a {type(batch).__name__} without 'tokens' or 'input_ids' of shape [b, s] for "
                f"microbatch {number}, so its cost is unknown; pass --pipemem-microbatch-costs module:function, with a "
                "function that takes the item and returns its weight",
            )
        mask = fields.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
            lengths = mask.reshape(-1, mask.shape[-1]).sum(-1).double()
            return cls(lengths.sum().item(), lengths.square().sum().item())
        lengths = _documents(fields, tokens).double()
        return cls(tokens.numel(), lengths.square().sum().item())


def _documents(fields: Mapping[str, object], tokens: torch.Tensor) -> torch.Tensor:
    """Return the length of each document of a batch, in tokens. Some may be 0. By default a sequence is one document."""
    packed = fields.get("packed_seq_params")
    bounds = (
        *(fields.get(name) for name in ("cu_seqlens_padded", "cu_seqlens")),
        *(getattr(packed, name, None) for name in ("cu_seqlens_q_padded", "cu_seqlens_q")),
    )
    bound = next((tensor for tensor in bounds if isinstance(tensor, torch.Tensor)), None)
    if bound is not None:
        return bound.diff(dim=-1).clamp(min=0)  # entries after the last document repeat its end
    rows = tokens.reshape(-1, tokens.shape[-1])
    positions = fields.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.shape != tokens.shape:
        return torch.full((rows.shape[0],), rows.shape[1])
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[:, 1:] = positions.reshape(rows.shape).diff(dim=-1) <= 0
    places = starts.flatten().nonzero().flatten()
    return torch.cat([places, places.new_tensor([tokens.numel()])]).diff()


def _by_tokens(batches: Sequence[object], full: FullMicrobatch, model: object, iteration: int) -> MicrobatchFactors:
    tokens = [_Contents.of(batch, number).tokens for number, batch in enumerate(batches)]
    return _relative(tokens, full)


def _relative(tokens: Sequence[float], full: FullMicrobatch, **more) -> MicrobatchFactors:
    """Return weights in proportion to the tokens of each microbatch, for memory and time. ``more`` replaces fields."""
    weights = tuple(count / (full.sequences * full.length) for count in tokens)
    return MicrobatchFactors(**{"time": weights, "memory": weights, **more})


def _by_flops(batches: Sequence[object], full: FullMicrobatch, model: object, iteration: int) -> MicrobatchFactors:
    """Return weights by FLOPs: linear layers in proportion to tokens, attention (not in W) to squared document lengths."""
    contents = [_Contents.of(batch, number) for number, batch in enumerate(batches)]
    attention = attention_share(replace(model_of_chunk(model, full.length), mtp_layers=0, mtp_pattern=None))
    linear = 1 - attention
    shares = [
        (microbatch.tokens / (full.sequences * full.length), microbatch.squares / (full.sequences * full.length**2))
        for microbatch in contents
    ]

    def weights(linears: int, attentions: int) -> tuple[float, ...]:
        parts = linears * linear, attentions * attention
        return tuple((parts[0] * t + parts[1] * q) / sum(parts) for t, q in shares)

    # In units of a forward's: F 1 and 1, I 1 and 2, W 1 and 0.
    kinds = {Kind.F: weights(1, 1), Kind.I: weights(1, 2), Kind.W: weights(1, 0)}
    return _relative([microbatch.tokens for microbatch in contents], full, time=weights(3, 3), kinds=kinds)


def _by_function(
    name: str,
    function: Callable[[object], object],
    batches: Sequence[object],
    full: FullMicrobatch,
    model: object,
    iteration: int,
) -> MicrobatchFactors:
    """Call a user's function (``name`` in messages) with each batch, and return its results as weights.

    A result is a time, or a pair of a time and a memory, which is 1 by default. All functions that weigh batches have
    the same parameters.
    """
    pairs = []
    for number, batch in enumerate(batches):
        try:
            weight = function(batch)
        except Exception as error:
            raise UnsupportedError(
                "cannot-weigh",
                f"{name} fails for microbatch {number} of training step {iteration + 1}: {type(error).__name__}: "
                f"{error}; the function is called with an item of the data iterator, and must return a time, or a time "
                "and a memory",
            ) from error
        pairs.append(weight if isinstance(weight, tuple) and len(weight) == 2 else (weight, 1.0))
    try:
        times, memories = (tuple(map(_plain, weights)) for weights in zip(*pairs, strict=True))
        return MicrobatchFactors(times, memories)
    except CostsError as error:
        raise CostsError(error.code, f"{name} returns no weights in training step {iteration + 1}: {error}") from error


def _plain(weight: Any) -> Any:
    return weight.item() if isinstance(weight, torch.Tensor) and weight.numel() == 1 else weight


def _function(name: FunctionName) -> Callable[[object], object]:
    """Import the function that the user has named."""
    flag = f"--pipemem-microbatch-costs {':'.join(name)}"
    function = getattr(import_target(flag, name.module), name.name, None)
    if not callable(function):
        raise UnsupportedError(
            "cannot-import", f"{flag}: {name.module} has no function {name.name}; name one that it has"
        )
    return function
