"""Find the layers of every stage with which one schedule's step is shortest, and compare them with the even split.

The partition makes the slowest rank as fast as whole layers allow. Short steps may need other splits. The search
starts from several layouts: the partition's, the even one, and one with equally many layers on stage after stage and
the rest on the last. The last two are also changed by moving layers away from the slowest rank. From the best start,
pieces move to other stages as long as the simulated step gets shorter (``planner.descent``). A layout whose
fullest rank fits its device is preferred. The moves count only if they gain more than ``AS_GOOD``.

There are no moves with vocabulary passes, slices or asynchronous schedules: the best start is the result. For ``auto``,
a short search finds an order for a model with equal stages, and the layout is for that order. All ranks of a run must
find the same one, so the search ends after a number of trials and not after some seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from math import inf
from operator import ge

from megatron_pipemem.choose.choice import vocabulary_ways
from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.model import layout
from megatron_pipemem.model.cut_flags import LAYOUT, REPLACED_BY_LAYOUT
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.display import shortened, tell
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER, Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.run_prices import RunPrices, request_of
from megatron_pipemem.tools.planner.step import PlannedStep, loads_of, pieces_of, shared_out
from megatron_pipemem.tools.planner.ways import Way

AS_GOOD = 0.005
"""The least gain for which pieces are moved from the best start, as a fraction of a step."""
_SIMULATED = 300  # steps, at most
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Balance:
    """The best, the even and the given layout of a run."""

    prices: RunPrices
    best: Way  # with the shortest step found
    own_layers: tuple[int, ...] | None = None  # of the user or the run, if there is a layout

    @cached_property
    def even(self) -> Way:
        """The run with layers divided evenly, or nearly so."""
        return self.prices.way(layout.even(self.prices.run.model, self.prices.placement.model_stages))

    @cached_property
    def own(self) -> Way | None:
        """The run with the layout of the user or the run, if there is one."""
        return None if self.own_layers is None else self.prices.way(self.own_layers)

    @property
    def layouts(self) -> dict[str, Way]:
        """The layouts that there are, by name."""
        ways = {"best": self.best, "even": self.even, "given": self.own}
        return {name: way for name, way in ways.items() if way is not None}

    @property
    def even_is_as_good(self) -> bool:
        """Whether the even layout's step is longer than the best layout's by at most the fraction ``AS_GOOD``."""
        return self.even.seconds <= self.best.seconds * (1 + AS_GOOD)


def balance(
    run: Run,
    layout_text: str | None = None,
    room: float | None = None,
    slowdown: MeasuredSlowdown | None = None,
    trials: int = _SIMULATED,
) -> Balance:
    """Return the best, the even and the given layout of a run under its schedule.

    ``layout_text`` is a layout in Megatron's form that replaces the run's. ``room`` is the memory of a device in bytes,
    by default the cluster's limit. A value of 0 means that the memory is unknown. ``slowdown`` has the ratios of measured
    to predicted seconds. ``trials`` limits the number of simulated layouts; with 0, the best start is the result. If
    ``auto`` decides whether the vocabulary is cut, the layouts are those of the setting with the shortest step. Raise a
    ConfigError if ``layout_text`` does not fit the model and the stages.
    """
    run.execution.check(run.model)
    room = run.cluster.memory_bytes if room is None else room

    def weighed(request: Request) -> Balance:
        prices = RunPrices(run, request, slowdown, run.cluster.memory_bytes)
        counts = _requested_layout(run, layout_text, prices.placement.model_stages)
        return Balance(prices, prices.way(_LayoutSearch(prices, room, trials).best()), counts)

    request = _request(run)
    if request.vocab_cut != AUTO:
        return weighed(request)
    ways = vocabulary_ways(request, weighed, lambda *_: None)
    return min(ways.values(), key=lambda way: way.best.seconds)


class _LayoutSearch:
    """Searches the layers per stage with which the steps of a run are shortest."""

    def __init__(self, prices: RunPrices, room: float, trials: int) -> None:
        self._prices, self._room, self._model, self._trials = prices, room, prices.run.model, trials
        self._placement = prices.placement
        self._stages = self._placement.model_stages
        self._loads, self._has_mtp_on_last = loads_of(prices.run, self._placement, prices.cuts_vocabulary)

    def best(self) -> tuple[int, ...]:
        """Search the layout with the shortest step that fits the memory, and return its number of pieces per stage.

        If no start fits the memory, the search begins with a fast one that takes least. Without trials, and with
        vocabulary passes, slices or an asynchronous schedule, the best start is returned.
        """
        own = self._prices.step()
        by_hand = (layout.even(self._model, self._stages), self._alike(max(own.work_seconds)))
        cuts = dict.fromkeys((own.layers, *by_hand, *map(self._relieved, by_hand)))
        starts = [self._prices.way(layers) for layers in cuts if self._lacking(layers) <= self._lacking(own.layers)]
        start = _shortest([way for way in starts if self._is_full(way.layers)] or starts, self._room)
        if not self._prices.is_plain or not self._trials:
            return start.layers
        moved = self._moved(start, starts)
        return (moved if moved.seconds < start.seconds * (1 - AS_GOOD) else start).layers

    def _alike(self, slowest: float) -> tuple[int, ...]:
        """Return the layout with equally many layers on all stages but the last, which has all that are left.

        Multi-token prediction is on the last stage too. If layers run out, stages have fewer or none.
        The number is the most that a rank can compute in ``slowest`` seconds per microbatch on all its stages, and at
        least 1. Embedding and head are not counted.
        """
        share = slowest * self._placement.num_devices / self._stages
        per_stage = max(1, int(share * (1 + _TOLERANCE) / max(self._loads.seconds[: self._model.layers])))
        left, counts = len(self._loads.seconds), []
        for stage in range(self._stages):
            counts.append(left if stage == self._stages - 1 else min(per_stage, left))
            left -= counts[-1]
        return (*counts[:-1], counts[-1] + self._has_mtp_on_last)

    def _relieved(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers per stage after single layers of ``layers`` have moved away from the slowest rank."""
        return shared_out(self._loads, self._has_mtp_on_last, self._placement, layers)

    def _moved(self, start: Way, others: Sequence[Way]) -> Way:
        """Return the layout found from ``start`` by moving pieces between stages as long as a step gets faster.

        A layout must fit the memory, if this is known, or take no more than ``start``. ``others`` are simulated
        first, because their chains are bounds for all further layouts.
        """
        from megatron_pipemem.tools.planner.descent import Bounds, descend

        replay, further = self._prices.replay, self._prices.further
        bounds = Bounds(pieces_of(self._prices.run), self._placement, further)
        most, lacking = max(self._room, *start.peak_bytes) if self._room else inf, self._lacking(start.layers)

        @cache
        def simulated(layers: tuple[int, ...]) -> tuple[PlannedStep, float]:
            tell(partial("{} layouts simulated".format, simulated.cache_info().misses))
            step = self._prices.step(layers)
            makespan, chain = replay.longest_chain(step.costs)
            bounds.add(chain)  # of one order, because bounds compare layouts
            return step, makespan

        def seconds(layers: tuple[int, ...], limit: float) -> float:
            step, makespan = simulated(layers)
            if (moved := self._prices.with_earlier_weights(replay, step)) is not replay:
                makespan = moved.timeline(step.costs).makespan
            total = makespan + further * max(step.work_seconds) + step.outside_seconds
            if total >= limit:
                return total
            fits = most == inf or max(step.held(peaks(moved.schedule, step.costs))) <= most
            return total if fits and self._lacking(layers) <= lacking else inf

        for way in others:
            simulated(way.layers)
        return self._prices.way(descend(start.layers, bounds, seconds, self._least, self._trials))

    @property
    def _least(self) -> list[int]:
        """Return the least number of pieces that each stage may have, in the order of the stages."""
        # An empty middle stage only forwards its input, and stock Megatron may hang there.
        least = [int(0 < stage < self._stages - 1) for stage in range(self._stages)]
        return [self._model.least_first, *least[1:-1], least[-1] + self._has_mtp_on_last]

    def _is_full(self, layers: tuple[int, ...]) -> bool:
        return all(map(ge, layers, self._least))

    def _lacking(self, layers: tuple[int, ...]) -> int:
        """Return the number of faults: ranks without a layer of the kind that all need, and layers cut from theirs."""
        ends = list(accumulate(layers, initial=0))
        torn = sum(begin < end and begin in self._model.tied_layers for begin, end in pairwise(ends))
        if not any(self._loads.needed):
            return torn
        has = [any(self._loads.needed[a:b]) for a, b in pairwise(ends)]
        return torn + sum(not any(has[stage % self._stages] for stage in owned) for owned in self._placement.stages)


def _shortest(layouts: Sequence[Way], room: float) -> Way:
    """Return the layout with the shortest step among those that fit into ``room`` bytes.

    If none fits, take the layouts with about the shortest step, and of these the one with the lowest peak.
    """
    if fitting := [way for way in layouts if way.peak <= room]:
        return min(fitting, key=lambda way: way.seconds)
    most = min(way.seconds for way in layouts) * (1 + AS_GOOD)
    return min((way for way in layouts if way.seconds <= most), key=lambda way: (way.peak, way.seconds))


def _request(run: Run) -> Request:
    """Return the request of a run for which layouts are compared: without offload and recomputation.

    Raise an UnsupportedError if there is no pipeline.
    """
    if run.parallelism.pp == 1:
        raise UnsupportedError(
            "no-pipeline",
            "one pipeline rank has no layers to share; give more, by --devices or, in a run, parallelism.pp",
        )
    # The prices of layers include recomputation.
    return replace(request_of(run).without_offload(), recompute="none")


def _requested_layout(run: Run, text: str | None, stages: int) -> tuple[int, ...] | None:
    """Return the number of pieces of every stage in the user's layout ``text``, or else in the run's.

    Return ``None`` if neither is given, or if the run's hybrid pattern is not cut into stages. Raise a ConfigError if
    the layout does not fit the model and ``stages``.
    """
    pattern = run.model.pattern is not None
    key = layout.PATTERN if pattern else layout.FLAG
    requested = text if text is not None else run.flags.get(key)
    if requested is None or (text is None and pattern and not layout.is_cut(str(requested))):
        return None
    counts = run_layout.pieces_of(replace(run, flags={key: requested}), stages)
    if counts is None:
        raise ConfigError(
            "bad-layout",
            f"{shortened(requested)} is not a layout of {run.model.pieces} pieces (layers, and multi-token "
            f"prediction as one) on {stages} "
            "stages; write one stage per pipeline rank and chunk, with | between them",
            key=key,
        )
    return counts


def at_start(run: Run) -> Balance:
    """Return the layouts that a run with ``--pipemem-layout auto`` compares when it starts.

    A run does not know its cluster, so the prices are those of ``DEFAULT_CLUSTER``, for as many nodes and devices.
    """
    nodes, devices = run.cluster.nodes, run.cluster.devices_per_node
    cluster = load(DEFAULT_CLUSTER, Cluster).sized(nodes, devices)
    return balance(replace(without_layout(run), cluster=cluster))


def laid_out(run: Run) -> Run:
    """Return the run with the layout that it gets by ``--pipemem-layout auto``; the run unchanged without that flag.

    With one pipeline rank, only the flags that cut the model are dropped.
    """
    if run.flags.get(LAYOUT) != AUTO:
        return run
    uncut = without_layout(run)
    return uncut if run.parallelism.pp == 1 else run_layout.with_cut(uncut, at_start(run).best.layers)


def without_layout(run: Run) -> Run:
    """Return the run without the flags that cut its model into stages."""
    replaced = (*REPLACED_BY_LAYOUT, LAYOUT)
    return replace(run, flags={k: v for k, v in run.flags.items() if k not in replaced})
