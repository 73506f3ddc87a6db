"""Flags of Megatron's loop that reach into a step or change its size: under schedules as under stock."""

from __future__ import annotations

import pytest
from lanes import rest_nightly

EVALUATED = ("--eval-iters", "1", "--eval-interval", "2", "--split", "50,30,20")
LOGGED = (
    *("--log-params-norm", "--log-num-zeros-in-grad", "--log-throughput", "--timing-log-level", "2"),
    *("--timing-log-option", "all", "--tensorboard-dir", "unused", "--log-world-size-to-tensorboard"),
    *("--log-memory-to-tensorboard", "--log-validation-ppl-to-tensorboard", "--rerun-mode", "disabled"),
    *("--no-barrier-with-level-1-timing", "--train-sync-interval", "1", "--check-for-spiky-loss"),
    *("--check-for-large-grads", "--empty-unused-memory-level", "2", "--manual-gc", "--manual-gc-interval", "1"),
)
DP2 = (
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--use-tp-pp-dp-mapping"),
    *("--ddp-bucket-size", "20000", "--check-weight-hash-across-dp-replicas-interval", "1", "--no-align-grad-reduce"),
    *("--no-align-param-gather", "--ddp-average-in-collective", "--decoupled-lr", "5e-4", "--global-batch-size", "6"),
)
CASES = {
    "another-batch-to-evaluate": (
        (*EVALUATED, "--eval-global-batch-size", "6", "--eval-micro-batch-size", "2"),
        ("v-half",),
    ),
    "logged": (LOGGED, ("zb-h1", "v-half")),
    "only-evaluated": ((*EVALUATED, "--skip-train", "--pipemem-random", "layerwise"), ("v-half",)),
    "data-parallel": (DP2, ("zb-h1", "v-half")),
}


@pytest.mark.parametrize(
    ("name", "schedule"),
    rest_nightly(
        [(name, each) for name, (_, asked) in CASES.items() for each in asked],
        [(name, "v-half") for name in CASES],
        "the same flags with v-half",
    ),
)
def test_trains_as_stock(train_small, name, schedule):
    flags, _ = CASES[name]
    run, stock = (train_small(each, *flags, ranks=4 if name == "data-parallel" else 2) for each in (schedule, "stock"))
    assert run.losses == stock.losses
    assert run.validation == stock.validation
    assert len(set(run.losses)) > 1 or run.validation
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=5e-7)


@pytest.mark.parametrize("schedule", rest_nightly(["zb-h1", "v-half"], ["v-half"], "v-half"))
def test_a_frozen_model_runs_and_stays(train_small, schedule):
    """Megatron freezes models that the script builds, and no others."""
    run, stock = (train_small(name, "--freeze-all-layers", by_provider=True) for name in (schedule, "stock"))
    assert run.losses == stock.losses and len(set(run.losses)) > 1
    assert run.losses[1] != train_small("stock").losses[1]
