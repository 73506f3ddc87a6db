"""Quantise to NVFP4 as Transformer Engine's compiled extension does, in PyTorch.

A tensor has one scale, and every 16 values of a row or of a column one of 8 bits. Weights have one for 16 rows of 16 values.
Copies by columns are transposed, and turned by a Hadamard matrix where the quantizer says so, which leaves the product of two
turned operands as it is. Gradients are rounded up or down at random, by the default generator.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_BLOCK = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = _MAGNITUDES[-1] * torch.finfo(torch.float8_e4m3fn).max


def columns(quantizer: Any, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return memory for the copy by columns, if there is one. It is a matrix, because bytes hold two values of one column."""
    pieces = quantizer.alloc_tensors((math.prod(shape[:-1]), shape[-1]))
    return {name: piece for name, piece in pieces.items() if name == "_columnwise_data"}


def write(tensor: torch.Tensor, quantizer: Any, output: Any) -> None:
    """Write packed values, scales and the largest value of a tensor, by rows and by columns where ``output`` has them."""
    rows = tensor.float().reshape(-1, tensor.shape[-1])
    if output._rowwise_data is not None:
        _write(rows, quantizer, output._rowwise_data, output._rowwise_scale_inv, output._amax_rowwise)
    if output._columnwise_data is not None:
        columns = rows.t()
        if quantizer.with_rht:
            columns = (columns.unflatten(1, (-1, _BLOCK)) @ quantizer.rht_matrix.float()).flatten(1)
        _write(columns, quantizer, output._columnwise_data, output._columnwise_scale_inv, output._amax_columnwise)


def _write(rows: torch.Tensor, quantizer: Any, data: torch.Tensor, scales: torch.Tensor, largest: torch.Tensor) -> None:
    if quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6:
        raise NotImplementedError("no scales per row, and no choice between scales, on CPU ranks")
    largest.copy_(rows.abs().max())
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    blocks = rows.unflatten(1, (-1, _BLOCK))
    of_blocks = blocks.abs().amax(2)
    if quantizer.with_2d_quantization:
        of_blocks = of_blocks.unflatten(0, (-1, _BLOCK)).amax(1).repeat_interleave(_BLOCK, 0)
    whole = torch.where(largest > 0, _LARGEST / largest, 1.0)
    kept = (of_blocks / _MAGNITUDES[-1] * whole).to(torch.float8_e4m3fn)
    scales[: kept.shape[0], : kept.shape[1]] = kept.view(torch.uint8)
    scaled = blocks * torch.where(kept.float() > 0, whole / kept.float(), 0.0)[..., None]
    codes = _codes(scaled.flatten(1), quantizer.stochastic_rounding)
    data.copy_((codes[:, ::2] | codes[:, 1::2] << 4).view_as(data))


def _codes(values: torch.Tensor, at_random: bool) -> torch.Tensor:
    """Return the positions of the nearest magnitudes, or of one of the two nearest, plus 8 for a negative value."""
    magnitudes = torch.tensor(_MAGNITUDES)
    sizes = values.abs().clamp(max=_MAGNITUDES[-1])
    upper = torch.bucketize(sizes, magnitudes).clamp(min=1)
    below, above = magnitudes[upper - 1], magnitudes[upper]
    threshold = torch.rand_like(sizes) if at_random else 0.5
    codes = torch.where((sizes - below) / (above - below) > threshold, upper, upper - 1)
    return (codes + 8 * (values < 0)).to(torch.uint8)


def read(operand: Any, columnwise: bool) -> torch.Tensor:
    """Return the values of a product's operand in fp32."""
    names = ("columnwise_data", "columnwise_scale_inv", "amax_columnwise")
    if not columnwise:
        names = ("rowwise_data", "rowwise_scale_inv", "amax_rowwise")
    data, scales, largest = (getattr(operand, f"_{name}") for name in names)
    packed = data.reshape(-1, data.shape[-1])
    codes = torch.stack([packed & 15, packed >> 4], 2).flatten(1).long()
    values = torch.tensor(_MAGNITUDES)[codes & 7] * (1 - 2 * (codes >> 3))
    blocks = values.unflatten(1, (-1, _BLOCK))
    kept = scales[: blocks.shape[0], : blocks.shape[1]].contiguous().view(torch.float8_e4m3fn).float()
    rows = (blocks * kept[..., None]).flatten(1) * (largest / _LARGEST)
    return rows.t() if columnwise else rows.view(*data.shape[:-1], -1)
