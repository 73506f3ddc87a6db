"""Documents that share a sequence, of Megatron's own SFT data, train as on stock's schedule.

Megatron counts their tokens and squared lengths in every forward step, to log FLOPs. So they are counted once here.
"""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from test_context_parallel import CP2, DROPOUT, GROUPED, LATENT, MULTI_TOKEN, PP2, ROTARY
from test_experts import ALL_TO_ALL
from test_unequal import OVERLAP, TP_AND_SP
from test_variants import EVALUATION, RECOMPUTE
from test_vocabulary import LATER
from text_to_dataset import find_documents, write_dataset

OURS = ("--pipemem-recompute", "full")
OFFLOAD = ("--pipemem-offload", "full", "--pipemem-offload-option", "min_bytes=1KiB")
# name -> schedule, flags of stock too, flags of ours
CASES = {
    "recompute-in-schedule": ("v-half", (*GROUPED, *EVALUATION), OURS),
    "zb-h1": ("zb-h1", GROUPED, ()),
    "interleaved": ("interleaved", GROUPED, OURS),
    "wave": ("hanayo", GROUPED, ("--pipeline-model-parallel-layout", "Et||t||t|t||L")),
    "auto": ("auto", GROUPED, ()),
    "learned-positions": ("v-half", ("--bf16",), ()),
    "latent": ("zb-h1", LATENT, ()),
    "multi-token": ("v-half", MULTI_TOKEN, ()),
    "experts": ("v-half", ALL_TO_ALL, ()),
    "offload": ("v-half", GROUPED, OFFLOAD),
    "tensor-parallel": ("v-half", (*GROUPED, *TP_AND_SP), ()),
    "data-parallel": ("zb-h1", (*GROUPED, *OVERLAP), ()),
    "recompute-in-model": ("v-half", (*GROUPED, *RECOMPUTE), ()),
    "recompute-attention": ("zb-h1", (*GROUPED, "--recompute-granularity", "selective"), ()),
    "context-parallel": ("v-half", (*GROUPED, *CP2), ()),
    "context-parallel-zb-h1": ("zb-h1", (*GROUPED, *CP2), ()),
}
BOUNDED = ("experts", "recompute-in-model")  # whose prediction is an upper bound


@pytest.mark.parametrize(
    "name", rest_nightly(CASES, ["recompute-in-schedule", "context-parallel"], "the same mask with another feature")
)
def test_trains_as_stock(train_small, assert_same_training, packed, name):
    schedule, flags, ours = CASES[name]
    ranks = 4 if "--use-distributed-optimizer" in flags else None
    run = train_small(schedule, *packed, *flags, *ours, ranks=ranks)
    stock = train_small("stock", *packed, *flags, ranks=ranks)
    assert_same_training(run, stock)
    assert run.packed == stock.packed and run.packed[0][1][0] % 64 == 0
    if name not in BOUNDED:
        assert run.predicted_peaks == run.counted_peaks


@nightly("layerwise streams do not depend on the data")
def test_dropout_draws_as_stock(train, assert_same_training, packed):
    run, stock = (train(name, *packed, *DROPOUT, initialise=False) for name in ("v-half", "stock"))
    assert_same_training(run, stock)


@pytest.mark.parametrize(
    "schedule", rest_nightly(["chimera", "v-half", "interleaved", "zb-h1"], ["chimera"], "the same weights")
)
def test_unequal_microbatches(train_small, assert_close_training, packed, schedule):
    run = train_small(schedule, *packed, *GROUPED, "--pipemem-microbatch-costs", "FLOPs")
    stock = train_small("stock", *packed, *GROUPED)
    assert_close_training(run, stock)
    assert run.packed == stock.packed
    assert run.predicted_peaks == run.counted_peaks
    (plan,) = run.plans
    assert plan["planned_makespan"] <= plan["arrival_makespan"]


@nightly("test_vocabulary.py; labels are read ahead on stages that read more data here")
@pytest.mark.parametrize("schedule", ["v-half", "interleaved"])
def test_cut_vocabulary(train, packed, schedule):
    run, stock = train(schedule, *packed, *GROUPED, "--pipemem-vocab-parallel", "1"), train("stock", *packed, *GROUPED)
    assert run.losses == pytest.approx(stock.losses, rel=LATER)
    assert run.packed == stock.packed


@nightly("the same mask of the same positions")
def test_context_parallel_ranks_train_as_one(train, packed):
    flags = (*packed, *GROUPED, "--calculate-per-token-loss")  # else each rank averages over its own tokens
    run, whole = train("stock", *flags, *CP2), train("stock", *flags, *PP2, ranks=2)
    assert run.losses == pytest.approx(whole.losses, rel=1e-6)


@pytest.fixture(scope="module")
def short(documents, tmp_path_factory) -> tuple[str, ...]:
    """Flags of Megatron's pretraining data, of documents that end within a sequence."""
    folder = tmp_path_factory.mktemp("documents")
    for number, document in enumerate(documents[:200]):
        (folder / f"{number}.txt").write_text(document)
    write_dataset(find_documents(folder), folder / "short")
    return ("--data-path", str(folder / "short"), *ROTARY)


@pytest.mark.parametrize("schedule", rest_nightly(["1f1b", "v-half"], ["v-half"], "v-half"))
def test_documents_of_pretraining_data(train_small, assert_same_training, short, schedule):
    flags = ("--dataloader-inter-document-masking", *short)
    run, stock = train_small(schedule, *flags), train_small("stock", *flags)
    assert_same_training(run, stock)
    assert run.packed == stock.packed
    assert run.losses != train_small("stock", *short).losses
