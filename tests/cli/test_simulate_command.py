"""``pipemem simulate`` and ``show``."""

from __future__ import annotations

import json

import pytest
from refusals import check_refusal

from megatron_pipemem.features.vocabulary.orders import with_vocabulary
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.waits import run_single_queues

KEYS = [
    "schedule", "devices", "microbatches", "chunks", "slices", "makespan", "ideal", "bubble_rate", "device_bubble_rate",
    "peak_activations", "peak_activation", "peak_bytes", "share_of_1f1b",
    "lower_bound", "search_seconds", "messages", "replicas", "weight_versions",
    "placement", "host_peak", "stall_seconds", "transfers", "recomputed", "microbatch_weights", "pairs",
]  # fmt: skip
NAMES = [family.name for family in families()]
SIZE = ("simulate", "1f1b", "-p", 4, "-m", 8)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_json_has_exactly_the_promised_keys_and_values(pipemem_json, name):
    p, m = 4, 8
    found = pipemem_json("simulate", name, "--devices", p, "--microbatches", m)
    timeline = simulate(build_schedule(name, num_devices=p, num_microbatches=m))
    assert list(found) == KEYS
    assert (found["schedule"], found["devices"], found["microbatches"]) == (name, p, m)
    assert found["makespan"] == timeline.makespan
    assert found["bubble_rate"] == pytest.approx(1 - found["ideal"] / found["makespan"])
    assert found["peak_activations"] == list(timeline.peaks) and len(timeline.peaks) == p
    assert found["peak_activation"] == max(found["peak_activations"])
    assert found["messages"] == timeline.messages
    assert found["ideal"] <= found["lower_bound"] + 1e-9
    assert found["lower_bound"] <= found["makespan"] + 1e-9
    assert found["search_seconds"] == 0.0
    assert found["replicas"] == timeline.schedule.placement.replicas
    assert found["weight_versions"] == list(timeline.weight_versions)


def test_exchanges_of_experts_are_hidden_in_pairs(pipemem_json, tmp_path):
    size = ("simulate", "dualpipe-v", "-p", 4, "-m", 8)
    plain, paired = pipemem_json(*size), pipemem_json(*size, "--exchange-share", 0.4)
    assert plain["pairs"] == 0 < paired["pairs"] and paired["makespan"] < 0.9 * plain["makespan"]
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward_exchange": 0.4, "backward_exchange": 0.4}))
    assert pipemem_json(*size, "--costs", costs) == paired


def test_several_are_compared_with_megatrons_own(pipemem, pipemem_json):
    size = ("-p", 4, "-m", 8, "--costs", "1,1.5,0.5")
    rows = pipemem_json("simulate", "zb-h1", "v-half", *size)
    assert [row["schedule"] for row in rows] == ["zb-h1", "v-half", "1f1b", "interleaved"]
    assert rows == [pipemem_json("simulate", row["schedule"], *size) for row in rows]
    with_chunks = pipemem_json("simulate", "gis", "interleaved", *size, "--chunks", 3)
    assert [(row["schedule"], row["chunks"]) for row in with_chunks] == [("gis", 3), ("interleaved", 3), ("1f1b", 1)]
    told = pipemem("simulate", "zb-h1", "v-half", *size).stdout
    assert all(f"{row['makespan']:.6g}" in told for row in rows)


def test_costs_and_cap_reach_a_family_that_fits_its_order_to_them(pipemem_json):
    size = ("simulate", "zb-auto", "-p", 8, "-m", 24)
    plain, fitted = (pipemem_json(*size, "--costs", "1,1.5,0.5", *more) for more in ((), ("--memory-cap", 1.5)))
    schedule = build_schedule("zb-auto", num_devices=8, num_microbatches=24, memory_cap=1.5, costs=Costs(1, 1.5, 0.5))
    assert fitted["makespan"] == simulate(schedule, Costs(1, 1.5, 0.5)).makespan < plain["makespan"]
    assert plain["peak_activation"] == 1 < fitted["peak_activation"] <= 1.5


def test_costs_p2p_chunks_and_options(pipemem_json):
    plain = pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8)
    assert plain["makespan"] == 33
    priced = pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", "2,2,2", "--p2p", 0.5)
    assert priced["makespan"] > 66
    by_flag = pipemem_json("simulate", "interleaved", "-p", 4, "-m", 8, "--chunks", 4)
    by_option = pipemem_json("simulate", "interleaved", "-p", 4, "-m", 8, "-o", "chunks=4")
    assert by_flag == by_option and by_flag["chunks"] == 4


def test_in_one_hardware_queue_per_rank(pipemem, pipemem_json):
    arguments = ("simulate", "interleaved", "-p", 4, "-m", 8, "--costs", "1,1.5,.5", "--p2p", 0.05)
    usual, queued = pipemem_json(*arguments), pipemem_json(*arguments, "--single-queue")
    costs = Costs(1, 1.5, 0.5, p2p=0.05)
    program = lower(build_schedule("interleaved", num_devices=4, num_microbatches=8), single_queue=True, costs=costs)
    assert queued.pop("single_queue_makespan") == run_single_queues(program, costs).makespan > usual["makespan"]
    assert 0 < queued.pop("single_queue_bubble_rate") < 1 and queued == usual
    told = pipemem(*arguments, "--single-queue").output
    assert "one queue: makespan" in told and "one queue: bubble" in told
    lines = [line for line in told.splitlines() if line]
    assert all(line[20] == " " and line[21] != " " for line in lines), "names that are too long push their numbers"


def test_steps_without_a_barrier(pipemem_json):
    arguments = ("simulate", "zbv", "-p", 8, "-m", 16)
    usual, found = pipemem_json(*arguments), pipemem_json(*arguments, "--steps", 8)
    extra = {key: found.pop(key) for key in ("steps", "steps_makespan", "period", "gain")}
    assert extra == {"steps": 8, "steps_makespan": 51.5 + 7 * 48, "period": 48, "gain": 51.5 / 48} and found == usual
    late = pipemem_json("simulate", "pipedream-2bw", "-p", 8, "-m", 16, "--steps", 2)
    assert (late["period"], late["gain"]) == (48, pytest.approx(1.292, abs=5e-4))


def test_costs_from_a_file(pipemem_json, tmp_path):
    file = tmp_path / "costs.json"
    memory = {"F": 4096, "B": -4096}
    file.write_text(json.dumps({"forward": 2, "backward_input": 3, "backward_weight": 1, "p2p": 0.5, "memory": memory}))
    found = pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", file)
    same = pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", "2,3,1", "--p2p", 0.5)
    assert (found.pop("peak_bytes"), found.pop("share_of_1f1b")) == ([4 * 4096, 3 * 4096, 2 * 4096, 4096], 1)
    assert (same.pop("peak_bytes"), same.pop("share_of_1f1b")) == (None, None), "units say nothing of bytes"
    assert found == same, "peak_activations stay in activation units"
    free = pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", file, "--p2p", 0)
    assert free["makespan"] < found["makespan"]


def test_a_file_is_simulated_like_its_family(pipemem, pipemem_json, tmp_path):
    file = tmp_path / "mine.csv"
    assert pipemem("check", "zbv", "--write", file, "-p", 4, "-m", 8).exit_code == 0
    found = pipemem_json("simulate", file)
    assert found.pop("schedule") == "mine"
    expected = pipemem_json("simulate", "zbv", "-p", 4, "-m", 8)
    del expected["schedule"]
    assert found == expected


def test_offload_of_any_schedule(pipemem_json):
    size = ("--devices", 4, "--microbatches", 12)
    before = pipemem_json("simulate", "zbv", *size)
    assert (before["host_peak"], before["transfers"], before["stall_seconds"]) == (0, 0, [0, 0, 0, 0])
    half, full = (
        pipemem_json("simulate", "zbv", *size, "--offload", select, "--offload-ratio", 0.2)
        for select in ("half", "full")
    )
    assert full["peak_activation"] <= half["peak_activation"] < before["peak_activation"]
    assert full["transfers"] > half["transfers"] > 0 and full["host_peak"] > 0
    assert full["makespan"] == half["makespan"] == before["makespan"]
    capped = pipemem_json(
        "simulate", "zbv", *size, "--offload", "auto", "--offload-ratio", 0.2, "--memory-cap", 0.875, "--host-memory", 2
    )
    assert capped["peak_activation"] <= 0.875 and capped["transfers"] < full["transfers"]


def test_a_cap_per_device(pipemem_json):
    size = ("-p", 4, "-m", 8, "--memory-cap")
    found = pipemem_json("simulate", "auto", *size, "0.5,1,1,1", "-o", "seconds=1")
    assert found["peak_activations"][0] <= 0.5 < found["peak_activation"] <= 1
    assert pipemem_json("simulate", "v-half", *size, "0.75,0.8,0.9,1")["peak_activation"] == 0.75
    moved = pipemem_json("simulate", "1f1b", *size, "0.75,0.75,0.5,0.25", "--offload", "auto", "--offload-ratio", 0.2)
    assert moved["peak_activations"] == [0.75, 0.75, 0.5, 0.25]


def test_recomputation_of_a_named_schedule(pipemem, pipemem_json):
    size = ("simulate", "1f1b", "-p", 4, "-m", 8)
    plain = pipemem_json(*size)
    selective = pipemem_json(*size, "-o", "recompute=selective")
    assert selective["recomputed"] == {"selective": [0, 1, 2, 3]} and not plain["recomputed"]
    assert selective["peak_activation"] < plain["peak_activation"] and selective["makespan"] > plain["makespan"]
    capped = pipemem_json(*size, "-o", "recompute=auto", "--memory-cap", 0.8)
    assert capped["peak_activation"] <= 0.8 and 3 not in capped["recomputed"]["selective"]
    assert "selective: 0, 1, 2, 3" in pipemem(*size, "-o", "recompute=selective").stdout


def test_microbatches_of_a_costs_file_that_are_not_alike(pipemem, pipemem_json, refuses, tmp_path):
    file = tmp_path / "costs.json"
    weights = {"time": [1, 1, 4, 1], "memory": [1, 1, 2, 1], "kinds": {"W": [1, 1, 2, 1]}}
    file.write_text(json.dumps({"microbatch": weights}))
    size = ("simulate", "1f1b", "-p", 2, "--costs", file)
    costs = Costs(microbatch=MicrobatchWeights(**weights))
    timeline = simulate(build_schedule("1f1b", num_devices=2, num_microbatches=4), costs)
    found = pipemem_json(*size, "-m", 4)
    assert (found["makespan"], found["peak_activations"]) == (timeline.makespan, [1.5, 1])
    assert found["ideal"] < found["lower_bound"] < found["makespan"]
    assert found["microbatch_weights"] == {"time": weights["time"], "memory": weights["memory"]}
    told = "microbatch weights   time 1 to 4, mean 1.75, memory 1 to 2, mean 1.25"
    assert told in pipemem(*size, "-m", 4).stdout
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


def test_prices_of_slices_from_a_file(pipemem_json, refuses, tmp_path):
    """In one pipeline of one device nothing waits: its work is the sum of all prices."""
    file = tmp_path / "costs.json"
    file.write_text('{"forward": [1, 2, 3], "backward_input": 1.5, "memory": {"F": [5, 1, 1], "W": -7}}')
    found = pipemem_json("simulate", "seq1f1b", "-p", 1, "-m", 2, "-o", "slices=3", "--costs", file)
    assert (found["slices"], found["makespan"]) == (3, 2 * (6 + 1.5 + 1))
    said = refuses("simulate", "seq1f1b", "-p", 1, "-m", 2, "-o", "slices=2", "--costs", file)
    check_refusal(said, "costs-mismatch", "forward", 3, 1, 2)


def test_slices_of_equal_time_shorten_a_step_and_hold_more(pipemem_json):
    size = ("seq1f1b", "-p", 4, "-m", 4, "-o", "slices=8", "--attention-share", 0.9)
    tokens, flops = (pipemem_json("simulate", *size, "--slice-cut", cut) for cut in ("tokens", "flops"))
    assert tokens == pipemem_json("simulate", *size)
    assert flops["ideal"] == pytest.approx(tokens["ideal"])
    assert flops["makespan"] < tokens["makespan"] * 0.95
    assert flops["peak_activation"] > tokens["peak_activation"], "the first slice has most of the tokens"
    for found in (tokens, flops):
        assert found["lower_bound"] <= found["makespan"] * (1 + 1e-9)


def test_attention_is_priced_in_a_comparison_with_a_schedule_that_has_no_slices(pipemem):
    shown = pipemem("show", "1f1b", "seq1f1b", "-p", 2, "-m", 4, "--attention-share", 0.3)
    assert shown.exit_code == 0 and "seq1f1b: p=2" in shown.stdout


@pytest.mark.parametrize(("chunks", "own"), [((), "1f1b"), (("-v", 2), "interleaved")])
def test_stock_is_megatrons_own_order(pipemem, chunks, own):
    asked, ours = (pipemem("simulate", name, "-p", 4, "-m", 8, *chunks, "--json") for name in ("stock", own))
    assert json.loads(asked.stdout) == json.loads(ours.stdout)
    assert own in asked.stderr and not ours.stderr


def test_algorithms_trade_a_microbatch_for_the_head(pipemem_json):
    off = pipemem_json(*SIZE, "--head-cost", 3)
    assert off["makespan"] == (8 + 3) * 3 + 8 * 3 and "vocabulary_barriers" not in off
    for algorithm, barriers in ((1, 2), (2, 1)):
        found = pipemem_json(*SIZE, "--head-cost", 3, "--vocab-parallel", algorithm)
        assert found["vocabulary_barriers"] == barriers
        assert found["peak_activation"] == (4 + barriers) / 4
        assert found["makespan"] <= (8 + 3) * 3 + 8 * 3 / 4
    in_layers = pipemem_json(*SIZE, "--head-cost", "8layers", "--layers", 32)
    assert in_layers["makespan"] == pytest.approx(off["makespan"])


def test_auto_says_why(pipemem_json):
    large = pipemem_json(*SIZE, "--head-cost", 6, "--layers", 32, "--vocab-parallel", "auto")
    assert large["vocabulary_barriers"] == 1 and "Algorithm 2" in large["vocabulary_reason"]
    small = pipemem_json(*SIZE, "--head-cost", 0.01, "--vocab-parallel", "auto")
    assert small["vocabulary_barriers"] == 0 and "not worth" in small["vocabulary_reason"]
    size = ("simulate", "v-half", "-p", 4, "-m", 8, "--head-cost", 0.4)
    moved = pipemem_json(*size, "--layers", 64, "--vocab-parallel", "auto")
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
    found = json.loads(pipemem("simulate", source, "--json").stdout)
    wanted = pipemem_json("simulate", "zb-h1", "-p", 3, "-m", 4)
    assert {**found, "schedule": ""} == {**wanted, "schedule": ""}


def test_several_steps_are_one_picture(pipemem_json):
    (one,), (drawn,) = (pipemem_json("show", "zb-h2", "-p", 2, "-m", 4, *more) for more in ((), ("--steps", 3)))
    assert drawn["schedule"] == "zb-h2, 3 steps" and drawn["microbatches"] == 12
    assert [len(row) for row in drawn["timeline"]] == [3 * len(row) for row in one["timeline"]]
    assert drawn["makespan"] < 3 * one["makespan"]
