"""``pipemem layout``: what stages hold, for stock Megatron and for schedules here."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from refusals import check_refusal, refused

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model import layout
from megatron_pipemem.model.model import Model, Sublayer
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER, Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.balance import AS_GOOD, balance

RUNS = Path(__file__).parents[2] / "configs" / "runs"
CLUSTER = load("h100-80g", Cluster)


def test_stock_interleaved_beside_a_layout_by_hand(pipemem, pipemem_json):
    ask = ("layout", "llama3-8b", "-p", 4, "-v", 2, "-m", 16, "--cluster", "h100-80g", "--beside", "Et*4|(t*4|)*6t*4L")
    answer = pipemem_json(*ask)
    best, even, given = (answer["layouts"][name] for name in ("best", "even", "given"))
    assert even["layers"] == given["layers"] == [4] * 8 and even["step_seconds"] == given["step_seconds"]
    assert max(best["rank_seconds"]) < max(even["rank_seconds"]) and best["step_seconds"] < even["step_seconds"]
    assert not answer["even_is_as_good"] and best["rank_bytes"] is None
    assert sum(best["layers"]) == 32 and sum(best["stage_seconds"]) == pytest.approx(sum(best["rank_seconds"]))
    assert even["flags"] == "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    text = layout.written(best["layers"])
    said = pipemem(*ask).stdout
    assert f"--pipeline-model-parallel-layout '{text}'" in said and f"'{text}'" in best["flags"]
    assert "stock interleaved" in said and f"{1e3 * max(best['rank_seconds']):.1f}" in said and "GiB" not in said
    assert all(stage in said for stage in best["stages"]) and "\u2588" in said and "\u2593" in said


def test_a_run_is_weighed_with_its_memory_and_its_own_layout(pipemem, pipemem_json):
    answer = pipemem_json("layout", RUNS / "98b-40xa100.yaml", "-m", 20)
    assert answer["schedule"] == "v-half" and answer["layouts"]["given"]["layers"] == [7, *[8] * 8, 7]
    assert answer["even_is_as_good"] and min(answer["layouts"]["best"]["rank_bytes"]) > 2**30
    said = pipemem("layout", RUNS / "98b-40xa100.yaml", "-m", 20).stdout
    assert "--pipemem-schedule v-half" in said and "GiB" in said
    words = " ".join(said.split())
    assert "10 stages do not divide 78 layers" in words
    assert ("keep your own layout" in words) == (
        answer["layouts"]["given"]["layers"] == answer["layouts"]["best"]["layers"]
    )


def test_a_best_layout_that_does_not_fit_and_a_default_are_named(pipemem):
    ask = ("layout", "nemotron-h-8b", "-p", 4, "-v", 2)
    unknown, small = (" ".join(pipemem(*ask, *more).stdout.split()) for more in ((), ("--dp", 1)))
    assert "does not fit into the 76.6 GiB" in small and "does not fit" not in unknown
    assert "32 microbatches" in unknown and "without --dp, memory is not compared" in unknown


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (("llama3-8b", "-p", 4), DEFAULT_CLUSTER),
        (("llama3-8b", "-p", 4, "--cluster", "b200"), "b200"),
        ((RUNS / "98b-40xa100.yaml", "-m", 20), "a100-80g"),  # the run changes its number of nodes
        ((RUNS / "98b-40xa100.yaml", "-m", 20, "--set", "cluster.tflops=300"), "a100-80g as the run changes it"),
    ],
)
def test_the_cluster_whose_prices_were_taken_is_named(pipemem, pipemem_json, ask, named):
    assert pipemem_json("layout", *ask)["cluster"] == named
    said = " ".join(pipemem("layout", *ask).stdout.split())
    assert f"priced for {named}" in said and "--cluster NAME" in said


def test_flags_to_paste_stay_on_one_line(pipemem, pipemem_json, monkeypatch):
    ask = ("layout", "llama3-8b", "-p", 8, "-v", 2)
    flags = pipemem_json(*ask)["layouts"]["best"]["flags"]
    monkeypatch.setenv("COLUMNS", "60")
    lines = pipemem(*ask).stdout.splitlines()
    assert flags in lines and len(flags) > 60
    assert max(len(line.rstrip()) for line in lines if line != flags) <= 60


def test_the_name_of_a_run_is_enough(pipemem_json):
    by_name, by_path = (pipemem_json("layout", of, "-m", 20) for of in ("98b-40xa100", RUNS / "98b-40xa100.yaml"))
    assert by_name.pop("of").endswith("runs/98b-40xa100.yaml") and by_path.pop("of") and by_name == by_path


def test_where_the_head_is_cut_the_even_split_is_the_best(pipemem, pipemem_json):
    ask = ("layout", "llama3-8b", "-p", 4, "--schedule", "v-half", "-m", 8)
    whole, cut = pipemem_json(*ask), pipemem_json(*ask, "--vocab-cut", "2")
    assert not whole["even_is_as_good"] and whole["layouts"]["best"]["layers"] != [4] * 8
    assert cut["even_is_as_good"] and cut["layouts"]["best"]["layers"] == [4] * 8
    assert cut["layouts"]["best"]["flags"].endswith("--pipemem-schedule v-half --pipemem-vocab-cut 2")
    assert "even split is the best layout found" in " ".join(pipemem(*ask, "--vocab-cut", "2").stdout.split())
    error = pipemem("layout", "llama3-8b", "-p", 4, "--vocab-cut", "2").stderr
    assert "leave --vocab-cut out [not-for-stock]" in " ".join(error.split())


def test_hybrid_models_get_a_pattern(pipemem_json):
    best = pipemem_json("layout", "nemotron-h-8b", "-p", 4, "-m", 8)["layouts"]["best"]
    pattern = load("nemotron-h-8b", Model).pattern
    assert (
        "".join(best["stages"]) == pattern and f"--hybrid-layer-pattern '{'|'.join(best['stages'])}'" in best["flags"]
    )


def test_every_rank_keeps_experts_where_their_losses_are_logged():
    # Experts are heavy and stand at the end; the first rank must have one of the first all the same.
    shape = {
        "layers": 12,
        "hidden": 1024,
        "heads": 8,
        "vocabulary": 32000,
        "sequence": 1024,
        "experts": 8,
        "expert_ffn": 1024,
    }
    model = Model(**shape, pattern="*-*E*-*-EEEE")
    layouts = balance(Run(model, CLUSTER, Parallelism(pp=3, global_batch=12)))
    ends = accumulate(layouts.best.layers, initial=0)
    assert all(Sublayer.EXPERTS in model.pattern[a:b] for a, b in pairwise(ends))


@pytest.mark.parametrize("schedule", ["stock", "v-half"])
def test_groups_of_layers_stay_whole(schedule):
    model = Model(
        layers=20, hidden=1024, heads=8, vocabulary=32000, sequence=1024, pattern="[*-M-]*[-*]" * 2 + "*-M[*-]*"
    )
    assert len(model.kinds) == 20 and {*model.kinds} == {*"*-M"}
    best = balance(Run(model, CLUSTER, Parallelism(pp=3, global_batch=12), ScheduleChoice(schedule))).best
    stages = layout.stages_of(model, best.layers)
    assert "".join(stages) == model.pattern and all(stage.count("[") == stage.count("]") for stage in stages)
    with refused("bad-syntax", "[*E]", kind=ConfigError):
        replace(model, pattern="[*-M-" + model.pattern[6:])


@pytest.mark.parametrize("vocabulary", [32_000, 128_000, 512_000])
@pytest.mark.parametrize(("name", "chunks"), [("stock", None), ("stock", 2), ("v-half", None)])
def test_never_worse_than_the_even_split_and_without_an_empty_middle_stage(vocabulary, name, chunks):
    model = replace(load("llama3-8b", Model), vocabulary=vocabulary, mtp_layers=1, layers=14)
    cut = Parallelism(pp=4, chunks=chunks, global_batch=16)
    run = Run(model, CLUSTER, cut, ScheduleChoice(name))
    layouts = balance(run, room=0)
    assert all(layouts.best.layers[1:-1]), "stock Megatron may hang at an empty one"
    assert layouts.best.seconds <= layouts.even.seconds * (1 + AS_GOOD)
    assert (
        sum(layouts.best.layers) == model.pieces
        and layout.read(layout.written(layouts.best.layers, 1)) == layouts.best.layers
    )
    if name == "v-half":  # there multi-token prediction stays with the head
        assert layouts.best.layers[-1] >= 1


def test_groups_of_microbatches_that_the_run_names(pipemem_json, refuses):
    asked = ("layout", "tiny-gpt", "-p", 2, "-v", 2, "-m", 3)
    check_refusal(refuses(*asked), "needs-microbatches", "groups of 2")
    for taken in (
        ("--set", "microbatch_group_size_per_virtual_pipeline_stage=3"),
        ("--schedule", "interleaved"),
    ):
        assert pipemem_json(*asked, *taken)["microbatches"] == 3


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_the_halves_of_a_layer_are_places_to_cut(schedule):
    """A GPT and the hybrid model with its layers take as long if both are cut alike, and the latter has more cuts."""
    gpt = load("llama3-8b", Model)
    run = Run(gpt, CLUSTER, Parallelism(tp=2, pp=4, global_batch=32), ScheduleChoice(schedule))
    halves = replace(gpt, layers=2 * gpt.layers, pattern="*-" * gpt.layers)
    whole, cut = balance(run), balance(replace(run, model=halves))
    assert cut.even.seconds == pytest.approx(whole.even.seconds)
    assert cut.best.seconds < whole.best.seconds < whole.even.seconds
    assert any(end % 2 for end in accumulate(cut.best.layers))
    assert "|-" in layout.flags(halves, cut.best.layers)[layout.PATTERN]
