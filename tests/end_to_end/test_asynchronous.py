"""Pipelines that are not flushed train as their papers' formulas say, in one process and without a pipeline."""

from __future__ import annotations

import pytest
from comparing import assert_close_training, assert_predicted_bytes, bits
from model_flags import DROPOUT, PP4, RESUMED, SIX, UNTIED

LATE = ("--train-iters", "3")  # the second step of 2BW has still the first weights
PER_MICROBATCH = (UNTIED, *LATE, "--clip-grad", "0")
FLAGS = {"pipedream-2bw": (UNTIED, *LATE), "pipedream": PER_MICROBATCH}
VERTICAL = ("--pipemem-option", "vertical_sync=true")


@pytest.mark.parametrize(
    ("rule", "options", "versions"),
    [
        ("pipedream-2bw", (), (2, 2)),
        ("pipedream", PP4, (4, 3, 2, 1)),
        ("pipedream-vertical-sync", (*PP4, *VERTICAL), (4, 4, 4, 4)),
    ],
)
def test_trains_as_its_formula_says(train_small, emulate, rule, options, versions):
    """Every microbatch meets the same weights, and gradients add up in the same order, so losses agree to the bit."""
    name, stages = rule.removesuffix("-vertical-sync"), len(versions)
    run = train_small(name, *FLAGS[name], *options, ranks=stages)
    assert bits(run.losses) == bits(emulate(rule, *FLAGS[name], stages=stages).losses)
    assert run.losses[2:] != train_small("1f1b", *FLAGS[name]).losses[2:], "as synchronous training: nothing was late"
    assert_predicted_bytes(run)
    assert run.of_ranks("predicted_weight_bytes") == run.of_ranks("counted_weight_bytes")
    assert run.of_ranks("weight_versions") == list(versions)
    assert run.last_step is None, "a step with forwards of the next one cannot be explained alone"


def test_tied_embeddings_and_evaluation_in_between(train_small, emulate):
    """The two copies of a tied weight are summed at the end of a step instead of after every microbatch: 1e-6."""
    evaluation = (*LATE, "--eval-interval", "2", "--eval-iters", "1")
    run = train_small("pipedream-2bw", *evaluation)
    assert_close_training(run, emulate("pipedream-2bw", *evaluation))
    assert len(run.validation) > 2


@pytest.mark.parametrize(("name", "flags"), [("pipedream-2bw", ("--overlap-grad-reduce",)), ("pipedream", ())])
def test_with_data_parallel_replicas(train_small, emulate, name, flags):
    """Two replicas' gradients are summed apart and then together: 1e-6."""
    run = train_small(name, *FLAGS[name], *SIX, *flags, ranks=4)
    assert_close_training(run, emulate(name, *FLAGS[name], *SIX, replicas=2))


def test_without_a_barrier_it_trains_the_same(train_small, emulate, tmp_path):
    """On Megatron's own loop, evaluation and checkpoint in between; clipped, too, where the norm's bits are those of the same
    ranks.
    """
    flags = (UNTIED, "--train-iters", "5", "--log-interval", "10", "--rerun-mode", "disabled")
    flags = (*flags, "--eval-interval", "3", "--eval-iters", "1")
    late = train_small("pipedream-2bw", *flags, "--pipemem-overlap-steps")
    assert late.of_ranks("weight_versions") == [2, 2] and min(late.of_ranks("steps_ahead")) > 0
    assert late.of_ranks("waiting_gradient_bytes") == [size // 2 for size in late.of_ranks("counted_weight_bytes")]
    whole = emulate("pipedream-2bw", *flags)
    assert bits(late.losses) == bits(whole.losses)
    clipped = (*flags, "--clip-grad", "0.5")
    drained = train_small("pipedream-2bw", *clipped)
    save = ("--save", str(tmp_path), "--save-interval", "3")
    late = train_small("pipedream-2bw", *clipped, "--pipemem-overlap-steps", *save)
    assert bits(late.losses) == bits(drained.losses) and late.weights == drained.weights
    assert late.validation == drained.validation != []
    assert late.losses[2:] != whole.losses[2:], "nothing was clipped"
    load = ("--load", str(tmp_path), "--ckpt-step", "3", "--override-opt_param-scheduler")
    resumed = train_small("pipedream-2bw", *clipped, *load, initialise=False)
    assert bits(resumed.losses) == bits(drained.losses[3:])


def test_a_resumed_run_is_the_uninterrupted_one(train_small, tmp_path):
    flags = (*PER_MICROBATCH, *DROPOUT, *RESUMED)
    whole = train_small("pipedream", *flags, "--save", str(tmp_path), "--save-interval", "2")
    load = (*flags, "--load", str(tmp_path), "--ckpt-step", "2")
    resumed = train_small("pipedream", *load, initialise=False)
    assert bits(resumed.losses) == bits(whole.losses[2:])
    for file in tmp_path.glob("iter_0000002/pipemem_weights_*"):
        file.unlink()
    fresh = train_small("pipedream", *load, "--seed", "1234", initialise=False)
    assert bits(fresh.losses) != bits(resumed.losses), "the older versions of the weights made no difference"
    assert fresh.losses[0] > 0
