"""The recurrence of a gated delta net (arXiv 2412.06464), token by token.

A head with state ``S`` forgets by ``g``, and corrects what it has stored for a key by ``beta``:
``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T`` and ``o_t = S_t^T q_t / sqrt(channels)``.
"""

from __future__ import annotations

from functools import partial

import torch

from fla import by_sequence


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    """Return the outputs (batch, tokens, heads, channels of values) of queries, keys and values of as many heads."""
    assert initial_state is None and not (output_final_state or use_qk_l2norm_in_kernel)
    scan = partial(_scan, q.shape[-1] ** -0.5 if scale is None else scale)
    tensors = q, k, v, g, beta
    return (scan(*tensors) if cu_seqlens is None else by_sequence(scan, cu_seqlens, *tensors)), None


def _scan(scale, q, k, v, g, beta):
    kind = v.dtype
    q, k, v, g, beta = (tensor.float().unbind(1) for tensor in (q, k, v, g, beta))
    state = q[0].new_zeros(*k[0].shape, v[0].shape[-1])
    outputs = []
    for query, key, value, forget, learn in zip(q, k, v, g, beta, strict=True):
        state = state * forget.exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, key)
        state = state + torch.einsum("bhk,bhv->bhkv", key, learn[..., None] * (value - known))
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query) * scale)
    return torch.stack(outputs, 1).to(kind)
