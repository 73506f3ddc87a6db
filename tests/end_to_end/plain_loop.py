# ruff: noqa: E402
"""A training loop on megatron.core alone, as RL and SFT frameworks have them."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from functools import partial

from megatron_pipemem.tools.cpu import activate

activate()  # here too, because ranks are forked from a process that has imported this module

import torch
import torch.distributed as dist
from loops import config_of, descend, forward_backward, log_probs_of, outputs, session, tokens_of, without_sync
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import get_forward_backward_func as imported_first
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlock

import megatron_pipemem
from megatron_pipemem.errors import PipememError, UnsupportedError, with_code
from megatron_pipemem.mcore import shared_settings

MICROBATCHES, STEPS, SEQUENCE, VOCABULARY = 6, 2, 16, 64
SAME = [(2, SEQUENCE)] * MICROBATCHES
VARIABLE = [(2, 16), (1, 6), (3, 12), (2, 10), (2, 16), (1, 4), (2, 8)]
"""``(b, s)`` of every microbatch of the first step; later ones have one microbatch less each."""
LENGTHS = [(2, s) for _, s in VARIABLE]
"""With one ``b`` for all, three lengths determine the bytes of the other three."""


def make_config(
    chunks: int, ddp: bool, tp: int = 1, variable: bool = False, dp: int = 1, **settings: object
) -> TransformerConfig:
    return config_of(
        dist.get_world_size() // tp // dp,
        chunks,
        tp,
        **{
            "num_layers": 2 * dist.get_world_size(),
            "variable_seq_lengths": variable,
            "moe_token_dispatcher_type": "alltoall",  # variable lengths need it, with experts and without
            "finalize_model_grads_func": finalize_model_grads if ddp else None,
        }
        | settings,
    )


class _LocalStack(TransformerBlock):
    """Layers for a hybrid model; Megatron's own need Transformer Engine."""

    def __init__(self, config, *, layer_type_list, pp_layer_offset, dtype, name, **keywords):
        super().__init__(config, get_gpt_layer_local_spec(), **keywords)


STATES = {
    "attention_backend": AttnBackend.unfused,
    "activation_func": torch.nn.functional.silu,
    **dict(mamba_num_heads=4, mamba_head_dim=16, mamba_num_groups=2, mamba_state_dim=8),
    **dict(linear_num_key_heads=2, linear_key_head_dim=8, linear_num_value_heads=4, linear_value_head_dim=16),
}
"""Sizes of Mamba layers and gated delta nets, which need Transformer Engine."""


def build_chunk(config, hybrid: bool | str, **ends) -> GPTModel | HybridModel:
    if hybrid:
        layers, spec = "**", ModuleSpec(_LocalStack)
        if hybrid == "states":
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec

            layers = "M*-G"
        stages = dist.get_world_size() * (config.virtual_pipeline_model_parallel_size or 1)
        layers *= dist.get_world_size()
        size = len(layers) // stages
        model = HybridModel(
            config,
            spec,
            VOCABULARY,
            SEQUENCE,
            hybrid_layer_pattern="|".join(layers[size * stage :][:size] for stage in range(stages)),
            position_embedding_type="learned_absolute",
            **ends,
        )
    else:
        model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, **ends)
    # Values that depend on the global layer alone, so that every placement starts from the same model.
    for name, parameter in model.named_parameters():
        key = name
        if name.startswith("decoder.layers."):
            _, _, local, part = name.split(".", 3)
            key = f"{model.decoder.layers[int(local)].layer_number}.{part}"
        generator = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(key)) % 2**31)
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1)
    return model


def batches(step: int, sizes=SAME):
    for microbatch, (b, s) in enumerate(sizes):
        yield tokens_of(1000 * step + microbatch, (b, s + 1), VOCABULARY)


def weight(batch: torch.Tensor) -> tuple[float, float]:
    """By tokens."""
    return (batch[:, 1:].numel() / (2 * SEQUENCE),) * 2


def forward_step(data, model):
    """Call the model with the next batch; without data, as on a stage that has no use for them."""
    output = model(None, None, None) if data is None else outputs(model, next(data), labels=True)
    return output, partial(lambda losses: (losses.mean(), {"loss": losses.mean().detach()}))


def likelihood_step(data, model):
    """Compute a loss of reinforcement learning from the logits of whole sequences. A token's neighbours count too."""
    batch = next(data)
    output = outputs(model, batch)
    if output.size(-1) != VOCABULARY:
        return output, None  # to the next stage
    chosen = log_probs_of(output, batch)
    mixed = (chosen - chosen.mean(dim=1, keepdim=True)).square() * chosen.roll(1, dims=1) - chosen
    return mixed, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


PROCESSED: Counter[str] = Counter()
"""How often the model has called a hook of the program, by the hook's name."""


def log_probs_hook(*, hidden_states, output_layer, output_weight, labels, **_):
    """Compute log-probabilities within the model's call, as trainers do that keep no logits."""
    PROCESSED["output_processor"] += 1
    logits, _ = output_layer(hidden_states, weight=output_weight)
    return -torch.log_softmax(logits.transpose(0, 1).float(), -1).gather(-1, labels[..., None])[..., 0].tanh()


def processing_step(data, model):
    output = outputs(model, next(data), labels=True, output_processor=log_probs_hook)
    return output, partial(lambda losses: (losses.mean(), {"loss": losses.mean().detach()}))


STEPS_OF_PROGRAMS = {"likelihoods": likelihood_step, "processes": processing_step}


def inspection_step(data, model):
    """Asks for logits instead of losses."""
    output = model(None, None, None) if data is None else outputs(model, next(data))
    return output, lambda logits, non_loss_data: logits


def first_step(settings: tuple, step) -> str:
    """Run a step of chunks whose configuration has ``settings``, and return the error with its notes, or ``nothing``."""
    try:
        models = megatron_pipemem.build_model_chunks(partial(build_chunk, make_config(*settings), False))
        forward_backward(models, step, [batches(0) for _ in models], MICROBATCHES, SEQUENCE, micro_batch_size=2)
        return "nothing"
    except Exception as error:
        code = f" [{error.code}]" if isinstance(error, PipememError) else ""
        return " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())]) + code


def failing_step() -> str:
    """The error on every rank when the first one fails in its third forward, and its neighbours wait for it in vain."""
    calls = 0

    def failing_forward_step(data, model):
        nonlocal calls
        calls += 1
        if calls == 3 and dist.get_rank() == 0:
            raise ArithmeticError("this rank cannot go on")
        return forward_step(data, model)

    original = schedules.forward_backward_pipelining_with_interleaving
    with session("v-half", chunks=2, distributed_timeout_minutes=0.1):
        text = first_step((2, False), failing_forward_step)
    assert schedules.forward_backward_pipelining_with_interleaving is original
    return text


def wrongly_cut(case: dict) -> str:
    """The error on every rank when the model's configuration counts with other chunks than Megatron's global state."""
    with session(case["schedule"], chunks=case["chunks"]):
        return first_step((case["counted"], False), forward_step)


def enabled_differently(case: dict) -> str:
    """The error on every rank when ranks enable the plugin with other settings, or (``None``) not at all."""
    settings, patience = case["differ"][dist.get_rank()], shared_settings.PATIENCE
    shared_settings.PATIENCE = 0.5
    try:
        if settings is not None:
            megatron_pipemem.enable(**settings)
        if case["before"]:
            assert not parallel_state.is_initialized()
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
        return "nothing"
    except UnsupportedError as error:
        return with_code(error)
    finally:
        shared_settings.PATIENCE = patience
        megatron_pipemem.disable()
        if case["last"]:
            parallel_state.destroy_model_parallel()


def run(case: dict) -> dict:
    """Losses of every microbatch, exact, and logits after training, on the last pipeline rank; nothing elsewhere.

    Args:
        case: ``schedule``, ``ddp``, ``chunks`` of every rank; optionally ``settings`` of the plugin, ``tp``, and ``variable``:
            ``VARIABLE`` or six of them (``EVEN``), which are read at the ends of the model alone, or ``LENGTHS``, which every
            rank reads; ``dp``: as many
            pipelines run one after another, each of them while the others wait in a barrier of all ranks; ``apart``: their
            process groups say nothing of each other; ``computes``: one of ``STEPS_OF_PROGRAMS``; ``hybrid``: a
            HybridModel, which has layers with states if it is ``states``.
    """
    if "example" in case:
        sys.path.insert(0, case["example"])
        try:
            return {"losses": importlib.import_module("training_loop").train(steps=8)}
        finally:
            megatron_pipemem.disable()
            parallel_state.destroy_model_parallel()
    if "differ" in case:
        return {"failure": enabled_differently(case)}
    if case.get("refuses"):
        with session(case["schedule"], case["settings"]):
            return {"failure": first_step((1, False), STEPS_OF_PROGRAMS[case["computes"]])}
    if "counted" in case:
        return {"failure": wrongly_cut(case)}
    failure = failing_step() if case.get("fails_before") else None
    tp, dp = case.get("tp", 1), case.get("dp", 1)
    groups = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": dist.get_world_size() // tp // dp,
    }
    with session(case["schedule"], case.get("settings"), case["chunks"], **groups):
        shown = _train(case, tp, dp)
    assert not any(name.startswith("megatron.training") for name in sys.modules)
    return {**shown, "failure": failure}


def _train(case: dict, tp: int, dp: int) -> dict:
    ddp, chunks, variable = case["ddp"], case["chunks"], case.get("variable")
    sizes = {None: SAME, "VARIABLE": VARIABLE, "LENGTHS": LENGTHS, "EVEN": VARIABLE[:6]}[variable]
    get_forward_backward_func = imported_first
    if case["import_after"]:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    hybrid = case.get("hybrid", False)
    states = {"num_layers": 4 * dist.get_world_size(), **STATES} if hybrid == "states" else {}
    config = make_config(chunks, ddp, tp, variable is not None, dp, **states)
    build = partial(build_chunk, config, hybrid)
    if case["schedule"] == "stock":
        groups = ProcessGroupCollection.use_mpu_process_groups()
        is_first, is_last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
        models = [
            build(
                pre_process=is_first and chunk == 0,
                post_process=is_last and chunk == chunks - 1,
                vp_stage=chunk if chunks > 1 else None,
                pg_collection=groups,
            )
            for chunk in range(chunks)
        ]
    else:
        models = megatron_pipemem.build_model_chunks(build)
    arguments = {}
    if case.get("apart"):
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "mp"])
        arguments = {"pg_collection": groups, "p2p_communicator": P2PCommunicator(groups.pp, config)}
    reads = [variable not in ("VARIABLE", "EVEN") or model.pre_process or model.post_process for model in models]
    if ddp:
        models = [
            DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
            for model in models
        ]
        config.no_sync_func = without_sync(models)

    def step_of(number: int, function, sizes, **how) -> list:
        data = [batches(number, sizes) if has_data else None for has_data in reads]
        return get_forward_backward_func()(
            forward_step_func=function,
            data_iterator=data if chunks > 1 else data[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(sizes),
            seq_length=SEQUENCE,
            micro_batch_size=2,
            **arguments,
            **how,
        )

    PROCESSED.clear()
    losses, inspects = [], {"forward_only": True, "collect_non_loss_data": True}
    turn = parallel_state.get_data_parallel_rank()
    for _ in range(turn):
        dist.barrier()
    if dp > 1 and turn == 0:
        step_of(STEPS, inspection_step, sizes[:3], **inspects)
    for step in range(STEPS):
        for model in models:
            model.zero_grad_buffer() if ddp else model.zero_grad(set_to_none=True)
        seen = step_of(
            step,
            STEPS_OF_PROGRAMS.get(case.get("computes"), forward_step),
            sizes[: len(sizes) - step] if variable else sizes,
        )
        losses += [report["loss"].item().hex() for report in seen]
        descend(models)
    logits = step_of(STEPS, inspection_step, sizes[:2], **inspects)
    for _ in range(dp - 1 - turn):
        dist.barrier()
    megatron_pipemem.write_report()
    calls: list[Counter[str]] = [Counter()] * dist.get_world_size()
    dist.all_gather_object(calls, PROCESSED)
    return {
        "losses": losses,
        "logits": [sequences.tolist() for sequences in logits],
        "calls": dict(sum(calls, Counter())),
    }
