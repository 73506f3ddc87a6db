"""Two replicas of the model in one pipeline train as one does in stock Megatron.

Gradients are added up in another order than stock's: the microbatches of either copy first, then the two sums. That is the
same for two microbatches, one per copy; for more, it differs by rounding.
"""

from __future__ import annotations

from itertools import product

import pytest
from lanes import rest_nightly
from quickstart import ROUNDING

NAMES = ("chimera", "gems", "dualpipe")
UNIT = {"dualpipe": ("--global-batch-size", "8")}  # it takes even numbers of at least two per stage
UNTIED = "--untie-embeddings-and-output-weights"
TWO_MICROBATCHES = ("--global-batch-size", "2")
DOUBLED = ("--pipemem-option", "doubling=true")
THREE_STAGES = ("--pipeline-model-parallel-size", "3", "--num-layers", "3")
EVALUATED = ("--eval-iters", "1", "--eval-interval", "2", "--train-iters", "3")
DATA_PARALLEL = (
    *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--ddp-bucket-size", "20000"),
)


@pytest.fixture
def train_replicas(train_small):
    """``train`` four layers with four microbatches on four ranks, as fewer would not show which device has whose copy."""

    def run(schedule: str, *flags: str, ranks: int = 4, **how: object):
        stages = () if "--pipeline-model-parallel-size" in flags else ("--pipeline-model-parallel-size", str(ranks))
        return train_small(schedule, *stages, *flags, ranks=ranks, **how)

    return run


def assert_copies_are_equal(run, dp: int = 1) -> None:
    """Chunk 1 of device r is the copy of chunk 0 of device p - 1 - r."""
    p = len(run.weights) // dp
    for rank, (_, copy) in enumerate(run.weights):
        device, peer = rank // dp, rank % dp
        assert copy == run.weights[(p - 1 - device) * dp + peer][0]


EMBEDDINGS = {"tied": (), "untied": (UNTIED,)}


@pytest.mark.parametrize(
    ("name", "embeddings"),
    rest_nightly(
        product(NAMES, EMBEDDINGS),
        [("chimera", "untied"), ("gems", "tied"), ("dualpipe", "tied")],
        "the same replicas with the other embedding",
    ),
)
def test_trains_and_evaluates_as_stock(train_replicas, assert_close_training, name, embeddings):
    flags = (*EMBEDDINGS[embeddings], *EVALUATED, *UNIT.get(name, ()))
    run = train_replicas(name, *flags)
    assert_close_training(run, train_replicas("stock", *flags))
    assert len(run.validation) > 1
    assert run.predicted_peaks == run.counted_peaks and min(run.counted_peaks) > 0
    assert_copies_are_equal(run)


@pytest.mark.parametrize(
    ("name", "embeddings"),
    rest_nightly(
        product(["chimera", "gems"], EMBEDDINGS),
        [("chimera", "tied")],
        "the same replicas with the other embedding, and gems above",
    ),
)
def test_one_microbatch_per_copy_is_exact(train_replicas, assert_same_training, name, embeddings):
    flags = (*TWO_MICROBATCHES, *EMBEDDINGS[embeddings])
    assert_same_training(train_replicas(name, *flags), train_replicas("stock", *flags))


@pytest.mark.parametrize(
    ("microbatches", "options"),
    rest_nightly(
        [("3", ()), ("5", ()), ("5", DOUBLED), ("8", DOUBLED)],
        [("5", DOUBLED)],
        "the ragged unit that is kept, and one microbatch below",
    ),
    ids=["less-than-a-unit", "a-ragged-unit", "a-ragged-doubled-unit", "a-doubled-unit"],
)
def test_units_of_chimera(train_replicas, assert_close_training, microbatches, options):
    flags = ("--global-batch-size", microbatches)
    run = train_replicas("chimera", *flags, *options)
    assert_close_training(run, train_replicas("stock", *flags))
    assert run.predicted_peaks == run.counted_peaks
    assert_copies_are_equal(run)


def test_a_copy_without_a_microbatch_changes_nothing(train_replicas, assert_same_training):
    flags = ("--global-batch-size", "1")
    run = train_replicas("chimera", *flags)
    assert_same_training(run, train_replicas("stock", *flags))
    assert_copies_are_equal(run)


def test_both_copies_of_the_middle_stage_on_one_device(train_replicas, assert_close_training):
    run = train_replicas("gems", *THREE_STAGES, ranks=3)
    assert_close_training(run, train_replicas("stock", *THREE_STAGES, ranks=3))
    assert run.predicted_peaks == run.counted_peaks
    assert_copies_are_equal(run)


@pytest.mark.parametrize("name", rest_nightly(["chimera", "zbv"], ["chimera"], "a frozen V in test_flags.py"))
def test_models_built_by_the_script_or_by_megatron(train_small, name):
    """Both ways of building chunks that are not dealt round robin lead to the same model, and copies start equal and stay so.

    With Megatron's own initial values, which depend on the rank.
    """
    run = train_small(name, initialise=False)
    assert train_small(name, by_provider=True, initialise=False) == run
    if name == "chimera":
        assert_copies_are_equal(run)


@pytest.mark.parametrize("name", rest_nightly(["chimera", "dualpipe"], ["dualpipe"], "dualpipe"))
def test_data_parallel_ranks_with_the_distributed_optimizer(train_replicas, assert_close_training, name):
    flags = (*DATA_PARALLEL, *UNIT.get(name, ()))
    run = train_replicas(name, *flags)
    assert_close_training(run, train_replicas("stock", *flags))
    assert_copies_are_equal(run, dp=2)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("chimera", ("--pipemem-recompute", "full")),
        ("dualpipe", ("--pipemem-offload", "full", "--pipemem-host-memory", "1GiB")),
        ("gems", ("--pipemem-costs", "profile")),
    ],
)
def test_recomputation_offload_and_measured_costs(train_small, assert_close_training, name, flags):
    run = train_small(name, *flags)
    assert_close_training(run, train_small("stock"))
    assert run.predicted_peaks == run.counted_peaks
    assert_copies_are_equal(run)


def test_weights_stand_on_the_devices_twice(train_replicas):
    flags = (UNTIED, *EVALUATED)  # of the runs above
    ours, stock = (train_replicas(name, *flags).of_ranks("counted_weight_bytes") for name in ("chimera", "stock"))
    assert ours == [own + other for own, other in zip(stock, reversed(stock), strict=True)]
    assert ours == train_replicas("chimera", *flags).of_ranks("predicted_weight_bytes")


@pytest.mark.parametrize(
    ("before", "after"),
    rest_nightly(
        [("stock", "chimera"), ("chimera", "stock"), ("chimera", "gems")],
        [("stock", "chimera"), ("chimera", "stock")],
        "its two halves",
    ),
)
def test_checkpoints_hold_one_copy(train_small, tmp_path, before, after):
    """With the state of Adam."""
    flags = ("--train-iters", "2", "--save", str(tmp_path), "--save-interval", "2")
    train_small(before, *flags)
    load = ("--train-iters", "4", "--load", str(tmp_path), "--override-opt_param-scheduler")
    resumed = train_small(after, *load, initialise=False)
    uninterrupted = train_small("stock", "--train-iters", "4")
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=ROUNDING)
    if after != "stock":
        assert_copies_are_equal(resumed)
