"""Hanayo: the wave placement, the published rates, and memory and bubble for more microbatches."""

from __future__ import annotations

import oracle
import pytest
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate


def hanayo(p: int, m: int, **options: object) -> Schedule:
    schedule = build_schedule("hanayo", num_devices=p, num_microbatches=m, **options)
    assert oracle.check(schedule) == []
    assert oracle.disordered_weight_gradients(schedule) == []
    return schedule


@pytest.mark.parametrize(("waves", "rate"), [(1, 0.333), (2, 0.213), (4, 0.119)])
def test_rates_for_as_many_microbatches_as_devices(waves: int, rate: float) -> None:
    assert simulate(hanayo(4, 4, waves=waves)).bubble_rate == pytest.approx(rate, abs=5e-4)


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_memory_is_that_of_1f1b_or_a_microbatch_more(p: int, waves: int) -> None:
    for m in (1, p, p + 1, 2 * p + 1, 4 * p):
        schedule = hanayo(p, m, waves=waves)
        most = 1 if m <= p else 1 + 1 / p
        assert max(oracle.peak(schedule)) <= min(most, m / p) + 1e-9


def test_waves_or_chunks_say_how_the_model_is_cut() -> None:
    assert hanayo(4, 6, chunks=6) == hanayo(4, 6, waves=3) == hanayo(4, 6, waves=3, chunks=6)
    assert hanayo(4, 6).placement.devices == (0, 1, 2, 3, 3, 2, 1, 0) * 2
    assert hanayo(4, 6, waves=1).placement.name == "v"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"waves": 0}, ("bad-number", 1)),
        ({"waves": "2"}, ("bad-number",)),
        ({"chunks": 3}, ("needs-chunks",)),
        ({"chunks": 1}, ("bad-number", 2)),
        ({"chunks": 2, "waves": 2}, ("conflicting-options", 2, 4)),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], why: str) -> None:
    with refused(*why, kind=UnsupportedError):
        hanayo(4, 8, **options)
