from __future__ import annotations

from collections.abc import Callable

import pytest
from browsers import browser  # noqa: F401 - a fixture

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import Timeline, simulate


@pytest.fixture
def run() -> Callable[..., Timeline]:
    """``run(name, p, m, costs=None, **options)``: the timeline of a family's schedule."""

    def build(name: str, p: int, m: int, costs: Costs | None = None, **options: object) -> Timeline:
        return simulate(build_schedule(name, num_devices=p, num_microbatches=m, **options), costs)

    return build
