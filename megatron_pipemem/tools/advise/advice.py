"""Compare the schedules that a run could have with the present one, by predicted time and memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Literal

from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.flags import Flags
from megatron_pipemem.model import cut_flags, layout
from megatron_pipemem.queues import CONNECTIONS, one_queue_of
from megatron_pipemem.schedule.display import rare_collection
from megatron_pipemem.schedule.options import OFF, STOCK, VocabularyCut
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.cluster import GIB
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import all_flags
from megatron_pipemem.tools.launch.feasibility import check_sizes, refusal
from megatron_pipemem.tools.planner.balance import balance, laid_out, without_layout
from megatron_pipemem.tools.planner.host import bound_by_host
from megatron_pipemem.tools.planner.one_queue import demands_one_queue, in_demanded_order, one_queue_slowdown
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.pricing import STOCKS, Layouts, as_it_stands, priced_with, with_cut_vocabulary
from megatron_pipemem.tools.planner.replay import shortest
from megatron_pipemem.tools.planner.slices import LEAST_SLICED_GAIN, proposed_slices, with_slices
from megatron_pipemem.tools.planner.space import (
    hides_messages,
    in_pairs,
    may_pair,
    why_not_in_chunks,
    without_overlap,
)
from megatron_pipemem.tools.planner.variants import BESIDE_COLLECTIVES
from megatron_pipemem.tools.planner.ways import AS_FAST, Way, first_as_fast

OURS = ("zb-h1", "gis", "zbv", "v-half", "v-min")
"""Schedules that a run is compared under, those with the fewest changes to a run first."""
OF_PAIRS = (*OURS, "dualpipe-v")
"""Schedules that a run in pairs is compared under."""
SAME_MEMORY = 0.02
"""Fraction of a peak within which another peak counts as equal."""
WORTH_A_ROW = AS_FAST / 2
"""Fraction of a step by which tuned stock has to be faster than the run to be shown, and preferred if it is as fast as ours."""
ROOM = 0.05
"""Fraction of a device's memory that a recommended schedule leaves free, unless the run itself leaves less."""


def refusal_of(way: Way) -> PipememError | None:
    """Return the error that says why a run cannot have a schedule; ``None`` if it can.

    It is checked with the fewest microbatches for which the answer is the same.
    """
    cut = way.run.parallelism
    if cut.global_batch == cut.microbatches * cut.micro_batch * cut.dp:
        cut = cut.with_microbatches(shortest(cut.pp, cut.microbatches))
    run = replace(way.run, parallelism=cut)
    return refusal(run)


Verdict = Literal["stay", "overlap", "layout", "stock", "recompute", "pairs", "ours"]
"""The answer: stay as you are, stay for the overlap of messages, change the layout alone, tune Megatron's own schedule, leave
out the recomputation alone, take the proposal in pairs, or take another proposal."""
SMALLER = "less memory"
"""The kind of a proposal that is as fast as a run near the limit of its memory, and smaller."""
CUT = "cut vocabulary"
"""The kind of a proposal whose embedding and head are cut over all pipeline ranks."""
_ALGORITHMS: tuple[VocabularyCut, ...] = ("2", "1")
"""The values of a cut vocabulary, the one that holds less first."""
_MOST_CUT_PASSES = 6_000
"""The most passes in all steps that are priced with a cut vocabulary, which takes longest; one step is always priced."""
PAIRED = "pairs"
"""The kind of a proposal that runs forwards and backwards in pairs. It may need more memory than today, if devices have it."""


_DEMANDED = (
    f"Megatron demands {CONNECTIONS}=1 of this run, so seconds of our schedules are those of their order for one hardware "
    "queue; Megatron's own are taken to stay as long"
)


@dataclass(frozen=True)
class Advice:
    """The run as it is, and the schedules that are proposed for it."""

    today: Way  # the run as it is
    stock: Way | None  # the fastest of Megatron's own schedules with the best layout; None if none fits, or can be had
    needless: Way | None  # the run without recomputation, if that is faster and fits with room
    proposals: dict[str, Way]  # the best schedule of each kind, such as ``less memory``
    # by code of a refusal, its message and the names of schedules that would be proposed without it
    refused: dict[str, tuple[str, list[str]]]
    excess: float  # bytes that the run needs by its prices in addition to the device's memory
    verdict: Verdict
    best: Way | None  # the schedule of the answer; None if the run should stay as it is
    # why Megatron cannot cut the model as the run asks; ``today`` then has a layout with which the run starts
    fails: str | None = None
    why_whole: str | None = None  # why sequences cannot be cut into slices, if slices might help
    bound_by_host: str | None = None  # the seconds of host and device, if the host is slower by measured prices

    @cached_property
    def one_queue(self) -> str | None:
        """Why our schedules run by the order for one hardware queue; ``None`` if none of ours is shown, or none needs it."""
        ours = [way for way in (self.today, *self.proposals.values()) if not way.is_stock]
        if not ours:
            return None
        reason = one_queue_of(self.today.run.flags)
        if reason is not None or not any(map(demands_one_queue, ours)):
            return reason
        unknown = not self.today.is_stock and one_queue_slowdown(self.today) is None
        return _DEMANDED + "; today's seconds are those of the usual order" * unknown


@rare_collection()
def advise(
    run: Run,
    slowdown: MeasuredSlowdown | None = None,
    names: Collection[str] = (*STOCKS, *OURS),
    may_slice: bool = False,
    may_pair_passes: bool = False,
    may_cut_vocabulary: bool = False,
) -> Advice:
    """Return the schedules with which a run would be faster or smaller, at the same parallel sizes and microbatches.

    A run that does not fit its devices by these prices is compared as if they had the memory that it needs. ``slowdown``
    has the ratios of measured to predicted seconds. ``names`` are the schedules that the run's program can take. With
    ``may_slice``, all of its sequences have the same length, so that schedules may cut them. With ``may_pair_passes``,
    it can take schedules whose passes run in pairs. With ``may_cut_vocabulary``, embedding and head may be cut over its
    pipeline. A run without a pipeline, or without a price for its present schedule, is refused.
    """
    check_sizes(run)
    if run.parallelism.pp == 1:
        raise UnsupportedError(
            "no-pipeline",
            "the run has one pipeline rank, and no schedule changes its step; pipemem plan ranks other parallel sizes",
        )
    run, fails = _that_starts(laid_out(run), slowdown)
    today = _as_it_stands(run, slowdown)
    refused_today = refusal_of(today)
    if refused_today is not None and refused_today.code != "does-not-fit":
        raise refused_today
    memory = run.cluster.memory_bytes
    excess = max(0.0, today.peak - memory)
    if excess:  # a device may have more than these prices say that the run needs
        run = replace(run, cluster=replace(run.cluster, memory_gib=run.cluster.memory_gib + 2 * today.peak / GIB))
    refused: dict[str, tuple[str, list[str]]] = {}
    counts, why_whole = proposed_slices(run) if may_slice else ((), None)
    bare = _without_recomputation(today, slowdown)
    layouts: Layouts = {}
    # A way that is slower in the usual order is slower still in one queue, and is proposed only if today's does not fit.
    slowest = inf if excess else today.seconds * (1 + AS_FAST)
    ways = {
        kind: [
            in_demanded_order(way) if way.seconds <= slowest else way
            for base, name in rows
            for way in priced_with(base, name, slowdown, layouts)
        ]
        for kind, rows in _candidates(run, bare, names, counts, may_pair_passes).items()
    }
    ways["sliced"] = _worth_slicing(today, ways, memory)
    ways[CUT] = _worth_cutting(today, ways["whole"], memory, slowdown) if may_cut_vocabulary else []
    limit = max(memory * (1 - ROOM), today.peak)
    stock = _first([way for way in ways["stock"] if way.peak <= limit], _BY_SECONDS, refused)
    needless = bare if bare is not None and bare.peak <= memory * (1 - ROOM) and refusal_of(bare) is None else None
    proposals = dict(_proposals(today, ways, memory, refused))
    best = _best(today, stock, needless, proposals, memory)
    overlap = best is None and hides_messages(run) and _gains_without_overlap(run, ways["whole"], slowdown)
    verdict: Verdict = "overlap" if overlap else "stay"
    if best is not None and best in (stock, needless):
        same = best.order == today.order and best.run.pairs == today.run.pairs
        verdict = "recompute" if best is needless else "layout" if same else "stock"
    elif best is not None:
        verdict = "pairs" if best is proposals.get(PAIRED) else "ours"
    elif fails is not None:
        verdict = "layout"
    bound = bound_by_host(today, slowdown)
    return Advice(today, stock, needless, proposals, refused, excess, verdict, best, fails, why_whole, bound)


def tuned_stock(today: Way, slowdown: MeasuredSlowdown | None) -> Way | None:
    """Return the fastest of Megatron's own schedules for a run, with its layout; ``None`` if none is faster and fits.

    Flags of the run stay, also those that hide messages.
    """
    run = today.run
    limit = max(run.cluster.memory_bytes * (1 - ROOM), today.peak)
    ways = [way for name in STOCKS for way in priced_with(run, name, slowdown) if way.peak <= limit]
    best = _first(ways, _BY_SECONDS, {})
    return best if best is not None and best.gain(today) >= AS_FAST else None


def _that_starts(run: Run, slowdown: MeasuredSlowdown | None) -> tuple[Run, str | None]:
    """Return the run, changed so that Megatron starts it, and the reason why it does not start as it is, if so."""
    fails = None
    if (
        run.schedule.name == STOCK
        and (run.parallelism.chunks or 1) > 1
        and (fails := why_not_in_chunks(run)) is not None
    ):
        run = without_layout(replace(run, parallelism=replace(run.parallelism, chunks=None)))
    uncut = why_not_cut(run)
    if uncut is not None:
        run = run_layout.with_cut(run, balance(run, slowdown=slowdown).best.layers)
    return run, fails or uncut


def _as_it_stands(run: Run, slowdown: MeasuredSlowdown | None) -> Way:
    return in_demanded_order(as_it_stands(run, slowdown))


def _without_recomputation(today: Way, slowdown: MeasuredSlowdown | None) -> Way | None:
    """Return the run without recomputation; ``None`` if it has none, or is as fast with it."""
    run = today.run
    if run.schedule.recompute == "none":
        return None
    bare = _as_it_stands(replace(run, schedule=replace(run.schedule, recompute="none")), slowdown)
    return bare if bare.gain(today) >= AS_FAST else None


def _candidates(
    run: Run, bare: Way | None, names: Collection[str], slices: Collection[int], pairs: bool
) -> dict[str, list[tuple[Run, str]]]:
    """Return what a run is compared with: by kind, runs with flags for a kind of schedule, each with a family.

    ``bare`` is the run without recomputation, if that may be faster. ``names`` are the families that the run's program can
    take, ``slices`` the numbers of slices of a sequence. ``pairs`` is whether its passes may run in pairs.
    """
    paired = [in_pairs(run)] if pairs and may_pair(run) else []
    own = [run] if run.pairs else [run, *(replace(bare, flags=run.flags | bare.flags) for bare in paired)]
    taken = [name for name in OURS if name in names]
    return {
        "stock": [(base, name) for base in own for name in STOCKS if name in names],
        "whole": [(without_overlap(run), name) for name in taken],
        "bare": [(without_overlap(bare.run), name) for name in taken] if bare is not None else [],
        PAIRED: [(base, name) for base in paired for name in OF_PAIRS],
        "sliced": [(with_slices(run, count), name) for count in slices for name in taken],
    }


def _worth_slicing(today: Way, ways: Mapping[str, Sequence[Way]], memory: float) -> list[Way]:
    """Return the ways with slices that are enough faster than the run and the fastest way without slices that fits.

    The arguments are those of ``_proposals``. A run that does not fit is only compared with ways that fit with room.
    """
    room = memory * (1 - ROOM)
    limit = room if today.peak > memory else max(room, today.peak * (1 + SAME_MEMORY))
    whole = [way for kind, rows in ways.items() if kind != "sliced" for way in rows if way.peak <= limit]
    best = _first(whole, _BY_SECONDS, {})
    others = [way.seconds for way in (best, today) if way is not None and way.peak <= limit]
    return [way for way in ways["sliced"] if all(way.seconds < s * (1 - LEAST_SLICED_GAIN) for s in others)]


def _worth_cutting(today: Way, whole: Sequence[Way], memory: float, slowdown: MeasuredSlowdown | None) -> list[Way]:
    """Return ways with a cut vocabulary, made of the fastest of ``whole``, the ways of schedules that fit.

    A way is left out if it would gain nothing even where all ranks have equal work and none idles. Then no step is priced.
    ``memory`` is the memory of a device in bytes.
    """
    limit = max(memory * (1 - ROOM), today.peak * (1 + SAME_MEMORY))
    fitting = sorted((way for way in whole if way.peak <= limit), key=_BY_SECONDS)
    choice, m = today.run.schedule, today.run.parallelism.microbatches
    if not fitting or choice.vocab_cut != OFF or choice.offload != OFF:
        return []
    goal = min(fitting[0].seconds, today.seconds) - AS_FAST * today.seconds

    def bound(way: Way) -> float:
        return (
            BESIDE_COLLECTIVES * m * sum(way.step.work_seconds) / len(way.step.work_seconds) + way.step.outside_seconds
        )

    worth = [way for way in fitting if bound(way) < goal]
    passes = 3 * m * max((way.step.placement.num_stages for way in worth), default=1)
    rows = [(way, algorithm) for way in worth for algorithm in _ALGORITHMS]
    cut = (
        with_cut_vocabulary(way, algorithm, slowdown) for way, algorithm in rows[: max(1, _MOST_CUT_PASSES // passes)]
    )
    return [in_demanded_order(way) for way in cut if way is not None]


def why_not_cut(run: Run) -> str | None:
    """Return the reason why Megatron's own schedule cannot cut a GPT as the run's flags say.

    It is ``None`` if it can, and for runs of other schedules or models.
    """
    p, chunks, layers = run.parallelism.pp, run.parallelism.chunks or 1, run.model.layers
    if run.schedule.name != STOCK or run.model.pattern is not None or run_layout.pieces_of(run, p * chunks) is not None:
        return None
    flags = " and ".join(f"--{flag}" for flag in layout.FLAGS if cut_flags.is_given(run.flags, flag))
    return (
        cut_flags.why_not_even(run.flags, layers, p, chunks) or f"{flags} cannot divide {layers} layers among {p} ranks"
    )


def _best(
    today: Way, stock: Way | None, needless: Way | None, proposals: Mapping[str, Way], memory: float
) -> Way | None:
    """Return the fastest schedule that fits with room, or of equally fast ones the one that changes least.

    A run that needs more memory than devices have takes the fastest one that fits, and otherwise the fastest in its own
    memory. A run near the limit of its memory that has no faster schedule takes one that is as fast in less memory.
    ``None`` means that the run should stay as it is. ``memory`` is the memory of a device in bytes.
    """
    room = memory * (1 - ROOM)
    rows = [way for way in (stock, needless, *proposals.values()) if way is not None]
    if today.peak > memory and (fitting := [way for way in rows if way.peak <= room]):
        return min(fitting, key=_BY_SECONDS)
    limit = max(room, today.peak * (1 + SAME_MEMORY))
    faster = [way for way in rows if way.peak <= limit and way.gain(today) >= WORTH_A_ROW]
    if all(way.gain(today) < AS_FAST for way in faster):
        return proposals.get(SMALLER)
    return first_as_fast(faster, today)


def _gains_without_overlap(run: Run, ways: Sequence[Way], slowdown: MeasuredSlowdown | None) -> bool:
    """Return whether one of ``ways`` is faster, in the same memory, than the run with its overlap within layers off."""
    bare = _as_it_stands(without_overlap(run), slowdown)
    return any(way.gain(bare) >= AS_FAST and way.peak <= bare.peak * (1 + SAME_MEMORY) for way in ways)


_BY_SECONDS, _BY_PEAK = attrgetter("seconds"), attrgetter("peak")


def _proposals(
    today: Way,
    ways: Mapping[str, Sequence[Way]],
    memory: float,
    refused: dict[str, tuple[str, list[str]]],
) -> Iterator[tuple[str, Way]]:
    """Yield kind and schedule for the best of every kind that is faster than the run and earlier kinds, or smaller.

    ``ways`` are those of ``_candidates``, by kind. ``memory`` is the memory of a device in bytes. ``refused`` is extended by
    the refusals of better schedules (``_first``).
    """
    whole, most, room = ways["whole"], today.peak * (1 + SAME_MEMORY), memory * (1 - ROOM)
    same, short = ([way for way in ways[kind] if way.peak <= most] for kind in ("whole", "sliced"))
    together = [way for way in ways[PAIRED] if way.peak <= max(room, most)]
    every = [*whole, *ways["bare"], *ways["sliced"]]
    # Of a run that does not fit by its prices, devices may have more memory than they say, but hardly for all of it.
    more = [*whole, *ways["sliced"]] if today.peak > memory else [way for way in every if way.peak <= room]
    fast = [
        way
        for way in whole
        if way.seconds <= today.seconds * (1 + AS_FAST) and way.peak < today.peak * (1 - SAME_MEMORY)
    ]
    # A run with room needs no more of it.
    smaller = (SMALLER, fast if today.peak > room else [], _BY_PEAK)
    if today.peak > memory:
        smaller = ("fits", [way for way in every if way.peak <= room], _BY_SECONDS)
    chunked, cut = ("same memory, chunks", same, _BY_SECONDS), ("same memory, slices", short, _BY_SECONDS)
    fastest, proposed = today.seconds, []
    for kind, fitting, key in (
        ("same memory", [way for way in same if way.step.placement.num_chunks == 1], _BY_SECONDS),
        chunked,
        cut,
        (CUT, [way for way in ways[CUT] if way.peak <= max(room, most)], _BY_SECONDS),
        (PAIRED, together, _BY_SECONDS),
        ("more memory", more, _BY_SECONDS),
        smaller,
    ):
        # That slices, pairs or a cut vocabulary are refused, a user who has not asked for them need not know.
        way = _first(fitting, key, {} if kind in (cut[0], CUT, PAIRED, "more memory") else refused)
        recomputes = way is not None and way.run.schedule.recompute == today.run.schedule.recompute
        if way is None or (way.order in proposed and way.units.are_whole and kind not in (CUT, PAIRED) and recomputes):
            continue
        if kind == smaller[0] or way.seconds < fastest - AS_FAST * today.seconds:
            fastest = min(fastest, way.seconds)
            proposed.append(way.order)
            yield kind, way


def _first(ways: Sequence[Way], key: Callable[[Way], float], refused: dict[str, tuple[str, list[str]]]) -> Way | None:
    """Return the way with the lowest ``key`` that is not refused; ``None`` if all are.

    The refusals of our schedules with a lower ``key`` are added to ``refused``: by code, the message and the names.
    """
    for way in sorted(ways, key=key):
        error = refusal_of(way)
        if error is None:
            return way
        if not way.is_stock:
            names = refused.setdefault(error.code, (str(error), []))[1]
            names += [] if way.name in names else [way.name]
    return None


def changed_flags(today: Run, other: Run) -> tuple[Flags, Flags]:
    """Return the flags to add to the command of ``today``, and those to remove, to get the run ``other``."""
    before, after = all_flags(today), all_flags(other)
    added = {
        name: value
        for name, value in after.items()
        if before.get(name) != value and not name.startswith("pipemem-report")
    }
    gone = {
        name: value for name, value in before.items() if name not in after or (after[name] in (None, False) and value)
    }
    return added, gone
