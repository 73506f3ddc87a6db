"""Sequences that run in slices train as whole ones do.

Bits differ: attention sums over the keys that are there, stock over all of them with those behind masked; and a weight's
gradient is summed over slices first.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from lanes import nightly, rest_nightly
from quickstart import ROUNDING
from test_variants import EVALUATION, RECOMPUTE, UNTIED
from test_vocabulary import DISTRIBUTED, SEARCH, TP2
from text_to_dataset import END_OF_DOCUMENT, write_dataset

ROPE = ("--position-embedding-type", "rope")
# What LLAMA of test_variants has, but for the gated MLP, whose gradients nobody notes whole.
GROUPED = (
    *("--normalization", "RMSNorm", "--disable-bias-linear", UNTIED, *ROPE),
    *("--group-query-attention", "--num-query-groups", "2"),
)
MLA = (
    *("--multi-latent-attention", "--kv-lora-rank", "16", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", UNTIED),
    *("--v-head-dim", "8", "--normalization", "RMSNorm", "--rotary-scaling-factor", "1", "--rope-type", "rope"),
)
EXPERTS = (
    *("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--moe-router-load-balancing-type", "none"),
)
BY_FLOPS = ("--pipemem-slice-cut", "flops")

VOCABULARY = "--pipemem-vocab-parallel"


def cut(slices: int) -> tuple[str, ...]:
    return ("--pipemem-option", f"slices={slices}")


# name -> schedule, flags of ours, flags of stock too
CASES = {
    "learned positions": ("seq1f1b", cut(4), ()),
    "rope": ("seq1f1b", cut(2), ROPE),
    "grouped queries": ("seq1f1b", cut(8), GROUPED),
    "latent attention": ("seq1f1b", cut(4), MLA),
    "sequence parallel": ("seq1f1b", cut(2), (*TP2, "--sequence-parallel", *ROPE)),
    "equal FLOPs": ("seq1f1b", (*cut(4), *BY_FLOPS), GROUPED),
    "v-half, equal FLOPs": ("v-half", (*cut(4), *BY_FLOPS), ROPE),
    "recomputed": ("seq1f1b", (*cut(2), "--pipemem-recompute", "full"), GROUPED),
    "recomputed in part": ("seq1f1b", (*cut(2), "--pipemem-recompute", "selective"), GROUPED),
    "recomputed by the model": ("seq1f1b", cut(2), (*GROUPED, *RECOMPUTE)),
    "attention recomputed by the model": ("seq1f1b", cut(2), (*GROUPED, "--recompute-granularity", "selective")),
    "loss per token": ("seq1f1b", cut(2), ("--calculate-per-token-loss", *ROPE)),
    "evaluation": ("seq1f1b", cut(2), (*EVALUATION, *ROPE)),
    "offloaded": (
        "seq1f1b",
        (*cut(4), "--pipemem-offload", "full", "--pipemem-offload-option", "min_bytes=1B"),
        GROUPED,
    ),
    "v-half, offloaded": (
        "v-half",
        (*cut(2), "--pipemem-offload", "half", "--pipemem-offload-option", "min_bytes=1B"),
        GROUPED,
    ),
    "slimpipe": ("slimpipe", cut(4), ROPE),
    "interleaved": ("interleaved", cut(4), ROPE),
    "sliding window": ("zb-h1", cut(4), (*ROPE, "--window-size", "20,0")),
    "searched": ("auto", ("--pipemem-option", "slices=2", *SEARCH), GROUPED),
    "v-half": ("v-half", cut(2), GROUPED),
    "zbv": ("zbv", cut(4), ROPE),
    "v-half, tensor parallel": ("v-half", cut(2), (*TP2, *ROPE)),
    "v-half, evaluation": ("v-half", cut(2), (*EVALUATION, *ROPE)),
    "one microbatch": ("seq1f1b", cut(8), ("--global-batch-size", "1", "--calculate-per-token-loss", *ROPE)),
    "two barriers of a cut vocabulary": ("seq1f1b", (*cut(4), VOCABULARY, "1"), ()),
    "one barrier of a cut vocabulary": ("seq1f1b", (*cut(4), VOCABULARY, "2"), GROUPED),
    "v-half, cut vocabulary": ("v-half", (*cut(2), VOCABULARY, "1"), (*GROUPED, "--micro-batch-size", "2")),
    "sequence parallel, cut vocabulary": (
        "seq1f1b",
        (*cut(2), VOCABULARY, "1"),
        (*TP2, "--sequence-parallel", *ROPE),
    ),
    "zbv, cut vocabulary, experts, evaluation": (
        *("zbv", (*cut(4), *BY_FLOPS, VOCABULARY, "2"), (*EVALUATION, *ROPE, *EXPERTS)),
    ),
    "one microbatch, cut vocabulary": (
        "interleaved",
        (*cut(8), VOCABULARY, "2"),
        ("--global-batch-size", "1", "--calculate-per-token-loss", *ROPE),
    ),
    "two sequences a microbatch": ("seq1f1b", cut(2), (*GROUPED, "--micro-batch-size", "2")),
}
DOCUMENTS = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
BY_THE_MODEL = {"recomputed by the model", "attention recomputed by the model"}


def differences(run, stock) -> dict:
    return {key: float((run.gradients[key] - wanted).norm() / wanted.norm()) for key, wanted in stock.gradients.items()}


# Of two cases with the same flags and another schedule or another part of the model, one: that with the cut vocabulary too.
NIGHTLY = {
    "slimpipe",
    *("learned positions", "sequence parallel", "v-half, equal FLOPs", "v-half, evaluation"),
    *(
        "rope",
        "sliding window",
        "equal FLOPs",
        "recomputed in part",
        "recomputed by the model",
        "loss per token",
        "evaluation",
    ),
    *("v-half, offloaded", "v-half", "zbv", "v-half, tensor parallel", "one barrier of a cut vocabulary"),
    *("one microbatch, cut vocabulary", "two sequences a microbatch"),
}


@pytest.mark.parametrize("name", rest_nightly(CASES, CASES.keys() - NIGHTLY, "a case with the same flags"))
def test_trains_as_stock(train_small, assert_close_training, name):
    schedule, ours, flags = CASES[name]
    stock, run = (train_small(*each, *flags, gradients=True) for each in (("stock",), (schedule, *ours)))
    assert_close_training(run, stock)
    if name not in BY_THE_MODEL:  # Megatron's recomputation is never foretold to the byte
        assert run.predicted_peaks == run.counted_peaks and min(run.counted_peaks) > 0
    assert run.gradients.keys() == stock.gradients.keys()
    assert {key: off for key, off in differences(run, stock).items() if not off <= 1e-6} == {}


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    """A data set whose documents are lines of text: every sequence has several, and slices begin within some of them."""
    folder = tmp_path_factory.mktemp("lines")
    found = [line for line in Path(textwrap.__file__).read_text().splitlines() if 8 <= len(line) <= 50]
    documents = [folder / f"{number:04}.txt" for number in range(len(found))]
    for document, line in zip(documents, found, strict=True):
        document.write_text(line)
    write_dataset(documents, folder / "lines")
    return folder / "lines"


@pytest.mark.parametrize(
    ("whole", "schedule", "ours"),
    [
        pytest.param("stock", "seq1f1b", cut(8), marks=nightly("slices of other lengths")),
        ("stock", "seq1f1b", (*cut(4), *BY_FLOPS)),
        # Only stages that read data get masks, so that V schedules are compared with their own whole microbatches.
        pytest.param("zbv", "zbv", cut(4), marks=nightly("the same masks in seq1f1b")),
    ],
)
def test_documents_do_not_see_each_other(train_small, assert_close_training, lines, whole, schedule, ours):
    text = ("--data-path", str(lines), "--vocab-size", str(END_OF_DOCUMENT + 1))
    flags = (*text, *DOCUMENTS)
    expected, run = (train_small(*each, *flags, gradients=True) for each in ((whole,), (schedule, *ours)))
    assert_close_training(run, expected)
    assert run.predicted_peaks == run.counted_peaks
    assert {key: off for key, off in differences(run, expected).items() if not off <= 1e-6} == {}
    if whole == "stock":
        seen = train_small(whole, *text, "--eod-mask-loss")
        assert expected.losses != pytest.approx(seen.losses, rel=1e-4), "masks that hide nothing would show nothing"


def test_activations_of_slices_leave_the_device(train_small):
    """Otherwise the offloaded cases above would show nothing."""
    schedule, ours, flags = CASES["offloaded"]
    whole, away = (train_small(schedule, *own, *flags, gradients=True) for own in (cut(4), ours))
    assert max(away.counted_peaks) < max(whole.counted_peaks)
    assert min(away.of_ranks("counted_host_peak_bytes")) > 0


@pytest.mark.parametrize(
    ("flags", "within"),
    [
        (("--bf16",), 2e-3),
        pytest.param(
            ("--fp16", "--initial-loss-scale", "4096"), 5e-4, marks=nightly("bf16 here, fp16 in test_variants.py")
        ),
    ],
)
def test_trains_in_16_bits(train_small, flags, within):
    stock, run = (train_small(*each, *flags, *ROPE) for each in (("stock",), ("seq1f1b", *cut(4))))
    assert run.losses == pytest.approx(stock.losses, rel=within)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=10 * within)


def test_costs_are_measured_slice_by_slice(train_small):
    steps = ("--train-iters", "6")
    measured = ("--pipemem-costs", "profile", "--pipemem-vocab-parallel", "1")
    stock, run = (train_small(*each, *steps, *ROPE) for each in (("stock",), ("seq1f1b", *cut(2), *measured)))
    assert run.losses == pytest.approx(stock.losses, rel=1e-5)
    assert run.predicted_peaks == run.counted_peaks and min(run.counted_peaks) > 0
    assert [plan["priced_by"] for plan in run.plans] == ["unit", "measured"]
    assert all(len(plan["costs"]["forward"]) == 2 and min(plan["costs"]["forward"]) > 0 for plan in run.plans)


def test_gradients_are_summed_over_data_parallel_ranks(train_small, assert_close_training):
    stock, run = (train_small(*each, *DISTRIBUTED, *ROPE, ranks=4) for each in (("stock",), ("seq1f1b", *cut(4))))
    assert_close_training(run, stock)


@nightly("slices keep nothing between steps; test_checkpoints.py")
def test_checkpoints_are_stocks(train, tmp_path):
    train("seq1f1b", *cut(2), *ROPE, "--save", str(tmp_path), "--save-interval", "2")
    load = ("--train-iters", "4", "--load", str(tmp_path), "--override-opt_param-scheduler")
    resumed = train("stock", *ROPE, *load, initialise=False)
    assert resumed.losses == pytest.approx(train("stock", *ROPE, "--train-iters", "4").losses[2:], rel=ROUNDING)
