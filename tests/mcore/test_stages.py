"""What runs in regions of Megatron's modules, and what a microbatch leaves in its dispatchers. Real layers: end_to_end."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import token_dispatcher
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.model import stages
from megatron_pipemem.mcore.model.stages import nothing_left_behind, regions_of
from megatron_pipemem.runtime.selective import Recorder

TOKENS, HIDDEN, INNER = 5, 4, 16


class Linear(torch.nn.Linear):
    """Output and bias apart, as Megatron's layers return them with ``skip_bias_add``."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight), self.bias


def mlp(biases: bool) -> MLP:
    """Megatron's own forward between two plain layers."""
    torch.manual_seed(1)
    module = MLP.__new__(MLP)
    torch.nn.Module.__init__(module)
    module.config = SimpleNamespace(
        use_te_activation_func=False, bias_activation_fusion=False, gated_linear_unit=False, add_bias_linear=biases
    )
    module.activation_func = torch.nn.functional.gelu
    module.linear_fc1, module.linear_fc2 = Linear(HIDDEN, INNER, biases), Linear(INNER, HIDDEN, biases)
    return module


class Layer(torch.nn.Module):
    def __init__(self, biases: bool):
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm, self.mlp = torch.nn.LayerNorm(HIDDEN), IdentityOp(), mlp(biases)
        # Names of a hybrid model's.
        self.norm, self.final_norm = torch.nn.LayerNorm(HIDDEN), torch.nn.LayerNorm(HIDDEN)

    def forward(self, x, scale):
        x = self.norm(self.input_layernorm(x * 1))
        output, bias = self.mlp(self.pre_mlp_layernorm(x), scale)
        return self.final_norm(output if bias is None else output + bias)


def train(biases: bool, scaled: bool, selective: bool):
    """Gradients of all parameters and of the scale, and the elements that autograd keeps of one pass."""
    layer, kept = Layer(biases), {}
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2), requires_grad=True)
    scale = torch.linspace(1, 2, TOKENS, requires_grad=True) if scaled else None
    recorder = Recorder(lambda tensor: None)

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor.detach()

    watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with watched, recorder.record() if selective else nullcontext(), regions_of(layer):
        output = layer(x, scale)
    recorder.run_again()
    output.square().sum().backward()
    return [parameter.grad for parameter in (*layer.parameters(), *([scale] if scaled else []))], sum(kept.values())


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_the_same_and_less_is_kept(biases, scaled):
    """With a bias and a scale, as some experts have them, what is between the two layers of the MLP stays."""
    gradients, kept = train(biases, scaled, True)
    plain, all_kept = train(biases, scaled, False)
    assert all(map(torch.equal, gradients, plain))
    between = 0 if biases and scaled else TOKENS * INNER
    assert kept <= all_kept - between - TOKENS * HIDDEN


def test_modules_are_as_before_even_after_a_failure():
    layer = Layer(biases=False)
    with pytest.raises(ZeroDivisionError), regions_of(layer):
        assert {name for name, module in layer.named_modules() if "forward" in module.__dict__} == {
            "input_layernorm",
            "norm",
            "final_norm",
            "mlp",
        }
        raise ZeroDivisionError
    assert not any("forward" in module.__dict__ for module in layer.modules())
    assert "linear_fc1" not in layer.mlp.__dict__ and list(layer.mlp._modules) == ["linear_fc1", "linear_fc2"]


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


def test_data_that_end_within_a_step_are_refused(monkeypatch):
    monkeypatch.setattr(stages.schedules, "forward_step", lambda forward_step, data, *arguments, **settings: next(data))
    step = SimpleNamespace(num_microbatches=4, config=None, cp_group_size=1, collect_non_loss_data=False)
    stage = SimpleNamespace(step=step, model=None, _is_first=None, _virtual_stage=None)
    stage._forward_step = stage._computes_loss = lambda microbatch: None
    data = iter(["batch"])
    assert stages.ChunkStage._megatrons_forward(stage, 0, 0, None, data, []) == "batch"
    with refused("data-iterator", 4, kind=UnsupportedError) as refusal:
        stages.ChunkStage._megatrons_forward(stage, 1, 1, None, data, [])
    assert isinstance(refusal.value.__cause__, StopIteration)
