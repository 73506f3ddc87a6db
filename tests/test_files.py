"""Files are written whole or not at all, and whatever stands in the way is one sentence."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from refusals import refused

import megatron_pipemem
from megatron_pipemem.errors import OutputError
from megatron_pipemem.files import check_writable, whole_file, write_whole


@contextmanager
def small_files(nbytes):
    """Within this, the kernel ends every write that makes a file larger: what a full disk does, midway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_text_and_bytes_are_written_and_folders_made(tmp_path):
    path = tmp_path / "a" / "b" / "c.txt"
    assert write_whole(path, "ä\n") == path
    assert path.read_bytes() == "ä\n".encode()
    write_whole(str(path), b"\x00")
    assert path.read_bytes() == b"\x00"
    assert list(path.parent.iterdir()) == [path]


def test_no_folder_is_made_in_the_root():
    path = Path("/mistyped-scratch/me/out.json")
    for attempt in (check_writable, lambda path: write_whole(path, "x")):
        with refused("cannot-write", "/mistyped-scratch", kind=OutputError):
            attempt(path)
    assert not path.parent.parent.exists()


def test_a_file_is_the_old_one_when_the_new_one_does_not_fit(tmp_path):
    path = tmp_path / "result.json"
    write_whole(path, "old")
    with (
        small_files(1000),
        refused("cannot-write", path, os.strerror(errno.EFBIG), kind=OutputError),
    ):
        write_whole(path, b"x" * 100_000)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, ValueError])
def test_whatever_ends_the_writer_leaves_the_old_file(tmp_path, ends):
    path = tmp_path / "result.json"
    write_whole(path, "old")
    with pytest.raises(ends), whole_file(path) as beside:
        beside.write_text("half")
        raise ends
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_permissions_and_links_are_kept(tmp_path):
    path, link = tmp_path / "real.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        assert stat.S_IMODE(write_whole(tmp_path / "fresh", "").stat().st_mode) == 0o640
    finally:
        os.umask(umask)


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    assert write_whole(tmp_path / ("n" * 255), "long").read_text() == "long"


def test_devices_stay_devices():
    write_whole("/dev/null", "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with refused("cannot-write", "/dev/full", kind=OutputError):
        write_whole("/dev/full", "something")


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with refused("cannot-write", kind=OutputError):
        write_whole(tmp_path / "a", "something")
    assert not list(tmp_path.iterdir())


WRONG = {
    "folder": "it is a folder; give the path of a file",
    "file/report.json": "{tmp}/file is not a folder; choose another path",
    "file/new/report.json": "{tmp}/file is not a folder; choose another path",
    "/proc/x": "/proc does not accept it",
    "/proc/new/x": "/proc does not accept it",
    "n" * 256: "File name too long",
    "a\0b": "null byte",
    "loop/x": "/loop is not a folder",
}


@pytest.mark.parametrize("asks", [check_writable, lambda path: write_whole(path, "new")], ids=["check", "write"])
@pytest.mark.parametrize("name", WRONG)
def test_what_stands_in_the_way_is_one_sentence(tmp_path, name, asks):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError) as failed:
        asks(tmp_path / name)
    message = str(failed.value)
    start = OutputError("cannot-write", f"cannot write {tmp_path / name}:")  # with the path as messages repeat it
    assert message.startswith(str(start)) and "\n" not in message
    assert WRONG[name].format(tmp=tmp_path) in message
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("asks", [check_writable, lambda path: write_whole(path, "new")], ids=["check", "write"])
def test_missing_permissions_are_named(tmp_path, asks):
    (tmp_path / "closed").mkdir(mode=0o500)
    with refused("cannot-write", tmp_path / "closed", kind=OutputError):
        asks(tmp_path / "closed" / "x")
    kept = tmp_path / "kept"
    kept.write_text("old")
    kept.chmod(0o400)
    with refused("cannot-write", kind=OutputError):
        asks(kept)
    assert kept.read_text() == "old"


def test_asking_leaves_nothing_behind(tmp_path):
    old = tmp_path / "old"
    old.write_text("old")
    for path in (old, tmp_path / "new", tmp_path / "a" / "b" / "new", Path("/dev/null")):
        check_writable(path)
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "old"


def test_nothing_of_ours_is_written_otherwise():
    root = Path(megatron_pipemem.__file__).parents[1]
    sources = [path for part in ("megatron_pipemem", "scripts", "benchmarks") for path in (root / part).rglob("*.py")]
    writes = re.compile(r"(?:\.write_(?:text|bytes)|\.savefig|os\.replace|\.rename)\(")
    written = {
        str(path.relative_to(root)): [line for line in text.splitlines() if writes.search(line)]
        for path in sources
        if writes.search(text := path.read_text(encoding="utf-8"))
    }
    assert written.pop("megatron_pipemem/files.py")
    (picture,) = written.pop("megatron_pipemem/tools/report/figure.py")
    assert picture.strip().startswith("figure.savefig(beside, ")
    assert not written


def test_files_of_killed_processes_are_removed_by_the_next_writer(tmp_path):
    kill = "import os, sys; from megatron_pipemem.files import whole_file\nwith whole_file(sys.argv[1]): os.abort()"
    assert subprocess.run([sys.executable, "-c", kill, tmp_path / "a"], check=False).returncode == -6
    (left,) = tmp_path.iterdir()
    others = [tmp_path / name for name in (".a.partial", "a.0123456789ab.partial", ".a.0123456789ab.partial.txt")]
    for path in others:
        path.write_text("of the user")
    write_whole(tmp_path / "a", "1")
    assert left.exists(), "another process may still write it"
    for path in (left, *others):
        os.utime(path, (0, 0))
    write_whole(tmp_path / "b", "2")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a", tmp_path / "b", *others])
