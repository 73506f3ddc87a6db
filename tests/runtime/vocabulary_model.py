"""The smallest model with a vocabulary, whole in fp64 and sharded: embedding, tanh, LM head, cross entropy.

The sharded one runs on the ranks of a process group.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_pipemem.features.vocabulary import runtime
from megatron_pipemem.features.vocabulary.runtime import collectives
from megatron_pipemem.features.vocabulary.runtime.head import (
    HeadOptions,
    OneBarrier,
    VocabularyHead,
    combine,
    finish_input_gradient,
)
from megatron_pipemem.features.vocabulary.runtime.shards import VocabularyEmbedding, VocabularyPartition, WeightShard

WORLD = 4


@dataclass(frozen=True)
class Case:
    """Sizes and options of one run.

    Args:
        masked: tokens that the loss mask leaves out.
        ignored: tokens without a label.
        per_token: sum of the token losses instead of their mean.
    """

    vocab_size: int
    ranks: int
    shape: tuple[int, ...] = (3, 2)
    hidden: int = 4
    tied: bool = False
    masked: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    per_token: bool = False
    loss_scale: float = 1.0
    dtype: torch.dtype = torch.float32
    microbatches: int = 1
    spread: float = 1.0
    seed: int = 0
    options: HeadOptions = field(default_factory=HeadOptions)

    @property
    def partition(self) -> VocabularyPartition:
        return VocabularyPartition(self.vocab_size, self.ranks)

    def generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1000 + salt)

    def matrix(self, which: int) -> torch.Tensor:
        """The embedding's weights (0) or the head's (1), whole, in the case's dtype."""
        shape = self.vocab_size, self.hidden
        return (torch.randn(shape, generator=self.generator(0 if self.tied else which)) * self.spread).to(self.dtype)

    def batch(self, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels."""
        pair = torch.randint(self.vocab_size, (2, *self.shape), generator=self.generator(10 + microbatch))
        for index, token in enumerate(self.ignored):
            pair[1].view(-1)[token] = (-100, self.vocab_size)[index % 2]
        return pair[0], pair[1]

    def loss(self, losses: torch.Tensor) -> torch.Tensor:
        """What a trainer makes of the token losses."""
        mask = torch.ones_like(losses)
        mask.view(-1)[list(self.masked)] = 0
        loss = (losses * mask).sum()
        return (loss if self.per_token else loss / mask.sum().clamp(min=1)) * self.loss_scale


EXAMPLE = Case(30, 4)


def whole_losses(logits: torch.Tensor, labels: torch.Tensor, options: HeadOptions) -> torch.Tensor:
    """Token losses of unsharded logits by torch's own functions."""
    logits = logits * options.scale
    valid = (labels >= 0) & (labels < logits.size(-1))
    labels = torch.where(valid, labels, -100)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100
    )
    return losses.view(labels.shape)


def loss_gradient(losses: torch.Tensor, loss_function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """How the training loss depends on every token's."""
    leaf = losses.detach().requires_grad_()
    return torch.autograd.grad(loss_function(leaf), leaf)[0]


def shards_of(weight: torch.Tensor, partition: VocabularyPartition) -> list[torch.Tensor]:
    """Copies of the rows of every rank."""
    return [piece.clone() for piece in weight.tensor_split(partition.shards)]


def run_whole(case: Case) -> dict[str, torch.Tensor]:
    """The unsharded model in fp64, from the same (rounded) weights."""
    embedding = case.matrix(0).double().requires_grad_()
    head = embedding if case.tied else case.matrix(1).double().requires_grad_()
    losses, inputs = [], []
    for microbatch in range(case.microbatches):
        tokens, labels = case.batch(microbatch)
        x = torch.tanh(embedding[tokens])
        x.retain_grad()
        inputs.append(x)
        losses.append(whole_losses(x @ head.t(), labels, case.options))
        case.loss(losses[-1]).backward()
    return {
        "losses": torch.stack(losses).detach(),
        "input_gradients": torch.stack([x.grad for x in inputs]),
        "embedding": embedding.grad,
        "head": head.grad,
    }


def run_rank(case: Case, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The sharded model on one rank: first stage on the group's rank 0, last stage (with the loss) on its last rank."""
    partition, rank = case.partition, group.rank()
    first, last = 0, group.size() - 1
    parameters = [torch.nn.Parameter(shards_of(case.matrix(which), partition)[rank]) for which in (0, 1)]
    if case.tied:
        parameters[1] = parameters[0]
    if case.dtype != torch.float32:
        for parameter in parameters:
            parameter.main_grad = torch.zeros(parameter.shape)
    shards = [WeightShard(parameter, partition, rank) for parameter in parameters]
    embedding, head = VocabularyEmbedding(shards[0]), VocabularyHead(shards[1], case.options)
    seen = {"losses": [], "input_gradients": [], "logits": []}
    for microbatch in range(case.microbatches):
        tokens, labels = case.batch(microbatch)
        output = collectives.reduce_sum(embedding(tokens), first, group).wait()
        assert (output is None) == (rank != first)
        output = torch.empty(*case.shape, case.hidden, dtype=case.dtype) if output is None else output
        output = collectives.broadcast(output, first, group).wait().requires_grad_()
        x = torch.tanh(output)
        sent = x.detach().clone() if rank == last else torch.empty_like(x)
        sent = collectives.broadcast(sent, last, group).wait()

        scored = head.score(sent, labels)
        everyones = torch.empty(group.size(), *scored.statistics.shape)
        done = combine(scored, collectives.gather_statistics(scored.statistics, everyones, group).wait())
        if isinstance(done, OneBarrier):
            under_way = collectives.reduce_sum(done.input_gradient(), last, group)
        g = loss_gradient(done.losses, case.loss) if rank == last else torch.empty(case.shape)
        g = collectives.broadcast(g, last, group).wait()
        if isinstance(done, OneBarrier):
            done.add_weight_gradient(g)
            factor = done.without_ignored(g)
        else:
            under_way, factor = collectives.reduce_sum(done.gradients(g), last, group), None
        total = under_way.wait()
        back = torch.empty_like(output)
        if rank == last:
            dx = finish_input_gradient(total, case.dtype, factor)
            seen["input_gradients"].append(dx)
            back = torch.autograd.grad(x, output, dx)[0]
        back = collectives.broadcast(back, last, group).wait()
        embedding.add_weight_gradient(tokens, back)
        seen["losses"].append(done.losses)
        gathered = collectives.gather_logits(head.logits(sent), partition, group).wait()
        seen["logits"].append(collectives.joined_logits(gathered, partition))
    seen = {name: torch.stack(tensors) for name, tensors in seen.items() if tensors}
    for name, parameter in zip(("embedding", "head"), parameters, strict=True):
        seen[name] = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
    return seen


def run_example(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The code of the package's docstring, on this rank."""
    namespace: dict = {}
    exec(re.search(r"```python\n(.*?)```", runtime.__doc__, re.DOTALL)[1], namespace)
    rank, last = group.rank(), group.size() - 1
    parameter = torch.nn.Parameter(shards_of(EXAMPLE.matrix(1), EXAMPLE.partition)[rank])
    head = VocabularyHead(WeightShard(parameter, EXAMPLE.partition, rank))
    x = torch.tanh(EXAMPLE.matrix(0)[EXAMPLE.batch()[0]])
    sent = x if rank == last else torch.empty_like(x)
    dx = namespace["head_pass"](head, sent, EXAMPLE.batch()[1], EXAMPLE.loss, last, group)
    return {"head": parameter.grad} if dx is None else {"head": parameter.grad, "input_gradients": dx}


def run_cases(cases: list[Case], out: Path) -> None:
    world = dist.get_world_size()
    groups = {size: dist.new_group(range(world - size, world)) for size in range(1, world + 1)}
    member = {size: dist.get_rank() >= world - size for size in groups}
    seen = [run_rank(case, groups[case.ranks]) if member[case.ranks] else None for case in cases]
    seen.append(run_example(groups[world]))
    torch.save(seen, out / f"rank{dist.get_rank()}.pt")
