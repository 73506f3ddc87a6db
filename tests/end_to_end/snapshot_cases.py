"""Optimizers of Megatron that take a step twice: once without clipping, and once, from the state before, with it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron_pipemem.features.overlap_steps.megatron.snapshot import Snapshot

WIDTH, STEPS, CLIP = 24, 4, 0.5


class Layers(MegatronModule):
    """A matrix, biases without weight decay, and a matrix of an expert, which has an optimizer of its own."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype):
        super().__init__(config)
        self.first = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.expert = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.expert.weight.allreduce = False
        self.last = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.expert(self.first(x)).relu()).sum()


class Training:
    """A model whose gradients depend on its weights and on the step, its optimizer, and a schedule of learning rates."""

    def __init__(self, bf16: bool, distributed: bool, overlapped: bool, name: str):
        dtype = torch.bfloat16 if bf16 else torch.float32
        config = TransformerConfig(
            num_layers=1, hidden_size=WIDTH, num_attention_heads=1, bf16=bf16, params_dtype=dtype
        )
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=overlapped,
            overlap_param_gather=overlapped,
            bucket_size=WIDTH * WIDTH if overlapped else None,
        )
        self.chunk = DistributedDataParallel(config, ddp, Layers(config, dtype))
        common = {"use_distributed_optimizer": distributed, "overlap_param_gather": overlapped, "weight_decay": 0.1}
        options = OptimizerConfig(
            optimizer=name, lr=0.01, bf16=bf16, params_dtype=dtype, clip_grad=CLIP, sgd_momentum=0.9, **common
        )
        self.optimizer = get_megatron_optimizer(options, [self.chunk])
        self.dtype = dtype

    def backward(self, step: int) -> None:
        """Leave the gradients of a step in the buffers, as finalized."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        self.chunk(torch.randn(8, WIDTH, generator=generator).to(self.dtype)).backward()
        self.chunk.finish_grad_sync()

    def unclipped(self) -> None:
        self.optimizer.prepare_grads()
        assert self.optimizer.step_with_ready_grads()

    def schedule(self, step: int) -> None:
        """Do what a scheduler does between steps."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"], group["weight_decay"] = 0.01 / (step + 2), 0.1 * (step + 1 + number)

    def state(self, own: bool = False) -> list:
        """Return all that later steps depend on, in a form that ``==`` compares to the bit.

        ``own`` asks for this rank's share of the model's parameters alone.
        """
        state_of: list = []
        for part in self.optimizer.chained_optimizers:
            inner = part.optimizer
            for group in inner.param_groups:
                state_of.append({name: value for name, value in group.items() if name != "params"})
                for parameter in group["params"]:
                    state_of.append(bits(parameter))
                    state = inner.state.get(parameter)
                    state_of.append(state and {name: bits(value) for name, value in state.items()})
        if not own:
            state_of += [bits(parameter) for parameter in self.chunk.parameters()]
        for part in self.optimizer.chained_optimizers if own else ():
            groups = getattr(part, "shard_float16_groups", getattr(part, "float16_groups", ()))
            state_of += [bits(parameter) for group in groups for parameter in group]
        return copy.deepcopy(state_of)

    def gathered(self) -> list:
        """The same, with every rank's share of the parameters."""
        if self.chunk.ddp_config.overlap_param_gather:
            self.chunk.start_param_sync(force_sync=True)
        return self.state()


def bits(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return (str(value.dtype), value.detach().contiguous().view(-1).view(torch.uint8).tolist())


def run(case: dict) -> dict:
    """Train with and without steps that are taken back."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    how = [case[name] for name in ("bf16", "distributed", "overlapped", "name")]
    plain, wanted = Training(*how), []
    norms = []
    for step in range(STEPS):
        plain.backward(step)
        norms.append(plain.optimizer.step()[1])
        plain.schedule(step)
        wanted.append(plain.gathered())
    assert min(norms) > CLIP, norms

    training = Training(*how)
    snapshot = Snapshot(training.optimizer)
    for step in range(STEPS):
        training.backward(step)
        before = training.state(own=True)
        snapshot.take()
        training.unclipped()
        training.schedule(step + 40)
        assert training.state(own=True) != before
        snapshot.restore()
        assert training.state(own=True) == before, step

        snapshot.take()
        training.unclipped()
        training.schedule(step)
        if case["overlapped"]:  # the forwards of the next step have begun, and asked for parameters
            *others, first = training.chunk.bucket_groups
            first.finish_param_sync()
            assert any(buckets.param_gather_handle is not None for buckets in others), "no gather is under way"
        with snapshot.rolled_back():
            assert training.optimizer.step()[1] == norms[step]
        assert training.state() == wanted[step], step
    nbytes = snapshot.nbytes
    snapshot.close()
    sizes = [p.numel() for part in training.optimizer.chained_optimizers for p in part.get_parameters()]
    return {"bytes": nbytes, "parameters": sum(sizes)}
