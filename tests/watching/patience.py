"""Tell a hang from slow progress on a busy machine: a process that hangs uses no processor time."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IDLE_SECONDS = 300
LEAST_SHARE = 0.01  # of one core; polling from time to time uses less
LOOK_SECONDS = 10


class Patience:
    """Watch processes and their children, and end after ``seconds`` in which they used no processor time."""

    def __init__(self, *roots: int, seconds: float = IDLE_SECONDS):
        self._roots, self._seconds = roots, seconds
        self._used, self._since = processor_seconds(roots), time.monotonic()

    @property
    def is_over(self) -> bool:
        used, now = processor_seconds(self._roots), time.monotonic()
        if abs(used - self._used) > LEAST_SHARE * self._seconds:
            self._used, self._since = used, now
        return now - self._since > self._seconds


def processor_seconds(roots: tuple[int, ...]) -> float:
    """Return the processor seconds of these processes and all their children, ended ones included. Linux only."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = file.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        pid = int(file.parent.name)
        parents[pid], ticks[pid] = int(words[1]), sum(map(int, words[11:15]))

    def is_ours(pid: int) -> bool:
        while pid not in roots and pid in parents:
            pid = parents[pid]
        return pid in roots

    return sum(taken for pid, taken in ticks.items() if is_ours(pid)) / os.sysconf("SC_CLK_TCK")


def runs(pid: int) -> bool:
    """Return whether there is such a process. One that its parent has not waited for has ended. Linux only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Stuck(BaseException):
    """The error of a test that hangs."""


@contextmanager
def interrupted_when_stuck() -> Iterator[None]:
    """Raise ``Stuck`` in the main thread if this process and its children do nothing, and print all threads' stacks."""

    def stop(*_: object) -> None:
        raise Stuck(f"nothing has happened for {IDLE_SECONDS} s")

    def watch() -> None:
        patience = None
        while not done.wait(LOOK_SECONDS):
            patience = patience or Patience(os.getpid())
            if patience.is_over:
                patience = None
                faulthandler.dump_traceback(sys.__stderr__)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    done = threading.Event()
    watcher = threading.Thread(target=watch, daemon=True)
    before = signal.signal(signal.SIGUSR1, stop)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
