"""Grids as array jobs: what is asked of Slurm, by stand-ins for its commands; tests/slurm has the real ones."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

from commands import pipemem
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.tools.launch import slurm
from megatron_pipemem.tools.launch.grid.points import load_points
from megatron_pipemem.tools.launch.grid.store import Store
from megatron_pipemem.tools.launch.slurm import Options

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "slurm" / "grid.sbatch"
RUNS = Path(__file__).parents[2] / "configs" / "runs"


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
    folder = tmp_path / "grid"
    others = (f"2 R {SCRIPT} {folder}-2", f"2 R other.sh {folder}", f"N/A PD {SCRIPT} {folder}", "4 PD")
    called = fake_slurm(tmp_path, monkeypatch, "\\n".join((f"0 R {SCRIPT} --mpi=pmix {folder}", *others)))
    cuts = [{"pp": 4}, {"pp": 2}, {"pp": 2, "dp": 2}]
    common = {"cluster.devices_per_node": 2, "cluster.nodes": 2, "cluster.backend": "nccl"}
    store = Store(folder)
    store.create(tmp_path / "grid.yaml", load_points(write_grid(points=cuts, set=common)))
    store.fail(1, "the last time")
    assert slurm.submit_points(store, [0, 1, 2], 5, Options(["--partition=big"], ["--mpi=pmix"])) == ["41", "41"]
    assert store.results()[1] is None, "should the job be cancelled, nobody takes the last failure for its own"
    two, one = called.read_text().splitlines()
    (tmp_path / "link").symlink_to(tmp_path)
    assert "--array=0,2%5 --nodes=2 --gpus-per-node=2" in two and "--array=1%5 --nodes=1 --gpus-per-node=2" in one
    assert two.endswith(f"--partition=big {SCRIPT} --mpi=pmix {store.folder}")
    for place in (folder, tmp_path / "link" / "grid"):
        assert slurm.under_way(Store(place), print) == {0}, "only elements of jobs of this grid count"


def test_a_cancelled_element_that_is_just_ending_is_not_waited_for_in_vain(store, tmp_path, monkeypatch):
    ended = f"0 R {SCRIPT} {store.folder}"
    fake_slurm(tmp_path, monkeypatch, rf"{ended}\n1 CG {SCRIPT} {store.folder}")
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
    done = pipemem(*arguments)
    assert "no sbatch" in f"{done.output}{done.exception}" and not folder.exists()
    with refused("not-installed", "sbatch", kind=UnsupportedError):
        slurm.submit_points(store, [0], 1, Options())


def said(*arguments: object) -> str:
    done = pipemem(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def commands(printed: str) -> list[list[str]]:
    """The words of what a shell would run of a text, comments left out."""
    lines = "\n".join(line for line in printed.splitlines() if not line.startswith("#")).replace("\\\n", "")
    return [shlex.split(line) for line in lines.splitlines() if line]


def test_printed_arrays_are_what_would_be_submitted(tmp_path, write_grid, monkeypatch):
    called = fake_slurm(tmp_path, monkeypatch)
    cuts = [{"pp": 4}, {"pp": 3}, {"pp": 2}]
    file = write_grid(points=cuts, set={"cluster.devices_per_node": 2, "cluster.nodes": 2})
    folder = tmp_path / "never"
    asked = ("grid", file, "--launcher", "slurm", "--output", folder, "--max-parallel", 3, "--sbatch=--partition=big")
    printed = said(*asked, "--print")
    assert not called.exists() and not folder.exists()
    two, one = commands(printed)
    assert {"--array=0%3", "--nodes=2", "--partition=big"} < set(two) and {"--array=2%3", "--nodes=1"} < set(one)
    assert two[-2:] == [str(SCRIPT), str(folder)]
    assert all(f"# {line}".rstrip() in printed.splitlines() for line in SCRIPT.read_text().splitlines())
    listed = [line.split(": ") for line in printed.splitlines()[:3]]
    assert [words[:2] for words in listed] == [["# 0", "pp=4"], ["# 1", "pp=3"], ["# 2", "pp=2"]]
    assert [len(words) > 2 for words in listed] == [False, True, False], "only the second is left out, with the reason"
    told = json.loads(said(*asked, "--print", "--json"))
    assert [job["command"] for job in told["jobs"]] == [two, one] and told["script"] == str(SCRIPT)
    assert [job["points"] for job in told["jobs"]] == [[0], [2]] and list(told["left_out"]) == ["pp=3"]
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm, too
    assert commands(said(*asked, "--print")) == [two, one]


def test_a_run_is_submitted_as_one_job(tmp_path, monkeypatch):
    called = fake_slurm(tmp_path, monkeypatch)
    run, batch_file = RUNS / "llama3-70b-64xh100.yaml", SCRIPTS / "slurm" / "pretrain_gpt.sbatch"
    asked = (
        "launch",
        run,
        "--launcher",
        "slurm",
        "--sbatch=--time=1",
        "--srun=--mpi=pmix",
        "--set",
        "data_cache_path=a b",
    )
    printed = said(*asked, "--print")
    assert not called.exists()
    (words,) = commands(printed)
    assert {"--nodes=8", "--gpus-per-node=8", "--time=1"} < set(words)
    assert words[words.index(str(batch_file)) :] == [
        *(str(batch_file), "--mpi=pmix", str(run), "--set", "data_cache_path=a b")
    ]
    assert json.loads(said(*asked, "--print", "--json")) == {"command": words, "script": str(batch_file)}
    assert json.loads(said(*asked, "--json")) == {"job": "41"}
    assert called.read_text().split() == " ".join(["sbatch", "--parsable", *words[1:]]).split()


def batch(tmp_path: Path, name: str, *arguments: object, **environment: str) -> list[list[str]]:
    """The commands that a batch file starts, with stand-ins for Slurm, Apptainer and Python that note their words."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    note = f"printf '%q ' {{}} \"$@\" >> {tmp_path}/called; echo >> {tmp_path}/called"
    start = 'while [[ $1 == -* ]]; do shift; done; exec "$@"'
    programs = {
        "scontrol": "echo first; echo second",
        "srun": f"{note.format('srun')}; {start}",
        "apptainer": f'{note.format("apptainer")}; shift 7; exec "$@"',
        "python3": f"{note.format('python3')}; echo true",
    }
    for program, does in programs.items():
        (folder / program).write_text(f"#!/bin/bash\n{does}\n")
        (folder / program).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": "3"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "NODE_RANK", "NNODES")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "slurm" / name), *map(str, arguments)],
        env=kept | job | {"PATH": f"{folder}:{os.environ['PATH']}", "PIPEMEM_ROOT": str(SCRIPTS.parent)} | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [shlex.split(line) for line in (tmp_path / "called").read_text().splitlines()]


MOUNTS = "--container-mounts=/data:/data"


def test_pyxis_gets_the_container_and_what_has_to_be_in_it(tmp_path):
    step, python = batch(
        tmp_path, "pretrain_gpt.sbatch", "--container-image=a#b:c", MOUNTS, "--mpi=pmix", "run.yaml", "--set", "a=b c"
    )
    here = f"{tmp_path}:{tmp_path},{SCRIPTS.parent}:{SCRIPTS.parent},/data:/data"
    assert step[: step.index(str(SCRIPTS / "pretrain_gpt.sh"))] == [
        *("srun", "--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=pmix", "--container-image=a#b:c"),
        *(f"--container-mounts={here}", f"--container-workdir={tmp_path}"),
    ]
    assert step[-3:] == python[-3:] == ["run.yaml", "--set", "a=b c"]
    assert python[:3] == ["python3", "-m", "megatron_pipemem"], "that of the container, whatever is in the checkout"


def test_an_image_of_apptainer_is_started_by_its_command(tmp_path):
    (tmp_path / "grid" / "points" / "003").mkdir(parents=True)
    folder = tmp_path / "grid"
    started = batch(tmp_path, "grid.sbatch", "--container-image=x.sif", MOUNTS, "--mpi=pmix", folder)
    binds = f"{tmp_path}:{tmp_path},{SCRIPTS.parent}:{SCRIPTS.parent},/data:/data"
    image = ["apptainer", "exec", "--nv", "--bind", binds, "--pwd", str(tmp_path), "x.sif"]
    step, inside, launch, last, collector, result = started
    assert step[:4] == ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=pmix"]
    assert last[:4] == ["srun", "--nodes=1", "--ntasks=1", "--mpi=pmix"], "the result is collected in the image, too"
    assert step[4:12] == last[4:12] == inside[:8] == collector[:8] == image
    assert launch[3:5] == ["launch", f"{folder}/points/003/run.yaml"] and result[3] == "grid-result"


def test_without_a_container_nothing_is_asked_of_one(tmp_path):
    step, _ = batch(tmp_path, "pretrain_gpt.sbatch", "run.yaml", PYTHON="python3")
    assert step == [*("srun", "--kill-on-bad-exit=1", "--cpu-bind=none"), str(SCRIPTS / "pretrain_gpt.sh"), "run.yaml"]
