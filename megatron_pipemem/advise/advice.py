"""Compare the schedules that a run could have with the present one, by predicted time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_pipemem.config import layout
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.launch.command import all_flags, words
from megatron_pipemem.launch.feasibility import refusal
from megatron_pipemem.planner.prices import MeasuredSlowdown
from megatron_pipemem.planner.replay import measured, shortest
from megatron_pipemem.planner.space import Limits, Order, orders, without_overlap
from megatron_pipemem.planner.step import PlannedStep, price
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.schedule.placement import Placement

STOCKS = ("1f1b", "interleaved")
"""Megatron's own schedules."""
OURS = ("zb-h1", "gis", "zbv", "v-half", "v-min")
"""Schedules that a run is compared under, those with the fewest changes to a run first."""
SAME_MEMORY = 0.02
"""Fraction of a peak within which another peak counts as equal."""
AS_FAST = 0.01
"""Fraction of a step within which another step counts as equally long."""


@dataclass(frozen=True)
class Way:
    """A run under one schedule, with its predicted time and memory.

    Args:
        run: the configuration, as ``pipemem launch`` takes it.
        order: the family of the schedule and its chunks per rank.
        is_stock: whether the schedule is Megatron's own.
        step: the predicted costs of its stages.
        makespan: seconds of the schedule in a step.
        peaks: peak bytes of every pipeline rank, including parameters and optimizer.
    """

    run: Run
    order: Order
    is_stock: bool
    step: PlannedStep
    makespan: float
    peaks: tuple[float, ...]

    @property
    def name(self) -> str:
        return (
            ("stock " if self.is_stock else "")
            + self.order.name
            + (f" v={self.order.chunks}" if self.order.chunks else "")
        )

    @property
    def seconds(self) -> float:
        """Seconds of a whole training step."""
        return self.makespan + self.step.outside

    @property
    def peak(self) -> float:
        return max(self.peaks)

    @property
    def bubble_rate(self) -> float:
        """Fraction of the makespan in which the busiest rank idles."""
        return max(0.0, 1 - self.run.parallelism.microbatches * max(self.step.work) / self.makespan)

    @property
    def idle_rate(self) -> float:
        """Fraction of the makespan in which ranks idle on average, including idle time of ranks with less work."""
        work = self.step.work
        return max(0.0, 1 - self.run.parallelism.microbatches * sum(work) / len(work) / self.makespan)

    @cached_property
    def refusal(self) -> PipememError | None:
        """The reason why the run cannot have this schedule; ``None`` if it can.

        It is checked with the fewest microbatches for which the answer is the same.
        """
        cut = self.run.parallelism
        if cut.global_batch == cut.microbatches * cut.micro_batch * cut.dp:
            cut = cut.with_microbatches(shortest(cut.pp, cut.microbatches))
        run = replace(self.run, parallelism=cut)
        return refusal(run)

    def gain(self, today: Way) -> float:
        """Return the fraction by which a step is shorter than a step of ``today``."""
        return 1 - self.seconds / today.seconds


@dataclass(frozen=True)
class Advice:
    """The run as it is, and the schedules that are proposed for it.

    Args:
        today: the run as it is.
        stock: the fastest of Megatron's own schedules with any chunks and the best layout; ``None`` if none fits into
            the memory.
        proposals: the best way of each kind, such as ``less memory``; at most three.
        refused: by code of a refusal, its message and the names of better schedules that it excludes.
    """

    today: Way
    stock: Way | None
    proposals: dict[str, Way]
    refused: dict[str, tuple[str, list[str]]]


def advise(run: Run, pace: MeasuredSlowdown | None = None) -> Advice:
    """Return the schedules with which a run would be faster or smaller, at the same parallel sizes and microbatches.

    Raises:
        UnsupportedError: the run has no pipeline (``no-pipeline``).
        PipememError: the run cannot be priced with its present schedule.
    """
    if run.parallelism.pp == 1:
        raise UnsupportedError(
            "no-pipeline",
            "the run has one pipeline rank, and no schedule changes its step; pipemem plan ranks other parallel sizes",
        )
    today = as_it_stands(run, pace)
    if today.refusal is not None and today.refusal.code != "does-not-fit":
        raise today.refusal
    memory = max(run.cluster.memory_bytes, today.peak)
    refused: dict[str, tuple[str, list[str]]] = {}
    stock = _first([way for name in STOCKS for way in _ways(run, name, pace) if way.peak <= memory], _seconds, refused)
    ours = [way for name in OURS for way in _ways(run, name, pace)]
    return Advice(today, stock, dict(_proposals(today, ours, refused)), refused)


def as_it_stands(run: Run, pace: MeasuredSlowdown | None = None) -> Way:
    """Predict a run with its present schedule and its present layers per stage."""
    chunks = run.parallelism.chunks
    name = run.schedule.name if run.schedule.name != STOCK else "1f1b" if (chunks or 1) == 1 else "interleaved"
    order = Order(name, chunks)
    found = orders(run, Limits({"schedule": [name], **({"chunks": [chunks]} if chunks else {})}), Counter())
    placement = next((each for each, listed in found.items() if order in listed), None)
    if placement is None:
        raise UnsupportedError(
            "does-not-fit", f"{name} does not take {run.parallelism.pp} pipeline ranks and {chunks or 1} chunks"
        )
    layers = layout.pieces_of(run, placement.model_stages)
    return _way(run, order, placement, layers, pace)


def _ways(run: Run, name: str, pace: MeasuredSlowdown | None) -> Iterator[Way]:
    """Predict a run under a family, with every number of chunks and the best layout for each number."""
    is_stock = name in STOCKS
    base = run if is_stock else without_overlap(run)
    for placement, found in orders(base, Limits({"schedule": [name]}), Counter()).items():
        for order in found:
            if is_stock and (order.chunks or 1) > 1 and run.parallelism.microbatches % run.parallelism.pp:
                continue
            choice = replace(base.schedule, name=STOCK if is_stock else name)
            cut = replace(base.parallelism, chunks=order.chunks)
            yield _way(replace(base, schedule=choice, parallelism=cut), order, placement, None, pace)


def _way(
    run: Run, order: Order, placement: Placement, layers: tuple[int, ...] | None, pace: MeasuredSlowdown | None
) -> Way:
    step = price(run, placement, layers, pace)
    if layers is None:
        run = layout.with_cut(run, step.layers)
    cut = run.parallelism
    found = measured(order.name, cut.pp, cut.microbatches, order.chunks, step.costs)
    return Way(run, order, run.schedule.name == STOCK, step, found.seconds, step.held(found.peaks))


def _proposals(today: Way, ways: Sequence[Way], refused: dict[str, tuple[str, list[str]]]) -> Iterator[tuple[str, Way]]:
    """Yield the best way of every kind, if it is faster than the run and the kinds before, or smaller."""
    same = [way for way in ways if way.peak <= today.peak * (1 + SAME_MEMORY)]
    fast = [
        way
        for way in ways
        if way.seconds <= today.seconds * (1 + AS_FAST) and way.peak < today.peak * (1 - SAME_MEMORY)
    ]
    kinds = {
        "same memory": ([way for way in same if way.step.placement.num_chunks == 1], _seconds),
        "same memory, chunks": (same, _seconds),
        "less memory": (fast, _peak),
    }
    fastest = today.seconds
    for kind, (fitting, key) in kinds.items():
        way = _first(fitting, key, refused)
        if way is not None and (key is _peak or way.seconds < fastest - AS_FAST * today.seconds):
            fastest = min(fastest, way.seconds)
            yield kind, way


def _first(ways: Sequence[Way], key: Callable[[Way], float], refused: dict[str, tuple[str, list[str]]]) -> Way | None:
    """Return the first way by ``key`` that is not refused, and note the refusals of the ways before it."""
    for way in sorted(ways, key=key):
        error = way.refusal
        if error is None:
            return way
        if not way.is_stock:
            names = refused.setdefault(error.code, (str(error), []))[1]
            names += [] if way.name in names else [way.name]
    return None


def _seconds(way: Way) -> float:
    return way.seconds


def _peak(way: Way) -> float:
    return way.peak


def changed_flags(today: Run, other: Run) -> tuple[list[str], list[str]]:
    """Return the words to add to the command of ``today``, and those to remove, to get the run ``other``."""
    before, after = all_flags(today), all_flags(other)
    added = {name: value for name, value in after.items() if before.get(name) != value}
    gone = {
        name: value for name, value in before.items() if name not in after or (after[name] in (None, False) and value)
    }
    return words({name: value for name, value in added.items() if not name.startswith("pipemem-report")}), words(gone)
