"""Quantise to 8 bits and multiply such matrices as Transformer Engine's compiled extension does, in PyTorch.

Current scaling has one scale per tensor, MXFP8 one for every 32 values of a row or of a column. The devices are as Hopper: its
products need a second copy of a tensor with one scale, which is transposed. A product is that of the values which the bytes
stand for, and is summed in fp32. Tensors, quantizers and the decisions when to quantise are Transformer Engine's own.
"""

from __future__ import annotations

from typing import Any

import torch

from te_stand_in import fp4
from te_stand_in.formats import TORCH, DType

_FP8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
_LARGEST = {dtype: torch.finfo(form).max for dtype, form in _FP8.items()}
_BLOCK = 32
_BIAS = 127
"""MXFP8 keeps the exponents of scales as bytes with this bias."""


def quantize(tensor, quantizer, output=None, noop=None):
    """Write a tensor's bytes and scales to ``output``, or to a new tensor in the quantizer's formats.

    As the extension does, an output gets the copies that its quantizer uses, and loses the others.
    """
    if noop is not None:
        raise NotImplementedError("no update that a flag on the device may skip on CPU ranks")
    with torch.no_grad():
        if output is None:
            output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, tensor.device, False)
        if not hasattr(quantizer, "scale"):  # of a weight's shard, which has bytes by rows alone
            used = quantizer.inner_tensor_specs(tuple(tensor.shape))
            for name, _ in type(output)._INNER_TENSORS:
                if name not in used:
                    setattr(output, name, None)
                elif getattr(output, name) is None:
                    shape, dtype = used[name]
                    setattr(output, name, torch.empty(shape, dtype=dtype))
        kind = type(quantizer).__name__
        if kind not in _WRITERS:
            raise NotImplementedError(f"no {kind} on CPU ranks")
        _WRITERS[kind](tensor.detach(), quantizer, output)
    return output


def split_quantize(tensor, split_sizes, quantizers, disable_bulk_allocation=False):
    """Quantise parts of a tensor's rows, each with its own quantizer."""
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(split_sizes), quantizers, strict=True)]


def fused_multi_row_padding(input, output, rows, padded_rows):
    """Copy parts of rows to longer parts of the output, whose further rows are 0."""
    for part, padded in zip(input.split(rows), output.split(padded_rows), strict=True):
        padded[: len(part)] = part
        padded[len(part) :] = 0


def fused_multi_row_unpadding(input, output, padded_rows, rows):
    """Copy the first rows of parts of the input to shorter parts of the output."""
    for padded, part in zip(input.split(padded_rows), output.split(rows), strict=True):
        part.copy_(padded[: len(part)])


def create_empty_quantized_tensor(quantizer, shape, dtype, device, pin_memory):
    pieces = quantizer.alloc_tensors(shape, device=device)
    if type(quantizer).__name__ == "NVFP4Quantizer":
        pieces |= fp4.columns(quantizer, shape)
    form = quantizer.create_metadata(shape, dtype=dtype)
    return form["cls"].__tensor_unflatten__(pieces, form, shape, None)


def _write(tensor: torch.Tensor, quantizer: Any, output: Any) -> None:
    """Write bytes with one scale: that of the quantizer, or that of the largest value on all ranks of the reduction group."""
    if hasattr(quantizer, "scale"):
        scale = quantizer.scale
    else:
        largest = tensor.abs().float().flatten().amax(0, keepdim=True) if tensor.numel() else torch.zeros(1)
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(
                largest, op=torch.distributed.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group()
            )
        scale = _scale(largest, _LARGEST[quantizer.dtype], quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    output._scale_inv.copy_(1 / scale)
    data = _bytes(tensor.float() * scale, quantizer.dtype)
    if output._data is not None:
        output._data.copy_(data)
    if output._transpose is not None:
        output._transpose.copy_(data.movedim(-1, 0))
    output._transpose_invalid = output._transpose is None


def _scale(largest: torch.Tensor, limit: float, is_power_of_2: bool, smallest: float) -> torch.Tensor:
    scale = limit / largest.clamp(min=smallest)
    scale = torch.where(scale.isfinite() & (largest > 0), scale, 1.0)
    return torch.exp2(scale.log2().floor()) if is_power_of_2 else scale


def compute_amax(tensor, amax):
    """Write the largest absolute value of a tensor."""
    amax.copy_(tensor.abs().max().float())


def multi_tensor_compute_scale_and_scale_inv(chunk_size, overflow, tensor_lists, limit, is_power_of_2, smallest):
    """Write scales, and their reciprocals, for the largest values of tensors."""
    for largest, scale, inverse in zip(*tensor_lists, strict=True):
        scale.copy_(_scale(largest, limit, is_power_of_2, smallest))
        inverse.copy_(1 / scale)


def _bytes(values: torch.Tensor, dtype: Any) -> torch.Tensor:
    limit = _LARGEST[dtype]
    return values.clamp(-limit, limit).to(_FP8[dtype]).view(torch.uint8)


def _write_blocks(tensor: torch.Tensor, quantizer: Any, output: Any) -> None:
    rows = tensor.float().reshape(-1, tensor.shape[-1])
    if output._rowwise_data is not None:
        _write_rows(rows, quantizer.dtype, output._rowwise_data.view(rows.shape), output._rowwise_scale_inv)
    if output._columnwise_data is not None:
        data = output._columnwise_data.view(rows.shape)
        _write_rows(rows.t(), quantizer.dtype, data.t(), output._columnwise_scale_inv.t())


_WRITERS = {
    "Float8Quantizer": _write,
    "Float8CurrentScalingQuantizer": _write,
    "MXFP8Quantizer": _write_blocks,
    "NVFP4Quantizer": fp4.write,
}


def _write_rows(rows: torch.Tensor, dtype: Any, data: torch.Tensor, scales: torch.Tensor) -> None:
    blocks = rows.unflatten(1, (-1, _BLOCK))
    exponents = (blocks.abs().amax(2) / _LARGEST[dtype]).log2().ceil().clamp(-_BIAS, _BIAS)
    data.copy_(_bytes((blocks * torch.exp2(-exponents)[..., None]).flatten(1), dtype))
    scales[: exponents.shape[0], : exponents.shape[1]] = (exponents + _BIAS).to(torch.uint8)


def _read_rows(data: torch.Tensor, scales: torch.Tensor, dtype: Any) -> torch.Tensor:
    blocks = data.contiguous().view(_FP8[dtype]).float().unflatten(1, (-1, _BLOCK))
    exponents = scales[: blocks.shape[0], : blocks.shape[1]].float() - _BIAS
    return (blocks * torch.exp2(exponents)[..., None]).flatten(1)


def values(operand: Any, columnwise: bool) -> torch.Tensor:
    """Return the values of a product's operand in fp32, from the copy for products by columns or by rows.

    A tensor that is not quantised is returned as it is.
    """
    kind = type(operand).__name__
    if kind.startswith("MXFP8"):
        data = operand._columnwise_data if columnwise else operand._rowwise_data
        rows = data.view(-1, data.shape[-1])
        if columnwise:
            return _read_rows(rows.t(), operand._columnwise_scale_inv.t(), operand._fp8_dtype).t().view(data.shape)
        return _read_rows(rows, operand._rowwise_scale_inv, operand._fp8_dtype).view(data.shape)
    if kind.startswith("NVFP4"):
        return fp4.read(operand, columnwise)
    if kind.startswith("Float8"):
        if columnwise and operand._transpose_invalid:
            raise RuntimeError("a product by columns needs the transposed bytes")
        data = (operand._transpose if columnwise else operand._data).view(_FP8[operand._fp8_dtype]).float()
        return (data.movedim(0, -1) if columnwise else data) * operand._scale_inv
    return operand


def dequantize(tensor, dtype):
    return values(tensor, columnwise=_has_columns_alone(tensor)).to(TORCH[dtype])


def _has_columns_alone(tensor: Any) -> bool:
    return getattr(tensor, "_rowwise_data", getattr(tensor, "_data", None)) is None


def bgrad_quantize(gradient, quantizer):
    """Return the gradient of a bias, and the quantised gradient of the output."""
    return gradient.reshape(-1, gradient.shape[-1]).float().sum(0).to(gradient.dtype), quantizer(gradient)


def fp8_transpose(data, dtype, *, out=None):
    turned = data.movedim(-1, 0)
    return turned.contiguous() if out is None else out.copy_(turned)
