"""One rank decides for all: its result and its errors arrive everywhere."""

from __future__ import annotations

import threading

import pytest
from refusals import refused
from threads import outcomes

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore import agreement


@pytest.fixture
def together(monkeypatch):
    """Run a function as several ranks, in threads that share one broadcast."""

    def run(function, size=3):
        local, mail, sent = threading.local(), [], threading.Event()

        def broadcast(payload, src):
            if local.rank == src:
                mail.extend(payload)
                sent.set()
            assert sent.wait(10)
            payload[:] = mail

        monkeypatch.setattr(agreement.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(agreement.dist, "get_rank", lambda: local.rank)
        monkeypatch.setattr(agreement.dist, "broadcast_object_list", broadcast)

        def act(rank):
            local.rank = rank
            return agreement.decided_by_rank_zero(lambda: function(rank))

        return outcomes(size, act)

    return run


def test_only_rank_zero_decides(together):
    assert together(lambda rank: f"by {rank}") == ["by 0"] * 3


def test_a_refusal_is_the_same_error_on_every_rank(together):
    def refuse(rank):
        raise UnsupportedError("cap-unreachable", "no schedule fits; raise the cap")

    outcomes = together(refuse)
    assert [type(each) for each in outcomes] == [UnsupportedError] * 3
    assert {str(each) for each in outcomes} == {"no schedule fits; raise the cap"}


def test_a_crash_of_rank_zero_leaves_nobody_waiting(together):
    def crash(rank):
        raise ZeroDivisionError("oops")

    outcomes = together(crash)
    assert isinstance(outcomes[0], ZeroDivisionError)
    assert all(
        isinstance(each, UnsupportedError) and "rank 0" in str(each) and "oops" in str(each) for each in outcomes[1:]
    )


def test_a_lone_process_decides_for_itself():
    assert agreement.decided_by_rank_zero(lambda: 7) == 7
    assert agreement.gather("mine") == ["mine"]


def test_a_failure_of_one_rank_is_an_error_on_all(monkeypatch):
    def broken():
        raise ZeroDivisionError

    monkeypatch.setattr(agreement, "gather", lambda own: [own, None, "no memory"])
    with refused("other-rank-failed", 2, kind=UnsupportedError):
        agreement.done_by_all(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        agreement.done_by_all(broken)
    monkeypatch.setattr(agreement, "gather", lambda own: [own])
    assert agreement.done_by_all(lambda: 7) == 7
