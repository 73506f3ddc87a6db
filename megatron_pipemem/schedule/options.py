"""Options of schedules and searches that users type: their names, allowed values and checks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, get_args

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.display import LARGEST, shortened
from megatron_pipemem.schedule.placement import Placement

STOCK: Final = "stock"
AUTO: Final = "auto"
"""Schedule names that are not families: ``stock`` runs Megatron's own schedule, ``auto`` searches for an order."""
OFF: Final = "off"
Offload = Literal["off", "half", "full", "auto"]
OFFLOAD: tuple[Offload, ...] = get_args(Offload)
"""Activations that may be copied to the host: none, the longer-lived half of every device's, or all (``full``, ``auto``).
With ``auto``, a search under a cap chooses its order together with them.
"""
RECOMPUTE = ("none", "selective", "full", AUTO)
"""The parts of forwards that are recomputed: none, the cheap parts of every stage, all, or as much as a cap needs."""
VocabularyCut = Literal["off", "1", "2", "auto"]
VOCABULARY: tuple[VocabularyCut, ...] = get_args(VocabularyCut)
"""The cut of the vocabulary over the pipeline: none, by Algorithm 1 or 2 of arXiv 2411.05288, or the best of these for
the model."""
LAYERWISE: Final = "layerwise"
RandomStreams = Literal["stock", "layerwise"]
RANDOM: tuple[RandomStreams, ...] = get_args(RandomStreams)
"""The source of initial weights and dropout: seeds per rank, as in Megatron, or seeds per layer."""
MESSAGE_SHAPES = ("step", "message")
"""When ranks learn the shapes of messages that differ: all at the start of a step, or each from a header before it."""
SHARDED: Final = "sharded"
GATHERED: Final = "gathered"
WgradInputs = Literal["auto", "sharded", "gathered"]
WGRAD_INPUTS: tuple[WgradInputs, ...] = get_args(WgradInputs)
"""The part of a linear layer's gathered input or output gradient that is kept for W under sequence parallelism: this
rank's shard, or the whole tensor. ``auto`` keeps the shard if the tensor-parallel ranks share a node. A shard is gathered
again while other W compute."""
EarlyWgrad = Literal["head", "experts_fc1", "experts_fc2"]
EARLY_WGRAD: tuple[EarlyWgrad, ...] = get_args(EarlyWgrad)
"""Modules whose weight gradients may be computed in I: the LM head, and the two matrices of routed experts."""

SliceCut = Literal["tokens", "flops"]
TOKENS, FLOPS = SLICE_CUTS = get_args(SliceCut)
"""The measure of a microbatch's weight, or of equal sequence slices: tokens or FLOPs. Users may write capitals."""

SEARCH_SECONDS = 20.0
"""The default time limit of a search for an order, in seconds."""


def parse_options(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """Read the ``KEY=VALUE`` pairs that a user gave with ``flag``.

    Values that are JSON (numbers, true, null) or a number such as ``.5`` are converted, and others stay text. A ``-``
    in a key is read as ``_``. Raise an UnsupportedError for a pair without key or value, and for a repeated key.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not key or not value:
            raise UnsupportedError("bad-syntax", f"{flag} {shortened(pair)}: write KEY=VALUE, as in {flag} chunks=4")
        if key in options:
            raise UnsupportedError("given-twice", f"{flag} {shortened(pair)}: {key} is given twice; leave one out")
        options[key] = _value(value)
    return options


def early_wgrad(text: str, hidden: int, expert_width: float) -> frozenset[EarlyWgrad]:
    """Return the modules whose weight gradients are computed in I.

    ``text`` is ``auto``, ``none``, or some of ``EARLY_WGRAD`` with commas between. ``hidden`` is the model's hidden
    size. ``expert_width`` is the hidden size within a routed expert on one rank; 0 without experts.

    ``auto`` chooses the second matrix of experts that are narrower than the model. Per token, this matrix keeps
    ``hidden`` + ``expert_width`` elements for W. The ``hidden`` elements are a gradient, which replaces nothing that F
    kept. W takes ``hidden`` x ``expert_width`` products. So this matrix keeps more bytes per second of W than a square
    matrix of the model does. An LM head keeps fewer. With ``auto``, W may also run earlier (``earlier_weights``), which
    does not follow from these sizes.
    """
    if text == AUTO:
        return frozenset(("experts_fc2",) if 0 < expert_width < hidden else ())
    named = [] if text == "none" else text.split(",")
    if unknown := [kind for kind in named if kind not in EARLY_WGRAD]:
        raise UnsupportedError(
            "bad-choice",
            f"early_wgrad {shortened(unknown[0])} is not one of {', '.join(EARLY_WGRAD)}; give some of these with commas "
            "between, or auto or none",
        )
    return frozenset(kind for kind in EARLY_WGRAD if kind in named)


def _value(text: str) -> object:
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


class Limit(NamedTuple):
    """The allowed range of a number that a user gives. Within it, computations end and sums stay finite."""

    least: float = -LARGEST
    most: float = LARGEST
    """If this is an ``int``, only whole numbers are allowed."""
    above: bool = False
    """Whether ``least`` itself is too small."""

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a number or its text, as the end of a message; ``None`` if it is allowed."""
        is_whole = isinstance(self.most, int)
        number = _number(value, is_whole)
        enough = number > self.least if self.above else number >= self.least
        if enough and number <= self.most and not (is_whole and number % 1):
            return None
        kind, form = ("a whole number", ",") if is_whole else ("a number", "g")
        limits = ""
        if number > self.most:
            limits = f" of at most {self.most:{form}}"
        elif self.least > -LARGEST:
            limits = f" {'above' if self.above else 'of at least'} {self.least:{form}}"
        shown = int(value) if isinstance(value, float) and value.is_integer() else value
        return f"{'has no value' if value is True else f'is {shortened(shown)}'}; give {kind}{limits}"

    def read(self, subject: str, value: object) -> float:
        """Return the number that a user gave, as a number or as its text; whole numbers as an ``int``."""
        problem = self.problem(value)
        if problem is not None:
            raise UnsupportedError("bad-number", f"{subject} {problem}")
        number = _number(value, isinstance(self.most, int))
        return int(number) if isinstance(self.most, int) else float(number)


def _number(value: object, is_whole: bool) -> float:
    """Return a value as a number; NaN for other values, and for the text of a fraction if it must be whole."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return math.nan
    if is_whole and isinstance(value, int):
        return value
    try:
        return int(value) if is_whole and isinstance(value, str) else float(value)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


WHOLE = Limit(most=10**30)
COUNT = Limit(1, 10**30)
COUNT_OR_ZERO = Limit(0, 10**30)
NOT_NEGATIVE = Limit(0)
POSITIVE = Limit(0, above=True)


def check_whole(subject: str, value: object, least: int = 1) -> None:
    """Raise an UnsupportedError if a value is not a whole number >= ``least``. ``subject`` begins the message."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UnsupportedError(
            "bad-number", f"{subject} must be a whole number of at least {least}, not {shortened(value)}"
        )


def check_effort(seconds: object, effort: object = 1.0, seed: object = 0) -> None:
    """Raise an UnsupportedError unless a search's seconds and effort are numbers >= 0, and its seed a whole number."""
    NOT_NEGATIVE.read("seconds of a search", seconds)
    NOT_NEGATIVE.read("effort of a search", effort)
    WHOLE.read("seed of a search", seed)


def slice_counts(value: object) -> tuple[int, ...]:
    """Read the numbers of slices that a search may choose, from a number, a list, or ``1,2,4``; sorted, each once."""
    counts: list[object] = [value]
    if isinstance(value, list | tuple):
        counts = list(value)
    elif isinstance(value, str):
        counts = [int(count) if count.strip().isdecimal() else count for count in value.split(",")]
    if not counts:
        raise UnsupportedError("bad-syntax", "slices of a search are empty; name some, as in slices=1,2,4,8")
    for count in counts:
        check_whole("slices of a search, as in slices=1,2,4,8,", count)
    return tuple(sorted({count for count in counts if isinstance(count, int)}))


def searched_placements(num_devices: int, kind: Any = None, chunks: Any = None) -> tuple[Placement, ...]:
    """Return the placements that a search tries: ``v`` and ``interleaved`` with two chunks by default.

    ``kind`` is ``v`` (a wave if there are more than two chunks), ``interleaved``, ``linear``, or ``None`` for all that
    have this number of chunks. ``chunks`` is the number of stages per device; ``None`` is 1 for ``linear`` and else 2.
    Raise an UnsupportedError for another kind, or if ``kind`` and ``chunks`` contradict each other.
    """
    if kind not in (None, "v", "interleaved", "linear"):
        raise UnsupportedError(
            "bad-choice",
            f"placement {shortened(kind)} of a search is not one of v, interleaved, linear; give one of these",
        )
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
