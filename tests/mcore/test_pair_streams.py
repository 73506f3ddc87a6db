"""Pairs have no race between computing and exchanges, and free nothing early; a planted fault is found."""

from __future__ import annotations

import pytest
from own_process import printed_by


@pytest.fixture(scope="module")
def watched() -> dict:
    return printed_by("pair_streams", "runtime")


def test_computing_and_exchanges_of_pairs_are_ordered(watched):
    assert watched["pairs"] > 0 and watched["early"] > 0
    assert watched["found"].pop("") == []
    early = watched["found"].pop("memory is freed while the other stream uses it")
    assert early == ["free"]
    assert len(watched["found"]) == 4 and all("race" in kinds for kinds in watched["found"].values())


def test_pairs_enter_the_contexts_of_quantised_numbers_as_the_plain_order_does(watched):
    """The backward of another microbatch, which runs within a forward, computes as outside of one."""
    assert len(watched["contexts"]) == 3
    for plain, paired in watched["contexts"].values():
        forwards, others = ([row for row in rows if row[0] == "forward"] for rows in (plain, paired))
        assert forwards == others and all(len(row[1]) == 1 for row in forwards)
        backwards, others = ([row[1] for row in rows if row[0] == "backward"] for rows in (plain, paired))
        assert backwards == [[]] and len(others) > 1
        assert all(contexts[-1:] in ([], ["off"]) for contexts in others)
