"""Programs that tests need and pip cannot bring: installed from Debian's packages if the machine allows it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

LOCK = Path(tempfile.gettempdir()) / "pipemem-tests-apt.lock"


def why_missing(programs: Sequence[str], packages: Sequence[str]) -> str | None:
    """Install ``packages`` if one of ``programs`` is missing.

    Returns:
        The reason if a program is still missing, otherwise ``None``.
    """
    if not _missing(programs):
        return None
    names = ", ".join(packages)
    if shutil.which("apt-get") is None:
        return f"needs {names}, and there is no apt-get to install them"
    if os.geteuid():
        return f"needs {names}; apt-get installs them for root only"
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of pytest-xdist
        if not _missing(programs):
            return None
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600", *words]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"needs {names}, and apt-get {words[0]} failed: {done.stderr.strip()[-300:]}"
    left = _missing(programs)
    return f"needs {', '.join(left)}, which {names} did not bring" if left else None


def _missing(programs: Sequence[str]) -> list[str]:
    return [program for program in programs if shutil.which(program) is None]
