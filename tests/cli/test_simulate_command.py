"""``pipemem simulate`` and ``show``."""

from __future__ import annotations

import json

import pytest
from refusals import check_refusal

from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.action import SELECTIVE_SECONDS
from megatron_pipemem.schedule.costs import SELECTIVE_BYTES, Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.prices import MicrobatchFactors
from megatron_pipemem.schedule.registry import build_schedule, families, family
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.waits import run_single_queues

KEYS = [
    "schedule", "devices", "microbatches", "chunks", "slices", "makespan", "ideal", "bubble_rate", "device_bubble_rate",
    "peak_activations", "peak_activation", "peak_bytes", "share_of_1f1b",
    "lower_bound", "search_seconds", "messages", "replicas", "weight_versions",
    "placement", "host_peak", "stall_seconds", "transfers", "recomputed", "microbatch_factors", "pairs",
    "in_a_run", "asynchronous",
]  # fmt: skip
NAMES = [family.name for family in families()]
SIZE = ("simulate", "1f1b", "-p", 4, "-m", 8)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_json_has_exactly_the_promised_keys_and_values(pipemem_json, name):
    p, m = 4, 8
    answer = pipemem_json("simulate", name, "--devices", p, "--microbatches", m)
    timeline = simulate(build_schedule(name, num_devices=p, num_microbatches=m))
    assert list(answer) == [*KEYS, *(["period", "gain"] if answer["asynchronous"] else ())]
    assert (answer["schedule"], answer["devices"], answer["microbatches"]) == (name, p, m)
    assert answer["makespan"] == timeline.makespan
    seconds = (
        30 if family(name).asynchronous else answer["makespan"]
    )  # each step fills the pipeline, and none drains it
    assert answer["bubble_rate"] == pytest.approx(1 - answer["ideal"] / seconds)
    assert answer["asynchronous"] == family(name).asynchronous and answer.get("period", 24) == 24
    assert answer["peak_activations"] == list(timeline.peaks) and len(timeline.peaks) == p
    assert answer["peak_activation"] == max(answer["peak_activations"])
    assert answer["messages"] == timeline.messages
    assert answer["ideal"] <= answer["lower_bound"] + 1e-9
    assert answer["lower_bound"] <= answer["makespan"] + 1e-9
    assert answer["search_seconds"] == 0.0
    assert answer["replicas"] == timeline.schedule.placement.replicas
    assert answer["weight_versions"] == list(timeline.weight_versions)


def test_several_are_compared_with_megatrons_own(pipemem, pipemem_json):
    size = ("-p", 4, "-m", 8, "--costs", "1,1.5,0.5")
    rows = pipemem_json("simulate", "zb-h1", "v-half", *size)
    assert [row["schedule"] for row in rows] == ["zb-h1", "v-half", "1f1b", "interleaved"]
    assert rows == [pipemem_json("simulate", row["schedule"], *size) for row in rows]
    with_chunks = pipemem_json("simulate", "gis", "interleaved", *size, "--chunks", 3)
    assert [(row["schedule"], row["chunks"]) for row in with_chunks] == [("gis", 3), ("interleaved", 3), ("1f1b", 1)]
    told = pipemem("simulate", "zb-h1", "v-half", *size).stdout
    assert all(f"{row['makespan']:.6g}" in told for row in rows)


def test_a_comparison_without_a_barrier_has_every_period(pipemem, pipemem_json):
    arguments = ("simulate", "zb-h1", "zb-h2", "pipedream", "-p", 4, "-m", 8, "--steps", 8)
    rows = pipemem_json(*arguments)
    assert [row["period"] for row in rows[:3]] == [27, 24, 24] and rows[0]["makespan"] == rows[1]["makespan"] == 27
    assert "pipedream: from step to step in place of the makespan" in " ".join(pipemem(*arguments).stdout.split())


def test_stock_is_what_megatron_runs(pipemem, pipemem_json):
    """Megatron pairs only with virtual stages, and its last group needs a microbatch for every rank."""
    size, share = ("-p", 4, "-m", 8), ("--exchange-share", 0.4)
    rows = {row["schedule"]: row for row in pipemem_json("simulate", "zbv", "dualpipe-v", *size, *share)}
    stock = json.loads(pipemem("simulate", "stock", *size, *share, "--json").stdout)
    alone, paired = (pipemem_json("simulate", "1f1b", *size, *more) for more in ((), share))
    assert stock["makespan"] == rows["1f1b"]["makespan"] == alone["makespan"] > paired["makespan"]
    assert (stock["pairs"], rows["1f1b"]["pairs"]) == (0, 0) and rows["interleaved"]["pairs"] > 0
    assert rows["zbv"]["makespan"] < rows["zbv"]["makespan_without_pairs"]
    refused = ("-p", 4, "-m", 6)
    assert [row["schedule"] for row in pipemem_json("simulate", "zbv", "zb-h1", *refused)] == ["zbv", "zb-h1", "1f1b"]
    assert "Megatron refuses these sizes" in pipemem("simulate", "interleaved", *refused).stderr
    assert not pipemem("simulate", "interleaved", *size).stderr


FITTED = Costs(1, 1.5, 0.5)
OPTIONS = [
    ("1f1b --costs 2,2,2 --p2p .5", {}, Costs(2, 2, 2, p2p=0.5)),
    ("interleaved --chunks 4", {"chunks": 4}, Costs()),
    ("interleaved -o chunks=4", {"chunks": 4}, Costs()),
    ("zb-auto --costs 1,1.5,.5 --memory-cap 1.5", {"memory_cap": 1.5, "costs": FITTED}, FITTED),
    ("seq1f1b -o slices=3 --costs SLICES", {"slices": 3}, Costs((1, 2, 3) * 4, 1.5, 1)),
]


@pytest.mark.parametrize(
    ("words", "options", "costs"), OPTIONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_options_mean_what_their_arguments_mean_in_python(pipemem_json, tmp_path, words, options, costs):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"forward": [1, 2, 3] * 4, "backward_input": 1.5}))
    name, *arguments = (str(file) if word == "SLICES" else word for word in words.split())
    answer = pipemem_json("simulate", name, "-p", 4, "-m", 8, *arguments)
    timeline = simulate(build_schedule(name, num_devices=4, num_microbatches=8, **options), costs)
    assert (answer["makespan"], answer["messages"]) == (timeline.makespan, timeline.messages)
    assert (answer["chunks"], answer["slices"]) == (
        timeline.schedule.placement.num_chunks,
        timeline.schedule.units.parts,
    )
    assert answer["peak_activations"] == list(timeline.peaks)


KEPT = [
    ("zbv --offload half --offload-ratio .2", "transfers", (1, 64)),
    ("zbv --offload full --offload-ratio .2", "transfers", (65, 128)),
    ("zbv --offload auto --offload-ratio .2 --memory-cap .875 --host-memory 2", "peak_activation", (0.5, 0.875)),
    ("1f1b --offload auto --offload-ratio .2 --memory-cap .75,.75,.5,.25", "peak_activation", (0.75, 0.75)),
    ("v-half --memory-cap .75,.8,.9,1", "peak_activation", (0.75, 0.75)),
    ("1f1b -o recompute=selective", "peak_activation", (0.1, 0.99)),
    ("1f1b -o recompute=auto --memory-cap .8", "peak_activation", (0.1, 0.8)),
    ("dualpipe-v --exchange-share .4", "pairs", (1, 99)),
    ("dualpipe-v --costs EXCHANGES", "pairs", (1, 99)),
    ("auto --memory-cap .5,1,1,1 -o seconds=1", "peak_activation", (0.51, 1)),
]


@pytest.mark.parametrize(("words", "key", "limits"), KEPT, ids=lambda value: value if isinstance(value, str) else "")
def test_memory_options_and_pairs_reach_the_schedule(pipemem_json, tmp_path, words, key, limits):
    file = tmp_path / "costs.json"
    file.write_text('{"forward_exchange": 0.4, "backward_exchange": 0.4}')
    answer = pipemem_json(
        "simulate", *(file if word == "EXCHANGES" else word for word in words.split()), "-p", 4, "-m", 8
    )
    assert limits[0] <= answer[key] <= limits[1]
    assert (answer["transfers"] > 0) == (answer["host_peak"] > 0) == ("--offload" in words)
    assert bool(answer["recomputed"]) == ("recompute" in words)


def test_in_one_hardware_queue_per_rank(pipemem, pipemem_json):
    arguments = ("simulate", "interleaved", "-p", 4, "-m", 8, "--costs", "1,1.5,.5", "--p2p", 0.05)
    usual, queued = pipemem_json(*arguments), pipemem_json(*arguments, "--single-queue")
    costs = Costs(1, 1.5, 0.5, p2p=0.05)
    program = lower(build_schedule("interleaved", num_devices=4, num_microbatches=8), single_queue=True, costs=costs)
    assert queued.pop("single_queue_makespan") == run_single_queues(program, costs).makespan > usual["makespan"]
    assert 0 < queued.pop("single_queue_bubble_rate") < 1 and queued == usual
    lines = [line for line in pipemem(*arguments, "--single-queue").output.splitlines() if line]
    assert all(line[20] == " " and line[21] != " " for line in lines), "names that are too long push their numbers"


def test_steps_without_a_barrier(pipemem_json):
    arguments = ("simulate", "zbv", "-p", 8, "-m", 16)
    usual, answer = pipemem_json(*arguments), pipemem_json(*arguments, "--steps", 8)
    extra = {key: answer.pop(key) for key in ("steps", "steps_makespan", "period", "gain")}
    assert extra == {"steps": 8, "steps_makespan": 51.5 + 7 * 48, "period": 48, "gain": 51.5 / 48} and answer == usual
    late = pipemem_json("simulate", "pipedream-2bw", "-p", 8, "-m", 16, "--steps", 2)
    assert (late["period"], late["gain"]) == (48, pytest.approx(1.292, abs=5e-4))


def test_one_peak_and_one_bubble_are_printed_unless_they_differ(pipemem, tmp_path):
    def printed(*arguments):
        return {line[:20].rstrip() for line in pipemem("simulate", *arguments).stdout.splitlines()}

    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"memory": {"F": 4096, "B": -4096}}))
    assert {"bubble", "peak"} <= printed("v-half", "-p", 4, "-m", 8) and "bubble of papers" not in printed(*SIZE[1:])
    assert "bubble of papers" in printed("zbv", "-p", 4, "-m", 8)
    bytes_alone = printed(*SIZE[1:], "--costs", file)
    assert "peak in bytes" in bytes_alone and "peak" not in bytes_alone
    compared = " ".join(pipemem("simulate", "1f1b", "zb-h1", "-p", 4, "-m", 8, "--costs", file).stdout.split())
    assert "peak: share of 1f1b's bytes" in compared and "activation units" not in compared
    assert "not offloaded" not in printed("zbv", "-p", 4, "-m", 8, "-o", "recompute=selective")
    assert "not offloaded" in printed("zbv", "-p", 4, "-m", 8, "--offload", "half")


def test_rows_that_nobody_asked_for_are_named(pipemem):
    added = "for comparison"
    assert "interleaved: Megatron's own" in " ".join(pipemem(*SIZE[:1], "1f1b", "zb-h1", *SIZE[2:]).stdout.split())
    assert added not in " ".join(pipemem(*SIZE[:1], "1f1b", "interleaved", *SIZE[2:]).stdout.split())


def test_costs_from_a_file(pipemem_json, tmp_path):
    file = tmp_path / "costs.json"
    memory = {"F": 4096, "B": -4096}
    file.write_text(json.dumps({"forward": 2, "backward_input": 3, "backward_weight": 1, "p2p": 0.5, "memory": memory}))
    answer = pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", file)
    same = pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", "2,3,1", "--p2p", 0.5)
    assert (answer.pop("peak_bytes"), answer.pop("share_of_1f1b")) == ([4 * 4096, 3 * 4096, 2 * 4096, 4096], 1)
    assert (same.pop("peak_bytes"), same.pop("share_of_1f1b")) == (None, None), "units say nothing of bytes"
    assert answer == same, "peak_activations stay in activation units"
    free = pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", file, "--p2p", 0)
    assert free["makespan"] < answer["makespan"]


def test_a_file_is_simulated_like_its_family(pipemem, pipemem_json, tmp_path):
    file = tmp_path / "mine.csv"
    assert pipemem("check", "zbv", "--write", file, "-p", 4, "-m", 8).exit_code == 0
    answer = pipemem_json("simulate", file)
    assert answer.pop("schedule") == "mine"
    expected = pipemem_json("simulate", "zbv", "-p", 4, "-m", 8)
    del expected["schedule"]
    assert answer == expected


@pytest.mark.parametrize(("name", "chunks"), [("zbv", "2 chunks"), ("zb-h1", "1 chunk"), ("auto", None)])
def test_the_bound_is_of_one_placement_or_of_those_that_a_search_tried(pipemem, name, chunks):
    """``auto`` with 4 chunks beats the bound of two."""
    (line,) = (
        line for line in pipemem("simulate", name, "-p", 4, "-m", 8).stdout.splitlines() if "lower bound" in line
    )
    assert (f"({chunks})" in line) == (chunks is not None) != ("tried" in line)


def test_microbatches_of_a_costs_file_that_are_not_alike(pipemem, pipemem_json, refuses, tmp_path):
    file = tmp_path / "costs.json"
    weights = {"time": [1, 1, 4, 1], "memory": [1, 1, 2, 1], "kinds": {"W": [1, 1, 2, 1]}}
    file.write_text(json.dumps({"microbatch": weights}))
    size = ("simulate", "1f1b", "-p", 2, "--costs", file)
    costs = Costs(microbatch=MicrobatchFactors(**weights))
    timeline = simulate(build_schedule("1f1b", num_devices=2, num_microbatches=4), costs)
    answer = pipemem_json(*size, "-m", 4)
    assert (answer["makespan"], answer["peak_activations"]) == (timeline.makespan, [1.5, 1])
    assert answer["ideal"] < answer["lower_bound"] < answer["makespan"]
    assert answer["microbatch_factors"] == {"time": weights["time"], "memory": weights["memory"]}
    told = "time 1 to 4, mean 1.75; memory 1 to 2, mean 1.25"
    text = pipemem(*size, "-m", 4).stdout
    assert told in text and "1.5 activation units (p microbatches of factor 1 hold 1;" in text
    assert pipemem_json("show", *size[1:], "-m", 4)[0]["makespan"] == timeline.makespan
    check_refusal(refuses(*size, "-m", 6), "wrong-count", 4, 6)
    check_refusal(refuses(*size, "-m", 4, "--memory-cap", 1.4), "over-cap", "1f1b", "1.5")
    schedule = tmp_path / "step.csv"
    schedule.write_text(timeline.schedule.to_csv())
    alone = refuses("simulate", schedule, "--costs", file, "--memory-cap", 0.9, code=1)
    check_refusal(alone, "over-cap", "microbatch 2", 1, "0.9")
    check_refusal(refuses("simulate", "auto", *size[2:], "-m", 4), "costs-mismatch", "microbatch", "plan_step")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("pipedream",), "updates weights after every microbatch"),
        (("gems",), "two replicas of the model"),
        (("zbv", "--offload", "full"), "pass --pipemem-offload off"),
    ],
)
def test_a_period_that_no_run_has_is_told_as_such(pipemem, pipemem_json, asked, says):
    arguments = ("simulate", *asked, "-p", 4, "-m", 8, "--steps", 2)
    assert says in pipemem_json(*arguments)["a_run_refuses"]
    assert "a run refuses" in pipemem(*arguments).stdout


def test_slices_of_equal_time_shorten_a_step_and_hold_more(pipemem_json):
    size = ("seq1f1b", "-p", 4, "-m", 4, "-o", "slices=8", "--attention-share", 0.9)
    tokens, flops = (pipemem_json("simulate", *size, "--slice-cut", cut) for cut in ("tokens", "flops"))
    assert tokens == pipemem_json("simulate", *size)
    assert flops["ideal"] == pytest.approx(tokens["ideal"])
    assert flops["makespan"] < tokens["makespan"] * 0.95
    assert flops["peak_activation"] > tokens["peak_activation"], "the first slice has most of the tokens"
    for answer in (tokens, flops):
        assert answer["lower_bound"] <= answer["makespan"] * (1 + 1e-9)


@pytest.mark.parametrize(("chunks", "own"), [((), "1f1b"), (("-v", 2), "interleaved")])
def test_stock_is_megatrons_own_order(pipemem, chunks, own):
    asked, ours = (pipemem("simulate", name, "-p", 4, "-m", 8, *chunks, "--json") for name in ("stock", own))
    assert json.loads(asked.stdout) == json.loads(ours.stdout)
    assert own in asked.stderr and not ours.stderr


def test_algorithms_trade_a_microbatch_for_the_head(pipemem_json):
    off = pipemem_json(*SIZE, "--head-cost", 3)
    assert off["makespan"] == (8 + 3) * 3 + 8 * 3 and "vocabulary_barriers" not in off
    for algorithm, barriers in ((1, 2), (2, 1)):
        answer = pipemem_json(*SIZE, "--head-cost", 3, "--vocab-cut", algorithm)
        assert answer["vocabulary_barriers"] == barriers
        assert answer["peak_activation"] == (4 + barriers) / 4
        assert answer["makespan"] <= (8 + 3) * 3 + 8 * 3 / 4
    in_layers = pipemem_json(*SIZE, "--head-cost", "8layers", "--layers", 32)
    assert in_layers["makespan"] == pytest.approx(off["makespan"])


def test_auto_says_why(pipemem_json):
    large = pipemem_json(*SIZE, "--head-cost", 6, "--layers", 32, "--vocab-cut", "auto")
    assert large["vocabulary_barriers"] == 1 and "Algorithm 2" in large["vocabulary_reason"]
    small = pipemem_json(*SIZE, "--head-cost", 0.01, "--vocab-cut", "auto")
    assert small["vocabulary_barriers"] == 0 and "not worth" in small["vocabulary_reason"]
    size = ("simulate", "v-half", "-p", 4, "-m", 8, "--head-cost", 0.4)
    moved = pipemem_json(*size, "--layers", 64, "--vocab-cut", "auto")
    assert moved["vocabulary_barriers"] == 0
    assert moved["vocabulary_reason"].startswith("moving layers away from the last stage")
    assert moved["vocabulary_reason"].endswith("layers per stage: 7, 9, 9, 8, 8, 8, 8, 7")
    assert moved["makespan"] < pipemem_json(*size)["makespan"]


def test_a_file_keeps_its_passes(pipemem, pipemem_json, tmp_path):
    schedule = with_vocabulary(build_schedule("v-half", num_devices=3, num_microbatches=4), 2)
    path = tmp_path / "v.csv"
    path.write_text(schedule.to_csv())
    assert Schedule.from_csv(path.read_text(), name="v-half") == schedule
    assert pipemem_json("check", path)["valid"]
    assert pipemem_json("simulate", path)["vocabulary_barriers"] == 2
    path.write_text(schedule.to_csv().replace("1S2,", "", 1))
    assert not json.loads(pipemem("check", path, "--json").stdout)["valid"]


@pytest.mark.parametrize("suffix", ["png", "svg", "html", "json"])
def test_files(pipemem, tmp_path, suffix):
    file, names = tmp_path / f"picture.{suffix}", ("1f1b", "v-half")
    shown = pipemem("show", *names, "-p", 4, "-m", 8, "--output", file)
    assert shown.exit_code == 0 and shown.stdout.strip() == str(file)
    assert ("open it" in shown.stderr) == (suffix in ("html", "json"))
    start = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>", "json": b"{"}[suffix]
    content = file.read_bytes()
    assert content.startswith(start)
    if suffix != "png":
        assert all(name.encode() in content for name in names)


def test_json_is_the_picture_as_data(pipemem_json, tmp_path):
    file = tmp_path / "picture.html"
    (data,) = pipemem_json("show", "1f1b", "-p", 2, "-m", 1, "--output", file)
    assert data["timeline"] == [
        [["0F0", 0, 1, 0.5], ["0B0", 4, 6, 0]],
        [["1F0", 1, 2, 0.5], ["1B0", 2, 4, 0]],
    ]
    assert data["output"] == str(file) and file.exists()
    (data,) = pipemem_json("show", "1f1b", "-p", 2, "-m", 1)
    assert data["output"] is None


def test_a_lowered_file_of_torch_is_simulated_and_drawn_like_its_schedule(pipemem, pipemem_json, tmp_path):
    source = tmp_path / "program.txt"
    assert pipemem("check", "zb-h1", "--write", source, "-p", 3, "-m", 4, "--to", "torch").exit_code == 0
    shown = pipemem("show", source, "zb-h1", "-p", 3, "-m", 4)
    assert shown.exit_code == 0 and "program: p=3, m=4" in shown.stdout
    assert shown.stderr.startswith("note: ") and "torch since 2.6" in shown.stderr
    answer = json.loads(pipemem("simulate", source, "--json").stdout)
    wanted = pipemem_json("simulate", "zb-h1", "-p", 3, "-m", 4)
    assert {**answer, "schedule": ""} == {**wanted, "schedule": ""}


def test_several_steps_are_one_picture(pipemem_json):
    (one,), (drawn,) = (pipemem_json("show", "zb-h2", "-p", 2, "-m", 4, *more) for more in ((), ("--steps", 3)))
    assert drawn["schedule"] == "zb-h2, 3 steps" and drawn["microbatches"] == 12
    assert [len(row) for row in drawn["timeline"]] == [3 * len(row) for row in one["timeline"]]
    assert drawn["makespan"] < 3 * one["makespan"]


def test_what_selective_recomputes_and_assumes_is_named(pipemem):
    told = pipemem("simulate", "1f1b", "-p", 4, "-m", 8, "-o", "recompute=selective").stdout
    line = next(line for line in told.splitlines() if line.startswith("recomputed"))
    assert f"assumed {SELECTIVE_SECONDS:g} of F" in line and f"{SELECTIVE_BYTES:.2g} of the activations" in line
    assert line.endswith("on all stages")


def test_copies_of_the_weights_are_named_where_peaks_are_compared(pipemem):
    told = " ".join(pipemem("simulate", "gems", "1f1b", "-p", 4, "-m", 8).stdout.split())
    assert "weights, which peaks leave out, are held by gems 2 times" in told


def test_what_offload_and_a_cut_head_assume_is_printed(pipemem):
    size = ("-p", 4, "-m", 8)
    text = pipemem("simulate", "1f1b", *size, "--offload", "half").stdout
    assert "take 1 times F, I and W" in text
    assert "take 1 times F, I and W" in pipemem("show", "zbv", *size, "--offload", "full").stdout
    cut = ("simulate", "v-half", *size, "--vocab-cut", 2)
    assert "no time without a cut" in pipemem(*cut).stdout
    assert "no time without a cut" not in pipemem(*cut, "--head-cost", 1).stdout
