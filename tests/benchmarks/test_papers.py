"""The order of arXiv 2411.05288's code: its bubble, and the time that collectives and messages add."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_pipemem import Costs, build_schedule, simulate
from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.vocabulary import VocabularyCosts

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from published.vocabulary_1f1b import step_seconds

FORWARD, BACKWARD = 1.0, 2.0


def seconds(devices, microbatches, barriers, backward=BACKWARD, vocabulary=0.0, collective=0.0, message=0.0):
    passes = {Kind.F: FORWARD, Kind.B: backward}
    passes |= dict.fromkeys((Kind.S, Kind.T, Kind.EMBED_F, Kind.EMBED_B), vocabulary)
    collectives = dict.fromkeys((Kind.BCAST_X, Kind.REDUCE_X, Kind.REDUCE_E, Kind.BCAST_E), collective)
    rows = {kind: (value,) * devices for kind, value in passes.items()}
    return step_seconds(rows, collectives, lambda source, destination: message, microbatches, barriers)


@pytest.mark.parametrize("devices", (2, 3, 4, 8, 16))
@pytest.mark.parametrize("barriers", (1, 2))
def test_the_bubble_is_that_of_1f1b(devices, barriers):
    for microbatches in (devices + 2, 4 * devices):
        of_1f1b = (microbatches + devices - 1) * (FORWARD + BACKWARD)
        further = seconds(devices, microbatches, barriers) - of_1f1b
        assert further == pytest.approx(0) or (barriers == 2 and further == pytest.approx(FORWARD))


@pytest.mark.parametrize("barriers", (1, 2))
def test_collectives_are_hidden_and_messages_are_not(barriers):
    # If B is exactly as long as two F, some devices compute S a whole F later than others, and hide less.
    alone = seconds(8, 64, barriers, backward=1.9, vocabulary=0.1)
    assert seconds(8, 64, barriers, backward=1.9, vocabulary=0.1, collective=0.1) < 1.005 * alone
    assert seconds(8, 64, barriers, backward=1.9, vocabulary=0.1, message=0.1) > alone + 64 * 2 * 0.1


@pytest.mark.parametrize("devices", (2, 3, 4, 8))
@pytest.mark.parametrize("collective", (0.01, 0.1))
@pytest.mark.parametrize("backward", (1.9, 2.0, 2.3))
def test_with_two_barriers_our_orders_are_never_slower(devices, collective, backward):
    """Not even if messages take no time, so that only ours would gain by messages that leave the device free."""
    passes = VocabularyCosts(0.1, 0.1, 0.01, 0.01, collectives=collective)
    costs = Costs(FORWARD, 0.6 * backward, 0.4 * backward, vocabulary=passes)
    schedule = build_schedule("1f1b", num_devices=devices, num_microbatches=4 * devices)
    rows = {kind: (value,) * devices for kind, value in ((Kind.F, FORWARD), (Kind.B, backward))}
    # The paper's code has X and G in one collective, and the sum of dX and the statistics in another.
    merged = dict.fromkeys((Kind.BCAST_X, Kind.REDUCE_X), 2 * collective)
    merged |= dict.fromkeys((Kind.REDUCE_E, Kind.BCAST_E), collective)
    published = step_seconds(
        {**rows, **passes.seconds(devices)}, merged, lambda source, destination: 0.0, 4 * devices, 2
    )
    assert simulate(with_vocabulary(schedule, 2, costs), costs).makespan < published
