"""End all ranks of a job when one is refused, and log the cause on all of them.

The first rank that fails writes its error to a key of a store that all ranks can reach. The other ranks poll that key in
a thread, because their main thread may wait for the failed rank without end: in a rendezvous, in a collective, or for a
device. The store is the one of PyTorch's default process group. Before there is a group, it is the store that the
``env://`` rendezvous will use, at MASTER_ADDR:MASTER_PORT. torchrun runs that store. Without torchrun, rank 0 does.

The same thread makes all ranks log their positions if one of them gets SIGUSR2 or stands still (``runtime.positions``).

``watch_job`` is for programs that enable the plugin by themselves. ``pipemem run`` uses the same board, and handles all
errors of its script.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_pipemem.errors import PipememError, with_code

if TYPE_CHECKING:
    from megatron_pipemem.runtime.positions import Answers

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_MOST_POLLS = 1_000  # per second, of all ranks of a job: the store serves PyTorch's own rendezvous too
_STORE_TIMEOUT = timedelta(seconds=5)
_KEEPER_SECONDS = 60.0
"""The longest time that a failed rank waits for ranks which have not joined the default process group, and may still import."""
_READING_SECONDS = 3.0
"""The longest time that rank 0, whose end may close the store, waits for the other ranks to read the failure."""
_BLOCKED_LOOKS = 10
"""A thread that so many looks in a row, ``_POLL_SECONDS`` apart, find at one instruction waits for the rank that has ended.

Looks and not seconds: a process that got no processor for a while has not looked either.
"""


@dataclass(frozen=True)
class Failure:
    """The first failure of a job. ``ranks`` cannot go on without the rank that failed; if empty, no rank can."""

    rank: int
    error: str
    ranks: Collection[int] = ()

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


def summary(error: BaseException) -> str:
    """Return the class and the message of an error, with its code if it is of this package."""
    return f"{type(error).__name__}: {with_code(error)}"


class FailureBoard:
    """The key of the job's first failure, in the store at ``host:port``.

    Each thread has its own connection, which is opened at its first use.
    """

    def __init__(self, rank: int, size: int, host: str, port: int):
        self.rank = rank
        self.address = (host, port)
        self.size = size
        self._runs_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self._key = f"pipemem/first-failure/{run}"
        self._local = threading.local()
        self._unsaid: str | None = None
        self._has_read = False
        self._was_open = False
        """Whether the store has been open. If it is open no longer, the process that ran it has ended."""

    @property
    def poll_seconds(self) -> float:
        """Seconds between two looks of a rank at the board: more in a job of more ranks, whose looks one store answers."""
        return max(_POLL_SECONDS, self.size / _MOST_POLLS)

    @classmethod
    def from_environment(cls) -> FailureBoard | None:
        """Return the board of this rank's job, or None for one process or without torchrun's variables."""
        job = os.environ
        size = int(job.get("WORLD_SIZE", 1))
        if size < 2 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= job.keys():
            return None
        return cls(int(job["RANK"]), size, job["MASTER_ADDR"], int(job["MASTER_PORT"]))

    @classmethod
    def of_job(cls) -> FailureBoard | None:
        """Return the board in the store of the default process group; before there is a group, ``from_environment``.

        Return None if the group has one rank, or another kind of store than a TCPStore.
        """
        dist: Any = sys.modules.get("torch.distributed")  # without torch, there is no group
        if dist is None or not dist.is_initialized():
            return cls.from_environment()
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, dist.TCPStore) or dist.get_world_size() < 2:
            return None
        return cls(dist.get_rank(), dist.get_world_size(), store.host, store.port)

    def first(self) -> Failure | None:
        """Return the first failure. Raise a ConnectionError if the process that runs the store has ended."""
        store = self._store()
        if self._has_closed():
            raise ConnectionError("the rendezvous store has closed")
        try:
            if store is None or not store.check([self._key]):
                return None
            if not self._has_read:
                store.add(f"{self._key}/readers", 1)
                self._has_read = True
            return Failure(**json.loads(store.get(self._key)))
        except RuntimeError as error:
            raise ConnectionError("the rendezvous store has closed") from error

    def questions(self, more: int = 0) -> int:
        """Return the number of requests for the positions of all ranks, after adding ``more``."""
        with self._connected() as store:
            return 0 if store is None else store.add(f"{self._key}/questions", more)

    def answer(self, question: int, text: str) -> None:
        """Answer all questions up to this one, for this rank."""
        with self._connected() as store:
            store.set(f"{self._key}/answers/{self.rank}", f"{question} {text}")

    def answers(self, question: int, ranks: Iterable[int]) -> dict[int, str]:
        """Return the answers of these ranks to a question so far, or to a later one."""
        texts = {}
        with self._connected() as store:
            for rank in ranks:
                key = f"{self._key}/answers/{rank}"
                number, _, text = store.get(key).decode().partition(" ") if store.check([key]) else ("0", "", "")
                if int(number) >= question:
                    texts[rank] = text
        return texts

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Yield this thread's store, and turn the errors of a store that has closed into a ConnectionError."""
        try:
            yield self._store()
        except RuntimeError as error:
            raise ConnectionError("the rendezvous store has closed") from error

    def claim(self, error: str, seconds: float = 0.0, ranks: Collection[int] = ()) -> bool:
        """Write the first failure, unless another rank writes one within ``seconds``. ``ranks`` as in ``Failure``.

        Return whether this rank's failure is the first. That is assumed if the store does not exist yet. ``stay`` then
        writes the failure.
        """
        deadline = time.monotonic() + seconds
        try:
            while (failure := self.first()) is None:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                text = json.dumps(asdict(Failure(self.rank, error, sorted(ranks))))
                if (store := self._store()) is None:
                    self._unsaid = None if self._was_open else text
                    return True
                store.compare_set(self._key, "", text)
        except (ConnectionError, RuntimeError):
            return seconds == 0.0  # the store is gone, but this rank must still report its own error
        return failure.rank == self.rank

    def stay(self) -> None:
        """Wait until the other ranks have read the failure, if they need this rank's process for that.

        If the store was not open when this rank failed, write the failure when it is. Rank 0 opens it, because without a
        launcher no other process does.
        """
        is_early = self._unsaid is not None or not sys.modules["torch.distributed"].is_initialized()
        deadline = time.monotonic() + (_KEEPER_SECONDS if is_early else _READING_SECONDS)
        with suppress(ConnectionError, RuntimeError):  # the store has closed, and with it the other ranks
            while time.monotonic() < deadline:
                store = self._store(opens=self._unsaid is not None and self._runs_store)
                if store is not None and self._unsaid is not None:
                    store.compare_set(self._key, "", self._unsaid)
                    self._unsaid = None
                    self.first()
                if self._unsaid is None and (not self._runs_store or self._all_have_read(store)):
                    return
                time.sleep(_POLL_SECONDS / 2)

    def _all_have_read(self, store: Any) -> bool:
        return store is None or store.add(f"{self._key}/readers", 0) >= self.size

    def _has_closed(self) -> bool:
        """Return whether the store that this thread is connected to has closed, as at a normal end of rank 0.

        The store's client would log a stack trace.
        """
        probe: socket.socket | None = getattr(self._local, "probe", None)
        if probe is None:
            return False
        try:
            return not probe.recv(1)  # the store sends nothing here, because this connection asks for nothing
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _store(self, opens: bool = False) -> Any:
        """Return this thread's connection to the store, or None if the store does not exist yet.

        A connection is tried first, because the store's client would wait and log every attempt. It is kept for
        ``_has_closed``. With ``opens``, this process runs the store if there is none.
        """
        store = getattr(self._local, "store", None)
        if store is None:
            from torch.distributed import TCPStore

            options: dict[str, Any] = {"wait_for_workers": False, "timeout": _STORE_TIMEOUT, "use_libuv": True}
            try:
                probe = socket.create_connection(self.address, timeout=1.0)
                probe.setblocking(False)
                store = TCPStore(*self.address, is_master=False, **options)
                self._local.probe = probe
            except (OSError, RuntimeError):
                if not opens:
                    return None
                # A rendezvous of this process could use the same store.
                store = TCPStore(*self.address, is_master=True, multi_tenant=True, **options)
            self._local.store = store
            self._was_open = True
        return store


def follow(board: FailureBoard, done: threading.Event, react: Callable[[Failure], None]) -> None:
    """Poll the board, and call ``react`` when another rank has failed without which this rank cannot go on.

    Return if ``done`` is set first, or if the store closes. Between two polls, answer requests for this rank's position.
    """
    positions = _Positions(board)
    while not done.wait(board.poll_seconds):
        try:
            failure = board.first()
            positions.poll()
        except ConnectionError:
            return  # rank 0 has ended, perhaps without a failure; if it failed, the next collective fails
        if failure is not None and (not failure.ranks or board.rank in failure.ranks):
            if not done.is_set():
                react(failure)
            return


class _Positions:
    """Answers requests for this rank's position, and reads all answers if this rank made the first request."""

    def __init__(self, board: FailureBoard):
        self._board = board
        self._answered = 0  # the last question
        self._answers: Answers | None = None

    def poll(self) -> None:
        """Answer a new question, and go on to read the answers of other ranks.

        This rank asks if it got SIGUSR2, or if it stands still for longer than its patience and no other rank has asked since.
        """
        executor = sys.modules.get("megatron_pipemem.runtime.executor")  # not loaded before a model is built
        asks = _signal is not None and _signal.has_come()
        if not asks and executor is not None and executor.PROGRESS.stands_still():
            asks = self._board.questions() == self._answered
        question, before = self._board.questions(int(asks)), self._answered
        self._answered = question
        try:
            if question > before:
                from megatron_pipemem.runtime.positions import Answers, own_position

                self._board.answer(question, own_position(self._board.rank))
                if asks and question == before + 1:
                    self._answers = Answers(self._board, question)
            if self._answers is not None and self._answers.are_complete():
                answers, self._answers = self._answers, None
                answers.log()
        except ConnectionError:
            raise
        except Exception:  # whatever it is, this thread must go on to look for failures
            self._answers = None
            logger.exception("the position of this rank cannot be logged")


class _Signal:
    """Notes SIGUSR2 even if the main thread is blocked in C++ code, where no handler of Python runs.

    The interpreter writes the numbers of its signals into a socket at once.
    """

    def __init__(self) -> None:
        self._numbers, self._sender = socket.socketpair()
        for end in (self._numbers, self._sender):
            end.setblocking(False)
        self._handler = lambda number, frame: None
        signal.signal(signal.SIGUSR2, self._handler)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def has_come(self) -> bool:
        """Return whether the signal has come since the last call."""
        try:
            return signal.SIGUSR2 in self._numbers.recv(4096)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Give back the signal and the interpreter's socket, unless the program has taken them since."""
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._sender.fileno()):
            signal.set_wakeup_fd(current)
        if signal.getsignal(signal.SIGUSR2) is self._handler:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        self._numbers.close()
        self._sender.close()


_signal: _Signal | None = None


def install_signal() -> None:
    """Let SIGUSR2 make all ranks log their positions, until ``remove_signal``.

    Nothing happens in other threads than the main one, or if the program uses the signal or the interpreter's socket
    for signals itself.
    """
    global _signal
    if _signal is not None or threading.current_thread() is not threading.main_thread():
        return
    socket_of_program = signal.set_wakeup_fd(-1)
    if socket_of_program != -1:
        signal.set_wakeup_fd(socket_of_program)
    elif signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        _signal = _Signal()


def remove_signal() -> None:
    """Undo ``install_signal``. Other threads than the main one cannot."""
    global _signal
    if _signal is not None and threading.current_thread() is threading.main_thread():
        heard, _signal = _signal, None
        heard.close()


def end_process(code: int) -> NoReturn:
    """End this process and its child processes, without Python's normal exit, which would wait for other ranks."""
    for child in multiprocessing.active_children():  # Megatron's checkpoint writer leaves a process that would stay
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _JobWatch:
    """Ties the end of this rank to that of the ranks that it trains with.

    If an error of this package ends this process, the board gets it. If another rank has ended so, this rank logs the
    cause, and ends when its training thread is blocked.
    """

    def __init__(self, board: FailureBoard):
        self.board = board
        self.ranks: set[int] = set()
        """The ranks of all models that this rank trains. It is empty before the first model's ranks are known."""
        self._failure: Failure | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._training_thread = threading.get_ident()
        self._excepthook = sys.excepthook
        sys.excepthook = self._end

    def start(self) -> None:
        """Start to poll the board. The calling thread is the one that trains."""
        if self._thread is None:
            self._training_thread = threading.get_ident()
            arguments = self.board, self._done, self._react
            self._thread = threading.Thread(target=follow, args=arguments, name="pipemem-first-failure", daemon=True)
            self._thread.start()
            install_signal()
            # The interpreter's exit aborts the process if a daemon thread is inside C++ code.
            atexit.register(self._stop_polling)

    def stop(self) -> None:
        """Stop polling, and write no error to the board any more."""
        self._stop_polling()
        remove_signal()
        atexit.unregister(self._stop_polling)
        if sys.excepthook == self._end:
            sys.excepthook = self._excepthook

    def _stop_polling(self) -> None:
        self._done.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an error that no code has caught, as before. Write a refusal to the board, or log that of another rank."""
        self._excepthook(kind, error, trace)
        if _watch is not self:
            return
        self._stop_polling()  # this rank ends by itself
        with suppress(Exception):  # the error has been printed, and the process ends in any case
            refusal = _refusal_behind(error)
            if refusal is not None:
                import torch.distributed  # noqa: F401 - a rank can be refused before torch is loaded

                self.board.claim(summary(refusal), ranks=self.ranks)
            failure = self._failure or self.board.first()
            if refusal is None and failure is not None:
                logger.error("%s", failure)
            if refusal is not None or failure is not None:
                self.board.stay()

    def _react(self, failure: Failure) -> None:
        """Log the failure of another rank, and end this process if the training thread is blocked.

        A thread that runs may save something or clean up after it has lost the rank. It is left alone.
        """
        self._failure = failure
        place, looks = None, 0
        while not self._done.wait(_POLL_SECONDS):
            frame = sys._current_frames().get(self._training_thread)
            now = None if frame is None else (id(frame), frame.f_lasti)
            if now != place:
                place, looks = now, 0
            looks += 1
            if looks > _BLOCKED_LOOKS:
                logger.error("this rank waits for one that has ended, and ends too: %s", failure)
                self.board.stay()
                end_process(1)


def _refusal_behind(error: BaseException | None) -> PipememError | None:
    """Return the error itself or the one that caused it, if it is of this package."""
    while error is not None and not isinstance(error, PipememError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


_watch: _JobWatch | None = None
_guards = 0


@contextmanager
def guarded() -> Iterator[None]:
    """Leave the end of this rank to the caller while the block runs: ``watch_job`` does nothing."""
    global _guards
    _guards += 1
    try:
        yield
    finally:
        _guards -= 1


def watch_job(starts: bool = False, ranks: Collection[int] = ()) -> None:
    """Tie the end of this rank to that of the other ranks of its job, until ``leave_job``.

    Later calls add to earlier ones. Nothing happens in a process of its own.

    Args:
        starts: poll the board from now on. torch must have been imported.
        ranks: the ranks of a model that this rank trains. Only these are ended with this rank.
    """
    global _watch
    if _guards:
        return
    board = FailureBoard.of_job()
    if _watch is not None and (board is None or board.address != _watch.board.address):
        leave_job()  # a process group with another store has replaced the one of the environment
    if board is not None and _watch is None:
        _watch = _JobWatch(board)
    if _watch is not None:
        _watch.ranks.update(ranks)
        if starts:
            _watch.start()


def leave_job() -> None:
    """Stop what ``watch_job`` has started."""
    global _watch
    if _watch is not None:
        watch, _watch = _watch, None
        watch.stop()
