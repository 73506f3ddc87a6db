"""Versions of the weights that are switched by pointer, against plain copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import examples

from megatron_pipemem.features.asynchronous.runtime import WeightSwitch, WeightVersions
from megatron_pipemem.runtime.executor import Instruction
from megatron_pipemem.schedule.action import Action, Kind


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(3, 5)),
        torch.nn.Parameter(torch.randn(7).bfloat16()),
        torch.nn.Parameter(torch.randn(1)),
    ]


@examples(60)
@given(st.data())
def test_as_copies_would_be(data):
    """Any sequence of updates, uses and renumberings; ``copies`` keeps every version the plain way."""
    own = parameters()
    weights = WeightVersions(own)
    copies = {0: [p.detach().clone() for p in own]}
    newest = most = 0
    for step in range(data.draw(st.integers(1, 8))):
        needed = data.draw(st.sets(st.sampled_from(sorted(copies))))
        weights.advance(needed)
        with torch.no_grad():
            for parameter in own:
                parameter.add_(step + 1)
        before = copies[newest]
        newest += 1
        copies = {v: copy for v, copy in copies.items() if v in needed}
        copies[newest] = [(p + (step + 1)).detach() for p in before]
        most = max(most, len(copies))
        by = data.draw(st.integers(-2, 2))
        weights.renumber(by)
        newest += by
        copies = {v + by: copy for v, copy in copies.items()}
        assert weights.newest == newest
        for version in data.draw(st.permutations(sorted(copies))):
            weights.show(version)
            assert all(torch.equal(a, b) for a, b in zip(own, copies[version], strict=True))
        weights.show(newest)
    assert weights.most_held == most
    assert weights.bytes == most * weights.version_bytes
    assert set(weights.older()) == set(copies) - {newest}


def test_a_graph_meets_the_version_of_its_forward_after_an_update():
    layer = torch.nn.Linear(3, 3)
    weights = WeightVersions(layer.parameters())
    used, input = layer.weight.detach().clone(), torch.ones(2, 3, requires_grad=True)
    actions = Action(Kind.F, 0, 0), Action(Kind.B, 0, 7), Action(Kind.B, 0, 0)
    switch = WeightSwitch(weights, {actions[0]: 0, actions[1]: 0, actions[2]: 0}, {actions[1]: {0}}, weights.advance)
    outputs = []

    def forward(instruction):
        outputs.append(layer(input).sum())

    def backward(instruction):
        if instruction.action == actions[2]:
            with pytest.raises(RuntimeError):
                outputs[0].backward(retain_graph=True)
            weights.forget_updates()
            outputs[0].backward()

    handlers = switch.extend(SimpleNamespace(handlers={Kind.F: forward, Kind.B: backward}))
    for action in actions:
        handlers[action.kind](Instruction(action, action[1:]))
        if action == actions[1]:
            with torch.no_grad():
                layer.weight.zero_()
    assert torch.equal(input.grad[0], used.sum(0))
    weights.show(weights.newest)
    assert not layer.weight.any()


def test_a_version_that_an_earlier_call_has_left_is_made_just_before_it_is_used():
    weights = WeightVersions(parameters())
    first, second = Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)
    made = []

    def catch_up():
        weights.advance([weights.newest])
        made.append(weights.newest)

    switch = WeightSwitch(weights, {first: 0, second: 1}, {}, weights.advance, catch_up)
    seen = []
    handlers = switch.extend(
        SimpleNamespace(handlers={Kind.F: lambda instruction: seen.append((instruction.action, [*made]))})
    )
    for action in (first, second, first, second):
        handlers[Kind.F](Instruction(action, action[1:]))
    assert seen == [(first, []), (second, [1]), (first, [1]), (second, [1])]


def test_older_versions_survive_a_checkpoint_and_a_failed_step_leaves_none():
    own = parameters()
    weights = WeightVersions(own)
    weights.advance({0})
    weights.renumber(-1)
    with torch.no_grad():
        own[0].fill_(3)
    older = {v: {dtype: buffer.clone() for dtype, buffer in b.items()} for v, b in weights.older().items()}
    other = parameters()
    restored = WeightVersions(other)
    restored.restore(older)
    restored.show(-1)
    assert torch.equal(other[0], parameters()[0])
    weights.show(-1)
    weights.keep_only_newest()
    assert torch.equal(own[0], torch.full((3, 5), 3.0))
    assert not weights.older() and weights.most_held == 2
