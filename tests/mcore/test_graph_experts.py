"""Graphs that leave experts out train to the bit as steps without graphs; a planted fault is found."""

from __future__ import annotations

import pytest
from own_process import printed_by


@pytest.fixture(scope="module")
def differing() -> dict:
    return printed_by("graph_experts", "runtime", "transformer_engine", first="deep_ep_stand_in")


def test_replayed_steps_with_experts_equal_plain_steps_to_the_bit(differing):
    assert len(differing["models"]) == 9 and {*differing["models"].values()} == {0}


def test_faults_at_the_borders_of_graphs_are_found(differing):
    assert len(differing["faults"]) == 7 and 0 not in differing["faults"].values()
