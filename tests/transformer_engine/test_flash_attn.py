"""The stand-in of flash attention is attention, with flash-attn's arguments."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional

# Not by a search path, which would make other packages believe that flash-attn is installed.
FILE = Path(__file__).with_name("flash") / "flash_attn" / "flash_attn_interface.py"
SPEC = importlib.util.spec_from_file_location("flash_attn_stand_in", FILE)
stand_in = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stand_in)
flash_attn_func, flash_attn_varlen_func = stand_in.flash_attn_func, stand_in.flash_attn_varlen_func


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("keys", [6, 9])
def test_values_and_gradients_are_those_of_pytorch(causal, groups, keys):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, s, h, 8, requires_grad=True) for s, h in ((6, 4), (keys, groups), (keys, groups)))
    gradient = torch.randn(2, 6, 4, 8)
    seen = torch.ones(6, keys, dtype=torch.bool).tril(keys - 6) if causal else None
    expected = functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    wanted = torch.autograd.grad(expected, (q, k, v), gradient)
    result = flash_attn_func(q, k, v, causal=causal)
    torch.testing.assert_close(result, expected)
    for one, other in zip(torch.autograd.grad(result, (q, k, v), gradient), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_documents_see_themselves_only():
    torch.manual_seed(1)
    q, k, v = (torch.randn(9, 4, 8, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 4, 9])
    result = flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True)
    gradients = torch.autograd.grad(result.sum(), (q, k, v))
    alone = [flash_attn_func(*(tensor[None, a:b] for tensor in (q, k, v)), causal=True)[0] for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(result, torch.cat(alone))
    for one, other in zip(gradients, torch.autograd.grad(torch.cat(alone).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(one, other)
