"""Multi-token prediction: trained and logged as stock does it, under every placement and with a cut vocabulary."""

from __future__ import annotations

import pytest
from comparing import assert_close_gradients, assert_close_training, assert_predicted_bytes
from model_flags import EVALUATION, LAYOUT, OVERLAP, PP4, RECOMPUTED, ROPE, TP_AND_SP, UNTIED, VOCABULARY, hybrid
from test_hybrid import CUTS
from test_vocabulary import LATER

COMMON = (*ROPE, "--tensorboard-dir", "unused")
TIED = (*COMMON, "--mtp-num-layers", "2")
ONE, TWO = ((*COMMON, UNTIED, "--mtp-num-layers", depths) for depths in "12")
# name -> schedule, flags of stock too, flags of ours
EXACT = {
    # DDP is told of every gradient once, also of a weight that is used several times.
    "repeated layer": ("zb-h1", (*TWO, *OVERLAP, "--mtp-use-repeated-layer"), ()),
    "evaluation": ("v-half", (*TWO, *EVALUATION), ()),
    "standalone": ("zb-h1", ONE, (LAYOUT, "Ett|tt|m|L", *PP4)),
    "recomputed": ("v-half", ONE, RECOMPUTED),
}
CUT = {
    "evaluation": ("zbv", "2", (*ONE, *EVALUATION)),
    "sequence parallel": ("zb-h1", "1", (*ONE, *TP_AND_SP)),
}


def logged(run) -> dict[str, float]:
    """What a run wrote to TensorBoard of every depth."""
    return {f"{name} {at}": value for name, at, value in run.scalars if name.startswith("mtp_")}


def assert_same_log(run, stock, within: float = 1e-6) -> None:
    assert len(logged(stock)) >= 6
    assert logged(run) == pytest.approx(logged(stock), rel=within)


@pytest.mark.parametrize("name", EXACT)
def test_trains_and_logs_as_stock(train_small, equals_stock, name):
    schedule, flags, ours = EXACT[name]

    def train(schedule: str, *flags: str):
        return train_small(schedule, *flags, ranks=4 if "4" in flags else None)

    assert_same_log(*equals_stock(schedule, *flags, ours=ours, train=train))


@pytest.mark.parametrize("name", CUT)
def test_one_set_of_shards_predicts_all_tokens(train_small, name):
    schedule, algorithm, flags = CUT[name]
    stock = train_small("stock", *flags, gradients=True)
    run = train_small(schedule, *flags, VOCABULARY, algorithm, gradients=True)
    assert run.losses[0] == pytest.approx(stock.losses[0], rel=1e-6)
    assert_close_training(run, stock, LATER)
    assert_close_gradients(run, stock)
    assert_same_log(run, stock, 1e-5)
    assert_predicted_bytes(run)
    assert all(len(rank) == 2 for rank in run.vocabulary_rows)


@pytest.mark.parametrize("early", ["none", "head"])
def test_a_tied_head_takes_part_in_one_sum(equals_stock, early):
    """Megatron cannot say what such a stage has in checkpoints, so both begin with the values that it draws."""
    equals_stock("zb-h1", *TIED, ours=("--pipemem-early-wgrad", early), initialise=False)


def test_two_replicas(equals_stock):
    assert_same_log(*equals_stock("chimera", *ONE, close=True))


@pytest.mark.parametrize("cut", [(), (VOCABULARY, "2")], ids=["whole", "cut"])
def test_hybrid_models_predict_further_too(train_small, cut):
    stock, run = (
        train_small(schedule, *hybrid(f"{CUTS[chunks]}/*-", *COMMON, UNTIED, *more))
        for schedule, chunks, more in (("stock", 1, ()), ("v-half", 2, cut))
    )
    assert len(set(stock.losses)) > 1
    assert run.losses == (pytest.approx(stock.losses, rel=LATER) if cut else stock.losses)
    assert_same_log(run, stock, 1e-5)
    assert_predicted_bytes(run)
