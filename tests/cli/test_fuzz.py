"""Bad input to every command and every reader ends in words: no traceback, no hang, no half-written file.

``PIPEMEM_FUZZ=20`` tries twenty times as many inputs, other ones at every start.
"""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lanes
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measured_steps import report
from typer.testing import CliRunner

from megatron_pipemem.errors import PipememError
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.part_costs import read_costs
from megatron_pipemem.schedule.registry import build_schedule, families
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.tools.cli.app import app, load_commands
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


PRICES = ["1,1,1", "1,2,.5", "0,0,0", "1e308,1,1", "1e-320,1,1", "1,1", "nan,1,1", "1e30,0,1e-300"]
KEYS = "model.num_layers model.num_attention_heads pp global_batch schedule x".split()
SET = ["recompute=full", "recompute=auto", "seconds=0.01", "chunks=4", "k=1e308", "slices=3", "waves=-1"]
SETTABLE = ["chunks", "seconds", "effort", "placement", "seed", "k", "group_size", "recompute"]
TYPICAL = {
    "costs": st.sampled_from(PRICES) | JUNK,
    "offload": st.sampled_from(["half", "full", "auto", "1", "99"]) | JUNK,
    "vocab_cut": st.sampled_from(["1", "2", "auto"]) | JUNK,
    "options": st.sampled_from(SET) | st.tuples(st.sampled_from(SETTABLE), JUNK).map("=".join),
    "overrides": st.tuples(st.sampled_from([*KEYS, ""]), JUNK).map("=".join),
    "output": st.sampled_from(["a.html", "a.json", "a.x", "a", "a.yaml", "old.out/x.png"]) | JUNK,
    "target": st.sampled_from(["new.csv", "new.txt", "old.out", "new", "old.out/x.csv", "/proc/x.csv", "."]),
    "to_dialect": st.sampled_from(["pipemem", "torch", "torch-old", "x"]),
    "dialect": st.sampled_from(["torch", "torch-old", "x"]),
    "caps": JUNK,
    "seconds": st.sampled_from(["0", "0.01", "-1", "nan", "x"]),  # of each search
}
"""Values of options by the name of the parameter. Others have junk and small numbers."""
LEFT_OUT = {"modules", "_modules", "launcher"}
"""Options that import a module, and that start runs."""
COMMANDS = load_commands()


def options(name: str) -> st.SearchStrategy[list[str]]:
    """Some options of a command, each with a value."""
    own = [option for option in COMMANDS[name].params if option.opts[0][0] == "-" and not option.is_flag]
    pairs = [
        TYPICAL.get(option.name, SMALL | JUNK).map(lambda value, flag=option.opts[0]: [flag, value])
        for option in own
        for _ in range(3 if option.name in TYPICAL else 1)  # they have more to go wrong
        if option.name not in LEFT_OUT
    ]
    return st.lists(st.one_of(pairs), max_size=2 if pairs else 0).map(lambda chosen: [*chain.from_iterable(chosen)])


def command(name: str, *parts: str | st.SearchStrategy, **files: st.SearchStrategy) -> st.SearchStrategy:
    """The words of a command with some of its options, and the texts of files by name, in which ``_`` is a dot.

    A part is a word, or a strategy of a word or of several.
    """
    drawn = [st.just(part) if isinstance(part, str) else part for part in (name, *parts, options(name))]
    lists = [strategy.map(lambda words: [words] if isinstance(words, str) else words) for strategy in drawn]
    texts = st.fixed_dictionaries({name.replace("_", "."): text for name, text in files.items()})
    return st.tuples(st.tuples(*lists).map(lambda chosen: [*chain.from_iterable(chosen)]), texts)


@st.composite
def sized(draw) -> list[str]:
    """A schedule with its size. Searches are short ones."""
    number = st.sampled_from("12345")  # options may set others
    name, sizes = draw(NAMES), ["-p", draw(number), "-m", draw(number)]
    return [name, *sizes, *(["-o", "seconds=0.01"] if name == "auto" else [])]


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
                    here[draw(JUNK)] = copy.deepcopy(draw(VALUES))
                else:
                    here[key] = copy.deepcopy(draw(VALUES))
                break
            here = here[key]
    return whole


COSTS = {
    "forward": [1, 2], "backward_input": 1.5, "backward_weight": 1, "recompute": 1, "recompute_selective": 0.1,
    "copy_sum": 1, "p2p": {"0-1": 0.1, "1-0": 0.1}, "memory": {"F": 8, "I": -2, "W": -6},
    "channel": {"offload": 1, "reload": 2, "duplex": True, "switches": [[0, 1]]},
    "vocabulary": {"score": 1, "gradient": [1, 1], "collectives": {"STATS": 0.1}},
}  # fmt: skip


RAW = yaml.safe_load(TINY.read_text())
MODEL = yaml.safe_load((SHIPPED / "models" / "tiny-gpt.yaml").read_text())
CLUSTER = yaml.safe_load((SHIPPED / "clusters" / "cpu.yaml").read_text())
RUN = {
    **RAW,
    "model": MODEL,
    "cluster": CLUSTER,
    "tp": 1,
    "pp": 2,
    "dp": 1,
    "micro_batch": 1,
    "global_batch": 2,
    "schedule": "v-half",
    "pipemem_memory_cap": "0.9",
    "pipemem_option": {},
    "pipemem_offload": "off",
    "hybrid_layer_pattern": None,
    "disable_bias_linear": False,
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


@st.composite
def runs(draw, whole: Any) -> str:
    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(LINES) | st.text(max_size=20))
    return yaml.safe_dump(draw(changed(whole)))


GRID = {
    "run": "run.yaml",
    "set": {"train_iters": 2},
    "points": [{"pp": 2}],
    "product": {"schedule": ["1f1b", "stock"]},
    "only": [{"schedule": "1f1b"}],
}


PROFILE = json.loads(json.dumps(from_formulas(load("tiny-gpt", Model), Execution(), load("cpu", Cluster)).to_json()))


INDEX = {"grid": "x", "points": [{"settings": {"a": 1}, "changes": {}}]}
DONE = asdict(Result(0, {"a": 1}, "done", None, 0, 2, 0.5, 9.0, (1, 2), (1, 2), (0.1, None), (0.1, None), (3.0,)))


JSON_COSTS = changed(COSTS).map(json.dumps)
NO_JSON = st.text(max_size=20) | st.sampled_from(["[" * 5000, "{", "1" * 5000, "NaN", '{"forward": Infinity}'])
MORE_COSTS = st.sampled_from([[], ["--memory-cap", "9B"], ["--offload", "auto"], ["--vocab-cut", "1"]])
PRICED_1F1B = ("simulate", "1f1b", "-p", "2", "-m", "3", "--costs", "costs.json")
FEW = ("--set", "cluster.nodes=1", "--set", "cluster.devices_per_node=2")
OF_GRIDS = {"index_json": st.just(INDEX) | changed(INDEX), "result_json": changed(DONE)}
OF_GRIDS = {name: data.map(json.dumps) for name, data in OF_GRIDS.items()}
OF_RUNS = {"run_yaml": runs(RUN)}
OF_MODELS = {"model_yaml": runs(MODEL), "cluster_yaml": st.just(yaml.safe_dump(CLUSTER)) | runs(CLUSTER)}
OF_REPORTS = {"report_json": changed(report()).map(json.dumps)}
CASES = {
    "simulate": (120, command("simulate", sized(), "--json")),
    "show": (60, command("show", sized())),
    "pareto": (60, command("pareto", "-p", "2", "-m", "3", "--seconds", "0.01", "--caps", "0.5,1")),
    "check": (160, command("check", "given.csv", "--json", given_csv=tables())),
    "costs": (80, command(*PRICED_1F1B, MORE_COSTS, "--json", costs_json=JSON_COSTS)),
    "texts that are no JSON": (20, command(*PRICED_1F1B, costs_json=NO_JSON)),
    "profile files": (40, command(*PRICED_1F1B, costs_json=changed(PROFILE).map(json.dumps))),
    "launch": (60, command("launch", "run.yaml", "--print", **OF_RUNS)),
    "plan": (12, command("plan", "run.yaml", *FEW, "--search-seconds", "0", run_yaml=runs(RUN))),
    "layout of a run": (12, command("layout", "run.yaml", *FEW, run_yaml=runs(RUN))),
    "layout of a model": (12, command("layout", "model.yaml", "-p", "2", model_yaml=runs(MODEL))),
    "advise": (8, command("advise", "run.yaml", **OF_RUNS)),
    "init": (12, command("init", "model.yaml", model_yaml=runs(MODEL))),
    "grid": (25, command("grid", "grid.yaml", "--launcher", "print", grid_yaml=runs(GRID), **OF_RUNS)),
    "profile": (
        30,
        command("profile", "--model", "model.yaml", "--cluster", "cluster.yaml", "--formulas", **OF_MODELS),
    ),
    "files of a grid": (45, command("grid-result", "grid/points/000", "--exit-code", "1", **OF_GRIDS)),
    "report": (4, command("report", "grid", "--json", **OF_GRIDS)),  # each may draw a picture
    "explain": (40, command("explain", "report.json", "--json", **OF_REPORTS)),
    "trace": (20, command("trace", "report.json", "--output", "trace.json", **OF_REPORTS)),
    "schedules": (15, command("schedules", st.lists(JUNK, max_size=3))),
    "unfinished": (15, command("unfinished", st.lists(JUNK, max_size=3))),
}
READERS = {
    "given.csv": [lambda file: Schedule.from_csv(file.read_text(encoding="utf-8", errors="replace"))],
    "costs.json": [read_costs, Profile.from_json],
    "run.yaml": [lambda file: load(file, Run)],
    "result.json": [lambda file: Store(file.parents[2]).results()],
}
PLACES = {"index.json": "grid/grid.json", "result.json": "grid/points/000/result.json"}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_ends_in_words(place, name):
    number, inputs = CASES[name]

    @examples(number)
    @given(inputs)
    def try_all(drawn: tuple[list[str], dict[str, str | bytes]]) -> None:
        words, texts = drawn
        for file, text in texts.items():
            path = place / PLACES.get(file, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="replace"))
            for reader in READERS.get(file, ()):
                read(partial(reader, path))
        call(place, *words)
        assert (place / "old.out").read_text() == "old"

    try_all()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
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
