"""Where ranks stand, and who asks: ranks as boards in one process. ``cpu/test_refused_ranks.py`` asks real ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_pipemem.runtime import executor, first_failure, positions
from megatron_pipemem.runtime.executor import Progress
from megatron_pipemem.runtime.first_failure import FailureBoard, _Positions, install_signal, remove_signal
from megatron_pipemem.schedule.action import Action, Kind

SIZE = 3


@pytest.fixture
def boards() -> list[FailureBoard]:
    store = dist.TCPStore("127.0.0.1", 0, SIZE, is_master=True, wait_for_workers=False)
    boards = [FailureBoard(rank, SIZE, "127.0.0.1", store.port) for rank in range(SIZE)]
    boards[0].store = store  # lives as long as the boards
    return boards


@pytest.fixture
def progress(monkeypatch) -> Progress:
    progress = Progress(thread=threading.get_ident())
    monkeypatch.setattr(executor, "PROGRESS", progress)
    return progress


def runs(progress: Progress, awaited: tuple[Action, int] | None) -> None:
    """Let the third action of three run since 90 s."""
    actions = [SimpleNamespace(action=Action(kind, 0, 4)) for kind in (Kind.RECV_F, Kind.F, Kind.I)]
    step = SimpleNamespace(instructions=actions, awaited=awaited)
    progress.steps, progress.position, progress.since = 7, 2, time.monotonic() - 90
    progress.executor = lambda: step


def place(rank: int = 1) -> str:
    return positions.own_position(rank).partition("; in ")[0]


def test_a_position_says_the_action_since_when_and_for_what_it_waits(progress):
    assert place() == "rank 1: before its first step"
    runs(progress, None)
    assert place() == "rank 1: step 7, action 3 of 3, 0I4, for 90 s: waits for no message"
    runs(progress, (Action(Kind.RECV_I, 0, 4), 5))
    assert place() == "rank 1: step 7, action 3 of 3, 0I4, for 90 s: waits for 0RECV_I4 from rank 5"
    runs(progress, (Action(Kind.SEND_F, 0, 4), 5))
    assert place().endswith("waits for 0SEND_F4 to rank 5")
    assert "in positions.py:" in positions.own_position(1) and "test_positions.py:" in positions.own_position(1)


@pytest.mark.parametrize(("has_ended", "words"), [(True, ""), (False, ", which its GPU has not ended")])
def test_a_step_that_is_launched_may_still_run_on_its_gpu(progress, has_ended, words):
    runs(progress, None)
    progress.end()
    assert place() == "rank 1: after step 7, for 0 s"
    progress.launched = SimpleNamespace(query=lambda: has_ended)
    assert place() == f"rank 1: after step 7{words}, for 0 s"
    progress.patience, progress.since = 60.0, time.monotonic() - 61
    assert [progress.stands_still(), progress.stands_still()] == [not has_ended, False]


def test_a_place_is_told_once_and_only_after_the_patience(progress):
    runs(progress, None)
    assert not progress.stands_still()
    progress.patience = 91.0
    assert not progress.stands_still()
    progress.patience = 89.0
    assert [progress.stands_still(), progress.stands_still()] == [True, False]
    progress.position = 1
    assert progress.stands_still()


def test_the_first_rank_that_asks_shows_all_and_names_those_without_an_answer(progress, boards, caplog, monkeypatch):
    monkeypatch.setattr(positions, "_SECONDS", 0.1)
    monkeypatch.setattr(first_failure, "_POLL_SECONDS", 0.1)
    runs(progress, (Action(Kind.RECV_I, 0, 4), 2))
    first, second, third = map(_Positions, boards)
    for rank in (first, second, third):
        rank.poll()
    assert not caplog.messages
    progress.patience = 1.0
    second.poll()
    first.poll()
    assert len(caplog.messages) == 2, "the own logs, and nothing of others yet"
    time.sleep(0.3)
    second.poll()
    none, *both, causes = caplog.messages[2:]
    assert none == "rank 2: no answer" and causes.endswith("be: 2")
    assert [re.match(r"rank (\d): step 7", text)[1] for text in both] == ["0", "1"]
    runs(progress, None)
    progress.position = 1
    third.poll()
    assert boards[0].questions() == 1, "another rank has asked already"


def test_a_signal_is_heard_and_left_as_it_was(boards, progress):
    before = signal.getsignal(signal.SIGUSR2)
    install_signal()
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert first_failure._signal.has_come() and not first_failure._signal.has_come()
    finally:
        remove_signal()
    assert signal.getsignal(signal.SIGUSR2) == before == signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1


def test_a_program_that_uses_the_signal_keeps_it():
    handler = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGUSR2, handler)
    try:
        install_signal()
        assert first_failure._signal is None and signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_what_a_program_takes_later_stays_its_own():
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    handler = lambda number, frame: None  # noqa: E731
    install_signal()
    signal.signal(signal.SIGUSR2, handler)
    signal.set_wakeup_fd(writer.fileno())
    try:
        remove_signal()
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert signal.set_wakeup_fd(-1) == writer.fileno()
        reader.close()
        writer.close()
