"""A group of rank processes that run one case after another.

Many cases of one kind share their processes, and so what those have set up. One that fails or hangs ends its processes; the
next case gets new ones.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import worker
from patience import Patience

from megatron_pipemem.tools.cpu.ranks import end_ranks, start_ranks

IDLE_SECONDS = 120
LOOK_SECONDS = 5
LOST_PEER_SECONDS = 5


class CaseFailed(AssertionError):
    """A rank raised, died, or did nothing any more."""


@dataclass
class Ranks:
    """Processes started on demand, which call ``run(case)`` of the module ``program`` and print into ``logs``.

    They are ``forked`` from a process that has imported ``megatron.training``, or start by themselves.
    """

    program: str
    logs: Path
    size: int = 4
    forked: bool = True
    _processes: list[BaseProcess] = field(default_factory=list)
    _connections: list[Connection] = field(default_factory=list)
    _starts: int = 0

    def run(self, case: dict) -> list[dict]:
        """What ``run(case)`` returned on every rank; of all, or of the case's first ``ranks``.

        Raises:
            CaseFailed: with the traceback of every rank that has one.
        """
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send(case)
            return self._replies()[: case.get("ranks", self.size)]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes: they are idle or of no more use."""
        end_ranks(self._processes)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        self._starts += 1
        self._connections, theirs = zip(*(Pipe() for _ in range(self.size)), strict=True)
        # What somebody has searched on this machine before must not decide what is tested.
        environment = {"XDG_CACHE_HOME": str(self.logs / "cache")}
        arguments = [(self.program, connection, environment) for connection in theirs]
        logs = [self._log(rank) for rank in range(self.size)]
        self._processes = start_ranks(worker.serve, arguments, logs, forked=self.forked)
        for connection in theirs:
            connection.close()
        self._replies()

    def _replies(self) -> list[dict]:
        """One of every rank."""
        replies: dict[int, dict] = {}
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        patience, deadline = None, math.inf
        while waiting and time.monotonic() < deadline:
            ready = wait(list(waiting), timeout=LOOK_SECONDS)
            if not ready:  # only now, because to ask for processor seconds reads about every process of the machine
                patience = patience or Patience(*(process.pid for process in self._processes), seconds=IDLE_SECONDS)
                if patience.is_over:
                    break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    replies[rank] = connection.recv()
                except EOFError:
                    replies[rank] = {"error": f"died:\n{self._tail(rank)}"}
                if "error" in replies[rank]:
                    # The others wait for this one in some collective; some of them may yet say why.
                    deadline = min(deadline, time.monotonic() + LOST_PEER_SECONDS)
        errors = [f"rank {rank}: {reply['error']}" for rank, reply in sorted(replies.items()) if "error" in reply]
        missing = sorted(set(range(self.size)) - set(replies))
        if missing:
            errors.append(
                f"ranks {missing} wait for something that does not come; the first one's log ends\n"
                f"{self._tail(missing[0])}"
            )
        if errors:
            raise CaseFailed("\n".join(errors))
        return [replies[rank] for rank in range(self.size)]

    def _log(self, rank: int) -> Path:
        return self.logs / f"{self.program}-{self._starts}-rank{rank}.log"

    def _tail(self, rank: int, characters: int = 3000) -> str:
        return self._log(rank).read_text(errors="replace")[-characters:]


WARM = ("te_stand_in", "megatron_pipemem.tools.cpu.warm")


class ConductedRanks:
    """Ranks that look for packages in the folders of ``path`` first: a process between has them forked.

    It imports the modules of ``preload`` once, before any rank is forked.
    """

    def __init__(self, program: str, logs: Path, path: list[str], size: int = 4, preload: Sequence[str] = WARM):
        self.program, self.size = program, size
        self._connection, theirs = Pipe()
        arguments = theirs, path, logs, list(preload)
        self._conductor = get_context("spawn").Process(target=_conduct, args=arguments)
        self._conductor.start()
        theirs.close()

    def run(self, case: dict, program: str | None = None, size: int | None = None) -> list[dict]:
        """As of ``Ranks``. Another ``program`` or ``size`` has ranks of its own, which are forked from the same process."""
        self._connection.send((program or self.program, size or self.size, case))
        reply = self._connection.recv()
        if isinstance(reply, str):
            raise CaseFailed(reply)
        return reply

    def stop(self) -> None:
        """End the processes."""
        self._connection.close()
        self._conductor.join()


def _conduct(connection: Connection, path: list[str], logs: Path, preload: list[str]) -> None:
    sys.path[:0] = path
    get_context("forkserver").set_forkserver_preload(preload)
    # Python 3.12's fork server imports its modules from these folders only, and skips without a word those it does not find.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    kinds: dict[tuple[str, int], Ranks] = {}
    try:
        while True:
            program, size, case = connection.recv()
            ranks = kinds.setdefault((program, size), Ranks(program, logs, size))
            try:
                connection.send(ranks.run(case))
            except CaseFailed as failure:
                connection.send(str(failure))
    except EOFError:
        for ranks in kinds.values():
            ranks.stop()
