"""``auto`` wherever a schedule's name can stand, and ``pipemem pareto``."""

from __future__ import annotations

import json

import pytest

from megatron_pipemem.tools.planner.pareto import LEAST_SAVED


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def byte_costs(tmp_path):
    """1F1B holds four microbatches of these on its first device: 4000 bytes."""
    path = tmp_path / "costs.json"
    memory = {"F": 1000, "I": -300, "W": -700}
    path.write_text(
        json.dumps({"forward": 1, "backward_input": 1.5, "backward_weight": 0.5, "memory": memory}), encoding="utf-8"
    )
    return path


def test_auto_simulates_what_it_found(pipemem, pipemem_json):
    ask = ("simulate", "auto", "-p", 8, "-m", 24, "--costs", "1,1.5,.5", "--memory-cap", 0.625)
    more_chunks = pipemem_json(*ask, "-o", "max_chunks=4")
    answer = pipemem_json(*ask)
    assert "placements of 2 chunks per device, as in a run" in " ".join(pipemem(*ask).stdout.split())
    assert more_chunks["chunks"] > 2 == answer["chunks"] and more_chunks["makespan"] < answer["makespan"]
    assert answer["schedule"] == "auto" and answer["peak_activation"] <= 0.625
    assert answer["makespan"] == pytest.approx(answer["lower_bound"])
    assert answer["bubble_rate"] < pipemem_json("simulate", "v-half", *ask[2:])["bubble_rate"]
    assert answer["search_seconds"] > 0 == pipemem_json(*ask)["search_seconds"], "the second one is remembered"


def test_auto_searches_for_the_period_of_steps_without_a_barrier(pipemem, pipemem_json):
    ask = ("simulate", "auto", "-p", 2, "-m", 4, "--costs", "1,1.25,.75", "--memory-cap", 1, "--steps", 4)
    one, many = pipemem_json(*ask), pipemem_json(*ask, "-o", "period=true")
    assert many["period"] < one["period"] and many["makespan"] >= one["makespan"]
    assert many["lower_bound"] == pytest.approx(12), "the work of every device"
    assert "of the period can be saved" in pipemem(*ask, "-o", "period=true").stdout


def test_auto_takes_placement_and_chunks(pipemem_json):
    size = ("simulate", "auto", "-p", 4, "-m", 8)
    assert pipemem_json(*size, "-o", "placement=linear")["chunks"] == 1
    assert pipemem_json(*size, "--chunks", 4, "--memory-cap", 1)["chunks"] == 4


def test_a_cap_in_bytes(pipemem_json, byte_costs):
    size = ("-p", 4, "-m", 8, "--costs", byte_costs)
    answer = pipemem_json("simulate", "auto", *size, "--memory-cap", "2500B", "-o", "seconds=0.3")
    assert 0 < max(answer["peak_bytes"]) <= 2500


def test_pareto_lists_no_dominated_choice(pipemem, pipemem_json, tmp_path):
    ask = ("pareto", "-p", 4, "-m", 8, "--costs", "1,1.5,.5", "--caps", "0.75", "--seconds", 0.2)
    answer = pipemem_json(*ask, "--output", tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    assert not any(choice["dominated"] for choice in answer["choices"])
    assert any("instead of" in trade for trade in answer["trades"])
    searched = [choice for choice in answer["choices"] if choice["memory_cap"] is not None]
    said = pipemem(*ask).stdout
    rows = [line.split() for line in said.splitlines()]
    assert searched and all(
        ["auto", f"{row['memory_cap']:.4g},", "searched", str(row["chunks"])] == line[1:5]
        for row in searched
        for line in rows
        if "searched" in line and line[:1] == ["*"]
    )
    assert "1,1.5,.5" in said and f"{LEAST_SAVED:.0%}" in said
    everything = pipemem_json(*ask, "--all")["choices"]
    assert {"1f1b", "v-min", "auto"} <= {choice["schedule"] for choice in everything}
    assert "chimera" not in {choice["schedule"] for choice in everything}, "it holds the weights twice"
    assert len(everything) > len(answer["choices"])
    assert {2, 4, 8} <= {choice["chunks"] for choice in everything if choice["schedule"] == "gis"}
    of_eight_layers = pipemem_json(*ask, "--all", "--layers", 8)["choices"]
    assert max(choice["chunks"] for choice in of_eight_layers) == 2
    for one in answer["choices"]:
        for other in everything:
            assert not (
                other["peak_activation"] < one["peak_activation"] - 1e-9 and other["makespan"] < one["makespan"] - 1e-9
            )


def test_with_bytes_pareto_compares_shares_of_1f1b(pipemem, pipemem_json, tmp_path):
    """Twice as much waits for W as F kept, so zb-h1 is no longer where 1F1B is."""
    path = tmp_path / "costs.json"
    path.write_text('{"memory": {"F": 1024, "I": 1024, "W": -2048}}', encoding="utf-8")
    size = ("pareto", "-p", 4, "-m", 4, "--caps", "0.75", "--seconds", 0.1, "--all")
    choices = pipemem_json(*size, "--costs", path)["choices"]
    of_families = {choice["schedule"]: choice for choice in choices if not choice["memory_cap"]}
    shares = {name: of_families[name]["share_of_1f1b"] for name in ("1f1b", "zb-h1")}
    assert shares == {"1f1b": 1, "zb-h1": 2} and of_families["zb-h1"]["peak_activation"] == 1
    searched = [choice for choice in choices if choice["memory_cap"]]
    assert searched and all(choice["memory_cap"] == 0.75 > choice["share_of_1f1b"] - 1e-9 for choice in searched)
    assert {choice["share_of_1f1b"] for choice in pipemem_json(*size)["choices"]} == {None}
    text = " ".join(pipemem(*size, "--costs", path).stdout.split())
    assert "shares of 1F1B's bytes" in text and f"0.75 is {0.75 * 4096 / 2**30:.4g}GiB" in text


def test_pareto_says_what_caps_nothing_fits(pipemem):
    said = pipemem("pareto", "-p", 2, "-m", 4, "--caps", "0.01,1", "--seconds", 0.2)
    assert said.exit_code == 0
    (note,) = said.stderr.splitlines()
    assert note.startswith("note: ") and " 0.01 " in note
    assert "up to 8 chunks per device" in said.stdout and "--layers" in said.stdout
    assert "dominated schedules are not listed" in said.stdout and "activation units" in " ".join(said.stdout.split())
