"""A group of rank processes that run one case after another.

Importing Megatron takes longer than training a tiny model, so many cases of one kind share their processes. One that fails or
hangs ends its processes; the next case gets new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 300
CASE_SECONDS = 240
LOST_PEER_SECONDS = 5


class CaseFailed(AssertionError):
    """A rank raised, died, or did not finish in time."""


@dataclass
class Ranks:
    """Processes started on demand.

    Args:
        program: module beside this one whose ``run(case)`` every rank calls.
        logs: folder for what the ranks print.
        size: number of ranks.
    """

    program: str
    logs: Path
    size: int = 4
    _processes: list[subprocess.Popen] = field(default_factory=list)
    _starts: int = 0

    def run(self, case: dict, seconds: float = CASE_SECONDS) -> list[dict]:
        """What ``run(case)`` returned on every rank; of all, or of the case's first ``ranks``.

        Raises:
            CaseFailed: with the traceback of every rank that has one.
        """
        if not self._processes:
            self._start()
        try:
            for process in self._processes:
                process.stdin.write(json.dumps(case) + "\n")
                process.stdin.flush()
            return self._replies(seconds)[: case.get("ranks", self.size)]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes and what they started: Megatron's checkpoint writer does. They are idle or of no more use."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self._processes.clear()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._starts += 1
        for rank in range(self.size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONWARNINGS": "ignore",
                # What somebody has searched on this machine before must not decide what is tested.
                "XDG_CACHE_HOME": str(self.logs / "cache"),
            }
            with self._log(rank).open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), self.program],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env=environment,
                        start_new_session=True,
                    )
                )
        self._replies(START_SECONDS)

    def _replies(self, seconds: float) -> list[dict]:
        """One line of JSON from every rank."""
        replies: dict[int, dict] = {}
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            for rank, process in enumerate(self._processes):
                ready.register(process.stdout, selectors.EVENT_READ, rank)
            while len(replies) < self.size and time.monotonic() < deadline:
                for key, _ in ready.select(timeout=1):
                    rank = key.data
                    line = key.fileobj.readline()
                    ready.unregister(key.fileobj)
                    replies[rank] = json.loads(line) if line else {"error": f"died:\n{self._tail(rank)}"}
                    if "error" in replies[rank]:
                        # The others wait for this one in some collective; some of them may yet say why.
                        deadline = min(deadline, time.monotonic() + LOST_PEER_SECONDS)
        errors = [f"rank {rank}: {reply['error']}" for rank, reply in sorted(replies.items()) if "error" in reply]
        missing = sorted(set(range(self.size)) - set(replies))
        if missing:
            errors.append(
                f"ranks {missing} did not finish in {seconds} s; the first one's log ends\n{self._tail(missing[0])}"
            )
        if errors:
            raise CaseFailed("\n".join(errors))
        return [replies[rank] for rank in range(self.size)]

    def _log(self, rank: int) -> Path:
        return self.logs / f"{self.program}-{self._starts}-rank{rank}.log"

    def _tail(self, rank: int, characters: int = 3000) -> str:
        return self._log(rank).read_text(errors="replace")[-characters:]
