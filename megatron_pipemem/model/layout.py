"""Write and read, in Megatron's notation, which layers each pipeline stage has.

A GPT has ``--pipeline-model-parallel-layout "Et*3|(t*4|)*6t*3mL"``. A hybrid model has ``--hybrid-layer-pattern
"M-|*-"``: a symbol for each layer, ``|`` between stages, and the blocks of multi-token prediction after ``/``.

The *pieces* of a model are its layers and, in a GPT, multi-token prediction as one more piece at the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.model.expressions import check_size, listed, unrolled
from megatron_pipemem.model.model import PATTERN_ITEM, Model, Sublayer, without_groups
from megatron_pipemem.values import MOST_LAYERS

FLAG = "pipeline-model-parallel-layout"
PATTERN_FLAGS = ("hybrid-layer-pattern", "hybrid-override-pattern")
PATTERN = PATTERN_FLAGS[0]
PATTERN_ARGUMENT, EARLIER_PATTERN_ARGUMENT = (flag.replace("-", "_") for flag in PATTERN_FLAGS)
FIRST_OR_LAST = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
FLAGS = (FLAG, *FIRST_OR_LAST)
ACCOUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
"""Flags that count embedding and loss as a layer each."""
LIST_FLAGS = ("moe-layer-freq", "linear-attention-freq", "no-rope-freq", "window-attn-skip-freq")
"""Flags that take a number or a list with one entry per layer."""
SEGMENTS, FURTHER = "|", "/"


def segments(pattern: str) -> list[str]:
    """Return the layers of each stage of a hybrid pattern: ``M-|*-/E`` gives ``["M-", "*-"]``.

    Multi-token prediction, after ``/``, is left out.
    """
    return pattern.split(FURTHER)[0].split(SEGMENTS)


def pattern_layers(pattern: str) -> str:
    """Return all layers of a hybrid pattern, without multi-token prediction: ``M-|[*-]/E`` gives ``M-*-``."""
    return without_groups("".join(segments(pattern)))


def without_cuts(pattern: str) -> str:
    """Return a hybrid pattern without stages, with multi-token prediction: ``M-|[*-]/E`` gives ``M-[*-]/E``."""
    return pattern.replace(SEGMENTS, "")


def is_cut(pattern: str) -> bool:
    """Return whether a hybrid pattern says where stages begin."""
    return len(segments(pattern)) > 1


def needed_layers(pattern: str, flags: Mapping[str, object]) -> list[bool]:
    """Return, for each layer of a hybrid pattern, whether every rank needs at least one layer of this kind.

    These are layers with experts, if Megatron logs their losses. It then hangs if a rank has no such layer.
    """
    balanced = "aux_loss" in str(flags.get("moe-router-load-balancing-type", "aux_loss"))
    logged = balanced or flags.get("moe-z-loss-coeff") not in (None, False)
    return [logged and symbol == Sublayer.EXPERTS for symbol in pattern_layers(pattern)]


def cut(pattern: str, counts: Sequence[int]) -> str:
    """Return a hybrid pattern with ``|`` between its stages, which have these numbers of layers.

    ``pattern`` has no ``|`` yet: ``cut("M*-M", (1, 3))`` is ``"M|*-M"``. Multi-token prediction, from the first ``/`` on,
    stays at the end. Raise an UnsupportedError if a stage would end within a group of layers (``[*E]``).
    """
    layers, slash, further = pattern.partition(FURTHER)
    items = PATTERN_ITEM.findall(layers)
    ends = [0, *accumulate(len(pattern_layers(item)) for item in items)]
    try:
        places = [ends.index(end) for end in accumulate(counts, initial=0)]
    except ValueError:
        raise UnsupportedError(
            "bad-layout",
            f"stages of {', '.join(map(str, counts))} layers end within a group of {layers}; give numbers with which every "
            "group is whole on a stage",
        ) from None
    return SEGMENTS.join("".join(items[begin:end]) for begin, end in pairwise(places)) + slash + further


def pattern_of(model: Model) -> str | None:
    """Return the pattern of a hybrid model, with its multi-token prediction, or ``None`` for a GPT."""
    further = [model.mtp_pattern or ""] * model.mtp_layers
    return model.pattern and FURTHER.join((model.pattern, *further))


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, as even as possible.

    The first stage, which also has the embedding, gets none of the layers that remain after an equal split.
    """
    return tuple(layers // stages + (0 < stage <= layers % stages) for stage in range(stages))


def even(model: Model, stages: int) -> tuple[int, ...]:
    """Return the number of pieces of each stage, as even as possible, with prediction ahead on the last stage.

    The first stage has the layers to which a vision tower adds.
    """
    counts = spread(model.layers, stages)
    if counts[0] < model.least_first:
        counts = (model.least_first, *spread(model.layers - model.least_first, stages - 1))
    *others, last = counts
    return (*others, last + model.pieces - model.layers)


def uncut(model: Model, stages: int) -> tuple[int, ...] | None:
    """Return the number of pieces of each stage in Megatron's default cut; ``None`` if layers do not divide evenly.

    The default cut gives every stage the same number of layers.
    """
    return None if model.layers % stages else even(model, stages)


def flags(model: Model, counts: Sequence[int]) -> dict[str, str]:
    """Return the flags that make Megatron cut a model into stages with these numbers of pieces.

    There are none for one stage, and for a GPT if Megatron's default cut is the same.
    """
    pattern = pattern_of(model)
    if len(counts) == 1 or (pattern is None and tuple(counts) == uncut(model, len(counts))):
        return {}
    if pattern is None:
        return {FLAG: written(counts, model.mtp_layers)}
    return {PATTERN: cut(pattern, counts)}


def written(counts: Sequence[int], mtp_layers: int = 0) -> str:
    """Return these numbers of pieces per stage as a layout in Megatron's notation, with embedding and loss at its ends.

    With ``mtp_layers``, the last piece is multi-token prediction.
    """
    first, *others = _stages(counts, mtp_layers)
    if not others:
        return first
    text = f"{first}|"
    for stage, equal in groupby(others[:-1]):
        times = len(list(equal))
        text += f"({stage}|)*{times}" if times > 1 else f"{stage}|"
    return text + others[-1]


def stages_of(model: Model, counts: Sequence[int]) -> list[str]:
    """Return the layers of each stage in Megatron's notation, for example ``["Et*2", "t*2", "tL"]``.

    The stages of a hybrid model are pieces of its pattern, for example ``["M*-", "M*-/M*"]``.
    """
    pattern = pattern_of(model)
    return _stages(counts, model.mtp_layers) if pattern is None else cut(pattern, counts).split(SEGMENTS)


def _stages(counts: Sequence[int], mtp_layers: int) -> list[str]:
    texts = [_repeated("t", count) for count in counts]
    if mtp_layers:
        last = max(stage for stage, count in enumerate(counts) if count)
        texts[last] = _repeated("t", counts[last] - 1) + _repeated("m", mtp_layers)
    texts[0] = f"E{texts[0]}"
    texts[-1] += "L"
    return texts


def _repeated(symbol: str, count: int) -> str:
    return f"{symbol}*{count}" if count > 1 else symbol * count


def read(text: str) -> tuple[int, ...]:
    """Return the number of pieces of each stage of a layout in Megatron's notation.

    Raise a ConfigError for a layout that is too long.
    """
    stages = re.sub(r"[(),\s]", "", unrolled(text, f"--{FLAG}")).split("|")
    return tuple(stage.count("t") + ("m" in stage) for stage in stages)


def check_length(flag: str, value: str) -> None:
    """Raise a ConfigError if a flag's value is, or Megatron expands it to, a list, layout or pattern that is too long.

    ``flag`` has no leading dashes. Megatron evaluates values of ``LIST_FLAGS`` that have a bracket.
    """
    if flag in LIST_FLAGS and "[" in value:
        listed(value, f"--{flag}")
    elif flag == FLAG:
        unrolled(value, f"--{flag}")
    elif flag in PATTERN_FLAGS:
        check_size(f"{MOST_LAYERS:,} layers", len(pattern_layers(value)) > MOST_LAYERS, value, f"--{flag}")
