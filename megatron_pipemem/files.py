"""Write every file of this package whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_pipemem.errors import OutputError, UnsupportedError

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a file. Whatever goes wrong, and whoever reads meanwhile, the file is the old one or the new one.

    Missing folders are made below one that exists, other than the root. The permissions of an old file are kept, text is
    written as UTF-8.

    Raises:
        OutputError: it cannot be written; what was there is as it was.
    """
    with whole_file(path) as beside:
        beside.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
    return Path(path)


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Write a file as `write_whole` does, for what others write: a temporary file beside ``path``, renamed to it when
    this block ends well.

    Raises:
        OutputError: an OSError met in this block too.
    """
    path = Path(path)
    try:
        old = _stat(path)
        if old is not None and not stat.S_ISREG(old.st_mode):
            yield path  # a device or a pipe, /dev/null for example, has no old content to keep and must not be renamed away
            return
        target = Path(os.path.realpath(path))  # a symbolic link stays one
        _base(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = _create_beside(target)
        try:
            if old is not None:
                with suppress(OSError):  # some file systems have none
                    beside.chmod(stat.S_IMODE(old.st_mode))
            yield beside
            with beside.open("rb") as written:
                os.fsync(written.fileno())
            beside.replace(target)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
    except OutputError:
        raise
    except OSError as error:
        raise OutputError("cannot-write", _sentence(path, error)) from error


def check_suffix(path: str | Path, suffixes: Sequence[str], what: str) -> None:
    """Ask whether a file's name says which of the formats it is to have.

    Args:
        path: of the file.
        suffixes: of the formats.
        what: is to be written, for the message.

    Raises:
        UnsupportedError: it does not.
    """
    if Path(path).suffix not in suffixes:
        known = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise UnsupportedError("bad-choice", f"cannot write {what} as {Path(path).name!r}: end it in {known}")


def check_writable(path: str | Path) -> None:
    """Ask whether a file could be written now: before the hours whose result it is to hold. Leaves nothing behind.

    Raises:
        OutputError: it could not, as things are.
    """
    path = Path(path)
    try:
        old = _stat(path)
        if old is None or stat.S_ISREG(old.st_mode):
            # Asking for permissions would not tell of /proc, of a full disk or of a file system that is read-only.
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
    """Return the status of what is to be written; ``None`` where there is nothing yet.

    Raises:
        OSError: it is a folder, or may not be written, for which a rename would not ask.
    """
    try:
        old = path.stat()
    except FileNotFoundError:
        return None
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, str(error)) from error
    refused = errno.EISDIR if stat.S_ISDIR(old.st_mode) else None if os.access(path, os.W_OK) else errno.EACCES
    if refused is not None:
        raise OSError(refused, os.strerror(refused))
    return old


def _create_beside(target: Path) -> Path:
    """Create an empty file of a new name in the same folder, with the permissions that any new file gets."""
    beside = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.partial")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return beside


def _base(target: Path) -> Path:
    """Return the folder in which those that a file lacks are made.

    Raises:
        OutputError: it would be the root: a mistyped path looks like this, and a folder there is on no disk that was meant.
    """
    base = _nearest(target.parent)
    if base != target.parent and base == Path(base.anchor):
        raise OutputError(
            "cannot-write",
            f"cannot write {target}: there is no folder {base / target.parts[1]}; make it, or choose another path",
        )
    return base


def _nearest(folder: Path) -> Path:
    """Return the deepest part of a path that exists."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _sentence(path: Path, error: OSError) -> str:
    what = error.strerror or str(error)
    if error.errno == errno.EISDIR:
        return f"cannot write {path}: it is a folder; give the path of a file"
    place = path if error.errno == errno.EINVAL else _nearest(path.parent)
    if place != path and not os.path.isdir(place):
        return f"cannot write {path}: {place} is no folder; choose another path"
    if error.errno in _DENIED:
        return (
            f"cannot write {path}: no permission to write in {place} ({what}); choose another path, or change who may"
        )
    if error.errno in _FULL:
        return f"cannot write {path}: the disk is full ({what}); free some of it, or choose another path"
    return f"cannot write {path}: {place} does not take it ({what}); choose another path"
