"""Memory of messages: what an answer frees has been used by its receiver, whatever the times are."""

from __future__ import annotations

import random

import pytest

from megatron_pipemem.schedule.action import SENDS
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.message_memory import freed_sends, nccl_bytes, sent_bytes
from megatron_pipemem.schedule.messages import Router
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.simulator import simulate

FAMILIES = [family.name for family in families() if not family.asynchronous]


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_frees_what_its_sender_has_used(name, p):
    """The oracle is the simulator: no times of passes and messages let the answer come before the use ends."""
    schedule = build_schedule(name, num_devices=p, num_microbatches=2 * p)
    program, router, draw = lower(schedule), Router(schedule.placement), random.Random(p)
    emitted = (router.emitted(action) for order in schedule.orders for action in order)
    receives = {message.send: message.receive for message in emitted if message}
    consumers = {router.awaited(action): action for order in schedule.orders for action in order}
    for _ in range(3):
        stages = schedule.num_stages
        costs = Costs(*([draw.random() + 0.01 for _ in range(stages)] for _ in range(3)), p2p=draw.random())
        spans = {
            action: span
            for order, of_device in zip(schedule.orders, simulate(schedule, costs).spans, strict=True)
            for action, span in zip(order, of_device, strict=True)
        }
        for device in range(p):
            for action, sends in freed_sends(program, device).items():
                assert all(spans[consumers[receives[send]]][1] <= spans[action][0] + 1e-9 for send in sends)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_send_is_freed_at_most_once_and_after_it_was_sent(name):
    program = lower(build_schedule(name, num_devices=4, num_microbatches=8))
    for device, actions in enumerate(program.actions):
        freed = freed_sends(program, device)
        listed = [send for action in actions for send in freed.get(action, ())]
        assert len(listed) == len(set(listed))
        assert all(actions.index(send) < actions.index(action) for action, sends in freed.items() for send in sends)
        held = sent_bytes(program, device, lambda action: 10 if action.kind in SENDS else 1_000)
        assert held[-1] == 10 * (sum(action.kind in SENDS for action in actions) - len(listed)) and min(held) >= 0


def test_1f1b_keeps_the_outputs_of_its_warm_up_until_the_first_answer():
    program = lower(build_schedule("1f1b", num_devices=4, num_microbatches=8))
    peaks = [max(sent_bytes(program, device, lambda action: 1)) for device in range(4)]
    # Device 0 sends F0 to F3, and I0 shows that F0 to F2 were used. Device 2 sends F1 to the last device before it uses I0.
    assert (peaks[0], peaks[3]) == (4, 2)


def test_bytes_of_microbatches_may_differ():
    program = lower(build_schedule("gpipe", num_devices=2, num_microbatches=3))
    assert max(sent_bytes(program, 0, lambda action: 10**action.microbatch)) == 111


def test_nccl_has_buffers_at_the_receiving_end_of_an_edge():
    edge = nccl_bytes(Placement.linear(2), 0)
    assert edge == 4 * (524_288 + 4_915_200 + 4_194_304)
    assert [nccl_bytes(Placement.linear(4), device) // edge for device in range(4)] == [1, 2, 2, 1]
    assert [nccl_bytes(Placement.interleaved(3, 2), device) // edge for device in range(3)] == [2, 2, 2]
    assert nccl_bytes(Placement.linear(1), 0) == 0
