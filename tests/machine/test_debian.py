"""Missing programs are installed if the machine allows it, and the reason is returned if it does not."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import debian
import pytest


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of root's with apt-get, on which ``installed`` are there. ``brings`` is what apt-get adds."""
    machine = SimpleNamespace(installed={"apt-get"}, brings={"chromium"}, calls=[], fails="", user=0)

    def run(command, **how):
        words = command[4:]
        machine.calls.append(words)
        if words[0] == machine.fails:
            return subprocess.CompletedProcess(command, 100, "", "E: no network")
        if words[0] == "install":
            machine.installed |= machine.brings
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(debian.shutil, "which", lambda name: name if name in machine.installed else None)
    monkeypatch.setattr(debian.subprocess, "run", run)
    monkeypatch.setattr(debian.os, "geteuid", lambda: machine.user)
    monkeypatch.setattr(debian, "LOCK", tmp_path / "lock")
    return machine


def why() -> str | None:
    return debian.why_missing(("chromium",), ("chromium", "fonts"))


def test_what_is_there_is_not_installed_again(machine):
    machine.installed |= {"chromium"}
    machine.user = 1000
    assert why() is None and machine.calls == []


def test_root_installs(machine):
    assert why() is None
    assert machine.calls == [["update"], ["install", "-y", "--no-install-recommends", "chromium", "fonts"]]
    assert why() is None and len(machine.calls) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"user": 1000}, "root"),
        ({"installed": set()}, "no apt-get"),
        ({"fails": "update"}, "apt-get update failed: E: no network"),
        ({"fails": "install"}, "apt-get install failed: E: no network"),
        ({"brings": set()}, "did not bring"),
    ],
)
def test_the_reason_is_returned_where_it_cannot_be(machine, changes, said):
    vars(machine).update(changes)
    reason = why()
    assert reason.startswith("needs chromium") and said in reason
