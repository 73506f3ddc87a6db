"""The layers of every stage of a run, by its flags or by the layout that this package adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_pipemem.model.cut_flags import counts_of_ends, is_given, needed_layout
from megatron_pipemem.model.layout import (
    ACCOUNTED,
    FIRST_OR_LAST,
    FLAG,
    FLAGS,
    PATTERN,
    flags,
    is_cut,
    pattern_layers,
    read,
    segments,
    uncut,
)
from megatron_pipemem.schedule.options import STOCK
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.values import whole_number


def with_cut(run: Run, counts: Sequence[int]) -> Run:
    """Return the run with flags that cut its model into stages with these numbers of pieces (``Model.pieces``).

    Earlier flags for the cut are removed.
    """
    others = {name: value for name, value in run.flags.items() if name not in (*FLAGS, *ACCOUNTED, PATTERN)}
    return replace(run, flags=others | flags(run.model, counts))


def pieces_of(run: Run, stages: int) -> tuple[int, ...] | None:
    """Return the number of pieces of each stage of a run, by its flags or in the default cut.

    The result is ``None`` if flags give other numbers of stages or pieces, or the layers of the first or last rank in
    another placement than Megatron's. It is also ``None`` if the layers do not divide evenly.
    """
    flag_values, model = run.flags, run.model
    if any(flag_values.get(key) not in (None, False) for key in (*FIRST_OR_LAST, *ACCOUNTED)):
        counts = _of_ranks(run, stages)
        return None if counts is None else (*counts[:-1], counts[-1] + model.pieces - model.layers)
    if is_cut(str(flag_values.get(PATTERN, ""))):
        counts = tuple(len(pattern_layers(segment)) for segment in segments(str(flag_values[PATTERN])))
    elif flag_values.get(FLAG) is not None:
        counts = read(str(flag_values[FLAG]))
    else:
        return uncut(model, stages)
    return counts if len(counts) == stages and sum(counts) == model.pieces else None


def _of_ranks(run: Run, stages: int) -> tuple[int, ...] | None:
    """Return the layers of every stage by the flags for the first and last rank, or for embedding and loss.

    The result is ``None`` if Megatron cannot cut the model by these flags, or another placement has several chunks.
    """
    p, flag_values = run.parallelism.pp, run.flags
    chunks = stages // p
    if run.schedule.name != STOCK and chunks > 1:
        return None
    embedding, loss = (bool(flag_values.get(key)) for key in ACCOUNTED)
    left, others = run.model.layers + embedding + loss, p
    of_rank: dict[int, int] = {}
    for rank, name in zip((0, p - 1), FIRST_OR_LAST, strict=True):
        if (count := whole_number(flag_values.get(name), name)) is not None:
            of_rank[rank] = count
            left, others = left - count, others - 1
    per_stage, remainder = divmod(left, others * chunks) if others else (0, left)
    if remainder or any(count % chunks for count in of_rank.values()):
        return None
    counts = [of_rank[stage % p] // chunks if stage % p in of_rank else per_stage for stage in range(stages)]
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def layers_of(run: Run, placement: Placement) -> tuple[int, ...] | None:
    """Return the number of layers of every stage, by a run's flags or by the layout that this package adds to them.

    Multi-token prediction counts as one more layer. The result is ``None`` if the layers are unknown.
    """
    counts = pieces_of(run, placement.model_stages)
    if counts is not None or run.schedule.name == STOCK:
        return counts
    if any(is_given(run.flags, name) for name in FIRST_OR_LAST):
        *others, last = counts_of_ends(run.flags, run.model.layers, placement)
        return (*others, last + run.model.pieces - run.model.layers)
    if run.model.pattern is not None:
        return None
    needed = needed_layout(run.flags, run.model.layers, placement.num_devices, placement)
    return None if needed is None else read(needed.text)
