"""What the plugin does not run, refused before the first action with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_te_version, is_te_min_version

from megatron_pipemem.config import transformer_engine_refusals
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.launch.cut_flags import FIRST_OR_LAST, is_folded
from megatron_pipemem.schedule.core.placement import Placement

# Attribute of the configuration, when its value is refused, and the sentence for the user.
_REFUSED: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (
        "mtp_num_layers",
        bool,
        "multi-token prediction puts a second head on the last stage, which no schedule here knows; drop --mtp-num-layers",
    ),
    (
        "cuda_graph_impl",
        lambda impl: impl not in (None, "none"),
        "CUDA graphs freeze the order of one step; pass --cuda-graph-impl none",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        bool,
        "combined 1F1B is a schedule of its own; drop --overlap-moe-expert-parallel-comm",
    ),
    (
        "defer_embedding_wgrad_compute",
        bool,
        "the schedule already decides when the head's weight gradient runs; drop --defer-embedding-wgrad-compute",
    ),
    (
        "fine_grained_activation_offloading",
        bool,
        "fine-grained offload assumes the stock order of forwards and backwards; pass --pipemem-offload in place of "
        "--fine-grained-activation-offloading",
    ),
    (
        "cpu_offloading",
        bool,
        "offload of the last layers by Transformer Engine knows no pipeline; pass --pipemem-offload in its place",
    ),
    (
        "moe_paged_stash",
        bool,
        "the paged stash re-runs whole steps of the stock schedule; drop --moe-paged-stash",
    ),
    (
        "num_microbatches_with_partial_activation_checkpoints",
        lambda number: number is not None,
        "partial checkpointing is defined by the stock warm-up; recompute fully or selectively on every microbatch instead",
    ),
    (
        "hybrid_context_parallel",
        bool,
        "hybrid context parallelism brings its own schedule; drop --hybrid-context-parallel",
    ),
    (
        "tp_comm_overlap",
        bool,
        "Transformer Engine cannot delay weight gradients with user buffers; drop --tp-comm-overlap",
    ),
)


def check_config(config) -> None:
    """Raises:
    UnsupportedError: the configuration asks for something that cannot run under our schedules.
    """
    for attribute, refused, sentence in _REFUSED:
        if refused(getattr(config, attribute, None)):
            raise UnsupportedError(f"{attribute} = {getattr(config, attribute)!r} is not supported: {sentence}")


def check_sharing(config, schedule: str, placement: Placement) -> None:
    """Raises:
    UnsupportedError: the model's configuration gives a rank layers that this placement would put elsewhere.
    """
    for attribute in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(config, attribute, None) is not None and is_folded(placement):
            raise UnsupportedError(
                f"{attribute} does not go with schedule {schedule} (placement {placement.name}): {FIRST_OR_LAST}"
            )


def check_model(config, splits: bool, recomputes: bool) -> None:
    """To be asked on every rank before the model is built.

    Args:
        config: Megatron's configuration of the model.
        splits: whether some schedule of the run may split a backward into I and W.
        recomputes: whether one may recompute.

    Raises:
        UnsupportedError: the model cannot be trained here, or not by such schedules.
    """
    if getattr(config, "gradient_accumulation_fusion", False) and not layers._grad_accum_fusion_available:
        raise UnsupportedError(
            "gradient accumulation fusion needs Apex's fused_weight_gradient_mlp_cuda for the LM head, beside Transformer "
            "Engine too, and it is not installed; install Apex with --cuda_ext, or pass --no-gradient-accumulation-fusion"
        )
    # Configurations say so by default, also of local layers where it is not even installed (and its version is 0).
    if getattr(config, "transformer_impl", None) != "transformer_engine" or not get_te_version().release[0]:
        return
    oldest = transformer_engine_refusals.OLDEST
    if splits and not is_te_min_version(oldest):
        raise UnsupportedError(
            f"Transformer Engine {get_te_version()} does not say which weight gradients it keeps for later; install {oldest} "
            "or newer, or pass --transformer-impl local, or take a schedule that does not split the backward, like 1f1b"
        )
    reason = transformer_engine_refusals.refused(lambda name: getattr(config, name, None), splits, recomputes)
    if reason is not None:
        raise UnsupportedError(reason)


def check_chunks(chunks: list[torch.nn.Module], num_chunks: int, schedule: str, replicas: int = 1) -> None:
    """Raises:
    UnsupportedError: the model is sharded by FSDP or has another number of chunks than the schedule.
    """
    for chunk in chunks:
        if "FullyShardedDataParallel" in type(chunk).__name__:
            raise UnsupportedError(
                "FSDP gathers weights around every forward and backward, which a split backward breaks; use Megatron's "
                "DistributedDataParallel (drop --use-megatron-fsdp / --use-torch-fsdp2)"
            )
        instances = getattr(getattr(chunk, "ddp_config", None), "num_distributed_optimizer_instances", 1)
        if instances > 1:
            raise UnsupportedError(
                "several distributed-optimizer instances are not supported: their reductions cannot be started per chunk; "
                "pass --num-distributed-optimizer-instances 1"
            )
    if len(chunks) != num_chunks and replicas > 1:
        raise UnsupportedError(
            f"schedule {schedule} needs {replicas} copies of the model, a chunk of either on every rank, and here "
            f"are {len(chunks)} chunks; call enable() before the model is built, and drop the flags that ask for virtual "
            "pipeline stages"
        )
    if len(chunks) != num_chunks:
        raise UnsupportedError(
            f"schedule {schedule} needs {num_chunks} model chunks per pipeline rank, the model has {len(chunks)}; pass "
            f"--num-virtual-stages-per-pipeline-rank {num_chunks}"
            if num_chunks > 1
            else f"schedule {schedule} needs 1 model chunk per pipeline rank, the model has {len(chunks)}; drop the flags "
            "that ask for virtual pipeline stages"
        )
