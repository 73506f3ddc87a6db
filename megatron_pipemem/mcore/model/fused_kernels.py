"""Attention and norms that keep what the fused kernels of GPUs keep, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from megatron.core.transformer.module import MegatronModule


class FlashAttention(MegatronModule):
    """Core attention that keeps queries, keys, values, its output and the logarithm of the softmax's sums.

    That is what Transformer Engine's and every other fused kernel keeps; PyTorch's own runs on any device. It takes the place
    of Megatron's ``DotProductAttention``, which explains the arguments.

    Args:
        config: Megatron's configuration of the model.
        layer_number, attn_mask_type, attention_type: unused; attention is causal.
        attention_dropout: probability; ``None`` for the configuration's.
        softmax_scale: factor of the scores; ``None`` for one over the root of the channels.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, **_
    ):
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """Attend to what comes before: ``[s, b, heads, channels] -> [s, b, heads * channels]``.

        Args:
            query, key, value: ``[s, b, heads, channels]``; keys and values may have fewer heads.
            attention_mask, attn_mask_type, attention_bias, packed_seq_params: unused.
        """
        # On CPU dropout is left out: PyTorch has it there only together with all scores.
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        if value.size(-1) != query.size(-1) and not query.is_cuda:
            return _LatentAttention.apply(query, key, value, self.scale).permute(2, 0, 1, 3).flatten(2)
        output = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if query.is_cuda else 0.0, is_causal=True, scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )  # fmt: skip
        return output.permute(2, 0, 1, 3).flatten(2)


class _LatentAttention(torch.autograd.Function):
    """Keeps what a fused kernel keeps where values have fewer channels than queries and keys: PyTorch's kernel for CPUs
    does not know that, and would keep all scores.
    """

    @staticmethod
    def forward(ctx, query, key, value, scale):
        wide = functional.pad(value, (0, query.size(-1) - value.size(-1)))
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, wide, 0.0, True, scale=scale
        )
        # In memory as what follows flattens it, so that both keep one tensor.
        output = output[..., : value.size(-1)].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, sums = ctx.saved_tensors
        more = (0, query.size(-1) - value.size(-1))
        gradient, wide, output = (functional.pad(each, more) for each in (gradient, value, output))
        at_query, at_key, at_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, wide, output, sums, 0.0, True, scale=ctx.scale
        )
        return at_query, at_key, at_value[..., : value.size(-1)], None


class _FusedRMSNorm(torch.autograd.Function):
    """Keeps its input and one number per token, as PyTorch's fused kernel does on GPUs; on CPU it is many operations."""

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
    """``norm`` of ``input``, of any shape ``[..., hidden]``, keeping what its fused GPU kernel keeps."""
    return _FusedRMSNorm.apply(input, norm.weight, norm.eps)
