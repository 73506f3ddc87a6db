"""``pipemem show``."""

from __future__ import annotations

import json

import pytest


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


def test_a_file_can_be_drawn(pipemem, tmp_path):
    source, target = tmp_path / "mine.csv", tmp_path / "mine.json"
    source.write_text("0F0,0B0\n1F0,1B0\n")
    assert pipemem("show", source, "--output", target).exit_code == 0
    names = [event["name"] for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"]
    assert names == ["PP:0F0", "PP:0B0", "PP:1F0", "PP:1B0"]


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
