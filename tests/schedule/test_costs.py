"""Prices: shares of a device, stages, links, memory, and files of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import SELECTIVE_SECONDS, Kind
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.vocabulary import VocabularyCosts

V = Placement.v_shape(2)


def test_one_number_is_a_devices_share() -> None:
    seconds = Costs(4, 6, 2).seconds(V)
    whole = {Kind.F: (2,) * 4, Kind.I: (3,) * 4, Kind.W: (1,) * 4, Kind.B: (4,) * 4, Kind.R: (2,) * 4}
    assert seconds == {**whole, Kind.RS: (2 * SELECTIVE_SECONDS,) * 4}
    assert Costs(4, recompute_selective=1).seconds(V)[Kind.RS] == (0.5,) * 4


def test_shares_of_devices_with_different_numbers_of_stages() -> None:
    assert Costs(6).seconds(Placement.from_devices((0, 1, 0, 0)))[Kind.F] == (2, 6, 2, 2)


def test_a_sequence_is_one_price_per_stage() -> None:
    seconds = Costs((1, 2, 3, 4), 1, (0, 1, 0, 1)).seconds(V)
    assert seconds[Kind.F] == (1, 2, 3, 4)
    assert seconds[Kind.B] == (0.5, 1.5, 0.5, 1.5)


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ({"forward": (1, 2)}, "forward has 2 values but the placement has 4 stages; give one value per stage"),
        ({"backward_input": -1}, "cost of I is negative"),
        ({"backward_weight": (1, 1, -2, 1)}, "cost of W is negative: -2"),
        ({"copy_sum": -1}, "cost of REDUCE_REPLICAS is negative"),
    ],
)
def test_prices_that_do_not_fit(prices: dict[str, object], message: str) -> None:
    with pytest.raises(CostsError, match=message):
        Costs(**prices).seconds(V)


def test_links() -> None:
    assert Costs(p2p=3).link_seconds(0, 1) == 3
    assert Costs(p2p=3).link_seconds(1, 1) == 0
    costs = Costs(p2p={(0, 1): 5})
    assert costs.link_seconds(0, 1) == 5
    with refused("missing-option", 1, 0, kind=CostsError):
        costs.link_seconds(1, 0)


def test_memory_is_counted_in_whole_stages_by_default() -> None:
    assert Costs().memory_unit(V) == 0.25
    takes, gives_back = (1,) * 4, (-1,) * 4
    everywhere = {Kind.W: gives_back, Kind.B: gives_back, Kind.WAIT_OFFLOAD: gives_back, Kind.RELOAD: takes}
    assert Costs().memory_changes(V) == {Kind.F: takes, **everywhere}
    recomputed = Costs().memory_changes(V, {1: Kind.R})
    assert recomputed == {Kind.F: (1, 0, 1, 1), Kind.R: takes, **everywhere}


def test_what_is_recomputed_selectively_is_neither_kept_nor_moved() -> None:
    costs = Costs(
        memory={Kind.F: 60, Kind.R: 40, Kind.RS: 30, Kind.B: -100, Kind.WAIT_OFFLOAD: -80}, channel=Channel(8.0)
    )
    placement = Placement.linear(3)
    recomputed = {1: Kind.RS, 2: Kind.R}
    changes = costs.memory_changes(placement, recomputed)
    assert changes[Kind.F] == (100, 70, 60) and changes[Kind.RS][1] == 30 and changes[Kind.R][2] == 40
    assert changes[Kind.WAIT_OFFLOAD][:2] == (-80, -50) and changes[Kind.RELOAD][:2] == (80, 50)
    assert costs.host_changes(placement, recomputed)[Kind.OFFLOAD][:2] == (80, 50)
    assert costs.transfer_seconds(placement, recomputed)[Kind.OFFLOAD][:2] == (8, 5)
    by_default = Costs(memory={Kind.F: 64, Kind.B: -64}).memory_changes(placement, recomputed)
    assert by_default[Kind.RS][1] == 64 * SELECTIVE_BYTES == 64 - by_default[Kind.F][1]


def test_memory_in_bytes() -> None:
    costs = Costs(memory={Kind.F: 100, Kind.I: (-30, -30, -30, -20), Kind.W: -40})
    assert costs.memory_unit(V) == 1
    assert costs.memory_changes(V) == {
        Kind.F: (50,) * 4,
        Kind.I: (-30, -30, -30, -20),
        Kind.W: (-20,) * 4,
        Kind.B: (-50, -50, -50, -40),
        Kind.WAIT_OFFLOAD: (-50,) * 4,
        Kind.RELOAD: (50,) * 4,
    }


def test_the_memory_of_a_full_backward_may_be_given() -> None:
    changes = Costs(memory={Kind.F: 2, Kind.B: -2}).memory_changes(Placement.linear(2))
    given = {Kind.F: (2, 2), Kind.W: (-2, -2), Kind.B: (-2, -2)}
    assert changes == {**given, Kind.WAIT_OFFLOAD: (-2, -2), Kind.RELOAD: (2, 2)}


def test_costs_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    written = {"forward": [1, 2], "backward_input": 1.5, "copy_sum": 3, "p2p": 0.1, "memory": {"F": 8, "W": [-8, -8]}}
    path.write_text(json.dumps(written))
    expected = Costs((1.0, 2.0), 1.5, copy_sum=3.0, p2p=0.1, memory={Kind.F: 8.0, Kind.W: (-8.0, -8.0)})
    assert Costs.from_json(path) == expected
    weights = {"time": [1, 2.5], "memory": [1, 2], "kinds": {"W": [1, 2]}}
    path.write_text(json.dumps({**written, "microbatch": weights}))
    assert Costs.from_json(path) == replace(expected, microbatch=MicrobatchWeights((1, 2.5), (1, 2), {Kind.W: (1, 2)}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"cannot read costs from .*: line 1, column 2 is no JSON, expecting property name"),
        ("[1, 1, 1]", "costs are one JSON object with the keys forward, backward_input"),
        ('{"foward": 1}', "costs are one JSON object with the keys forward, backward_input"),
        ("[" * 100_000, "nested too deeply"),
        ('{"forward": NaN}', "NaN is no number"),
        ('{"forward": 1' + "0" * 5000 + "}", "Exceeds the limit"),
        ('{"forward": 1' + "0" * 400 + "}", "forward is a number of 401 digits"),
        ('{"forward": 1e308}', "forward is 1e\\+308; give numbers of at most 1e\\+30"),
        ('{"forward": "fast"}', "forward is 'fast'; give a number, or a list of one per stage"),
        ('{"forward": null}', "forward is None; give a number"),
        ('{"forward": [1, "x"]}', "forward is 'x'"),
        ('{"forward": []}', "forward is \\[\\]"),
        ('{"forward": -1}', "cost of F is negative"),
        ('{"memory": {"X": 1}}', "memory has the unknown key 'X'; it takes kinds of actions, F, I"),
        ('{"memory": {"F": true}}', "memory.F is True"),
        ('{"memory": -5}', "memory is -5; give an object"),
        ('{"p2p": {"a-b": 1}}', "p2p has the key 'a-b'; write links as two devices, as in 0-1"),
        ('{"p2p": {"0-1": "x"}}', "p2p.0-1 is 'x'"),
        ('{"channel": 3}', "channel is 3; give an object"),
        ('{"channel": {}}', "channel lacks the key offload"),
        ('{"channel": {"ratio": "x"}}', "channel.ratio is 'x'"),
        ('{"channel": {"offload": 1, "duplex": 3}}', "channel.duplex is 3; give true or false"),
        ('{"channel": {"offload": 1, "switches": [0, 1]}}', "channel.switches is \\[0, 1\\]; give lists of devices"),
        ('{"vocabulary": {"scores": 1}}', "vocabulary has the unknown key 'scores'; known are score"),
        ('{"vocabulary": {"score": "x"}}', "vocabulary.score is 'x'"),
        ('{"vocabulary": {"loss": [1]}}', "vocabulary.loss is \\[1\\]"),
        ('{"vocabulary": {"collectives": {"F": 1}}}', "F is no collective"),
        ('{"microbatch": [1, 2]}', 'microbatch is \\[1, 2\\]; give an object, as in {"time"'),
        ('{"microbatch": {"times": [1]}}', "microbatch has the unknown key 'times'; known are time, memory, kinds"),
        ('{"microbatch": {"memory": [1]}}', "microbatch lacks the key time, a list of one weight per microbatch"),
        ('{"microbatch": {"time": [1, NaN]}}', "NaN is no number"),
        ('{"microbatch": {"time": [1, null]}}', "microbatch.time\\[1\\] is None; give a number"),
        ('{"microbatch": {"time": [1], "kinds": {"X": [1]}}}', "microbatch.kinds has the unknown key 'X'"),
        ('{"microbatch": {"time": [1], "kinds": {"W": 1}}}', "microbatch.kinds.W is 1; give a list"),
    ],
)
def test_files_that_hold_no_costs(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostsError, match=message) as raised:
        Costs.from_json(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused("cannot-read", "nowhere.json", kind=CostsError):
        Costs.from_json(tmp_path / "nowhere.json")


def test_prices_are_small_enough_that_sums_stay_finite() -> None:
    for wrong in ({"forward": 1e308}, {"p2p": 10**400}, {"memory": {Kind.F: -1e31}}, {"forward": "x"}):
        with refused("bad-type", kind=CostsError):
            Costs(**wrong)
    with refused("bad-type", kind=CostsError):
        VocabularyCosts(score=1e31)
