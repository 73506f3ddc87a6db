"""Sequences that run in slices train as whole ones do.

Bits differ: attention sums over the keys that are there, stock over all of them with later ones masked; and a weight's
gradient is summed over slices first.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from comparing import assert_predicted_bytes
from lanes import nightly, rest_nightly
from model_flags import (
    ALL_TO_ALL,
    BY_FLOPS,
    DISTRIBUTED,
    EVALUATION,
    EXPERTS,
    MULTI_TOKEN,
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
ONE = ("--global-batch-size", "1", "--calculate-per-token-loss", *ROPE)
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
    "one microbatch": ("seq1f1b", cut(8), ONE),
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
    "further tokens, per token": (
        "zb-h1",
        (*cut(4), *BY_FLOPS),
        (*MULTI_TOKEN, *TWO_SEQUENCES, "--calculate-per-token-loss"),
    ),
    "further tokens with experts, evaluation": ("interleaved", cut(4), (*BALANCED, *MULTI_TOKEN, *EVALUATION)),
    "slimpipe": ("slimpipe", cut(4), ROPE),
    "recomputed in part": ("seq1f1b", (*cut(2), "--pipemem-recompute", "selective"), GROUPED),
    "sliding window": ("zb-h1", cut(4), (*ROPE, "--window-size", "20,0")),
}
NIGHTLY = {
    "further tokens with experts, evaluation",
    "slimpipe",
    "recomputed in part",
    "sliding window",
    "attention recomputed by the model",
}


@pytest.mark.parametrize("name", rest_nightly(CASES, CASES.keys() - NIGHTLY, "a case with a part of the flags"))
def test_trains_as_stock(equals_stock, tmp_path_factory, name):
    """With experts and further tokens, their losses too, as they are logged."""
    schedule, ours, flags = CASES[name]
    # Megatron's recomputation is not predicted to the byte, nor further tokens with experts (0.1% too much).
    unpredicted = "by the model" in name or "further tokens with experts" in name
    nbytes = None if unpredicted else "bounded" if "experts" in name else "exact"
    has_losses = "experts" in name or "further" in name
    if has_losses:
        flags = (*flags, "--tensorboard-dir", str(tmp_path_factory.getbasetemp()), "--tensorboard-log-interval", "1")
    run, stock = equals_stock(schedule, *flags, ours=ours, close=True, nbytes=nbytes, within=1e-6)
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
    "recomputed": ("zbv", (*cut(8), *RECOMPUTED), GROUPED),
    "recomputed by the model": ("seq1f1b", cut(4), (*GROUPED, *RECOMPUTE)),
    "latent attention": ("zb-h1", cut(4), UNTIED_LATENT),
    "learned positions, one barrier": ("v-half", (*cut(4), *BY_FLOPS, VOCABULARY, "2"), ()),
    "experts": ("zbv", cut(4), BALANCED),
    "further tokens": ("seq1f1b", cut(4), (*GROUPED, *MULTI_TOKEN)),
}


@pytest.mark.parametrize("name", rest_nightly(PACKED, ["recomputed"], "the same masks with other layers"))
def test_packed_documents_train_as_stock(equals_stock, packed, name):
    """Slices begin within documents, and documents end within slices. Their tokens are counted once, to log FLOPs."""
    schedule, ours, flags = PACKED[name]
    # Further tokens of packed documents are predicted with 0.1% too much.
    unpredicted = "by the model" in name or name == "further tokens"
    nbytes = None if unpredicted else "bounded" if name == "experts" else "exact"
    run, stock = equals_stock(schedule, *packed, *flags, ours=ours, close=True, nbytes=nbytes, within=1e-6)
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


def test_activations_of_slices_leave_the_device(train_small):
    """Otherwise the offloaded case above would show nothing."""
    schedule, ours, flags = CASES["offloaded"]
    whole, away = (train_small(schedule, *own, *flags, gradients=True) for own in (cut(4), ours))
    assert max(away.counted_peaks) < max(whole.counted_peaks)
    assert min(away.of_ranks("counted_host_peak_bytes")) > 0


@pytest.mark.parametrize(
    ("flags", "within"),
    [
        (("--bf16",), 2e-3),
        pytest.param(("--fp16", "--initial-loss-scale", "4096"), 5e-4, marks=nightly("bf16; fp16 in test_variants.py")),
    ],
)
def test_trains_in_16_bits(train_small, flags, within):
    stock, run = (train_small(*ours, *flags, *ROPE) for ours in (("stock",), ("seq1f1b", *cut(4))))
    assert run.losses == pytest.approx(stock.losses, rel=within)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=10 * within)


def test_costs_are_measured_slice_by_slice(train_small):
    steps = ("--train-iters", "6")
    measured = ("--pipemem-costs", "profile", VOCABULARY, "1")
    stock, run = (train_small(*ours, *steps, *ROPE) for ours in (("stock",), ("seq1f1b", *cut(2), *measured)))
    assert run.losses == pytest.approx(stock.losses, rel=1e-5)
    assert_predicted_bytes(run)
    assert [plan["priced_by"] for plan in run.plans] == ["unit", "measured"]
    assert all(len(plan["costs"]["forward"]) == 2 and min(plan["costs"]["forward"]) > 0 for plan in run.plans)


def test_gradients_are_summed_over_data_parallel_ranks(equals_stock):
    equals_stock("seq1f1b", *DISTRIBUTED, *ROPE, ours=cut(4), close=True, nbytes=None)
