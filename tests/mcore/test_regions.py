"""What of Megatron's modules runs in regions, and that nothing stays behind. Real layers: tests/end_to_end/test_offload.py."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP

from megatron_pipemem.mcore.model.stages import regions_of


def test_modules_are_as_before_even_after_a_failure():
    layer, mlp = torch.nn.Module(), MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    mlp.linear_fc1, mlp.linear_fc2 = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4)
    layer.input_layernorm, layer.pre_mlp_layernorm, layer.mlp = torch.nn.LayerNorm(4), IdentityOp(), mlp
    layer.norm, layer.final_norm = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)  # names of a hybrid model's
    with pytest.raises(ZeroDivisionError), regions_of(layer):
        replaced = {name for name, module in layer.named_modules() if "forward" in module.__dict__}
        assert replaced == {"input_layernorm", "norm", "final_norm", "mlp"}
        raise ZeroDivisionError
    assert not any("forward" in module.__dict__ for module in layer.modules())
    assert "linear_fc1" not in mlp.__dict__ and list(mlp._modules) == ["linear_fc1", "linear_fc2"]
