"""Supply for the CPU what Megatron-Core itself insists on beyond PyTorch."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import torch


def _build_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Build PyTorch's own norm for configurations that Megatron leaves to Apex or Transformer Engine.

    Sequence parallelism asks nothing of the norm but a mark on its parameters, whose gradients Megatron then sums over
    the tensor-parallel ranks. Persistent and memory-efficient norms are other kernels for the same formula.
    """
    plain = copy.copy(config)
    plain.sequence_parallel = plain.persist_layer_norm = plain.memory_efficient_layer_norm = False
    norm = cls.build_on_cuda(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _accumulate_weight_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """``main_grad += grad_output^T @ total_input``, the contract of Apex's ``wgrad_gemm_accum_fp32`` and ``_fp16``.

    Args:
        total_input: (tokens, in features).
        grad_output: (tokens, out features).
        main_grad: (out features, in features), updated in place.
    """
    main_grad.add_(grad_output.t().matmul(total_input))


def _fused_gradients() -> ModuleType:
    module = ModuleType("fused_weight_gradient_mlp_cuda", "Apex's extension of that name, computed by PyTorch.")
    module.wgrad_gemm_accum_fp32 = _accumulate_weight_gradient
    module.wgrad_gemm_accum_fp16 = _accumulate_weight_gradient
    return module


def install(emulate_fused_gradients: bool) -> None:
    """Import and prepare Megatron-Core.

    Args:
        emulate_fused_gradients: supply Apex's extension, which Megatron looks for when it is imported.
    """
    if emulate_fused_gradients:
        sys.modules.setdefault("fused_weight_gradient_mlp_cuda", _fused_gradients())

    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # The wheel carries the compiled helpers and no Makefile.
    dataset_utils.compile_helpers = lambda: None
    # Megatron falls back to PyTorch's softmax by shape, never because the kernels are missing.
    FusedScaleMaskSoftmax.is_kernel_available = lambda *_: False
    WrappedTorchNorm.build_on_cuda = WrappedTorchNorm.__new__
    WrappedTorchNorm.__new__ = _build_norm
