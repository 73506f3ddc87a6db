"""Numbers of Megatron's log that depend on the schedule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_pipemem.mcore.step.notices import TrainingLog
from megatron_pipemem.schedule.registry import build_schedule


@pytest.mark.parametrize(("name", "m", "of_1f1b"), [("1f1b", 8, 1), ("1f1b", 2, 1), ("v-half", 16, 0.75)])
def test_theoretical_memory_is_that_of_the_schedule(name, m, of_1f1b, caplog):
    log, args = TrainingLog(), SimpleNamespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    asked = []

    def report(args, num_microbatches, verbose):
        asked.append((args.virtual_pipeline_model_parallel_size, num_microbatches, verbose))
        return 100.0, 40.0, 140.0

    assert log._report_memory(report, args, m, verbose=True) == (100, 40, 140), "no step has run"
    log.after(
        SimpleNamespace(program=SimpleNamespace(schedule=build_schedule(name, num_devices=4, num_microbatches=m)))
    )
    with caplog.at_level("INFO"):
        found = log._report_memory(report, args, m, verbose=True)
    assert found == pytest.approx((100, 40 * of_1f1b, 100 + 40 * of_1f1b))
    assert asked == [(None, m, True)] * 2 and args.virtual_pipeline_model_parallel_size == 2
    assert f"schedule {name} holds at most {of_1f1b:.3g} times" in caplog.text
