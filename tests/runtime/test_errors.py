"""An exception in the middle of a step says where it happened and leaves nothing behind."""

from __future__ import annotations

import pytest
import toy

from megatron_pipemem.runtime.weight_gradients import current_queue
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
def test_an_error_names_the_action_and_the_next_step_runs(name):
    program = lower(build_schedule(name, num_devices=1, num_microbatches=3))
    with pytest.raises(RuntimeError) as error:
        toy.run_step(program, toy.alone(program.placement), fail_at=2)
    assert str(error.value) == "boom"
    (note,) = error.value.__notes__
    position = program.actions[0].index(next(a for a in program.actions[0] if str(a) == "0F2"))
    assert f"device 0 failed at position {position}, action 0F2, of schedule {name}" in note
    assert current_queue() is None
    runners, ledger, _ = toy.run_step(program, toy.alone(program.placement))
    assert ledger.entries[-1].bytes == 0
    assert sum(len(runner.losses) for runner in runners.values()) == 3
