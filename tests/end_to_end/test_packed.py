"""Documents that share a sequence, of Megatron's own SFT data, train as on stock's schedule.

Megatron counts their tokens and squared lengths in every forward step, to log FLOPs. So they are counted once here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from comparing import assert_close_training
from lanes import nightly, rest_nightly
from model_flags import (
    ALL_TO_ALL,
    CP2,
    DISTRIBUTED,
    EVALUATION,
    GROUPED,
    LAYOUT,
    MULTI_TOKEN,
    OFFLOADED,
    RECOMPUTED,
    ROPE,
    SIX,
    TP_AND_SP,
    UNTIED,
    UNTIED_LATENT,
    VOCABULARY,
)
from test_vocabulary import LATER
from text_to_dataset import find_documents, write_dataset

# name -> schedule, flags of stock too, flags of ours
CASES = {
    "recomputed, evaluation": ("v-half", (*GROUPED, *EVALUATION), RECOMPUTED),
    "context parallel": ("v-half", (*GROUPED, *CP2), ()),
    "interleaved, recomputed": ("interleaved", GROUPED, RECOMPUTED),
    "wave": ("hanayo", GROUPED, (LAYOUT, "Et||t||t|t||L")),
    "latent": ("zb-h1", UNTIED_LATENT, ()),
    "multi-token": ("v-half", MULTI_TOKEN, ()),
    "experts": ("v-half", ALL_TO_ALL, ()),
    "offloaded": ("v-half", GROUPED, OFFLOADED),
    "tensor parallel": ("v-half", (*GROUPED, *TP_AND_SP), ()),
    "data parallel": ("zb-h1", (*GROUPED, *DISTRIBUTED, *SIX), ()),
}
FULL_LANE = ("recomputed, evaluation", "context parallel")


@pytest.mark.parametrize("name", rest_nightly(CASES, FULL_LANE, "the same mask with another feature"))
def test_trains_as_stock(equals_stock, packed, name):
    schedule, flags, ours = CASES[name]
    nbytes = "bounded" if name == "experts" else "exact"
    run, stock = equals_stock(schedule, *packed, *flags, ours=ours, nbytes=nbytes)
    assert run.packed == stock.packed and run.packed[0][1][0] % 64 == 0


def test_unequal_microbatches(equals_stock, packed):
    ours = ("--pipemem-microbatch-costs", "FLOPs")
    run, stock = equals_stock("chimera", *packed, *GROUPED, ours=ours, close=True)
    assert run.packed == stock.packed
    (plan,) = run.plans
    assert plan["planned_makespan"] <= plan["arrival_makespan"]


@nightly("test_vocabulary.py; labels are read ahead on stages that read more data here")
def test_cut_vocabulary(train_small, packed):
    run, stock = (train_small(*ours, *packed, *GROUPED) for ours in (("v-half", VOCABULARY, "1"), ("stock",)))
    assert_close_training(run, stock, LATER)
    assert run.packed == stock.packed


def test_documents_of_pretraining_data(train_small, equals_stock, documents, tmp_path):
    """Of documents that end within a sequence."""
    for number, document in enumerate(documents[:200]):
        (tmp_path / f"{number}.txt").write_text(document)
    write_dataset(find_documents(tmp_path), tmp_path / "short")
    short = ("--data-path", str(tmp_path / "short"), *ROPE, UNTIED)
    run, stock = equals_stock("v-half", "--dataloader-inter-document-masking", *short)
    assert run.packed == stock.packed
    assert run.losses != train_small("stock", *short).losses


def test_layers_with_states_know_the_document_of_every_token(monkeypatch):
    """Else a Mamba layer would hand its state on to the next document, under every schedule."""
    import gpt_pretraining

    monkeypatch.setattr(gpt_pretraining, "get_args", lambda: SimpleNamespace(seq_length=16))
    monkeypatch.setattr(gpt_pretraining.training, "update_seqlen_stats_from_cu_seqlens", lambda ends: None)
    batch = {"cu_seqlens": torch.tensor([[0, 5, 16]], dtype=torch.int32), "max_seqlen": torch.tensor(11)}
    assert gpt_pretraining._packed_params(batch).seq_idx.tolist() == [[0] * 5 + [1] * 11]
