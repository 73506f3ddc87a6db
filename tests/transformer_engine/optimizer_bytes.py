"""Program that builds Megatron's optimizers for flags in its arguments, and prints the bytes that they hold.

Each argument has the flags of one run. Transformer Engine is on the path, and nothing of it is replaced but its kernels.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from unittest import mock

import te_stand_in  # noqa: F401 - before the CPU lane

from megatron_pipemem.tools.cpu import activate

activate()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.training.arguments import parse_args, validate_args  # noqa: E402
from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config  # noqa: E402
from transformer_engine.pytorch.optimizers import fused_sgd  # noqa: E402

WIDTH = 64
BASE = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --lr 1e-3 "
    "--micro-batch-size 1 --train-iters 1 --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --tokenizer-type NullTokenizer --vocab-size 63 "
    "--distributed-backend gloo"
)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors with an element per parameter, each storage once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def held(flags: str) -> dict[str, float]:
    """The bytes per parameter of gradients and optimizer on one rank, as they are after a step."""
    sys.argv = ["train", *shlex.split(f"{BASE} {flags}")]
    args = validate_args(parse_args())
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=args.params_dtype)
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=4)
    wrapped = DistributedDataParallel(config, get_megatron_ddp_config(args), model)
    own, overrides = get_megatron_optimizer_config(args)
    chained = get_megatron_optimizer(own, [wrapped], overrides)
    optimizer = chained.chained_optimizers[0] if hasattr(chained, "chained_optimizers") else chained
    for parameter in model.parameters():
        parameter.main_grad.fill_(1)
    inner = optimizer.optimizer
    if args.optimizer_cpu_offload:
        optimizer.step()
        parts = [inner.param_to_fp32_param.values()]
        parts += [state.values() for state in inner.state.values()]
    else:
        if args.use_precision_aware_optimizer:  # as its step does it
            for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
                stores_remainders = inner.store_param_remainders and parameter.dtype == torch.bfloat16
                inner.initialize_state(parameter, stores_remainders)
        elif optimizer.init_state_fn is not None:
            optimizer.init_state_fn(inner, own)
        else:
            with mock.patch.object(fused_sgd, "multi_tensor_applier"):  # a kernel, after the state exists
                optimizer.step()
        is_sharded = hasattr(optimizer, "shard_fp32_from_float16_groups")
        copies = "shard_fp32_from_float16_groups" if is_sharded else "fp32_from_float16_groups"
        parts = [*getattr(optimizer, copies, []), *(state.values() for state in inner.state.values())]
    own_tensors = [tensor for part in parts for tensor in part if isinstance(tensor, torch.Tensor)]
    tensors = [tensor for tensor in own_tensors if tensor.numel() >= WIDTH * WIDTH]  # numbers of steps are tensors too
    gradients = [buffer.grad_data for buffer in wrapped.buffers + wrapped.expert_parallel_buffers]
    count = WIDTH * WIDTH
    return {"gradient": bytes_of(gradients) / count, "state": bytes_of(tensors) / count}


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    byte_counts = {flags: held(flags) for flags in sys.argv[1:]}
    json.dump(byte_counts, sys.stdout)


main()
