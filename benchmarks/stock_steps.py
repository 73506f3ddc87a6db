"""Steps of stock Megatron-Core's functions with chunks for measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig


class TinyChunk(torch.nn.Module):
    """A chunk that computes almost nothing: a weight times its input, or times the embedded batch on the first stage.

    ``embed`` makes ``[s, b, width]`` from the forward step's batch. ``vp_stage`` is ``None`` for the only chunk of a rank.
    """

    def __init__(self, config: TransformerConfig, vp_stage: int | None, width: int, embed: Callable[..., torch.Tensor]):
        super().__init__()
        self.config, self.vp_stage, self.model_type = config, vp_stage, ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.input: torch.Tensor | None = None
        self._embed = embed

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        (self.input,) = tensors

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return (self._embed(**batch) if self.input is None else self.input) * self.weight


def stock_groups(devices: int) -> ProcessGroupCollection:
    """Return Megatron's groups with all ranks in one pipeline."""
    groups = ProcessGroupCollection()
    groups.pp = dist.group.WORLD
    groups.tp = groups.cp = [dist.new_group([member]) for member in range(devices)][dist.get_rank()]
    return groups


def stock_config(devices: int, chunks: int, width: int, **settings: Any) -> TransformerConfig:
    """Return the configuration of a model with one layer per chunk; ``settings`` go to ``TransformerConfig``."""
    return TransformerConfig(
        num_layers=devices * chunks,
        hidden_size=width,
        num_attention_heads=1,
        pipeline_model_parallel_size=devices,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=devices if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        # As megatron.training sets them for each schedule.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        **settings,
    )


def tiny_step(
    devices: int,
    chunks: int,
    width: int,
    embed: Callable[..., torch.Tensor],
    batch: Callable[[Iterator], dict[str, torch.Tensor]],
    **settings: Any,
) -> Callable[..., object]:
    """Return a step of tiny chunks, with the function that Megatron's module has when it is called.

    The step takes that function's arguments except the model, its forward step and its groups. ``data_iterator`` is a list
    with one iterator per chunk, and ``batch`` reads the model's inputs from one of them.
    """
    groups, config = stock_groups(devices), stock_config(devices, chunks, width, **settings)

    def forward_step(data: Iterator, chunk: TinyChunk):
        return chunk(**batch(data)), lambda output: (output.sum(), {})

    keywords = {
        "forward_step_func": forward_step,
        "model": [TinyChunk(config, chunk if chunks > 1 else None, width, embed) for chunk in range(chunks)],
        "p2p_communicator": P2PCommunicator(groups.pp, config),
        "pg_collection": groups,
    }
    name = f"forward_backward_pipelining_with{'' if chunks > 1 else 'out'}_interleaving"
    return lambda **step: getattr(schedules, name)(**keywords, **step)
