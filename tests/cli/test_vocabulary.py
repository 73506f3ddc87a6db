"""``--vocab-parallel`` of simulate, show and pareto."""

from __future__ import annotations

import json

import pytest

from megatron_pipemem.schedule.schedule import Schedule

SIZE = ("simulate", "1f1b", "-p", 4, "-m", 8)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    from megatron_pipemem.features.vocabulary.orders import with_vocabulary
    from megatron_pipemem.schedule.registry import build_schedule

    schedule = with_vocabulary(build_schedule("v-half", num_devices=3, num_microbatches=4), 2)
    path = tmp_path / "v.csv"
    path.write_text(schedule.to_csv())
    assert Schedule.from_csv(path.read_text(), name="v-half") == schedule
    assert pipemem_json("check", path)["valid"]
    assert pipemem_json("simulate", path)["vocabulary_barriers"] == 2
    path.write_text(schedule.to_csv().replace("1S2,", "", 1))
    assert not json.loads(pipemem("check", path, "--json").stdout)["valid"]
