"""What ranks learn of a step whose microbatches differ, before it runs; here the pipeline is one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.step import batches
from megatron_pipemem.mcore.step.batches import StepShapes
from megatron_pipemem.mcore.step.extension import LaunchOrders, Step
from megatron_pipemem.mcore.step.forward_backward import _message_shape, _same_tokens, _shape_of_tokens
from megatron_pipemem.runtime.transport import MessageFormat, Pipeline
from megatron_pipemem.schedule.placement import Placement


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(batches.random, "_fork_rng", torch.random.fork_rng)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


class Model(torch.nn.Module):
    def forward(self, input_ids, position_ids=None):
        raise AssertionError("the model must not run")


def make_step(world, iterators: list, forward_step, m: int = 3) -> Step:
    config = SimpleNamespace(hidden_size=8, sequence_parallel=True, variable_seq_lengths=True)
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2))
    context = SimpleNamespace(
        forward_step_func=forward_step,
        num_microbatches=m,
        forward_only=False,
        collect_non_loss_data=False,
        config=config,
    )
    return Step(
        context=context,
        chunks=[Model()],
        groups=groups,
        pipeline=Pipeline(world, Placement.linear(1), 0, [0], {}),
        shape=None,
        message=MessageFormat(None, torch.float32, torch.device("cpu")),
        message_shape=_shape_of_tokens(config, groups),
        tokens=_same_tokens(16, 2, None, config, groups, m),
        full_microbatch=None,
        program_store=None,
        launches=LaunchOrders(),
        finalize=None,
        iterators=iterators,
        finalizes=True,
    )


def lengths(drawn: list[int]):
    for number in range(10):
        drawn.append(number)
        yield {"tokens": torch.full((2, 4 + 2 * number), number)}


def forward_step(data, model):
    return model(next(data)["tokens"]), None


@pytest.mark.parametrize("passed", [lambda batch: None, lambda batch: batch["tokens"][0]])
def test_where_calls_do_not_show_tokens_messages_tell_their_shapes(world, passed):
    """It is found out once for every kind of step."""
    shapes, asked = StepShapes(ChunkPlacement(lambda p, v: None, is_round_robin=True)), []

    def hiding_step(data, model):
        asked.append(model)
        return model(passed(next(data))), None

    drawn: list[int] = []
    stream = lengths(drawn)
    for kind, times in ((False, 3), (False, 3), (True, 6)):
        step = make_step(world, [stream], hiding_step)
        step.context.forward_only = kind
        shapes.prepare(step)
        assert step.tokens is None and step.message.shapes is None and step.message.shape_of(0) is None
        assert len(asked) == times
        assert [int(next(step.iterators[0])["tokens"][0, 0]) for _ in range(3)] == drawn[-3:]


@pytest.mark.parametrize(
    ("fields", "channels"),
    [
        ({}, 8),
        ({"enable_hyper_connections": False, "num_residual_streams": 4}, 8),
        ({"enable_hyper_connections": True, "num_residual_streams": 3}, 24),  # dev
        ({"enable_mhc_connections": True, "mhc_num_residual_streams": 2}, 16),  # main
    ],
)
def test_messages_are_as_wide_as_all_residual_streams_together(fields, channels):
    config = SimpleNamespace(hidden_size=8, sequence_parallel=True, variable_seq_lengths=False, **fields)
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2), cp=SimpleNamespace(size=lambda: 4))
    assert _message_shape(64, 2, None, config, groups, None) == (8, 2, channels)
    assert _shape_of_tokens(config, groups)(2, 16) == (8, 2, channels)
