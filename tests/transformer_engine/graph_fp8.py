"""Program of a process that has Transformer Engine on its path: steps of layers in 8 or 4 bits, a CUDA graph per pass.

It prints, for the models in its arguments and with ``faults`` for every planted fault, how many results of replayed steps
differ from those of the same steps without graphs. Weights change after every step, and an evaluation runs between two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import deep_ep_stand_in  # noqa: F401 - before Megatron
import te_stand_in  # noqa: F401 - before the CPU lane

from megatron_pipemem.tools.cpu import activate

activate()

import cuda_graphs  # noqa: E402
import graph_experts  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.fp8_utils import (  # noqa: E402
    copy_tensor_to_quantized_param,
    is_float8tensor,
    is_mxfp8tensor,
    post_all_gather_processing,
    quantize_param_shard,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (  # noqa: E402
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: E402
from transformer_engine.pytorch import quantization  # noqa: E402
from transformer_engine.pytorch.module import base, layernorm_linear, linear  # noqa: E402

from megatron_pipemem.errors import PipememError  # noqa: E402
from megatron_pipemem.features.graphs.megatron import experts  # noqa: E402
from megatron_pipemem.features.graphs.megatron.step import GraphedStage  # noqa: E402
from megatron_pipemem.features.graphs.runtime import GraphsOfStep  # noqa: E402
from megatron_pipemem.mcore.model.linear import attach_ddp_hooks  # noqa: E402
from megatron_pipemem.mcore.model.stages import ChunkStage  # noqa: E402
from megatron_pipemem.mcore.model.transformer_engine import delayed_modules  # noqa: E402
from megatron_pipemem.schedule.lowering import lower  # noqa: E402
from megatron_pipemem.schedule.registry import build_schedule  # noqa: E402

graph_experts.SEQUENCE = SEQUENCE = 32  # a block of MXFP8
REST = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"}
STEPS = 5
RATE = 0.5
RECIPES = {
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1"},
    "none": {},
}
IN_8_BITS = {"fp8_param": True, "disable_parameter_transpose_cache": True, "gradient_accumulation_fusion": True}
DEPTHS = {"mtp_num_layers": 2}
REPEATED = DEPTHS | {"mtp_use_repeated_layer": True}
EXPERTS = {
    **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_token_dispatcher_type": "alltoall"},
    **{"moe_grouped_gemm": True, "add_bias_linear": False, "moe_router_dtype": "fp32"},
    "moe_shared_expert_intermediate_size": 32,
    **graph_experts.LOSSES,
}
HYBRID_EP = EXPERTS | graph_experts.HYBRID_EP
MODELS = {
    f"{schedule}, {recipe}, {name}": (schedule, recipe, settings)
    for schedule in ("1f1b", "zb-h1", "v-half")
    for recipe in ("tensorwise", "mxfp8")
    for name, settings in {
        "kept copies": {},
        "weights in 8 bits": IN_8_BITS,
        "kept copies, two depths": DEPTHS,
        "weights in 8 bits, two depths": IN_8_BITS | DEPTHS,
    }.items()
}
MODELS |= {
    "v-half, tensorwise, hybridep, two depths": ("v-half", "tensorwise", HYBRID_EP | DEPTHS),
    "zb-h1, mxfp8, experts in 8 bits": ("zb-h1", "mxfp8", EXPERTS | IN_8_BITS),
    "1f1b, mxfp8, hybridep": ("1f1b", "mxfp8", HYBRID_EP),
    "v-half, tensorwise, experts in 8 bits": ("v-half", "tensorwise", EXPERTS | IN_8_BITS),
    "zb-h1, tensorwise, experts": ("zb-h1", "tensorwise", EXPERTS),
    "zb-h1, none, repeated depth": ("zb-h1", "none", EXPERTS | REPEATED),
    "v-half, mxfp8, repeated depth in 8 bits": ("v-half", "mxfp8", EXPERTS | IN_8_BITS | REPEATED),
}
MODELS |= {
    "1f1b, nvfp4, two depths": ("1f1b", "nvfp4", DEPTHS),
    "zb-h1, nvfp4": ("zb-h1", "nvfp4", {}),
    "v-half, nvfp4, hybridep, two depths": ("v-half", "nvfp4", HYBRID_EP | DEPTHS),
}
DELTA_NET = (
    EXPERTS
    | graph_experts.RANDOM
    | {
        **{"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 0], "num_layers": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4},
        **{
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 16,
            "attention_output_gate": True,
            "qk_layernorm": True,
        },
        **{
            "normalization": "RMSNorm",
            "layernorm_zero_centered_gamma": True,
            "activation_func": torch.nn.functional.silu,
        },
        **{"gated_linear_unit": True, "moe_shared_expert_gate": True, "mtp_num_layers": 1},
    }
)
"""As in Qwen3-Next."""
MODELS |= {
    f"{schedule}, {recipe}, delta net": (schedule, recipe, DELTA_NET | settings)
    for schedule in ("zb-h1", "v-half")
    for recipe, settings in {"none": {}, "mxfp8": IN_8_BITS}.items()
}


class World(graph_experts.World):
    """The ranks of a schedule, with the same weights and data in every world."""

    def __init__(self, schedule: str, recipe: str, **settings: Any):
        self.program = lower(build_schedule(schedule, num_devices=graph_experts.RANKS, num_microbatches=4))
        self.placement, self.graphs = self.program.placement, None
        sizes = {"num_layers": 1, "hidden_size": graph_experts.HIDDEN, "num_attention_heads": 2}
        plain = dict.fromkeys(("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_dropout_fusion"), False)
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "deallocate_pipeline_outputs": True}
        precision = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
        settings = sizes | plain | dropout | precision | RECIPES[recipe] | settings
        kind = MLATransformerConfig if "kv_lora_rank" in settings else TransformerConfig
        self.config = kind(**settings, attention_backend=AttnBackend.unfused)
        self.config.delay_wgrad_compute = schedule != "1f1b"
        self._copies: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.models = [self._stage(stage) for stage in range(self.placement.num_stages)]

    def _layers(self) -> Any:
        if self.config.experimental_attention_variant:
            return get_transformer_block_with_experimental_attention_variant_spec(self.config)
        return get_gpt_layer_with_transformer_engine_spec(self.config.num_moe_experts, self.config.moe_grouped_gemm)

    def _stage(self, stage: int) -> DistributedDataParallel:
        tensor_parallel.model_parallel_cuda_manual_seed(1 + stage, te_rng_tracker=True, force_reset_rng=True)
        ends = {"pre_process": stage == 0, "post_process": self.placement.next_stage(stage) is None}
        spec = self._layers()
        if self.config.mtp_num_layers and ends["post_process"]:
            ends["mtp_block_spec"] = get_gpt_mtp_block_spec(self.config, spec, use_transformer_engine=True)
        model = GPTModel(self.config, spec, graph_experts.VOCABULARY, SEQUENCE, **ends, **REST)
        settings = DistributedDataParallelConfig()
        settings.delay_wgrad_compute = self.config.delay_wgrad_compute
        chunk = DistributedDataParallel(self.config, settings, model)
        attach_ddp_hooks([chunk])
        return chunk

    def _runner(self, context: Any, rank: int, stage: int, in_graphs: bool) -> ChunkStage:
        stages = self.placement.stages[rank]
        last = [self.placement.next_stage(s) is None for s in stages]
        number = int(context.config.grad_scale_func(1)) - 1
        data = iter(range(100 * number, 100 * number + graph_experts.MICROBATCHES))
        chunk, model = stages.index(stage), self.models[stage]
        ends = graph_experts.Ends(last)
        runner = ChunkStage(context, model, data, chunk, len(stages), last[chunk], ends, delayed_modules(model))
        return runner.recast(GraphedStage, graphs=self.graphs[rank], stage=stage) if in_graphs else runner

    def update(self) -> None:
        """Change the weights, as an optimizer with copies in fp32 does, and quantise those that are kept in 8 bits."""
        with torch.no_grad():
            for model in self.models:
                for parameter in model.parameters():
                    if parameter not in self._copies:
                        whole = parameter.dequantize() if is_float8tensor(parameter) else parameter
                        self._copies[parameter] = whole.float()
                    copy = self._copies[parameter]
                    copy -= RATE * parameter.main_grad
                    if is_mxfp8tensor(parameter):  # with --reuse-grad-buf-for-mxfp8-param-ag
                        copy_tensor_to_quantized_param(parameter, copy.bfloat16())
                    elif is_float8tensor(parameter):
                        quantize_param_shard([parameter], [copy.view(-1)], [0], dist.group.WORLD)
                        post_all_gather_processing([parameter])
                    else:
                        parameter.copy_(copy)

    def evaluate(self) -> torch.Tensor:
        """Return the results of the stages for one microbatch, one after the other and without gradients.

        The random streams stay as they are.
        """
        states = graph_experts.random_states()
        tokens = torch.arange(SEQUENCE + 1)[None] % graph_experts.VOCABULARY
        hidden = None
        with torch.no_grad():
            for chunk in self.models:
                model = chunk.module
                model.set_is_first_microbatch()
                model.set_input_tensor(hidden)
                hidden = model(
                    input_ids=tokens[:, :-1],
                    position_ids=torch.arange(SEQUENCE)[None],
                    attention_mask=None,
                    labels=tokens[:, 1:].contiguous(),
                )
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        graph_experts.set_random_states(states)
        return hidden


def differing(plain: World, graphed: World, fault: Callable[[World], Any] = lambda world: nullcontext()) -> int | str:
    """The results of replayed steps that differ from those of the same steps without graphs, or an error's code.

    ``fault`` returns a context for the steps in graphs.
    """
    count, replays = 0, cuda_graphs.CUDAGraph.counts["replays"]
    try:
        for number in range(STEPS):
            in_graphs, states = number > 0, graph_experts.random_states()  # the first step warms up
            with fault(graphed) if in_graphs else nullcontext():
                results = [*graphed.step(number, in_graphs), *graph_experts.random_states().values()]
            graph_experts.set_random_states(states)
            plain_results = [*plain.step(number, False), *graph_experts.random_states().values()]
            pairs = [*zip(plain_results, results, strict=True)]
            for world in (plain, graphed):
                world.update()
            if number == 2:
                pairs.append((plain.evaluate(), graphed.evaluate()))
            count += sum(not torch.equal(*pair) for pair in pairs)
    except PipememError as error:
        return error.code
    assert cuda_graphs.CUDAGraph.counts["replays"] > replays
    return count


def without_updates(world: World) -> ExitStack:
    """Leave the kept copies of weights as they were before the capture."""
    stack = ExitStack()
    for module in (linear, layernorm_linear):
        stack.enter_context(
            mock.patch.object(
                module, "quantize_weight", lambda **how: base.quantize_weight(**how | {"update_workspace": False})
            )
        )
    return stack


def with_other_copies(world: World) -> AbstractContextManager:
    """Let the modules forget their copies in every step, and make new ones in evaluations."""
    for part in (part for model in world.models for part in model.modules()):
        getattr(part, "_fp8_workspaces", {}).clear()
    return nullcontext()


def with_other_bytes(world: World) -> AbstractContextManager:
    """Move the bytes of weights in every step."""
    for parameter in (parameter for model in world.models for parameter in model.parameters()):
        if is_float8tensor(parameter):
            parameter._data = parameter._data.clone()
    return nullcontext()


def unnoticed(fault: Callable[[World], AbstractContextManager]) -> Callable[[World], AbstractContextManager]:
    """Add to a fault that no graph is asked whether weights have moved."""

    def both(world: World) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(fault(world))
        stack.enter_context(mock.patch.object(GraphsOfStep, "has_moved", lambda *_: False))
        return stack

    return both


def without_precision(world: World) -> AbstractContextManager:
    """Let replays compute experts as outside of the context of fp8."""
    return mock.patch.object(experts, "_precision", lambda config: nullcontext)


def with_repeated_numbers(world: World) -> AbstractContextManager:
    """Let every replay draw the numbers of the one before, as if its generator were not that of the graph."""
    replay = cuda_graphs.CUDAGraph.replay

    def replay_again(graph: cuda_graphs.CUDAGraph) -> None:
        state = torch.get_rng_state()
        replay(graph)
        torch.set_rng_state(state)

    return mock.patch.object(cuda_graphs.CUDAGraph, "replay", replay_again)


FAULTS: dict[str, tuple[str, Callable[[World], AbstractContextManager], dict[str, Any]]] = {
    "copies are not updated": ("tensorwise", without_updates, {}),
    "copies are replaced": ("tensorwise", with_other_copies, {}),
    "weights in 8 bits move": ("tensorwise", with_other_bytes, IN_8_BITS),
    "weights in 8 bits move, unnoticed": ("tensorwise", unnoticed(with_other_bytes), IN_8_BITS),
    "experts compute in 16 bits": ("tensorwise", without_precision, EXPERTS),
    "gradients are rounded alike": ("nvfp4", with_repeated_numbers, {}),
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    quantization._FP8_SUPPORT = quantization._MXFP8_SUPPORT = quantization._NVFP4_SUPPORT = True, ""
    graph_experts.follow_random_streams()
    graph_experts.split_linears()
    names = sys.argv[1:]
    shown: dict[str, Any] = {"models": {}, "faults": {}, "losses": {}}

    def worlds(schedule: str, recipe: str, settings: dict[str, Any]) -> list[World]:
        return [World(schedule, recipe, **settings) for _ in range(2)]

    shown["models"] = {name: differing(*worlds(*MODELS[name])) for name in names if name in MODELS}
    if "faults" in names:
        for name, (recipe, fault, settings) in FAULTS.items():
            shown["faults"][name] = differing(*worlds("zb-h1", recipe, settings), fault)
        for recipe in RECIPES:
            shown["losses"][recipe] = float(World("zb-h1", recipe).step(0, False)[0].sum())
    json.dump(shown, sys.stdout)


if __name__ == "__main__":
    main()
