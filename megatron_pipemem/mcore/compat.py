"""Hide the differences between Megatron's releases and its branches ``main`` and ``dev``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pipemem.mcore.symbols import RESHARDABLE_STATE, Feature, Replacements

_STREAMS = {"enable_hyper_connections": "num_residual_streams", "enable_mhc_connections": "mhc_num_residual_streams"}
"""The switch for several residual streams (mHC) on ``dev`` and on ``main``, with the field of their number."""


def message_channels(config) -> int:
    """Return the elements per token in a message between stages: the hidden size times the number of streams."""
    streams = (getattr(config, number) for switch, number in _STREAMS.items() if getattr(config, switch, False))
    return config.hidden_size * next(streams, 1)


def message_shapes(
    seq_length: int, micro_batch_size: int, decoder_seq_length: int | None, config, groups: ProcessGroupCollection
) -> list[tuple[int, ...]]:
    """Return the shape ``[s / (cp * tp), b, channels]`` of each tensor that a stage sends per microbatch.

    Without sequence parallelism, tp counts as 1. ``channels`` is ``message_channels(config)``, because Megatron's
    ``dev`` counts the streams only if it is asked for a rank of its own placement.
    """
    shapes = schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return [(*shape[:-1], message_channels(config)) for shape in shapes]


def layers_with_streams(model: torch.nn.Module, config) -> tuple[torch.nn.Module, ...]:
    """Return the layers of a chunk that keep activations of a microbatch after its backward, until the next forward.

    Only ``dev``'s layers with several residual streams do so. Otherwise the result is empty.
    """
    if not getattr(config, "enable_hyper_connections", False):
        return ()
    return tuple(part for part in model.modules() if type(part).__name__ == "HyperConnectionTransformerLayer")


def release_activations(layers: Iterable[Any]) -> None:
    """Drop the activations that these layers (``layers_with_streams``) keep, as other layers do when a forward ends."""
    for layer in layers:
        layer.mlp_norm_manager = None


def logged_depths(config) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of the sums that Megatron's log of multi-token prediction needs on every rank, and other entries.

    Both are by the name in Megatron's tracker. ``dev`` sums other tensors than releases
    do, and a rank that lacked one of them would leave out a collective.
    """
    depths = config.mtp_num_layers
    if not hasattr(MTPLossLoggingHelper, "save_loss_to_tracker"):
        return dict.fromkeys(("loss_values", "correct_values", "total_values"), (depths,)), {}
    per_token = config.calculate_per_token_loss
    shapes: dict[str, tuple[int, ...]] = {"loss_sums": (depths,)} | ({"num_tokens": (depths,)} if per_token else {})
    if MTPLossLoggingHelper.should_collect_acceptance():
        shapes["acceptance_counts"] = 2, depths
    return shapes, {"calculate_per_token_loss": per_token}


def is_plain_head(head: Any) -> bool:
    """Return whether an output layer computes logits as ``ColumnParallelLinear``, and not their loss.

    ``dev`` has a subclass that computes logits or their loss, by the configuration.
    """
    if type(head).__name__ == "LinearCrossEntropyModule":
        return not (head.config.cross_entropy_loss_fusion and head.config.cross_entropy_fusion_impl == "linear")
    return type(head) is ColumnParallelLinear


def saves_padding() -> bool:
    """Return whether Megatron saves the optimizer's state at wrong positions, which count the padding of buckets.

    Megatron's source is searched for the fix, because versions do not tell: ``dev`` calls itself 0.19.0 at every
    commit.
    """
    return "cumulative_padding_stripped" not in inspect.getsource(RESHARDABLE_STATE.resolve())


class ReshardableState(Feature):
    """Makes Megatron save the distributed optimizer's state correctly if gradient buckets are padded.

    Stock Megatron removes the padding between buckets when it joins the ranks' parts of a buffer. It then cuts the
    buffer at positions that still include the padding. So after a padded bucket, every parameter gets values of another
    one. A tied embedding has its own bucket, and overlapped reductions have many. ``main`` fixed this after 0.19.2, in
    https://github.com/NVIDIA/Megatron-LM/pull/5077.
    """

    def replacements(self) -> Replacements:
        return [(RESHARDABLE_STATE, _cut_without_padding)] if saves_padding() else []


def _cut_without_padding(original: Callable, optimizer, *args, **named):
    maps = [buffer.param_index_map for buffer in optimizer.buffers]
    try:
        for buffer in optimizer.buffers:
            buffer.param_index_map = places_without_padding(buffer)
        return original(optimizer, *args, **named)
    finally:
        for buffer, places in zip(optimizer.buffers, maps, strict=True):
            buffer.param_index_map = places


def places_without_padding(buffer) -> dict:
    """Return ``(begin, end, bucket)`` of each parameter in a gradient buffer, by parameter.

    ``begin`` and ``end`` are positions in elements, counted as if no bucket had padding. ``bucket`` is an index.
    """
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = list(accumulate(padding, initial=0))
    return {
        parameter: (begin - before[bucket], end - before[bucket], bucket)
        for parameter, (begin, end, bucket) in buffer.param_index_map.items()
    }


def counts_all_experts() -> bool:
    """Return whether Megatron's gradient norm counts the grouped experts of all tensor-parallel ranks.

    On ``dev``, it counts those of one rank only.
    """
    return hasattr(transformer_engine, "_set_expert_parameter_attributes")
