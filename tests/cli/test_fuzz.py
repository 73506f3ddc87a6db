"""Bad input to every command and every reader ends in words: no traceback, no hang, no half-written file.

``PIPEMEM_FUZZ=20`` tries twenty times as many inputs, other ones at every start.
"""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lanes
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_pipemem.errors import PipememError
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.part_costs import read_costs
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.tools.cli.app import app
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import SHIPPED, load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.grid.store import Result, Store
from megatron_pipemem.tools.planner.profile import Profile, from_formulas

TIMES = int(os.environ.get("PIPEMEM_FUZZ", "1"))
SECONDS = 60  # of the processor, for what takes one at most
TINY = Path(__file__).parents[2] / "configs" / "runs" / "tiny-cpu.yaml"

NUMBERS = ("-1 0 1 2 3 0.5 1e308 -1e308 1e-320 nan inf -inf 100000000 1e9 " + "9" * 400).split()
WORDS = ["", " ", "\u2028", *"x - -- é null true [] {} [1 1,2,3 1,1 a=b = 1GiB 60gb auto off full 𝟙 ٣ 0x10".split()]
WORDS += "../.. /proc/x.json / nowhere.csv nowhere.json nowhere.yaml".split()
JUNK = st.sampled_from((*NUMBERS, *WORDS)) | st.text(max_size=8).filter(
    lambda text: "\x00" not in text and _is_utf8(text)
)
NAMES = st.sampled_from([*(family.name for family in families()), "auto", "v-hafl", "", "nowhere.csv"])
SMALL = st.sampled_from(["1", "2", "3", "4", "5", "0", "-1", "100000000", "x", "9" * 30])
CELLS = st.text(alphabet='0123F IWBRSENDCV_-,\n#=\r"é\u2028', max_size=60)


def examples(count: int) -> Callable:
    return settings(
        lanes.examples(count * TIMES),
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def in_time(what: object):
    def late(*_: object) -> None:
        raise AssertionError(f"more than {SECONDS} s: {what}")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def call(place: Path, *arguments: object) -> None:
    """Run a command; it may succeed."""
    words = [str(argument) for argument in arguments]
    with in_time(words):
        result = CliRunner().invoke(app, words, prog_name="pipemem")
    told = f"{words}: {result.output}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(told) from result.exception
    assert result.exit_code in (0, 1, 2), told
    assert "Traceback" not in result.output, told
    if result.exit_code == 0 and "--json" in words:
        json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name}: {told}"))
    if result.exit_code == 2:
        assert result.stderr.strip() and "Errno" not in result.stderr and "Error(" not in result.stderr, told
    assert not [path for path in place.rglob("*.partial*")], told


def read(reader: Callable[[], object]) -> None:
    """A reader takes it, or refuses it in words."""
    with in_time(reader):
        try:
            reader()
        except PipememError as error:
            assert "Errno" not in str(error) and str(error).strip()


def options(**values: st.SearchStrategy) -> st.SearchStrategy[list[str]]:
    """Some of these options, each with a value."""
    flags = {name: f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}" for name in values}
    one = st.one_of([value.map(lambda text, flag=flags[name]: [flag, text]) for name, value in values.items()])
    return st.lists(one, max_size=3).map(lambda chosen: [word for pair in chosen for word in pair])


PRICED = {
    "costs": st.sampled_from(["1,1,1", "1,2,.5", "0,0,0", "1e308,1,1", "1e-320,1,1", "1,1", "nan,1,1", "1e30,0,1e-300"])
    | JUNK,
    "p2p": JUNK,
    "memory_cap": JUNK,
    "offload": st.sampled_from(["half", "full", "auto", "1", "99"]) | JUNK,
    "offload_ratio": JUNK,
    "host_memory": JUNK,
    "vocab_parallel": st.sampled_from(["1", "2", "auto"]) | JUNK,
    "head_cost": JUNK,
    "layers": SMALL,
    "o": st.sampled_from(
        ["recompute=full", "recompute=auto", "seconds=0.01", "chunks=4", "k=1e308", "slices=3", "waves=-1"]
    )
    | st.tuples(
        st.sampled_from(["chunks", "seconds", "effort", "placement", "seed", "k", "group_size", "recompute"]), JUNK
    ).map("=".join),
    "v": SMALL,
}
SIZES = st.tuples(SMALL, SMALL).map(lambda pair: ["-p", pair[0], "-m", pair[1], "-o", "seconds=0.01"])


def sized(name: str, sizes: list[str]) -> list[str]:
    """Searches are short ones."""
    return sizes if name == "auto" else sizes[:4]


@examples(60)
@given(name=NAMES, sizes=SIZES, more=options(**PRICED))
def test_simulate(place_of_all, name, sizes, more):
    call(place_of_all, "simulate", name, *sized(name, sizes), *more, "--json")


@examples(50)
@given(name=NAMES, sizes=SIZES, more=options(**PRICED), suffix=st.sampled_from([".html", ".json", ".png", ".x", ""]))
def test_show(place_of_all, name, sizes, more, suffix):
    place = place_of_all
    target = [] if suffix == ".png" else ["--output", place / f"picture{suffix}"]
    call(place, "show", name, *sized(name, sizes), *more, *target)


@examples(30)
@given(
    sizes=st.tuples(st.sampled_from(["1", "2", "0", "x", "100000"]), st.sampled_from(["1", "3", "-1", "100000000"])),
    more=options(**{key: PRICED[key] for key in ("costs", "p2p", "head_cost", "layers")}, caps=JUNK, output=JUNK),
    seconds=st.sampled_from(["0", "0.01", "-1", "nan", "inf", "x"]),
)
def test_pareto(place_of_all, sizes, more, seconds):
    call(
        place_of_all, "pareto", "-p", sizes[0], "-m", sizes[1], *more, "--seconds", "0" if seconds == "inf" else seconds
    )


TABLES = [
    build_schedule(name, num_devices=2, num_microbatches=3).to_csv()
    for name in ("1f1b", "v-half", "seq1f1b", "pipedream-2bw", "po-h")
] + [build_schedule("dualpipe", num_devices=2, num_microbatches=4).to_csv()]


@st.composite
def tables(draw) -> bytes:
    """A schedule file with some of it changed, or something else."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(max_size=40)) if draw(st.booleans()) else draw(CELLS).encode()
    text = draw(st.sampled_from(TABLES))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        piece = draw(
            st.sampled_from(
                ["9F0", "0F99999999", "99999999999F0", ",", "\n", "# slices=99999999\n", "# replicas=7\n", "-1", "F"]
            )
            | CELLS.map(lambda cells: cells[:6])
        )
        text = text[:at] + piece + text[at + draw(st.integers(0, 6)) :]
    return text.encode()


@examples(120)
@given(table=tables(), more=options(m=SMALL, memory_cap=JUNK, dialect=st.sampled_from(["torch", "torch-old", "x"])))
def test_check(place_of_all, table, more):
    file = place_of_all / "given.csv"
    file.write_bytes(table)
    call(place_of_all, "check", file, *more, "--json")
    with suppress(UnicodeDecodeError):
        read(lambda: Schedule.from_csv(table.decode()))


@examples(80)
@given(
    table=tables(),
    output=st.sampled_from(["new.csv", "new.txt", "old.out", "new", "old.out/x.csv", "/proc/x.csv", "."]),
    to=st.sampled_from(["pipemem", "torch", "torch-old", "x"]),
)
def test_convert(place_of_all, table, output, to):
    place = place_of_all
    (place / "given.csv").write_bytes(table)
    call(place, "check", place / "given.csv", "--write", output, "--to", to)
    assert (place / "old.out").read_text() == "old"


VALUES = st.sampled_from(
    [None, True, "x", "", [], {}, [1, "x"], -5, 0, 1e300, -1e300, 10**400, 2**70, 1.5, {"a": 1}, "1", [[]]]
)


@st.composite
def changed(draw, whole: Any, most: int = 3) -> Any:
    """JSON with some values, at any depth, replaced, removed or added to."""
    whole = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, most))):
        here = whole
        while isinstance(here, dict) and here:
            key = draw(st.sampled_from(sorted(here)))
            if not isinstance(here[key], dict) or draw(st.integers(0, 2)) == 0:
                action = draw(st.integers(0, 4))
                if action == 0:
                    del here[key]
                elif action == 1:
                    here[draw(JUNK)] = draw(VALUES)
                else:
                    here[key] = draw(VALUES)
                break
            here = here[key]
    return whole


COSTS = {
    "forward": [1, 2], "backward_input": 1.5, "backward_weight": 1, "recompute": 1, "recompute_selective": 0.1,
    "copy_sum": 1, "p2p": {"0-1": 0.1, "1-0": 0.1}, "memory": {"F": 8, "I": -2, "W": -6},
    "channel": {"offload": 1, "reload": 2, "duplex": True, "switches": [[0, 1]]},
    "vocabulary": {"score": 1, "gradient": [1, 1], "collectives": {"STATS": 0.1}},
}  # fmt: skip


@examples(80)
@given(
    data=changed(COSTS),
    more=st.sampled_from([[], ["--memory-cap", "9B"], ["--offload", "auto"], ["--vocab-parallel", "1"]]),
)
def test_costs(place_of_all, data, more):
    file = place_of_all / "costs.json"
    file.write_text(json.dumps(data))
    read(lambda: read_costs(file))
    call(place_of_all, "simulate", "1f1b", "-p", 2, "-m", 3, "--costs", file, *more, "--json")


@examples(20)
@given(text=st.text(max_size=20) | st.sampled_from(["[" * 5000, "{", "1" * 5000, "NaN", '{"forward": Infinity}']))
def test_texts_that_are_no_json(place_of_all, text):
    file = place_of_all / "costs.json"
    file.write_text(text, encoding="utf-8", errors="replace")
    read(lambda: read_costs(file))
    read(lambda: Profile.from_json(file))
    call(place_of_all, "simulate", "1f1b", "-p", 2, "-m", 3, "--costs", file)


RAW = yaml.safe_load(TINY.read_text())
MODEL = yaml.safe_load((SHIPPED / "models" / "tiny-gpt.yaml").read_text())
CLUSTER = yaml.safe_load((SHIPPED / "clusters" / "cpu.yaml").read_text())
RUN = {
    **RAW,
    "model": MODEL,
    "cluster": CLUSTER,
    "parallelism": {"tp": 1, "pp": 2, "dp": 1, "micro_batch": 1, "global_batch": 2},
    "schedule": {"name": "v-half", "memory_cap": "0.9", "options": {}, "offload": "off"},
    "environment": {"A": "b"},
}
LINES = (
    "- x",
    "a: [",
    "\ttab: 1",
    "a: &b [*b]",
    "? : :",
    "!!python/object:os.system x",
    "%",
    "a: 1\na: 2",
    "",
    "3",
    "[" * 2000,
)
KEYS = "model.num_layers model.num_attention_heads parallelism.pp parallelism.global_batch schedule.name x".split()
SETS = st.tuples(st.sampled_from([*KEYS, ""]), JUNK).map("=".join)


@st.composite
def runs(draw, whole: Any) -> str:
    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(LINES) | st.text(max_size=20))
    return yaml.safe_dump(draw(changed(whole)))


@examples(60)
@given(text=runs(RUN), more=options(set=SETS, nodes=SMALL, node_rank=SMALL, master_port=JUNK, master_addr=JUNK))
def test_launch(place_of_all, text, more):
    file = place_of_all / "run.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    call(place_of_all, "launch", file, *more, "--print")
    read(lambda: load(file, Run))


@examples(12)
@given(
    text=runs({**RUN, "parallelism": {"global_batch": 2}}),
    more=options(set=SETS, memory=JUNK, only=JUNK, profile=JUNK, top=SMALL, output=JUNK),
)
def test_plan(place_of_all, text, more):
    file = place_of_all / "run.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    few = ["--set", "cluster.nodes=1", "--set", "cluster.devices_per_node=2", "--search-seconds", "0"]
    call(place_of_all, "plan", file, *few, *more)


GRID = {
    "run": "run.yaml",
    "set": {"training.iterations": 2},
    "points": [{"parallelism": {"pp": 2}}],
    "product": {"schedule.name": ["1f1b", "stock"]},
    "only": [{"schedule.name": "1f1b"}],
}


@examples(25)
@given(text=runs(GRID), run=st.just(yaml.safe_dump(RUN)) | runs(RUN), more=options(set=SETS, output=JUNK, sbatch=JUNK))
def test_grid(place_of_all, text, run, more):
    (place_of_all / "run.yaml").write_text(run, encoding="utf-8", errors="replace")
    (place_of_all / "grid.yaml").write_text(text, encoding="utf-8", errors="replace")
    call(place_of_all, "grid", place_of_all / "grid.yaml", *more, "--launcher", "print")


@examples(30)
@given(
    text=runs(MODEL),
    machine=st.just(yaml.safe_dump(CLUSTER)) | runs(CLUSTER),
    more=options(tp=SMALL, cp=SMALL, ep=SMALL, micro_batch=SMALL, sequence=SMALL, recompute=JUNK, precision=JUNK),
)
def test_profile(place_of_all, text, machine, more):
    place = place_of_all
    (place / "model.yaml").write_text(text, encoding="utf-8", errors="replace")
    (place / "cluster.yaml").write_text(machine, encoding="utf-8", errors="replace")
    files = ["--model", place / "model.yaml", "--cluster", place / "cluster.yaml"]
    call(place, "profile", *files, "--formulas", *more, "--output", place / "profile.json")
    if (place / "profile.json").exists():
        json.loads((place / "profile.json").read_text())


PROFILE = json.loads(json.dumps(from_formulas(load("tiny-gpt", Model), Execution(), load("cpu", Cluster)).to_json()))


@examples(40)
@given(data=changed(PROFILE))
def test_profile_files(place_of_all, data):
    file = place_of_all / "profile.json"
    file.write_text(json.dumps(data))
    read(lambda: Profile.from_json(file))
    read(lambda: read_costs(file))


INDEX = {"grid": "x", "points": [{"settings": {"a": 1}, "changes": {}}]}
DONE = asdict(Result(0, {"a": 1}, "done", None, 0, 2, 0.5, 9.0, (1, 2), (1, 2), (0.1, None), (0.1, None), (3.0,)))


@examples(45)
@given(index=st.just(INDEX) | changed(INDEX), result=changed(DONE))
def test_files_of_a_grid(place_of_all, index, result):
    folder = place_of_all / "grid"
    (folder / "points" / "000").mkdir(parents=True, exist_ok=True)
    (folder / "grid.json").write_text(json.dumps(index))
    (folder / "points" / "000" / "result.json").write_text(json.dumps(result))
    read(Store(folder).results)
    call(place_of_all, "grid-result", folder / "points" / "000", "--exit-code", "1")


@examples(4)  # each may draw a picture
@given(result=changed(DONE), output=st.sampled_from([[], ["--output", "x.html"], ["--output", "old.out/x.png"]]))
def test_report(place_of_all, result, output):
    folder = place_of_all / "grid"
    (folder / "points" / "000").mkdir(parents=True, exist_ok=True)
    (folder / "grid.json").write_text(json.dumps(INDEX))
    (folder / "points" / "000" / "result.json").write_text(json.dumps(result))
    call(place_of_all, "report", folder, *output, "--json")


@examples(15)
@given(words=st.lists(JUNK, max_size=3))
def test_anything(place_of_all, words):
    for command in ("schedules", "unfinished", "report"):
        call(place_of_all, command, *words)


@pytest.fixture(scope="module")
def place_of_all(tmp_path_factory):
    """The working directory of all examples; names of files that inputs hold are looked up here."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("fuzz")
        patch.chdir(place)
        (place / "old.out").write_text("old")
        yield place


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
