"""Write layers per stage in Megatron's words: ``--pipeline-model-parallel-layout "Et*3|(t*4|)*6t*3L"``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from megatron_pipemem.config.runs import Run

FLAG = "pipeline-model-parallel-layout"
FIRST_OR_LAST = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
FLAGS = (FLAG, *FIRST_OR_LAST)


def even(layers: int, stages: int) -> tuple[int, ...] | None:
    """Return the same number of layers for every stage, which needs no flag; ``None`` where they do not divide."""
    return None if layers % stages else (layers // stages,) * stages


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Share layers out as evenly as it goes: what is left over goes to the stages behind the first, which has the
    embedding.
    """
    return tuple(layers // stages + (0 < stage <= layers % stages) for stage in range(stages))


def stages_of(text: str) -> int:
    """Return the stages of a layout in Megatron's words."""
    return len(_read(text))


def written(counts: Sequence[int]) -> str:
    """Write a layout with the embedding before the first stage's layers and the loss behind the last one's."""
    first, *others = (f"t*{count}" if count > 1 else "t" * count for count in counts)
    if not others:
        return f"E{first}L"
    text = f"E{first}|"
    for stage, equal in groupby(others[:-1]):
        times = len(list(equal))
        text += f"({stage}|)*{times}" if times > 1 else f"{stage}|"
    return f"{text}{others[-1]}L"


def layers_of(run: Run, stages: int) -> tuple[int, ...] | None:
    """Return the layers of every stage: what a run says of its cut, or an even one; ``None`` where only Megatron can
    tell.
    """
    flags = run.flags
    if any(flags.get(key) is not None for key in FIRST_OR_LAST):
        return None
    if flags.get(FLAG) is None:
        return even(run.model.layers, stages)
    counts = _read(str(flags[FLAG]))
    return counts if len(counts) == stages and sum(counts) == run.model.layers else None


def _read(text: str) -> tuple[int, ...]:
    for repeated in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z|])\*(\d+)"):
        while re.search(repeated, text):
            text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return tuple(stage.count("t") for stage in re.sub(r"[(),\s]", "", text).split("|"))
