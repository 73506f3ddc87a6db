"""The documented first path without a device: one profile by formulas prices every schedule that is asked for."""

from __future__ import annotations

import json

import pytest
from refusals import check_refusal

from megatron_pipemem.part_costs import read_costs
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.placement import Placement


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    return tmp_path_factory.mktemp("first") / "costs.json"


@pytest.fixture(autouse=True)
def profiled(costs, pipemem):
    if not costs.exists():
        done = pipemem("profile", "--model", "llama3-8b", "--tp", 4, "--formulas", "--output", costs)
        assert done.exit_code == 0, done.output


def _seconds_of_model(costs) -> float:
    seconds = read_costs(costs).seconds(Placement.linear(1))
    return seconds[Kind.F][0] + seconds[Kind.B][0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "v-half", "zbv", "zb-h1", "gis-h", "dualpipe", "auto"])
def test_simulate_prices_every_placement(pipemem_json, costs, schedule):
    facts = pipemem_json("simulate", schedule, "-p", 4, "-m", 8, "--costs", costs)
    whole = _seconds_of_model(costs) * 8 / 4  # of the microbatches on every device
    assert whole < facts["makespan"] < 2 * whole


def test_pareto_compares_placements(pipemem, costs):
    done = pipemem("pareto", "-p", 4, "-m", 8, "--costs", costs, "--caps", ".75", "--seconds", 0.3, "--all", "--json")
    choices = json.loads(done.stdout)["choices"]
    assert {choice["placement"] for choice in choices} >= {"linear", "v", "interleaved"}
    assert len([choice for choice in choices if choice["memory_cap"] == 0.75]) == 1
    assert "among 12 stages (8 of 3 and 4 of 2)" in done.stderr


def test_a_cap_in_bytes_is_kept(pipemem, costs):
    """Of stages of another number than those of 1F1B."""
    done = pipemem("simulate", "auto", "-p", 4, "-m", 8, "--costs", costs, "--memory-cap", "14GiB", "-o", "seconds=0.3")
    assert done.exit_code == 0 and "GiB" in done.stdout, done.output
    refused = pipemem(
        "simulate", "auto", "-p", 4, "-m", 8, "--costs", costs, "--memory-cap", "1GiB", "-o", "seconds=0.3"
    )
    assert refused.exit_code == 2 and "memory cap of 1.00GiB" in refused.output


def test_the_head_of_a_profile_is_cut_over_all_devices(pipemem_json, costs):
    there, cut = (
        pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", costs, "--vocab-cut", way) for way in ("off", "1")
    )
    assert cut["makespan"] < there["makespan"]  # llama3-8b's head takes as long as 1.7 layers
    assert cut["ideal"] == pytest.approx(_seconds_of_model(costs) * 8 / 4, rel=0.02)
    pipemem_json("simulate", "v-half", "-p", 4, "-m", 8, "--costs", costs, "--vocab-cut", "auto")


def test_a_file_of_an_earlier_version_prices_its_own_cut(tmp_path, pipemem_json, refuses):
    path = tmp_path / "old.json"
    path.write_text(
        json.dumps({"forward": [1] * 4, "backward_input": [1] * 4, "backward_weight": [1] * 4, "profile": {}})
    )
    assert pipemem_json("simulate", "1f1b", "-p", 4, "-m", 8, "--costs", path)["makespan"] == 33
    check_refusal(refuses("simulate", "zbv", "-p", 4, "-m", 8, "--costs", path), "costs-mismatch", "forward", 4, 8)
