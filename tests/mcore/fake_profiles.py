"""Profiles with fake tensors: Megatron's stages run without computing or allocating, and keep the bytes of real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.tools.megatron import profiling
from megatron_pipemem.tools.planner.profile import Profile


def fake_profile(model: Model, execution: Execution, gpu_norms: bool = False) -> Profile:
    """Return the profile of a model, whose seconds mean nothing.

    With ``gpu_norms``, RMS norms on a CPU save the tensors that their fused GPU kernel saves. Ranks that share a sequence
    need not exist, because nothing is computed.
    """
    with (
        mock.patch.object(profiling, "_check", lambda model, execution: execution.check(model)),
        mock.patch.object(profiling, "lone_rank", partial(_fake_rank, profiling.lone_rank)),
        mock.patch.object(profiling, "build_stage", partial(_build_stage, profiling.build_stage, gpu_norms)),
        mock.patch.object(profiling, "Float16Module", partial(_in_half, profiling.Float16Module)),
    ):
        return profiling.profile(model, execution, repeats=1)


@contextmanager
def _fake_rank(lone_rank: Callable, execution: Execution) -> Iterator[None]:
    preprocess = MoEAlltoAllTokenDispatcher.preprocess
    with (
        lone_rank(execution),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", lambda *call: _evenly(preprocess, *call)),
        # Megatron's function compiles an extension first, which takes a minute. Fake tensors have no data to share.
        mock.patch.object(random, "_get_share_storage", lambda: lambda output, source: None),
        FakeTensorMode(),
    ):
        # The function compares and sets states of random generators, which cannot be fake tensors.
        tensor_parallel.get_cuda_rng_tracker().fork = nullcontext
        yield


def _build_stage(build_stage: Callable, gpu_norms: bool, *call) -> torch.nn.Module:
    stage = build_stage(*call)
    if gpu_norms:
        for module in stage.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.__dict__["forward"] = partial(fused_rms_norm, module)  # hides the method of its class
    return stage


def _in_half(Float16Module: type, config, stage) -> torch.nn.Module:
    # nn.Module converts fake parameters by swapping them, which weak references forbid.
    for parameter in stage.parameters():
        parameter.data = parameter.data.to(config.params_dtype)
    stage.bfloat16 = stage.half = lambda: stage
    return Float16Module(config, stage)


def _evenly(preprocess: Callable, dispatcher, routing_map: torch.Tensor) -> np.ndarray:
    """Assign the same number of tokens to every expert, up to the remainder of the division.

    It replaces Megatron's own count, because fake tensors have no values and the shapes of later tensors depend on it.
    It sets the sizes in ``dispatcher``, and returns the number of tokens of each expert of this rank.
    """
    preprocess(dispatcher, routing_map)
    visits, experts = dispatcher.num_out_tokens, dispatcher.num_experts
    sources = dispatcher.ep_size * dispatcher.tp_size
    tokens = np.diff(np.arange(experts + 1) * visits // experts)
    by_source = np.tile(tokens[: dispatcher.num_local_experts], (sources, 1))
    dispatcher.num_global_tokens_per_local_expert = by_source
    if sources > 1:
        dispatcher.input_splits = tokens.reshape(dispatcher.ep_size, -1).sum(axis=1)
        dispatcher.output_splits = np.full(dispatcher.ep_size, by_source[0].sum())
        dispatcher.output_splits_tp = np.full(dispatcher.tp_size, dispatcher.output_splits.sum())
    for order in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
        shape = (-1, dispatcher.num_local_experts) if order.startswith("sort") else (dispatcher.num_local_experts, -1)
        chunks = np.arange(dispatcher.num_experts * dispatcher.tp_size)
        setattr(dispatcher, order, chunks.reshape(shape).T.ravel())
    return by_source.sum(axis=0)


class _FusedRMSNorm(torch.autograd.Function):
    """RMS norm that saves its input and one number per token on any device, as PyTorch's fused kernel does on a GPU."""

    @staticmethod
    def forward(ctx, input, weight, eps):
        wide = input.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + (eps or torch.finfo(input.dtype).eps))
        ctx.save_for_backward(input, weight, scale)
        return (wide * scale * weight).to(input.dtype)

    @staticmethod
    def backward(ctx, gradient):
        input, weight, scale = ctx.saved_tensors
        normal = input.float() * scale
        inner = gradient.float() * weight
        at_input = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
        at_weight = (gradient.float() * normal).flatten(0, -2).sum(0)
        return at_input.to(input.dtype), at_weight.to(weight.dtype), None


def fused_rms_norm(norm: torch.nn.RMSNorm, input: torch.Tensor) -> torch.Tensor:
    """Replace ``RMSNorm.forward``, and save the tensors that the fused GPU kernel saves."""
    return _FusedRMSNorm.apply(input, norm.weight, norm.eps)
