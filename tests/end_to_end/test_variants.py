"""What users combine with a schedule: recomputation, number formats, batch sizes, uneven layouts, other models."""

from __future__ import annotations

import pytest
from lanes import nightly, rest_nightly

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

SMALL_MOE = (*MOE, "--moe-layer-freq", "[1,0,1,1]")  # for four layers
EVALUATION = ("--eval-iters", "1", "--eval-interval", "2", "--split", "50,30,20", "--train-iters", "3")

# name -> flags, schedules
VARIANTS = {
    "recompute-full": (RECOMPUTE, SPLIT),
    "recompute-selective": (("--recompute-granularity", "selective"), SPLIT),
    "llama-per-token-loss": ((*LLAMA, "--calculate-per-token-loss"), SPLIT),
    "bf16": (("--bf16",), (*SPLIT, "interleaved")),
    "bf16-recompute-full": (("--bf16", *RECOMPUTE), ("v-half",)),
    "fp16": (("--fp16", "--initial-loss-scale", "4096"), SPLIT),
    "llama": (LLAMA, (*SPLIT, "interleaved")),
    "moe": (SMALL_MOE, (*SPLIT, "interleaved")),
    "evaluation": (EVALUATION, ("1f1b", "interleaved", *SPLIT, "1f1b-v")),
}


# Every flag with a family or two, and every family with several. Selective recomputation is in test_offload.py, bf16 alone
# in test_pairs.py and test_vocabulary.py.
COVERING = (
    *(("bf16-recompute-full", "v-half"), ("fp16", "v-half"), ("llama-per-token-loss", "v-half")),
    *(("moe", "zb-h1"), ("moe", "interleaved"), ("evaluation", "v-half")),
)
OTHER_FAMILY = "the same flags with another family, or with further flags"


@pytest.mark.parametrize(
    ("variant", "schedule"),
    rest_nightly(
        [(variant, name) for variant, (_, names) in VARIANTS.items() for name in names], COVERING, OTHER_FAMILY
    ),
)
def test_trains_as_stock(train_small, assert_same_training, variant, schedule):
    flags, _ = VARIANTS[variant]
    assert_same_training(train_small(schedule, *flags), train_small("stock", *flags))


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("v-half", ()),
        pytest.param("zb-h1", EVALUATION, marks=nightly("the same run below, which changes between the orders")),
        pytest.param("po-f", (), marks=nightly("the same run below, which changes between the orders")),
        ("1f1b", ("--pipemem-vocab-parallel", "2", UNTIED)),
        pytest.param(
            *("pipedream-2bw", ("--train-iters", "4")), marks=nightly("pipedream, whose weights change more often")
        ),
        ("pipedream", ("--clip-grad", "0", UNTIED, "--train-iters", "4")),
    ],
)
def test_an_order_for_one_hardware_queue_computes_the_same(train_small, schedule, flags):
    """And its peak is foretold to the byte."""
    run, usual = train_small(schedule, "--pipemem-single-queue", *flags), train_small(schedule, *flags)
    assert [loss.hex() for loss in run.losses] == [loss.hex() for loss in usual.losses] and len(set(run.losses)) > 1
    assert (run.grad_norms, run.validation) == (usual.grad_norms, usual.validation)
    assert run.predicted_peaks == run.counted_peaks


# Steps of 2, 2, 2, 4, 4 and 4 microbatches: Megatron counts the threshold in tokens.
ANOTHER_NUMBER = ("+--global-batch-size", "--step-batch-size-schedule", "0:2 384:4", "--train-iters", "6")


@pytest.mark.parametrize(
    ("schedule", "flags", "single_queues"),
    [
        pytest.param(
            *("v-half", ("--train-iters", "3"), [True, True, False]), marks=nightly("the first three steps below")
        ),
        pytest.param(
            *("1f1b", ("--pipemem-vocab-parallel", "2", UNTIED, "--train-iters", "3"), [True, True, False]),
            marks=nightly("the same schedule above, and v-half here"),
        ),
        pytest.param(
            *("po-f", ("--train-iters", "3"), [True, True, False]),
            marks=nightly("tests/runtime/test_executor.py, which offloads in this order; v-half here"),
        ),
        pytest.param(
            *("pipedream-2bw", ("--train-iters", "4"), [True, True, False, False]),
            marks=nightly("the same schedule above, and v-half here"),
        ),
        # Timers make every host wait around every pass, where the usual order never ends. Evaluation runs without timers.
        ("zb-h1", (*EVALUATION, "--timing-log-level", "2"), [True] * 6),
        pytest.param(*("v-half", (*EVALUATION, "--timing-log-level", "2"), [True] * 6), marks=nightly("zb-h1")),
        ("v-half", ANOTHER_NUMBER, [True, True, False, True, True, False]),
        # Two training steps and an evaluation, twice: evaluation launches something new, and the third step does not.
        ("v-half", EVALUATION, None),
    ],
)
def test_what_launches_something_new_runs_for_one_hardware_queue(train_small, schedule, flags, single_queues):
    """The order changes between steps, and neither the numbers nor the bytes that were foretold do."""
    run, usual = train_small(schedule, *flags, as_on_gpus=True), train_small(schedule, *flags)
    assert [loss.hex() for loss in run.losses] == [loss.hex() for loss in usual.losses] and len(set(run.losses)) > 1
    assert (run.grad_norms, run.validation) == (usual.grad_norms, usual.validation)
    assert run.predicted_peaks == run.counted_peaks
    assert len({tuple(each) for each in run.single_queues}) == 1
    if single_queues is not None:
        assert run.single_queues[0] == single_queues
    else:
        assert run.single_queues[0][:3] == [True] * 3 and not all(run.single_queues[0])


def test_evaluation_is_compared(train_small):
    assert len(train_small("v-half", *EVALUATION).validation) >= 2


ANY_NUMBER = {
    1: ("zb-h1", "v-half", "interleaved"),
    2: ("1f1b", "v-half"),
    3: ("gpipe", "v-half", "interleaved"),
    5: ("zb-h1", "interleaved"),
}


@pytest.mark.parametrize(
    ("microbatches", "schedule"),
    rest_nightly(
        [(number, name) for number, names in ANY_NUMBER.items() for name in names],
        [(1, "v-half"), (3, "interleaved")],
        "the same flags with another family; two microbatches below, and in test_bidirectional.py and test_auto.py",
    ),
)
def test_any_number_of_microbatches(train_small, assert_same_training, microbatches, schedule):
    flags = ("--global-batch-size", str(microbatches))
    run = train_small(schedule, *flags)
    assert_same_training(run, train_small("stock", *flags))
    assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize("schedule", rest_nightly([*SPLIT, "interleaved"], ["v-half"], OTHER_FAMILY))
def test_the_number_of_microbatches_may_change_between_steps(train_small, assert_same_training, schedule):
    run = train_small(schedule, *ANOTHER_NUMBER)
    assert_same_training(run, train_small("stock", *ANOTHER_NUMBER))
    assert run.predicted_peaks == run.counted_peaks


LAYOUTS = {
    "linear": ("Ettt|tL", ("1f1b", "zb-h1")),
    "two-chunks": ("Et|tt|t|L", ("v-half", "v-min", "interleaved")),
    "empty-stages": ("Et||tt|tL", ("zbv", "v-half", "interleaved")),
}


@pytest.mark.parametrize(
    ("layout", "schedule"),
    rest_nightly(
        [(layout, name) for layout, (_, names) in LAYOUTS.items() for name in names],
        [("empty-stages", "zbv"), ("empty-stages", "interleaved")],
        "the same layout with another family; two chunks below, and a linear one in test_auto.py",
    ),
)
def test_uneven_layouts(train_small, assert_same_training, layout, schedule):
    run = train_small(schedule, "--pipeline-model-parallel-layout", LAYOUTS[layout][0])
    assert_same_training(run, train_small("stock"))
    assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize("schedule", rest_nightly(["v-half", "interleaved"], ["v-half"], OTHER_FAMILY))
def test_uneven_layout_of_a_mixture_of_experts(train_small, assert_same_training, schedule):
    run = train_small(schedule, *SMALL_MOE, "--pipeline-model-parallel-layout", LAYOUTS["two-chunks"][0])
    assert_same_training(run, train_small("stock", *SMALL_MOE))


FIVE = ("--num-layers", "5")


@pytest.mark.parametrize(
    ("schedule", "flags", "cut"),
    [
        ("auto", (*FIVE, "--pipemem-layout", "auto"), "Ett|tttL"),
        pytest.param(
            *("v-half", (*FIVE, "--pipemem-layout", "auto"), "Ett|tttL"), marks=nightly("the same flag with auto")
        ),
        pytest.param(*("v-half", FIVE, "Ett|tttL"), marks=nightly("a layout that is given")),
        pytest.param(
            *("v-half", ("--decoder-first-pipeline-num-layers", "1"), "Et|tttL"),
            marks=nightly("a layout that is given"),
        ),
    ],
)
def test_layouts_that_a_run_makes_itself(train_small, assert_same_training, schedule, flags, cut):
    layers = FIVE if flags[:2] == FIVE else ()
    stock = train_small("stock", *layers, "--pipeline-model-parallel-layout", cut)
    assert_same_training(train_small(schedule, *flags), stock)
