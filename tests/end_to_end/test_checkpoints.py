"""A checkpoint does not remember the placement it was saved under."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lanes import rest_nightly
from quickstart import ROUNDING
from ranks import CaseFailed
from refusals import check_refusal

# With dropout, resumed iterations must draw the numbers that they would have drawn.
DROPOUT = ("--pipemem-random", "layerwise", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
EMBEDDINGS = {"tied": DROPOUT, "untied": ("--untie-embeddings-and-output-weights",)}
# Data-parallel ranks share what they write and read, and with a tied embedding a V has two entries of the same key on a rank.
RANKS = {"tied": 4, "untied": 2}
INTERCHANGES = [
    *(("stock", after) for after in ("stock", "v-half", "interleaved")),
    *(("v-half", after) for after in ("stock", "v-half", "interleaved")),
    *(("interleaved", after) for after in ("stock", "v-half")),
]


# The tied end is one more parameter to place; which placements exchange it makes no other difference.
CASES = [
    *((*pair, "untied") for pair in INTERCHANGES),
    *(
        (*pair, "tied")
        for pair in (("stock", "stock"), ("stock", "v-half"), ("v-half", "stock"), ("interleaved", "v-half"))
    ),
]


@pytest.fixture(scope="module")
def checkpoint(train_small, tmp_path_factory):
    """``checkpoint(schedule, embeddings)``: the folder of a model trained for two steps, saved once."""
    saved = {}

    def save(schedule: str, embeddings: str) -> str:
        key = (schedule, embeddings)
        if key not in saved:
            folder = tmp_path_factory.mktemp("checkpoint")
            flags = ("--train-iters", "2", "--save", str(folder), "--save-interval", "2")
            train_small(schedule, *EMBEDDINGS[embeddings], *flags, ranks=RANKS[embeddings])
            saved[key] = str(folder)
        return saved[key]

    return save


@pytest.fixture(scope="module")
def resume(train_small, checkpoint):
    """``resume(before, after, embeddings)``: two more steps with their optimizer state."""

    def run(before: str, after: str, embeddings: str):
        folder = checkpoint(before, embeddings)
        flags = ("--train-iters", "4", "--load", folder, "--override-opt_param-scheduler", "--ckpt-fully-parallel-load")
        return train_small(after, *EMBEDDINGS[embeddings], *flags, initialise=False, ranks=RANKS[embeddings])

    return run


# The full lane saves and loads once in a V, loads once interleaved, and does both with two ends of one matrix on a rank.
FULL_LANE = (("v-half", "interleaved", "untied"), ("stock", "v-half", "tied"), ("v-half", "stock", "tied"))


@pytest.mark.parametrize(
    ("before", "after", "embeddings"), rest_nightly(CASES, FULL_LANE, "a case that saves so, and one that loads so")
)
def test_checkpoints_are_interchangeable(train_small, resume, assert_same_training, before, after, embeddings):
    resumed = resume(before, after, embeddings)
    whole = train_small("stock", *EMBEDDINGS[embeddings], "--train-iters", "4", ranks=RANKS[embeddings])
    assert_same_training(resumed, replace(whole, losses=whole.losses[2:], grad_norms=whole.grad_norms[2:]))


DISTRIBUTED = (
    *("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", "--ckpt-format", "torch_dist"),
    *("--overlap-grad-reduce", "--ddp-bucket-size", "20000"),  # buckets with padding behind them, on the first rank
)
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


@pytest.fixture(scope="module")
def distributed(train_small, tmp_path_factory):
    """``distributed(after, *flags)``: losses from step 2 on, which a V wrote in the background, and what they should be."""
    folder = str(tmp_path_factory.mktemp("distributed"))
    flags = (*DISTRIBUTED, *EMBEDDINGS["untied"], "--train-iters", "4")
    uninterrupted = train_small("stock", *flags)
    saving = train_small("v-half", *flags, *ASYNC, "--save", folder, "--save-interval", "2")
    assert saving.losses == uninterrupted.losses

    def resumed(after: str, *more: str, load: str = folder, step: int = 2, ranks: int = 2):
        more = (*more, "--ckpt-fully-parallel-load", "--override-opt_param-scheduler")
        place = ("--load", load, "--ckpt-step", str(step))
        run = train_small(after, *flags, *place, *more, initialise=False, ranks=ranks)
        return run.losses, uninterrupted.losses[step:]

    return resumed


def test_a_distributed_optimizer_goes_from_a_v_to_1f1b_and_back(distributed, tmp_path):
    losses, expected = distributed("1f1b", "--save", str(tmp_path), "--save-interval", "3")
    assert losses == expected
    losses, expected = distributed("v-half", load=str(tmp_path), step=3)
    assert losses == expected


@pytest.mark.parametrize(
    ("after", "ranks"),
    rest_nightly([("chimera", 2), ("interleaved", 4)], [("chimera", 2)], "1f1b above, and its way back"),
)
def test_a_distributed_optimizer_goes_to_other_placements_and_sizes(distributed, after, ranks):
    """Two replicas of the model add gradients in another order, and so do two data-parallel ranks."""
    losses, expected = distributed(after, ranks=ranks)
    assert losses == pytest.approx(expected, rel=ROUNDING) and len(set(losses)) == 2


def test_a_report_that_is_lost_costs_no_checkpoint(train_small, tmp_path):
    """The closing checkpoint, which Megatron writes when its loop has ended. Scalars go to TensorBoard meanwhile."""
    flags = ("--train-iters", "2", "--save", str(tmp_path), "--save-interval", "1000", "--tensorboard-dir", "unused")
    run = train_small("v-half", *EMBEDDINGS["untied"], *flags, sabotage="report is lost")
    assert run.losses == [], "no report"
    flags = ("--train-iters", "4", "--load", str(tmp_path), "--override-opt_param-scheduler")
    resumed = train_small("stock", *EMBEDDINGS["untied"], *flags, initialise=False)
    assert resumed.losses == train_small("stock", *EMBEDDINGS["untied"], "--train-iters", "4").losses[2:]
    assert [at for name, at, _ in run.scalars if name == "lm loss"] == [1, 2]
    for name in ("peak-activation-bytes", "predicted-peak-activation-bytes", "bubble-rate", "makespan-seconds"):
        assert [at for own, at, _ in run.scalars if own == f"pipemem/{name}"] == [1, 2]


def test_a_rank_that_cannot_measure_costs_its_numbers_alone(train_small, assert_same_training):
    """Its peers gather what it has not got, and no rank plans anew without it."""
    run = train_small("zb-h1", "--pipemem-costs", "profile", "--train-iters", "4", sabotage="clock is gone")
    assert_same_training(run, train_small("stock", "--train-iters", "4"))
    assert [plan["reason"] for plan in run.plans] == ["start"]
    failures = run.of_ranks("failure")
    assert failures[0] is None and "the clock is gone" in failures[1]
    assert run.counted_peaks[0] > 0 and run.of_ranks("measured_bubble_rate") == [None] * 2


def test_files_of_ranks_go_to_runs_with_the_same_placement_only(train_small, tmp_path):
    flags = (*EMBEDDINGS["untied"], "--ckpt-format", "torch", "--train-iters", "4")
    saving = train_small("v-half", *flags, "--save", str(tmp_path), "--save-interval", "2")
    load = ("--load", str(tmp_path), "--ckpt-step", "2", "--override-opt_param-scheduler")
    assert train_small("zbv", *flags, *load, initialise=False).losses == saving.losses[2:]
    with pytest.raises(CaseFailed) as error:
        train_small("interleaved", *flags, *load, initialise=False)
    check_refusal(str(error.value), "wrong-file", "0, 1, 1, 0", "0, 1, 0, 1")
