"""``pipemem simulate`` and ``pipemem schedules``."""

from __future__ import annotations

import json

import pytest
from refusals import check_refusal

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.prices import MicrobatchWeights
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.waits import run_single_queues

KEYS = [
    "schedule", "devices", "microbatches", "chunks", "slices", "makespan", "ideal", "bubble_rate", "device_bubble_rate",
    "peak_activations", "peak_activation", "peak_bytes", "share_of_1f1b",
    "lower_bound", "search_seconds", "messages", "replicas", "weight_versions",
    "placement", "host_peak", "stall_seconds", "transfers", "recomputed", "microbatch_weights", "pairs",
]  # fmt: skip
NAMES = [family.name for family in families()]


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


def test_several_are_compared_with_megatrons_own(pipemem, pipemem_json, refuses):
    size = ("-p", 4, "-m", 8, "--costs", "1,1.5,0.5")
    rows = pipemem_json("simulate", "zb-h1", "v-half", *size)
    assert [row["schedule"] for row in rows] == ["zb-h1", "v-half", "1f1b", "interleaved"]
    assert rows == [pipemem_json("simulate", row["schedule"], *size) for row in rows]
    with_chunks = pipemem_json("simulate", "gis", "interleaved", *size, "--chunks", 3)
    assert [(row["schedule"], row["chunks"]) for row in with_chunks] == [("gis", 3), ("interleaved", 3), ("1f1b", 1)]
    told = pipemem("simulate", "zb-h1", "v-half", *size).stdout
    assert all(f"{row['makespan']:.6g}" in told for row in rows)
    check_refusal(refuses("simulate", "zb-h1", "v-half", *size, "--steps", 3), "conflicting-options", "--steps")
    check_refusal(refuses("simulate", "zb-h1", "v-half", *size, "--chunks", 3), "needs-chunks")


def test_costs_and_cap_reach_a_family_that_fits_its_order_to_them(pipemem_json, refuses):
    size = ("simulate", "zb-auto", "-p", 8, "-m", 24)
    plain, fitted = (pipemem_json(*size, "--costs", "1,1.5,0.5", *more) for more in ((), ("--memory-cap", 1.5)))
    schedule = build_schedule("zb-auto", num_devices=8, num_microbatches=24, memory_cap=1.5, costs=Costs(1, 1.5, 0.5))
    assert fitted["makespan"] == simulate(schedule, Costs(1, 1.5, 0.5)).makespan < plain["makespan"]
    assert plain["peak_activation"] == 1 < fitted["peak_activation"] <= 1.5
    check_refusal(refuses(*size, "-o", "memory_cap=1.5"), "has-own-flag", "memory_cap", "zb-auto")


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


def test_steps_without_a_barrier(pipemem_json, refuses):
    arguments = ("simulate", "zbv", "-p", 8, "-m", 16)
    usual, found = pipemem_json(*arguments), pipemem_json(*arguments, "--steps", 8)
    extra = {key: found.pop(key) for key in ("steps", "steps_makespan", "period", "gain")}
    assert extra == {"steps": 8, "steps_makespan": 51.5 + 7 * 48, "period": 48, "gain": 51.5 / 48} and found == usual
    late = pipemem_json("simulate", "pipedream-2bw", "-p", 8, "-m", 16, "--steps", 2)
    assert (late["period"], late["gain"]) == (48, pytest.approx(1.292, abs=5e-4))
    for command in ("simulate", "show"):
        told = refuses(command, "1f1b", "-p", 4, "-m", 8, "--steps", 10**8)
        check_refusal(told, "too-large", "--steps", 100000000, 8, "--yes")


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("v-hlaf", "-p", 4, "-m", 8), ("unknown-schedule", "'v-half'")),
        (("1F1B", "-p", 4, "-m", 8), ("unknown-schedule", "'1f1b'")),
        (("1f1b", "-p", 0, "-m", 8), ("bad-number", "--devices", 0)),
        (("1f1b", "-p", 4, "-m", 0), ("bad-number", "--microbatches", 0)),
        (("1f1b", "-p", -3, "-m", 8), ("bad-number", "--devices", -3)),
        (("1f1b", "-p", 4), ("missing-option", "--microbatches")),
        (("1f1b", "-m", 4), ("missing-option", "--devices")),
        (("1f1b", "-p", 4, "-m", 8, "--chunks", 2), ("needs-chunks", 1, 2)),
        (("1f1b", "-p", 4, "-m", 8, "-o", "colour=red"), ("unknown-option", "colour")),
        (("interleaved", "-p", 4, "-m", 8, "-o", "chunks"), ("bad-syntax", "chunks")),
        (("interleaved", "-p", 4, "-m", 8, "-o", "=3"), ("bad-syntax", "=3")),
        (("interleaved", "-p", 4, "-m", 8, "-o", "chunks=two"), ("bad-number", "interleaved", "chunks", "two")),
        (("interleaved", "-p", 4, "-m", 8, "-v", 2, "-o", "chunks=3"), ("given-twice", "chunks")),
        (("interleaved", "-p", 4, "-m", 8, "-o", "chunks=2", "-o", "chunks=3"), ("given-twice", "chunks")),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "1,1"), ("bad-syntax", "--costs", "1,1")),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "1,1,1,1"), ("bad-syntax", "--costs", "1,1,1,1")),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "a,b,c"), ("bad-syntax", "--costs", "a,b,c")),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "1,-1,1"), ("bad-number", "--costs", "1,-1,1")),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "0,0,0"), ("bad-number", "--costs", "0,0,0")),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "1,nan,1"), ("bad-number", "--costs", "1,nan,1")),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "1,inf,1"), ("bad-number", "--costs", "1,inf,1")),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "missing.json"), ("cannot-read", "costs", "missing.json")),
        (("1f1b", "-p", 4, "-m", 8, "--p2p", "-1"), ("bad-number", "--p2p", "-1.0")),
        (("1f1b", "-p", 4, "-m", 8, "--p2p", "nan"), ("bad-number", "--p2p", "nan")),
        (("1f1b", "-p", 4, "-m", 8, "--memory-cap", 0), ("bad-number", "memory cap", 0)),
        (("missing.csv",), ("cannot-read", "schedule", "missing.csv")),
    ],
)
def test_bad_input_ends_in_one_line(refuses, arguments, expected):
    check_refusal(refuses("simulate", *arguments), *expected)


@pytest.mark.parametrize(("flag", "value"), [("-p", 3), ("-m", 9), ("-v", 2)])
def test_counts_that_contradict_the_file(pipemem, refuses, tmp_path, flag, value):
    file = tmp_path / "mine.csv"
    pipemem("check", "1f1b", "--write", file, "-p", 2, "-m", 4)
    check_refusal(refuses("simulate", file, flag, value), "other-size", file, value)
    check_refusal(refuses("simulate", file, "-o", "group_size=3"), "options-of-file", file, "group_size")


def test_schedules_lists_every_family(pipemem, pipemem_json):
    rows = {row["name"]: row for row in pipemem_json("schedules", "--all")}
    assert list(rows) == NAMES
    assert set(rows["zbv"]) == {
        "name", "placement", "summary", "peak", "bubble", "source", "splits_backward", "min_devices", "options",
        "chunks", "needs", "asynchronous", "slices", "offloads", "replicas", "for_research",
    }  # fmt: skip
    assert rows["zbv"]["placement"] == "v" and rows["zbv"]["splits_backward"] is True
    assert "chunks" in rows["interleaved"]["options"]
    assert [name for name, row in rows.items() if row["asynchronous"]] == ["pipedream", "pipedream-2bw"]
    assert rows["dualpipe"]["needs"] == "even p, even m of at least 2p"
    shown = pipemem("schedules", "--all").stdout
    assert all(name in shown for name in NAMES)
    assert shown.count("2 copies of the weights") == 3
    assert shown.count("asynchronous") == 2 and "asynchronous, simulated only" not in shown and "even p" in shown


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


def test_a_cap_per_device(pipemem_json, refuses):
    size = ("-p", 4, "-m", 8, "--memory-cap")
    found = pipemem_json("simulate", "auto", *size, "0.5,1,1,1", "-o", "seconds=1")
    assert found["peak_activations"][0] <= 0.5 < found["peak_activation"] <= 1
    assert pipemem_json("simulate", "v-half", *size, "0.75,0.8,0.9,1")["peak_activation"] == 0.75
    check_refusal(refuses("simulate", "v-half", *size, "1,0.7,1,1"), "over-cap", "v-half", "0.75", "device 1")
    check_refusal(refuses("simulate", "v-half", *size, "1,1,1"), "wrong-count", 3, 4)
    moved = pipemem_json("simulate", "1f1b", *size, "0.75,0.75,0.5,0.25", "--offload", "auto", "--offload-ratio", 0.2)
    assert moved["peak_activations"] == [0.75, 0.75, 0.5, 0.25]


def test_recomputation_of_a_named_schedule(pipemem, pipemem_json, refuses):
    size = ("simulate", "1f1b", "-p", 4, "-m", 8)
    plain = pipemem_json(*size)
    selective = pipemem_json(*size, "-o", "recompute=selective")
    assert selective["recomputed"] == {"selective": [0, 1, 2, 3]} and not plain["recomputed"]
    assert selective["peak_activation"] < plain["peak_activation"] and selective["makespan"] > plain["makespan"]
    capped = pipemem_json(*size, "-o", "recompute=auto", "--memory-cap", 0.8)
    assert capped["peak_activation"] <= 0.8 and 3 not in capped["recomputed"]["selective"]
    assert "selective: 0, 1, 2, 3" in pipemem(*size, "-o", "recompute=selective").stdout
    check_refusal(refuses(*size, "-o", "recompute=no"), "bad-choice", "recompute", "no")
    check_refusal(
        refuses(*size, "-o", "recompute=selective", "--memory-cap", 0.3), "cap-unreachable", "1f1b", "selective", "0.3"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--offload", "most"), ("bad-choice", "offload", "'most'")),
        (
            ("--offload", "full", "--memory-cap", "0.01"),
            ("cap-unreachable", "memory cap of 0.01"),
        ),
        (("--offload", "full", "--host-memory", "1GiB"), ("unit-mismatch",)),
        (("--offload", "full", "--offload-ratio", "-1"), ("bad-number", "--offload-ratio", "-1.0")),
    ],
)
def test_offload_that_cannot_be(pipemem, arguments, message):
    done = pipemem("simulate", "1f1b", "--devices", 2, "--microbatches", 4, *arguments)
    assert done.exit_code == 2
    check_refusal(" ".join(done.stderr.split()), *message)


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


def test_slices_of_equal_time_shorten_a_step_and_hold_more(pipemem_json, refuses):
    size = ("seq1f1b", "-p", 4, "-m", 4, "-o", "slices=8", "--attention-share", 0.9)
    tokens, flops = (pipemem_json("simulate", *size, "--slice-cut", cut) for cut in ("tokens", "flops"))
    assert tokens == pipemem_json("simulate", *size)
    assert flops["ideal"] == pytest.approx(tokens["ideal"])
    assert flops["makespan"] < tokens["makespan"] * 0.95
    assert flops["peak_activation"] > tokens["peak_activation"], "the first slice has most of the tokens"
    for found in (tokens, flops):
        assert found["lower_bound"] <= found["makespan"] * (1 + 1e-9)
    check_refusal(refuses("simulate", *size, "--slice-cut", "time"), "bad-choice", "--slice-cut", "time")
    check_refusal(
        refuses("simulate", *size[:-2], "--slice-cut", "flops"),
        "needs-option",
        "--attention-share",
        "--slice-cut",
        "flops",
    )


def test_attention_shares_that_are_about_nothing(pipemem, refuses):
    share = ("--attention-share", 0.3)
    for command in ("simulate", "show"):
        check_refusal(refuses(command, "1f1b", "-p", 2, "-m", 4, *share), "needs-option", "--attention-share", "0.3")
    cut = ("seq1f1b", "-p", 2, "-m", 4)
    check_refusal(
        refuses("simulate", *cut, *share, "--vocab-parallel", "auto", "--head-cost", 1),
        "conflicting-options",
        "--vocab-parallel",
        "--attention-share",
        "0.3",
    )
    assert "0.30" not in pipemem("show", "1f1b", *cut, *share).stdout, "a comparison with a schedule that has no slices"


@pytest.mark.parametrize(("chunks", "own"), [((), "1f1b"), (("-v", 2), "interleaved")])
def test_stock_is_megatrons_own_order(pipemem, chunks, own):
    asked, ours = (pipemem("simulate", name, "-p", 4, "-m", 8, *chunks, "--json") for name in ("stock", own))
    assert json.loads(asked.stdout) == json.loads(ours.stdout)
    assert own in asked.stderr and not ours.stderr
