"""Transformer Engine's CUDA graphs of layers, captured and replayed in our orders, over ``te_stand_in.graphs``."""

from __future__ import annotations

import pytest
from lanes import rest_nightly

FLAGS = ("--no-gradient-accumulation-fusion", "--bf16", "--train-iters", "4")
GRAPHS = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "2")
# Of eight layers on four ranks, six microbatches forward and backward, in the two steps after the warm-up.
REPLAYS = 2 * (8 // 4) * 6 * 2


@pytest.mark.parametrize(
    "schedule",
    rest_nightly(
        ["1f1b", "1f1b-eager", "gpipe", "interleaved", "looped-bfs", "1f1b-v"],
        ["1f1b", "1f1b-v"],
        "tests/transformer_engine/test_graph_orders.py",
    ),
)
def test_layers_in_graphs_train_as_without(train_with_transformer_engine, assert_same_training, schedule):
    train = train_with_transformer_engine
    run = train(schedule, *FLAGS, *GRAPHS)
    assert_same_training(run, train("stock", *FLAGS))
    assert run.replays == [REPLAYS] * 4


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_in_one_graph_trains_as_without(train_with_transformer_engine, schedule):
    """Under emulation, the host waits for a replayed message at once: hence the order for one hardware queue."""
    train = train_with_transformer_engine
    flags = (*FLAGS, "--no-check-for-nan-in-loss-and-grad")
    whole = ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "2")
    run = train(schedule, *flags, *whole, "--pipemem-single-queue", report=None)
    plain = train(schedule, *flags)
    assert run.weights == plain.weights
    assert run.replays == [2] * 4
