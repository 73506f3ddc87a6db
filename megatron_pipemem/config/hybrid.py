"""Read patterns of hybrid models.

A pattern has one symbol per layer, ``|`` between the stages of the pipeline, and behind ``/`` what predicts further tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

FLAGS = ("hybrid-layer-pattern", "hybrid-override-pattern")
SEGMENTS, FURTHER = "|", "/"


def segments(pattern: str) -> list[str]:
    """Return the symbols of the layers of every stage, without what predicts further tokens."""
    return pattern.split(FURTHER)[0].split(SEGMENTS)


def layers_of(pattern: str) -> str:
    """Return the symbols of a pattern's layers, without what predicts further tokens."""
    return "".join(segments(pattern))


def is_cut(pattern: str) -> bool:
    """Return whether a pattern says where its stages end."""
    return len(segments(pattern)) > 1


def cut(pattern: str, counts: Sequence[int]) -> str:
    """Return a pattern that is cut into stages.

    Args:
        pattern: without ``|``.
        counts: layers of every stage.
    """
    layers, slash, further = pattern.partition(FURTHER)
    ends = list(accumulate(counts, initial=0))
    return SEGMENTS.join(layers[begin:end] for begin, end in pairwise(ends)) + slash + further
