"""Write layers per stage in Megatron's words: ``--pipeline-model-parallel-layout "Et*3|(t*4|)*6t*3mL"``, or the pattern of a
hybrid model, ``--hybrid-layer-pattern "M-|*-"``.

What stages share out are a model's *pieces*: its layers and, in a GPT, multi-token prediction as one more behind them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from megatron_pipemem.config.model import Model, Sublayer
from megatron_pipemem.config.runs import Run

PATTERN_FLAGS = ("hybrid-layer-pattern", "hybrid-override-pattern")
SEGMENTS, FURTHER = "|", "/"


def segments(pattern: str) -> list[str]:
    """Return the symbols of the layers of every stage, without what predicts further tokens."""
    return pattern.split(FURTHER)[0].split(SEGMENTS)


def pattern_layers(pattern: str) -> str:
    """Return the symbols of a pattern's layers, without what predicts further tokens."""
    return "".join(segments(pattern))


def is_cut(pattern: str) -> bool:
    """Return whether a pattern says where its stages end."""
    return len(segments(pattern)) > 1


def needed_layers(pattern: str, flags: Mapping[str, object]) -> list[bool]:
    """Return of which layers every rank needs one: those with experts, where Megatron logs their losses. It waits for ever
    where a rank has none.

    Args:
        pattern: of the model, cut or not.
        flags: of the training script, without dashes.
    """
    balanced = "aux_loss" in str(flags.get("moe-router-load-balancing-type", "aux_loss"))
    logged = balanced or flags.get("moe-z-loss-coeff") not in (None, False)
    return [logged and symbol == Sublayer.EXPERTS for symbol in pattern_layers(pattern)]


def cut(pattern: str, counts: Sequence[int]) -> str:
    """Return a pattern that is cut into stages.

    Args:
        pattern: without ``|``.
        counts: layers of every stage.
    """
    layers, slash, further = pattern.partition(FURTHER)
    ends = list(accumulate(counts, initial=0))
    return SEGMENTS.join(layers[begin:end] for begin, end in pairwise(ends)) + slash + further


FLAG = "pipeline-model-parallel-layout"
PATTERN = PATTERN_FLAGS[0]
FIRST_OR_LAST = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
FLAGS = (FLAG, *FIRST_OR_LAST)


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Share layers out as evenly as it goes: what is left over goes to the stages behind the first, which has the
    embedding.
    """
    return tuple(layers // stages + (0 < stage <= layers % stages) for stage in range(stages))


def uncut(model: Model, stages: int) -> tuple[int, ...] | None:
    """Return the pieces of every stage where no flag says them: layers evenly, multi-token prediction on the last; ``None``
    where the layers do not divide.
    """
    return None if model.layers % stages else even(model, stages)


def even(model: Model, stages: int) -> tuple[int, ...]:
    """Return the pieces of every stage where layers are shared out evenly, or nearly so where they do not divide, and
    multi-token prediction is on the last.
    """
    *others, last = spread(model.layers, stages)
    return (*others, last + model.pieces - model.layers)


def flags(model: Model, counts: Sequence[int]) -> dict[str, str]:
    """Return the flags that cut a model so; none where it is cut so without any.

    Args:
        model: its shape.
        counts: pieces of every stage.
    """
    pattern = pattern_of(model)
    if len(counts) == 1 or (pattern is None and tuple(counts) == uncut(model, len(counts))):
        return {}
    if pattern is None:
        return {FLAG: written(counts, model.mtp_layers)}
    return {PATTERN: cut(pattern, counts)}


def with_cut(run: Run, counts: Sequence[int]) -> Run:
    """Return the run with its model cut so, whatever its flags said of that.

    Args:
        run: whose flags are replaced.
        counts: pieces of every stage.
    """
    others = {key: value for key, value in run.megatron.items() if key.replace("_", "-") not in (*FLAGS, PATTERN)}
    return replace(run, megatron=others | flags(run.model, counts))


def pattern_of(model: Model) -> str | None:
    """Return a hybrid model's layers in Megatron's words, those of multi-token prediction behind slashes."""
    further = [model.mtp_pattern or ""] * model.mtp_layers
    return model.pattern and FURTHER.join((model.pattern, *further))


def written(counts: Sequence[int], mtp_layers: int = 0) -> str:
    """Write a layout with the embedding before the first stage's layers and the loss behind the last one's.

    Args:
        counts: pieces of every stage.
        mtp_layers: what the last piece stands for, where it is multi-token prediction.
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
    """Return what every stage holds, in Megatron's words.

    Args:
        model: its shape.
        counts: pieces of every stage.
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


def pieces_of(run: Run, stages: int) -> tuple[int, ...] | None:
    """Return the pieces of every stage: what a run says of its cut, or an even one; ``None`` where only Megatron can
    tell.
    """
    given, model = run.flags, run.model
    if any(given.get(key) is not None for key in FIRST_OR_LAST):
        return None
    if is_cut(str(given.get(PATTERN, ""))):
        counts = tuple(map(len, segments(str(given[PATTERN]))))
    elif given.get(FLAG) is not None:
        counts = read(str(given[FLAG]))
    else:
        return uncut(model, stages)
    return counts if len(counts) == stages and sum(counts) == model.pieces else None


def read(text: str) -> tuple[int, ...]:
    """Return the pieces of every stage of a layout in Megatron's words."""
    for repeated in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z|])\*(\d+)"):
        while re.search(repeated, text):
            text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return tuple(stage.count("t") + ("m" in stage) for stage in re.sub(r"[(),\s]", "", text).split("|"))
