"""Which tests run beside which under pytest-xdist: those that start processes of their own run one after another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

START_PROCESSES = ("benchmarks", "cpu", "end_to_end", "runtime", "scripts", "slurm")


def _starts_processes(nodeid: str) -> bool:
    _, folder, *_ = nodeid.split("/")
    return folder in START_PROCESSES


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Those are what the whole suite waits for; the others take the time that ranks spend on waiting for each other."""
    if hasattr(item.config, "workerinput") and not _starts_processes(item.nodeid):
        _give_way()


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    # Where Linux shares the processor out by session first, that counts within the session only; every rank has its own.
    group = Path("/proc/self/autogroup")
    if group.exists() and os.getsid(0) != os.getpid():
        os.setsid()
        group.write_text("19")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log) -> Scheduling:
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerForRanks(LoadScopeScheduling):
        """Marks for ``--dist loadgroup`` would say the same; pytest-xdist 3.8 loses them under pytest 9.2."""

        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if _starts_processes(nodeid) else nodeid

    return OneWorkerForRanks(config, log)
