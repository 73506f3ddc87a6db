"""Transformer Engine's CUDA graphs of layers, captured and replayed in our orders, over ``cuda_graphs``."""

from __future__ import annotations

from functools import partial

import pytest
from comparing import assert_same_training
from lanes import nightly
from model_flags import DISTRIBUTED, EVALUATION, FUSION, TP_AND_SP

FLAGS = (
    *("--no-gradient-accumulation-fusion", "--bf16", "--train-iters", "3", "--no-check-for-nan-in-loss-and-grad"),
    *("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--global-batch-size", "4"),
)
WARM_UP = ("--cuda-graph-warmup-steps", "1")
GRAPHS = ("--cuda-graph-impl", "transformer_engine", *WARM_UP)
# Of four layers on two ranks, four microbatches forward and backward, in the two steps after the warm-up.
REPLAYS = 2 * (4 // 2) * 4 * 2

EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-grouped-gemm", "--disable-bias-linear"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0.01"),
)
PARTS = ("--cuda-graph-modules", "attn", "moe_router", "moe_preprocess")
AROUND_EXPERTS = 3 + 3 + 1
"""Every forward and I has a graph before its first experts, between two layers with experts, and after the last."""


@pytest.fixture
def train(train_with_transformer_engine):
    """Two of the four ranks that other tests of Transformer Engine use."""
    return partial(train_with_transformer_engine, ranks=2)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-v"])
def test_layers_in_graphs_train_as_without(train, schedule):
    run = train(schedule, *FLAGS, *GRAPHS)
    assert_same_training(run, train("stock", *FLAGS))
    assert run.replays == [REPLAYS] * 2


def test_passes_in_graphs_train_as_without(train):
    """Where backwards are split, passes are captured, and not layers; the last two steps replay F, I and W."""
    run = train("zb-h1", *FLAGS, *GRAPHS, report=None)
    assert run.weights == train("stock", *FLAGS).weights
    assert run.replays == [2 * 3 * 4] * 2


def test_passes_with_grouped_experts_outside_train_as_without(train):
    run = train("zb-h1", *FLAGS, *EXPERTS, *GRAPHS, *PARTS, report=None)
    assert run.weights == train("stock", *FLAGS, *EXPERTS).weights
    assert run.replays == [2 * 4 * AROUND_EXPERTS] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_in_one_graph_trains_as_without(train, schedule):
    """Under emulation, the host waits for a replayed message at once: hence the order for one hardware queue."""
    whole = ("--cuda-graph-impl", "full_iteration", *WARM_UP)
    run = train(schedule, *FLAGS, *whole, "--pipemem-single-queue", report=None)
    assert run.weights == train("stock", *FLAGS).weights
    assert run.replays == [2] * 2


@pytest.mark.parametrize(
    ("schedule", "form", "recipe"),
    [
        ("zb-h1", "hybrid", "tensorwise"),
        pytest.param("v-half", "e4m3", "mxfp8", marks=nightly("tests/transformer_engine/test_graph_fp8.py")),
    ],
)
def test_passes_in_fp8_train_as_without(train, schedule, form, recipe):
    flags = (*FLAGS, "--fp8-format", form, "--fp8-recipe", recipe, *EVALUATION, "--train-iters", "4")
    plain, run = train(schedule, *flags, report=None), train(schedule, *flags, *GRAPHS, report=None)
    assert (run.weights, run.validation) == (plain.weights, plain.validation)
    assert run.replays == [3 * 3 * 4 * (2 if schedule == "v-half" else 1)] * 2


IN_8_BITS = (*DISTRIBUTED, *EVALUATION, "--train-iters", "4", "--global-batch-size", "8", "--fp8-param-gather")
TENSORWISE = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
MXFP8 = ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--reuse-grad-buf-for-mxfp8-param-ag")
INSTEAD = nightly("the case of zb-h1, and tests/transformer_engine/test_graph_fp8.py")


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("zb-h1", (*TENSORWISE, *FUSION)),
        pytest.param("zb-h1", (*TENSORWISE, *FUSION, *EXPERTS), marks=INSTEAD),
        pytest.param("v-half", TENSORWISE, marks=INSTEAD),
        pytest.param("zb-h1", MXFP8, marks=INSTEAD),
        pytest.param("v-half", (*MXFP8, *FUSION), marks=INSTEAD),
    ],
)
def test_weights_in_8_bits_train_as_stock(train_with_transformer_engine, schedule, flags):
    """Without graphs and with them. The backward itself computes the gradients of biases, and DDP waits for every gradient."""
    train = partial(train_with_transformer_engine, ranks=4)
    flags = (*(FLAGS[1:] if FUSION[0] in flags else FLAGS), *IN_8_BITS, *flags)
    plain, stock = train(schedule, *flags), train("stock", *flags)
    assert_same_training(plain, stock)
    if schedule == "zb-h1":  # the stages lie as stock's
        assert plain.weights == stock.weights
    graphs = AROUND_EXPERTS if EXPERTS[0] in flags else 3 * (2 if schedule == "v-half" else 1)
    run = train(schedule, *flags, *GRAPHS, *(PARTS if EXPERTS[0] in flags else ()), report=None)
    assert (run.weights, run.validation) == (plain.weights, plain.validation)
    assert run.replays == [3 * 4 * graphs] * 4


LARGE = ("--hidden-size", "256", "--seq-length", "256", "--max-position-embeddings", "256")
"""User buffers take MXFP8 in whole blocks of 128 rows and columns."""
BUFFERS = (*TP_AND_SP, "--tp-comm-overlap", "--tp-comm-bootstrap-backend", "gloo", "--train-iters", "4")


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("zb-h1", (*TENSORWISE, "--fp8-param-gather", *DISTRIBUTED[:-1])),
        pytest.param("v-half", (), marks=INSTEAD),
        pytest.param("v-half", (*MXFP8[:-1], *LARGE), marks=INSTEAD),
    ],
)
def test_passes_with_user_buffers_train_as_without(train_with_transformer_engine, schedule, flags):
    """All layers share the buffers, which are no memory of graphs."""
    train = partial(train_with_transformer_engine, ranks=4)
    flags = (*FLAGS, *BUFFERS, *flags)
    plain, run = train(schedule, *flags, report=None), train(schedule, *flags, *GRAPHS, report=None)
    assert run.weights == plain.weights
    assert run.replays == [3 * 3 * 4 * (2 if schedule == "v-half" else 1)] * 4
