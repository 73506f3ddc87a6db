"""Ranks that are forked from a process with Megatron in it, and new ones."""

from __future__ import annotations

import json
import time
from pathlib import Path

import launching
import pytest
from lanes import rest_nightly
from patience import Patience, runs

from megatron_pipemem.tools.cpu.ranks import end_ranks, start_ranks


@pytest.mark.parametrize("forked", rest_nightly([True, False], [False], "end_to_end forks its ranks"))
def test_every_rank_is_a_process_with_torchruns_environment(tmp_path: Path, forked: bool) -> None:
    log = tmp_path / "log"
    log.write_text("a line that stays\n")
    processes = start_ranks(launching.tell, [(10,), (20,)], [log, log], forked=forked)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    first, *lines = log.read_text().splitlines()
    assert first == "a line that stays"
    results = sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda result: result["number"])
    lane = {"imported": forked, "devices": 2 if forked else 0}
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert results == [
        {"RANK": rank, "LOCAL_RANK": rank, "number": number, **size, **lane} for rank, number in (("0", 10), ("1", 20))
    ]


def test_a_rank_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (process,) = start_ranks(launching.sleep_beside_a_child, [()], [log], forked=False)
    patience = Patience(process.pid)
    while not (log.exists() and log.read_text().endswith("\n")):
        assert not patience.is_over
        time.sleep(0.05)
    end_ranks([process])
    assert process.exitcode == -9
    while runs(int(log.read_text())):
        assert not patience.is_over
        time.sleep(0.05)
    end_ranks([process])  # nothing is left to end


def test_a_rank_is_ended_before_it_leads_its_session(tmp_path: Path) -> None:
    (process,) = start_ranks(launching.sleep_beside_a_child, [()], [tmp_path / "log"], forked=False)
    end_ranks([process])
    assert process.exitcode == -9
