"""Our batch files under a real Slurm: jobs on two nodes, over gloo."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lanes import nightly

STEPS = 20
SAVE_INTERVAL = 4
# One rank on each of two nodes: every start of a rank imports Megatron, which takes longer than the training.
TWO_RANKS = {
    "pp": 2,
    "train_iters": STEPS,
    "save_interval": SAVE_INTERVAL,
    "cluster": {"base": "cpu", "nodes": 2, "devices_per_node": 1},
}
FOUR_RANKS = {
    "save_interval": 4,  # the stand-in's ranks meet where checkpoints would be
    "cluster": {"base": "cpu", "nodes": 2, "devices_per_node": 2},
}
STAND_IN = str(Path(__file__).parent / "stand_in.py")


def losses(log: str) -> list[tuple[int, str]]:
    """Every step that a log tells of."""
    return [(int(step), loss) for step, loss in re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", log)]


class GridRun:
    """``pipemem grid --launcher slurm`` as a process of its own."""

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str]):
        self.folder = folder
        self._words = [*words, "--output", str(folder)]
        self._environment = environment
        self._output = folder.with_suffix(".out")
        self._process: subprocess.Popen | None = None

    def start(self, *options: str) -> None:
        """Unless it runs already."""
        if self._process is not None:
            return
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*self._words, *options],
                env=self._environment,
                cwd=self.folder.parent,
                stdout=output,
                stderr=subprocess.DEVNULL,
            )

    def wait(self) -> tuple[int, dict]:
        """Its exit code and what it printed."""
        code = self._process.wait(240)
        return code, json.loads(self._output.read_text())

    def point(self, index: int) -> Path:
        return self.folder / "points" / f"{index:03}"

    def kill(self) -> None:
        """As ``kill -9``: it cannot tidy up, and may be started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None


@pytest.fixture(scope="module")
def grid(slurm, workplace):
    """An array job with two points, the second of which hangs and fails when tried again, and one that is never started."""
    base = Path(__file__).parents[2] / "configs" / "runs" / "tiny-cpu.yaml"
    points = [
        {"schedule": "v-half"},
        {"script": STAND_IN, "behaviour": "hang", "save_interval": 4},
        {"pp": 64},
    ]
    common = {
        "pp": 2,
        "train_iters": STEPS,
        "cluster.devices_per_node": 1,
        "cluster.nodes": 4,
    }
    file = workplace / "grid.yaml"
    file.write_text(yaml.safe_dump({"run": str(base), "set": common, "points": points}))
    words = [sys.executable, "-m", "megatron_pipemem", "grid", str(file), "--launcher", "slurm", "--json"]
    run = GridRun(words, workplace / "grid", slurm.environment)
    yield run
    run.kill()


@pytest.fixture
def uninterrupted(slurm, grid):
    """The folder of the grid's first point, trained to its end."""
    grid.start()
    slurm.until(lambda: (grid.point(0) / "result.json").exists(), "the first point ends")
    return grid.point(0)


def starts(log: str) -> list[list[int]]:
    """The numbers of the steps that a log tells of, those of every start of its job apart."""
    ranks: list[list[int]] = []
    for part in log.split("[before the start of training step]")[1:]:
        ranks.append([step for step, _ in losses(part)])
    return ranks


@nightly("the array job and the failing rank below; end_to_end/test_checkpoints.py saves and resumes")
def test_a_signal_costs_no_step_and_a_crashed_node_those_since_the_last_checkpoint(slurm, submit, request):
    """One job goes through both, and in the end has the losses of one that was never disturbed."""
    job, log = submit("train", TWO_RANKS)
    slurm.until_log(job, log, lambda text: len(losses(text)) >= 2)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.until_log(job, log, lambda text: len(starts(text)) == 2 and len(starts(text)[1]) >= 6)
    second = slurm.job(job)["NodeList"]
    node = slurm.call("scontrol", "show", "hostnames", second).split()[1]
    slurm.crash(node, job)
    state = slurm.ended(job)
    slurm.start_node(node)
    text = log.read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2"), text

    signalled, crashed, last = starts(text)
    loaded = [int(step) for step in re.findall(r"successfully loaded checkpoint .* at iteration (\d+)", text)]
    assert loaded == [signalled[-1], last[0] - 1]
    assert signalled + crashed == list(range(1, crashed[-1] + 1)), "a signal loses no step, and none is trained twice"
    assert last[0] > crashed[0] and last[0] % SAVE_INTERVAL == 1, "after a crash it goes on after a checkpoint"
    assert last == list(range(last[0], STEPS + 1))

    uninterrupted = request.getfixturevalue("uninterrupted")  # only now: its nodes were needed
    # As the second loss of a start, Megatron logs the mean of the first two; the report has every step's own.
    means = {crashed[1], last[1]}
    told, whole = (
        {(step, loss) for step, loss in losses(path.read_text()) if step not in means}
        for path in (log, uninterrupted / "log.txt")
    )
    assert told == whole
    report, whole_report = (
        json.loads((folder / "report.json").read_text()) for folder in (log.parent / "train", uninterrupted)
    )
    assert report["losses"] == whole_report["losses"][last[0] - 1 :]


def test_an_array_job_that_was_killed_goes_on_where_it_was(slurm, grid, uninterrupted):
    hanging = grid.point(1) / "log.txt"
    slurm.until(lambda: hanging.exists() and hanging.read_text().count("hangs") == 2, "the second point hangs")
    grid.kill()
    (job,) = {*slurm.call("squeue", "--noheader", "--format", "%F").split()}
    slurm.call("scancel", job)
    slurm.until(lambda: not slurm.processes(job), "none of its processes is left")
    trained = (uninterrupted / "result.json").stat().st_mtime_ns
    grid.start("--resume")
    code, printed = grid.wait()
    assert code == 1, printed
    good, failed, impossible = printed["results"]
    assert good["status"] == "done" and len(good["losses"]) == STEPS
    assert good["peaks_agree"] is True and good["front"] is True
    assert failed["status"] == "failed" and failed["exit_code"] != 0
    assert impossible["status"] == "infeasible" and "64" in impossible["reason"]
    assert (uninterrupted / "result.json").stat().st_mtime_ns == trained, "what is done is not done again"
    assert not (grid.point(2) / "log.txt").exists()
    assert (grid.folder / "report.png").stat().st_size > 0


def test_ranks_are_in_the_order_of_nodes_and_a_failing_one_ends_the_job(slurm, submit):
    job, log = submit("fail", {**FOUR_RANKS, "script": STAND_IN, "behaviour": "fail"})
    state = slurm.ended(job)
    text = log.read_text()
    assert state["JobState"] == "FAILED" and state["ExitCode"] != "0:0", text
    assert state["Restarts"] == "0"
    assert "(exitcode: 7)" in text, "the last rank, once all have started"
    nodes = slurm.call("scontrol", "show", "hostnames", state["NodeList"]).split()
    where = dict(re.findall(r"rank (\d) of 4 on (\S+)", text))
    assert where == {"0": nodes[0], "1": nodes[0], "2": nodes[1], "3": nodes[1]}
    slurm.until(lambda: not slurm.processes(job), "none of its processes is left")
