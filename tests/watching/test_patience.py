"""A hanging process is ended and reported; a process that works, itself or through a child, is waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import patience
import pytest
from patience import Patience, Stuck, interrupted_when_stuck

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")

WORKS = "import time\nwhile time.process_time() < 1: pass"
THROUGH_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKS!r}])"


def started(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.parametrize("code", [WORKS, THROUGH_A_CHILD])
def test_who_works_is_waited_for(code, monkeypatch):
    with started(code) as process:
        # This clock stops while the process gets no processor, because the machine may be busy for more than a second.
        clock = SimpleNamespace(monotonic=lambda: 20 * patience.processor_seconds((process.pid,)))
        monkeypatch.setattr(patience, "time", clock)
        own = Patience(process.pid, seconds=1)
        while process.poll() is None:
            assert not own.is_over
            time.sleep(0.05)
    assert process.returncode == 0


def test_who_sleeps_is_not():
    with started("import time; time.sleep(36000)") as process:
        own = Patience(process.pid, seconds=0.5)
        while not own.is_over:
            time.sleep(0.05)
        process.kill()


def test_a_stuck_test_is_interrupted(monkeypatch):
    monkeypatch.setattr(patience, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(patience, "Patience", lambda pid: SimpleNamespace(is_over=True))
    with pytest.raises(Stuck), interrupted_when_stuck():
        threading.Event().wait()
    with interrupted_when_stuck():
        pass
