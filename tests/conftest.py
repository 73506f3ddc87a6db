"""What a busy machine must not change: which tests run beside which, how long they may take, and what a search finds."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from lanes import THOROUGH
from patience import interrupted_when_stuck
from skips import pytest_terminal_summary as pytest_terminal_summary  # a hook

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from xdist.scheduler import Scheduling

# What the tests of a folder import. Where it is not installed, they are left out.
NEEDS = {"runtime": "torch", "cpu": "torch", "mamba": "torch", "mcore": "megatron", "end_to_end": "megatron"}
MISSING = {folder: package for folder, package in NEEDS.items() if find_spec(package) is None}
collect_ignore = [*MISSING]


def pytest_report_header() -> list[str]:
    return [f"left out without {package}: tests/{folder}" for folder, package in MISSING.items()]


# Beginnings of paths. Under pytest-xdist, tests that start processes of their own run one after another on each of three
# workers: on one alone they would take far longer than all others do on the rest, and most of them wait now and then. What
# trains on the session's ranks, and what these keep from run to run, has the last one. A process that computes for a while by
# itself is no reason to be here. They begin first, and the other tests leave them the processor: the lane ends with them.
START_PROCESSES = {
    "launched": ("slurm/", "cpu/", "scripts/test_launch_grid.py", "scripts/test_quickstart"),
    "own ranks": (
        *("end_to_end/test_consumers", "end_to_end/test_cuda_graphs", "end_to_end/test_lazy_features"),
        *("end_to_end/test_plain_loop", "end_to_end/test_transformer_engine"),
        *("runtime/test_executor", "runtime/test_offload", "runtime/test_vocabulary_ranks"),
    ),
    "the session's ranks": ("end_to_end/", "benchmarks/"),
}


# Files whose tests share something that takes long to make, which every worker with one of them would make for itself.
MAKE_ONCE = (
    "cli/test_advise_command.py",
    "planner/test_profile.py",
    "report/test_page_in_browser.py",
    "scripts/test_package.py",
    "scripts/test_site.py",
    "schedule/test_imports.py",
    "transformer_engine/",
)


NICENESS = 10
# Tests that take longest by themselves. As the last ones they would keep one worker busy while the others have ended.
LONG = ("tests/scripts/test_types.py", "tests/scripts/test_launch.py", "tests/scripts/test_readme.py")


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker of a whole run collect another folder first.

    pytest rewrites the assertions of a test file once, and keeps the result for other processes. Workers in the same
    order would all rewrite the same files at the same time.
    """
    worker = getattr(config, "workerinput", None)
    if worker and config.args == ["tests"]:
        tests = Path(__file__).parent
        places = sorted({file.relative_to(tests).parts[0] for file in tests.rglob("test_*.py")} - {*MISSING})
        first = len(places) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = [str(tests / place) for place in (*places[first:], *places[:first])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (not item.nodeid.startswith(LONG), item.nodeid.split("/")[1]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector the modules and the collected tests, which are never garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _scope(nodeid: str) -> str:
    """What runs on one worker, one test after another: a group, a file, or the test alone."""
    path = nodeid.removeprefix("tests/")
    group = next((group for group, places in START_PROCESSES.items() if path.startswith(places)), None)
    return group or next((place for place in MAKE_ONCE if path.startswith(place)), nodeid)


# An example that fails is shown as it was found, with what reproduces it: to shrink one can take many minutes. That, and
# hypothesis's own limits of time, are in "default" (pytest --hypothesis-profile default).
for profile, number in (("suite", 50), (THOROUGH, 100)):
    settings.register_profile(
        profile,
        max_examples=number,
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
    if hasattr(item.config, "workerinput") and _scope(item.nodeid) not in START_PROCESSES:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    with interrupted_when_stuck(), _limits_on_processor_time(item.nodeid):
        return (yield)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A command that sets up the package's log does so for its process, and here that is the process of all tests."""
    logger = logging.getLogger("megatron_pipemem")
    handlers, level, propagate = [*logger.handlers], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


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

    class WorkersForRanks(LoadScopeScheduling):
        """Marks for ``--dist loadgroup`` would say the same; pytest-xdist 3.8 loses them under pytest 9.2."""

        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return WorkersForRanks(config, log)
