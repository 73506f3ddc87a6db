"""Refuse models and settings that the plugin does not run, before the first action, with the reason and the remedy.

Some settings are computed wrongly by Megatron under every schedule, its own included. Runs that equal stock's to the bit
have these faults too, and are warned. ``tests/mcore/test_inherited.py`` fails for a Megatron that has mended one, and
its row can go then.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_te_version, is_te_min_version, unwrap_model

from megatron_pipemem.choose.model_cut import OTHER_ENDS, is_folded
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.gates import GateQuestion, check_gates
from megatron_pipemem.mcore import on_cpu_ranks
from megatron_pipemem.mcore.compat import counts_all_experts
from megatron_pipemem.mcore.loop_arguments import keeps_checkpoints
from megatron_pipemem.refusals import FSDP, of_config
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.placement import Placement

logger = logging.getLogger(__name__)

_ISSUES = "https://github.com/NVIDIA/Megatron-LM/issues/"
_SPMD = f"{_ISSUES}7452, finding"


def _cuts(of: Callable[[str], Any]) -> bool:
    return (of("tensor_model_parallel_size") or 1) > 1


def _cuts_without_sequences(of: Callable[[str], Any]) -> bool:
    return _cuts(of) and not of("sequence_parallel")


_FAULTS: Sequence[tuple[Callable[[Callable[[str], Any]], object], str]] = (
    (
        lambda of: of("softmax_type") == "learnable" and _cuts(of),
        "the gradient norm has the attention sinks of one tensor-parallel rank only, so gradients are clipped less "
        f"({_SPMD} 8)",
    ),
    (
        lambda of: of("mtp_num_layers") and of("calculate_per_token_loss"),
        "multi-token prediction with --calculate-per-token-loss weighs tokens by the counts of their own microbatch and "
        f"rank, which is wrong if masks differ ({_SPMD} 3)",
    ),
    (
        lambda of: of("experimental_attention_variant") == "gated_delta_net" and _cuts_without_sequences(of),
        "tensor-parallel ranks do not add up their gradients of a gated delta net's norm, and its weights drift apart; pass "
        f"--sequence-parallel ({_SPMD} 11)",
    ),
    (
        lambda of: (
            of("moe_grouped_gemm")
            and (of("expert_model_parallel_size") or 1) > 1
            and _cuts(of)
            and not counts_all_experts()
        ),
        "the gradient norm has the experts of one tensor-parallel rank only, so gradients are clipped less "
        "(https://github.com/NVIDIA/Megatron-LM/pull/5916)",
    ),
    (
        lambda of: (
            of("multi_latent_attention")
            and (_cuts_without_sequences(of) or (of("transformer_impl") == "local" and _cuts(of)))
        ),
        "tensor-parallel ranks do not add up their gradients of latent attention's rotary keys; pass --sequence-parallel, with "
        f"Transformer Engine's layers ({_ISSUES}1699)",
    ),
)


def inherited_faults(value_of: Callable[[str], Any]) -> list[str]:
    """Return a sentence for each known fault of Megatron that the settings meet.

    ``value_of`` returns the value of an attribute of Megatron's configuration, or ``None``.
    """
    return [sentence for meets, sentence in _FAULTS if meets(value_of)]


@functools.cache  # each chunk of the model asks
def warn_of(fault: str) -> None:
    logger.warning("Megatron has a fault that this run meets, under its own schedules too: %s", fault)


OLDEST_SPLITTING = "2.8"
"""The oldest version of Transformer Engine whose modules tell which weight gradients they defer."""


def check_sharing(config, schedule: str, placement: Placement) -> None:
    """Raise an UnsupportedError if options for the layers of the first or last stage do not fit the placement.

    An option that gives multi-token prediction a stage of its own is one of them.
    """
    for attribute in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(config, attribute, None) is not None and is_folded(placement):
            raise UnsupportedError(
                "unsupported-placement",
                f"{attribute} does not go with schedule {schedule} (placement {placement.name}): {OTHER_ENDS}",
            )
    if getattr(config, "mtp_standalone", False) and not placement.is_round_robin:
        raise UnsupportedError(
            "unsupported-placement",
            f"schedule {schedule} (placement {placement.name}) needs multi-token prediction on the last stage, whose device "
            "also has the embedding; write m next to L in --pipeline-model-parallel-layout",
        )


def check_model(config, request: Request) -> None:
    """Raise an UnsupportedError if the model cannot be trained on this machine or with the requested schedule.

    Warn of faults of Megatron that its settings meet. Every rank calls this before the model is built.
    """
    value_of = of_config(config)
    for fault in inherited_faults(value_of):
        warn_of(fault)
    # transformer_engine is the default of configurations, even if it is not installed (its version is then 0).
    has_engine = value_of("transformer_impl") == "transformer_engine" and get_te_version().release[0] > 0
    used = {} if has_engine else {"transformer_impl": "local"}
    check_gates(GateQuestion(request, lambda name: used.get(name, value_of(name)), on_cpu=on_cpu_ranks()))
    if getattr(config, "gradient_accumulation_fusion", False) and not layers._grad_accum_fusion_available:
        raise UnsupportedError(
            "not-installed",
            "gradient accumulation fusion needs Apex's fused_weight_gradient_mlp_cuda for the LM head, with Transformer "
            "Engine too, and it is not installed; install Apex with --cuda_ext, or pass --no-gradient-accumulation-fusion",
        )
    if has_engine and request.may_split and not is_te_min_version(OLDEST_SPLITTING):
        raise UnsupportedError(
            "other-version",
            f"Transformer Engine {get_te_version()} does not say which weight gradients it keeps for later; install "
            f"{OLDEST_SPLITTING} or newer, or pass --transformer-impl local, or take a schedule that does not split the "
            "backward, like 1f1b",
        )


def check_chunks(chunks: list[torch.nn.Module], num_chunks: int, schedule: str, replicas: int = 1) -> None:
    """Raise an UnsupportedError if the built model cannot run, or cannot be saved by a loop that saves or loads.

    It cannot run with FSDP, or with another number of chunks than ``num_chunks``. This is the number of chunks per rank
    that the schedule needs, in all replicas together.
    """
    for chunk in chunks:
        if "FullyShardedDataParallel" in type(chunk).__name__:
            raise UnsupportedError("unsupported-setting", FSDP)
        if _cannot_be_saved(chunk) and keeps_checkpoints():
            raise UnsupportedError(
                "tied-embedding",
                "Megatron cannot write or read a checkpoint of a pipeline whose stage of multi-token prediction has a tied "
                "head; pass --untie-embeddings-and-output-weights, or leave --save and --load out",
            )
    if len(chunks) != num_chunks and replicas > 1:
        raise UnsupportedError(
            "needs-chunks",
            f"schedule {schedule} needs {replicas} replicas of the model, with a chunk of each on every rank, but this "
            f"rank has {len(chunks)} chunks; call enable() before the model is built, and drop the flags that ask for virtual "
            "pipeline stages",
        )
    if len(chunks) != num_chunks:
        raise UnsupportedError(
            "needs-chunks",
            f"schedule {schedule} needs {num_chunks} model chunks per pipeline rank, but the model has {len(chunks)}; pass "
            f"--num-virtual-stages-per-pipeline-rank {num_chunks}"
            if num_chunks > 1
            else f"schedule {schedule} needs 1 model chunk per pipeline rank, but the model has {len(chunks)}; drop the flags "
            "that ask for virtual pipeline stages",
        )


def _cannot_be_saved(chunk: torch.nn.Module) -> bool:
    """Return whether the chunk has an unused head in addition to the tied embedding that serves as its head.

    Megatron's checkpointing fails on such a chunk.
    """
    model = unwrap_model(chunk)
    tied = getattr(model, "share_embeddings_and_output_weights", False) and not model.pre_process
    head = getattr(model, "output_layer", None)
    return bool(tied and getattr(model, "mtp_process", False) and getattr(head, "weight", None) is not None)
