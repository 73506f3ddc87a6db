"""Program of a process that has Transformer Engine on its path: parts of layers that are recomputed, a CUDA graph per pass.

It prints, for the models in its arguments and with ``faults`` for a planted fault, how many results of replayed steps differ
from those of the same steps without graphs and without recomputation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import graph_fp8  # isort: skip - before Megatron

import cuda_graphs
import graph_experts
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random
from transformer_engine.pytorch import distributed as te_distributed

from megatron_pipemem.features.graphs.megatron.step import GraphedSteps

LATENT = graph_experts.LATENT | {"add_bias_linear": False}
EXPERTS = LATENT | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": True}
EXPERTS |= {"num_layers": 2, "moe_layer_freq": [0, 1], "moe_token_dispatcher_type": "alltoall"}
SHARED = {"moe_shared_expert_intermediate_size": 32}
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
DEEPSEEK = (
    EXPERTS
    | SHARED
    | LLAMA
    | graph_experts.RANDOM
    | {
        **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"},
        **{"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5, "qk_layernorm": True},
    }
)
RECIPE = DEEPSEEK | {"moe_shared_expert_overlap": True, "mtp_num_layers": 1}
KIMI = DEEPSEEK | graph_experts.HYBRID_EP
WHOLE_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DENSE = ("layernorm", "mla_up_proj", "mlp")
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "v-half": ("v-half", "none", RECIPE, (*DENSE, "moe_act")),
    "zb-h1, tensorwise": ("zb-h1", "tensorwise", EXPERTS | SHARED, (*DENSE, "moe_act", "shared_experts")),
    "zb-h1, layers": ("zb-h1", "tensorwise", LATENT, ()),
    "zb-h1, mxfp8": ("zb-h1", "mxfp8", RECIPE | graph_fp8.IN_8_BITS, (*DENSE, "moe_act")),
    "v-half, tensorwise, hybridep": ("v-half", "tensorwise", KIMI | graph_fp8.IN_8_BITS, ("mla_up_proj",)),
}


class World(graph_fp8.World):
    """Ranks whose stages have a dense layer, and then one with experts if there are experts."""

    def _layers(self) -> Any:
        return get_gpt_decoder_block_spec(self.config, use_transformer_engine=True)


def differing(schedule: str, recipe: str, settings: dict[str, Any], modules: tuple[str, ...]) -> int | str:
    plain = World(schedule, recipe, **settings)
    graphed = World(schedule, recipe, **settings, **(graph_experts.again(*modules) if modules else WHOLE_LAYERS))
    return graph_fp8.differing(plain, graphed)


def restored_once(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give a tensor the recomputed values in steps without graphs, and not in captures."""
    if not cuda_graphs.CUDAGraph.is_capturing:
        cuda_graphs.restore(tensor, source)


def uncaptured(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function that raises on a GPU while its stream is captured."""
    assert not cuda_graphs.CUDAGraph.is_capturing
    return call(*args, **kwargs)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    graph_fp8.quantization._FP8_SUPPORT = graph_fp8.quantization._MXFP8_SUPPORT = True, ""
    graph_experts.follow_random_streams()
    steps = GraphedSteps()
    for name, method in (("_get_cuda_rng_state", steps._get_state), ("_set_cuda_rng_state", steps._set_states)):
        setattr(te_distributed, name, partial(method, partial(uncaptured, getattr(te_distributed, name))))
    graph_experts.split_linears()
    names = sys.argv[1:]
    shown: dict[str, Any] = {"models": {name: differing(*MODELS[name]) for name in names if name in MODELS}}
    if "faults" in names:
        with mock.patch.object(random, "_get_share_storage", lambda: restored_once):
            shown["faults"] = differing("zb-h1", "none", LATENT, ("mla_up_proj",))
    json.dump(shown, sys.stdout)


if __name__ == "__main__":
    main()
