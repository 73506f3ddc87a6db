"""What a busy machine must not change: which tests run beside which, how long they may take, and what a search finds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from patience import interrupted_when_stuck

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from xdist.scheduler import Scheduling

# Beginnings of paths. Under pytest-xdist, tests that start processes of their own run one after another. A process that
# computes for a while by itself is no reason to be here.
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


# An example that fails is shown as it was found, with what reproduces it: to shrink one can take many minutes. That, and
# hypothesis's own limits of time, are in "default" (pytest --hypothesis-profile default).
settings.register_profile(
    "suite",
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


SEARCH = ("tests/cli/", "tests/planner/", "tests/schedule/")


def _limits_on_processor_time(nodeid: str) -> AbstractContextManager:
    """A search that may take a second finds more in it when nobody else needs the processor, but for this."""
    return mock.patch.object(time, "perf_counter", time.process_time) if nodeid.startswith(SEARCH) else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with interrupted_when_stuck(), _limits_on_processor_time(item.nodeid):
        return (yield)


@pytest.fixture
def world() -> Iterator[ProcessGroup]:
    """The default group of a job of one rank, which a test may destroy."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log) -> Scheduling:
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerForRanks(LoadScopeScheduling):
        """Marks for ``--dist loadgroup`` would say the same; pytest-xdist 3.8 loses them under pytest 9.2."""

        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if _starts_processes(nodeid) else nodeid

    return OneWorkerForRanks(config, log)
