"""The bytes of 1F1B that follow from what another schedule holds of the same model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pipemem.features.vocabulary.orders import with_barriers
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.baseline import counted_bytes_of_1f1b, share_of_1f1b
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import held_after, peaks, simulate
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.planner.profile import from_formulas

DEVICES, MICROBATCHES, LAYERS = 4, 8, 48
PROFILE = from_formulas(
    replace(load("tiny-gpt", Model), layers=LAYERS),
    Execution(tp=2, sequence_parallel=True, implementation="transformer_engine"),
    load("h100-80g", Cluster),
)


def built(name: str, **options: object) -> Schedule:
    return build_schedule(name, num_devices=DEVICES, num_microbatches=MICROBATCHES, **options)


PARTS = PROFILE.costs()


def costs_of(placement: Placement) -> Costs:
    """As a run has them: of the stages, and not of the parts of the model."""
    return Costs(memory=PARTS.of(placement).memory)


def changes_of(placement: Placement) -> dict[Kind, list[float]]:
    """Messages included, for all replicas of the model."""
    return {kind: [*values] * placement.replicas for kind, values in PARTS.of(placement).memory.items()}


def bytes_of(schedule: Schedule) -> float:
    changes = changes_of(schedule.placement)
    changes[Kind.B] = [i + w for i, w in zip(changes[Kind.I], changes[Kind.W], strict=True)]
    return max(max(held_after(actions, changes)) for actions in lower(schedule).actions)


@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved", "zb-h1", "zbv", "v-half", "hanayo", "chimera", "dualpipe", "pipedream"]
)
def test_1f1b_follows_from_the_stages_of_any_placement(name):
    schedule = built(name)
    counted = counted_bytes_of_1f1b(schedule, changes_of(schedule.placement), int(bytes_of(schedule)))
    assert counted == bytes_of(built("1f1b"))
    timeline = simulate(schedule, costs_of(schedule.placement))
    same = max(peaks(built("1f1b"), costs_of(Placement.linear(DEVICES))))
    assert share_of_1f1b(timeline) == pytest.approx(timeline.peak / same)
    assert share_of_1f1b(simulate(schedule, PARTS)) == pytest.approx(timeline.peak / same)


def test_what_waits_for_w_counts():
    """If more waits for W than F kept, zb-h1 holds more bytes than 1F1B does, and in units it holds as much."""
    schedule = built("zb-h1")
    assert max(peaks(schedule)) == 1
    assert share_of_1f1b(simulate(schedule, Costs(memory={Kind.F: 1.0, Kind.I: 1.0, Kind.W: -2.0}))) == 2, (
        "four wait on the last device"
    )


def test_recomputed_stages_are_counted_as_if_they_were_not():
    schedule = built("zb-h1")
    changes = changes_of(schedule.placement)
    inputs = [min(change, 1000.0) for change in changes[Kind.F]]
    again = changes | {Kind.F: inputs, Kind.R: [f - kept for f, kept in zip(changes[Kind.F], inputs, strict=True)]}
    assert counted_bytes_of_1f1b(schedule, again, 0) == counted_bytes_of_1f1b(schedule, changes, 0)


def test_what_does_not_say_the_bytes_of_1f1b_has_no_share():
    schedule = built("1f1b")
    assert share_of_1f1b(simulate(schedule)) is None, "units"
    passes = with_barriers(schedule, 1, Costs())
    assert share_of_1f1b(simulate(passes, costs_of(schedule.placement))) is None, "the head is on all devices"
    assert counted_bytes_of_1f1b(passes, changes_of(schedule.placement), 0) is None
    cut, changes = built("zbv"), changes_of(built("zbv").placement)
    even, uneven = (counted_bytes_of_1f1b(cut, changes, 0, layers) for layers in ((6,) * 8, (4, 4, *(6,) * 4, 8, 8)))
    assert even == bytes_of(built("1f1b")) and uneven is None, "1F1B would not have 8 layers before 16"
    linear = counted_bytes_of_1f1b(built("zb-h1"), changes_of(Placement.linear(DEVICES)), 0, (8, 12, 12, 16))
    assert linear == even, "the same cut"
    stock, changes = built("interleaved"), changes_of(built("interleaved").placement)
    assert counted_bytes_of_1f1b(stock, {Kind.F: changes[Kind.F]}, 0) is None, "messages of stock are not counted apart"
    sliced = built("seq1f1b", slices=2)
    changes = {
        kind: [value for value in values for _ in range(2)] for kind, values in changes_of(sliced.placement).items()
    }
    assert counted_bytes_of_1f1b(sliced, changes, 0) is None
    odd = Schedule.from_csv("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    stages = Costs(memory={Kind.F: (1.0, 2.0, 1.0), Kind.B: (-1.0, -2.0, -1.0)})
    assert share_of_1f1b(simulate(odd, stages)) is None, "three stages on two devices"
    assert share_of_1f1b(simulate(odd, Costs(memory={Kind.F: 2.0, Kind.B: -2.0}))) == 1, "each a device's whole share"
