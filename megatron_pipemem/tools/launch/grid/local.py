"""Train the points of a grid on this machine, several at a time.

If ``pipemem grid`` was killed and left a training process running, that process is ended before its point starts again.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import IO

from megatron_pipemem.errors import PipememError, UnsupportedError
from megatron_pipemem.tools.launch.command import Command, command, min_nodes
from megatron_pipemem.tools.launch.feasibility import check_data, check_devices
from megatron_pipemem.tools.launch.grid.store import Result, Store, try_lock

_PATIENCE_SECONDS = 60.0

Event = Callable[[int, Result | None], object]
"""Called with a point's number and ``None`` when the point starts, and with its number and result when it has ended."""


class LocalRunner:
    """Trains the points of a grid, each in a process of its own.

    ``on_event`` is called from several threads. ``command_of`` returns the command that trains a point, by default a
    torchrun command for this machine.
    """

    def __init__(self, store: Store, on_event: Event, command_of: Callable[[Store, int], Command] | None = None):
        self._store = store
        self._on_event = on_event
        self._command_of = command_of or _on_this_node
        self._stopping = threading.Event()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._guard = threading.Lock()

    def train(
        self, indices: Sequence[int], max_parallel: int, on_stop: Callable[[int], object] = lambda running: None
    ) -> None:
        """Train the points with these numbers, ``max_parallel`` at a time, until all have a result.

        After an exception, for example an interrupt, all running points are told to end by SIGTERM. ``on_stop`` is then
        called with the number of running points.
        """
        with ThreadPoolExecutor(max_parallel, "grid") as pool:
            futures = [pool.submit(self._train, index) for index in indices]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stopping.set()
                with self._guard:
                    for process in self._running:
                        process.terminate()
                    on_stop(len(self._running))
                raise

    def _train(self, index: int) -> None:
        if self._stopping.is_set():
            return
        place = self._store.place(index)
        try:
            with (place / ".running").open("a+", encoding="utf-8") as lock:
                if not try_lock(lock):
                    _end_left_over(lock, place)
                self._on_event(index, None)
                self._store.discard_result(index)
                code = self._wait(self._command_of(self._store, index), self._store.log(index), lock)
            if code is None or self._stopping.is_set():
                return
            result = self._store.finish(index, code)
        except PipememError as error:  # concerns this point only
            result = self._store.fail(index, str(error))
        self._on_event(index, result)

    def _wait(self, started: Command, log: Path, lock: IO[str]) -> int | None:
        """Run the command of a point, and return its exit code; ``None`` if the grid is ending and nothing was started.

        The child process inherits the lock file, so the lock holds even if this process is killed.
        """
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **started.environment}
        with log.open("ab") as output, self._guard:
            if self._stopping.is_set():
                return None
            process = subprocess.Popen(
                started.words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
            self._running.add(process)
        lock.truncate(0)
        json.dump({"pid": process.pid, "host": platform.node()}, lock)
        lock.flush()
        code = process.wait()
        with self._guard:
            self._running.discard(process)
        return code


def _on_this_node(store: Store, index: int) -> Command:
    run = store.run(index)
    if (nodes := min_nodes(run)) > 1:
        raise UnsupportedError(
            "does-not-fit",
            f"the {run.parallelism.ranks} ranks of the point fill {nodes} nodes, and only this node is used; pass "
            "--launcher slurm",
        )
    check_devices(run)
    check_data(run)
    return command(run)


def _end_left_over(lock: IO[str], place: Path) -> None:
    """End the training process that a killed grid has left, and take over its lock.

    Raise an UnsupportedError if the lock is not free after 60 seconds: the process may be on another machine.
    """
    lock.seek(0)
    try:
        holder = json.load(lock)
    except ValueError:
        holder = {}
    if holder.get("host") == platform.node():
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(holder["pid"], signal.SIGTERM)  # it holds the lock, so the number is not yet another process's
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not try_lock(lock):
        if time.monotonic() > deadline:
            raise UnsupportedError(
                "busy", f"{place} is still being trained by {holder or 'an unknown process'}; end that process first"
            )
        time.sleep(0.1)
