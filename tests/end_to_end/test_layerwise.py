"""From scratch and with dropout, every schedule draws the same random numbers."""

from __future__ import annotations

import pytest

FLAGS = ("--pipemem-random", "layerwise", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
SIXTEEN = ("--num-layers", "16")
TP_AND_SP = (
    *("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--global-batch-size", "4"),
)


@pytest.mark.parametrize("name", ["zb-h1", "v-half", "zbv", "gis", "looped-bfs", "chimera", "hanayo"])
def test_trains_as_stock_from_scratch(train, assert_same_training, name):
    more = SIXTEEN if name == "hanayo" else ()
    run = train(name, *FLAGS, *more, initialise=False)
    assert_same_training(run, train("stock", *FLAGS, *more, initialise=False))
    assert run.predicted_peaks == run.counted_peaks


def test_stocks_own_schedules_train_alike(train, assert_same_training):
    flags = (*FLAGS, "--global-batch-size", "8")
    two = ("--num-virtual-stages-per-pipeline-rank", "2")
    assert_same_training(train("stock", *flags, *two, initialise=False), train("stock", *flags, initialise=False))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--pipemem-recompute", "full"),
        ("--pipemem-recompute", "selective"),
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ("--pipemem-offload", "full"),
    ],
    ids=" ".join,
)
def test_shards_and_second_forwards_draw_the_same(train, assert_same_training, flags):
    run = train("v-half", *FLAGS, *TP_AND_SP, *flags, initialise=False)
    assert_same_training(run, train("stock", *FLAGS, *TP_AND_SP, initialise=False))


def test_streams_of_ranks_differ_without_it(train):
    stock, ours = (train(name, *FLAGS[2:], initialise=False) for name in ("stock", "v-half"))
    assert stock.losses[0] != ours.losses[0]
