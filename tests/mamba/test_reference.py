"""The stand-ins for ``mamba_ssm`` and ``fla`` compute what the documentation of these packages says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_FOLDER = Path(__file__).parent


def load(name: str, folder: str = "mamba_ssm/ops/triton"):
    """Not by the package's name, which is the real one's where that is installed."""
    spec = importlib.util.spec_from_file_location(f"reference_{name}", _FOLDER / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_layer_is_a_convolution_and_a_recurrence():
    batch, tokens, heads, channels, groups, states, seen = 2, 7, 4, 3, 2, 5, 4
    width, convolved = heads * channels, heads * channels + 2 * groups * states
    torch.manual_seed(1)
    projection = torch.randn(batch, tokens, width + convolved + heads, dtype=torch.float64)
    weight, bias = torch.randn(convolved, seen, dtype=torch.float64), torch.randn(convolved, dtype=torch.float64)
    step_bias, decay, past = (torch.rand(heads) for _ in range(3))
    y = load("ssd_combined").mamba_split_conv1d_scan_combined(
        projection, weight, bias, step_bias, -decay, past, 128, "silu", channels, groups, False
    )
    z, xbc, dt = projection.split([width, convolved, heads], dim=-1)
    silu = torch.nn.functional.silu
    for b in range(batch):
        state = torch.zeros(heads, channels, states, dtype=torch.float64)
        for t in range(tokens):
            window = torch.stack([xbc[b, t - seen + 1 + i] if t - seen + 1 + i >= 0 else 0 * bias for i in range(seen)])
            mixed = silu((window.t() * weight).sum(1) + bias)
            x, into, out = mixed.split([width, groups * states, groups * states])
            x = x.view(heads, channels)
            into, out = (tensor.view(groups, states).repeat_interleave(heads // groups, 0) for tensor in (into, out))
            step = torch.nn.functional.softplus(dt[b, t] + step_bias)
            state = torch.exp(-step * decay)[:, None, None] * state + step[:, None, None] * x[..., None] * into[:, None]
            wanted = (state * out[:, None]).sum(-1) + past[:, None] * x
            torch.testing.assert_close(y[b, t], wanted.flatten() * silu(z[b, t]), rtol=1e-4, atol=1e-5)


def test_the_norm_gates_before_or_behind():
    RMSNorm = load("layernorm_gated").RMSNorm
    torch.manual_seed(2)
    x, z = torch.randn(3, 8), torch.randn(3, 8)
    silu = torch.nn.functional.silu(z)

    def norm(values):
        return torch.cat(
            [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in values.split(4, -1)], -1
        )

    before, behind = (RMSNorm(8, group_size=4, norm_before_gate=first)(x, z) for first in (True, False))
    torch.testing.assert_close(before, norm(x) * silu)
    torch.testing.assert_close(behind, norm(x * silu))


def test_a_gated_delta_net_is_megatrons():
    """As Megatron computes it, in parts of 64 tokens, for its deterministic mode."""
    common = pytest.importorskip("megatron.core.ssm.gated_delta_net.common")
    batch, tokens, heads, keys, values = 2, 70, 3, 4, 5
    torch.manual_seed(3)
    q, k = (torch.nn.functional.normalize(torch.randn(batch, tokens, heads, keys), dim=-1) for _ in range(2))
    v, g, beta = (
        torch.randn(batch, tokens, heads, values),
        -torch.rand(batch, tokens, heads),
        torch.rand(batch, tokens, heads),
    )
    result, _ = load("gated_delta_rule", "fla/ops").chunk_gated_delta_rule(q, k, v, g, beta)
    wanted, _ = common.torch_chunk_gated_delta_rule(q, k, v, g, beta)
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


def test_a_convolution_and_a_norm_of_a_gated_delta_net():
    x, weight = torch.randn(2, 7, 3), torch.randn(3, 4)
    result, _ = load("convolution", "fla/modules").causal_conv1d(x, weight, activation="silu")
    torch.testing.assert_close(result[:, -1], torch.nn.functional.silu((x[:, 3:] * weight.t()).sum(1)))
    normed = load("l2norm", "fla/modules").l2norm(x)
    torch.testing.assert_close(normed.norm(dim=-1), torch.ones(2, 7))
