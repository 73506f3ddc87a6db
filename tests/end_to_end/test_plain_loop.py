"""Training loops that use megatron.core without megatron.training, whenever they imported the dispatcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lanes import nightly, rest_nightly
from quickstart import ROUNDING
from ranks import ConductedRanks
from refusals import code_in

SCHEDULES = {"1f1b": 1, "zb-h1": 1, "v-half": 2, "hanayo": 2, "1f1b-v": 2, "auto": 2}
STOCK = {"schedule": "stock", "chunks": 1, "import_after": False}
CASES = [
    {**case, "ddp": ddp}
    for ddp in (True, False)
    for case in (
        STOCK,
        *(
            {"schedule": name, "chunks": chunks, "import_after": import_after}
            for name, chunks in SCHEDULES.items()
            for import_after in ((False, True) if ddp else (False,))
        ),
    )
]

VARIABLE_STOCK = {**STOCK, "ddp": False, "variable": "VARIABLE"}
VARIABLE = {
    "1f1b": {},
    "1f1b headers": {"settings": {"message_shapes": "message"}},
    "interleaved": {"chunks": 2},
    "zb-h1": {"ddp": True},
    "zb-h1 offload": {"settings": {"offload": "full", "offload_options": {"min_bytes": "1B"}}},
    "zb-h1 single queue": {"settings": {"single_queue": True}},
    "zb-h1 tp": {"tp": 2},
    "v-half": {"chunks": 2},
    "v-half tp": {"chunks": 2, "tp": 2},
    "v-half recompute": {"chunks": 2, "settings": {"recompute": "full"}},
}
FORETOLD = ("1f1b", "zb-h1 offload", "v-half", "v-half tp", "v-half recompute")
CUT = {
    "1f1b": {"settings": {"vocab_parallel": "1"}},
    "v-half": {"chunks": 2, "settings": {"vocab_parallel": "2"}},
    "zb-h1 tp": {"tp": 2, "settings": {"vocab_parallel": "2"}},
}
WEIGHTS = {"microbatch_costs": "plain_loop:weight"}
WEIGHED = {
    "v-half tp weighed": {"chunks": 2, "tp": 2, "settings": WEIGHTS},
    "zb-h1 offload weighed": {"settings": {**WEIGHTS, "offload": "full", "offload_options": {"min_bytes": "1B"}}},
}


@pytest.fixture(scope="module")
def ranks(ranks_without_training) -> ConductedRanks:
    return ranks_without_training


@pytest.fixture(scope="module")
def show(ranks) -> Callable[[dict], dict]:
    """Return the last rank's results of a case on four ranks, or as many as it names; equal cases are served from memory."""
    made: dict[str, dict] = {}

    def run(case: dict) -> dict:
        if repr(case) not in made:
            made[repr(case)] = ranks.run(case, size=case.get("size", 4))[-1]
        return made[repr(case)]

    return run


TWO = {"size": 2}
# With DDP, either kind of backward and a placement of two chunks, with one of the two orders of imports; without DDP, a V.
FULL_LANE = [
    *({"schedule": "1f1b", "chunks": 1, "import_after": True, "ddp": True},),
    *({"schedule": "zb-h1", "chunks": 1, "import_after": False, "ddp": True},),
    *({"schedule": "hanayo", "chunks": 2, "import_after": True, "ddp": True},),
    *({"schedule": "v-half", "chunks": 2, "import_after": False, "ddp": False},),
]


@pytest.mark.parametrize(
    "case",
    rest_nightly(
        CASES,
        FULL_LANE,
        "the same with the other order of imports; of auto and 1f1b-v, test_auto.py and test_families.py",
    ),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_trains_as_stock(show, case):
    stock = show({**STOCK, **TWO, "ddp": case["ddp"]})["losses"]
    assert len(set(stock)) > 10
    assert show({**case, **TWO})["losses"] == stock


@pytest.fixture(scope="module")
def variable(show) -> Callable[..., dict]:
    """``variable(name, **case)``: the results of the last rank of two, for microbatches that differ."""
    return lambda name, **case: show(
        {**VARIABLE_STOCK, "schedule": name.split()[0], "size": 2 * case.get("tp", 1), **case}
    )


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        VARIABLE, ["1f1b headers", "interleaved", "zb-h1 offload", "v-half tp"], "the same schedule with more"
    ),
)
def test_microbatches_that_differ_train_as_stocks_do(variable, name):
    stock, ours = variable("stock", tp=VARIABLE[name].get("tp", 1)), variable(name, **VARIABLE[name])
    assert len(set(stock["losses"])) == 13
    assert ours["losses"] == stock["losses"]
    assert ours["logits"] == stock["logits"]


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        [*FORETOLD, *WEIGHED, *(f"{name} cut" for name in CUT)],
        ["v-half recompute", "zb-h1 offload weighed", "v-half cut", "zb-h1 tp cut"],
        "the same schedule with more",
    ),
)
def test_bytes_of_microbatches_that_differ_are_foretold(variable, tmp_path, name):
    """Masks are made for every microbatch, and attention keeps its scores: both grow with the square of the length."""
    case = CUT[name.removesuffix(" cut")] if name.endswith(" cut") else (VARIABLE | WEIGHED)[name]
    report = tmp_path / "report.json"
    variable(name, **{**case, "settings": {**case.get("settings", {}), "report": str(report)}, "variable": "LENGTHS"})
    ranks = json.loads(report.read_text())["ranks"]
    for what in ("peak_bytes", "host_peak_bytes"):
        assert [rank[f"predicted_{what}"] for rank in ranks] == [rank[f"counted_{what}"] for rank in ranks]
    assert len({rank["counted_peak_bytes"] for rank in ranks}) > 1
    assert all(rank["counted_host_peak_bytes"] > 0 for rank in ranks) == ("offload" in name)


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        [*CUT, "chimera", *WEIGHED], ["zb-h1 tp", "chimera", "v-half tp weighed"], "the same with tensor parallelism"
    ),
)
def test_microbatches_that_differ_train_as_stock_but_for_the_order_of_sums(variable, name):
    """With a cut vocabulary, two replicas of the model, or in another order. Losses come in the order of the iterator."""
    case = (CUT | WEIGHED).get(name, {})
    stock, ours = variable("stock", tp=case.get("tp", 1)), variable(name, **case)
    whole, cut = ([float.fromhex(loss) for loss in each["losses"]] for each in (stock, ours))
    assert cut == pytest.approx(whole, rel=ROUNDING)


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
    told = [result["told"] for result in ranks.run(case, size=2)]
    assert words in told[0] and set(told) == {told[0]}


@pytest.mark.parametrize(
    "case",
    [
        {"schedule": "zb-h1", "chunks": 1},
        {"schedule": "v-half", "chunks": 2, "settings": {"vocab_parallel": "1"}},
        {"schedule": "auto", "chunks": 2, "apart": True},
    ],
    ids=lambda case: case["schedule"],
)
def test_a_pipeline_steps_and_evaluates_while_another_waits(ranks, show, case):
    """Two pipelines of two ranks: 0 and 2, then 1 and 3."""
    stock = show({**STOCK, "ddp": False})["losses"]
    results = ranks.run({"import_after": False, "ddp": False, "dp": 2, **case}, size=4)
    for last in results[2:]:
        if "settings" in case:
            losses = [[float.fromhex(loss) for loss in each] for each in (last["losses"], stock)]
            assert losses[0] == pytest.approx(losses[1], rel=ROUNDING)
        else:
            assert last["losses"] == stock


OURS = {"schedule": "zb-h1"}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({**OURS, "random": "layerwise"}, "rank 1 has --pipemem-random layerwise where rank 0 has stock"),
        ({"schedule": "v-half"}, "rank 1 has --pipemem-schedule v-half where rank 0 has zb-h1"),
        (None, "not enabled on rank 1"),
    ],
)
def test_ranks_with_other_settings_are_refused_on_every_rank(ranks, theirs, words):
    """Whether the plugin is enabled before Megatron's process groups are made, or after."""
    for before in (True, False):
        case = {"differ": [OURS, theirs], "before": before, "last": not before}
        told = [result["told"] for result in ranks.run(case, size=2)]
        assert words in told[0] and code_in(told[0]) == "ranks-differ"
        assert told[1] == ("nothing" if theirs is None else told[0])


def test_the_example_trains(ranks):
    losses = ranks.run({"example": str(Path(__file__).parents[2] / "examples")}, size=2)[-1]["losses"]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5


def test_a_failed_step_ends_on_every_rank_and_leaves_nothing_behind(ranks, show):
    case = {"schedule": "zb-h1", "chunks": 1, "import_after": False, "ddp": True, "fails_before": True}
    results = ranks.run(case)
    told = [result["told"] for result in results]
    assert told[0].startswith("ArithmeticError this rank cannot go on") and "device 0 failed at position" in told[0]
    for device, text in enumerate(told[1:], 1):
        assert f"device {device} failed at position" in text and "of schedule v-half" in text
    assert results[-1]["losses"] == show({**STOCK, "ddp": True})["losses"]


@pytest.mark.parametrize(
    ("schedule", "chunks", "algorithm", "hybrid", "options"),
    [
        pytest.param("1f1b", 1, "2", False, {}, marks=nightly("zb-h1, of the same placement")),
        ("v-half", 2, "1", False, {}),
        ("zb-h1", 1, "2", True, {}),
        ("seq1f1b", 1, "2", False, {"slices": 4}),
        pytest.param("zbv", 2, "1", False, {"slices": 2}, marks=nightly("seq1f1b, and the same without slices")),
    ],
)
def test_three_ranks_and_logits_without_labels(show, schedule, chunks, algorithm, hybrid, options):
    """Without ``megatron.training``, and without DDP; 64 rows over 3 ranks; both classes of models; logits of slices joined."""
    case = {"import_after": False, "hybrid": hybrid, "size": 3}
    stock = show({**case, "schedule": "stock", "chunks": 1, "ddp": False})
    settings = {"vocab_parallel": algorithm, "options": options}
    cut = show({**case, "schedule": schedule, "chunks": chunks, "ddp": chunks == 2, "settings": settings})
    wanted = [float.fromhex(loss) for loss in stock["losses"]]
    assert len(set(wanted)) > 10
    assert [float.fromhex(loss) for loss in cut["losses"]] == pytest.approx(wanted, rel=5e-6)
    assert len(cut["logits"]) == 2
    flat = [[x for row in each for token in row for x in token] for each in stock["logits"]]
    found = [[x for row in each for token in row for x in token] for each in cut["logits"]]
    assert found[0] == pytest.approx(flat[0], rel=1e-4, abs=1e-5)
    assert found[1] == pytest.approx(flat[1], rel=1e-4, abs=1e-5)
