"""Training loops that use megatron.core without megatron.training, whenever they imported the dispatcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from quickstart import ROUNDING
from ranks import CaseFailed, ConductedRanks
from refusals import code_in

STOCK = {"schedule": "stock", "chunks": 1, "import_after": False, "ddp": False}
OFFLOADED = {"offload": "full", "offload_options": {"min_bytes": "1B"}}
WEIGHED = {"microbatch_costs": "plain_loop:weight"}


@pytest.fixture(scope="module")
def ranks(ranks_without_training) -> ConductedRanks:
    return ranks_without_training


@pytest.fixture(scope="module")
def show(ranks) -> Callable[..., dict]:
    """Return the last rank's results of a case on two ranks, or as many as it names; equal cases are served from memory."""
    made: dict[str, dict] = {}

    def run(**changes: object) -> dict:
        case = STOCK | {"size": 2 * changes.get("tp", 1)} | changes
        if repr(case) not in made:
            made[repr(case)] = ranks.run(case, size=case["size"])[-1]
        return made[repr(case)]

    return run


def numbers(losses: list[str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses]


# With DDP, either kind of backward and a placement of two chunks, with one of the two orders of imports; without DDP, a V.
@pytest.mark.parametrize(
    ("schedule", "chunks", "import_after", "ddp"),
    [("1f1b", 1, True, True), ("zb-h1", 1, False, True), ("hanayo", 2, True, True), ("v-half", 2, False, False)],
)
def test_trains_as_stock(show, schedule, chunks, import_after, ddp):
    stock = show(ddp=ddp)["losses"]
    assert len(set(stock)) > 10
    assert show(schedule=schedule, chunks=chunks, import_after=import_after, ddp=ddp)["losses"] == stock


@pytest.mark.parametrize(
    ("schedule", "chunks", "tp", "settings"),
    [
        ("1f1b", 1, 1, {"message_shapes": "message"}),
        ("interleaved", 2, 1, {}),
        ("zb-h1", 1, 1, OFFLOADED),
        ("v-half", 2, 2, {}),
    ],
)
def test_microbatches_that_differ_train_as_stocks_do(show, schedule, chunks, tp, settings):
    stock = show(variable="VARIABLE", tp=tp)
    ours = show(variable="VARIABLE", tp=tp, schedule=schedule, chunks=chunks, settings=settings)
    assert len(set(stock["losses"])) == 13
    assert ours["losses"] == stock["losses"]
    assert ours["logits"] == stock["logits"]


def test_lengths_that_differ_stop_stocks_interleaved_schedule_on_two_ranks(show):
    """Both neighbours of a rank are then one rank, and Megatron takes the shapes of one's messages for the other's."""
    assert len(set(show(variable="EVEN", schedule="interleaved", chunks=2)["losses"])) == 11
    with pytest.raises(CaseFailed) as error:
        show(variable="EVEN", chunks=2)
    assert "shape" in str(error.value) or "size" in str(error.value)


@pytest.mark.parametrize(
    ("schedule", "chunks", "tp", "settings"),
    [
        ("v-half", 2, 1, {"recompute": "full"}),
        ("zb-h1", 1, 1, {**WEIGHED, **OFFLOADED}),
        ("v-half", 2, 1, {"vocab_cut": "2"}),
        ("zb-h1", 1, 2, {"vocab_cut": "2"}),
    ],
)
def test_bytes_of_microbatches_that_differ_are_predicted(show, tmp_path, schedule, chunks, tp, settings):
    """Masks are made for every microbatch, and attention keeps its scores: both grow with the square of the length."""
    report = tmp_path / "report.json"
    show(variable="LENGTHS", schedule=schedule, chunks=chunks, tp=tp, settings={**settings, "report": str(report)})
    ranks = json.loads(report.read_text())["ranks"]
    for what in ("peak_bytes", "host_peak_bytes"):
        assert [rank[f"predicted_{what}"] for rank in ranks] == [rank[f"counted_{what}"] for rank in ranks]
    assert len({rank["counted_peak_bytes"] for rank in ranks}) > 1
    assert all(rank["counted_host_peak_bytes"] > 0 for rank in ranks) == ("offload" in settings)


@pytest.mark.parametrize(
    ("schedule", "chunks", "tp", "settings"),
    [("zb-h1", 1, 2, {"vocab_cut": "2"}), ("chimera", 1, 1, {}), ("v-half", 2, 2, WEIGHED)],
)
def test_microbatches_that_differ_train_as_stock_but_for_the_order_of_sums(show, schedule, chunks, tp, settings):
    """With a cut vocabulary, two replicas of the model, or in another order. Losses come in the order of the iterator."""
    stock = show(variable="VARIABLE", tp=tp)
    ours = show(variable="VARIABLE", tp=tp, schedule=schedule, chunks=chunks, settings=settings)
    assert numbers(ours["losses"]) == pytest.approx(numbers(stock["losses"]), rel=ROUNDING)


@pytest.mark.parametrize(
    ("schedule", "chunks", "counted", "words"),
    [
        ("v-half", 2, 1, "hold 8 layers where the model has 4"),
        ("interleaved", 2, 1, "hold 8 layers where the model has 4"),
        ("hanayo", 3, 2, "hanayo does not run 3 model chunks per pipeline rank"),
        ("v-half", None, 1, "virtual_pipeline_model_parallel_size=2 to initialize_model_parallel"),
    ],
)
def test_a_model_that_is_cut_wrongly_is_refused_on_every_rank(ranks, schedule, chunks, counted, words):
    case = {"schedule": schedule, "chunks": chunks, "counted": counted}
    errors = [result["failure"] for result in ranks.run(case, size=2)]
    assert words in errors[0] and set(errors) == {errors[0]}


@pytest.mark.parametrize(
    "case",
    [
        {"schedule": "zb-h1", "chunks": 1},
        {"schedule": "v-half", "chunks": 2, "settings": {"vocab_cut": "1"}},
        {"schedule": "auto", "chunks": 2, "apart": True},
    ],
    ids=lambda case: case["schedule"],
)
def test_a_pipeline_steps_and_evaluates_while_another_waits(ranks, show, case):
    """Two pipelines of two ranks: 0 and 2, then 1 and 3."""
    stock = show(size=4)["losses"]
    for last in ranks.run({**STOCK, "dp": 2, **case}, size=4)[2:]:
        if "settings" in case:
            assert numbers(last["losses"]) == pytest.approx(numbers(stock), rel=ROUNDING)
        else:
            assert last["losses"] == stock


OURS = {"schedule": "zb-h1"}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({**OURS, "rng": "layerwise"}, "rank 1 has --pipemem-rng layerwise where rank 0 has stock"),
        ({"schedule": "v-half"}, "rank 1 has --pipemem-schedule v-half where rank 0 has zb-h1"),
        (None, "not enabled on rank 1"),
    ],
)
def test_ranks_with_other_settings_are_refused_on_every_rank(ranks, theirs, words):
    """Whether the plugin is enabled before Megatron's process groups are made, or after."""
    for before in (True, False):
        case = {"differ": [OURS, theirs], "before": before, "last": not before}
        errors = [result["failure"] for result in ranks.run(case, size=2)]
        assert words in errors[0] and code_in(errors[0]) == "ranks-differ"
        assert errors[1] == ("nothing" if theirs is None else errors[0])


def test_the_example_trains(ranks):
    losses = ranks.run({"example": str(Path(__file__).parents[2] / "examples")}, size=2)[-1]["losses"]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5


def test_a_failed_step_ends_on_every_rank_and_leaves_nothing_behind(ranks, show):
    results = ranks.run({**STOCK, "schedule": "zb-h1", "ddp": True, "fails_before": True}, size=4)
    first, *others = [result["failure"] for result in results]
    assert first.startswith("ArithmeticError this rank cannot go on") and "device 0 failed at position" in first
    for device, text in enumerate(others, 1):
        assert f"device {device} failed at position" in text and "of schedule v-half" in text
    assert results[-1]["losses"] == show(ddp=True, size=4)["losses"]


def test_slices_of_a_forward_step_that_computes_from_logits(show):
    """It runs once for a microbatch, on the logits of whole sequences."""
    stock, cut = (
        show(computes="likelihoods", **how)
        for how in ({}, {"schedule": "seq1f1b", "settings": {"options": {"slices": 4}}})
    )
    assert len(set(stock["losses"])) > 10
    assert numbers(cut["losses"]) == pytest.approx(numbers(stock["losses"]), rel=5e-6)
    for own, expected in zip(cut["logits"], stock["logits"], strict=True):
        assert torch.tensor(own).allclose(torch.tensor(expected), rtol=1e-4, atol=1e-5)


def has_processor(hybrid: bool) -> bool:
    return "output_processor" in signature((HybridModel if hybrid else GPTModel).forward).parameters


# No forward of a HybridModel takes such a hook, also not in pull request 4942, which has it in the model's output alone.
@pytest.mark.parametrize("hybrid", [model for model in (False, True) if has_processor(model)])
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("v-half", 2)])
def test_a_hook_on_the_output_runs_once_for_a_microbatch(show, schedule, chunks, hybrid):
    stock = show(computes="processes", hybrid=hybrid)
    ours = show(computes="processes", hybrid=hybrid, schedule=schedule, chunks=chunks)
    assert len(set(stock["losses"])) > 10 and ours["losses"] == stock["losses"]
    assert stock["calls"] == ours["calls"] == {"output_processor": len(stock["losses"])}


def test_a_hook_on_the_output_is_refused_where_the_head_is_cut(ranks):
    """Else cross entropy would take the place of its result."""
    case = {"schedule": "1f1b", "settings": {"vocab_cut": "1"}, "computes": "processes", "refuses": True}
    failures = [result["failure"] for result in ranks.run(case, size=2)]
    refusals = [failure for failure in failures if "output_processor" in failure]
    assert {code_in(refusal) for refusal in refusals} == {"vocabulary-forward-step"}


@pytest.mark.parametrize(
    ("schedule", "chunks", "algorithm", "hybrid", "options"),
    [("v-half", 2, "1", False, {}), ("zb-h1", 1, "2", True, {}), ("seq1f1b", 1, "2", False, {"slices": 4})],
)
def test_three_ranks_and_logits_without_labels(show, schedule, chunks, algorithm, hybrid, options):
    """Without ``megatron.training``, and without DDP; 64 rows over 3 ranks; both classes of models; logits of slices joined."""
    stock = show(size=3, hybrid=hybrid)
    settings = {"vocab_cut": algorithm, "options": options}
    cut = show(size=3, hybrid=hybrid, schedule=schedule, chunks=chunks, ddp=chunks == 2, settings=settings)
    assert len(set(stock["losses"])) > 10
    assert numbers(cut["losses"]) == pytest.approx(numbers(stock["losses"]), rel=5e-6)
    flat, wanted = (
        [[x for row in logits for token in row for x in token] for logits in result["logits"]]
        for result in (cut, stock)
    )
    assert len(flat) == 2
    for own, expected in zip(flat, wanted, strict=True):
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-5)
