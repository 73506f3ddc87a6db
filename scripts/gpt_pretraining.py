"""Pretrain with Megatron-Core's own training loop, as Megatron's ``pretrain_gpt.py`` does.

The model is a GPTModel, or a HybridModel if ``--hybrid-layer-pattern`` is given. The ``megatron-core[training]`` wheel
has the training loop, but no script that calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor | None]

_ENDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""Where the documents of packed sequences end. Every stage needs these fields."""
_FIELDS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask", *_ENDS)


def get_batch(data: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return this rank's part of the next microbatch.

    Fields except the attention mask have the shape (microbatch size, tokens). A field is None if the stage does not use
    it. On stages that read data, tensor-parallel rank 0 reads them and sends them to its tensor-parallel group.
    """
    args = get_args()
    if not _reads_data(vp_stage):
        return dict.fromkeys(_FIELDS)
    batch: Batch = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        assert data is not None, "this rank reads data"
        sample: Any = next(data)
        batch = {name: sample[name].cuda(non_blocking=True) if name in sample else None for name in _FIELDS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=_is_packed(),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_predicts_further(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )
    batch.setdefault("cu_seqlens", None)
    batch = flatten_batch_for_packed_sequences(batch)
    if batch.get("tokens") is None and batch.get("labels") is None:  # a stage between, of packed sequences
        return batch
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def _is_packed() -> bool:
    """Return whether several documents share a sequence, and none attends to another."""
    return get_args().sft or get_args().dataloader_inter_document_masking


def _reads_data(vp_stage: int | None) -> bool:
    return _is_packed() or is_first_or_last_pipeline_stage(vp_stage) or _predicts_further(vp_stage)


def _layout() -> PipelineParallelLayerLayout | None:
    args = get_args()
    text = args.pipeline_model_parallel_layout
    return None if text is None else PipelineParallelLayerLayout.from_str(text, args.pipeline_model_parallel_size)


def _predicts_further(vp_stage: int | None) -> bool:
    """Return whether this stage has layers of multi-token prediction. These look up tokens too."""
    depths = get_args().mtp_num_layers
    return mtp_on_this_rank(_layout(), depths, ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def get_embedding_ranks(pipeline: list[int]) -> list[int]:
    """Return the ranks of Megatron's embedding group in ascending order.

    They are the pipeline's first and last rank, and the ranks of multi-token prediction. If there is multi-token
    prediction and the head is untied, the last rank is not added for its head.
    """
    args, ends = get_args(), {pipeline[0], pipeline[-1]}
    if args.mtp_num_layers and args.untie_embeddings_and_output_weights:
        ends = {pipeline[0]}  # Megatron would sum the head's gradient with the embedding's
    config = SimpleNamespace(mtp_num_layers=args.mtp_num_layers, pipeline_model_parallel_layout=_layout())
    return sorted(ends.union(get_mtp_ranks(pipeline, config)))


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a microbatch, its number of tokens, and both in one tensor for Megatron's log.

    ``loss_mask`` and ``output`` have the shape (microbatch size, tokens). The mask is 1 for tokens that count.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(
    data: Iterator[Batch] | None, model: GPTModel, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, partial]:
    """Run the forward of one stage. Return its output, and a function that computes the loss from the last stage's
    output.

    With ``return_schedule_plan``, return the plan of the forward in place of its output. Megatron asks for it with
    ``--overlap-moe-expert-parallel-comm``.
    """
    batch = get_batch(data, get_attr_wrapped_model(model, "vp_stage"))
    packed = {} if batch.get("cu_seqlens") is None else {"packed_seq_params": _packed_params(batch)}
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        **packed,
    )
    return output, partial(loss_func, batch["loss_mask"])  # type: ignore[arg-type]  # only the last stage calls it


def _packed_params(batch: Batch) -> PackedSeqParams:
    """Return the ends of a packed microbatch's documents for Megatron, and count their tokens for Megatron's log."""
    ends, padded, longest = (batch.get(name) for name in _ENDS)
    assert ends is not None and longest is not None, "packed data sets yield both"
    training.update_seqlen_stats_from_cu_seqlens(ends[0])
    padded = None if padded is None else padded[0]
    used = ends[0] if padded is None else padded
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=used,
        cu_seqlens_kv=used,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=int(longest.item()),
        max_seqlen_kv=int(longest.item()),
        tokens_per_sample=get_args().seq_length,
        total_tokens=get_args().seq_length,  # by which Mamba layers know the document of every token
    )


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Build the train, validation and test datasets with at least ``num_samples`` each, on ranks that read data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        full_validation=args.full_validation,
        context_parallel_size=args.context_parallel_size,
        inter_document_masking=args.dataloader_inter_document_masking,
    )

    def reads_data() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and _reads_data(vp_stage)

    dataset = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, reads_data, config).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank, and the builder synchronises them


def main() -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    model = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
    config = pretrain_cfg_container_from_args(args, model(args))
    pretrain(
        config, build_datasets, ModelType.encoder_or_decoder, forward_step, get_embedding_ranks=get_embedding_ranks
    )
