"""The measured step of a run, by cause of its time."""

from __future__ import annotations

import pytest
from measured_steps import as_measured
from refusals import refused

from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.tools.planner.explanation import Case, explain, read_case
from megatron_pipemem.tools.report.measured_step import IMBALANCE, LATE, SCHEDULE, idle_causes


def test_a_step_in_pairs_is_explained():
    costs = Costs(p2p=0.01).with_exchanges(0.4)
    ran = with_pairs(build_schedule("zbv", num_devices=4, num_microbatches=16), costs)
    measured = Case(as_measured(ran.schedule, costs), (4,) * 8)
    assert measured.own_timeline.makespan == pytest.approx(ran.makespan)
    for idle in idle_causes(measured.step):
        assert sum(idle.causes.values()) == idle.idle_ns
        assert idle.causes[IMBALANCE] == idle.causes[LATE] == 0 < idle.causes[SCHEDULE]


@pytest.mark.parametrize("name", ["po-h", "vocabulary 1", "vocabulary 2", "dualpipe", "chimera"])
def test_what_else_a_schedule_may_have_is_explained(name):
    alone = build_schedule("1f1b" if "vocabulary" in name else name, num_devices=4, num_microbatches=8)
    schedule = with_vocabulary(alone, int(name[-1]), Costs()) if "vocabulary" in name else alone
    facts = explain(Case(as_measured(schedule, Costs(p2p=0.1))))
    assert facts["simulated_seconds"] == pytest.approx(facts["seconds"], rel=0.05)
    assert all(sum(idle["causes_ns"].values()) == idle["idle_ns"] for idle in facts["idle"])


def test_a_run_of_slices_is_explained_with_the_times_and_bytes_of_each():
    """Keys and values of 8 bytes stay from the first slice's forward to its backward, their gradients from the last one's."""
    costs = Costs((1.0, 3.0) * 4, (1.0, 2.0) * 4, (1.0, 1.0) * 4)
    step = as_measured(build_schedule("seq1f1b", num_devices=4, num_microbatches=8, slices=2), costs)
    memory = {Kind.F: (18.0, 10.0) * 4, Kind.B: (-26.0, -2.0) * 4}
    facts = explain(Case(step, memory=memory))
    assert facts["stages"] == pytest.approx([9.0] * 4)
    assert facts["simulated_seconds"] == pytest.approx(facts["seconds"])
    counted = Costs(memory={Kind.F: (18, 10) * 4, Kind.B: (-26, -2) * 4})
    assert facts["peak"] == max(peaks(step.schedule, counted)) == 82


def test_a_grids_folder_is_not_a_report(tmp_path):
    (tmp_path / "points" / "000").mkdir(parents=True)
    with refused("wrong-file", "points/000"):
        read_case(tmp_path)
