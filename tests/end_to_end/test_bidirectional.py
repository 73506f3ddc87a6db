"""Two replicas of the model in one pipeline train as one does in stock Megatron.

Gradients are added up in another order than stock's: the microbatches of either copy first, then the two sums. That is the
same for two microbatches, one per copy; for more, it differs by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from model_flags import DISTRIBUTED, EVALUATION, OFFLOADED, PP2, PP4, RECOMPUTED, RESUMED, UNTIED
from quickstart import ROUNDING

UNIT = {"dualpipe": ("--global-batch-size", "8")}  # it takes even numbers of at least two per stage
DOUBLED = ("--pipemem-option", "doubling=true")
THREE_STAGES = ("--pipeline-model-parallel-size", "3", "--num-layers", "3")


@pytest.fixture
def equals(train_small, equals_stock) -> Callable:
    """``equals_stock`` of four layers with four microbatches on four ranks, as fewer would not show which device has whose
    copy. The copies end equal.
    """

    def check(schedule: str, *flags: str, ranks: int = 4, dp: int = 1, **how: object):
        stages = () if PP4[0] in flags else PP4
        run, stock = equals_stock(schedule, *stages, *flags, train=partial(train_small, ranks=ranks), **how)
        assert_copies_are_equal(run, dp)
        return run, stock

    return check


def assert_copies_are_equal(run, dp: int = 1) -> None:
    """Chunk 1 of device r is the copy of chunk 0 of device p - 1 - r."""
    p = len(run.weights) // dp
    for rank, (_, copy) in enumerate(run.weights):
        device, peer = rank // dp, rank % dp
        assert copy == run.weights[(p - 1 - device) * dp + peer][0]


@pytest.mark.parametrize(
    ("name", "flags"),
    [("chimera", (UNTIED,)), ("gems", ()), ("dualpipe", UNIT["dualpipe"])],
    ids=["chimera-untied", "gems", "dualpipe"],
)
def test_trains_and_evaluates_as_stock(equals, name, flags):
    """The weights stand on the devices twice."""
    run, stock = equals(name, *flags, *EVALUATION, close=True)
    assert len(run.validation) > 1
    held, once = run.of_ranks("counted_weight_bytes"), stock.of_ranks("counted_weight_bytes")
    assert held == [own + other for own, other in zip(once, reversed(once), strict=True)]
    assert held == run.of_ranks("predicted_weight_bytes")


@pytest.mark.parametrize("microbatches", ["2", "1"])
def test_at_most_one_microbatch_per_copy_is_exact(equals, microbatches):
    equals("chimera", "--global-batch-size", microbatches)


def test_a_ragged_unit_of_chimera(equals):
    equals("chimera", "--global-batch-size", "5", ours=DOUBLED, close=True)


def test_both_copies_of_the_middle_stage_on_one_device(equals):
    equals("gems", *THREE_STAGES, ranks=3, close=True)


def test_models_built_by_the_script_or_by_megatron(train_small):
    """Both ways of building chunks that are not dealt round robin lead to the same model, and copies start equal and stay so.

    With Megatron's own initial values, which depend on the rank.
    """
    run = train_small("chimera", initialise=False)
    assert train_small("chimera", by_provider=True, initialise=False) == run
    assert_copies_are_equal(run)


def test_data_parallel_ranks_with_the_distributed_optimizer(equals):
    equals("dualpipe", *PP2, *DISTRIBUTED, *UNIT["dualpipe"], dp=2, close=True)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("chimera", RECOMPUTED),
        ("dualpipe", (*OFFLOADED, "--pipemem-host-memory", "1GiB")),
        ("gems", ("--pipemem-costs", "profile")),
    ],
)
def test_recomputation_offload_and_measured_costs(equals_stock, name, ours):
    run, _ = equals_stock(name, ours=ours, close=True)
    assert_copies_are_equal(run)


@pytest.mark.parametrize(("before", "after"), [("stock", "chimera"), ("chimera", "stock")])
def test_checkpoints_hold_one_copy(train_small, tmp_path, before, after):
    """With the state of Adam."""
    train_small(before, "--save", str(tmp_path), "--save-interval", "2")
    resumed = train_small(after, *RESUMED, "--load", str(tmp_path), initialise=False)
    uninterrupted = train_small("stock", "--train-iters", "4")
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=ROUNDING)
    if after != "stock":
        assert_copies_are_equal(resumed)
