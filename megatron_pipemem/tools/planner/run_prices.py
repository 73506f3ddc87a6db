"""Predict one run under the schedule that it names, with all that the run adds to it: its seconds, and its bytes.

``RunPrices`` is the only price of a run. ``plan`` and ``advise`` read it for the run as it stands and for the families
that they compare it with, ``layout`` for every layout, and a start for the memory that the run needs. The planner's
queue prices thousands of runs by the same steps (``variants.run_step``) and orders (``replay``), and shares them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from math import inf

from megatron_pipemem.choose.choice import choose, vocabulary_ways
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.conflicts import make_request
from megatron_pipemem.part_costs import prices_of
from megatron_pipemem.request import Request, ScheduleOptions
from megatron_pipemem.schedule.memory_cap import MemoryCap
from megatron_pipemem.schedule.options import AUTO, OFF, STOCK, Offload
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import megatrons_own
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.tools.config.runs import RECOMPUTE_FLAG, Run
from megatron_pipemem.tools.planner.early_wgrad import moves_weights
from megatron_pipemem.tools.planner.planning import asynchronous_price
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.replay import (
    MOST_ACTIONS,
    Order,
    OrderPrice,
    Replay,
    extended,
    replay,
    shortest,
)
from megatron_pipemem.tools.planner.step import PlannedStep
from megatron_pipemem.tools.planner.variants import HOST_MEMORY, paired_price, paired_timeline, run_step, variant_of
from megatron_pipemem.tools.planner.ways import Way

_EFFORT, _UNLIMITED = 0.1, 1e9  # of the search for the order of ``auto``, in seconds
_CHOSEN: deque[tuple[tuple[Request, Shape, Knowledge], Schedule]] = deque(maxlen=8)
"""The latest schedules with added passes, by their inputs. A run is priced again to see whether it can start."""


def request_of(run: Run) -> Request:
    """Return the schedule request of a run. Stock's schedule becomes our schedule with the same order."""
    choice, cut = run.schedule, run.parallelism
    recompute = "selective" if choice.recomputes_by_action else str(run.flags.get(RECOMPUTE_FLAG, "none"))
    settings = {option.name: getattr(choice, option.name) for option in fields(ScheduleOptions)}
    settings |= {
        "options": run.schedule_options,
        "microbatch_costs": choice.microbatch_costs,
        "offload": choice.offload,
    }
    settings |= {"memory_cap": choice.memory_cap, "host_memory": run.flags.get(HOST_MEMORY), "recompute": recompute}
    settings["pairs"] = choice.name != STOCK and run.pairs
    request = make_request(choice.name, **settings).with_graphs(run.flags.get("cuda-graph-impl"))
    if choice.name != STOCK:
        return request
    return replace(request, schedule=megatrons_own(cut.chunks))


def schedule_of(run: Run, request: Request) -> Schedule:
    """Return the schedule that a run names, without offload and vocabulary passes."""
    cut = run.parallelism
    shape = Shape(cut.pp, None, cut.microbatches)
    return choose(request.decided(0).without_offload(), shape, Knowledge()).schedule


class RunPrices:
    """Predicts the times and bytes of one run under its schedule, with any layers per stage.

    Args:
        run: the run.
        request: the run's request, with a decided cut of the vocabulary. For ``auto``, a short search finds the order.
        slowdown: the ratios of measured to predicted seconds.
        memory: the bytes of a device within which pairs keep the step.
    """

    def __init__(
        self, run: Run, request: Request, slowdown: MeasuredSlowdown | None = None, memory: float = inf
    ) -> None:
        self.run, self._slowdown, self._memory, cut = run, slowdown, memory, run.parallelism
        request = replace(request, recompute="none")  # the prices of layers include recomputation
        self.cuts_vocabulary = bool(request.barriers)
        self._adds_passes = self.cuts_vocabulary or request.offload != OFF
        # A schedule file fixes the number of microbatches, and added passes are fitted to all of them.
        is_whole = request.file is not None or self._adds_passes
        self._count = cut.microbatches if is_whole else shortest(cut.pp, cut.microbatches)
        self.further = cut.microbatches - self._count
        """The number of the run's microbatches that ``replay`` leaves out."""
        self._moves_weights = request.family is not None and moves_weights(run) and not request.barriers
        if request.searches:
            request = replace(request, file=_searched_order(run, request, self._count))
        self._request = request
        self._replays = cache(lambda count: _replay(run, request, count))
        published = self.replay.schedule
        self.placement = published.placement
        self.is_plain = not (self._adds_passes or published.units.parts > 1 or request.is_asynchronous)
        """Whether the schedule is synchronous, of whole microbatches, and without added passes."""
        # The step is priced with whole microbatches if parts cannot be priced.
        cut_run = run.with_parts(published.units.parts)
        copies: Offload = AUTO if published.offloads or request.offload != OFF else OFF
        choice = replace(cut_run.schedule, vocab_cut=request.vocab_cut, offload=copies)
        self._cut = replace(cut_run, schedule=choice)

    @property
    def replay(self) -> Replay:
        """The published schedule of the shortest step from which the run's step can be predicted."""
        return self._replays(self._count)

    def step(self, layers: tuple[int, ...] | None = None) -> PlannedStep:
        """Predict the step with these layers per stage, by default those of the planner's partition."""
        return run_step(self._cut, self.placement, layers, self._slowdown)

    def way(self, layers: tuple[int, ...] | None = None) -> Way:
        """Predict the times and bytes of the run with these layers per stage, by default those of the partition."""
        step = self.step(layers)
        if self._request.is_asynchronous:
            step, order_price = asynchronous_price(self.run, step)
        else:
            order_price = self._price(step)
        name = self._request.schedule if self._request.file is None else self.run.schedule.name
        order = Order(name, self.run.parallelism.chunks)
        return Way.of(self.run, order, step, order_price, variant=variant_of(self._cut))

    def with_earlier_weights(self, published: Replay, step: PlannedStep) -> Replay:
        """Return the replay whose W run as early as the run moves them."""
        return published.with_earlier_weights(step.costs) if self._moves_weights else published

    def _price(self, step: PlannedStep) -> OrderPrice:
        chooses_pairs = self.run.pairs and self._request.file is None and not self.run.schedule.overlap_steps

        def built(count: int) -> Replay:
            moved = self.with_earlier_weights(self._replays(count), step)
            schedule = moved.schedule if chooses_pairs else self._with_passes(moved.schedule, step)
            return moved if schedule is moved.schedule else Replay(schedule)

        cut, overlaps = self.run.parallelism, self.run.schedule.overlap_steps
        if chooses_pairs:
            return paired_price(built, step, step.room(self._memory), cut.microbatches)
        if self._request.file is not None:
            order_price = built(self._count).timing(step.costs, overlaps).price
            return order_price._replace(seconds=order_price.seconds + self.further * max(step.work_seconds))
        actions = 3 * cut.microbatches * self.replay.schedule.units.parts * self.placement.num_stages
        if self._request.offload != OFF and actions <= MOST_ACTIONS:
            return built(cut.microbatches).timing(step.costs, overlaps).price
        return extended(built, step.costs, cut.pp, cut.microbatches, overlaps)

    def _with_passes(self, schedule: Schedule, step: PlannedStep) -> Schedule:
        """Return the schedule with the pairs, the vocabulary passes or the copies to the host that the run adds."""
        if self.run.pairs:
            return paired_timeline(schedule, step, step.room(self._memory)).schedule
        if not self._adds_passes:
            return schedule
        request = replace(self._request, file=schedule)
        if request.offload != OFF and request.cap_in_units is not None:
            unit = sum(step.saved_bytes)
            caps = tuple(cap * unit for cap in request.caps(self.placement.num_devices) or ())
            request = replace(request, memory_cap=MemoryCap(caps, True))
        shape = Shape(self.placement.num_devices, None, schedule.num_microbatches)
        inputs = request, shape, Knowledge(step.costs, host_budget=step.host_bytes)
        for earlier, with_passes in _CHOSEN:
            if earlier == inputs:
                return with_passes
        chosen = choose(*inputs).schedule
        _CHOSEN.append((inputs, chosen))
        return chosen


def priced(
    run: Run,
    slowdown: MeasuredSlowdown | None = None,
    layers_of: Callable[[Placement], tuple[int, ...] | None] = lambda placement: None,
    memory: float = inf,
) -> Way:
    """Predict a run, with the faster setting if ``auto`` decides whether the vocabulary is cut.

    ``layers_of`` returns the pieces of every stage, or ``None`` for those of the planner's partition. ``slowdown`` and
    ``memory`` are as in ``RunPrices``.
    """

    def way(request: Request) -> Way:
        prices = RunPrices(run, request, slowdown, memory)
        return prices.way(layers_of(prices.placement))

    request = request_of(run)
    if request.vocab_cut != AUTO:
        return way(request)
    return min(vocabulary_ways(request, way, lambda *_: None).values(), key=lambda way: way.seconds)


def _replay(run: Run, request: Request, count: int) -> Replay:
    """Return the replay of a step with ``count`` microbatches of a run's published schedule."""
    own = replace(run, parallelism=run.parallelism.with_microbatches(count))
    options = {name for name, value in request.options.items() if value is not None}
    if request.family is not None and options <= {"chunks"} and request.memory_cap is None:
        return replay(request.schedule, run.parallelism.pp, count, request.options.get("chunks"))
    return Replay(schedule_of(own, request))


def _searched_order(run: Run, request: Request, microbatches: int) -> Schedule:
    """Return the order that ``auto`` finds for a step with that many microbatches, by the costs that the run begins with.

    A memory cap in bytes is left out, because only the run counts bytes. A cap that no order keeps is left out
    too. The vocabulary is uncut, and nothing is offloaded.
    """
    options = request.options | {"seconds": _UNLIMITED, "effort": min(_EFFORT, request.options.get("effort", _EFFORT))}
    request = replace(request.decided(0).without_offload(), options=options)
    uncapped, shape = replace(request, memory_cap=None), Shape(run.parallelism.pp, None, microbatches)
    knowledge = Knowledge(*prices_of(request.costs))
    choice = choose(uncapped if request.in_bytes else request, shape, knowledge)
    return (choose(uncapped, shape, knowledge) if choice.notes else choice).schedule
