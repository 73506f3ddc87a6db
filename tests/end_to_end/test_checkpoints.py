"""A checkpoint does not remember the placement it was saved under."""

from __future__ import annotations

from dataclasses import replace

import pytest
from comparing import assert_same_training
from lanes import nightly
from model_flags import DISTRIBUTED, DROPOUT, RESUMED, UNTIED
from quickstart import ROUNDING
from ranks import CaseFailed
from refusals import check_refusal


# The lane saves and loads once in a V, loads once interleaved, and does both with two ends of one matrix on a rank. With
# dropout, resumed iterations must draw the numbers that they would have drawn. Data-parallel ranks share what they write and
# read, and with a tied embedding a V has two entries of the same key on a rank.
@pytest.mark.parametrize(
    ("before", "after", "flags", "ranks"),
    [
        ("v-half", "interleaved", (UNTIED,), 2),
        ("stock", "v-half", DROPOUT, 4),
        ("v-half", "stock", DROPOUT, 4),
    ],
)
def test_checkpoints_are_interchangeable(train_small, tmp_path, before, after, flags, ranks):
    train_small(before, *flags, "--save", str(tmp_path), "--save-interval", "2", ranks=ranks)
    load = (*flags, *RESUMED, "--load", str(tmp_path), "--ckpt-fully-parallel-load")
    resumed = train_small(after, *load, initialise=False, ranks=ranks)
    whole = train_small("stock", *flags, "--train-iters", "4", ranks=ranks)
    assert_same_training(resumed, replace(whole, losses=whole.losses[2:], grad_norms=whole.grad_norms[2:]))


# Buckets with padding at their end, on the first rank.
SHARDED = (UNTIED, *DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable", "--ckpt-format", "torch_dist", *RESUMED)
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


@pytest.fixture(scope="module")
def distributed(train_small, tmp_path_factory):
    """``distributed(after, *flags)``: losses from step 2 on, which a V wrote in the background, and what they should be."""
    folder = str(tmp_path_factory.mktemp("distributed"))
    uninterrupted = train_small("stock", *SHARDED, ranks=2)
    saving = train_small("v-half", *SHARDED, *ASYNC, "--save", folder, "--save-interval", "2", ranks=2)
    assert saving.losses == uninterrupted.losses

    def resumed(after: str, *more: str, load: str = folder, step: int = 2, ranks: int = 2):
        place = ("--load", load, "--ckpt-step", str(step), "--ckpt-fully-parallel-load")
        run = train_small(after, *SHARDED, *place, *more, initialise=False, ranks=ranks)
        return run.losses, uninterrupted.losses[step:]

    return resumed


def test_a_distributed_optimizer_goes_from_a_v_to_1f1b_and_back(distributed, tmp_path):
    losses, expected = distributed("1f1b", "--save", str(tmp_path), "--save-interval", "3")
    assert losses == expected
    losses, expected = distributed("v-half", load=str(tmp_path), step=3)
    assert losses == expected


@pytest.mark.parametrize(
    ("after", "ranks"), [("chimera", 2), pytest.param("interleaved", 4, marks=nightly("1f1b above, and its way back"))]
)
def test_a_distributed_optimizer_goes_to_other_placements_and_sizes(distributed, after, ranks):
    """Two replicas of the model add gradients in another order, and so do two data-parallel ranks."""
    losses, expected = distributed(after, ranks=ranks)
    assert losses == pytest.approx(expected, rel=ROUNDING) and len(set(losses)) == 2


def test_a_report_that_is_lost_costs_no_checkpoint(train_small, tmp_path):
    """The closing checkpoint, which Megatron writes when its loop has ended. Scalars go to TensorBoard meanwhile."""
    save = ("--save", str(tmp_path), "--save-interval", "1000", "--tensorboard-dir", "unused")
    run = train_small("v-half", UNTIED, *save, sabotage="report is lost")
    assert run.losses == [], "no report"
    resumed = train_small("stock", UNTIED, *RESUMED, "--load", str(tmp_path), initialise=False)
    assert resumed.losses == train_small("stock", UNTIED, "--train-iters", "4").losses[2:]
    assert [at for name, at, _ in run.scalars if name == "lm loss"] == [1, 2]
    for name in ("peak-activation-bytes", "predicted-peak-activation-bytes", "bubble-rate", "makespan-seconds"):
        assert [at for own, at, _ in run.scalars if own == f"pipemem/{name}"] == [1, 2]


def test_a_rank_that_cannot_measure_costs_its_numbers_alone(train_small):
    """Its peers gather without its numbers, and no rank plans anew."""
    steps = ("--train-iters", "4")
    run = train_small("zb-h1", "--pipemem-costs", "profile", *steps, sabotage="clock is gone")
    assert_same_training(run, train_small("stock", *steps))
    assert [plan["reason"] for plan in run.plans] == ["start"]
    failures = run.of_ranks("failure")
    assert failures[0] is None and "the clock is gone" in failures[1]
    assert run.counted_peaks[0] > 0 and run.of_ranks("measured_bubble_rate") == [None] * 2


def test_files_of_ranks_go_to_runs_with_the_same_placement_only(train_small, tmp_path):
    flags = (UNTIED, "--ckpt-format", "torch", *RESUMED)
    saving = train_small("v-half", *flags, "--save", str(tmp_path), "--save-interval", "2")
    load = (*flags, "--load", str(tmp_path), "--ckpt-step", "2")
    assert train_small("zbv", *load, initialise=False).losses == saving.losses[2:]
    with pytest.raises(CaseFailed) as error:
        train_small("interleaved", *load, initialise=False)
    check_refusal(str(error.value), "wrong-file", "0, 1, 1, 0", "0, 1, 0, 1")
