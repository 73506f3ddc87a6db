"""Compute with PyTorch what Transformer Engine's layers and optimizers call in their compiled extension.

Arguments and results are those of the extension. Sums are made in fp32, as on GPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_pipemem.tools.cpu.upstream import shares
from te_stand_in import user_buffers
from te_stand_in.formats import TORCH
from te_stand_in.fp8 import quantize, values


def generic_gemm(
    A, transa, B, transb, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False, **_,
):  # fmt: skip
    """Compute cuBLAS's ``op(A) @ op(B)`` in column-major order, which is ``op(B) @ op(A)`` here.

    Args:
        A, B: (..., rows, columns), flattened to matrices. The layouts are TN (forward), NN (input gradient) and NT (weight
            gradient).
        out: written to, or added to with ``accumulate``; ``None`` makes a new tensor.
        bias: added, or with ``grad`` a sign that its gradient is wanted.
        comm_overlap: the communicator of a collective that overlaps the product (``user_buffers.overlapped``).

    Returns:
        The product, the bias's gradient or ``None``, ``None``, and the result of a reduce-scatter if there is one.
    """
    if comm_overlap is not None:
        product, *others, _ = user_buffers.overlapped(
            lambda: generic_gemm(
                A, transa, B, transb, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace,
                workspace_size, accumulate, use_split_accumulator,
            ),
            comm_overlap, comm_type, extra_output, bulk_overlap,
        )  # fmt: skip
        return product, *others, extra_output
    if gelu or quantizer is not None:
        raise NotImplementedError("no GELU and no quantized output within a GEMM on CPU ranks")
    A, B = values(A, columnwise=not transa), values(B, columnwise=transb)
    if transa:
        shape = (*B.shape[:-1], A.shape[0])
    elif not transb:
        shape = (*B.shape[:-1], A.shape[-1])
    else:
        shape = (B.shape[-1], A.shape[-1])
    target = out.dtype if out is not None else TORCH.get(out_dtype, A.dtype)
    a, b = _matrix(A, target), _matrix(B, target)
    product = (b.t() if transb else b) @ (a.t() if transa else a)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = _matrix(B, torch.float32).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    product = product.to(target).reshape(shape)
    if out is not None:
        out = out.add_(product.view_as(out)) if accumulate else out.copy_(product.view_as(out))
    return product if out is None else out, bias_gradient, None, None


def te_general_grouped_gemm(
    A, transa, B, transb, out, out_dtype, m_splits, bias, bias_dtype, single_output, gelu, grad, workspaces,
    workspace_size, accumulate, use_split_accumulator, sm_count,
):  # fmt: skip
    """Run one ``generic_gemm`` per group; with ``single_output`` the groups are the rows of one tensor.

    Returns:
        With ``grad``, the gradients of the biases, written to where they are wanted.
    """
    outs = torch.split(out[0], list(m_splits)) if single_output else out
    for group, (a, b, into) in enumerate(zip(A, B, outs, strict=True)):
        wanted = bias[group] if bias[group].numel() else None
        a, b = values(a, columnwise=not transa), values(b, columnwise=transb)
        if not b.numel():
            if not accumulate:
                into.zero_()
            if grad and wanted is not None:
                wanted.zero_()
            continue
        _, bias_gradient, *_ = generic_gemm(
            a, transa, b, transb, into, None, None, wanted, bias_dtype, False, None, grad, None, 0, accumulate, False
        )
        if bias_gradient is not None and wanted is not None:
            wanted.copy_(bias_gradient)
    return bias


def _matrix(tensor: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Return a matrix as wide as the result: the product of 16-bit numbers is not rounded before it is added to an fp32
    gradient.
    """
    matrix = tensor.reshape(-1, tensor.shape[-1])
    return matrix.to(target) if target == torch.float32 else matrix


def layernorm_fwd(input, weight, bias, eps, out, quantizer, out_dtype, sm_margin, zero_centered_gamma):
    """Return output, mean and reciprocal of the standard deviation, of rows."""
    rows = _matrix(input, torch.float32)
    mean = rows.mean(1)
    scale = (rows.var(1, unbiased=False) + eps).rsqrt()
    normal = (rows - mean[:, None]) * scale[:, None]
    return _written(normal * _gamma(weight, zero_centered_gamma) + bias.float(), input, out, quantizer), mean, scale


def layernorm_bwd(gradient, input, mean, scale, weight, sm_margin, zero_centered_gamma):
    """Return gradients of input, weight and bias."""
    wide, rows = _matrix(gradient, torch.float32), _matrix(input, torch.float32)
    normal = (rows - mean[:, None]) * scale[:, None]
    inner = wide * _gamma(weight, zero_centered_gamma)
    at_input = inner - inner.mean(1, keepdim=True) - normal * (inner * normal).mean(1, keepdim=True)
    at_input = (at_input * scale[:, None]).to(input.dtype).view_as(input)
    return at_input, (wide * normal).sum(0).to(weight.dtype), wide.sum(0).to(weight.dtype)


def rmsnorm_fwd(input, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered_gamma):
    """Return output, ``None``, and reciprocal of the root mean square, of rows."""
    rows = _matrix(input, torch.float32)
    scale = (rows.square().mean(1) + eps).rsqrt()
    return _written(rows * scale[:, None] * _gamma(weight, zero_centered_gamma), input, out, quantizer), None, scale


def rmsnorm_bwd(gradient, input, scale, weight, sm_margin, zero_centered_gamma):
    """Return gradients of input and weight."""
    wide, rows = _matrix(gradient, torch.float32), _matrix(input, torch.float32)
    normal = rows * scale[:, None]
    inner = wide * _gamma(weight, zero_centered_gamma)
    at_input = (inner - normal * (inner * normal).mean(1, keepdim=True)) * scale[:, None]
    return at_input.to(input.dtype).view_as(input), (wide * normal).sum(0).to(weight.dtype)


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _written(rows: torch.Tensor, like: torch.Tensor, out: Any, quantizer: Any) -> Any:
    output = rows.to(like.dtype).view_as(like)
    if quantizer is not None:
        return quantizer(output) if out is None else quantize(output, quantizer, out)
    return output if out is None else out.copy_(output)


def fused_rope_forward(t, freqs, starts, layout, interleaved, *_):
    """Rotate ``t``, ``[s, b, h, d]``, by the angles ``freqs``, ``[s, 1, 1, d]``, of which token i gets the i-th."""
    if interleaved or starts is not None:
        raise NotImplementedError("no interleaved rotary embeddings and no starts on CPU ranks")
    turned, angles = t[..., : freqs.size(-1)].float(), freqs[: t.size(0)]
    one, two = turned.chunk(2, -1)
    turned = turned * angles.cos() + torch.cat((-two, one), -1) * angles.sin()
    return torch.cat((turned.to(t.dtype), t[..., freqs.size(-1) :]), -1)


def fused_rope_backward(gradient, freqs, *how):
    """Return the gradient of ``t``, which turns back."""
    return fused_rope_forward(gradient, -freqs, *how)


def convert_thd_to_bshd(tensor, cu_seqlens, batch_size, max_seqlen):
    """Return sequences, one after the other in ``[t, h, d]``, as ``[b, s, h, d]``, with zeros behind the shorter ones."""
    pieces = tensor.tensor_split(cu_seqlens[1:-1].long())
    padded = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
    return torch.nn.functional.pad(padded, (0, 0, 0, 0, 0, max_seqlen - padded.size(1)))


def convert_bshd_to_thd(tensor, cu_seqlens, num_tokens):
    """Return sequences ``[b, s, h, d]`` one after the other, ``[t, h, d]``, without what pads them."""
    return torch.cat([row[:length] for row, length in zip(tensor, cu_seqlens.diff().tolist(), strict=True)])


def multi_tensor_scale(chunk_size, overflow, tensor_lists, scale):
    """``tensor_lists[1] = tensor_lists[0] * scale``; infinities set ``overflow``."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
        if not bool(source.isfinite().all()):
            overflow.fill_(1)


multi_tensor_scale_tensor = multi_tensor_scale  # with a tensor for the scale


def multi_tensor_l2norm(chunk_size, overflow, tensor_lists, per_tensor=False):
    """Return the norm of everything, and of every tensor."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


def multi_tensor_adam(
    chunk_size, overflow, tensor_lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
):
    """Take one step of Adam (``mode`` 0) or AdamW (1).

    Args:
        tensor_lists: gradients, parameters, first and second moments, and fp32 copies of the parameters if there are any.
    """
    correction1, correction2 = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
    for gradient, parameter, first, second, *master in zip(*tensor_lists, strict=True):
        weight = master[0] if master else parameter.float()
        wide = gradient.float()
        if mode == 0:
            wide = wide + weight_decay * weight
        first.copy_(beta1 * first + (1 - beta1) * wide)
        second.copy_(beta2 * second + (1 - beta2) * wide * wide)
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * weight
        weight = weight - lr * update
        for target in (parameter, *master):
            target.copy_(weight)


# Packed documents (``thd``) that context-parallel ranks share. ``cu_seqlens`` is where documents begin and end: in the whole
# sequence for the first three functions, on one rank for the others.


def thd_get_partitioned_indices(cu_seqlens, total_tokens, world_size, rank):
    """Return the positions of a rank's tokens."""
    return _held(cu_seqlens, world_size)[rank]


def thd_cp_rank_order_to_sequence_order(x, cu_seqlens, cp_size, total_tokens):
    """Return the tokens of all ranks, given rank after rank, in the order of the sequence."""
    return x[torch.cat(_held(cu_seqlens, cp_size)).argsort()]


def thd_sequence_order_to_cp_rank_order(x, cu_seqlens, cp_size, total_tokens):
    """Return the tokens of a sequence rank after rank."""
    return x[torch.cat(_held(cu_seqlens, cp_size))]


def _held(cu_seqlens: torch.Tensor, size: int) -> list[torch.Tensor]:
    return shares(cu_seqlens.tolist(), size)


def _half(cu_seqlens: torch.Tensor, second: int) -> torch.Tensor:
    """Return the positions of the first or second halves of all documents."""
    bounds = zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    halves = [(first, (first + last) // 2, last)[second : second + 2] for first, last in bounds]
    return torch.cat([torch.arange(*half) for half in halves])


def thd_read_half_tensor(tensor, cu_seqlens, half_idx):
    """Return one half of every document, of a tensor ``[t, ...]``."""
    return tensor[_half(cu_seqlens, half_idx)]


def thd_read_second_half_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen):
    """Return the second half of every document, of logarithms of sums ``[h, t]``."""
    assert lse_packed, "flash attention packs them"
    return lse[:, _half(cu_seqlens, 1)]


def thd_second_half_lse_correction(lse, lse_per_step, cu_seqlens, lse_packed):
    """Add the sums of a step to those of the second halves; both are logarithms ``[h, t]``."""
    assert lse_packed, "flash attention packs them"
    second = _half(cu_seqlens, 1)
    lse[:, second] = torch.logaddexp(lse[:, second], lse_per_step.to(lse.dtype))


def thd_out_correction(out, out_per_step, old_lse, lse, lse_per_step, cu_seqlens, only_second_half, lse_packed):
    """Weigh the output so far and that of a step by their shares of all sums, and add them in ``out``."""
    assert lse_packed, "flash attention packs them"
    place = _half(cu_seqlens, 1) if only_second_half else slice(None)
    old, step = (torch.exp(tensor - lse[:, place]).t()[..., None] for tensor in (old_lse[:, place], lse_per_step))
    out[place] = (out[place] * old + out_per_step * step).to(out.dtype)


def thd_grad_correction(grad, grad_per_step, cu_seqlens, first_half, second_half):
    """Copy, add, zero or leave (``none``) a gradient in both halves of every document.

    Where a half is left or set to zero, the step has gradients of the other half only.
    """
    has_one = {"none", "zero"} & {first_half, second_half}
    for number, change in enumerate((first_half, second_half)):
        place = _half(cu_seqlens, number)
        if change == "zero":
            grad[place] = 0
        elif change != "none":
            step = grad_per_step if has_one else grad_per_step[place]
            grad[place] = step if change == "copy" else grad[place] + step
