"""Graphs that leave experts out train to the bit as steps without graphs; a planted fault is found."""

from __future__ import annotations

import pytest
from lanes import nightly
from own_process import printed_by

NAMES = (
    *("zb-h1", "v-half, shared experts", "1f1b, bias", "zbv, allgather", "one expert", "dense between"),
    *("v-half, hybridep", "1f1b, hybridep", "zb-h1, deepep"),
    *("shared experts overlap", "deepep, shared experts overlap", "parts again"),
    *("zb-h1, one depth", "v-half, one depth", "1f1b, repeated layer", "v-half, depths on a stage of their own"),
    *("random logits", "dropout"),
)
DEPTHS = ("one depth", "two depths", "tied", "detached", "repeated layer", "depths on a stage of their own")


def printed_for(*names: str) -> dict:
    return printed_by("graph_experts", "runtime", "transformer_engine", first="deep_ep_stand_in", arguments=names)


@pytest.fixture(scope="module")
def differing() -> dict:
    return printed_for(*NAMES, "faults")


def test_replayed_steps_with_experts_equal_plain_steps_to_the_bit(differing):
    assert differing["models"] == dict.fromkeys(NAMES, 0)


def test_faults_at_the_borders_of_graphs_are_found(differing):
    assert len(differing["faults"]) == 14 and 0 not in differing["faults"].values()
    assert differing["faults"]["random streams have no generators"] == "graph-operator"


@nightly("the cases above")
def test_every_schedule_has_depths_after_experts():
    names = [f"{schedule}, {depths}" for schedule in ("1f1b", "zb-h1", "v-half") for depths in DEPTHS]
    assert printed_for(*names)["models"] == dict.fromkeys(names, 0)
