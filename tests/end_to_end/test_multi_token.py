"""Multi-token prediction: trained and logged as stock does it, under every placement and with a cut vocabulary."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly
from test_hybrid import CUTS, of
from test_variants import EVALUATION, RECOMPUTE, UNTIED
from test_vocabulary import LATER, TP2

COMMON = ("--position-embedding-type", "rope", "--global-batch-size", "4", "--tensorboard-dir", "unused")
ONE, TWO = ((*COMMON, UNTIED, "--mtp-num-layers", depths) for depths in "12")
# DDP is told of every gradient once, also of a weight that is used several times.
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
LAYOUT = "--pipeline-model-parallel-layout"
PP4 = ("--pipeline-model-parallel-size", "4")

# name -> schedule, flags of stock too, flags of ours
EXACT = {
    "1f1b": ("1f1b", TWO, ()),
    "zb-h1": ("zb-h1", TWO, ()),
    "v-half-evaluation": ("v-half", (*TWO, *EVALUATION), ()),
    "zbv": ("zbv", ONE, ()),
    "interleaved": ("interleaved", ONE, ()),
    "hanayo": ("hanayo", ONE, (LAYOUT, "Et||t||t|t||mL")),
    "po-f": ("po-f", ONE, ()),
    "auto": ("auto", ONE, ("--pipemem-option", "seconds=1")),
    "standalone": ("zb-h1", ONE, (LAYOUT, "Ett|tt|m|L", *PP4)),
    "recompute-in-schedule": ("v-half", ONE, ("--pipemem-recompute", "full")),
    "recompute-in-model": ("zb-h1", (*TWO, *RECOMPUTE), ()),
    "repeated-layer": ("zb-h1", (*TWO, *OVERLAP, "--mtp-use-repeated-layer"), ()),
}
CUT = {
    "1f1b-cut": ("1f1b", "2", TWO),
    "zbv-cut": ("zbv", "2", ONE),
    "v-half-cut": ("v-half", "1", ONE),
    "tp2-sequence-parallel-cut": ("zb-h1", "2", (*ONE, *TP2, "--sequence-parallel")),
    "evaluation-cut": ("1f1b", "1", (*ONE, *EVALUATION)),
}


def logged(run) -> dict[str, float]:
    """What a run wrote to TensorBoard of every depth."""
    return {f"{name} {at}": value for name, at, value in run.scalars if name.startswith("mtp_")}


NIGHTLY = {"1f1b", "zb-h1", "zbv", "interleaved", "hanayo", "po-f", "auto", "recompute-in-model"}


@pytest.mark.parametrize(
    "name", rest_nightly(EXACT, EXACT.keys() - NIGHTLY, "the same model with another schedule of the same kind")
)
def test_trains_and_logs_as_stock(train_small, assert_same_training, name):
    schedule, flags, ours = EXACT[name]
    run, stock = (
        train_small(schedule, *flags, *ours, ranks=4 if "4" in ours else None),
        train_small("stock", *flags, gradients=True),
    )
    assert_same_training(run, stock)
    assert len(logged(stock)) >= 6
    assert logged(run) == pytest.approx(logged(stock), rel=1e-6)
    if name != "recompute-in-model":  # Megatron's recomputation is never foretold to the byte
        assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize(
    "name",
    rest_nightly(CUT, ["zbv-cut", "tp2-sequence-parallel-cut"], "another placement; evaluation without the cut"),
)
def test_one_set_of_shards_predicts_all_tokens(train_small, name):
    schedule, algorithm, flags = CUT[name]
    stock = train_small("stock", *flags, gradients=True)
    run = train_small(schedule, *flags, "--pipemem-vocab-parallel", algorithm, gradients=True)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=1e-6)
    assert run.losses == pytest.approx(stock.losses, rel=LATER)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=2e-5)
    assert logged(run) == pytest.approx(logged(stock), rel=1e-5)
    assert run.predicted_peaks == run.counted_peaks
    for found, wanted in zip(run.validation, stock.validation, strict=True):
        assert found == pytest.approx(wanted, rel=LATER)
    assert run.gradients.keys() == stock.gradients.keys()
    off = {key: (run.gradients[key] - wanted).norm() / wanted.norm() for key, wanted in stock.gradients.items()}
    assert {key: float(each) for key, each in off.items() if not each <= 1e-6} == {}
    assert all(len(rank) == 2 for rank in run.vocabulary_rows)


@pytest.mark.parametrize("early", ["none", "head"])
def test_a_tied_head_takes_part_in_one_sum(train_small, assert_same_training, early):
    """Megatron cannot say what such a stage has in checkpoints, so both begin with the values that it draws."""
    flags = tuple(flag for flag in TWO if flag != UNTIED)
    run = train_small("zb-h1", *flags, "--pipemem-early-weights", early, initialise=False)
    assert_same_training(run, train_small("stock", *flags, initialise=False))
    assert run.predicted_peaks == run.counted_peaks


def test_two_replicas(train_small, assert_close_training):
    run, stock = train_small("chimera", *ONE), train_small("stock", *ONE, gradients=True)
    assert_close_training(run, stock)
    assert logged(run) == pytest.approx(logged(stock), rel=1e-6)
    assert run.predicted_peaks == run.counted_peaks


@nightly("initial values follow from the names in checkpoints, so the tests above see a wrong one; test_checkpoints.py")
@pytest.mark.parametrize(
    ("before", "after"),
    [(("v-half",), ("stock",)), (("v-half", "--pipemem-vocab-parallel", "2"), ("zb-h1",))],
    ids=["v-to-stock", "cut-to-linear"],
)
def test_checkpoints_are_stocks(train, tmp_path, before, after):
    train(*before, *ONE, "--save", str(tmp_path), "--save-interval", "2")
    load = ("--train-iters", "4", "--load", str(tmp_path), "--override-opt_param-scheduler")
    resumed = train(*after, *ONE, *load, initialise=False)
    uninterrupted = train("stock", *ONE, "--train-iters", "4")
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=LATER)


@pytest.mark.parametrize("cut", [(), ("--pipemem-vocab-parallel", "2")], ids=["whole", "cut"])
def test_hybrid_models_predict_further_too(train_small, cut):
    stock, run = (
        train_small(schedule, *of(f"{CUTS[chunks]}/*-", *COMMON, UNTIED, *more))
        for schedule, chunks, more in (("stock", 1, ()), ("v-half", 2, cut))
    )
    assert len(logged(stock)) >= 6 and len(set(stock.losses)) > 1
    assert run.losses == (pytest.approx(stock.losses, rel=LATER) if cut else stock.losses)
    assert logged(run) == pytest.approx(logged(stock), rel=1e-5)
    assert run.predicted_peaks == run.counted_peaks
