"""Which tests run beside which under pytest-xdist: those that start processes of their own run one after another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

# Beginnings of paths. A process that computes for a while by itself is no reason to be here.
START_PROCESSES = tuple(
    f"tests/{path}"
    for path in (
        *("benchmarks/", "end_to_end/", "slurm/"),
        *("cpu/test_activate", "cpu/test_ranks", "cpu/test_setup", "cpu/test_stock_training"),
        *("runtime/test_executor", "runtime/test_offload", "runtime/test_vocabulary_ranks"),
        *("scripts/test_launch_grid.py", "scripts/test_quickstart"),
    )
)


def _starts_processes(nodeid: str) -> bool:
    return nodeid.startswith(START_PROCESSES)


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
