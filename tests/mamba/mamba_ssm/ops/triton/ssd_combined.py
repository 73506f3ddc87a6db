"""The scan of a Mamba-2 layer in its quadratic form (arXiv 2405.21060): ``y = (C B^T * decay * dt) x + D x``.

Of a head with state ``S`` that is ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T`` and ``y_t = S_t C_t + D x_t``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, seq_idx=None, dt_softplus=False
):
    """Scan ``x`` (batch, tokens, heads, channels).

    Args:
        x: as above.
        dt: (batch, tokens, heads), the step of every head.
        A: (heads), negative.
        B: (batch, tokens, groups, states), into the state.
        C: likewise, out of it.
        chunk_size: the kernel's; all tokens are one chunk here.
        D: (heads) or (heads, channels), what passes by the state.
        z: as ``x``: the gate.
        dt_bias: (heads).
        seq_idx: of packed sequences; ``mamba_split_conv1d_scan_combined`` takes them apart.
        dt_softplus: whether steps are made positive.
    """
    assert seq_idx is None
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    heads, tokens = x.shape[2], x.shape[1]
    B, C = (tensor.repeat_interleave(heads // tensor.shape[2], dim=2).float() for tensor in (B, C))
    passed = (dt * A).cumsum(1)
    decay = (passed[:, :, None] - passed[:, None]).permute(0, 3, 1, 2)
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    weights = torch.einsum("blhn,bshn->bhls", C, B) * decay.masked_fill(future, float("-inf")).exp()
    y = torch.einsum("bhls,bshp->blhp", weights * dt.permute(0, 2, 1)[:, :, None], x.float())
    if D is not None:
        y = y + x.float() * (D[:, None] if D.dim() == 1 else D)
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    activation,
    headdim,
    ngroups,
    norm_before_gate,
    seq_idx=None,
):
    """Convolve, scan and gate a layer's projection (batch, tokens, 2 width + 2 groups states + heads).

    Args:
        zxbcdt: the projection: gate, input, into and out of the state, steps.
        conv1d_weight: (channels, tokens that it sees), causal.
        conv1d_bias: (channels).
        dt_bias, A, D, chunk_size: as of ``mamba_chunk_scan_combined``.
        activation: behind the convolution.
        headdim: channels per head.
        ngroups: of heads.
        norm_before_gate: there is no norm here.
        seq_idx: (1, tokens), the number of the packed sequence of every token. Sequences see nothing of each other.
    """
    assert activation == "silu" and not norm_before_gate
    if seq_idx is not None:
        assert seq_idx.shape == zxbcdt.shape[:2] and len(seq_idx) == 1
        _, lengths = seq_idx[0].unique_consecutive(return_counts=True)
        layer = conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, activation, headdim, ngroups, norm_before_gate
        sequences = zxbcdt.split(lengths.tolist(), 1)
        return torch.cat([mamba_split_conv1d_scan_combined(own, *layer) for own in sequences], 1)
    heads, tokens = A.numel(), zxbcdt.shape[1]
    width = heads * headdim
    states = (zxbcdt.shape[-1] - 2 * width - heads) // 2
    z, xbc, dt = zxbcdt.split([width, width + 2 * states, heads], dim=-1)
    weight = conv1d_weight[:, None]
    convolved = F.conv1d(xbc.transpose(1, 2), weight, conv1d_bias, padding=weight.shape[-1] - 1, groups=weight.shape[0])
    x, B, C = F.silu(convolved[..., :tokens]).transpose(1, 2).split([width, states, states], dim=-1)
    x, z = (tensor.unflatten(-1, (heads, headdim)) for tensor in (x, z))
    B, C = (tensor.unflatten(-1, (ngroups, -1)) for tensor in (B, C))
    y = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=True)
    return y.flatten(-2)
