"""Predict ways of one run with its parallel sizes: as it stands, and under other families, chunks and layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.model.counts import early_modules
from megatron_pipemem.schedule.options import AUTO, OFF, STOCK, VocabularyCut
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import family
from megatron_pipemem.tools.config import run_layout
from megatron_pipemem.tools.config.runs import RECOMPUTE_FLAG, Run, ScheduleChoice
from megatron_pipemem.tools.planner.balance import balance
from megatron_pipemem.tools.planner.early_wgrad import with_early_head
from megatron_pipemem.tools.planner.prices import MeasuredSlowdown
from megatron_pipemem.tools.planner.replay import Order
from megatron_pipemem.tools.planner.run_prices import RunPrices, priced, request_of
from megatron_pipemem.tools.planner.space import Limits, orders, why_not_in_chunks
from megatron_pipemem.tools.planner.variants import HOST_MEMORY, PLAIN
from megatron_pipemem.tools.planner.ways import Way

STOCKS = ("1f1b", "interleaved")
"""Megatron's own schedules."""
_RECOMPUTE = (
    "recompute",
    "recompute_modules",
    "recompute_method",
    "recompute_num_layers",
    "early_wgrad",
    "wgrad_inputs",
)
"""The settings of a run's schedule that Megatron's own schedules keep."""


def as_it_stands(run: Run, slowdown: MeasuredSlowdown | None = None) -> Way:
    """Predict a run with its present schedule and its present layers per stage.

    ``auto`` stands for the order that a short search finds. Raise an UnsupportedError if Megatron's own schedule does not
    go with the run's ranks, chunks, layers or flags.
    """
    chunks = run.parallelism.chunks
    name = run.schedule.name if run.schedule.name != STOCK else "1f1b" if (chunks or 1) == 1 else "interleaved"
    order = Order(name, chunks)
    placements = orders(run, Limits({"schedule": [name], **({"chunks": [chunks]} if chunks else {})}), Counter())
    if run.schedule.name == STOCK and not any(order in listed for listed in placements.values()):
        raise UnsupportedError(
            "does-not-fit",
            f"Megatron's own {name} cannot run on {run.parallelism.pp} pipeline ranks with {chunks or 1} chunks each, "
            f"{run.model.layers} layers and the run's flags for overlap; change one of these",
        )

    way = priced(run, slowdown, partial(run_layout.layers_of, run))
    is_known = run_layout.layers_of(run, way.step.placement) is not None
    return way if is_known or run.schedule.name == AUTO else _cut_as_priced(way)


Layouts = dict[Order, tuple[int, ...]]
"""The searched layers per stage, by order."""


def priced_with(
    run: Run, name: str, slowdown: MeasuredSlowdown | None, layouts: Layouts | None = None
) -> Iterator[Way]:
    """Yield a run under the family ``name``, for every number of chunks with its best layout.

    Where I may compute the head's weight gradient to free memory, that follows. ``slowdown`` has the ratios of measured to
    predicted seconds. Numbers of chunks with which the schedule cannot run the model or the microbatches are skipped, and
    so are families that cannot have what the run adds. Megatron's own schedules run without what this package adds.
    ``layouts`` is extended by the layouts that are searched. Runs that share it share their layouts, such as a run with
    pairs and the run without, whose layouts take far less time to compare.
    """
    layouts = {} if layouts is None else layouts
    is_stock = name in STOCKS
    if is_stock and not run.units.are_whole:
        return
    base = _of_stock(run) if is_stock else replace(run, schedule=replace(run.schedule, name=name))
    if base.schedule.name != run.schedule.name:
        base = replace(base, schedule=replace(base.schedule, options={}))
    memory = run.cluster.memory_bytes
    for candidates in orders(base, Limits({"schedule": [name]}), Counter()).values():
        for order in candidates:
            if is_stock and not _stock_takes_chunks(run, order.chunks):
                continue
            own = replace(base, parallelism=replace(base.parallelism, chunks=order.chunks))
            try:
                layers = RunPrices(own, request_of(own), slowdown).step().layers if is_stock else None
                # Megatron's own schedule may hang at an empty middle stage. No pieces move from the best start, because
                # other numbers of chunks are faster (all but one of 19 public scripts, and in that one too nothing moves).
                if layers is not None and 0 in layers[1:-1]:
                    if order not in layouts:
                        cut = run_layout.with_cut(own, layers)
                        layouts[order] = balance(cut, slowdown=slowdown, trials=0).best.layers
                    layers = layouts[order]
                way = _cut_as_priced(priced(own, slowdown, _always(layers), memory))
            except (ScheduleError, UnsupportedError):
                continue
            yield way
            if (early := _with_early_head(way)) is not None:
                yield priced(early, slowdown, _always(way.layers), memory)


def is_stocks_order(way: Way) -> bool:
    """Return whether a way has one of Megatron's own orders, so that ``stock`` runs it as well as this package."""
    added = way.variant != PLAIN or not way.units.are_whole or way.run.pairs or way.run.schedule.overlap_steps
    return (
        way.order.name in STOCKS
        and not added
        and 0 not in way.layers[1:-1]
        and _stock_takes_chunks(way.run, way.order.chunks)
    )


def _stock_takes_chunks(run: Run, chunks: int | None) -> bool:
    """Return whether Megatron's own schedule runs this number of chunks per rank."""
    # Without this package, Megatron-Bridge cannot build a Qwen3-VL in several chunks per rank.
    return (chunks or 1) == 1 or (why_not_in_chunks(run) is None and not run.model.least_first)


def with_cut_vocabulary(way: Way, algorithm: VocabularyCut, slowdown: MeasuredSlowdown | None) -> Way | None:
    """Return a way with embedding and head cut over the pipeline, in its best layout; ``None`` if it cannot have that."""
    run = replace(way.run, schedule=replace(way.run.schedule, vocab_cut=algorithm))
    try:
        return _cut_as_priced(priced(run, slowdown))
    except (ScheduleError, UnsupportedError):
        return None


def _always(layers: tuple[int, ...] | None) -> Callable[[Placement], tuple[int, ...] | None]:
    """Return a function that gives these layers per stage for every placement."""
    return lambda placement: layers


def _cut_as_priced(way: Way) -> Way:
    """Return the way with flags that cut the run's model into the priced layers per stage."""
    return replace(way, run=run_layout.with_cut(way.run, way.layers))


def _of_stock(run: Run) -> Run:
    """Return the run under Megatron's own schedule, without what only schedules of this package can add."""
    kept = {key: getattr(run.schedule, key) for key in _RECOMPUTE}
    flags = {flag: value for flag, value in run.flags.items() if flag not in (RECOMPUTE_FLAG, HOST_MEMORY)}
    return replace(run, schedule=ScheduleChoice(**kept), flags=flags)


def _with_early_head(way: Way) -> Run | None:
    """Return the run of a way, changed so that I computes the head's weight gradient, if that may free memory.

    It may if the backward is split and the device of an uncut head is the fullest. Otherwise the result is ``None``.
    """
    fullest = max(range(len(way.peak_bytes)), key=way.peak_bytes.__getitem__)
    has_head = way.step.placement.devices[-1] == fullest
    early = early_modules(way.run.model, way.run.execution)
    is_whole = way.run.schedule.vocab_cut == OFF  # otherwise the schedule has passes for the head
    if way.is_stock or not (family(way.order.name).splits_backward and has_head and is_whole) or "head" in early:
        return None
    return with_early_head(way.run)
