"""SlimPipe: about one microbatch on every device, and a bubble that slices and chunks divide."""

from __future__ import annotations

import oracle
import pytest
from promises import assert_bubble_as_promised, assert_peak_as_promised
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.registry import build_schedule, family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.validator import validate


def build(p: int, m: int, **options: object) -> Schedule:
    return build_schedule("slimpipe", num_devices=p, num_microbatches=m, **options)


@pytest.mark.parametrize("v", [1, 2, 3, 5])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_one_microbatch_on_every_device(p: int, times: int, v: int) -> None:
    n = times * p
    for m in (1, 2, p + 1, 2 * p):
        schedule = build(p, m, slices=n, chunks=v)
        assert oracle.check(schedule) == []
        assert oracle.disordered_weight_gradients(schedule) == []
        validate(schedule)
        assert_peak_as_promised(family("slimpipe"), schedule, max(oracle.peak(schedule)))
        assert_bubble_as_promised(family("slimpipe"), schedule)
        further = [(1 if v == 1 else 2) * (p - 1 - device) for device in range(p)]
        held = [min(n * v + more, m * n * v) for more in further]
        assert [peak * p * n * v for peak in oracle.peak(schedule)] == held


def test_default_is_one_slice_per_device_and_two_chunks() -> None:
    assert build(4, 3) == build(4, 3, slices=4, chunks=2)
    one_chunk = build_schedule("seq1f1b", num_devices=4, num_microbatches=3, slices=8)
    assert build(4, 3, slices=8, chunks=1).orders == one_chunk.orders


@pytest.mark.parametrize("n", [1, 6, 9])
def test_slices_that_do_not_fill_the_devices_are_refused(n: int) -> None:
    with refused("slices-do-not-fit", 4, n, -(-n // 4) * 4, kind=UnsupportedError):
        build(4, 8, slices=n)
