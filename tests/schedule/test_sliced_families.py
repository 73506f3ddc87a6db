"""Families that take sequence slices: correct for any number of them, and as fast and as small as they promise."""

from __future__ import annotations

import hashlib

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples
from promises import assert_bubble_as_promised, assert_correct, assert_peak_as_promised
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.registry import build_schedule, families, family
from megatron_pipemem.schedule.schedule import Schedule

# SlimPipe takes multiples of p alone.
NAMES = [family.name for family in families() if "slices" in family.options and family.name != "slimpipe"]


def build(name: str, p: int, m: int, **options: object) -> Schedule:
    return build_schedule(name, num_devices=p, num_microbatches=m, **options)


# Over digests of all orders for p from 1 to 9, before there were slices.
UNSLICED = {
    "v-min": "1daa18786099d9ce",
    "v-half": "aefe12cf893299a3",
    "zbv": "a83c76edae27fa89",
    "1f1b-v": "f89d515777555be8",
    "interleaved": "601a091f438f65af",
    "zb-h1": "aec0647ea46ee5d1",
    "zb-h2": "60e8558c9e975e27",
}


@pytest.mark.parametrize("name", UNSLICED)
def test_whole_sequences_run_in_the_orders_that_families_had_before_slices(name: str) -> None:
    digests = []
    for p in range(1, 10):
        for m in (1, 2, p, p + 1, 2 * p, 3 * p + 2, 7 * p + 1):
            schedule = build(name, p, m, slices=1)
            assert schedule == build(name, p, m)
            digests.append(schedule.digest)
    assert hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16] == UNSLICED[name]


SIZES = [(p, m) for p in (1, 2, 3, 4) for m in (1, p - 1, p, p + 1, 2 * p, 3 * p + 1) if m]
SLICED = [
    *((name, {}, sizes) for name in NAMES for sizes in (((2, SIZES), (5, SIZES)), ((16, [(16, 2)]), (3, [(12, 24)])))),
    *(("interleaved", {"chunks": v}, [(n, [(p, 2 * p), (p, 4 * p + 1)]) for p, n in ((3, 3), (4, 6))]) for v in (1, 3)),
]
"""Family, options, and numbers of slices with devices and microbatches."""


@pytest.mark.parametrize(("name", "options", "sizes"), SLICED)
def test_correct_and_as_small_and_fast_as_promised(name: str, options: dict, sizes: list) -> None:
    for n, shapes in sizes:
        for p, m in shapes:
            schedule = build(name, p, m, slices=n, **options)
            assert_correct(schedule)
            assert schedule.slices == n
            whole = build(name, p, m, slices=1, **options)
            if "chunks" not in options:
                assert max(oracle.peak(schedule)) <= max(oracle.peak(whole)), "slices save memory"
                assert oracle.makespan(schedule, 1, 1, 1) <= oracle.makespan(whole, 1, 1, 1) + 1e-9, "and cost no time"
            assert_peak_as_promised(family(name), schedule, max(oracle.peak(schedule)))
            if m >= 2 * p:
                assert_bubble_as_promised(family(name), schedule)


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_whole_numbers(name: str) -> None:
    for slices in (0, "2", 1.5, True):
        with refused("bad-number", name, 1, kind=UnsupportedError):
            build(name, 2, 2, slices=slices)


@examples(60)
@given(data=st.data())
def test_interleaved_slices_in_groups_of_any_size(data: st.DataObject) -> None:
    p, m, n, v = (data.draw(st.integers(1, most)) for most in (5, 7, 6, 4))
    group = data.draw(st.integers(p, 2 * p + n))
    schedule = build("interleaved", p, m, chunks=v, group_size=group, slices=n)
    assert_correct(schedule)
    # A microbatch's slices are in as many groups more than one, each of which holds all chunks.
    groups = 1 + -(-(n - 1) // group)
    assert max(oracle.peak(schedule)) * p * v * n <= 2 * p - 2 + n + (v - 1) * groups * group


def test_the_order_of_seq1f1b_on_two_devices() -> None:
    """Two microbatches of two slices: 0 and 1, 2 and 3."""
    assert [" ".join(map(str, order)) for order in build("seq1f1b", 2, 2, slices=2).orders] == [
        "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2",
        "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2",
    ]
    assert build("seq1f1b", 4, 9, slices=1).orders == build("1f1b", 4, 9).orders


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "times"), [(1, 2), (2, 1), (3, 3), (4, 2), (6, 1)])
def test_slimpipe_holds_one_microbatch_on_every_device(p: int, times: int, v: int) -> None:
    n = times * p
    for m in (1, 2, p + 1, 2 * p):
        schedule = build("slimpipe", p, m, slices=n, chunks=v)
        assert_correct(schedule)
        assert_peak_as_promised(family("slimpipe"), schedule, max(oracle.peak(schedule)))
        assert_bubble_as_promised(family("slimpipe"), schedule)
        further = [(1 if v == 1 else 2) * (p - 1 - device) for device in range(p)]
        assert [peak * p * n * v for peak in oracle.peak(schedule)] == [
            min(n * v + more, m * n * v) for more in further
        ]
    if (p, times, v) == (4, 2, 1):
        assert build("slimpipe", 4, 3, slices=8, chunks=1).orders == build("seq1f1b", 4, 3, slices=8).orders
        assert build("slimpipe", 4, 3) == build("slimpipe", 4, 3, slices=4, chunks=2)
