"""Grids: what their files stand for, what is kept of a point, and that neither failures nor kills lose anything."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import pipemem
from patience import Patience, runs
from refusals import refused

from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.tools.launch.command import Command
from megatron_pipemem.tools.launch.grid.local import LocalRunner, _end_left_over
from megatron_pipemem.tools.launch.grid.points import load_points
from megatron_pipemem.tools.launch.grid.store import (
    Store,
    collect,
    step_seconds,
    store_of_point,
    try_lock,
)

ROOT = Path(__file__).parents[2]

# Stands for a training run: logs two steps, writes a report unless told to fail, and counts its starts.
TRAINING = """
import json, os, sys, time
from pathlib import Path
place, name = Path(sys.argv[1]), sys.argv[2]
with (place / "starts").open("a") as starts:
    starts.write(f"{os.getpid()}\\n")
print("iteration        1/  2 | elapsed time per iteration (ms): 900.0 | lm loss: 3.0", flush=True)
if (place.parents[1] / f"wait-{place.name}").exists() and len((place / "starts").read_text().split()) == 1:
    time.sleep(300)
if name == "1f1b":
    sys.exit("rank 3 failed: SomeError: because")
print("iteration        2/  2 | elapsed time per iteration (ms): 500.0 | lm loss: 2.5", flush=True)
rank = {"rank": 0, "predicted_peak_bytes": 64, "counted_peak_bytes": 64}
rank |= {"predicted_bubble_rate": 0.25, "measured_bubble_rate": 0.5}
(place / "report.json").write_text(json.dumps({"losses": [3.0, 2.5], "ranks": [rank]}))
"""


def training(store: Store, index: int) -> Command:
    words = (sys.executable, "-c", TRAINING, str(store.place(index)), store.run(index).schedule.name)
    return Command(words, {})


def settings(points) -> list[dict]:
    return [point.settings for point in points]


def test_points_times_product(write_grid):
    points = load_points(
        write_grid(
            points=[{"pp": 4}, {"pp": 2, "dp": 2}],
            product={"schedule": ["stock", "v-half"], "lr": [0.1, 0.2]},
            set={"train_iters": 3},
        )
    )
    expected = [
        {**cut, "schedule": name, "lr": rate}
        for cut in ({"pp": 4}, {"pp": 2, "dp": 2})
        for name in ("stock", "v-half")
        for rate in (0.1, 0.2)
    ]
    assert settings(points) == expected
    assert [point.index for point in points] == list(range(8))
    for point in points:
        assert point.run.iterations == 3
        assert point.run.parallelism.pp == point.settings["pp"]
        assert point.run.parallelism.dp == point.settings.get("dp", 1)
        assert point.run.flags["lr"] == point.settings["lr"]
        assert point.run.flags["seed"] == 1234, "keys beside the changed one stay"


def test_filters_look_at_the_whole_run(write_grid):
    product = {"schedule": ["stock", "v-half", "zbv"], "pp": [2, 4]}
    excluded = load_points(write_grid(product=product, exclude=[{"schedule": ["v-half", "zbv"], "pp": 2}]))
    assert {(p.settings["schedule"], p.settings["pp"]) for p in excluded} == {
        ("stock", 2),
        ("stock", 4),
        ("v-half", 4),
        ("zbv", 4),
    }
    only = load_points(write_grid(product=product, only=[{"schedule": "zbv"}, {"pp": 2}]))
    assert len(only) == 4 and [point.index for point in only] == [0, 1, 2, 3]
    assert len(load_points(write_grid(product=product, exclude=[{"model.num_layers": 9}]))) == 6
    for pattern, reason in (
        ({"model.num_layers": 8}, ("no-points",)),
        ({"model.layers": 8}, ("unknown-key", "num_layers")),
    ):
        with refused(*reason, kind=ConfigError):
            load_points(write_grid(product=product, exclude=[pattern]))


BAD = [
    {"save": "x", "save_interval": 4},
    {"model.gated_linear_unit": True},
    {"script": "nowhere.py"},
    {"schedule": "nowhere.csv"},
    {"pipemem_option": [1]},
    {"pp": 9, "dp": 1, "cluster": {"nodes": 2, "devices_per_node": 8}, "model.num_layers": 18},
]


def test_points_that_cannot_start_are_infeasible_and_do_not_stop_the_others(write_grid, tmp_path):
    good = [{"schedule": "v-half"}, {"schedule": "v-min"}]
    points = load_points(write_grid(points=[good[0], *BAD, good[1]]))
    assert points[0].reason is None and points[-1].reason is None
    told = [
        "save",
        "geglu",
        "nowhere.py",
        "nowhere.csv",
        "pipemem_option",
        "9 ranks cannot be shared evenly by 2 nodes",
    ]
    for point, words in zip(points[1:-1], told, strict=True):
        assert words in point.reason
    made = Store(tmp_path / "grid")
    made.create(tmp_path / "grid.yaml", points)
    LocalRunner(made, lambda *_: None, training).train(made.open_points(), 1)
    assert [result.status for result in made.results()] == ["done", *["infeasible"] * len(BAD), "done"]


def test_a_point_that_cannot_be_started_here_fails_alone(store, write_grid, tmp_path):
    def command_of(store: Store, index: int) -> Command:
        if index == 0:
            raise ConfigError("unsupported-setting", "cannot be written as a command", key="script")
        return training(store, index)

    events = []
    LocalRunner(store, lambda index, result: events.append((index, result and result.status)), command_of).train(
        [0, 2], 1
    )
    failed, _, done, *_ = store.results()
    assert (failed.status, failed.reason) == ("failed", "key script: cannot be written as a command")
    assert done.status == "done" and (0, "failed") in events
    large = Store(tmp_path / "large")
    large.create(tmp_path / "grid.yaml", load_points(write_grid(set={"cluster": {"nodes": 2, "devices_per_node": 2}})))
    LocalRunner(large, lambda *_: None).train([0], 1)
    assert "2 nodes" in large.results()[0].reason


def test_filters_read_values_as_runs_do(write_grid):
    product = {"pipemem_vocab_cut": [1, 2], "pipemem_memory_cap": [1.5, 2], "lr": [0.1, 0.2]}

    def kept(**filters) -> set:
        points = load_points(write_grid(product=product, **filters))
        return {tuple(point.settings.values()) for point in points}

    everything = kept()
    assert len(everything) == 8
    assert kept(exclude=[{"pipemem_vocab_cut": 2}]) == {point for point in everything if point[0] == 1}
    assert kept(only=[{"pipemem_memory_cap": [1.5]}]) == {point for point in everything if point[1] == 1.5}
    assert kept(exclude=[{"pipemem_offload": "off", "lr": 0.1}]) == {point for point in everything if point[2] == 0.2}
    assert kept(only=[{"model": "tiny-gpt"}]) == everything
    for pattern, reason in (
        ({"rl": 0.1}, ("unknown-key", "exclude.rl")),
        ({"pipemem_vocab_cut": 7}, ("bad-filter", 7, "cpu.yaml", "pipemem_vocab_cut", 1, 2)),
        ({"pp": "four"}, ("bad-filter", "four")),
    ):
        with refused(*reason, kind=ConfigError):
            kept(exclude=[pattern])


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"set": {"train_iter": 4}}, "set.train_iter"),
        ({"set": {"cluster": {"node": 4}}}, "set.cluster.node"),
        ({"product": {"train_iter": [4]}}, "product.train_iter"),
        ({"product": {"cluster": [{"nodes": 4}, {"node": 4}]}}, "product.cluster.node"),
        ({"points": [{"schedule": "stock"}, {"train_iter": 4}]}, "points.train_iter"),
        ({"only": [{"train_iter": 4}]}, "only.train_iter"),
    ],
)
def test_a_wrong_key_is_the_grids_mistake(write_grid, keys, place):
    file = write_grid(**keys)
    with refused("unknown-key", kind=ConfigError) as caught:
        load_points(file)
    assert (caught.value.file, caught.value.key) == (str(file), place)
    with refused("unknown-key", "schedule", kind=ConfigError):
        load_points(write_grid(), ["schedul=x"])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"set": {"tp": "many"}}, ("no-points", "tp", "many")),
        ({"product": {"schedule": "stock"}}, ("bad-type", "product", "schedule")),
        ({"product": {"schedule": []}}, ("bad-type", "product.schedule")),
        ({"points": ["v-half"]}, ("bad-type", "v-half")),
        ({"run": "nowhere"}, ("no-file", "nowhere")),
        ({"product": {"schedule": ["stock", "1f1b", "stock"]}}, ("given-twice", "schedule", 0, 2)),
        ({"points": [{"pp": 4}, {"pipeline_model_parallel_size": 4}]}, ("given-twice", 0, 1)),
        (
            {"product": dict.fromkeys(("seed", "save_interval", "log_interval", "lr"), [*range(100)])},
            ("too-large", 100),
        ),
        ({"pints": []}, ("unknown-key", "points")),
    ],
)
def test_a_wrong_file_is_refused(write_grid, keys, reason):
    with refused(*reason, kind=ConfigError):
        load_points(write_grid(**keys))


def test_one_failing_point_does_not_stop_the_others(store):
    events = []
    LocalRunner(store, lambda index, result: events.append((index, result and result.status)), training).train(
        [0, 1, 2], 2
    )
    assert sorted(events, key=str) == sorted(
        [(0, None), (0, "done"), (1, None), (1, "failed"), (2, None), (2, "done")], key=str
    )
    stock, failed, half, unstarted, infeasible = store.results()
    assert stock.status == half.status == "done"
    assert half.settings == {"schedule": "v-half"} and half.peaks_agree is True
    run = store.run(2)
    assert half.seconds_per_step == 0.5, "the first step of a start does not count"
    assert half.tokens_per_second == run.parallelism.global_batch * run.model.sequence / 0.5
    assert half.losses == (3.0, 2.5) and half.devices == 4
    assert (failed.reason, failed.exit_code) == ("rank 3 failed: SomeError: because", 1)
    assert unstarted is None
    assert infeasible.status == "infeasible" and "no-such" in infeasible.reason
    assert store.open_points() == [1, 3]


def test_a_run_that_ends_well_but_without_a_report_failed(store):
    store.log(0).write_text("starting\nall is well\n\n")
    result = collect(0, {}, store.run(0), store.log(0), 0)
    assert result.status == "failed" and "without a report" in result.reason and "all is well" in result.reason


def test_a_points_file_says_only_what_is_not_the_default(store):
    said = yaml.safe_load(store.run_file(2).read_text())
    assert said["schedule"] == "v-half" and "trace" not in said and "tp" not in said
    assert store.run(2) == replace(load_points(store.folder.parent / "grid.yaml")[2].run, output=str(store.place(2)))


def test_a_grids_run_may_lie_beside_it(tmp_path, write_grid):
    for name, steps in (("mine", 3), ("tiny-cpu", 5)):  # the package has one of the second name, too
        (tmp_path / f"{name}.yaml").write_text(f"base: tiny-cpu\ntrain_iters: {steps}\n")
        (point,) = load_points(write_grid(run=name))
        assert point.run.iterations == steps
    (tmp_path / "tiny-cpu.yaml").unlink()
    (point,) = load_points(write_grid(run="tiny-cpu"))
    assert point.run.iterations == 10, "of the package"


# The grid's own process, with training replaced by the program above.
GRID = """
import sys
from pathlib import Path
sys.path[:0] = {folders!r}
from megatron_pipemem.tools.launch.grid.local import LocalRunner
from megatron_pipemem.tools.launch.grid.store import Store
from test_launch_grid import training
store = Store(Path({folder!r}))
with store.claimed():
    LocalRunner(store, lambda *_: None, training).train(store.open_points(), 1)
"""


def grid_process(store: Store) -> subprocess.Popen:
    code = textwrap.dedent(GRID).format(
        folders=[str(ROOT / "tests" / folder) for folder in ("scripts", "watching")], folder=str(store.folder)
    )
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)})


def until(holds, process: subprocess.Popen) -> None:
    patience = Patience(process.pid)
    while not holds():
        assert not patience.is_over
        time.sleep(0.02)


def starts(store: Store, index: int) -> list[int]:
    file = store.place(index) / "starts"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes as Linux shows them")
def test_a_killed_grid_goes_on_where_it_was(store):
    """kill -9 in the middle of the third point, whose training goes on alone: it is ended and started again, and no other
    point is."""
    killed = 2
    (store.folder / f"wait-{store.place(killed).name}").touch()
    first = grid_process(store)
    try:
        until(lambda: starts(store, killed), first)
        first.send_signal(signal.SIGKILL)
        first.wait()
        (left,) = starts(store, killed)
        assert runs(left) and store.results()[killed] is None
        second = grid_process(store)
        assert second.wait() == 0
    finally:
        first.kill()
    assert not runs(left)
    assert len(starts(store, killed)) == 2
    assert [len(starts(store, index)) for index in (0, 1)] == [1, 2], "the failed point is tried again"
    assert [result.status for result in store.results()] == ["done", "failed", "done", "done", "infeasible"]


def test_two_grids_do_not_share_a_folder(store):
    with store.claimed(), refused("busy", kind=UnsupportedError), store.claimed():
        pass


def test_the_folder_of_another_grid_is_refused(store, write_grid):
    product = {"schedule": ["stock", "1f1b", "v-half", "1f1b-v", "no-such"]}
    store.resume(load_points(write_grid(product=product)))
    for keys, overrides, reason in (
        ({"product": {"schedule": ["stock"]}}, (), ("exists-already", 5, 1)),
        (
            {"product": {"schedule": ["stock", "1f1b", "v-min", "1f1b-v", "no-such"]}},
            (),
            ("exists-already", "schedule", "v-half", "v-min"),
        ),
        ({"product": product, "set": {"train_iters": 3}}, (), ("exists-already", 3)),
        ({"product": product}, ("lr=0.5",), ("exists-already", "lr", "0.5")),
    ):
        with refused(*reason, kind=UnsupportedError):
            store.resume(load_points(write_grid(**keys), overrides))
    with refused("wrong-file", kind=ConfigError):
        store_of_point(store.folder)
    assert store_of_point(store.place(3))[1] == 3


def test_infeasible_points_are_judged_again(write_grid, tmp_path):
    script = tmp_path / "train.py"
    points = [{"script": str(script)}, {"schedule": "no-such"}]
    made = Store(tmp_path / "grid")
    made.create(tmp_path / "grid.yaml", load_points(write_grid(points=points)))
    assert made.open_points() == []
    script.write_text("")
    made.resume(load_points(write_grid(points=points)))
    assert made.open_points() == [0] and made.run(0).script == str(script)
    assert made.results()[1].status == "infeasible"


def test_a_left_over_that_ends_by_itself_is_no_error(store):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    file = store.place(0) / ".running"
    with file.open("w") as held, file.open("r") as lock:
        assert try_lock(held)
        held.write(json.dumps({"pid": gone.pid, "host": platform.node()}))
        held.flush()
        ends = threading.Timer(0.2, lambda: fcntl.flock(held, fcntl.LOCK_UN))
        ends.start()
        _end_left_over(lock, store.place(0))
        ends.join()
        assert not try_lock(held), "it has taken the lock over"


def test_commands_are_printed_and_nothing_is_written(write_grid, tmp_path):
    run = ROOT / "configs" / "runs" / "tiny-cpu.yaml"
    file = write_grid(product={"schedule": ["v-half", "no-such"]}, set={"split": [1, 2]})
    result = pipemem("grid", file, "--launcher", "print", "--output", tmp_path / "out")
    good, bad = result.stdout.splitlines()
    assert good.startswith(f"pipemem launch {run} --set 'split=[1, 2]' --set schedule=v-half --set output=")
    assert bad.startswith("# ") and "no-such" in bad
    assert not (tmp_path / "out").exists()


def test_the_report_groups_what_did_not_run_and_marks_the_front(store):
    LocalRunner(store, lambda *_: None, training).train([0, 1, 2], 1)
    told = json.loads(pipemem("report", store.folder, "--json").stdout)
    assert [row["status"] for row in told["results"]] == ["done", "failed", "done", "infeasible"]
    assert [row["front"] for row in told["results"]] == [True, False, True, False]
    assert told["missing"] == [3] and Path(told["picture"]).stat().st_size > 0
    text = pipemem("report", store.folder).stdout
    assert (
        "rank 3 failed" in text
        and "infeasible: schedule=no-such" in text
        and "without a result: schedule=1f1b-v" in text
    )


def test_a_folder_is_not_overwritten(store):
    result = pipemem("grid", store.folder.parent / "grid.yaml", "--output", store.folder)
    assert result.exit_code == 2 and "--resume" in result.stderr
    result = pipemem("report", store.folder.parent)
    assert result.exit_code == 2 and "holds neither a grid nor" in result.stderr


def test_steps_after_a_restart():
    line = "iteration {:8}/ 9 | elapsed time per iteration (ms): {} |"
    log = "\n".join(line.format(*step) for step in [(1, 900), (2, 100), (3, 110), (3, 800), (4, 120)])
    assert step_seconds(log) == 0.11
    assert step_seconds(line.format(1, 900)) == 0.9
    assert step_seconds("") is None
