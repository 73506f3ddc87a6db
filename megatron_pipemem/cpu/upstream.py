"""Supply for the CPU what Megatron-Core itself insists on beyond PyTorch."""

from __future__ import annotations

import copy
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

from megatron_pipemem.cpu import checkpoint_writer, fused_adam


def _build_norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
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
    module: Any = ModuleType("fused_weight_gradient_mlp_cuda", "Apex's extension of that name, computed by PyTorch.")
    module.wgrad_gemm_accum_fp32 = _accumulate_weight_gradient
    module.wgrad_gemm_accum_fp16 = _accumulate_weight_gradient
    return module


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Give what Megatron's ``maybe_move_tensor_to_cpu`` gives for a tensor on a GPU: that one leaves CPU tensors as they are,
    and an all-to-all takes no tensors for its split sizes.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _build_attention(
    self: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    """Build the local attention also for keys and values of different widths, which only Transformer Engine's knows.

    Args:
        self: the attention.
        args: of the attention as Megatron builds it.
        k_channels: width of a head's keys. Nothing depends on it: the scale of latent attention is given.
        v_channels: width of a head's values, and so of its output.
        kwargs: likewise.
    """
    type(self).build_for_one_width(self, *args, **kwargs)
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def install(emulate_fused_gradients: bool) -> None:
    """Import and prepare Megatron-Core.

    Args:
        emulate_fused_gradients: supply Apex's extension, which Megatron looks for when it is imported.
    """
    if emulate_fused_gradients:
        sys.modules.setdefault("fused_weight_gradient_mlp_cuda", _fused_gradients())

    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # The wheel carries the compiled helpers and no Makefile.
    dataset_utils.compile_helpers = lambda: None
    # Megatron falls back to PyTorch's softmax by shape, never because the kernels are missing.
    FusedScaleMaskSoftmax.is_kernel_available = lambda *_: False
    WrappedTorchNorm.build_on_cuda = WrappedTorchNorm.__new__
    WrappedTorchNorm.__new__ = _build_norm
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes
    DotProductAttention.build_for_one_width = DotProductAttention.__init__
    DotProductAttention.__init__ = _build_attention
    if importlib.util.find_spec("transformer_engine") is None:
        # The final norm of a HybridModel is no part of its specification.
        hybrid_block.TENorm = WrappedTorchNorm
    fused_adam.install()
    checkpoint_writer.install()
