"""Prices of a model's parts: one file prices the stages of every placement."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from refusals import refused

from megatron_pipemem.errors import CostsError
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Channel, Costs
from megatron_pipemem.schedule.costs_file import costs_arguments
from megatron_pipemem.schedule.placement import Placement

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


def costs_of(**more: object) -> Costs:
    return Costs(**costs_arguments({"parts": PARTS, **more}))


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
    assert costs.seconds(placement, 2)[Kind.F] == pytest.approx([each / 2 for each in forward for _ in range(2)])
    assert Costs(costs.forward, costs.backward_input, costs.backward_weight) != costs
    assert costs.part_prices.head == 24 and costs.part_prices.embedding == 0.5


def test_the_cut_of_a_file_is_for_as_many_stages() -> None:
    costs = costs_of(layers_per_stage=[0, 3])
    assert costs.seconds(Placement.linear(2))[Kind.F] == (0.5, 28)
    assert costs.seconds(Placement.linear(3))[Kind.F] == costs_of().seconds(Placement.linear(3))[Kind.F]
    assert costs.with_parts(cut=(3, 0)).seconds(Placement.linear(2))[Kind.F] == (21.5, 7)


def test_layers_at_the_ends_may_differ() -> None:
    ends = {kind: part | {"seconds": {"forward": 0}} for kind, part in PARTS["layers"].items()}
    costs = Costs(**costs_arguments({"parts": PARTS | {"end_layers": ends}}))
    assert costs.seconds(Placement.linear(3))[Kind.F] == (0.5, 10, 7)


def test_neighbours_on_one_device_hand_over() -> None:
    sent, handed = (costs_of().memory_changes(each) for each in (Placement.linear(4), Placement.v_shape(2)))
    assert sent[Kind.RECV_F] == (0, 4, 4, 4) and handed[Kind.RECV_F] == (0, 4, 0, 4)
    assert sent[Kind.SEND_F] == (-4, -4, -4, 0) and handed[Kind.SEND_F] == (-4, 0, -4, 0)
    assert handed[Kind.F] == sent[Kind.F]


def test_a_channel_of_a_ratio_has_parts_too() -> None:
    costs = replace(costs_of(), channel=Channel.of_ratio(2, costs_of()))
    seconds = costs.transfer_seconds(Placement.linear(3))[Kind.OFFLOAD]
    assert seconds == pytest.approx((6.5, 60, 84))
    assert costs.with_parts(cut=(0, 3)).transfer_seconds(Placement.linear(2))[Kind.RELOAD][0] == 0.5


def test_without_embedding_and_head_layers_are_left() -> None:
    alone = costs_of().without_ends()
    assert alone.seconds(Placement.linear(3))[Kind.F] == (1, 10, 10)
    assert alone.memory_changes(Placement.linear(3)) == costs_of().memory_changes(Placement.linear(3))


def test_a_cut_head_is_in_the_passes_and_nowhere_else() -> None:
    cut = costs_of().with_cut_head(24, 3, 1)
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
        Costs.from_json(path)
