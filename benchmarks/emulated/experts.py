"""Model chunks of layers with experts that run on two lanes, and training steps of them by the plugin and by stock Megatron."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.common.utils import TransformerLayerNode
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import NoopScheduleNode
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from stock_steps import stock_config

import megatron_pipemem
from emulated.device import ROWS, WIDTH
from emulated.lanes import LaneDevice, use_lanes
from emulated.pair_cases import CHUNKS, DELAYED, OVERLAP, Block, Case
from emulated.runtimes import Step
from megatron_pipemem.part_costs import Passes
from megatron_pipemem.runtime.weight_gradients import DeferredWeightGradient, WeightGradientQueue, current_queue
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.schedule import Schedule


class Part(torch.nn.Module):
    """A part of a layer: attention, the experts, or an exchange of tokens.

    Args:
        chunk: the chunk of the layer.
        seconds: of F, I and W.
        keeps: whether F keeps the activation of the whole stage.
    """

    def __init__(self, chunk: Chunk, seconds: Passes, keeps: bool = False):
        super().__init__()
        self.seconds, self.keeps = seconds, keeps
        self._chunk = [chunk]  # in a list, because the chunk is no part of its parts
        self._delayed: deque[Callable[[], None]] = deque()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Piece.apply(hidden, self, self._chunk[0].number, current_queue())

    def run(self, kind: Kind, number: int) -> None:
        chunk = self._chunk[0]
        seconds = {Kind.F: self.seconds.forward, Kind.I: self.seconds.input, Kind.W: self.seconds.weight}
        chunk.device.run(Action(kind, chunk.stage, number), seconds[kind])

    def activation(self) -> torch.Tensor:
        chunk = self._chunk[0]
        return chunk.device.new_activation(chunk.stage)[0] if self.keeps else torch.empty(0)

    def finish(self, number: int, activation: torch.Tensor, queue: WeightGradientQueue | None) -> None:
        """Compute the weight gradient of a backward, or put it off: into the queue, or until ``backward_dw``."""
        if not self.seconds.weight:
            return
        work = _DeferredPart(self, number, activation)
        if queue is not None:
            queue.put(work)
        elif self._chunk[0].config.delay_wgrad_compute:
            self._delayed.append(work.run)
        else:
            work.run()

    def backward_dw(self) -> None:
        if self._delayed:
            self._delayed.popleft()()


class _Piece(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, part: Part, number: int, queue: WeightGradientQueue | None):
        ctx.save_for_backward(part.activation())
        ctx.part, ctx.number, ctx.queue = part, number, queue
        part.run(Kind.F, number)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (activation,) = ctx.saved_tensors
        ctx.part.run(Kind.I, ctx.number)
        ctx.part.finish(ctx.number, activation, ctx.queue)
        return gradient.clone(), None, None, None


class _DeferredPart(DeferredWeightGradient):
    def __init__(self, part: Part, number: int, activation: torch.Tensor):
        self._part, self._number, self._activation = part, number, activation

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._activation,)

    def run(self) -> None:
        self._part.run(Kind.W, self._number)


class Experts(torch.nn.Module):
    """The experts of a layer, with the methods of Megatron's ``MoELayer`` that pairs cut a forward at."""

    def __init__(self, chunk: Chunk, block: Block):
        super().__init__()
        self.experts, self.token_dispatcher = Part(chunk, block.experts), None
        self.away, self.back = (Part(chunk, Passes(block.exchange, block.exchange)) for _ in range(2))

    def dispatch(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.away(tokens), probs

    def routed_experts_compute(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.experts(tokens), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        return self.back(output)

    def postprocess(self, output: torch.Tensor, shared: None) -> torch.Tensor:
        return output

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output, _ = self.routed_experts_compute(*self.dispatch(hidden, torch.ones(1)))
        return self.postprocess(self.combine(output), None)


class Layer(torch.nn.Module):
    """A layer with experts, in the pieces of Megatron's plans and of the plugin's."""

    def __init__(self, chunk: Chunk, block: Block, keeps: bool):
        super().__init__()
        self.config = chunk.config
        self.attention, self.mlp = Part(chunk, block.attention, keeps), Experts(chunk, block)
        self.get_inner_quantization_context = nullcontext

    def mlp_bda(self, *_: bool) -> Callable:
        return lambda output, residual, probability: output  # the residual has no price

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.attention(hidden)
        return self.mlp_bda()(self.mlp(hidden.view_as(hidden)), hidden, 0.0)


class _LayerPlan(TransformerLayerSchedulePlan):
    def _build_callable_nodes(self, event, comp_stream, comm_stream, extra_args) -> None:
        settings = extra_args | {
            "config": self.config,
            "is_moe": True,
            "num_local_experts": 2,
            "delay_wgrad_compute": self.config.delay_wgrad_compute,
        }

        def node(name: str, stream: Callable, part: Part) -> TransformerLayerNode:
            submodule = partial(_without_node, part)
            return TransformerLayerNode(
                stream, event, self.layer_state, self.chunk_state, submodule, name, part, settings
            )

        layer = self.layer
        self.pre_dispatch_computation = node("pre_dispatch_computation", comp_stream, layer.attention)
        self.moe_dispatch = node("moe_dispatch", comm_stream, layer.mlp.away)
        self.mlp = node("mlp", comp_stream, layer.mlp.experts)
        self.moe_combine = node("moe_combine", comm_stream, layer.mlp.back)
        self.mtp_post_process = NoopScheduleNode()


def _without_node(part: Part, node: object, hidden: torch.Tensor) -> torch.Tensor:
    return part(hidden)


class _ChunkPlan(TransformerModelChunkSchedulePlan):
    LAYER_SCHEDULE_PLAN_CLASS = _LayerPlan


class _Decoder(torch.nn.Module):
    def __init__(self, layers: list[Layer]):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.input_tensor: torch.Tensor | None = None


class Chunk(MegatronModule):
    """A model chunk of equal layers, which Megatron's functions run as they run a ``GPTModel``.

    Args:
        config: Megatron's configuration.
        device: records the passes.
        stage: the stage of the chunk.
        case: the sizes and prices.
        ends: ``pre_process``, ``post_process``, ``vp_stage`` and ``pg_collection``, as Megatron gives them.
    """

    def __init__(self, config: Any, device: LaneDevice, stage: int, case: Case, **ends: Any):
        super().__init__(config)
        self.device, self.stage = device, stage
        self.model_type = ModelType.encoder_or_decoder
        for name, value in ends.items():
            setattr(self, name, value)
        layers = case.layers if ends["vp_stage"] is not None else CHUNKS * case.layers
        self.embedding = torch.nn.Parameter(torch.zeros(WIDTH))
        self.decoder = _Decoder([Layer(self, case.block(), keeps=not number) for number in range(layers)])
        self.number = 0

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        (self.decoder.input_tensor,) = tensors

    def build_schedule_plan(self) -> TransformerModelChunkSchedulePlan:
        return _ChunkPlan(self, *[None] * 3)

    def forward(self) -> torch.Tensor:
        hidden = self._preprocess()[0]
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        return hidden

    def _preprocess(self, **_: Any) -> tuple:
        self.number = self.device.next_forward(self.stage)
        given = self.decoder.input_tensor
        hidden = torch.zeros(ROWS, 1, WIDTH) + self.embedding if given is None else given
        return hidden, *[None] * 5

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def forward_step(_: object, chunk: Chunk, return_schedule_plan: bool = False) -> tuple[Any, Callable]:
    """Megatron's forward step."""
    made = chunk.build_schedule_plan() if return_schedule_plan else chunk()
    return made, lambda output: (output.sum(), {})


def expert_steps(case: Case, ours: list[Schedule], files: list[Path], stock: dict[str, Schedule]) -> Iterator[Step]:
    """Yield a step of every schedule of ours, read from its file, and of stock Megatron's schedules.

    ``stock`` has the order that Megatron promises, by the name of the row.
    """
    use_lanes()
    logging.getLogger("megatron_pipemem").setLevel(logging.WARNING)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=case.devices, virtual_pipeline_model_parallel_size=CHUNKS
    )
    for schedule, file in zip(ours, files, strict=True):
        yield _our_step(case, schedule, file)
    for name, schedule in stock.items():
        yield _stock_step(case, name, schedule)


def _our_step(case: Case, schedule: Schedule, file: Path) -> Step:
    """Return a step of the plugin as a training loop runs it. Every run enables the plugin anew, and warms it up."""
    device, overlaps = LaneDevice(), bool(schedule.pairs)
    stages = schedule.placement.stages[dist.get_rank()]

    def run() -> None:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(CHUNKS)
        megatron_pipemem.enable(str(file), pairs=overlaps)
        config = _config(case, CHUNKS, overlap_moe_expert_parallel_comm=overlaps)
        chunks = megatron_pipemem.build_model_chunks(
            lambda **ends: Chunk(config, device, stages[ends["vp_stage"]], case, **ends)
        )
        scale, device.scale = device.scale, 0.0
        _call(case, chunks)
        device.scale = scale
        device.reset()
        dist.barrier()
        _call(case, chunks)
        megatron_pipemem.disable()

    return Step("pipemem", schedule.name, device, run, schedule, case.costs())


def _stock_step(case: Case, name: str, plan: Schedule) -> Step:
    device, count = LaneDevice(), plan.placement.num_chunks
    flags = {"overlap_moe_expert_parallel_comm": name in (OVERLAP, DELAYED), "delay_wgrad_compute": name == DELAYED}
    config, groups = _config(case, count, **flags), ProcessGroupCollection.use_mpu_process_groups()
    chunks = []
    for chunk, stage in enumerate(plan.placement.stages[dist.get_rank()]):
        ends = {"pre_process": stage == 0, "post_process": stage == plan.num_stages - 1}
        vp_stage = chunk if count > 1 else None
        chunks.append(Chunk(config, device, stage, case, **ends, vp_stage=vp_stage, pg_collection=groups))
    return Step("megatron", name, device, partial(_call, case, chunks), plan, case.costs())


def _config(case: Case, chunks: int, **flags: bool) -> Any:
    config = stock_config(case.devices, chunks, WIDTH, deallocate_pipeline_outputs=True)
    # Megatron's checks of these flags are for real experts.
    for name, value in {**flags, "moe_token_dispatcher_type": "alltoall"}.items():
        setattr(config, name, value)
    return config


def _call(case: Case, chunks: list[Chunk]) -> None:
    several = len(chunks) > 1
    parallel_state.set_virtual_pipeline_model_parallel_world_size(len(chunks) if several else None)
    getattr(schedules, f"forward_backward_pipelining_with{'' if several else 'out'}_interleaving")(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=case.microbatches,
        seq_length=ROWS,
        micro_batch_size=1,
    )
    torch.cuda.current_stream().synchronize()
