"""Steps of Megatron's layers with experts as CUDA graphs that leave the experts out, two ranks of a pipeline in turn.

The program of ``test_graph_experts.py``, for a process in which ``torch.cuda`` works on a CPU. It prints, for the models in
its arguments and with ``faults`` for every planted fault, how many results of three replayed steps differ from those of the
same steps without graphs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import cuda_graphs
import torch
import torch.distributed as dist
from in_turn import Mail, play
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pipemem.errors import PipememError
from megatron_pipemem.features.graphs import runtime
from megatron_pipemem.features.graphs.megatron import experts as room
from megatron_pipemem.features.graphs.megatron import step as steps_room
from megatron_pipemem.features.graphs.megatron.step import GraphedStage, GraphedSteps
from megatron_pipemem.features.graphs.runtime import Gap, GapOfStep, GraphedWeights, GraphsOfStep, PassGraphs
from megatron_pipemem.mcore.model.linear import attach_ddp_hooks, split_embedding, split_linear
from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.sections import Section
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule

RANKS, MICROBATCHES, STEPS = 2, 4, 4
SEQUENCE, HIDDEN, VOCABULARY = 16, 32, 64
ONE = {"num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True}
"""An expert that gets the tokens themselves, and not a sorted copy."""
SHARED = {"moe_shared_expert_intermediate_size": 24}
OVERLAPPED = {"moe_shared_expert_overlap": True, "moe_shared_expert_gate": True, **SHARED}
LOSSES = {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.5, 0.5]}
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_z_loss_coeff": 0.1}
HYBRID_EP = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep", "moe_router_dtype": "fp32"}
DEEP_EP = HYBRID_EP | {"moe_flex_dispatcher_backend": "deepep"}
TIED, ALONE = "share_embeddings_and_output_weights", "depths on a stage of their own"
DEPTHS: dict[str, dict[str, Any]] = {
    "one depth": {"mtp_num_layers": 1},
    "two depths": {},
    "tied": {TIED: True},
    "detached": {"mtp_detach_heads": True},
    "repeated layer": {"mtp_use_repeated_layer": True},
    ALONE: {ALONE: True},
}
DEEP: dict[str, Any] = {"mtp_num_layers": 2, **SHARED, **LOSSES}
MIXED = {"moe_layer_freq": [1, 0, 1, 1]}
LATENT = {
    "multi_latent_attention": True,
    "rotary_interleaved": False,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
}
LATENT |= dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 32)


def again(*modules: str) -> dict[str, Any]:
    """Settings to recompute these parts of layers."""
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


RANDOM = {"moe_router_force_load_balancing": True}
DROPOUT = {"moe_input_jitter_eps": 0.1, "attention_dropout": 0.2, "hidden_dropout": 0.1}
MODELS = {
    "zb-h1": ("zb-h1", LOSSES),
    "v-half, shared experts": ("v-half", SHARED | LOSSES),
    "1f1b, bias": ("1f1b", BIAS | SHARED),
    "zbv, allgather": ("zbv", {"moe_token_dispatcher_type": "allgather", **SHARED, **BIAS}),
    "one expert": ("zb-h1", ONE),
    "dense between": ("v-half", MIXED | LOSSES),
    "v-half, hybridep": ("v-half", HYBRID_EP | SHARED | LOSSES),
    "1f1b, hybridep": ("1f1b", HYBRID_EP | BIAS),
    "zb-h1, deepep": ("zb-h1", DEEP_EP | SHARED | LOSSES),
    "shared experts overlap": ("v-half", DEPTHS["one depth"] | OVERLAPPED | LOSSES),
    "deepep, shared experts overlap": ("zb-h1", DEEP_EP | OVERLAPPED),
    "parts again": ("v-half", again("mlp", "shared_experts", "mla_up_proj") | MIXED | SHARED | LATENT),
    **{
        f"{schedule}, {name}": (schedule, DEEP | settings)
        for schedule in ("1f1b", "zb-h1", "v-half")
        for name, settings in DEPTHS.items()
    },
    "random logits": ("v-half", RANDOM | SHARED | LOSSES),
    "dropout": ("zb-h1", DROPOUT | SHARED),
}


class Ends:
    """Stands for ``ChunkPlacement``. Within a chunk, Megatron asks whether it has the loss."""

    def __init__(self, losses: list[bool]):
        self._losses = losses

    def chunk(self, chunk: int):
        return mock.patch.object(parallel_state, "is_pipeline_last_stage", lambda **_: self._losses[chunk])


def make_config(**settings: Any) -> TransformerConfig:
    sizes = {"num_layers": 4, "hidden_size": HIDDEN, "num_attention_heads": 2, "moe_ffn_hidden_size": HIDDEN}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
    plain = {"add_bias_linear": False, "transformer_impl": "local", "gradient_accumulation_fusion": False}
    plain |= dict.fromkeys(("persist_layer_norm", "masked_softmax_fusion", "bias_dropout_fusion"), False)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "deallocate_pipeline_outputs": True}
    kind = MLATransformerConfig if "kv_lora_rank" in settings else TransformerConfig
    return kind(**{**sizes, **experts, **plain, **dropout, **settings})


class World:
    """The ranks of a schedule, with the same weights and data in every world."""

    def __init__(self, schedule: str, settings: dict[str, Any]):
        self.program = lower(build_schedule(schedule, num_devices=RANKS, num_microbatches=MICROBATCHES))
        self._tied, alone = (settings.get(name, False) for name in (TIED, ALONE))
        self.settings = {name: value for name, value in settings.items() if name not in (TIED, ALONE)}
        self.placement, self.config = self.program.placement, make_config(**self.settings)
        stages = self.placement.num_stages
        freq = self.config.moe_layer_freq
        kinds = freq if isinstance(freq, list) else [freq] * self.config.num_layers
        parts = stages if not alone else max(stages - 2, 1)
        self._depths = stages - 1 - alone
        """The stage of multi-token prediction."""
        self.models = [
            self._model(kinds[4 // parts * stage : 4 // parts * (stage + 1)], stage) for stage in range(stages)
        ]
        self.graphs: list[GraphsOfStep] | None = None

    def _model(self, kinds: list[int], stage: int) -> DistributedDataParallel:
        tensor_parallel.model_parallel_cuda_manual_seed(1 + stage, use_cudagraphable_rng=True, force_reset_rng=True)
        config = make_config(**self.settings | {"num_layers": max(len(kinds), 1), "moe_layer_freq": kinds or 1})
        ends = {"pre_process": stage == 0, "post_process": self.placement.next_stage(stage) is None}
        ends[TIED] = self._tied
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if config.mtp_num_layers and stage == self._depths:
            ends["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        spec.layer_specs = spec.layer_specs[: len(kinds)]
        position = "rope" if config.multi_latent_attention else "learned_absolute"
        with managers_on_one_rank():
            model = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type=position, **ends)
        if model.mtp_process and not model.pre_process:  # as with several pipeline ranks
            model.embedding.word_embeddings.weight.shared = True
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        attach_ddp_hooks([chunk])
        return chunk

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.main_grad for model in self.models for p in model.parameters()]

    def step(self, number: int, in_graphs: bool) -> list[torch.Tensor]:
        """Run a step, and return its losses, gradients and sums. The first step in graphs captures."""
        if in_graphs and self.graphs is None:
            self.graphs = [GraphsOfStep((), steps_room._generators()) for _ in range(RANKS)]
            _graphs.extend(self.graphs)
        if in_graphs:
            steps_room._draw_from(self.graphs[0].generators)
        buffers = [b for model in self.models for name, b in model.named_buffers() if "tokens_per_expert" in name]
        for tensor in (*self.gradients, *buffers):
            tensor.zero_()
        letters: dict = {}
        executors, losses = [], []
        for rank in range(RANKS):
            context = self._context(number)
            runners = {stage: self._runner(context, rank, stage, in_graphs) for stage in self.placement.stages[rank]}
            features = [GraphedWeights(self.graphs[rank])] if in_graphs else []
            executors.append(Executor(self.program, rank, runners, Mail(self.placement, letters), features))
            losses.append(context.loss_data)
        play(executors, letters)
        for graphs in self.graphs or () if in_graphs else ():
            graphs.complete()
        gradients = [gradient + 0 for gradient in self.gradients]
        sums = [entry.values.clone() for entry in get_moe_metrics_tracker().metrics.values()]
        get_moe_metrics_tracker().clear()
        sums += [value.clone() for value in MTPLossLoggingHelper.tracker.values() if isinstance(value, torch.Tensor)]
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        return [*(loss for of_rank in losses for loss in of_rank), *gradients, *sums, *(b.clone() for b in buffers)]

    def _context(self, number: int) -> StepContext:
        config = self.models[0].config
        config.grad_scale_func = lambda loss: loss * (1 + number)  # as a loss scaler that changes its scale

        def forward_step(iterator, model):
            tokens = torch.randint(
                VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(next(iterator))
            )
            output = model(
                input_ids=tokens[:, :-1],
                position_ids=torch.arange(SEQUENCE)[None],
                attention_mask=None,
                labels=tokens[:, 1:].contiguous(),
            )
            return output, lambda output: (output.float().mean(), output.detach().clone())

        return StepContext(config, forward_step, MICROBATCHES, 1, False, False, None, False, num_tokens=torch.tensor(0))

    def _runner(self, context: StepContext, rank: int, stage: int, in_graphs: bool) -> ChunkStage:
        stages = self.placement.stages[rank]
        last = [self.placement.next_stage(s) is None for s in stages]
        number = int(context.config.grad_scale_func(1)) - 1
        data = iter(range(100 * number, 100 * number + MICROBATCHES))
        chunk = stages.index(stage)
        runner = ChunkStage(context, self.models[stage], data, chunk, len(stages), last[chunk], Ends(last), ())
        return runner.recast(GraphedStage, graphs=self.graphs[rank], stage=stage) if in_graphs else runner


@contextmanager
def managers_on_one_rank() -> Iterator[None]:
    """Let a model be built whose experts exchange tokens by DeepEP, which Megatron refuses for a group of one rank."""
    init = token_dispatcher.MoEFlexTokenDispatcher.__init__

    def build(dispatcher: Any, experts: int, indices: list[int], config: TransformerConfig, **groups: Any) -> None:
        backend, config.moe_flex_dispatcher_backend = config.moe_flex_dispatcher_backend, "hybridep"
        init(dispatcher, experts, indices, config, **groups)
        config.moe_flex_dispatcher_backend = backend
        if backend == "deepep":
            sizes = experts, config.moe_router_topk, config.num_moe_experts
            dispatcher._comm_manager = token_dispatcher._DeepepManager(dispatcher.tp_ep_group, *sizes, config)

    with mock.patch.object(token_dispatcher.MoEFlexTokenDispatcher, "__init__", build):
        yield


def random_states() -> dict[str | None, torch.Tensor]:
    """The states of Megatron's random streams, and of the default generator, which has no name."""
    streams = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {None: torch.cuda.get_rng_state()} | {name: stream.get_state() for name, stream in streams.items()}


def set_random_states(states: dict[str | None, torch.Tensor]) -> None:
    """Set the states of the default generator, and of new generators of Megatron's random streams."""
    torch.cuda.set_rng_state(states[None])
    streams = {name: torch.Generator() for name in states if name is not None}
    for name, stream in streams.items():
        stream.set_state(states[name])
    tensor_parallel.get_cuda_rng_tracker().set_states(streams)


def differing(schedule: str, settings: dict[str, Any]) -> int | str:
    """The results and random states of three replayed steps that differ from those without graphs, or an error's code.

    The steps without graphs recompute nothing.
    """
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    kept = {name: value for name, value in settings.items() if not name.startswith("recompute")}
    plain, graphed = World(schedule, kept), World(schedule, settings)
    count, replays = 0, cuda_graphs.CUDAGraph.counts["replays"]
    try:
        for number in range(STEPS):
            states, results = random_states(), []
            for world in (plain, graphed):
                set_random_states(states)
                in_graphs = world is graphed and number > 0  # the first step warms up
                results.append([*world.step(number, in_graphs), *random_states().values()])
            count += sum(not torch.equal(*pair) for pair in zip(*results, strict=True))
    except PipememError as error:
        return error.code
    assert cuda_graphs.CUDAGraph.counts["replays"] > replays
    return count


_forward = Gap.forward


def without_copies(gap: Gap, graphs: GraphsOfStep) -> GapOfStep:
    """Run experts on the fixed tensors themselves, which the next graphs fill."""
    with mock.patch.object(torch.Tensor, "clone", torch.Tensor.detach):
        return _forward(gap, graphs)


def with_latest_state(gap: Any, tokens: torch.Tensor, probs: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
    """Run experts with the last state of their dispatcher, and not with the state of the microbatch."""
    return gap.compute(tokens, probs)


_gap = room._Gap.__call__
_maps: list[torch.Tensor] = []


def with_first_map(gap: Any, tokens: torch.Tensor, probs: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
    """Run experts with the map of tokens and experts that was the first."""
    position = gap.names.index((1, "routing_map"))
    _maps.append(state[position])
    return _gap(gap, tokens, probs, *state[:position], _maps[0], *state[position + 1 :])


_compute = room._Gap.compute


def without_input_gradient(gap: Any, tokens: torch.Tensor, probs: torch.Tensor, *of_shared: torch.Tensor) -> Any:
    """Lose the gradient of the input of overlapped shared experts."""
    return _compute(gap, tokens, probs, *map(torch.Tensor.detach, of_shared))


def captured(stage: GraphedStage, passes: PassGraphs, queue: object, *arguments: Any) -> torch.Tensor:
    """Queue the weight gradients of experts with those that are captured."""
    return passes.cut(stage.graphs, *arguments)


def nothing_done(*_: object) -> AbstractContextManager:
    return nullcontext()


FAULTS: dict[str, tuple[dict[str, Any], Any, str, Callable]] = {
    "experts read fixed tensors": (ONE, Gap, "forward", without_copies),
    "gradients of experts do not arrive": (SHARED, GapOfStep, "backward", lambda gap, graphs: None),
    "the residual is not cut": (SHARED, Section, "hand_over", lambda section, tensor: tensor),
    "the dispatcher keeps another state": (SHARED, room._Gap, "__call__", with_latest_state),
    "the gradient of shared experts is lost": (OVERLAPPED, room._Gap, "compute", without_input_gradient),
    "weight gradients of experts are captured": (SHARED, GraphedStage, "_cut", captured),
    "the manager keeps another state": (HYBRID_EP, room, "attributes_of", lambda dispatcher: (vars(dispatcher),)),
    "the manager keeps another map": (HYBRID_EP, room._Gap, "__call__", with_first_map),
    "depths are not handed over": (DEEP, room, "_depths_joined", nothing_done),
    "gradients of a weight are added one by one": (DEEP, runtime, "hooks_left_out", nothing_done),
    "all numbers come from the default generator": (RANDOM, GraphsOfStep, "drawing_from", lambda *_: nullcontext()),
    "no generator is registered": (RANDOM, cuda_graphs.CUDAGraph, "register_generator_state", lambda *_: None),
    "random streams have no generators": (RANDOM, steps_room, "_generators", dict),
    "random streams are left behind": (RANDOM, steps_room, "_draw_from", lambda generators: None),
}


_graphs: list[GraphsOfStep] = []
"""Those of all ranks."""


def follow_random_streams() -> None:
    """Let captures draw from the random streams of Megatron, as ``GraphedSteps`` does in a run."""
    steps = GraphedSteps()
    capturing = property(lambda _: next((graphs for graphs in _graphs if graphs.is_capturing), None), lambda *_: None)
    GraphedSteps._graphs = capturing
    random.initialize_rng_tracker = partial(steps._make_tracker, random.initialize_rng_tracker)
    random._get_all_rng_states = partial(steps._get_states, random._get_all_rng_states)
    random._set_all_rng_states = partial(steps._set_states, random._set_all_rng_states)
    random._get_share_storage = lambda: cuda_graphs.restore


def split_linears() -> None:
    """Split the backward of Megatron's own linear layers, as ``enable`` does."""
    linear = layers.linear_with_grad_accumulation_and_async_allreduce
    layers.linear_with_grad_accumulation_and_async_allreduce = partial(split_linear, linear)
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    lookup = layers.VocabParallelEmbedding.forward
    layers.VocabParallelEmbedding.forward = lambda embedding, tokens: split_embedding(lookup, embedding, tokens)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    cuda_graphs.install()
    follow_random_streams()
    split_linears()
    names = [name for name in sys.argv[1:] if name in MODELS]
    shown: dict[str, Any] = {"models": {name: differing(*MODELS[name]) for name in names}, "faults": {}}
    for name, (settings, *fault) in FAULTS.items() if "faults" in sys.argv else ():
        with mock.patch.object(*fault):
            try:
                shown["faults"][name] = differing("zb-h1", settings)
            except Exception as error:
                shown["faults"][name] = type(error).__name__
    json.dump(shown, sys.stdout)
