"""Every schedule family trains a GPT as stock Megatron does, and its peak bytes are known beforehand.

Those of two replicas of the model: ``test_bidirectional.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lanes import rest_nightly
from model_flags import LAYOUT, UNTIED

from megatron_pipemem.schedule.baseline import share_of_1f1b
from megatron_pipemem.schedule.registry import families
from megatron_pipemem.tools.planner.explanation import case_of_report
from megatron_pipemem.tools.report.measured_step import idle_causes

NAMES = [
    family.name for family in families() if not (family.asynchronous or family.slices > 1) and family.replicas == 1
]
BOUNDARY_BYTES = 64 * 64 * 4  # tokens x hidden size, fp32
# Sixteen stages for eight layers.
FLAGS = {"hanayo": (LAYOUT, "Et||t||t||t||t||t|t||t||L")}
# A family per placement and kind of backward.
FULL_LANE = ("1f1b", "interleaved", "zb-h1", "v-half", "1f1b-v", "hanayo")
EXECUTED = "tests/runtime/test_executor.py executes every family"

every_family = pytest.mark.parametrize("name", rest_nightly(NAMES, FULL_LANE, EXECUTED))


def test_a_run_does_not_depend_on_earlier_runs(train):
    first = train("stock")
    train("v-half")
    assert train("stock", "--seed", "1234") == first


@every_family
def test_trains_as_stock(train, equals_stock, name):
    equals_stock(name, ours=FLAGS.get(name, ()), train=train)


def test_the_documented_example_trains_as_stock(train, equals_stock, tmp_path):
    """A schedule in a file that only the run's flag names."""
    document = (Path(__file__).parents[2] / "docs" / "adding-a-schedule.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.py"
    path.write_text(re.search(r"```python\n(from megatron_pipemem import .*?)```", document, re.DOTALL)[1])
    equals_stock("all-then-all", ours=("--pipemem-schedule-module", str(path)), train=train)


@pytest.mark.parametrize("name", rest_nightly([*NAMES, "stock"], [*FULL_LANE, "stock"], EXECUTED))
def test_the_last_step_is_explained(train, name):
    """Of the runs above: idle time splits up, and the run's own schedule, simulated with its times, holds about as much."""
    run = train(name, *FLAGS.get(name, ()))
    report = {"plans": run.plans, "last_step": run.last_step, "ranks": run.ranks, "bytes_of_1f1b": run.bytes_of_1f1b}
    case = case_of_report(report)
    for timeline in (case.measured_timeline, case.planned_timeline):
        assert list(timeline.peaks) == run.counted_peaks, "pictures show the bytes of the report"
        share = max(run.counted_peaks) / run.bytes_of_1f1b if run.bytes_of_1f1b else None
        assert share_of_1f1b(timeline) == share
    assert case.bubble_rate == min(run.of_ranks("measured_bubble_rate"))
    for device in idle_causes(case.step):
        assert sum(device.causes.values()) == device.idle_ns > 0
    layers = sum(case.layers)
    assert layers == 8 and 0 < case.step.length_ns < 1e9 * (case.outside_seconds + 60)
    if name in ("1f1b", "stock", "zb-h1"):
        # Messages come and go within the action that they are counted with.
        assert abs(case.own_timeline.peak - max(run.counted_peaks)) <= 4 * BOUNDARY_BYTES


@every_family
def test_every_run_knows_the_bytes_of_1f1b(train, name):
    """Where 1F1B's stages have other layers, each of the first stage lacks a mask that later layers make."""
    run, same = train(name, *FLAGS.get(name, ())), train("1f1b")
    linear = run.plans[-1]["chunks"] == 1
    if name in FLAGS:
        assert run.bytes_of_1f1b is None, "its stages do not make even ones"
        return
    assert run.bytes_of_1f1b == pytest.approx(max(same.counted_peaks), rel=0 if linear else 0.02)


STOCK_TWINS = {"1f1b": (), "interleaved": ("--num-virtual-stages-per-pipeline-rank", "2")}


@pytest.mark.parametrize("name", STOCK_TWINS)
def test_is_stocks_own_schedule(train_small, name):
    """Same order and same placement: even clipped gradients and the bits of the norm agree."""
    flags = (UNTIED, "--clip-grad", "1")
    ours, stock = train_small(name, *flags), train_small("stock", *flags, *STOCK_TWINS[name])
    assert ours.losses == stock.losses
    assert ours.grad_norms == stock.grad_norms
    for own, other in zip(ours.counted_peaks, stock.counted_peaks, strict=True):
        # Receives are posted at other moments, and Megatron's loop variables keep what has been sent.
        assert -2 <= (other - own) / BOUNDARY_BYTES <= 4
