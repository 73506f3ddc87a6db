"""What users combine with a schedule: recomputation, number formats, batch sizes, uneven layouts, other models."""

from __future__ import annotations

import pytest

SPLIT = ("zb-h1", "v-half")
UNTIED = "--untie-embeddings-and-output-weights"
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-swiglu-fusion", UNTIED),
    *("--position-embedding-type", "rope", "--group-query-attention", "--num-query-groups", "2"),
)
MOE = (
    # Megatron's own local experts cannot add a bias: they modify a view in place.
    *("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "[1,0,1,0,0,1,1,1]"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "aux_loss"),
)

EVALUATION = ("--eval-iters", "2", "--eval-interval", "2", "--split", "50,30,20", "--train-iters", "3")

# name -> flags, schedules
VARIANTS = {
    "recompute-full": (RECOMPUTE, SPLIT),
    "recompute-selective": (("--recompute-granularity", "selective"), SPLIT),
    "per-token-loss": (("--calculate-per-token-loss",), SPLIT),
    "bf16": (("--bf16",), (*SPLIT, "interleaved")),
    "bf16-recompute-full": (("--bf16", *RECOMPUTE), ("v-half",)),
    "fp16": (("--fp16", "--initial-loss-scale", "4096"), SPLIT),
    "llama": (LLAMA, (*SPLIT, "interleaved")),
    "moe": (MOE, (*SPLIT, "interleaved")),
    "evaluation": (EVALUATION, ("1f1b", "interleaved", *SPLIT, "1f1b-v")),
}


@pytest.mark.parametrize(
    ("variant", "schedule"), [(variant, name) for variant, (_, names) in VARIANTS.items() for name in names]
)
def test_trains_as_stock(train, assert_same_training, variant, schedule):
    flags, _ = VARIANTS[variant]
    assert_same_training(train(schedule, *flags), train("stock", *flags))


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("v-half", ()),
        ("zb-h1", EVALUATION),
        ("po-f", ()),
        ("1f1b", ("--pipemem-vocab-parallel", "2", UNTIED)),
        ("pipedream-2bw", ("--train-iters", "4")),
        ("pipedream", ("--clip-grad", "0", UNTIED, "--train-iters", "4")),
    ],
)
def test_an_order_for_one_hardware_queue_computes_the_same(train, schedule, flags):
    """And its peak is foretold to the byte."""
    run, usual = train(schedule, "--pipemem-single-queue", *flags), train(schedule, *flags)
    assert [loss.hex() for loss in run.losses] == [loss.hex() for loss in usual.losses] and len(set(run.losses)) > 1
    assert (run.grad_norms, run.validation) == (usual.grad_norms, usual.validation)
    assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize(
    ("schedule", "flags", "single_queues"),
    [
        ("v-half", ("--train-iters", "4"), [True, True, False, False]),
        ("1f1b", ("--pipemem-vocab-parallel", "2", UNTIED, "--train-iters", "3"), [True, True, False]),
        ("po-f", ("--train-iters", "3"), [True, True, False]),
        ("pipedream-2bw", ("--train-iters", "4"), [True, True, False, False]),
        # Steps of 2, 2, 2, 4, 4 and 4 microbatches.
        (
            "zb-h1",
            ("+--global-batch-size", "--step-batch-size-schedule", "0:2 384:4", "--train-iters", "6"),
            [True, True, False, True, True, False],
        ),
        # Two training steps and two evaluations, twice: evaluation launches something new, and the third step does not.
        ("zb-h1", (*EVALUATION, "--eval-interval", "2"), None),
    ],
)
def test_what_launches_something_new_runs_for_one_hardware_queue(train, schedule, flags, single_queues):
    """The order changes between steps, and neither the numbers nor the bytes that were foretold do."""
    run, usual = train(schedule, *flags, as_on_gpus=True), train(schedule, *flags)
    assert [loss.hex() for loss in run.losses] == [loss.hex() for loss in usual.losses] and len(set(run.losses)) > 1
    assert (run.grad_norms, run.validation) == (usual.grad_norms, usual.validation)
    assert run.predicted_peaks == run.counted_peaks
    assert len({tuple(each) for each in run.single_queues}) == 1
    if single_queues is not None:
        assert run.single_queues[0] == single_queues
    else:
        assert run.single_queues[0][:4] == [True] * 4 and not all(run.single_queues[0])


def test_evaluation_is_compared(train):
    assert len(train("v-half", *EVALUATION).validation) >= 2


ANY_NUMBER = {
    1: ("zb-h1", "v-half", "interleaved"),
    2: ("1f1b", "v-half"),
    5: ("gpipe", "v-half", "interleaved"),
    7: ("zb-h1", "interleaved"),
}


@pytest.mark.parametrize(
    ("microbatches", "schedule"), [(number, name) for number, names in ANY_NUMBER.items() for name in names]
)
def test_any_number_of_microbatches(train, assert_same_training, microbatches, schedule):
    flags = ("--global-batch-size", str(microbatches))
    run = train(schedule, *flags)
    assert_same_training(run, train("stock", *flags))
    assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize("schedule", [*SPLIT, "interleaved"])
def test_the_number_of_microbatches_may_change_between_steps(train, assert_same_training, schedule):
    # Megatron counts the thresholds in tokens: steps of 2, 2, 4, 4, 6, 6 and 8 microbatches.
    flags = ("+--global-batch-size", "--step-batch-size-schedule", "0:2 256:4 768:6 1536:8", "--train-iters", "7")
    run = train(schedule, *flags)
    assert_same_training(run, train("stock", *flags))
    assert run.predicted_peaks == run.counted_peaks


LAYOUTS = {
    "linear": ("Ett|t|tttt|tL", ("1f1b", "zb-h1")),
    "two-chunks": ("E|t|tt|t|t|t|tt|L", ("v-half", "v-min", "interleaved")),
    "empty-stages": ("Et||ttt|t|t||tt|L", ("zbv", "v-half", "interleaved")),
}


@pytest.mark.parametrize(
    ("layout", "schedule"), [(layout, name) for layout, (_, names) in LAYOUTS.items() for name in names]
)
def test_uneven_layouts(train, assert_same_training, layout, schedule):
    run = train(schedule, "--pipeline-model-parallel-layout", LAYOUTS[layout][0])
    assert_same_training(run, train("stock"))
    assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize("schedule", ["v-half", "interleaved"])
def test_uneven_layout_of_a_mixture_of_experts(train, assert_same_training, schedule):
    run = train(schedule, *MOE, "--pipeline-model-parallel-layout", LAYOUTS["two-chunks"][0])
    assert_same_training(run, train("stock", *MOE))
