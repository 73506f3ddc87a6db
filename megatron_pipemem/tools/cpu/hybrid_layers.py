"""Layers of a HybridModel that need neither Transformer Engine nor a GPU, made of Megatron-Core's "local" layers.

A training script uses them with ``--spec megatron_pipemem.tools.cpu.hybrid_layers hybrid_stack_spec``. Megatron-Core has a
local specification for its GPTModel only. Checkpoints have the keys of Megatron's own ``hybrid_stack_spec``. Mamba
layers are an exception: they need ``einops`` and the GPU kernels of ``mamba_ssm``. Gated delta nets (``G``) and sparse
attention (``D``) are not supported.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_pipemem.errors import UnsupportedError


class _NoLocalLayer:
    """Raises an error if a model has this layer. Without it, Megatron would silently build an identity instead."""

    def __init__(self, *args: object, **kwargs: object):
        raise UnsupportedError(
            "not-on-cpu",
            "G (gated delta net) and D (sparse attention) in --hybrid-layer-pattern have no local layers; pass "
            "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec, which needs Transformer Engine",
        )


def _attention(keys: dict[str, str], **sizes: Any) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=get_gpt_layer_local_submodules(**sizes).self_attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _mlp(module: type, keys: dict[str, str], **sizes: Any) -> ModuleSpec:
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_gpt_layer_local_submodules(**sizes).mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _submodules(**layers: Any) -> HybridStackSubmodules:
    """Return the layers of a hybrid model, without those kinds that this version of Megatron does not have."""
    kinds = {kind.name for kind in fields(HybridStackSubmodules)}
    return HybridStackSubmodules(**{kind: layer for kind, layer in layers.items() if kind in kinds})


# In Megatron's own specification, a norm before a linear layer is a part of it. These keys map to the same checkpoint.
hybrid_stack_spec = ModuleSpec(
    module=HybridStack,
    submodules=_submodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(
                    module=MambaMixer,
                    submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
                ),
                mamba_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
            ),
        ),
        attention_layer=_attention({"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}),
        mla_layer=_attention({}, multi_latent_attention=True),
        gdn_layer=_NoLocalLayer,
        dsa_layer=_NoLocalLayer,
        mlp_layer=_mlp(MLPLayer, {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}),
        # Any positive number; the configuration sets the real one.
        moe_layer=_mlp(MoETransformerLayer, {}, num_experts=1),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[
                    ModuleSpec(
                        module=MultiTokenPredictionLayer,
                        submodules=MultiTokenPredictionLayerSubmodules(
                            enorm=WrappedTorchNorm,
                            hnorm=WrappedTorchNorm,
                            eh_proj=ColumnParallelLinear,
                            mtp_model_layer=None,  # the pattern sets it
                            layer_norm=WrappedTorchNorm,
                        ),
                    )
                ]
            ),
        ),
    ),
)
