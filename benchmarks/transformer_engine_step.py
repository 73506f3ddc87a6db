"""Steps of a middle pipeline rank with Transformer Engine's real Python at the widths of TP8, on CPU.

The kernels are the stand-in of ``tests/transformer_engine``, and the neighbours are torch's ``fake`` backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

TENSOR_RANKS = 8
LAYERS = 2
"""Layers of a chunk."""
_SEQUENCE, _WIDTH, _VOCABULARY = 32, 256, 512


def find_transformer_engine() -> None:
    """Put Transformer Engine's newest tested version on the module search path. Call it before Megatron is imported."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "transformer_engine"))
    import packages

    sys.path[:0] = packages.folders(packages.NEWEST)
    import te_stand_in  # noqa: F401  (makes Transformer Engine importable without its compiled part)


def connect_fake_ranks(devices: int, played: int) -> None:
    """Make this process the first tensor-parallel rank of a device among ranks of torch's ``fake`` backend."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    first, ranks = played * TENSOR_RANKS, devices * TENSOR_RANKS
    dist.init_process_group("fake", store=FakeStore(), rank=first, world_size=ranks)
    new_group = dist.new_group

    def new_fake_group(*arguments: Any, **keywords: Any) -> dist.ProcessGroup:
        return new_group(*arguments, **keywords | {"backend": "fake", "pg_options": None})

    with mock.patch.object(dist, "new_group", new_fake_group):
        parallel_state.initialize_model_parallel(TENSOR_RANKS, devices, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)


def layers_step(devices: int, microbatches: int) -> Callable[[], object]:
    """Return a step of new layers, with the function that Megatron's module has when it is called.

    The layers are built as the plugin wants them that is enabled now, or as stock's.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS * devices,
        hidden_size=_WIDTH,
        num_attention_heads=2 * TENSOR_RANKS,
        tensor_model_parallel_size=TENSOR_RANKS,
        pipeline_model_parallel_size=devices,
        sequence_parallel=True,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=True,
        overlap_p2p_comm=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        deallocate_pipeline_outputs=True,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        bias_activation_fusion=False,
        activation_func=torch.nn.functional.silu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(
        config, spec, _VOCABULARY, _SEQUENCE, pre_process=False, post_process=False, position_embedding_type="rope"
    )
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), model)
    config.no_sync_func = chunk.no_sync

    def forward_step(data: object, chunk: Callable) -> tuple[torch.Tensor, Callable]:
        return chunk(None, None, None), lambda output: (output.sum(), {})

    def step() -> object:
        chunk.zero_grad_buffer()
        return schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=[None],
            model=[chunk],
            num_microbatches=microbatches,
            seq_length=_SEQUENCE,
            micro_batch_size=1,
        )

    return step
