"""Layers over stages against every way there is to cut a small model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.model.model import Model
from megatron_pipemem.model.partition import Loads, partition
from megatron_pipemem.schedule.placement import Placement

SECONDS = st.floats(0.1, 5).map(lambda value: round(value, 2))


def compositions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(layers + 1):
        for rest in compositions(layers - first, stages - 1):
            yield (first, *rest)


def devices(loads: Loads, placement: Placement, counts: tuple[int, ...]) -> list[float]:
    """Seconds of every device, added up one layer at a time."""
    device_seconds, layer = [0.0] * placement.num_devices, 0
    for stage, count in enumerate(counts):
        for _ in range(count):
            device_seconds[placement.devices[stage]] += loads.seconds[layer]
            layer += 1
    device_seconds[placement.devices[0]] += loads.first_seconds
    device_seconds[placement.devices[-1]] += loads.last_seconds
    return device_seconds


@given(st.lists(SECONDS, min_size=1, max_size=7), SECONDS, SECONDS, st.integers(1, 4))
def test_unequal_layers_one_stage_per_device(seconds, first, last, stages):
    loads, placement = Loads(seconds, first, last), Placement.linear(stages)
    partitioned = partition(loads, placement)
    best = min(max(devices(loads, placement, counts)) for counts in compositions(len(seconds), stages))
    assert sum(partitioned) == len(seconds)
    assert max(devices(loads, placement, partitioned)) == pytest.approx(best)


@given(
    st.integers(1, 7),
    st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    st.sampled_from((0.0, 0.4, 1.7, 6.0)),
    st.sampled_from((Placement.v_shape(2), Placement.v_shape(3), Placement.interleaved(2, 2), Placement.wave(2, 3))),
)
def test_equal_layers_several_stages_per_device(layers, first, last, placement):
    loads = Loads([1.0] * layers, first, last)
    partitioned = partition(loads, placement)
    best = min(max(devices(loads, placement, counts)) for counts in compositions(layers, placement.num_stages))
    assert sum(partitioned) == layers
    assert max(devices(loads, placement, partitioned)) == pytest.approx(best)


@given(st.lists(st.integers(1, 9), min_size=4, max_size=6), st.integers(2, 3))
def test_of_equally_fast_cuts_the_fullest_stage_is_least(static, stages):
    loads, placement = Loads([1.0] * len(static), static_bytes=static), Placement.linear(stages)

    def fullest(counts: tuple[int, ...]) -> int:
        edges = [sum(counts[:stage]) for stage in range(stages + 1)]
        return max(sum(static[a:b]) for a, b in zip(edges, edges[1:], strict=False))

    every = list(compositions(len(static), stages))
    fastest = min(max(counts) for counts in every)
    partitioned = partition(loads, placement)
    assert max(partitioned) == fastest
    assert fullest(partitioned) == min(fullest(counts) for counts in every if max(counts) == fastest)


def test_activations_weigh_more_where_more_microbatches_wait():
    # Three layers on two devices: the second holds one microbatch, the first two.
    assert partition(Loads([1.0] * 3, kept_bytes=[1.0] * 3), Placement.linear(2)) == (1, 2)


def test_the_head_pushes_layers_away():
    assert partition(Loads([1.0] * 7, last_seconds=3.0), Placement.linear(2)) == (5, 2)
    assert partition(Loads([1.0] * 8, last_seconds=8.0), Placement.linear(2)) == (8, 0)


@pytest.mark.parametrize("placement", [Placement.linear(4), Placement.interleaved(2, 2)])
@pytest.mark.parametrize(("last", "layers"), [(0.0, (2, 4, 4, 4)), (2.5, (6, 4, 4, 0))])
def test_layers_stay_on_the_stage_of_those_before_them(placement, last, layers):
    index = {"dsa_indexer_topk": 4, "dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3}
    model = Model(layers=14, hidden=64, heads=4, vocabulary=9, sequence=8, kv_lora_rank=8, **index)
    assert "".join(kind[0] for kind in model.kinds) == "DDDdddDdddDddd"
    tied = [layer in model.tied_layers for layer in range(14)]
    counts = partition(Loads([1.0] * 14, last_seconds=last, tied=tied), placement)
    begins = accumulate(counts[:-1])
    assert not any(begin < 14 and tied[begin] for begin in begins)
    assert counts == layers or placement.num_devices == 2


def test_nothing_to_cut():
    with refused("too-few-layers", 0, kind=UnsupportedError):
        partition(Loads([]), Placement.linear(2))
