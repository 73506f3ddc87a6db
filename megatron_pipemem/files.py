"""Read files that users name, and write files atomically: a file has its whole new content or its old one.

This package writes all files with these functions. Every error of reading is raised as an error of this package, with
the file and a remedy.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from megatron_pipemem.errors import ConfigError, OutputError, PipememError, UnsupportedError, repeated

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a file atomically, and return its path.

    After a failure, or for another process meanwhile, the file has its old content.

    Missing folders are made, but not directly below the root. The permissions of an old file are kept. Text is written
    as UTF-8. If the file cannot be written, an OutputError is raised, and its old content remains.
    """
    with whole_file(path) as beside:
        beside.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
    return Path(path)


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces ``path`` when this block ends without an error.

    It is for code that writes files by itself, as matplotlib does. An OSError in the block becomes an OutputError. If
    ``path`` is a device or a pipe, such as ``/dev/null``, it is yielded itself.
    """
    path = Path(path)
    try:
        old = _stat(path)
        if old is not None and not stat.S_ISREG(old.st_mode):
            yield path  # a device or a pipe, such as /dev/null, has no old content and must not be renamed
            return
        target = Path(os.path.realpath(path))  # a symbolic link stays a link
        _base(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(target, old) as beside:
            yield beside
    except OutputError:
        raise
    except OSError as error:
        raise OutputError("cannot-write", _sentence(path, error)) from error


@contextmanager
def _replacing(target: Path, old: os.stat_result | None = None) -> Iterator[Path]:
    """Yield the path of an empty file beside ``target``, and rename it to ``target`` after the block.

    It gets the permissions of ``old``. Files that killed processes have left in the folder are removed.
    """
    _remove_leftovers(target.parent)
    beside = _create_beside(target)
    try:
        if old is not None:
            with suppress(OSError):  # some file systems have no permissions
                beside.chmod(stat.S_IMODE(old.st_mode))
        yield beside
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(target)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def check_suffix(path: str | Path, suffixes: Sequence[str], kind: str) -> None:
    """Raise an UnsupportedError if a file does not end in one of ``suffixes``. The message calls the file ``kind``."""
    if Path(path).suffix not in suffixes:
        known = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise UnsupportedError("bad-choice", f"cannot write {kind} as {Path(path).name!r}: end it in {known}")


def check_writable(path: str | Path) -> None:
    """Raise an OutputError if a file could not be written now. The check leaves no file.

    Long commands call this function before they compute.
    """
    path = Path(path)
    try:
        old = _stat(path)
        if old is None or stat.S_ISREG(old.st_mode):
            # A check of permissions would not notice /proc, a full disk or a read-only file system.
            probe = _create_beside(_base(Path(os.path.realpath(path))) / path.name)
            try:
                probe.write_bytes(b"\n")
            finally:
                probe.unlink()
    except OutputError:
        raise
    except OSError as error:
        raise OutputError("cannot-write", _sentence(path, error)) from error


def _stat(path: Path) -> os.stat_result | None:
    """Return the ``os.stat`` of a file to write; ``None`` if the file does not exist.

    Raise an OSError for a folder, and for a file without permission to write: a rename would replace such a file.
    """
    try:
        old = path.stat()
    except FileNotFoundError:
        return None
    except ValueError as error:  # a null byte in the path
        raise OSError(errno.EINVAL, str(error)) from error
    refused = errno.EISDIR if stat.S_ISDIR(old.st_mode) else None if os.access(path, os.W_OK) else errno.EACCES
    if refused is not None:
        raise OSError(refused, os.strerror(refused))
    return old


def _create_beside(target: Path) -> Path:
    """Create an empty file with an unused name in the folder of ``target``, and return its path."""
    beside = target.with_name(f".{target.name[:40]}.{os.urandom(6).hex()}.partial")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return beside


_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{12}\.partial")
_LEFTOVER_SECONDS = 600
"""Age of a file of ``_create_beside`` whose process must be dead. Files are written in seconds."""


def _remove_leftovers(folder: Path) -> None:
    """Remove files that ``_create_beside`` made in a folder, and whose processes were killed before they renamed them."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _LEFTOVER.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # another process has removed it
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFTOVER_SECONDS:
                        os.unlink(entry.path)


def _base(target: Path) -> Path:
    """Return the nearest existing folder above a file. Raise an OutputError if a folder would be made in the root.

    A missing folder directly below the root is usually a mistyped path.
    """
    base = _nearest(target.parent)
    if base != target.parent and base == Path(base.anchor):
        raise OutputError(
            "cannot-write",
            f"cannot write {target}: there is no folder {base / target.parts[1]}; make it, or choose another path",
        )
    return base


def _nearest(folder: Path) -> Path:
    """Return a folder if it exists, or else the nearest folder above it that exists."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _sentence(path: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno == errno.EISDIR:
        return f"cannot write {path}: it is a folder; give the path of a file"
    place = path if error.errno == errno.EINVAL else _nearest(path.parent)
    if place != path and not os.path.isdir(place):
        return f"cannot write {path}: {place} is not a folder; choose another path"
    if error.errno in _DENIED:
        return f"cannot write {path}: no permission to write in {place} ({reason}); choose another path, or allow it"
    if error.errno in _FULL:
        return f"cannot write {path}: the disk is full ({reason}); free some space, or choose another path"
    return f"cannot write {path}: {place} does not accept it ({reason}); choose another path"


MOST_BYTES = 1 << 28
"""The size of the largest file that is read, 256 MiB. A device such as ``/dev/zero`` would never end."""


def check_exists(path: str | Path, kind: str) -> None:
    """Raise a ConfigError if there is no file or folder with this path. The message calls it ``kind``."""
    if not Path(path).exists():
        raise ConfigError(
            "no-file",
            f"cannot read {kind} from {repeated(str(path))}: there is no such file or folder; correct the path",
        )


def read_text(
    path: str | Path, kind: str, refusal: type[PipememError] = ConfigError, most_bytes: int = MOST_BYTES
) -> str:
    """Return the text of a file, or raise ``refusal`` if it is missing, unreadable, not UTF-8, or above ``most_bytes``.

    Messages call the file ``kind``, for example ``costs`` or ``a schedule``.
    """
    subject = _subject(kind, path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or str(error)
        code = "no-file" if isinstance(error, FileNotFoundError) else "cannot-read"
        raise refusal(code, f"{subject}: {why}; give the path of a file that can be read") from error
    if len(content) > most_bytes:
        raise refusal("too-large", f"{subject}: it is larger than {most_bytes >> 20} MiB; give another file")
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise refusal("cannot-read", f"{subject}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def read_json(path: str | Path, kind: str, refusal: type[PipememError] = ConfigError) -> Any:
    """Return the content of a JSON file, or raise ``refusal`` if it cannot be read or is not JSON.

    The message names the line and column of a syntax error. ``Infinity`` and ``NaN`` are refused too. ``kind`` is that
    of ``read_text``.
    """
    text, subject = read_text(path, kind, refusal), _subject(kind, path)
    try:
        return json.loads(text.removeprefix("\ufeff"), parse_constant=_no_number)
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, column {error.colno} is not JSON, {error.msg[0].lower()}{error.msg[1:]}"
        raise refusal("not-json", f"{subject}: {why}; correct it there") from error
    except RecursionError as error:
        raise refusal("not-json", f"{subject}: it is nested too deeply; remove brackets") from error
    except ValueError as error:  # an integer of thousands of digits, or Infinity or NaN
        why = str(error).partition(";")[0]
        raise refusal("not-json", f"{subject}: {why}; give a finite number") from error


def _subject(kind: str, path: str | Path) -> str:
    """Return the beginning of messages about a file that cannot be read."""
    return f"cannot read {kind} from {repeated(str(path))}"


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


MOST_CACHED_BYTES = 1 << 25
"""The size of the largest file of a cache that is read or written, 32 MiB."""


def read_cached(path: Path) -> Any:
    """Return the content of a JSON file in a cache of this package. Links, devices and large files are not read.

    Raise an OSError or a ValueError if it cannot be read. Other programs may have written anything there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = file.read(MOST_CACHED_BYTES + 1)
    if len(content) > MOST_CACHED_BYTES:
        raise OSError(errno.EFBIG, "it is too large")
    try:
        return json.loads(content, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_cached(path: Path, value: Any) -> None:
    """Write a JSON file in a cache of this package. A link with its name is replaced, and not followed.

    Values that would be larger than ``MOST_CACHED_BYTES`` are not written. Raise an OSError or a ValueError if the file
    cannot be written.
    """
    content = json.dumps(value, allow_nan=False).encode()
    if len(content) <= MOST_CACHED_BYTES:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as beside:
            beside.write_bytes(content)
