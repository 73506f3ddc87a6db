"""Read what users type about schedules and searches, wherever they do: names, choices, options."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.placement import Placement

STOCK: Final = "stock"
AUTO: Final = "auto"
"""Users name these in the place of a family: Megatron's own schedule, and a search."""
OFF: Final = "off"
Offload = Literal["off", "half", "full", "auto"]
OFFLOAD: tuple[Offload, ...] = get_args(Offload)
"""Which activations wait on the host: none, the longer-lived half of every device's, all, as many as it takes."""
RECOMPUTE = ("none", "selective", "full", AUTO)
"""What forwards run again: nothing, what is cheap of every stage, all of it, whatever of them a memory cap needs."""
VocabularyCut = Literal["off", "1", "2", "auto"]
VOCABULARY: tuple[VocabularyCut, ...] = get_args(VocabularyCut)
"""How the vocabulary is cut over the pipeline: not, by an algorithm of arXiv 2411.05288, by whatever suits the model."""
LAYERWISE: Final = "layerwise"
RandomStreams = Literal["stock", "layerwise"]
RANDOM: tuple[RandomStreams, ...] = get_args(RandomStreams)
"""What first weights and dropout depend on: as in Megatron on the rank and the order of its forwards, or on the layer."""
MESSAGE_SHAPES = ("step", "message")
"""How ranks learn shapes that differ: all of a step at its start, or each from a header before its message."""
SHARDED: Final = "sharded"
GATHERED: Final = "gathered"
WeightInputs = Literal["auto", "sharded", "gathered"]
WEIGHT_INPUTS: tuple[WeightInputs, ...] = get_args(WeightInputs)
"""What waits for W of a tensor that sequence parallelism gathers: this rank's shard, or all of it. ``auto`` keeps shards where
the tensor-parallel ranks are of one node, whose links gather them again while W computes."""
EarlyWeights = Literal["head", "experts_fc1", "experts_fc2"]
EARLY_WEIGHTS: tuple[EarlyWeights, ...] = get_args(EarlyWeights)
"""Modules whose weight gradients may be computed in I: the LM head, and the two matrices of routed experts."""

SliceCut = Literal["tokens", "flops"]
TOKENS, FLOPS = SLICE_CUTS = get_args(SliceCut)
"""By what microbatches are weighed, in the place of a file or a function (in capitals or not), and by what a sequence is cut:
into slices of equally many tokens, or of equal time of F."""

SEARCH_SECONDS = 20.0
"""How long a search for an order takes at most, where nobody says."""


def parse_options(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """Read ``KEY=VALUE`` pairs: values that read as JSON (numbers, true, null) or as a number (``.5``) as such, others as text.

    A ``-`` in a key is ``_``.

    Raises:
        UnsupportedError: a pair lacks ``=``, its key or its value, or a key comes twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not key or not value:
            raise UnsupportedError("bad-syntax", f"{flag} {pair!r}: write KEY=VALUE, as in {flag} chunks=4")
        if key in options:
            raise UnsupportedError("given-twice", f"{flag} {pair!r}: {key} is given twice")
        options[key] = _value(value)
    return options


def early_weights(text: str, hidden: int, expert_width: float) -> frozenset[EarlyWeights]:
    """Return the modules whose weight gradients are computed in I.

    ``auto`` chooses the second matrix of experts that are narrower than the model. Of a token this matrix keeps ``hidden`` +
    ``expert_width`` elements for W, among them a gradient that is as wide as the model and replaces nothing that F kept. Its W
    takes ``hidden`` x ``expert_width`` products. So it keeps more bytes per second of W than a square matrix of the model does.
    An LM head keeps fewer.

    Args:
        text: ``auto``, ``none``, or some of ``EARLY_WEIGHTS`` with commas between.
        hidden: channels of the model.
        expert_width: channels within a routed expert on one rank; 0 without experts.

    Raises:
        UnsupportedError: the text names another module.
    """
    if text == AUTO:
        return frozenset(("experts_fc2",) if 0 < expert_width < hidden else ())
    named = [] if text == "none" else text.split(",")
    if unknown := [each for each in named if each not in EARLY_WEIGHTS]:
        raise UnsupportedError(
            "bad-choice",
            f"early_weights {unknown[0]!r} is none of {', '.join(EARLY_WEIGHTS)}; name some of them with commas between, or "
            "auto or none",
        )
    return frozenset(each for each in EARLY_WEIGHTS if each in named)


def _value(text: str) -> object:
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def check_whole(what: str, value: object, least: int = 1) -> None:
    """Refuse what is no count; ``what`` is its name, for the error's sentence.

    Raises:
        UnsupportedError: it is no whole number, or less than ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UnsupportedError("bad-number", f"{what} must be a whole number of at least {least}, not {value!r}")


def check_effort(seconds: object, effort: object = 1.0, seed: object = 0) -> None:
    """Check what says how long a search tries.

    Raises:
        UnsupportedError: seconds or effort is no number of at least 0, or the seed no whole number.
    """
    for name, value in (("seconds", seconds), ("effort", effort)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise UnsupportedError("bad-number", f"{name} of a search must be a number of at least 0, not {value!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UnsupportedError("bad-number", f"seed of a search must be a whole number, not {seed!r}")


def check_recompute(mode: object) -> None:
    """Raises:
    UnsupportedError: it is none of ``RECOMPUTE``.
    """
    if mode not in RECOMPUTE:
        raise UnsupportedError("bad-choice", f"recompute {mode!r} is none of {', '.join(RECOMPUTE)}")


def slice_counts(given: object) -> tuple[int, ...]:
    """Return the numbers of slices that a search is to try, each once, in order: of one number, a list, or a text as ``1,2,4``.

    Raises:
        UnsupportedError: it is something else, or one of them is less than 1.
    """
    counts: list[object] = [given]
    if isinstance(given, list | tuple):
        counts = list(given)
    elif isinstance(given, str):
        counts = [int(each) if each.strip().isdecimal() else each for each in given.split(",")]
    if not counts:
        raise UnsupportedError("bad-syntax", "slices of a search are none; name some, as in slices=1,2,4,8")
    for each in counts:
        check_whole("slices of a search, as in slices=1,2,4,8,", each)
    return tuple(sorted({each for each in counts if isinstance(each, int)}))


def searched_placements(num_devices: int, kind: Any = None, chunks: Any = None) -> tuple[Placement, ...]:
    """Return the placements that a user leaves to a search; any kind, and two chunks (one if linear), where none is named.

    Raises:
        UnsupportedError: one of them is nothing of the kind, or they do not go together.
    """
    if kind not in (None, "v", "interleaved", "linear"):
        raise UnsupportedError("bad-choice", f"placement {kind!r} of a search is none of v, interleaved, linear")
    if chunks is None:
        chunks = 1 if kind == "linear" else 2
    check_whole("chunks of a search", chunks)
    if kind is not None and (chunks == 1) != (kind == "linear"):
        needed = "1 model chunk" if kind == "linear" else "at least 2 model chunks"
        raise UnsupportedError(
            "needs-chunks",
            f"placement {kind} needs {needed} per pipeline rank, not {chunks}; change the placement, or the chunks (--chunks, "
            "or in a run --num-virtual-stages-per-pipeline-rank)",
        )
    if chunks == 1:
        return (Placement.linear(num_devices),)
    several = {"v": Placement.wave(num_devices, chunks), "interleaved": Placement.interleaved(num_devices, chunks)}
    return tuple(several.values()) if kind is None else (several[kind],)
