"""The example in docs/adding-a-schedule.md works as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_pipemem.errors import UnknownScheduleError
from megatron_pipemem.schedule import registry
from megatron_pipemem.schedule.core.simulator import simulate
from megatron_pipemem.schedule.core.validator import validate

DOCUMENT = (Path(__file__).parents[2] / "docs" / "adding-a-schedule.md").read_text(encoding="utf-8")


def test_the_example_registers_a_valid_schedule(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    with pytest.raises(UnknownScheduleError):
        registry.family("all-then-all")
    example = re.search(r"```python\n(from megatron_pipemem import Family.*?)```", DOCUMENT, re.DOTALL)
    exec(example[1], {})
    schedule = registry.build_schedule("all-then-all", num_devices=4, num_microbatches=8)
    validate(schedule)
    assert simulate(schedule).peak == 2.0
