"""Measure the time and memory of a model's stages on this device, each built and run alone.

The stage is Megatron's own model. Our executor runs it with Megatron's own forward and backward steps, and with split
weight gradients. Received tensors have random values. The other ranks of the tensor- and context-parallel groups do not
exist, and collectives return at once. So the bytes are those of a run, and the times are those of its computation only.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.compat import message_shapes
from megatron_pipemem.mcore.model import linear
from megatron_pipemem.mcore.model.language_model import build_gpt, build_hybrid
from megatron_pipemem.mcore.model.linear import mark_early
from megatron_pipemem.mcore.model.placement import ChunkPlacement
from megatron_pipemem.mcore.model.stages import ChunkStage, StepContext, watch_batches
from megatron_pipemem.mcore.model.transformer_engine import delayed_modules
from megatron_pipemem.mcore.step.extension import Observation, observe
from megatron_pipemem.mcore.step.gradients import sharded_replacements
from megatron_pipemem.mcore.symbols import LINEAR, PatchSet
from megatron_pipemem.model import layout
from megatron_pipemem.model.activations import layer_bytes, message_bytes
from megatron_pipemem.model.arguments import arguments_of
from megatron_pipemem.model.counts import early_modules
from megatron_pipemem.model.model import Execution, Model, Sublayer, kind_name
from megatron_pipemem.part_costs import Passes
from megatron_pipemem.runtime.activation_ledger import LedgerEntry
from megatron_pipemem.runtime.executor import Executor, Handler, Handlers, Instruction, StepFeature
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.display import doing
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.units import Units
from megatron_pipemem.tools.planner.profile import Part, Profile

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A pipeline of three: the stage that reads the data, one in the middle, and the one with the loss.
_PIPELINE = Placement.linear(3)
FIRST, MIDDLE, LAST = range(3)


def profile(model: Model, execution: Execution, repeats: int = 5) -> Profile:
    """Measure the time and bytes of each kind of layer and of the embedding and the head, and return a profile.

    This runs stages of one and of two layers, with the embedding, with the head and without either, on this device.
    ``repeats`` microbatches after a first one are timed. The bytes of a layer are those of two layers less those of
    one. Its seconds are half those of two, because the difference of two times would be noise for small layers. Raise
    an UnsupportedError with the remedy if the model cannot run this way.
    """
    _check(model, execution)
    num_kinds, is_unfused = len(set(model.kinds)), execution.attention == "unfused"
    num_parts = 2 * num_kinds + 2 + is_unfused * (2 * num_kinds - 1)
    numbers = itertools.count(1)
    with lone_rank(execution):

        @functools.cache
        def part(position: int, *kinds: str) -> Part:
            name = ("the first", "a middle", "the last")[position]
            layers = f"{len(kinds)} layer{'s' if len(kinds) > 1 else ''} of {kind_name(kinds[0])}"
            of_all = f"part {next(numbers)} of {num_parts}"
            with doing(f"{of_all}: running {name} stage with {layers}, {1 + repeats} microbatches"):
                return _stage_part(model, execution, position, kinds, 1 + repeats)

        main, final = model.main_kind, model.kinds[-1]  # multi-token prediction repeats the last layer
        twos = {kind: part(MIDDLE, kind, kind) for kind in dict.fromkeys(model.kinds)}
        layers = {kind: two - part(MIDDLE, kind) for kind, two in twos.items()}
        first, last = part(FIRST, main), part(LAST, final)
        ends = layers
        if is_unfused:
            ends = {kind: part(FIRST, kind, kind) - part(FIRST, kind) for kind in twos}

        launching = None
        if torch.empty(0, device=torch.cuda.current_device()).is_cuda:  # on a CPU, to launch is to compute
            launching = {kind: launch_seconds(model, execution, (kind, kind), 1 + repeats) / 2 for kind in twos}

    seconds = {kind: two.seconds * 0.5 for kind, two in twos.items()}

    def timed(kind: str, layer: Part) -> Part:
        return replace(layer, seconds=seconds[kind]) + _difference(model, execution, kind)

    head = replace(last - ends[final], seconds=_excess(last, seconds[final]))
    for kind in model.all_kinds[model.layers :]:  # of multi-token prediction
        head += _difference(model, execution, kind)

    return Profile(
        model=model,
        execution=execution,
        source="measured",
        device=device_name(),
        layers={kind: timed(kind, layer) for kind, layer in layers.items()},
        first=replace(first - ends[main], seconds=_excess(first, seconds[main])),
        middle=replace(twos[main] - layers[main] * 2, seconds=Passes()),
        last=head,
        message_bytes=int(message_bytes(model, execution)),
        optimizer_seconds=_optimizer_seconds(twos[main].parameters, repeats),
        launching=launching,
        end_layers={kind: timed(kind, layer) for kind, layer in ends.items()} if ends is not layers else None,
    )


def _difference(model: Model, execution: Execution, kind: str) -> Part:
    """Return the bytes that a layer of the run keeps more than Megatron's own layer, which ran, by the formulas."""
    own = layer_bytes(model, replace(execution, implementation="local", fused_rotations=False), kind)
    more = layer_bytes(model, execution, kind) + own * -1
    saved, waiting = round(more.saved), round(more.after_input)
    memory = {Kind.F: saved, Kind.I: waiting - saved, Kind.W: -waiting}
    return Part(memory={action: change for action, change in memory.items() if change})


def device_name() -> str:
    """Return the name of this process's GPU or CPU and the version of torch."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _check(model: Model, execution: Execution) -> None:
    execution.check(model)
    kinds = "".join(model.all_kinds)
    not_recomputed = {
        "activation": "Megatron has no flag for that",
        "layernorm": "Megatron does that with Transformer Engine only, and profiling builds its local modules",
        "moe_act": "Megatron does that with grouped products of Transformer Engine, and profiling builds its local modules",
    }
    if model.bias == "all":
        not_recomputed["mlp"] = "Megatron's backward of a recomputed MLP hangs if linear layers have biases"
    for cannot, why in (
        (
            execution.fp8 != "none",
            "8-bit products run in Transformer Engine's layers, and profiling builds local ones; give --formulas",
        ),
        (
            model.tower is not None or execution.adapters,
            "a vision tower and adapters belong to their program, and profiling builds language models; give --formulas",
        ),
        (
            model.expert_latent or {*"GDd"} & {*kinds},
            "gated delta nets, sparse attention and experts in a latent are made of Transformer Engine's layers, and "
            "profiling builds local ones; give --formulas",
        ),
        (
            execution.cp > 1,
            "attention over a sequence shared by context-parallel ranks needs those ranks: profile with cp 1, or give "
            "--formulas",
        ),
        (
            Sublayer.MAMBA in kinds and find_spec("mamba_ssm") is None,
            "Mamba layers run with the package mamba_ssm, on a GPU; profile on a GPU, or give --formulas",
        ),
        *(
            (execution.recomputes(module), f"recompute_modules has {module}: {reason}; give --formulas, which price it")
            for module, reason in not_recomputed.items()
        ),
    ):
        if cannot:
            raise UnsupportedError("cannot-profile", why)


def _stage_part(model: Model, execution: Execution, position: int, kinds: Sequence[str], microbatches: int) -> Part:
    stage = build_stage(model, execution, position, kinds)
    observed = run_stage(stage, model, execution, position, microbatches)
    memory: dict[Kind, float] = {kind: change for kind, change in changes(observed.counter.entries).items() if change}
    seconds: dict[Kind, list[float]] = {Kind.F: [], Kind.I: [], Kind.W: []}
    for traced in observed.clock.actions():
        if traced.action.microbatch > 0:
            seconds[traced.action.kind].append(traced.end - traced.start)
    times = Passes(*(median(durations) if durations else 0.0 for durations in seconds.values()))
    return Part(times, memory, sum(parameter.numel() for parameter in stage.parameters()))


def launch_seconds(model: Model, execution: Execution, kinds: Sequence[str], microbatches: int) -> float:
    """Return the seconds in which the host launches F, I and W of a middle stage with layers of these ``kinds``.

    Call it within ``lone_rank``. It is the sum of the medians of the microbatches after a first one.
    """
    launches = _Launches()
    run_stage(build_stage(model, execution, MIDDLE, kinds), model, execution, MIDDLE, microbatches, [launches])
    return sum(median(seconds[1:]) for seconds in launches.seconds.values())


class _Launches(StepFeature):
    """Times the launches of every pass. The device is idle before, so that no full queue makes the host wait."""

    def __init__(self) -> None:
        self.seconds: dict[Kind, list[float]] = {Kind.F: [], Kind.I: [], Kind.W: []}

    def extend(self, executor: Executor) -> Handlers:
        return {kind: partial(self._timed, executor.handlers[kind]) for kind in self.seconds}

    def _timed(self, handler: Handler, instruction: Instruction) -> None:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        handler(instruction)
        self.seconds[instruction.action.kind].append(time.perf_counter() - begin)


def _excess(part: Part, layer: Passes) -> Passes:
    """Return the seconds of each pass of a stage of one layer, less those of the layer; at least 0 despite noise."""
    over = part.seconds + layer * -1
    return Passes(max(0.0, over.forward), max(0.0, over.input), max(0.0, over.weight))


def _optimizer_seconds(parameters: int, repeats: int) -> float:
    """Return the seconds of an Adam step per parameter, measured on this many fp32 parameters.

    It is the median of ``repeats`` steps after a first one.
    """
    weight = torch.nn.Parameter(torch.zeros(parameters, device=torch.cuda.current_device()))
    weight.grad = torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], fused=True)
    took = []
    for _ in range(1 + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        adam.step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return median(took[1:]) / parameters


# Attention that keeps the same tensors as the fused kernels of GPUs, on any device.


class FlashAttention(MegatronModule):
    """Causal core attention that saves queries, keys, values, output and log-sum-exp, as fused kernels do.

    It replaces Megatron's ``DotProductAttention``, which documents the arguments. It calls PyTorch's own kernel, so
    that it runs on any device.
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
        """Return the causal attention: ``[s, b, heads, channels] -> [s, b, heads * channels]``.

        Keys and values may have fewer heads than queries. The arguments after ``value`` are not used.
        """
        # Without dropout on a CPU, because PyTorch's kernel with dropout would save all attention scores.
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if value.size(-1) != query.size(-1) and not query.is_cuda:
            return _LatentAttention.apply(query, key, value, self.scale).permute(2, 0, 1, 3).flatten(2)
        output = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if query.is_cuda else 0.0, is_causal=True, scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )  # fmt: skip
        return output.permute(2, 0, 1, 3).flatten(2)


class _LatentAttention(torch.autograd.Function):
    """Causal attention on a CPU for values with fewer channels than queries and keys.

    It saves the tensors that a fused kernel saves. PyTorch's CPU kernel would save all attention scores in this case.
    """

    @staticmethod
    def forward(ctx, query, key, value, scale):
        wide = functional.pad(value, (0, query.size(-1) - value.size(-1)))
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, wide, 0.0, True, scale=scale
        )
        # In the memory layout of the next operation, so that both keep one tensor.
        output = output[..., : value.size(-1)].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, sums = ctx.saved_tensors
        more = (0, query.size(-1) - value.size(-1))
        gradient, wide, output = (functional.pad(tensor, more) for tensor in (gradient, value, output))
        at_query, at_key, at_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, wide, output, sums, 0.0, True, scale=ctx.scale
        )
        return at_query, at_key, at_value[..., : value.size(-1)], None


@contextmanager
def lone_rank(execution: Execution) -> Iterator[None]:
    """Make this process rank 0 of a job whose other ranks do not exist, within a ``with`` block.

    Collectives return at once. Raise an UnsupportedError if the process is already in a process group.
    """
    if dist.is_initialized():
        raise UnsupportedError(
            "cannot-profile",
            "profiling needs a process outside of a job, but this one is in a process group; start it without torchrun",
        )
    ranks = execution.tp * execution.cp * execution.ep
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    patches = PatchSet()
    # Megatron recommends another model class for each model, and on a CPU warns in each layer about the random generator.
    log = logging.getLogger("megatron.core")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=execution.tp,
            context_parallel_size=execution.cp,
            expert_model_parallel_size=execution.ep,
            expert_tensor_parallel_size=execution.etp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        patches.install([(LINEAR, linear.split_linear)])
        patches.install(sharded_replacements(execution.wgrad_inputs))
        yield
    finally:
        for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):  # they keep a tensor for good
            scaler.main_loss_backward_scale = None
        MTPLossLoggingHelper.tracker = {}
        log.setLevel(level)
        patches.remove()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_stage(model: Model, execution: Execution, position: int, kinds: Sequence[str]) -> torch.nn.Module:
    """Build a stage of the pipeline as Megatron's training loop does. Call it within ``lone_rank``.

    ``position`` is ``FIRST`` (with the embedding), ``MIDDLE``, or ``LAST`` (with the head). ``kinds`` has the kind of
    each layer. Every layer of the model, and the recomputation that ``execution`` sets, must exist in Megatron's local modules
    (``_check``).
    """
    config = _config(model, execution, kinds, position)
    ends = {
        "pre_process": position == FIRST,
        "post_process": position == LAST,
        "position_embedding_type": {"learned": "learned_absolute"}.get(model.position, model.position),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        "rotary_percent": execution.rotary_percent,
    }
    size = (execution.tp * execution.vocabulary_rows(model), model.sequence)
    if model.pattern is None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        if execution.attention == "flash":
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = FlashAttention
        further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
        stage = build_gpt(config, spec, *size, mtp_block_spec=further, **ends)
    else:
        from megatron_pipemem.tools.cpu.hybrid_layers import hybrid_stack_spec

        spec = deepcopy(hybrid_stack_spec)
        if execution.attention == "flash":
            for layer in (spec.submodules.attention_layer, spec.submodules.mla_layer):
                layer.submodules.self_attention.submodules.core_attention = FlashAttention
        further = [model.mtp_pattern or ""] * (config.mtp_num_layers or 0)
        pattern = layout.FURTHER.join(("".join(kinds), *further))
        stage = build_hybrid(config, spec, *size, pattern=pattern, **ends)
    stage.cuda()
    mark_early([stage], early_modules(model, execution))
    return stage if execution.precision == "fp32" else Float16Module(config, stage)


def run_stage(
    stage: Any,
    model: Model,
    execution: Execution,
    position: int,
    microbatches: int,
    features: Sequence[StepFeature] = (),
) -> Observation:
    """Run F, I and W of ``microbatches`` microbatches through a stage, and return the bytes and times of actions.

    Each F except the first runs before the I and W of the previous microbatch. The result has the first microbatch too:
    callers leave its times out, and take bytes by ``changes``. With ``features``, nothing is counted and timed beside them.
    """
    config = stage.config
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (shape,) = message_shapes(model.sequence, execution.micro_batch, None, config, groups)
    observed = observe([stage], count=not features, time=not features)
    step = StepContext(
        config, _forward_step, microbatches, execution.cp, False, False, None, False,
        num_tokens=torch.zeros([], dtype=torch.int, device=torch.cuda.current_device()),
    )  # fmt: skip
    excludes = [] if observed.ledger is None else [observed.ledger.exclude]
    batch = watch_batches(repeat(_batch(model, execution, position)), *excludes)
    placement = ChunkPlacement(lambda devices, chunks: _PIPELINE, is_round_robin=True)
    runner = ChunkStage(step, stage, batch, 0, 1, position == LAST, placement, delayed_modules(stage))
    program = lower(_schedule(microbatches))
    # The part of a transport that a step without earlier and later stages uses.
    messages: Any = _MadeUpMessages(shape, config.pipeline_dtype)
    Executor(program, position, {position: runner}, messages, features, observed.ledger, observed.trace).run()
    return observed


def _schedule(microbatches: int) -> Schedule:
    def order(stage: int) -> tuple[Action, ...]:
        actions = [Action(Kind.F, stage, 0)]
        for microbatch in range(microbatches):
            following = [Action(Kind.F, stage, microbatch + 1)] if microbatch + 1 < microbatches else []
            actions += [*following, Action(Kind.I, stage, microbatch), Action(Kind.W, stage, microbatch)]
        return tuple(actions)

    return Schedule("lone stage", _PIPELINE, Units.equal(microbatches), tuple(map(order, range(_PIPELINE.num_stages))))


def changes(entries: Sequence[LedgerEntry]) -> dict[Kind, int]:
    """Return the bytes by which each kind of action changes a stage's activation memory in the middle of a step.

    Kinds that free memory have negative bytes. F and its messages are taken from a microbatch that starts while the
    previous one is held. Other kinds are taken from a microbatch that ends while the next one is held. So tensors that
    microbatches share, or that remain after them, do not count.
    """
    befores = (0, *(entry.bytes for entry in entries))
    forward = (Kind.RECV_F, Kind.F, Kind.SEND_F)
    return {
        entry.action.kind: entry.bytes - before
        for before, entry in zip(befores, entries, strict=False)
        if entry.action.microbatch == int(entry.action.kind in forward)
    }


class _MadeUpMessages:
    """Replaces ``Transport`` without other ranks: a receive returns random numbers at once, and a send does nothing."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self._shape, self._dtype = shape, dtype
        self._received: dict[Action, torch.Tensor] = {}

    def post_receive(self, action: Action) -> torch.Tensor:
        tensor = torch.empty(self._shape, dtype=self._dtype, device=torch.cuda.current_device())
        self._received[action] = tensor.normal_(std=1.0 if action.kind is Kind.RECV_F else 1e-3)
        return tensor

    def wait(self, action: Action) -> torch.Tensor:
        return self._received.pop(action)

    def post_send(self, action: Action, tensor: torch.Tensor) -> None: ...

    def free_sent(self, action: Action) -> None: ...

    def finish(self) -> None: ...


def _forward_step(data, model):
    """Run the model on the next batch, as the forward step of a training script does."""
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(dict(next(data)), is_hybrid_cp=False, cp_group=group)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(loss_mask: torch.Tensor, output: torch.Tensor):
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def _batch(model: Model, execution: Execution, position: int) -> dict[str, torch.Tensor | None]:
    if position == MIDDLE:  # reads no data; its layers make the masks they need, and keep them
        return dict.fromkeys(("tokens", "labels", "position_ids", "loss_mask", "attention_mask"))
    size = (execution.micro_batch, model.sequence)
    device = torch.cuda.current_device()
    tokens = torch.randint(model.vocabulary, size, device=device)
    mask = None
    if execution.attention == "unfused":
        mask = torch.ones(1, 1, model.sequence, model.sequence, dtype=torch.bool, device=device).triu(1)
    return {
        "tokens": tokens,
        "labels": tokens.clone(),
        "position_ids": torch.arange(size[1], device=device).repeat(size[0], 1),
        "loss_mask": torch.ones(size, device=device),
        "attention_mask": mask,
    }


_ACTIVATIONS = {
    "gelu": functional.gelu, "geglu": functional.gelu, "swiglu": functional.silu,
    "squared_relu": lambda x: torch.square(functional.relu(x)),
}  # fmt: skip


def _config(model: Model, execution: Execution, kinds: Sequence[str], position: int) -> TransformerConfig:
    dtype = _DTYPES[execution.precision]
    recompute: dict[str, object] = {}
    if execution.recompute == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": execution.recompute_method,
            "recompute_num_layers": execution.recompute_num_layers,
        }
    elif execution.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": list(execution.recompute_modules)}
    kind_of_config = TransformerConfig if model.kv_lora_rank is None else MLATransformerConfig
    shape = replace(
        model, activation="gelu"
    )  # flags know fewer activations than the configuration, which gets it below
    names = {field.name for field in fields(kind_of_config)}
    arguments = arguments_of(shape)
    of_kinds: dict[str, object] = {
        "num_layers": len(kinds),
        "mtp_num_layers": model.mtp_layers if model.mtp_layers and position == LAST else None,
    }
    if model.experts:
        of_kinds |= {
            "num_moe_experts": model.experts,
            "moe_router_topk_scaling_factor": model.router_scale,
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": [int(Sublayer.EXPERTS in kind) for kind in kinds],
            "moe_token_dispatcher_type": "alltoall",
        }
    if model.kv_lora_rank is not None:
        of_kinds["rope_type"] = "rope"
    fuses_experts = model.fuses_experts or not model.experts
    return kind_of_config(
        **{name: value for name, value in arguments.items() if name in names and value is not None}
        | {
            "gated_linear_unit": model.gated,
            "activation_func": _ACTIVATIONS[model.activation],
            "add_qkv_bias": model.bias != "none",
            "tensor_model_parallel_size": execution.tp,
            "sequence_parallel": execution.sequence_parallel,
            "context_parallel_size": execution.cp,
            "expert_model_parallel_size": execution.ep,
            "expert_tensor_parallel_size": execution.expert_tp,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": execution.precision == "bf16",
            "fp16": execution.precision == "fp16",
            "deallocate_pipeline_outputs": True,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            **({} if model.kv_lora_rank is None else {"rotary_percent": execution.rotary_percent}),
            "bias_dropout_fusion": execution.fused,
            "bias_activation_fusion": execution.fused and model.activation != "squared_relu" and fuses_experts,
        }
        | recompute
        | of_kinds
    )
