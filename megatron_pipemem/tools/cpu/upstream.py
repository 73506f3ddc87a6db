"""Parts of Megatron-Core that need a replacement on the CPU: extensions, an optimizer, a checkpoint writer, attention."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_pipemem.errors import UnsupportedError

if TYPE_CHECKING:
    from megatron.core.transformer.dot_product_attention import DotProductAttention


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


# Attention of Megatron's local layers to packed documents, and to a sequence that context-parallel ranks share. Upstream, only
# Transformer Engine's attention knows both. Here a rank gathers keys and values of the whole sequence, as Transformer Engine's
# ``all_gather`` does, and attends to them with its own queries. A mask hides other documents.


def shares(ends: Sequence[int], size: int) -> list[torch.Tensor]:
    """Return, for each of ``size`` context-parallel ranks, the positions of its tokens in the whole sequence.

    ``ends`` begins with 0. Document i has the positions from ``ends[i]`` up to, but without, ``ends[i + 1]``. Each
    document has 2 ``size`` equal parts, of which rank r has parts r and 2 ``size`` - 1 - r, so that all ranks have
    equally much causal attention. Raise an UnsupportedError if a document does not divide.
    """
    if size == 1:
        return [torch.arange(ends[-1])]
    uneven = [last - first for first, last in pairwise(ends) if (last - first) % (2 * size)]
    if uneven:
        raise UnsupportedError(
            "not-on-cpu",
            f"a packed document has {uneven[0]} tokens, and each of {size} context-parallel ranks takes two of {2 * size} "
            f"equal parts of every document; pad documents to a multiple of {2 * size} tokens, as --sft does, or pass "
            "--context-parallel-size 1",
        )
    parts = [torch.arange(first, last).chunk(2 * size) for first, last in pairwise(ends) if last > first]
    return [
        torch.cat([tensor for of in parts for tensor in (of[rank], of[2 * size - 1 - rank])]) for rank in range(size)
    ]


class _Gather(torch.autograd.Function):
    """Gather the tensor ``[s / cp, ...]`` of every context-parallel rank into ``[s, ...]``, in the sequence's order.

    ``own`` is the tensor of this rank, and ``held`` the result of ``shares``. The backward sums the ranks' gradients
    and returns those of this rank's tokens.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, owned: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.own = group, owned[group.rank()]
        gathered = [torch.empty_like(own) for _ in owned]
        dist.all_gather(gathered, own.contiguous(), group=group)
        return torch.cat(gathered)[torch.cat(owned).argsort()]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.own], None, None


def _last(queries: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
    """Return the positions of queries that are the last tokens of documents, whose keys are those from ``keys`` on."""
    numbers = [last - first for first, last in pairwise(queries)]
    return torch.cat([torch.arange(end - number, end) for number, end in zip(numbers, keys[1:], strict=True)])


def _mask(ends: Sequence[int], own: torch.Tensor) -> torch.Tensor:
    """Return the causal mask ``[1, 1, queries, s]`` of this rank's queries, at the positions ``own``. True hides a key.

    Hidden are later keys, and keys of earlier documents. ``ends`` is that of ``shares``, but may begin after 0.
    """
    keys, starts = torch.arange(ends[-1]), torch.tensor(ends[:-1])
    document = torch.searchsorted(torch.tensor(ends[1:]), own, right=True)
    return ((keys[None, :] > own[:, None]) | (keys[None, :] < starts[document][:, None]))[None, None]


def _build(build: Callable[..., None]) -> Callable[..., None]:
    def built(
        self: DotProductAttention,
        config: Any,
        *args: Any,
        k_channels: int | None = None,  # of latent attention, which sets the scale itself
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # which Megatron requires here
        build(self, alone, *args, **kwargs)
        self.config = config
        if config.context_parallel_size > 1:
            _check(self, "context parallelism", "--context-parallel-size 1")

    return built


def _check(attention: DotProductAttention, feature: str, remedy: str) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    if attention.attn_mask_type is not AttnMaskType.causal or attention.scale_mask_softmax.window_size is not None:
        raise UnsupportedError(
            "not-on-cpu",
            f"{feature} on CPU ranks has causal attention to the whole sequence only; pass {remedy}",
        )


def _attend(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attended(
        self: DotProductAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        packed, size = packed_seq_params, self.config.context_parallel_size
        # In latent attention values have another width than keys. In Megatron only Transformer Engine can do this.
        self.hidden_size_per_partition = value.size(-1) * self.num_attention_heads_per_partition
        if packed is None and size == 1:
            return attend(self, query, key, value, mask, *args, **kwargs)
        if packed is None:
            ends = queries = [0, size * query.size(0)]
        else:
            _check(self, "packed sequences", "no --window-size")
            padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
            counted = packed.cu_seqlens_q, packed.cu_seqlens_kv
            queries, ends = ((c if p is None else p).tolist() for c, p in zip(counted, padded, strict=True))
            mask = None
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))  # one sequence
        owned = shares(ends, size) if queries == ends else [_last(queries, ends)]
        own = owned[self.pg_collection.cp.rank() if size > 1 else 0]
        if size > 1:
            key, value = (_Gather.apply(tensor, owned, self.pg_collection.cp) for tensor in (key, value))
        output = attend(self, query, key, value, _mask(ends, own) if mask is None else mask, *args, **kwargs)
        return output if packed is None else output.squeeze(1)

    return attended


def _own_indices(ends: torch.Tensor, num_tokens: int, size: int, rank: int) -> torch.Tensor:
    """Return the positions of a rank's tokens in the whole sequence.

    This replaces ``thd_get_partitioned_indices`` of Transformer Engine's extension. ``size`` and ``rank`` are those of
    context parallelism. ``num_tokens`` is unused, because ``ends`` ends with it.
    """
    return shares(ends.tolist(), size)[rank]


def _install_attention() -> None:
    """Let the local attention run with packed sequences, and with more than one context-parallel rank."""
    from megatron.core import utils
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.__init__ = _build(DotProductAttention.__init__)
    DotProductAttention.forward = _attend(DotProductAttention.forward)
    if getattr(utils, "tex", None) is None:  # Megatron has found no Transformer Engine
        utils.tex = SimpleNamespace(thd_get_partitioned_indices=_own_indices)


def install(emulate_fused_gradients: bool) -> None:
    """Import Megatron-Core, and replace its parts that cannot be used unchanged on the CPU.

    ``emulate_fused_gradients`` is the argument of `cpu.activate`.
    """
    if emulate_fused_gradients:
        sys.modules.setdefault("fused_weight_gradient_mlp_cuda", _fused_gradients())

    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.tensor_parallel import inference_layers
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_pipemem.mcore.symbols import HYBRID_MODELS

    # The wheel contains the compiled helpers but no Makefile.
    dataset_utils.compile_helpers = lambda: None
    # Megatron chooses PyTorch's softmax by shape, and does not check whether its own kernels exist.
    FusedScaleMaskSoftmax.is_kernel_available = lambda *_: False
    WrappedTorchNorm.build_on_cuda = WrappedTorchNorm.__new__
    WrappedTorchNorm.__new__ = _build_norm
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes
    if importlib.util.find_spec("transformer_engine") is None:
        if HYBRID_MODELS.find() is not None:
            from megatron.core.models.hybrid import hybrid_block

            # The final norm of a HybridModel is not in its specification.
            hybrid_block.TENorm = WrappedTorchNorm
        # ``main`` asks whether layers of multi-token prediction are of these classes, which are mocks here.
        for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
            if not isinstance(getattr(inference_layers, name, None), type):
                setattr(inference_layers, name, type(name, (), {}))
    _install_attention()
    _install_adam()
    _install_writer()
