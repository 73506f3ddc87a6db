"""A rank that is refused ends the others with its sentence, without torchrun and without ``pipemem run``.

One that stands still is found by a signal to any rank.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from lanes import rest_nightly
from launching import run_plain
from refusals import code_in

from megatron_pipemem.tools.cpu.ranks import end_ranks, start_ranks

PROGRAM = Path(__file__).with_name("refused_rank.py")


@pytest.mark.parametrize(
    ("place", "rank", "size", "code"),
    rest_nightly(
        [
            ("flags", 0, 2, "unknown-schedule"),  # before there is a process group, by the rank that keeps the store
            ("flags", 1, 2, "unknown-schedule"),
            ("settings", 1, 2, "unknown-schedule"),  # in the default process group, before Megatron's
            ("step", 0, 2, "data-iterator"),  # the backend of the other rank sees that this one has ended
            ("kernel", 1, 2, "data-iterator"),  # the host of the other rank sees nothing
            ("vocabulary", 1, 4, "vocabulary-model"),  # the order of the ranks suits only two of them
        ],
        [
            ("flags", 0, 2, "unknown-schedule"),
            ("kernel", 1, 2, "data-iterator"),
            ("vocabulary", 1, 4, "vocabulary-model"),
        ],
        "the two other places, and runtime/test_first_failure.py",
    ),
)
def test_a_refused_rank_ends_all_ranks_with_its_sentence(tmp_path: Path, place: str, rank: int, size: int, code: str):
    logs = [tmp_path / f"rank-{number}.log" for number in range(size)]
    processes = start_ranks(run_plain, [(PROGRAM, place, str(rank))] * size, logs)
    try:
        for process in processes:
            process.join()  # tests/watching/patience.py ends a rank that waits
    finally:
        end_ranks(processes)
    assert [process.exitcode for process in processes] == [1] * size
    texts = [log.read_text() for log in logs]
    assert [code_in(text) for text in texts] == [code] * size
    are_told = [f"rank {rank} failed: " in text for text in texts]
    assert are_told == [place != "vocabulary" and number != rank for number in range(size)]


def test_all_ranks_say_where_they_stand(tmp_path: Path):
    """Rank 1 stands still in a forward of its second step. Rank 0 is asked, whose main thread waits in C++ code."""
    logs = [tmp_path / f"rank-{number}.log" for number in range(2)]
    processes = start_ranks(run_plain, [(PROGRAM, "still", "1")] * 2, logs)
    try:
        wait_for("blocked", logs[1])
        os.kill(processes[0].pid, signal.SIGUSR2)
        wait_for("where the cause may be", logs[0])
    finally:
        end_ranks(processes)
    lines = [line.split("positions:")[-1] for line in logs[0].read_text().splitlines()]
    first, second, last = [line for line in lines if "rank" in line][-3:]
    assert re.fullmatch(
        r"rank 1: step 2, action \d+ of \d+, [12]F\d, for \d+ s: waits for no message; "
        r"in refused_rank.py:\d+ blocked_forward_step < .*",
        first,
    )
    assert re.fullmatch(
        r"rank 0: step 2, action \d+ of \d+, [03][FIW]\d, for \d+ s: waits for [03](RECV|SEND)_[FI]\d (from|to) rank 1; "
        r"in transport.py:\d+ _wait < .*",
        second,
    )
    assert last == "ranks that wait for no other rank, where the cause may be: 1"


def wait_for(words: str, log: Path) -> None:
    while not log.exists() or words not in log.read_text():  # tests/watching/patience.py ends a test that waits
        time.sleep(0.05)
