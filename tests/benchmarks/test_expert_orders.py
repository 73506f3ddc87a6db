"""The bound of steps with pairs against simulated steps of random costs."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from megatron_pipemem import Costs, build_schedule, simulate
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.schedule.bounds import lower_bound
from megatron_pipemem.search.two_lanes import improved

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from expert_orders import bound_with_ramps


def random_step(rng):
    devices, chunks = rng.choice(((2, 2), (2, 3), (3, 2), (4, 2)))
    forward, inputs, weights = (
        tuple(rng.uniform(least, 2) for _ in range(devices * chunks)) for least in (0.5, 0.5, 0.1)
    )
    sent, returned = (tuple(part * rng.uniform(0, 0.6) for part in parts) for parts in (forward, inputs))
    messages = rng.choice((0.0, 0.1, 0.3))
    costs = Costs(forward, inputs, weights, messages, forward_exchange=sent, backward_exchange=returned)
    microbatches = devices * rng.randint(1, 4)
    return build_schedule("interleaved", num_devices=devices, num_microbatches=microbatches, chunks=chunks), costs


def test_no_step_is_shorter():
    rng = random.Random(3)
    ratios = []
    for _ in range(100):
        schedule, costs = random_step(rng)
        paired = with_pairs(schedule, costs)
        searched = improved(paired.schedule, costs, None, 60, effort=0.01)
        shortest = min(simulate(order, costs).makespan for order in (schedule, paired.schedule, searched))
        ratios.append(shortest / bound_with_ramps(schedule.placement, schedule.num_microbatches, costs))
    assert 1 <= min(ratios) < 1.2, "it holds, and is near some steps"


def test_it_is_above_the_bound_of_one_device_at_few_microbatches():
    schedule = build_schedule("interleaved", num_devices=4, num_microbatches=4, chunks=2)
    costs = Costs(1.0, 1.0, 0.5, forward_exchange=0.4, backward_exchange=0.4)
    problem = schedule.placement, 4, costs
    assert bound_with_ramps(*problem) > lower_bound(*problem, pairs=True)
    assert bound_with_ramps(*problem) <= with_pairs(schedule, costs).makespan + 1e-9


@pytest.mark.parametrize("devices", (2, 4))
def test_one_microbatch_passes_there_and_back(devices):
    schedule = build_schedule("interleaved", num_devices=devices, num_microbatches=devices, chunks=2)
    costs = Costs(1.0, 1.0, 0.0, p2p=0.25)
    least = bound_with_ramps(schedule.placement, devices, costs)
    assert least >= 2 * devices + 2 * 0.25 * (2 * devices - 1)
