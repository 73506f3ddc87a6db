"""HybridModels of local layers, cut by ``|`` in their pattern, train as on stock Megatron."""

from __future__ import annotations

import pytest

# The same layers on 4 and 8 stages, one of them without any; without |, the schedule's cuts are written for the user.
CUTS = {1: "*-*|-*|*--|*-", 2: "*-|*||-|*|*-|-*|-", None: "*-*-**--*-"}


def of(pattern: str, *more: str) -> tuple[str, ...]:
    """Flags of a hybrid model."""
    return (
        "--spec",
        "megatron_pipemem.cpu.hybrid_layers",
        "hybrid_stack_spec",
        "--hybrid-layer-pattern",
        pattern,
        *more,
    )


# name -> schedule, which of the cuts, flags of ours; all of them to the bit
EXACT = {
    "zb-h1": ("zb-h1", 1, ()),
    "linear": ("1f1b", None, ()),
    "interleaved": ("interleaved", None, ()),
    "v-half": ("v-half", 2, ()),
    "zbv": ("zbv", None, ()),
    "wave": ("hanayo", None, ()),
    "auto": ("auto", None, ("--pipemem-memory-cap", "0.8", "--pipemem-option", "seconds=1")),
    "po-f": ("po-f", None, ("--pipemem-host-memory", "1GiB")),
    "recompute-selective": ("v-half", 2, ("--pipemem-recompute", "selective")),
}


@pytest.mark.parametrize("name", EXACT)
def test_trains_as_stock(train, assert_same_training, name):
    schedule, cut, flags = EXACT[name]
    run = train(schedule, *of(CUTS[cut], *flags))
    assert_same_training(run, train("stock", *of(CUTS[1])))
    assert run.predicted_peaks == run.counted_peaks


def test_selective_recomputation_drops_what_its_norms_keep(train):
    peaks = [train("v-half", *of(CUTS[2], *EXACT[name][2])).counted_peaks for name in ("v-half", "recompute-selective")]
    assert all(map(int.__lt__, peaks[1], peaks[0]))
