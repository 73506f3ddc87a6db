"""What users combine with a schedule: number formats, batch sizes, layouts, parallelism, and flags of Megatron's loop."""

from __future__ import annotations

import pytest
from comparing import assert_predicted_bytes, bits
from lanes import nightly, rest_nightly
from model_flags import (
    DISTRIBUTED,
    EVALUATION,
    FUSION,
    LAYOUT,
    LLAMA,
    MOE,
    OVERLAP,
    RECOMPUTE,
    SIX,
    TP2,
    TP_AND_SP,
    UNTIED,
    VOCABULARY,
)

# Steps of 2, 2, 2, 4, 4 and 4 microbatches: Megatron counts the threshold in tokens.
ANOTHER_NUMBER = ("+--global-batch-size", "--step-batch-size-schedule", "0:2 384:4", "--train-iters", "6")
EMPTY_STAGES = (LAYOUT, "Et||tt|tL")
WATCHED = (
    *("--log-params-norm", "--log-num-zeros-in-grad", "--log-throughput"),
    *("--timing-log-option", "all", "--tensorboard-dir", "unused", "--log-world-size-to-tensorboard"),
    *("--log-memory-to-tensorboard", "--log-validation-ppl-to-tensorboard", "--rerun-mode", "disabled"),
    *("--no-barrier-with-level-1-timing", "--train-sync-interval", "1", "--check-for-spiky-loss"),
    *("--check-for-large-grads", "--empty-unused-memory-level", "2", "--manual-gc", "--manual-gc-interval", "1"),
)
LOGGED = (*WATCHED, "--timing-log-level", "2")
# Other settings of what-runs-where.md's table that a run on CPU ranks can have, apart from timers of level 2.
MEASURED = (
    *("--timing-log-level", "1", "--log-energy", "--nvtx-ranges", "--train-iters", "3"),
    *("--log-straggler", "--straggler-ctrlr-port", "0", "--disable-straggler-on-startup"),
)
# Not gradients of activations: Megatron's hooks for them do not go with its unfused cross entropy, under stock either.
SAVED = ("activations", "wgrads", "params")
CHECKED = (
    *("--use-tp-pp-dp-mapping", "--check-weight-hash-across-dp-replicas-interval", "1", "--no-align-grad-reduce"),
    *("--no-align-param-gather", "--ddp-average-in-collective", "--decoupled-lr", "5e-4"),
)
# name -> schedule, flags of stock too, flags of ours. A case has several variants that touch different parts of a step.
CASES = {
    "experts, uneven layout, bf16, recomputed": ("v-half", (*MOE, "--bf16", *RECOMPUTE), (LAYOUT, "Et|tt|t|L")),
    "experts, three microbatches": ("interleaved", (*MOE, "--global-batch-size", "3"), ()),
    "experts": ("zb-h1", MOE, ()),
    "fp16, one microbatch": ("v-half", ("--fp16", "--initial-loss-scale", "4096", "--global-batch-size", "1"), ()),
    "llama, loss per token, another number of microbatches": (
        "v-half",
        (*LLAMA, "--calculate-per-token-loss", *ANOTHER_NUMBER),
        (),
    ),
    "empty stages": ("zbv", (), EMPTY_STAGES),
    "empty stages, interleaved": ("interleaved", (), EMPTY_STAGES),
    "tensor parallel": ("v-half", TP2, ()),
    "sequence parallel, fusion": ("v-half", (*TP_AND_SP, *FUSION), ()),
    "data parallel": ("v-half", (*OVERLAP, *SIX), ()),
    "distributed optimizer, fusion, checked": ("v-half", (*DISTRIBUTED, *FUSION, *CHECKED, *SIX), ()),
    "evaluation": ("v-half", EVALUATION, ()),
    "evaluation of another batch, logged": (
        "v-half",
        (*EVALUATION, "--eval-global-batch-size", "6", "--eval-micro-batch-size", "2", *LOGGED),
        (),
    ),
}
UNPREDICTED = tuple(name for name in CASES if "experts" in name)
FULL_LANE = CASES.keys() - {"experts", "empty stages, interleaved"}


@pytest.mark.parametrize(
    "name", rest_nightly(CASES, FULL_LANE, "experts in a V; the same stages in a HybridModel in test_twins.py")
)
def test_trains_as_stock(equals_stock, name):
    schedule, flags, ours = CASES[name]
    ranks = 4 if name == "data parallel" else None
    run, _ = equals_stock(schedule, *flags, ours=ours, ranks=ranks, nbytes=None if name in UNPREDICTED else "exact")
    assert len(run.validation) >= 2 or "evaluation" not in name


def test_evaluates_without_training_as_stock(train_small):
    flags = (*EVALUATION[:-2], "--skip-train", "--pipemem-rng", "layerwise")
    run, stock = (train_small(schedule, *flags) for schedule in ("v-half", "stock"))
    assert run.validation == stock.validation != [] == run.losses


def test_a_frozen_model_runs_and_stays(train_small):
    """Megatron freezes models that the script builds, and no others."""
    run, stock = (train_small(name, "--freeze-all-layers", by_provider=True) for name in ("v-half", "stock"))
    assert run.losses == stock.losses and len(set(run.losses)) > 1
    assert run.losses[1] != train_small("stock").losses[1]


def test_a_layout_that_a_run_makes_itself(train_small, equals_stock):
    five = ("--num-layers", "5")

    def train(schedule: str, *flags: str):
        cut = (LAYOUT, "Ett|tttL") if schedule == "stock" else ("--pipemem-layout", "auto")
        return train_small(schedule, *flags, *cut)

    equals_stock("auto", *five, train=train)


def assert_same_steps(run, usual, exact: bool = True) -> None:
    assert bits(run.losses) == bits(usual.losses) and len(set(run.losses)) > 1
    assert (run.grad_norms, run.validation) == (usual.grad_norms, usual.validation)
    assert_predicted_bytes(run, exact=exact)


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("v-half", ()),
        ("1f1b", (VOCABULARY, "2", UNTIED)),
        ("pipedream", ("--clip-grad", "0", UNTIED, "--train-iters", "4")),
    ],
)
def test_an_order_for_one_hardware_queue_computes_the_same(train_small, schedule, flags):
    assert_same_steps(train_small(schedule, "--pipemem-single-queue", *flags), train_small(schedule, *flags))


@pytest.mark.parametrize(
    ("schedule", "flags", "single_queues"),
    [
        # Timers make every host wait around every pass, where the usual order never ends. Evaluation runs without timers.
        ("zb-h1", (*EVALUATION, "--timing-log-level", "2"), [True] * 6),
        ("v-half", ANOTHER_NUMBER, [True, True, False, True, True, False]),
        # Two training steps and an evaluation, twice: evaluation launches something new, and the third step does not.
        ("v-half", EVALUATION, None),
        ("zb-h1", (*WATCHED, *MEASURED), [True, True, False]),
        # Late steps may need a kernel for other numbers of tokens.
        pytest.param(
            "zb-h1", (*MOE, "--train-iters", "3"), [True] * 3, marks=nightly("tests/mcore/test_waiting_hosts.py")
        ),
    ],
)
def test_what_launches_something_new_runs_for_one_hardware_queue(train_small, schedule, flags, single_queues):
    """The order changes between steps, and neither the numbers nor the predicted bytes do."""
    run = train_small(schedule, *flags, as_on_gpus=True)
    assert_same_steps(run, train_small(schedule, *flags), exact="--num-experts" not in flags)
    (orders,) = {tuple(rank) for rank in run.single_queues}
    if single_queues is not None:
        assert [*orders] == single_queues
    else:
        assert orders[:3] == (True,) * 3 and not all(orders)


@pytest.mark.parametrize("profiler", [(), ("--use-pytorch-profiler",)])
def test_profiles_and_saved_tensors_keep_the_usual_order(train_small, tmp_path, profiler):
    """The rest of what-runs-where.md's table: a profile from the second step on, all saved tensors, and sniff tests."""
    profiled = ("--profile", "--profile-step-start", "1", "--profile-step-end", "3", *profiler)
    saved = [part for what in SAVED for part in (f"--save-{what}-interval", "1")]
    written = ("--save", f"{tmp_path}/saved", "--memory-snapshot-path", f"{tmp_path}/memory", "--tensorboard-dir")
    watched = ("--record-memory-history", "--gpu-sniff-test-interval", "1", "--train-iters", "3")
    flags = (*profiled, *saved, "--save-interval", "100", *written, f"{tmp_path}/board", *watched)
    run = train_small("zb-h1", *flags, as_on_gpus=True)
    usual = train_small("zb-h1", "--train-iters", "3")
    # Not the bytes: on a CPU, saved activations are the tensors themselves, which then outlive their microbatch.
    assert (bits(run.losses), run.grad_norms) == (bits(usual.losses), usual.grad_norms)
    assert run.single_queues == [[True, True, False]] * 2
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    steps = [f"saved/{what}/iter_{number:07d}" for what in SAVED for number in (1, 2, 3)]
    expected = {"memory", *(f"{step}/mp_rank_00_{rank:03d}.pth" for step in steps for rank in (0, 1))}
    expected |= {f"torch_profile/rank-{rank}.json.gz" for rank in (0, 1) if profiler}
    assert expected <= files


def test_ranks_agree_on_memory_that_one_of_them_gave_back(train_small):
    """Rank 1 does in the third step. Its host waits then, so others that do at that moment could hang the usual order."""
    run = train_small("v-half", "--train-iters", "6", as_on_gpus=True, gives_back=2)
    assert run.single_queues == [[True, True, False, True, True, False]] * 2
    assert_same_steps(run, train_small("v-half", "--train-iters", "6"))
