"""The stand-ins for ``mamba_ssm`` and ``fla`` compute what the documentation of these packages says."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

_FOLDER = Path(__file__).parent


def load(name: str, folder: str = "mamba_ssm/ops/triton"):
    """Not by the package's name, which is the real one's where that is installed."""
    spec = importlib.util.spec_from_file_location(f"reference_{name}", _FOLDER / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.object(sys, "path", [str(_FOLDER), *sys.path]):
        spec.loader.exec_module(module)
    return module


# Where packed sequences begin, if there are any.
PACKED = pytest.mark.parametrize("begins", [None, (0, 1, 4)], ids=["whole", "packed"])


def ends_of(begins, tokens: int) -> torch.Tensor | None:
    return None if begins is None else torch.tensor([*begins, tokens])


@PACKED
def test_a_layer_is_a_convolution_and_a_recurrence(begins):
    tokens, heads, channels, groups, states, seen = 7, 4, 3, 2, 5, 4
    batch, starts = (2, (0,)) if begins is None else (1, begins)
    first_of = [max(start for start in starts if start <= t) for t in range(tokens)]
    width, convolved = heads * channels, heads * channels + 2 * groups * states
    torch.manual_seed(1)
    projection = torch.randn(batch, tokens, width + convolved + heads, dtype=torch.float64)
    weight, bias = torch.randn(convolved, seen, dtype=torch.float64), torch.randn(convolved, dtype=torch.float64)
    step_bias, decay, past = (torch.rand(heads) for _ in range(3))
    y = load("ssd_combined").mamba_split_conv1d_scan_combined(
        *(projection, weight, bias, step_bias, -decay, past, 128, "silu", channels, groups, False),
        seq_idx=None if begins is None else torch.tensor([first_of], dtype=torch.int32),
    )
    z, xbc, dt = projection.split([width, convolved, heads], dim=-1)
    silu = torch.nn.functional.silu
    for b in range(batch):
        for t in range(tokens):
            if t == first_of[t]:
                state = torch.zeros(heads, channels, states, dtype=torch.float64)
            window = torch.stack([xbc[b, s] if s >= first_of[t] else 0 * bias for s in range(t - seen + 1, t + 1)])
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


@PACKED
def test_a_gated_delta_net_is_megatrons(begins):
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
    tensors, ends = (q, k, v, g, beta), ends_of(begins, tokens)
    result, _ = load("gated_delta_rule", "fla/ops").chunk_gated_delta_rule(*tensors, cu_seqlens=ends)
    for begin, end in pairwise([0, tokens] if begins is None else [*begins, tokens]):
        wanted, _ = common.torch_chunk_gated_delta_rule(*(tensor[:, begin:end] for tensor in tensors))
        torch.testing.assert_close(result[:, begin:end], wanted, rtol=1e-4, atol=1e-5)


@PACKED
def test_a_convolution_and_a_norm_of_a_gated_delta_net(begins):
    x, weight = torch.randn(2, 7, 3), torch.randn(3, 4)
    convolve = load("convolution", "fla/modules").causal_conv1d
    result, _ = convolve(x, weight, activation="silu", cu_seqlens=ends_of(begins, 7))
    for first in (0,) if begins is None else begins:
        torch.testing.assert_close(result[:, first], torch.nn.functional.silu(x[:, first] * weight[:, -1]))
    seen = x[:, 3:] if begins is None else torch.nn.functional.pad(x[:, 4:], (0, 0, 1, 0))
    torch.testing.assert_close(result[:, -1], torch.nn.functional.silu((seen * weight.t()).sum(1)))
    normed = load("l2norm", "fla/modules").l2norm(x)
    torch.testing.assert_close(normed.norm(dim=-1), torch.ones(2, 7))
