"""From scratch and with dropout, every schedule draws the same random numbers."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly

FLAGS = ("--pipemem-random", "layerwise", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
EIGHT = ("--num-layers", "8")
TP_AND_SP = (
    *("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--global-batch-size", "4"),
)
MULTI_TOKEN = (
    *("--mtp-num-layers", "2", "--position-embedding-type", "rope", "--global-batch-size", "4"),
    "--untie-embeddings-and-output-weights",
)
HYBRID = ("--spec", "megatron_pipemem.tools.cpu.hybrid_layers", "hybrid_stack_spec")
CUT = ("--pipemem-vocab-parallel", "2")
EVALUATION = ("--eval-interval", "1", "--eval-iters", "1")
EXPERT_RANKS = ("--expert-model-parallel-size", "2")
EXPERTS = (
    *("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2", "--num-layers", "4"),
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4"),
)


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        ["zb-h1", "v-half", "zbv", "gis", "looped-bfs", "hanayo"],
        ["v-half", "gis"],
        "the same placements; with recomputation below",
    ),
)
def test_trains_as_stock_from_scratch(train_small, assert_same_training, name):
    more = EIGHT if name == "hanayo" else ()
    run = train_small(name, *FLAGS, *more, initialise=False)
    assert_same_training(run, train_small("stock", *FLAGS, *more, initialise=False))
    assert run.predicted_peaks == run.counted_peaks


def test_two_replicas_begin_as_stock(train_small, assert_close_training):
    """They add up their gradients, which is another order of the sum over microbatches."""
    run = train_small("chimera", *FLAGS, initialise=False)
    assert_close_training(run, train_small("stock", *FLAGS, initialise=False))
    assert run.predicted_peaks == run.counted_peaks


def test_stocks_own_schedules_train_alike(train_small, assert_same_training):
    two = ("--num-virtual-stages-per-pipeline-rank", "2")
    once, twice = (train_small("stock", *FLAGS, *more, initialise=False) for more in ((), two))
    assert_same_training(twice, once)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", marks=nightly("second forwards draw the same numbers again")),
        "--pipemem-recompute full",
        pytest.param("--pipemem-recompute selective", marks=nightly("full recomputation draws more")),
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        pytest.param("--pipemem-offload full", marks=nightly("test_offload.py; to move activations draws nothing")),
    ],
)
def test_shards_and_second_forwards_draw_the_same(train_small, assert_same_training, flags):
    run = train_small("v-half", *FLAGS, *TP_AND_SP, *flags.split(), initialise=False)
    assert_same_training(run, train_small("stock", *FLAGS, *TP_AND_SP, initialise=False))


@pytest.mark.parametrize(
    "rule", rest_nightly(["pipedream-2bw", "pipedream"], ["pipedream"], "pipedream, with as many forwards in flight")
)
def test_forwards_of_a_later_batch_draw_that_batch_s_numbers(train_small, emulate, rule):
    """In the emulator, every step runs its own microbatches."""
    flags = (*FLAGS, "--untie-embeddings-and-output-weights", "--clip-grad", "0", "--train-iters", "3")
    run = train_small(rule, *flags, initialise=False)
    assert run.losses == emulate(rule, *flags, initialise=False).losses


def test_a_hybrid_model_s_layers_have_their_numbers_in_every_cut(train_small, assert_same_training):
    pattern = ("--hybrid-layer-pattern", "*-*-|*-*-"), ("--hybrid-layer-pattern", "*-|*-|*-|*-")
    stock, run = (
        train_small(name, *FLAGS, *HYBRID, *cut, initialise=False)
        for name, cut in zip(("stock", "v-half"), pattern, strict=True)
    )
    assert_same_training(run, stock)


@pytest.mark.parametrize(
    "cut", [(), pytest.param(CUT, marks=nightly("the same depths, and a cut vocabulary below"))], ids=["whole", "cut"]
)
def test_depths_of_multi_token_prediction_draw_for_themselves(
    train_small, assert_same_training, assert_close_training, cut
):
    stock, run = (train_small(*each, *FLAGS, *MULTI_TOKEN, initialise=False) for each in (("stock",), ("v-half", *cut)))
    (assert_close_training if cut else assert_same_training)(run, stock)


def test_a_cut_vocabulary_begins_as_the_whole_one(train_small, assert_close_training):
    """Its head sums in another order."""
    stock, cut = (train_small(name, *FLAGS, *more, initialise=False) for name, *more in (("stock",), ("v-half", *CUT)))
    assert_close_training(cut, stock)


def test_evaluation_does_not_disturb_training(train_small):
    plain, evaluated = (train_small("v-half", *FLAGS, *more, initialise=False) for more in ((), EVALUATION))
    assert evaluated.losses == plain.losses and len(evaluated.validation) > 1


def test_experts_begin_alike_whoever_has_them(train_small, assert_close_training):
    """Their ranks sum tokens in another order."""
    alone, shared = (
        train_small("stock", *FLAGS, *EXPERTS, *more, initialise=False, ranks=4) for more in ((), EXPERT_RANKS)
    )
    assert_close_training(shared, alone)


@nightly("the bits of the tests above; this one shows only that they would differ")
def test_streams_of_ranks_differ_without_it(train_small):
    stock, ours = (train_small(name, *FLAGS[2:], initialise=False) for name in ("stock", "v-half"))
    assert stock.losses[0] != ours.losses[0]
