"""Pairs of Megatron's layers with experts under the stream sanitizer, one device of a pipeline at a time.

The program of ``test_pair_streams.py``, for a process in which ``torch.cuda`` works on a CPU. It prints, for every fault
of ``PLANTED``, the kinds of hazards that the sanitizer has found.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig, transformer_block
from megatron.core.transformer.moe import token_dispatcher
from streams import Event, Group, Streams, Work

from megatron_pipemem.features.pairs.megatron import StageInPieces
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.features.pairs.runtime import Pairs, Pieces
from megatron_pipemem.mcore.model.linear import split_linear
from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext
from megatron_pipemem.runtime import transport
from megatron_pipemem.runtime.executor import Executor
from megatron_pipemem.runtime.transport import MessageFormat, Pipeline, Transport, edges
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.tools.cpu.hybrid_layers import hybrid_stack_spec

DEVICES, MICROBATCHES = 2, 4
SEQUENCE, HIDDEN, VOCABULARY = 16, 32, 64


@contextmanager
def without_waits(exchanging: bool) -> Iterator[None]:
    """Let the pieces of a forward on one of the streams not wait for the piece before."""
    go_on, wait = Pieces.go_on, Event.wait

    def unordered(pieces: Pieces, stream: torch.cuda.Stream) -> None:
        waits = nothing if (stream is pieces.exchanging) == exchanging else wait
        with mock.patch.object(Event, "wait", waits):
            go_on(pieces, stream)

    with mock.patch.object(Pieces, "go_on", unordered):
        yield


def nothing(*_: object) -> None:
    pass


EARLY: list[torch.cuda.Stream] = []
"""The stream of every output that left before the end of its pair."""


def exchanging():
    """As ``PairedSteps`` gives it to ``Pairs``."""
    EARLY.append(pipeline_utils.get_comm_stream())
    return torch.cuda.stream(EARLY[-1])


PLANTED = {
    "": nullcontext,
    "an output leaves before its last exchange": partial(
        mock.patch.object, sys.modules[__name__], "exchanging", lambda: torch.cuda.stream(torch.cuda.Stream())
    ),
    "an exchange does not wait for the piece before": partial(without_waits, exchanging=True),
    "computing does not wait for the exchange before": partial(without_waits, exchanging=False),
    "a message or an exchange is not waited for": partial(mock.patch.object, Work, "wait", nothing),
    "memory is freed while the other stream uses it": partial(
        mock.patch.object, torch.Tensor, "record_stream", nothing
    ),
}


ENTERED: list[int | str] = []
"""The contexts of quantised numbers that are open: Megatron's number of the layer, or ``off``."""
CONTEXTS: Counter[tuple] = Counter()
"""How many exchanges of forwards and backwards ran in which open contexts."""


@contextmanager
def entered(context: int | str) -> Iterator[None]:
    ENTERED.append(context)
    yield
    assert ENTERED.pop() == context


def fp8_autocast(enabled: bool) -> object:
    """As Transformer Engine's: the innermost context counts."""
    assert not enabled
    return entered("off")


class Exchange(torch.autograd.Function):
    """An all-to-all of two expert-parallel ranks that brings each rank its own tokens back."""

    @staticmethod
    def forward(ctx, tokens: torch.Tensor, group: Group) -> torch.Tensor:
        CONTEXTS["forward", *ENTERED] += 1
        ctx.group, result = group, tokens.clone()
        group.post([tokens], [result], "all_to_all").wait()
        return result

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        CONTEXTS["backward", *ENTERED] += 1
        result = gradient.clone()
        ctx.group.post([gradient], [result], "all_to_all").wait()
        return result, None


class Ends:
    """Stands for ``ChunkPlacement``. Within a chunk, Megatron asks whether it has the loss."""

    def __init__(self, losses: list[bool]):
        self._losses = losses

    def chunk(self, chunk: int):
        return mock.patch.object(parallel_state, "is_pipeline_last_stage", lambda **_: self._losses[chunk])


def make_config(num_layers: int) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_ffn_hidden_size=HIDDEN,
        moe_shared_expert_intermediate_size=HIDDEN,
        add_bias_linear=False,
        transformer_impl="local",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        deallocate_pipeline_outputs=True,
    )
    config.overlap_moe_expert_parallel_comm = True
    return config


def forward_step(data: object, model: GPTModel):
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    output = model(
        input_ids=tokens[:, :-1],
        position_ids=torch.arange(SEQUENCE)[None],
        attention_mask=None,
        labels=tokens[:, 1:].contiguous(),
    )
    return output, lambda output: (output.float().mean(), {})


def build_gpt(config: TransformerConfig, **ends: bool) -> torch.nn.Module:
    return GPTModel(
        config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), VOCABULARY, SEQUENCE, **ends
    )


def build_hybrid(config: TransformerConfig, **ends: bool) -> torch.nn.Module:
    pattern = "*E" * (config.num_layers // 2)
    return HybridModel(config, hybrid_stack_spec, VOCABULARY, SEQUENCE, hybrid_layer_pattern=pattern, **ends)


def run_device(
    schedule: Schedule, device: int, num_layers: int, build: Callable = build_gpt, recipe: str | None = None
) -> None:
    """Run a step of one device, whose messages bring whatever their memory holds. ``num_layers`` are those of a stage.

    With a ``recipe`` of fp8, layers compute as without, and enter the contexts.
    """
    config, placement = make_config(num_layers), schedule.placement
    quantised = copy.copy(config)
    if recipe is not None:
        quantised.fp8, quantised.fp8_recipe = "hybrid", recipe
    stages = placement.stages[device]
    last = [stage == placement.num_stages - 1 for stage in stages]
    context = StepContext(
        quantised,
        forward_step,
        schedule.num_microbatches,
        cp_group_size=1,
        forward_only=False,
        collect_non_loss_data=False,
        first_val_step=None,
        force_all_reduce=False,
        num_tokens=torch.zeros((), dtype=torch.int),
    )
    ends = Ends(last)
    kind = StageInPieces if schedule.pairs else ChunkStage
    runners = {}
    for chunk, stage in enumerate(stages):
        model = build(config, pre_process=stage == 0, post_process=last[chunk])
        model.to(torch.bfloat16)
        model.decoder.config = quantised
        runners[stage] = kind(context, model, None, chunk, len(stages), last[chunk], ends, ())
    channels = {edge: Group(f"edge {edge}") for edge in edges(placement) if device in edge}
    pipeline = Pipeline(None, placement, device, range(DEVICES), channels)
    message = MessageFormat((SEQUENCE, 1, HIDDEN), torch.bfloat16, torch.device("cpu"))
    pairs = [Pairs(schedule.pairs, exchanging)] if schedule.pairs else []
    Executor(lower(schedule), device, runners, Transport(pipeline, message), pairs).run()


def kinds(schedule: Schedule, planted: str) -> list[str]:
    """Return the kinds of hazards. A fault is planted in one layer of the last device, which saves time."""
    kinds_of_faults: set[str] = set()
    for device in range(DEVICES)[-1 if planted else 0 :]:
        with mock.patch.object(pipeline_utils, "_COMM_STREAM", None), Streams() as gpu, PLANTED[planted]():
            pipeline_utils.set_streams()
            with mock.patch.object(token_dispatcher, "all_to_all", exchange_over(Group("experts"))):
                run_device(schedule, device, num_layers=1 if planted else 2)
        kinds_of_faults |= gpu.kinds()
    return sorted(kinds_of_faults)


def contexts_of(schedule: Schedule, build: Callable, recipe: str) -> list[tuple]:
    """Return how many exchanges of the last device's step ran in which open contexts: [direction, contexts, number]."""
    CONTEXTS.clear()
    with mock.patch.object(pipeline_utils, "_COMM_STREAM", None), Streams():
        pipeline_utils.set_streams()
        with mock.patch.object(token_dispatcher, "all_to_all", exchange_over(Group("experts"))):
            run_device(schedule, DEVICES - 1, 2, build, recipe)
    return [
        (direction, open_contexts, number) for (direction, *open_contexts), number in sorted(CONTEXTS.items(), key=str)
    ]


def exchange_over(group: Group) -> Callable[..., torch.Tensor]:
    return lambda _, tokens, *sizes, **named: Exchange.apply(tokens, group)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    transport.dist.get_group_rank = lambda group, rank: rank
    linear = layers.linear_with_grad_accumulation_and_async_allreduce
    layers.linear_with_grad_accumulation_and_async_allreduce = partial(split_linear, linear)
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    alone = build_schedule("dualpipe-v", num_devices=DEVICES, num_microbatches=MICROBATCHES)
    schedule = with_pairs(alone, Costs().with_exchanges(0.4)).schedule
    faults = {fault: kinds(schedule, fault) for fault in PLANTED}
    for module in (transformer_block, hybrid_block):
        module.get_fp8_context = lambda config, layer_no=-1, is_init=False: entered(layer_no)
    engine = SimpleNamespace(fp8_autocast=fp8_autocast)
    sys.modules |= {"transformer_engine": SimpleNamespace(pytorch=engine), "transformer_engine.pytorch": engine}
    contexts = {
        f"{build.__name__}, {recipe}": [contexts_of(order, build, recipe) for order in (alone, schedule)]
        for build, recipe in ((build_gpt, "tensorwise"), (build_hybrid, "tensorwise"), (build_gpt, "delayed"))
    }
    shown = {"pairs": len(schedule.pairs), "early": len(EARLY), "found": faults, "contexts": contexts}
    json.dump(shown, sys.stdout)
