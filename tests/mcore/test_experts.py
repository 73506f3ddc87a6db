"""What Megatron's dispatchers keep of a microbatch, flex dispatchers included."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher

from megatron_pipemem.mcore.model.stages import nothing_left_behind

MANAGERS = [token_dispatcher._DeepepManager, token_dispatcher._HybridEPManager, token_dispatcher._NCCLEPManager]
KEPT = ("token_probs", "dispatched_probs", "tokens_per_expert")


class Manager:
    """Keeps what a manager of a flex dispatcher keeps, whose kernels need a GPU."""

    def __init__(self):
        self.token_probs = self.dispatched_probs = self.tokens_per_expert = self.handle = None
        self.over_budget = torch.zeros(1, dtype=torch.bool)

    def dispatch(self, probs: torch.Tensor) -> None:
        self.token_probs, self.dispatched_probs = probs, probs * 2
        self.tokens_per_expert = torch.ones(4)
        self.over_budget |= True


@pytest.mark.parametrize("manager", MANAGERS)
def test_the_stand_in_keeps_what_the_real_ones_keep(manager):
    source = inspect.getsource(manager)
    assert all(f"self.{name}" in source for name in KEPT)
    assert "self._comm_manager" in inspect.getsource(token_dispatcher.MoEFlexTokenDispatcher)


def test_a_flex_dispatcher_keeps_nothing_of_a_microbatch():
    manager = Manager()
    layer = SimpleNamespace(token_dispatcher=SimpleNamespace(_comm_manager=manager, shared=torch.ones(1)))
    with nothing_left_behind([layer]):
        manager.dispatch(torch.ones(3, requires_grad=True))
        layer.token_dispatcher.routing_map = torch.ones(2)
    assert [getattr(manager, name) for name in KEPT] == [None] * 3
    assert layer.token_dispatcher.routing_map is None
    assert manager.over_budget.item() and layer.token_dispatcher.shared is not None, "they are not of a microbatch"
