"""Consecutive steps without a barrier: their period, against published closed forms and steps simulated as one schedule."""

from fractions import Fraction

import pytest

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.schedule.core.costs import Costs
from megatron_pipemem.schedule.core.microbatches import MicrobatchWeights
from megatron_pipemem.schedule.core.simulator import simulate
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.stream import draw_steps, stream

SIZES = [(p, p * times) for p in (4, 8, 16) for times in (1, 2, 4)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "v-min"])
def test_schedules_whose_first_device_works_from_end_to_end_gain_nothing(name, p, m):
    assert stream(build_schedule(name, num_devices=p, num_microbatches=m)).gain == 1


@pytest.mark.parametrize(("p", "m"), [size for size in SIZES if size[1] >= 2 * size[0]])
@pytest.mark.parametrize(("name", "part"), [("zbv", 6), ("zb-h2", 3)])
def test_zero_bubble_schedules_gain_what_their_closed_form_says(name, part, p, m):
    found = stream(build_schedule(name, num_devices=p, num_microbatches=m))
    assert found.gain == pytest.approx(1 + Fraction(p - 1, part * m))


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.2, 0.8, p2p=0.05), Costs(1.3, 0.9, 0.4, p2p=0.2)])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h2", "zbv", "v-half", "dualpipe-v", "po-f", "seq1f1b"])
def test_steps_end_when_they_do_as_one_schedule(name, costs):
    one = simulate(build_schedule(name, num_devices=4, num_microbatches=8), costs)
    found = stream(one.schedule, costs, steps=3)
    drawn = draw_steps(one, 3)
    assert drawn.schedule.num_microbatches == 24
    for device, spans in enumerate(drawn.spans):
        count = len(one.spans[device])
        assert [spans[count * step - 1][1] for step in (1, 2, 3)] == pytest.approx(
            [ends[device] for ends in found.ends[:3]]
        )
    assert found.period <= found.synchronous + 1e-9 and found.synchronous == pytest.approx(one.makespan)


def test_tails_of_one_length_add_to_both_and_a_busy_device_hides_none_of_its_own():
    schedule = build_schedule("zbv", num_devices=4, num_microbatches=8)
    alone, even = stream(schedule), stream(schedule, tails=(2.0,) * 4)
    assert (even.period, even.synchronous) == (alone.period + 2, alone.synchronous + 2)
    uneven = stream(schedule, tails=(0.0, 2.0, 0.0, 0.0))
    assert uneven.period == even.period, "every device of zbv works all the time"
    assert alone.synchronous < uneven.synchronous < even.synchronous


def test_what_it_cannot_say_is_refused():
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=4)
    with pytest.raises(CostsError, match="1 tails for 2 devices"):
        stream(schedule, tails=(1.0,))
    with pytest.raises(UnsupportedError, match="asynchronous"):
        stream(build_schedule("pipedream-2bw", num_devices=2, num_microbatches=4))
    with pytest.raises(UnsupportedError, match="replicas"):
        draw_steps(simulate(build_schedule("chimera", num_devices=2, num_microbatches=4)), 2)
    with pytest.raises(UnsupportedError, match="weights"):
        draw_steps(simulate(schedule, Costs(microbatch=MicrobatchWeights((1.0, 2.0, 1.0, 1.0)))), 2)
