"""Parts of Megatron-Core that need a replacement on the CPU: extensions, an optimizer, a checkpoint writer."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """PyTorch's Adam under the name of Apex's ``FusedAdam``, with one step number per group, ``group["step"]``."""

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
        super(torch.optim.Adam, self).__setstate__(state)  # Adam's own method requires a step per parameter
        for group, state in self._states():
            if "step" in state:  # from a checkpoint of PyTorch's Adam
                group["step"] = int(state.pop("step"))

    def _states(self) -> Iterator[tuple[dict, dict]]:
        """Yield the parameter group and the state of each parameter that has a state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state.get(parameter):
                    yield group, self.state[parameter]


def _install_adam() -> None:
    """Make Megatron use ``FusedAdam`` of this module if it has found neither Apex nor Transformer Engine."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    # In fp32 the main parameters are views of the model's parameters, and autograd forbids to overwrite such views.
    loading = distrib_optimizer.DistributedOptimizer
    loading.load_state_dict = torch.no_grad()(loading.load_state_dict)


def _copied(write_buckets: list, non_blocking: bool = True) -> list:
    """Replace Megatron's ``preload_tensors``: return the write plan with copied tensors.

    Training would change the original tensors while they are written.
    """
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in write_buckets
    ]


def _install_writer() -> None:
    """Make Megatron's persistent checkpoint writer start by fork, and give it copies of the tensors to write."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    start = PersistentAsyncCaller._get_process.__func__
    PersistentAsyncCaller._get_process = classmethod(
        lambda caller, rank, mp_mode="fork", *priorities: start(caller, rank, "fork", *priorities)
    )
    FileSystemWriterAsync.preload_tensors = staticmethod(_copied)


def _build_norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Build PyTorch's own norm, also for settings for which Megatron needs Apex or Transformer Engine.

    Sequence parallelism only needs a mark on the norm's parameters. Megatron then sums their gradients over the
    tensor-parallel ranks. Persistent and memory-efficient norms are other kernels for the same formula.
    """
    plain = copy.copy(config)
    plain.sequence_parallel = plain.persist_layer_norm = plain.memory_efficient_layer_norm = False
    norm = cls.build_on_cuda(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _accumulate_weight_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add ``grad_output^T @ total_input`` to ``main_grad``, as Apex's ``wgrad_gemm_accum_fp32``.

    Both inputs have the shape (tokens, features).
    """
    main_grad.add_(grad_output.t().matmul(total_input))


def _fused_gradients() -> ModuleType:
    module: Any = ModuleType("fused_weight_gradient_mlp_cuda", "Apex's extension of that name, computed by PyTorch.")
    module.wgrad_gemm_accum_fp32 = _accumulate_weight_gradient
    module.wgrad_gemm_accum_fp16 = _accumulate_weight_gradient
    return module


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace Megatron's ``maybe_move_tensor_to_cpu``: return a numpy array if asked, for a CPU tensor too.

    Megatron leaves CPU tensors as they are, but an all-to-all takes no tensors as split sizes.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def install(emulate_fused_gradients: bool) -> None:
    """Import Megatron-Core, and replace its parts that cannot be used unchanged on the CPU.

    ``emulate_fused_gradients`` is the argument of `cpu.activate`.
    """
    if emulate_fused_gradients:
        sys.modules.setdefault("fused_weight_gradient_mlp_cuda", _fused_gradients())

    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.tensor_parallel import inference_layers
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_pipemem.cpu import attention

    # The wheel contains the compiled helpers but no Makefile.
    dataset_utils.compile_helpers = lambda: None
    # Megatron chooses PyTorch's softmax by shape, and does not check whether its own kernels exist.
    FusedScaleMaskSoftmax.is_kernel_available = lambda *_: False
    WrappedTorchNorm.build_on_cuda = WrappedTorchNorm.__new__
    WrappedTorchNorm.__new__ = _build_norm
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes
    if importlib.util.find_spec("transformer_engine") is None:
        # The final norm of a HybridModel is not in its specification.
        hybrid_block.TENorm = WrappedTorchNorm
        # ``main`` asks whether layers of multi-token prediction are of these classes, which are mocks here.
        for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
            if not isinstance(getattr(inference_layers, name, None), type):
                setattr(inference_layers, name, type(name, (), {}))
    attention.install()
    _install_adam()
    _install_writer()
