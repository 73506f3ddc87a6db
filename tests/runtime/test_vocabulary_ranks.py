"""Embedding and head on real gloo ranks with their collectives, against the whole model in one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from vocabulary_model import EXAMPLE, WORLD, Case, run_whole

from megatron_pipemem.features.vocabulary.runtime.head import HeadOptions

CASES = [
    *(
        Case(
            *(vocab_size, ranks),
            tied=tied,
            microbatches=2,
            masked=(1, 4),
            ignored=(2, 3),
            options=HeadOptions(barriers=barriers, piece_tokens=2 if tied else None),
        )
        for vocab_size, ranks, tied, barriers in product((3, 50, 101), (1, 3, 4), (False, True), (1, 2))
    ),
    *(
        Case(
            *(101, 4),
            tied=True,
            microbatches=2,
            per_token=True,
            loss_scale=512.0,
            dtype=dtype,
            options=HeadOptions(barriers, 4, scale=0.5),
        )
        for dtype, barriers in [
            (torch.float32, 1),
            (torch.bfloat16, 1),
            (torch.bfloat16, 2),
            (torch.float16, 1),
            (torch.float16, 2),
        ]
    ),
]
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.fixture(scope="module")
def seen(rank_files: Path) -> list[list[dict[str, torch.Tensor] | None]]:
    """``seen[rank][case]``."""
    return [torch.load(rank_files / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_the_sharded_model_is_the_whole_one(index, seen):
    case, wanted = CASES[index], run_whole(CASES[index])
    ranks = [rank[index] for rank in seen[WORLD - case.ranks :]]
    assert all(rank[index] is None for rank in seen[: WORLD - case.ranks])
    whole = {name: torch.cat([rank[name] for rank in ranks]) for name in ("embedding", "head")}
    whole["input_gradients"] = ranks[-1]["input_gradients"]
    whole["losses"] = ranks[0]["losses"]
    for name, want in wanted.items():
        error = (whole[name] - want).abs().max() / want.abs().max()
        assert error < RELATIVE[case.dtype], (name, error)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_losses_and_gathered_logits_are_the_same_on_every_rank(index, seen):
    case = CASES[index]
    ranks = [rank[index] for rank in seen[WORLD - case.ranks :]]
    assert all(torch.equal(rank["losses"], ranks[0]["losses"]) for rank in ranks)
    assert all(torch.equal(rank["logits"], ranks[0]["logits"]) for rank in ranks)
    x = torch.tanh(case.matrix(0)[torch.stack([case.batch(i)[0] for i in range(case.microbatches)])].double())
    logits = x @ case.matrix(1).double().t() * case.options.scale
    torch.testing.assert_close(
        ranks[0]["logits"].double(), logits, rtol=RELATIVE[case.dtype], atol=RELATIVE[case.dtype]
    )


def test_the_example_of_the_docstring_works_as_printed(seen):
    wanted = run_whole(EXAMPLE)
    ranks = [rank[len(CASES)] for rank in seen]
    whole = {
        "head": torch.cat([rank["head"] for rank in ranks]),
        "input_gradients": ranks[-1]["input_gradients"][None],
    }
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-6, atol=1e-7)
