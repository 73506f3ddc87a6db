"""A result counts from its making until it is sent, once, and only where nothing else keeps it."""

from __future__ import annotations

import pytest
import torch
import toy

from megatron_pipemem.runtime.activation_ledger import (
    ActivationLedger,
    bytes_per_action,
    predict_peak_bytes,
)
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.weight_gradients import current_queue
from megatron_pipemem.schedule.action import Action
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Program

MESSAGE = toy.ROWS * toy.WIDTH * 4
# Two microbatches of a stage in the middle. Nothing leaves as soon as it is there.
ACTIONS = (
    "1RECV_F0 1RECV_F1 1F0 1F1 1SEND_F0 1SEND_F1 1RECV_I0 1RECV_I1 1I0 1I1 1SEND_I0 1W0 1SEND_I1 1W1 1REDUCE_GRAD"
).split()
# The device after it, which has used an output when it sends the gradient.
NEXT = "2RECV_F0 2RECV_F1 2F0 2I0 2SEND_I0 2F1 2I1 2SEND_I1 2W0 2W1 2REDUCE_GRAD".split()


class Neighbours:
    """Every message has arrived, and what is sent leaves as late as can be."""

    def __init__(self):
        self._leaving: dict[Action, torch.Tensor] = {}
        self._arrived: dict[Action, torch.Tensor] = {}

    def post_receive(self, action):
        self._arrived[action] = torch.randn(toy.ROWS, toy.WIDTH)
        return self._arrived[action]

    def wait(self, action):
        return self._arrived.pop(action)

    def post_send(self, action, tensor):
        self._leaving[action] = tensor

    def free_sent(self, action):
        del self._leaving[action]

    def finish(self): ...


class PassesOn(toy.Runner):
    """A stage without layers, as Megatron runs it."""

    def __init__(self):
        super().__init__(1, 3)

        class Layers(torch.nn.Module):
            def forward(self, x):
                return x.clone()

        self.stage = Layers()


class EndsInLinear(toy.Runner):
    """Its output is nobody's but the message's: a linear layer keeps its input alone."""

    def __init__(self):
        super().__init__(1, 3)

        class Layers(torch.nn.Module):
            def forward(layers, x):
                return toy.SplitLinear.apply(torch.tanh(x), [self.weight], current_queue())

        self.weight = torch.nn.Parameter(torch.eye(toy.WIDTH))
        self.stage = Layers()


def held(runner) -> dict[str, int]:
    """Bytes after every action, of a step of one stage in the middle."""
    schedule = build_schedule("zb-h1", num_devices=3, num_microbatches=2)
    actions, following = (tuple(map(Action.parse, actions)) for actions in (ACTIONS, NEXT))
    program = Program(schedule, ((), actions, following))
    ledger = ActivationLedger([runner.weight] if isinstance(runner, EndsInLinear) else runner.stage.parameters())
    Executor(program, 1, {1: runner}, Neighbours(), (), ledger).run()
    assert ledger.failure is None
    assert predict_peak_bytes(actions, bytes_per_action(ledger.entries, 3)) == ledger.peak
    return {str(entry.action): entry.bytes // MESSAGE for entry in ledger.entries}


def test_what_waits_to_be_sent_is_held():
    seen = held(EndsInLinear())
    # Per microbatch: the input that came, what tanh made, the output, the gradients that came and that leave.
    assert [seen[at] for at in ("1RECV_F1", "1F0", "1F1", "1SEND_F0", "1SEND_F1")] == [2, 4, 6, 5, 4]
    assert [seen[at] for at in ("1RECV_I1", "1I0", "1I1")] == [6, 6, 6], "an input goes when its gradient is there"
    assert [seen[at] for at in ("1SEND_I0", "1W0", "1SEND_I1", "1W1")] == [5, 3, 2, 0]


def test_an_output_that_autograd_keeps_counts_once_and_goes_on_counting():
    seen = held(toy.Runner(1, 3))
    made = seen["1F0"] - seen["1RECV_F1"]
    assert seen["1F1"] - seen["1F0"] == made == 3, "the scaled input and two results of tanh, of which one is sent"
    assert seen["1SEND_F0"] == seen["1SEND_F1"] == seen["1F1"]
    assert seen["1W1"] == 0


class PassesGradientsOn(PassesOn):
    """Sends the very gradient that came, which counted already."""

    def backward(self, microbatch, input, output, output_gradient):
        return output_gradient


@pytest.mark.parametrize("stage", [PassesOn, PassesGradientsOn])
def test_a_stage_without_layers_holds_what_came_and_what_goes(stage):
    """However long the transport keeps it: a neighbour that is slow changes no count."""
    seen = held(stage())
    assert [seen[at] for at in ("1RECV_F1", "1F1", "1SEND_F0", "1SEND_F1")] == [2, 4, 3, 2]
    assert [seen[at] for at in ("1RECV_I1", "1I1", "1SEND_I0", "1SEND_I1")] == [4, 2, 1, 0]
