"""Supply for the CPU what Megatron-Core itself insists on beyond PyTorch: extensions, an optimizer, a writer."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """Stands in for Apex's ``FusedAdam``: PyTorch's arithmetic to the bit, with ``group["step"]`` as the only step."""

    def __init__(self, params, adam_w_mode: bool = True, **options):
        super().__init__(params, decoupled_weight_decay=adam_w_mode, **options)

    def step(self, closure=None):
        for group, state in self._states():
            state["step"] = torch.tensor(float(group.get("step", 0)))
        loss = super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for _, state in self._states():
            del state["step"]
        return loss

    def __setstate__(self, state) -> None:
        super(torch.optim.Adam, self).__setstate__(state)  # Adam's own looks for steps where there are none
        for group, state in self._states():
            if "step" in state:  # of a checkpoint that PyTorch's Adam has left
                group["step"] = int(state.pop("step"))

    def _states(self) -> Iterator[tuple[dict, dict]]:
        """Yield the states of parameters that have any, each behind its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state.get(parameter):
                    yield group, self.state[parameter]


def _install_adam() -> None:
    """Let Megatron take this optimizer where it found neither Apex's nor Transformer Engine's."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    # In fp32 the main parameters are views of the model's, which autograd does not let anybody write to.
    loading = distrib_optimizer.DistributedOptimizer
    loading.load_state_dict = torch.no_grad()(loading.load_state_dict)


def _copied(write_buckets: list, non_blocking: bool = True) -> list:
    """Copy a plan's tensors, which training would go on to change, in the place of Megatron's ``preload_tensors``."""
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in write_buckets
    ]


def _install_writer() -> None:
    """Replace how Megatron starts its persistent writer, and how the writer takes its tensors."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    start = PersistentAsyncCaller._get_process.__func__
    PersistentAsyncCaller._get_process = classmethod(
        lambda caller, rank, mp_mode="fork", *priorities: start(caller, rank, "fork", *priorities)
    )
    FileSystemWriterAsync.preload_tensors = staticmethod(_copied)


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
    """Compute ``main_grad += grad_output^T @ total_input`` of (tokens, features), as Apex's ``wgrad_gemm_accum_fp32`` does."""
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

    Nothing depends on the keys' width, since the scale of latent attention is given; the values' is that of the output.
    """
    type(self).build_for_one_width(self, *args, **kwargs)
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def install(emulate_fused_gradients: bool) -> None:
    """Import and prepare Megatron-Core."""
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
    _install_adam()
    _install_writer()
