"""Costs from timestamps, and when they have drifted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import toy

from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.features.pairs.runtime import Pairs
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.trace import Stopwatch, Trace, TracedAction, average, drift
from megatron_pipemem.runtime.transport import MessageFormat, Transport
from megatron_pipemem.schedule.action import SELECTIVE_SECONDS, Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.measured import costs_from
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import simulate

V2 = Placement.v_shape(2)


def step(**seconds):
    """One step: ``F0=[1, 2]`` are the forwards of stage 0 of two microbatches."""
    return [
        TracedAction(Action(Kind(name[0]), int(name[1:]), microbatch), 10.0, 10.0 + duration)
        for name, durations in seconds.items()
        for microbatch, duration in enumerate(durations)
    ]


def costs(forward=1.0, **changes):
    prices = {kind: [forward] * 4 for kind in "FIW"}
    for name, seconds in changes.items():
        prices[name[0]][int(name[1:])] = seconds
    return Costs(*map(tuple, prices.values()))


def test_medians_are_of_all_steps_and_shrug_off_a_hiccup():
    watch = Stopwatch()
    watch.add(step(F0=[1.0, 1.0, 50.0], W3=[2.0]))
    watch.add(step(F0=[1.0, 1.5], W3=[4.0]))
    assert watch.steps == 2
    assert watch.medians() == {(Kind.F, 0): pytest.approx(1.0), (Kind.W, 3): pytest.approx(3.0)}
    watch.reset()
    assert (watch.steps, watch.medians()) == (0, {})


@pytest.mark.parametrize("name", ["dualpipe-v", "zbv", "dualpipe"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6])
def test_a_step_in_pairs_gives_the_costs_by_which_it_takes_as_long(name, share):
    """Each device measures its own actions. By the costs of all, the step and every pair take as long as they took."""
    alone = build_schedule(name, num_devices=4, num_microbatches=16)
    schedule = with_pairs(alone, Costs(3, 4, 2, p2p=0.1).with_exchanges(0.4)).schedule
    real = Costs(3, 4, 2, p2p=0.1).with_exchanges(share)
    timeline, watches = simulate(schedule, real), []
    for order, spans in zip(schedule.orders, timeline.spans, strict=True):
        watch = Stopwatch()
        watch.add([TracedAction(a, *span) for a, span in zip(order, spans, strict=True)], schedule.pairs)
        watches.append(watch)
    medians, pairs = average([watch.medians() for watch in watches]), average([watch.of_pairs() for watch in watches])
    links = {(a, b): 0.1 for a in range(4) for b in range(4)}
    costs = costs_from(medians, links, schedule.placement, Costs(), pairs=pairs)
    # Pairs do not show exchanges that are longer than what they hide. W of a B that runs alone hides in these, too.
    assert simulate(schedule, costs).makespan == pytest.approx(timeline.makespan, rel=2e-3 if share == 0.6 else 1e-6)
    assert costs.exchange_shares(schedule.placement)[0] == pytest.approx(min(share, 1 / 3, 3 / 7), abs=0.1)
    assert costs.have_exchanges
    # Without pairs the next step keeps the shares.
    again = costs_from(medians, links, schedule.placement, costs)
    assert again.forward_exchange == costs.forward_exchange


class Paired(toy.Runner):
    """A stage whose forward takes 2 seconds of ``clock``, its backward 3, and both together 4."""

    clock = 0.0

    def forward(self, microbatch, input, will_recompute=False):
        Paired.clock += 2.0
        return super().forward(microbatch, input, will_recompute)

    def backward(self, *arguments):
        Paired.clock += 3.0
        return super().backward(*arguments)

    def run_pair(self, microbatch, input, other, arguments):
        output, gradient = self.forward(microbatch, input), other.backward(*arguments)
        Paired.clock -= 1.0
        return output, gradient

    def defer_weight_gradients(self):
        """Nothing is deferred."""


def test_the_executor_times_a_pair_as_one():
    alone = build_schedule("1f1b", num_devices=1, num_microbatches=4)
    schedule = with_pairs(alone, Costs(2, 3, 0).with_exchanges(0.4)).schedule
    transport = Transport(
        toy.alone(schedule.placement), MessageFormat((toy.ROWS, toy.WIDTH), torch.float32, torch.device("cpu"))
    )
    times, watch, real = Trace(), Stopwatch(), Costs(2, 3, 0, forward_exchange=0.4, backward_exchange=0.6)
    times._now = lambda: Paired.clock
    times._begin = Paired.clock
    Executor(lower(schedule), 0, {0: Paired(0, 1)}, transport, [Pairs(schedule.pairs, nullcontext)], trace=times).run()
    watch.add(times.actions(), schedule.pairs)
    assert len(schedule.pairs) == 3 and watch.of_pairs() == {((Kind.F, 0), (Kind.B, 0)): 4.0}
    costs = costs_from(watch.medians(), {}, schedule.placement, Costs(2, 3, 0), pairs=watch.of_pairs())
    assert (costs.forward, costs.backward_input) == ((2.0,), (3.0,))
    assert (*costs.forward_exchange, *costs.backward_exchange) == pytest.approx((0.4, 0.6))
    assert simulate(schedule, costs).makespan == simulate(schedule, real).makespan == Paired.clock


def test_replicas_are_averaged_stage_by_stage():
    seen = [{(Kind.F, 0): 1.0, (Kind.I, 0): 5.0}, {(Kind.F, 0): 3.0}, {(Kind.F, 1): 7.0}]
    assert average(seen) == {(Kind.F, 0): 2.0, (Kind.I, 0): 5.0, (Kind.F, 1): 7.0}


def test_costs_are_one_value_per_stage_and_links_those_measured():
    medians = {
        (kind, stage): 10 * "FIW".index(kind.value) + stage
        for kind in "FIW"
        for stage in range(4)
        for kind in [Kind(kind)]
    }
    costs = costs_from(medians, {(0, 1): 0.25}, V2, Costs())
    assert costs.forward == (0, 1, 2, 3)
    assert costs.backward_input == (10, 11, 12, 13)
    assert costs.backward_weight == (20, 21, 22, 23)
    assert (costs.link_seconds(0, 1), costs.link_seconds(1, 0)) == (0.25, 0.0)


def test_a_fused_backward_is_split_as_it_was_split_before():
    before = Costs(backward_input=3.0, backward_weight=1.0)
    medians = {(Kind.F, s): 1.0 for s in range(4)} | {(Kind.B, s): 8.0 for s in range(4)} | {(Kind.W, 3): 5.0}
    costs = costs_from(medians, {}, V2, before)
    assert costs.backward_input == (6, 6, 6, 6)
    assert costs.backward_weight == (2, 2, 2, 5)


def test_what_ran_again_is_priced_where_it_did():
    medians = {(Kind.F, 0): 2.0, (Kind.F, 1): 4.0, (Kind.RS, 0): 0.5}
    seconds = costs_from(medians, {}, Placement.linear(2), Costs()).seconds(Placement.linear(2))
    assert seconds[Kind.RS] == (0.5, 4.0 * SELECTIVE_SECONDS) and seconds[Kind.R] == (2.0, 4.0)


def test_vocabulary_passes_are_priced_per_device():
    medians = {
        (kind, device): 10 * n + device for n, kind in enumerate((Kind.S, Kind.T, Kind.EMBED_F)) for device in (0, 1)
    }
    prices = costs_from(medians | {(Kind.LOSS, 0): 0.5}, {}, V2, Costs()).vocabulary
    assert (prices.score, prices.gradient, prices.embed) == ((0, 1), (10, 11), (20, 21))
    assert (prices.embed_gradient, prices.loss) == ((0, 0), 0.5)
    assert costs_from({}, {}, V2, Costs()).vocabulary is None


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (costs(), None),
        (costs(1.19), None),
        (costs(I2=1.21), "I of stage 2"),
        (costs(I2=0.79), "I of stage 2"),
        (costs(F1=1.3, W3=0.6), "W of stage 3"),
        (costs(1.5), "takes 1.5e"),
    ],
)
def test_drift_is_a_fifth_of_a_stages_price_and_names_the_worst(now, words):
    change = drift(costs(), now, V2)
    assert change is None if words is None else words in change


def test_the_times_of_a_stage_without_layers_are_noise():
    assert drift(costs(F0=0.01), costs(F0=0.05), V2) is None
    assert drift(costs(F0=0.01), costs(F0=0.5), V2) is not None
