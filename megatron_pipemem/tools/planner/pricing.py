"""Predict ways of one run with its parallel sizes: as it stands, and under other families, chunks and layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.model.counts import early_modules
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.balance import as_cut, balance
from megatron_pipemem.tools.planner.early_weights import moves_weights, with_early_head
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.replay import Order, Replay, Timing, measured
from megatron_pipemem.tools.planner.replay import priced as extended
from megatron_pipemem.tools.planner.slices import step_of
from megatron_pipemem.tools.planner.space import Limits, orders, why_not_in_chunks
from megatron_pipemem.tools.planner.variants import IN_PAIRS, PLAIN, built
from megatron_pipemem.tools.planner.ways import Way

STOCKS = ("1f1b", "interleaved")
"""Megatron's own schedules."""


def as_it_stands(run: Run, pace: MeasuredSlowdown | None = None) -> Way:
    """Predict a run with its present schedule and its present layers per stage.

    ``auto`` stands for the order that a short search finds. Raise an UnsupportedError if Megatron's own schedule does not
    go with the run's ranks, chunks, layers or flags.
    """
    chunks = run.parallelism.chunks
    name = run.schedule.name if run.schedule.name != STOCK else "1f1b" if (chunks or 1) == 1 else "interleaved"
    order = Order(name, chunks)
    placements = orders(run, Limits({"schedule": [name], **({"chunks": [chunks]} if chunks else {})}), Counter())
    placement = next((candidate for candidate, listed in placements.items() if order in listed), None)
    if placement is None and run.schedule.name == STOCK:
        raise UnsupportedError(
            "does-not-fit",
            f"the run's schedule {name} does not go with its {run.parallelism.pp} pipeline ranks, {chunks or 1} chunks "
            "per rank, layers or flags for overlap; correct the one that is wrong",
        )
    if placement is None:  # no family, or one whose passes are not those of whole microbatches
        return as_cut(run, order, partial(run_layout.layers_of, run), pace)
    layers = run_layout.layers_of(run, placement)
    return priced(run, order, placement, layers, pace, inf)


def priced_with(run: Run, name: str, pace: MeasuredSlowdown | None) -> Iterator[Way]:
    """Yield a run under the family ``name``, for every number of chunks with its best layout.

    Where I may compute the head's weight gradient to free memory, that follows. ``pace`` is as in ``priced``. Numbers of
    chunks with which the schedule cannot run the model or the microbatches are skipped.
    """
    is_stock = name in STOCKS
    if is_stock and (run.schedule.slices or 1) > 1:
        return
    choice = replace(run.schedule, name=STOCK if is_stock else name)
    if choice.name != run.schedule.name:
        choice = replace(choice, options={})
    base, memory = replace(run, schedule=choice), run.cluster.memory_bytes
    for placement, candidates in orders(base, Limits({"schedule": [name]}), Counter()).items():
        for order in candidates:
            chunked = (order.chunks or 1) > 1
            if is_stock and chunked and why_not_in_chunks(run) is not None:
                continue
            # Without this package, Megatron-Bridge cannot build a Qwen3-VL in several chunks per rank.
            if is_stock and chunked and run.model.least_first:
                continue
            cut = replace(base.parallelism, chunks=order.chunks)
            way = priced(replace(base, parallelism=cut), order, placement, None, pace, memory)
            if is_stock and 0 in way.step.layers[1:-1]:  # Megatron's own schedule may hang at an empty middle stage
                layers = balance(way.run, pace=pace).best.layers
                way = priced(run_layout.with_cut(way.run, layers), order, placement, layers, pace, memory)
            yield way
            if (early := _with_early_head(way)) is not None:
                yield priced(early, order, placement, way.step.layers, pace, memory)


def _with_early_head(way: Way) -> Run | None:
    """Return the run of a way, changed so that I computes the head's weight gradient, if that may free memory.

    It may if the backward is split and the device of the head is the fullest. Otherwise the result is ``None``.
    """
    fullest = max(range(len(way.peaks)), key=way.peaks.__getitem__)
    has_head = way.step.placement.devices[-1] == fullest
    early = early_modules(way.run.model, way.run.execution)
    if way.is_stock or not (family(way.order.name).splits_backward and has_head) or "head" in early:
        return None
    return with_early_head(way.run)


def priced(
    run: Run,
    order: Order,
    placement: Placement,
    layers: tuple[int, ...] | None,
    pace: MeasuredSlowdown | None,
    memory: float,
) -> Way:
    """Predict a run under the family of ``order``.

    ``layers`` has the pieces of every stage, by default from the planner's partition. ``pace`` has the ratios of measured
    to predicted seconds. Pairs keep the step within ``memory``, the bytes of a device.
    """
    cut = run.parallelism
    step = step_of(run, placement, layers, pace)
    if run.pairs:
        step = step.in_pairs()

    variant = IN_PAIRS if run.pairs else None

    def timing(count: int) -> Timing:
        return Replay(built(run, order, step, step.room(memory), variant, count)).timing(step.costs)

    if run.pairs:
        order_price = extended(timing, cut.pp, cut.microbatches)
    elif (run.schedule.slices or 1) == 1:
        passes = (order.name, cut.pp, cut.microbatches, order.chunks, step.costs)
        order_price = measured(*passes, moves_weights=moves_weights(run))
    else:
        order_price = timing(cut.microbatches).price
    if layers is None:
        run = run_layout.with_cut(run, step.layers)
    return Way.of(run, order, step, order_price, variant=variant.name if variant else PLAIN)
