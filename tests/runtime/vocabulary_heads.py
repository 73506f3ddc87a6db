"""All shards of a head in one process, phase by phase, and the whole matrix in fp64."""

from __future__ import annotations

import torch
from vocabulary_model import Case, loss_gradient, shards_of, whole_losses

from megatron_pipemem.features.vocabulary.runtime.head import OneBarrier, VocabularyHead, combine, finish_input_gradient
from megatron_pipemem.features.vocabulary.runtime.shards import WeightShard


def heads_of(case: Case, weight: torch.Tensor) -> list[VocabularyHead]:
    heads = []
    for rank, piece in enumerate(shards_of(weight, case.partition)):
        parameter = torch.nn.Parameter(piece)
        if case.dtype != torch.float32:
            parameter.main_grad = torch.zeros(piece.shape)
        heads.append(VocabularyHead(WeightShard(parameter, case.partition, rank), case.options))
    return heads


def losses_of(heads: list[VocabularyHead], x: torch.Tensor, labels: torch.Tensor, **options) -> list:
    scored = [head.score(x, labels, **options) for head in heads]
    gathered = torch.stack([rank.statistics for rank in scored])
    return [combine(rank, gathered) for rank in scored]


def gradients_of(case: Case, done: list) -> torch.Tensor:
    """The input gradient, when all weight gradients have been added."""
    g = loss_gradient(done[0].losses, case.loss)
    if isinstance(done[0], OneBarrier):
        total = torch.stack([rank.input_gradient() for rank in done]).sum(0)
        for rank in done:
            rank.add_weight_gradient(g)
        return finish_input_gradient(total, case.dtype, done[0].without_ignored(g))
    return finish_input_gradient(torch.stack([rank.gradients(g) for rank in done]).sum(0), case.dtype)


def joined_gradient(heads: list[VocabularyHead]) -> torch.Tensor:
    gradients = []
    for head in heads:
        parameter = head.shard.parameter
        gradients.append(getattr(parameter, "main_grad", parameter.grad))
    return torch.cat(gradients)


def sharded(case: Case, weight: torch.Tensor, x: torch.Tensor, labels: torch.Tensor):
    """Losses, input gradient and weight gradient of one microbatch."""
    heads = heads_of(case, weight)
    done = losses_of(heads, x, labels)
    for rank in done:
        torch.testing.assert_close(rank.losses, done[0].losses, rtol=0, atol=0, equal_nan=True)
    dx = gradients_of(case, done)
    return done[0].losses, dx, joined_gradient(heads)


def whole(case: Case, weight: torch.Tensor, x: torch.Tensor, labels: torch.Tensor):
    weight, x = weight.double().requires_grad_(), x.double().requires_grad_()
    losses = whole_losses(x @ weight.t(), labels, case.options)
    case.loss(losses).backward()
    return losses.detach(), x.grad, weight.grad


def inputs_of(case: Case, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(*case.shape, case.hidden, generator=case.generator(5)) * spread
    return case.matrix(1), x.to(case.dtype), case.batch()[1]


def assert_close(result, wanted, relative: float, what: str = "") -> None:
    """Largest difference against the largest entry."""
    assert result.shape == wanted.shape
    if wanted.numel():
        error = (result.double() - wanted).abs().max().item()
        assert error <= relative * wanted.abs().max().item() + 1e-9, f"{what}: {error}"
