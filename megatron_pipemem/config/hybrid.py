"""Read patterns of hybrid models.

A pattern has one symbol per layer, ``|`` between the stages of the pipeline, and behind ``/`` what predicts further tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from megatron_pipemem.config.model import Sublayer

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


def needed_layers(pattern: str, flags: Mapping[str, object]) -> list[bool]:
    """Return of which layers every rank needs one: those with experts, where Megatron logs their losses. It waits for ever
    where a rank has none.

    Args:
        pattern: of the model, cut or not.
        flags: of the training script, without dashes.
    """
    balanced = "aux_loss" in str(flags.get("moe-router-load-balancing-type", "aux_loss"))
    logged = balanced or flags.get("moe-z-loss-coeff") not in (None, False)
    return [logged and symbol == Sublayer.EXPERTS for symbol in layers_of(pattern)]


def cut(pattern: str, counts: Sequence[int]) -> str:
    """Return a pattern that is cut into stages.

    Args:
        pattern: without ``|``.
        counts: layers of every stage.
    """
    layers, slash, further = pattern.partition(FURTHER)
    ends = list(accumulate(counts, initial=0))
    return SEGMENTS.join(layers[begin:end] for begin, end in pairwise(ends)) + slash + further
