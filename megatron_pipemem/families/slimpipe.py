"""Build SlimPipe: 1F1B on so many slices of sequences that every device holds about one microbatch (arXiv 2504.14519)."""

from __future__ import annotations

from dataclasses import replace

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.families.interleaved import interleaved
from megatron_pipemem.families.seq1f1b import seq1f1b
from megatron_pipemem.schedule.family import Family, Formula
from megatron_pipemem.schedule.options import check_whole
from megatron_pipemem.schedule.schedule import Schedule


def slimpipe(num_devices: int, num_microbatches: int, chunks: int = 2, slices: int | None = None) -> Schedule:
    """Run slices through the chunks in groups of ``p``, as interleaved 1F1B does with microbatches.

    A device runs the forwards of a whole microbatch before its first backward. With a multiple of ``p`` slices that is all it
    has to hold, but for what is on the way to the last device and back: ``2 (p - 1)`` slices of a stage at most.

    Args:
        num_devices: ``p``.
        num_microbatches: ``m``.
        chunks: stages per device; 1 is ``seq1f1b``.
        slices: sequence slices of a microbatch, a multiple of ``p``; default ``p``.

    Raises:
        UnsupportedError: ``chunks`` or ``slices`` is out of range.
    """
    p, n = num_devices, num_devices if slices is None else slices
    check_whole("slimpipe: chunks", chunks, least=1)
    check_whole("slimpipe: slices", n, least=1)
    if n % p:
        raise UnsupportedError(
            "slices-do-not-fit",
            f"slimpipe: slices must be a multiple of the {p} devices, not {n}; take {-(-n // p) * p}, or 'seq1f1b' or "
            "'interleaved', which take any number",
        )
    # With one chunk, interleaved 1F1B's warm-up would be up to p - 1 slices longer than it has to be.
    built = seq1f1b(p, num_microbatches, n) if chunks == 1 else interleaved(p, num_microbatches, chunks, slices=n)
    return replace(built, name="slimpipe")


def _peak(p: int, m: int, v: int, n: int, **_: float) -> float:
    on_the_way = p - 1 if v == 1 else 2 * (p - 1)
    return min(n * v + on_the_way, m * n * v) / (p * n * v)


SLIMPIPE = Family(
    name="slimpipe",
    build=slimpipe,
    summary="One microbatch of activations over all devices, and a bubble that slices and chunks divide; for causal models.",
    peak=Formula("(1 + 2(p-1)/(vn))/p, v = 1: (1 + (p-1)/n)/p", _peak),
    bubble=Formula("(p-1)(F+B)/(vn)", lambda p, v, n, f, b, **_: (p - 1) * (f + b) / (v * n)),
    source="arXiv 2504.14519",
    options={
        "chunks": "stages per device, v (default 2)",
        "slices": "sequence slices of a microbatch, n, a multiple of p (default p)",
    },
)
