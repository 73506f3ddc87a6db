"""One rank decides for all: its result and its errors arrive everywhere."""

from __future__ import annotations

import pytest
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore import agreement


def test_a_lone_process_decides_for_itself():
    assert agreement.decided_by_first(lambda: 7) == 7
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
