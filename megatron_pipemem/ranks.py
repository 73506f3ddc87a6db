"""Start this node's ranks. When one rank fails, end all ranks, and print one readable error.

``python -m megatron_pipemem.ranks`` takes the same flags as torchrun. The last thing that it prints is the first
cause of a failure.

The first rank that fails writes its error to the board of ``runtime.first_failure``, prints it and exits. Every other
rank exits without a message, even if it is blocked in a collective, in a rendezvous or in its own computation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

from megatron_pipemem.errors import PipememError, printable, with_code
from megatron_pipemem.exits import print_error
from megatron_pipemem.files import write_whole
from megatron_pipemem.runtime.first_failure import (
    FailureBoard,
    end_process,
    follow,
    guarded,
    install_signal,
    remove_signal,
    summary,
)

_ENDED_BY_LAUNCHER = -15  # SIGTERM: torchrun sends it to the remaining ranks


def main() -> None:
    """Start this node's ranks, wait for them, and print the first cause if they fail."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(None))
    except ChildFailedError as error:
        _end(first_cause(error.failures))
    except SignalException as error:
        _end(f"{error.sigval.name} ended this launcher and its ranks")
    except (RuntimeError, OSError, ValueError) as error:  # from the rendezvous or from torchrun's own flags
        why = str(error).strip().splitlines() or [type(error).__name__]
        _end(f"the ranks could not be started: {why[0]}; is the port free, and is the address that of the first node?")


def first_cause(failures: Mapping[int, Any]) -> str:
    """Return text with the rank that failed first, its error, and advice. ``failures`` are torchrun's, by rank.

    If ranks were killed, and not by torchrun, only they count.
    """
    # A killed rank reports nothing, but the ranks that lose it do.
    killed = {
        rank: failure
        for rank, failure in failures.items()
        if failure.exitcode < 0 and failure.exitcode != _ENDED_BY_LAUNCHER
    }
    rank, failure = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    message = failure.message
    if isinstance(message, dict):  # our rank guard wrote it: the traceback and the error text
        return str(message.get("extraInfo", {}).get("py_callstack") or message.get("message"))
    if rank in killed:
        return (
            f"rank {rank} failed: killed by {failure.signal_name()}\n"
            "what to do: look for the reason in its node's log (dmesg shows processes that ran out of memory)"
        )
    return (
        f"rank {rank} failed: exit code {failure.exitcode}\n"
        "what to do: see its output above; with several nodes, the log of another node may name the first cause"
    )


def _end(words: str) -> None:
    print_error(words)
    sys.exit(1)


_ANNOUNCEMENT_SECONDS = 2.0  # a rank that lost its peers waits so long for one of them to announce the cause
_FOLLOWING_SECONDS = 3.0  # the others stay so long that torchrun, which blames the first exit, ends them itself
_LOST_PEER = (
    "connection closed by peer",
    "connection was likely closed",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
)


@contextlib.contextmanager
def rank_guard() -> Iterator[None]:
    """Run one rank's script in the block. If this or another rank fails, end the process without returning to the
    caller.

    Exit codes: 1 after an exception on any rank, 130 after an interrupt, the script's own code after ``sys.exit``. A
    single rank, or a rank without torchrun's environment variables, prints its errors the same way and watches no other
    rank.
    """
    board = FailureBoard.from_environment()
    done = threading.Event()
    watcher = threading.Thread(
        target=follow, args=(board, done, lambda failure: _end_after_peer(board)), name="rank-guard", daemon=True
    )
    if board is not None:
        import torch.distributed  # noqa: F401 - here, because two threads that import torch at the same time crash

        watcher.start()
        install_signal()
    try:
        with _errors_without_usage(), guarded():
            yield
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", 0)) == 0:
            sys.stderr.write("interrupted; --load resumes from the last checkpoint of --save\n")
        end_process(130)
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        done.set()  # or this rank would see its own failure and exit silently
        code = stop.code if isinstance(stop.code, int) else 1
        if board is None or board.claim("the script ended itself"):
            if not isinstance(stop.code, int):
                sys.stderr.write(f"{stop.code}\n")
            if (said := _argparse_message(stop)) is not None:
                words = f"rank {os.environ.get('RANK', 0)} failed: {said}"
                _tell_torchrun(said, words, early=True)
                sys.stderr.write(f"{words}\n")
            _exit(code, board)
        _end_after_peer(board)
    except BaseException as error:  # of any class, because the other ranks are waiting for this one
        done.set()
        patience = _ANNOUNCEMENT_SECONDS if _lost_a_peer(error) else 0.0
        if board is None or board.claim(summary(error), patience):
            _report(error)
            _exit(1, board)
        _end_after_peer(board)
    finally:
        # The interpreter's exit aborts the process if a daemon thread is inside C++ code.
        done.set()
        if watcher.is_alive():
            watcher.join()
        remove_signal()


@contextlib.contextmanager
def refused_together() -> Iterator[None]:
    """End all ranks of a one-node job if the block raises an error of this package. Only rank 0 prints it.

    The block must have the same result on all ranks. So they need no store, and torch is not imported.
    """
    try:
        yield
    except PipememError as error:
        if os.environ["RANK"] != "0":
            _end_after_peer()
        words = f"error: {with_code(error)}"
        if not _tell_torchrun(summary(error), words, early=True):  # torchrun prints it last
            print_error(words)
        _exit(1)


def _end_after_peer(board: FailureBoard | None = None) -> NoReturn:
    _silence_stderr()
    time.sleep(_FOLLOWING_SECONDS)
    _exit(1, board)


def _exit(code: int, board: FailureBoard | None = None) -> NoReturn:
    """End the process when other ranks have had time to read ``board``."""
    if board is not None:
        board.stay()
    end_process(code)


def _lost_a_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST_PEER)


def _error_lines(error: BaseException) -> list[str]:
    """Return the lines of an error message: the rank that failed, its error, and advice."""
    words = [f"rank {os.environ.get('RANK', 0)} failed: {summary(error)}"]
    words += [f"at: {note}" for note in getattr(error, "__notes__", ())]
    if _lost_a_peer(error):
        words.append("what to do: another rank ended without a message, killed or out of memory; see its node's log")
    elif "out of memory" in str(error).lower():
        words.append(
            "what to do: choose a schedule with a lower peak (--pipemem-memory-cap, --pipemem-offload auto, "
            "--pipemem-recompute auto), or cut the model further"
        )
    elif not isinstance(error, PipememError):
        words.append("what to do: read the traceback above and this rank's output before it")
    return words


def _argparse_message(stop: SystemExit) -> str | None:
    """Return the message of an argparse parser that ended the process, with the nearest flag to an unknown one.

    Return ``None`` if no parser ended it.
    """
    for frame, _ in traceback.walk_tb(stop.__traceback__):
        parser = frame.f_locals.get("self")
        if frame.f_code.co_name == "exit" and isinstance(parser, argparse.ArgumentParser):
            message = (frame.f_locals.get("message") or "").strip()
            flag = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
            near = get_close_matches(flag, parser._option_string_actions, n=1) if flag else []
            return f"{message}; did you mean {near[0]}?" if near else message or None
    return None


@contextlib.contextmanager
def _errors_without_usage() -> Iterator[None]:
    """Keep argparse from printing the usage before an error while the block runs. Megatron's usage has a thousand
    lines.
    """
    usage = argparse.ArgumentParser.print_usage
    argparse.ArgumentParser.print_usage = lambda self, file=None: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.print_usage = usage  # type: ignore[method-assign]


def _silence_stderr() -> None:
    """Send stderr to /dev/null, because errors that follow from another rank's failure do not name its cause."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def _report(error: BaseException) -> None:
    """Print the error, and write it to the file from which torchrun prints it at the end.

    Errors of this package have no traceback, because their message is complete. PIPEMEM_TRACEBACK=1 adds one.
    """
    has_trace = not isinstance(error, PipememError) or "PIPEMEM_TRACEBACK" in os.environ
    trace = "".join(traceback.format_exception(error)) if has_trace else ""
    words = _error_lines(error)
    _tell_torchrun(summary(error), trace + "\n".join(words), early=not _lost_a_peer(error))
    if trace and "TORCHELASTIC_ERROR_FILE" not in os.environ:
        sys.stderr.write(printable(trace))
    print_error("\n".join(words))


def _tell_torchrun(summary: str, text: str, early: bool) -> bool:
    """Write the error file that torchrun prints, if torchrun gives its path. Return whether it was written.

    torchrun compares times in whole seconds, and blames the lowest rank if they are equal. ``early`` makes the time one second
    earlier, so that torchrun blames this rank.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": text, "timestamp": str(int(time.time()) - early)}
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps({"message": {"message": summary, "extraInfo": details}}))
            return True
    return False


if __name__ == "__main__":
    main()
