"""Sequences that run in slices train as whole ones do.

Bits differ: attention sums over the keys that are there, stock over all of them with later ones masked; and a weight's
gradient is summed over slices first.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from comparing import assert_close_gradients, assert_close_training, assert_predicted_bytes
from lanes import nightly, rest_nightly
from model_flags import (
    ALL_TO_ALL,
    BY_FLOPS,
    CP2,
    DISTRIBUTED,
    EVALUATION,
    EXPERTS,
    MULTI_TOKEN,
    OVERLAP,
    RECOMPUTE,
    RECOMPUTED,
    ROPE,
    SELECTIVE,
    TP_AND_SP,
    UNTIED,
    UNTIED_LATENT,
    VOCABULARY,
)
from test_vocabulary import SEARCH
from text_to_dataset import END_OF_DOCUMENT, write_dataset

# What LLAMA has, but for the gated MLP, whose gradients are not noted whole.
GROUPED = (
    *("--normalization", "RMSNorm", "--disable-bias-linear", UNTIED, *ROPE),
    *("--group-query-attention", "--num-query-groups", "2"),
)
ONE = ("--global-batch-size", "1", "--calculate-per-token-loss")
TWO_SEQUENCES = ("--micro-batch-size", "2")
BALANCED = (
    *(*EXPERTS, *ROPE, UNTIED, "--moe-z-loss-coeff", "0.01"),
    *("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    *("--moe-aux-loss-coeff", "0.1", "0.2", "0.3"),
    *(
        "--moe-router-score-function",
        "sigmoid",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate",
        "0.1",
    ),
)
SHARED_BY_TWO = (*CP2, "--cp-comm-type", "all_gather")
ON_TWO_RANKS = (*TP_AND_SP, *ALL_TO_ALL, "--expert-tensor-parallel-size", "1")


def cut(slices: int) -> tuple[str, ...]:
    return ("--pipemem-option", f"slices={slices}")


MOVED = ("--pipemem-offload", "full", "--pipemem-offload-option", "min_bytes=1B")
# name -> schedule, flags of ours, flags of stock too
CASES = {
    "grouped queries": ("seq1f1b", cut(8), GROUPED),
    "latent attention": ("seq1f1b", cut(4), (*UNTIED_LATENT, "--normalization", "RMSNorm")),
    "recomputed": ("seq1f1b", (*cut(2), *RECOMPUTED), GROUPED),
    "attention recomputed by the model": ("seq1f1b", cut(2), (*GROUPED, *SELECTIVE)),
    "offloaded": ("seq1f1b", (*cut(4), *MOVED), GROUPED),
    "interleaved": ("interleaved", cut(4), ROPE),
    "searched": ("auto", (*cut(2), *SEARCH), GROUPED),
    "one microbatch, learned positions": ("interleaved", cut(8), ONE),
    "two barriers": ("seq1f1b", (*cut(4), VOCABULARY, "1"), ()),
    "v-half, two barriers": ("v-half", (*cut(2), VOCABULARY, "1"), (*GROUPED, *TWO_SEQUENCES)),
    "sequence parallel, two barriers": ("seq1f1b", (*cut(2), VOCABULARY, "1"), (*TP_AND_SP, *ROPE)),
    "zbv, one barrier, experts, evaluation": (
        *("zbv", (*cut(4), *BY_FLOPS, VOCABULARY, "2"), (*EVALUATION, *BALANCED)),
    ),
    "experts recomputed by the model": (
        *("seq1f1b", (*cut(4), *BY_FLOPS), (*BALANCED, *RECOMPUTE, *TWO_SEQUENCES, "--calculate-per-token-loss")),
    ),
    "experts on two ranks, recomputed": ("zb-h1", (*cut(2), *RECOMPUTED), (*BALANCED, *ON_TWO_RANKS)),
    "experts on two ranks, recomputed by the model, two barriers": (
        *("zb-h1", (*cut(2), VOCABULARY, "1")),
        (*BALANCED, *ON_TWO_RANKS, *RECOMPUTE, *TWO_SEQUENCES, "--calculate-per-token-loss"),
    ),
    "further tokens, per token": (
        "zb-h1",
        (*cut(4), *BY_FLOPS),
        (*MULTI_TOKEN, *TWO_SEQUENCES, "--calculate-per-token-loss"),
    ),
    "further tokens with experts, evaluation": ("interleaved", cut(4), (*BALANCED, *MULTI_TOKEN, *EVALUATION)),
    "slimpipe": ("slimpipe", cut(4), ROPE),
    "recomputed in part": ("seq1f1b", (*cut(2), "--pipemem-recompute", "selective"), GROUPED),
    "sinks, every second layer with a sliding window": (
        "zb-h1",
        cut(4),
        (*GROUPED, "--softmax-type", "learnable", "--window-size", "20,0", "--window-attn-skip-freq", "2"),
    ),
}
LANE = (
    "offloaded",
    "searched",
    "one microbatch, learned positions",
    "zbv, one barrier, experts, evaluation",
    "experts on two ranks, recomputed by the model, two barriers",
    "further tokens, per token",
)


@pytest.mark.parametrize("name", rest_nightly(CASES, LANE, "cases here with the same parts, and packed ones below"))
def test_trains_as_stock(equals_stock, tmp_path_factory, name):
    """With experts and further tokens, their losses too, as they are logged."""
    schedule, ours, flags = CASES[name]
    # Megatron's recomputation is not predicted to the byte.
    nbytes = None if "by the model" in name else "bounded" if "experts" in name else "exact"
    has_losses = "experts" in name or "further" in name
    if has_losses:
        flags = (*flags, "--tensorboard-dir", str(tmp_path_factory.getbasetemp()), "--tensorboard-log-interval", "1")
    run, stock = equals_stock(schedule, *flags, ours=ours, close=True, nbytes=nbytes, within=1e-6)
    if name == "offloaded":
        assert min(run.of_ranks("counted_host_peak_bytes")) > 0
    if not has_losses:
        return
    logged, wanted = (
        {
            f"{name} {at}": value
            for name, at, value in of.scalars
            if name.endswith(("balancing_loss", "z_loss")) or name.startswith("mtp_")
        }
        for of in (run, stock)
    )
    assert wanted and logged == pytest.approx(wanted, rel=2e-6)


PACKED = {
    "latent attention, recomputed": ("zbv", (*cut(8), *RECOMPUTED), UNTIED_LATENT),
    "recomputed by the model": ("seq1f1b", cut(4), (*GROUPED, *RECOMPUTE)),
    "grouped queries": ("zb-h1", cut(4), GROUPED),
    "learned positions, one barrier": ("v-half", (*cut(4), *BY_FLOPS, VOCABULARY, "2"), ()),
    "experts": ("zbv", cut(4), BALANCED),
    "further tokens": ("seq1f1b", cut(4), (*GROUPED, *MULTI_TOKEN)),
}


@pytest.mark.parametrize("name", rest_nightly(PACKED, [*PACKED][:1], "the same masks with other layers"))
def test_packed_documents_train_as_stock(equals_stock, packed, name):
    """Slices begin within documents, and documents end within slices. Their tokens are counted once, to log FLOPs."""
    schedule, ours, flags = PACKED[name]
    nbytes = None if "by the model" in name else "bounded" if name == "experts" else "exact"
    run, stock = equals_stock(schedule, *packed, *flags, ours=ours, close=True, nbytes=nbytes, within=1e-6)
    assert run.packed == stock.packed


@nightly("test_context_parallel_ranks_share_slices, without packed documents")
@pytest.mark.parametrize(
    ("schedule", "ours", "flags"),
    [("zbv", (*cut(4), *BY_FLOPS, *RECOMPUTED), GROUPED), ("zb-h1", cut(2), UNTIED_LATENT)],
    ids=["grouped queries", "latent attention"],
)
def test_context_parallel_ranks_share_packed_documents(train_small, packed, schedule, ours, flags):
    """In an evaluation with --sft, Megatron averages over the tokens of each rank alone, which are others here."""
    flags = (*packed, *SHARED_BY_TWO, "--calculate-per-token-loss", *flags)
    run, stock = (
        replace(train_small(*own, *flags, gradients=True), validation=[]) for own in ((schedule, *ours), ("stock",))
    )
    assert_close_training(run, stock)
    assert_close_gradients(run, stock)
    assert_predicted_bytes(run)
    assert run.packed == stock.packed


def test_documents_do_not_see_each_other(train_small, equals_stock, tmp_path):
    """Documents are lines of text: every sequence has several, and slices begin within some of them."""
    lines = [line for line in Path(textwrap.__file__).read_text().splitlines() if 8 <= len(line) <= 50]
    documents = [tmp_path / f"{number:04}.txt" for number in range(len(lines))]
    for document, line in zip(documents, lines, strict=True):
        document.write_text(line)
    write_dataset(documents, tmp_path / "lines")
    text = ("--data-path", str(tmp_path / "lines"), "--vocab-size", str(END_OF_DOCUMENT + 1), "--eod-mask-loss")
    masks = ("--reset-attention-mask", "--reset-position-ids")
    _, stock = equals_stock("seq1f1b", *text, *masks, ours=(*cut(4), *BY_FLOPS), close=True, within=1e-6)
    unmasked = train_small("stock", *text)
    assert stock.losses != pytest.approx(unmasked.losses, rel=1e-4), "masks that hide nothing would show nothing"


SHARED = {
    "experts, cut vocabulary, early sums": (
        "v-half",
        (*cut(2), *BY_FLOPS, VOCABULARY, "1"),
        (*BALANCED, *OVERLAP),
    ),
    "grouped queries, recomputed, evaluation": ("seq1f1b", (*cut(4), *RECOMPUTED), (*GROUPED, *EVALUATION)),
    "latent attention, recomputed": ("zb-h1", (*cut(2), *RECOMPUTED), UNTIED_LATENT),
    "learned positions, offloaded, per token": ("zbv", (*cut(2), *MOVED), ("--calculate-per-token-loss",)),
}


@pytest.mark.parametrize("name", rest_nightly(SHARED, [*SHARED][:1], "the same ranges with other layers"))
def test_context_parallel_ranks_share_slices(equals_stock, name):
    """Ranks have other parts of sequences than stock's, and add their gradients in another order."""
    schedule, ours, flags = SHARED[name]
    nbytes = "bounded" if "experts" in name else "exact"
    equals_stock(schedule, *SHARED_BY_TWO, *flags, ours=ours, close=True, nbytes=nbytes, within=1e-6)


@pytest.mark.parametrize(
    ("flags", "within"),
    [
        (("--bf16",), 2e-3),
        pytest.param(("--fp16", "--initial-loss-scale", "4096"), 5e-4, marks=nightly("bf16; fp16 in test_variants.py")),
    ],
)
def test_costs_are_measured_slice_by_slice_in_16_bits(train_small, flags, within):
    flags = (*flags, "--train-iters", "6", *ROPE)
    measured = (*cut(2), "--pipemem-costs", "profile", VOCABULARY, "1")
    stock, run = (train_small(*ours, *flags) for ours in (("stock",), ("seq1f1b", *measured)))
    assert run.losses == pytest.approx(stock.losses, rel=within)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=10 * within)
    assert_predicted_bytes(run)
    assert [plan["priced_by"] for plan in run.plans] == ["unit", "measured"]
    assert all(len(plan["costs"]["forward"]) == 2 and min(plan["costs"]["forward"]) > 0 for plan in run.plans)


@nightly("test_context_parallel_ranks_share_slices, whose ranks start sums as early; the optimizer in test_auto.py")
def test_gradients_are_summed_over_data_parallel_ranks(equals_stock):
    equals_stock("seq1f1b", *DISTRIBUTED, *ROPE, ours=cut(4), close=True, nbytes=None)
