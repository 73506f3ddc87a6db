"""Report the position of every rank when a run stands still: the running action, the awaited message, and the seconds.

Any rank asks all others: the one that gets SIGUSR2, or one that has stood still for most of the process group's time-out,
before NCCL's watchdog ends it. The thread of ``runtime.first_failure`` answers, because the training thread may be
blocked. This module is loaded at the first question.

    rank 0: step 3, action 11 of 32, 0F2, for 93 s: waits for 0RECV_F2 from rank 1; in transport.py:391 _wait < ...
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Protocol

from megatron_pipemem.schedule.action import RECEIVES

logger = logging.getLogger(__name__)

_FRAMES = 4
"""Functions of the training thread's stack to show, the innermost first."""
_SECONDS = 10.0
"""The longest time in which answers are read. A stopped process gives none."""
_LINES = 64
"""Ranks to show at most."""
_WAITS = "waits for"


def own_position(rank: int) -> str:
    """Return where this rank's training thread stands, and log it."""
    module = sys.modules.get("megatron_pipemem.runtime.executor")
    progress = None if module is None else module.PROGRESS
    text = (
        f"rank {rank}: before its first step" if progress is None or not progress.steps else _in_steps(rank, progress)
    )
    thread = None if progress is None else progress.thread
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    stack = [] if frame is None else traceback.extract_stack(frame)[: -_FRAMES - 1 : -1]
    text += "; in " + " < ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in stack)
    logger.warning("%s", text)
    return text


def _in_steps(rank: int, progress) -> str:
    executor, position = progress.executor(), progress.position
    seconds = time.monotonic() - progress.since
    if executor is None or position is None:
        device = "" if progress.launched is None or progress.launched.query() else ", which its GPU has not ended"
        return f"rank {rank}: after step {progress.steps}{device}, for {seconds:.0f} s"
    instructions, awaited, waits = executor.instructions, executor.awaited, f"{_WAITS} no message"
    if awaited is not None:
        message, peer = awaited
        waits = f"{_WAITS} {message} {'from' if message.kind in RECEIVES else 'to'} rank {peer}"
    return (
        f"rank {rank}: step {progress.steps}, action {position + 1} of {len(instructions)}, "
        f"{instructions[position].action}, for {seconds:.0f} s: {waits}"
    )


class Board(Protocol):
    """The part of a ``FailureBoard`` that is used here. Its module imports this one."""

    @property
    def size(self) -> int: ...

    @property
    def poll_seconds(self) -> float: ...

    def answers(self, question: int, ranks: set[int]) -> dict[int, str]: ...


class Answers:
    """Where all ranks stand, by their answers to a question of this rank.

    The thread that looks for failures reads them between its looks, so no failure waits for a rank that does not answer.
    """

    def __init__(self, board: Board, question: int):
        self._board, self._question = board, question
        self._deadline = time.monotonic() + _SECONDS + board.poll_seconds
        self._texts: dict[int, str] = {}

    def are_complete(self) -> bool:
        """Read further answers, and return whether all are read or it is too late for others."""
        missing = set(range(self._board.size)) - self._texts.keys()
        self._texts |= self._board.answers(self._question, missing)
        return len(self._texts) == self._board.size or time.monotonic() > self._deadline

    def log(self) -> None:
        """Log all places. The first ones are those of the ranks that give no answer or wait for no message.

        A rank that waits for another rank's message has not caused the standstill.
        """
        size, texts = self._board.size, self._texts
        texts |= {rank: f"rank {rank}: no answer" for rank in range(size) if rank not in texts}
        waiting = {rank for rank, text in texts.items() if re.search(rf"{_WAITS} \d", text)}
        shown = sorted(texts, key=lambda rank: (rank in waiting, rank))
        causes = ", ".join(map(str, shown[: len(shown) - len(waiting)])) or "none"
        lines = [texts[rank] for rank in shown[:_LINES]]
        if len(shown) > _LINES:
            lines.append(f"{len(shown) - _LINES} more ranks: see their own logs")
        for line in (*lines, f"ranks that wait for no other rank, where the cause may be: {causes}"):
            logger.warning("%s", line)
