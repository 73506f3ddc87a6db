"""Forward and backward of flash attention with the arguments, shapes and results of flash-attn 2.8.

Sums are made in fp32. A causal mask is aligned to the last query and the last key. There is no dropout, softcap or ALiBi.
"""

from __future__ import annotations

import torch

Window = tuple[int, int]


def _scores(q, k, scale: float, causal: bool, left: int, right: int) -> torch.Tensor:
    """Return ``[b, h, sq, sk]`` in fp32, minus infinity where a query does not see a key."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    behind = (
        torch.arange(q.size(1))[:, None] + k.size(1) - q.size(1) - torch.arange(k.size(1))[None]
    )  # key before query
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if causal:
        right = 0
    if right >= 0:
        hidden |= -behind > right
    if left >= 0:
        hidden |= behind > left
    return scores.masked_fill(hidden, -torch.inf)


def _repeated(q, k) -> torch.Tensor:
    return k.repeat_interleave(q.size(2) // k.size(2), dim=2)


def _check(dropout_p, softcap, alibi_slopes) -> None:
    if dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError("no dropout, softcap or ALiBi in the stand-in of flash attention")


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
):  # fmt: skip
    """Return the output ``[b, sq, h, d]`` and the logarithms of the sums ``[b, h, sq]``. ``k`` is ``[b, sk, groups, d]``."""
    _check(dropout_p, softcap, alibi_slopes)
    scores = _scores(q, _repeated(q, k), softmax_scale, causal, window_size_left, window_size_right)
    sums = scores.logsumexp(-1)
    shares = torch.exp(scores - sums[..., None]).nan_to_num(0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", shares, _repeated(q, v).float()).to(q.dtype).contiguous()
    return out, sums, None, torch.zeros(2, dtype=torch.int64)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """Write the gradients to ``dq``, ``dk`` and ``dv``. The shares of the keys are made again from ``softmax_lse``."""
    _check(dropout_p, softcap, alibi_slopes)
    keys, values = (_repeated(q, tensor).float() for tensor in (k, v))
    scores = _scores(q, keys, softmax_scale, causal, window_size_left, window_size_right)
    shares = torch.exp(scores - softmax_lse[..., None]).nan_to_num(0.0)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    change = shares * (torch.einsum("bqhd,bkhd->bhqk", dout.float(), values) - delta[..., None]) * softmax_scale
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", change, keys))
    for target, gradient in (
        (dk, torch.einsum("bhqk,bqhd->bkhd", change, q.float())),
        (dv, torch.einsum("bhqk,bqhd->bkhd", shares, dout.float())),
    ):
        target.copy_(gradient.unflatten(2, (target.size(2), -1)).sum(3))
    return delta


def _documents(cu_seqlens_q, cu_seqlens_k):
    """Yield the slices of queries and keys of every document."""
    for (q0, q1), (k0, k1) in zip(
        cu_seqlens_q.unfold(0, 2, 1).tolist(), cu_seqlens_k.unfold(0, 2, 1).tolist(), strict=True
    ):
        yield slice(q0, q1), slice(k0, k1)


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    """Run every document alone. ``q`` is ``[t, h, d]``, the logarithms of sums are ``[h, t]``."""
    out, sums = q.new_zeros(q.shape), torch.zeros(q.size(1), q.size(0))
    for mine, theirs in _documents(cu_seqlens_q, cu_seqlens_k):
        output, lse, *_ = _flash_attn_forward(
            q[None, mine], k[None, theirs], v[None, theirs], dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, return_softmax,
        )  # fmt: skip
        out[mine], sums[:, mine] = output[0], lse[0]
    return out, sums, None, torch.zeros(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    for mine, theirs in _documents(cu_seqlens_q, cu_seqlens_k):
        _flash_attn_backward(
            dout[None, mine], q[None, mine], k[None, theirs], v[None, theirs], out[None, mine], softmax_lse[None, :, mine],
            dq[None, mine], dk[None, theirs], dv[None, theirs], dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, deterministic,
        )  # fmt: skip


class _Attention(torch.autograd.Function):
    """Attention of whole sequences, or of the documents between ``lengths``."""

    @staticmethod
    def forward(ctx, q, k, v, lengths, scale, causal, window: Window):
        call = _flash_attn_varlen_forward if lengths else _flash_attn_forward
        out, sums, *_ = call(q, k, v, *lengths, 0.0, scale, causal, *window, 0.0, None, False)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.how = lengths, scale, causal, window
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, sums = ctx.saved_tensors
        lengths, scale, causal, window = ctx.how
        gradients = [torch.zeros_like(tensor) for tensor in (q, k, v)]
        call = _flash_attn_varlen_backward if lengths else _flash_attn_backward
        call(dout, q, k, v, out, sums, *gradients, *lengths, 0.0, scale, causal, *window, 0.0, None, False)
        return *gradients, None, None, None, None


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Return attention of ``q`` to ``k`` and ``v``, ``[b, s, h, d]``, with its backward."""
    _check(dropout_p, softcap, alibi_slopes)
    return _Attention.apply(q, k, v, (), softmax_scale or q.size(-1) ** -0.5, causal, tuple(window_size))


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """Return attention within every document, for ``q`` ``[t, h, d]``, with its backward."""
    _check(dropout_p, softcap, alibi_slopes)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _Attention.apply(q, k, v, lengths, softmax_scale or q.size(-1) ** -0.5, causal, tuple(window_size))
