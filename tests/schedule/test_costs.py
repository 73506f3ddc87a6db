"""Prices: shares of a device, stages, parts of a model, links, memory, and files of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused

from megatron_pipemem.errors import CostsError
from megatron_pipemem.part_costs import PartCosts, part_costs, read_costs, with_cut_head, without_ends
from megatron_pipemem.schedule.action import SELECTIVE_SECONDS, Kind
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Channel, Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.units import Units
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
        ({"forward": (1, 2)}, ("costs-mismatch", 2, 4)),
        ({"backward_input": -1}, ("bad-number", "I", "-1.0")),
        ({"backward_weight": (1, 1, -2, 1)}, ("bad-number", "W", "-2.0")),
        ({"copy_sum": -1}, ("bad-number", "REDUCE_REPLICAS")),
    ],
)
def test_prices_that_do_not_fit(prices: dict[str, object], message: str) -> None:
    with refused(*message, kind=CostsError):
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
    assert Costs.from_json(path) == replace(expected, microbatch=MicrobatchFactors((1, 2.5), (1, 2), {Kind.W: (1, 2)}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ("not-json", 1, 2)),
        ("[1, 1, 1]", ("unknown-key", "backward_input")),
        ('{"foward": 1}', ("unknown-key", "backward_input")),
        ('{"parts": {}}', ("wrong-file", "parts", "megatron_pipemem.part_costs.read_costs")),
        ("[" * 100_000, ("not-json",)),
        ('{"forward": NaN}', ("not-json",)),
        ('{"forward": 1' + "0" * 5000 + "}", ("not-json",)),
        ('{"forward": 1' + "0" * 400 + "}", ("bad-number", 401)),
        ('{"forward": 1e308}', ("bad-number", "1e+308", "1e+30")),
        ('{"forward": "fast"}', ("bad-type", "forward", "fast")),
        ('{"forward": null}', ("bad-type", "forward")),
        ('{"forward": [1, "x"]}', ("bad-type", "x")),
        ('{"forward": []}', ("bad-type", "forward", "[]")),
        ('{"forward": -1}', ("bad-number",)),
        ('{"memory": {"X": 1}}', ("unknown-key", "X")),
        ('{"memory": {"F": true}}', ("bad-type", "memory.F")),
        ('{"memory": -5}', ("bad-type", "memory", -5)),
        ('{"p2p": {"a-b": 1}}', ("unknown-key", "a-b")),
        ('{"p2p": {"0-1": "x"}}', ("bad-type", "p2p.0-1", "x")),
        ('{"channel": 3}', ("bad-type", "channel", 3)),
        ('{"channel": {}}', ("missing-option", "channel", "offload")),
        ('{"channel": {"ratio": "x"}}', ("bad-type", "channel.ratio", "x")),
        ('{"channel": {"offload": 1, "duplex": 3}}', ("bad-type", "channel.duplex", 3)),
        ('{"channel": {"offload": 1, "switches": [0, 1]}}', ("bad-switches", "channel.switches", "[0, 1]")),
        ('{"vocabulary": {"scores": 1}}', ("unknown-key", "scores")),
        ('{"vocabulary": {"score": "x"}}', ("bad-type", "vocabulary.score", "x")),
        ('{"vocabulary": {"loss": [1]}}', ("bad-type", "vocabulary.loss", "[1]")),
        ('{"vocabulary": {"collectives": {"F": 1}}}', ("unknown-key", "F")),
        ('{"microbatch": [1, 2]}', ("bad-type", "microbatch", "[1, 2]")),
        ('{"microbatch": {"times": [1]}}', ("unknown-key", "times")),
        ('{"microbatch": {"memory": [1]}}', ("missing-option", "microbatch", "time")),
        ('{"microbatch": {"time": [1, NaN]}}', ("not-json",)),
        ('{"microbatch": {"time": [1, null]}}', ("bad-type", "microbatch.time[1]")),
        ('{"microbatch": {"time": [1], "kinds": {"X": [1]}}}', ("unknown-key", "microbatch.kinds", "X")),
        ('{"microbatch": {"time": [1], "kinds": {"W": 1}}}', ("bad-type", "microbatch.kinds.W", 1)),
    ],
)
def test_files_that_hold_no_costs(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with refused(*message, kind=CostsError) as raised:
        Costs.from_json(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused("no-file", "nowhere.json", kind=CostsError):
        Costs.from_json(tmp_path / "nowhere.json")


def test_prices_are_small_enough_that_sums_stay_finite() -> None:
    for wrong in ({"forward": 1e308}, {"p2p": 10**400}, {"memory": {Kind.F: -1e31}}):
        with refused("bad-number", kind=CostsError):
            Costs(**wrong)
    for number, code in ((1e31, "bad-number"), (math.nan, "bad-type"), (math.inf, "bad-number"), (-1.0, "bad-number")):
        for several in ({"forward": (1.0, number)}, {"p2p": {(0, 1): 1.0, (1, 0): number}}):
            with refused(code, kind=CostsError):
                Costs(**several)
    with refused("bad-number", kind=CostsError):
        VocabularyCosts(score=1e31)


PARTS = {
    "order": ["dense", "expert", "expert"],
    "layers": {
        "dense": {"seconds": {"forward": 1, "input": 2, "weight": 3}, "memory": {"F": 8, "W": -8}},
        "expert": {"seconds": {"forward": 10, "input": 20, "weight": 30}, "memory": {"F": 80, "I": -30, "W": -50}},
    },
    "first": {"seconds": {"forward": 0.5}, "memory": {"F": 5, "SEND_F": -4, "I": -1}},
    "middle": {"memory": {"RECV_F": 4, "SEND_F": -4}},
    "last": {"seconds": {"forward": 7, "input": 8, "weight": 9}, "memory": {"RECV_F": 4, "F": -4}},
}


def costs_of(**more: object) -> PartCosts:
    return part_costs({"parts": PARTS, **more})


@pytest.mark.parametrize(
    ("placement", "forward"),
    [
        (Placement.linear(1), (28.5,)),
        (Placement.linear(2), (11.5, 17)),
        (Placement.linear(3), (1.5, 10, 17)),
        (Placement.v_shape(2), (1.5, 10, 10, 7)),
        (Placement.bidirectional(2), (11.5, 17) * 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_stages_of_every_placement_are_sums_of_parts(placement, forward) -> None:
    costs = costs_of()
    assert costs.seconds(placement)[Kind.F] == pytest.approx(forward)
    assert costs.seconds(placement, Units.equal(1, 2))[Kind.F] == pytest.approx(
        [seconds / 2 for seconds in forward for _ in range(2)]
    )
    assert costs.parts.head.seconds.total == 24 and costs.parts.embedding.seconds.total == 0.5


def test_the_cut_of_a_file_is_for_as_many_stages() -> None:
    costs = costs_of(layers_per_stage=[0, 3])
    assert costs.seconds(Placement.linear(2))[Kind.F] == (0.5, 28)
    assert costs.seconds(Placement.linear(3))[Kind.F] == costs_of().seconds(Placement.linear(3))[Kind.F]
    assert replace(costs, cut=(3, 0)).seconds(Placement.linear(2))[Kind.F] == (21.5, 7)


def test_layers_at_the_ends_may_differ() -> None:
    ends = {kind: part | {"seconds": {"forward": 0}} for kind, part in PARTS["layers"].items()}
    costs = part_costs({"parts": PARTS | {"end_layers": ends}})
    assert costs.seconds(Placement.linear(3))[Kind.F] == (0.5, 10, 7)


def test_neighbours_on_one_device_hand_over() -> None:
    middle = {"memory": {"RECV_F": 4, "SEND_F": -4, "RECV_I": 2, "SEND_I": -1}}
    costs = part_costs({"parts": {**PARTS, "middle": middle}})
    sent, handed = (costs.memory_changes(placement) for placement in (Placement.linear(4), Placement.v_shape(2)))
    assert sent[Kind.RECV_F] == (0, 4, 4, 4) and handed[Kind.RECV_F] == (0, 4, 0, 4)
    assert sent[Kind.SEND_F] == (-4, -4, -4, 0) and handed[Kind.SEND_F] == (-4, 0, -4, 0)
    assert handed[Kind.F] == sent[Kind.F]
    assert handed[Kind.RECV_I] == (0, 0, 2, 0) and handed[Kind.SEND_I] == (0, -1, 0, 0)
    assert [after - before for before, after in zip(sent[Kind.I], handed[Kind.I], strict=True)] == [0, 0, 1, 0]


def test_other_memory_replaces_that_of_the_parts() -> None:
    counted = replace(costs_of(), memory={Kind.F: (3.0, 4.0), Kind.W: (-3.0, -4.0)})
    assert counted.memory_changes(Placement.linear(2))[Kind.F] == (3, 4)
    assert counted.seconds(Placement.linear(2)) == costs_of().seconds(Placement.linear(2))
    assert replace(costs_of(), memory=None).memory_changes(V) == Costs().memory_changes(V)
    assert costs_of().with_scaled_memory(2).memory_changes(V)[Kind.F][0] == 2 * costs_of().memory_changes(V)[Kind.F][0]


def test_tokens_of_experts_travel_in_layers_alone() -> None:
    costs = costs_of().with_exchanges(0.5)
    apart = costs.exchange_seconds(Placement.linear(3))
    assert costs.have_exchanges and not costs_of().have_exchanges
    assert (apart[Kind.F], apart[Kind.I]) == ((0.5, 5, 5), (1, 10, 10)), "not in the embedding and the head"


def test_a_channel_of_a_ratio_has_parts_too() -> None:
    costs = replace(costs_of(), channel=Channel(ratio=2))
    seconds = costs.transfer_seconds(Placement.linear(3))[Kind.OFFLOAD]
    assert seconds == pytest.approx((6.5, 60, 84))
    assert replace(costs, cut=(0, 3)).transfer_seconds(Placement.linear(2))[Kind.RELOAD][0] == 0.5


def test_without_embedding_and_head_layers_are_left() -> None:
    alone = without_ends(costs_of())
    assert alone.seconds(Placement.linear(3))[Kind.F] == (1, 10, 10)
    assert alone.memory_changes(Placement.linear(3)) == costs_of().memory_changes(Placement.linear(3))


def test_a_cut_head_is_in_the_passes_and_nowhere_else() -> None:
    cut = with_cut_head(costs_of(), 24, 3, 1)
    passes = cut.vocabulary.seconds(3)
    assert sum(map(sum, passes.values())) == pytest.approx(24.5)  # and the embedding's half
    assert cut.seconds(Placement.linear(3))[Kind.F] == (1, 10, 10)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"parts": PARTS, "forward": 1}, ("conflicting-options",)),
        ({"parts": {**PARTS, "order": []}}, ("bad-type", "parts.order", "[]")),
        ({"parts": {**PARTS, "order": ["sparse"]}}, ("unknown-key", "parts.order", "sparse", "parts.layers")),
        ({"parts": {key: PARTS[key] for key in ("order", "layers", "first", "last")}}, ("missing-option",)),
        ({"parts": {**PARTS, "first": {"seconds": {"forward": -1}}}}, ("bad-number",)),
        ({"parts": {**PARTS, "first": {"memory": {"X": 1}}}}, ("unknown-key", "parts.first.memory", "X")),
        ({"parts": {**PARTS, "first": {"memory": {"F": "x"}}}}, ("bad-type", "parts.first.memory.F", "x")),
        ({"parts": PARTS, "layers_per_stage": [1, 1]}, ("costs-mismatch", 1, 3)),
        ({"parts": PARTS, "layers_per_stage": 3}, ("bad-type", "layers_per_stage", 3)),
        ({"parts": 3}, ("bad-type", 3)),
        ({"forward": 1, "layers_per_stage": [3]}, ("conflicting-options", "layers_per_stage")),
    ],
)
def test_files_of_parts_that_do_not_fit(tmp_path, content, says) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    with refused(*says, kind=CostsError):
        read_costs(path)
