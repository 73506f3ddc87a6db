"""The board of a job's first failure: ranks as threads, which share a store."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.runtime import first_failure
from megatron_pipemem.runtime.first_failure import Failure, FailureBoard, follow, guarded, leave_job, watch_job

SIZE = 4


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def boards(port: int) -> list[FailureBoard]:
    return [FailureBoard(rank, SIZE, "127.0.0.1", port) for rank in range(SIZE)]


@pytest.fixture
def store(port: int) -> dist.TCPStore:
    """The store that rank 0's rendezvous runs."""
    return dist.TCPStore("127.0.0.1", port, SIZE, is_master=True, wait_for_workers=False)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, port: int):
    """The environment of rank 1 of a job whose store is not open."""
    for name, value in {"RANK": 1, "WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    leave_job()


def test_the_first_failure_stays(store, boards):
    assert boards[2].first() is None
    assert boards[2].claim("UnsupportedError: this", ranks={3, 2})
    assert not boards[1].claim("UnsupportedError: that")
    assert boards[0].first() == Failure(2, "UnsupportedError: this", [2, 3])
    assert f"{boards[1].first()}" == "rank 2 failed: UnsupportedError: this"


def test_a_store_that_closes_is_noticed_without_a_word(boards, port, capfd):
    """As at the end of a run, when rank 0 ends before the others."""
    store = dist.TCPStore("127.0.0.1", port, SIZE, is_master=True, wait_for_workers=False)
    assert boards[1].first() is None
    del store
    with pytest.raises(ConnectionError):
        boards[1].first()
    assert capfd.readouterr() == ("", "")


def test_only_ranks_of_the_same_model_follow(store, boards):
    boards[0].claim("an error", ranks={0, 1})
    reactions: dict[int, Failure] = {}
    done = threading.Event()
    with ThreadPoolExecutor(SIZE) as pool:
        for board in boards[1:]:
            pool.submit(follow, board, done, lambda failure, rank=board.rank: reactions.update({rank: failure}))
        while 1 not in reactions:
            time.sleep(0.01)
        done.set()
    assert reactions == {1: Failure(0, "an error", [0, 1])}


def test_rank_0_opens_the_store_and_stays_until_all_have_read(boards):
    """Before there is a process group. The last rank comes late."""
    readings = []

    def read(board: FailureBoard, delay: float) -> None:
        time.sleep(delay)
        while (failure := board.first()) is None:
            time.sleep(0.01)
        readings.append((board.rank, failure.error))

    assert boards[0].claim("an early error")
    with ThreadPoolExecutor(SIZE) as pool:
        for board in boards[1:]:
            pool.submit(read, board, board.rank * 0.3)
        began = time.monotonic()
        boards[0].stay()
    assert time.monotonic() - began < first_failure._KEEPER_SECONDS
    assert sorted(readings) == [(rank, "an early error") for rank in (1, 2, 3)]


def test_another_rank_waits_for_the_store_and_leaves_when_it_has_written(boards, port):
    assert boards[3].claim("an early error")
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(boards[3].stay)
        time.sleep(0.5)
        assert not staying.done()
        store = dist.TCPStore("127.0.0.1", port, SIZE, is_master=True, wait_for_workers=False)
        staying.result()
    failure = boards[0].first()
    assert failure is not None and failure.rank == 3
    del store


def test_a_job_is_left_as_it_was(job):
    hook, threads = sys.excepthook, threading.active_count()
    watch_job()
    assert sys.excepthook != hook and threading.active_count() == threads
    watch_job(starts=True, ranks={0, 1})
    watch_job(starts=True, ranks={1, 3})
    assert first_failure._watch.ranks == {0, 1, 3} and threading.active_count() == threads + 1
    leave_job()
    assert sys.excepthook == hook and threading.active_count() == threads


def test_nothing_is_watched_alone_or_under_a_guard(job, monkeypatch):
    with guarded():
        watch_job(starts=True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    watch_job(starts=True)
    assert first_failure._watch is None


@pytest.mark.parametrize("refusal", [UnsupportedError("a-code", "a sentence"), ValueError("a slip")])
def test_only_refusals_are_written_and_the_cause_counts(job, boards, store, refusal):
    """The error that ends the process may be another one, raised from a refusal or while it was handled."""
    watch_job()
    printed = []
    first_failure._watch._excepthook = lambda *error: printed.append(error)
    try:
        try:
            raise refusal
        except Exception:
            raise RuntimeError("of the program")  # noqa: B904 - without a cause
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        assert printed == [(RuntimeError, error, error.__traceback__)]
    written = boards[0].first()
    if isinstance(refusal, UnsupportedError):
        assert written == Failure(1, "UnsupportedError: a sentence [a-code]", [])
    else:
        assert written is None


def test_a_thread_that_moves_is_left_alone(job, boards, store, monkeypatch):
    """It may save something. One that stands still is ended."""
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        first_failure._watch._done.set()

    def move(depth: int) -> None:
        if depth:
            move(depth - 1)

    monkeypatch.setattr(first_failure, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(first_failure, "_BLOCKED_LOOKS", 50)
    monkeypatch.setattr(first_failure, "end_process", end)
    watch_job(starts=True)
    boards[0].claim("an error")
    until = time.monotonic() + 3
    while time.monotonic() < until:
        move(random.randrange(300))
    assert not codes
    first_failure._watch._done.wait()
    assert codes == [1]


def test_the_looks_of_many_ranks_are_no_load_for_the_store():
    sizes = (2, 500, 8_000)
    boards = [FailureBoard(0, size, "localhost", 1) for size in sizes]
    assert [board.poll_seconds for board in boards] == [0.5, 0.5, 8.0]
    assert all(size / board.poll_seconds <= 1_000 for size, board in zip(sizes, boards, strict=True))
