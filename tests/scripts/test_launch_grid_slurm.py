"""Grids as array jobs: what is asked of Slurm, by stand-ins for its commands; tests/slurm has the real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_pipemem.cli.app import app
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.launch.grid import slurm
from megatron_pipemem.launch.grid.config import load_points
from megatron_pipemem.launch.grid.store import Store

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "grid.sbatch"


def fake_slurm(tmp_path, monkeypatch, queue: str = "") -> Path:
    """Programs named like Slurm's that note how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, says in (("sbatch", "41;cluster"), ("squeue", queue)):
        (folder / name).write_text(f"#!/bin/sh\necho {name} \"$@\" >> {tmp_path}/called\nprintf '{says}\\n'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "called"


def test_an_array_job_for_every_number_of_nodes(tmp_path, write_grid, monkeypatch):
    called = fake_slurm(tmp_path, monkeypatch, r"41 0 R\n40 2 R\n41 N/A PD")
    cuts = [{"parallelism.pp": 4}, {"parallelism.pp": 2}, {"parallelism": {"pp": 2, "dp": 2}}]
    common = {"cluster.devices_per_node": 2, "cluster.nodes": 2, "cluster.backend": "nccl"}
    store = Store(tmp_path / "grid")
    store.create(tmp_path / "grid.yaml", load_points(write_grid(points=cuts, set=common)))
    assert slurm.under_way(store, print) == set(), "nothing was submitted yet"
    store.fail(1, "the last time")
    assert slurm.submit(store, [0, 1, 2], 5, SCRIPT, ["--partition=big"]) == ["41", "41"]
    assert store.results()[1] is None, "should the job be cancelled, nobody takes the last failure for its own"
    two, one = called.read_text().splitlines()
    assert "--array=0,2%5 --nodes=2 --gpus-per-node=2" in two and "--array=1%5 --nodes=1 --gpus-per-node=2" in one
    assert two.endswith(f"--partition=big {SCRIPT} {store.folder}")
    assert slurm.under_way(store, print) == {0}, "only elements of jobs of this grid count"


def test_a_cancelled_element_that_is_just_ending_is_not_waited_for_in_vain(store, tmp_path, monkeypatch):
    fake_slurm(tmp_path, monkeypatch, r"41 0 R\n41 1 CG")
    slurm.submit(store, [0, 1], 1, SCRIPT)
    ended = r"41 0 R"
    monkeypatch.setattr(
        slurm.time, "sleep", lambda _: (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\necho {ended}\n")
    )
    told = []
    assert slurm.under_way(store, told.append) == {0}
    assert slurm.under_way(store, told.append) == {0}
    assert told == [[1]]


def test_without_slurm_it_says_so(store, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "not-begun"
    arguments = ["grid", str(tmp_path / "grid.yaml"), "--launcher", "slurm", "--output", str(folder)]
    refused = CliRunner().invoke(app, arguments)
    assert "there is no sbatch here" in f"{refused.output}{refused.exception}" and not folder.exists()
    with pytest.raises(UnsupportedError, match="there is no sbatch here"):
        slurm.submit(store, [0], 1, SCRIPT)
    with pytest.raises(UnsupportedError, match=r"there is no .*nowhere"):
        slurm.submit(store, [0], 1, tmp_path / "nowhere")
