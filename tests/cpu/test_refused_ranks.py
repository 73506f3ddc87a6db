"""A rank that is refused ends the others with its sentence, without torchrun and without ``pipemem run``."""

from __future__ import annotations

from pathlib import Path

import pytest
from lanes import rest_nightly
from launching import run_plain
from refusals import code_in

from megatron_pipemem.tools.cpu.ranks import end_ranks, start_ranks


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
    program = Path(__file__).with_name("refused_rank.py")
    logs = [tmp_path / f"rank-{number}.log" for number in range(size)]
    processes = start_ranks(run_plain, [(program, place, str(rank))] * size, logs)
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
