"""Which tests run beside which under pytest-xdist: those that start processes of their own run one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

START_PROCESSES = ("benchmarks", "cpu", "end_to_end", "runtime", "scripts", "slurm")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log) -> Scheduling:
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerForRanks(LoadScopeScheduling):
        """Marks for ``--dist loadgroup`` would say the same; pytest-xdist 3.8 loses them under pytest 9.2."""

        def _split_scope(self, nodeid: str) -> str:
            _, folder, *_ = nodeid.split("/")
            return "ranks" if folder in START_PROCESSES else nodeid

    return OneWorkerForRanks(config, log)
