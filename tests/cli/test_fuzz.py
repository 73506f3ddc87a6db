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


def command(*parts: str | st.SearchStrategy, **files: st.SearchStrategy) -> st.SearchStrategy:
    """The words of a command, and the texts of files by name, in which ``_`` stands for a dot.

    A part is a word, or a strategy of a word or of several.
    """
    drawn = [st.just(part) if isinstance(part, str) else part for part in parts]
    lists = [strategy.map(lambda words: [words] if isinstance(words, str) else words) for strategy in drawn]
    texts = st.fixed_dictionaries({name.replace("_", "."): text for name, text in files.items()})
    return st.tuples(st.tuples(*lists).map(lambda chosen: [*chain.from_iterable(chosen)]), texts)


@st.composite
def sized(draw) -> list[str]:
    """A schedule with its size. Searches are short ones."""
    name, sizes = draw(NAMES), ["-p", draw(SMALL), "-m", draw(SMALL)]
    return [name, *sizes, *(["-o", "seconds=0.01"] if name == "auto" else [])]


def maybe(option: str, *values: str) -> st.SearchStrategy:
    return st.sampled_from([[], *([option, value] for value in values)])


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
KEYS = "model.num_layers model.num_attention_heads pp global_batch schedule x".split()
SETS = st.tuples(st.sampled_from([*KEYS, ""]), JUNK).map("=".join)


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
MORE_COSTS = st.sampled_from([[], ["--memory-cap", "9B"], ["--offload", "auto"], ["--vocab-parallel", "1"]])
PRICED_1F1B = ("simulate", "1f1b", "-p", "2", "-m", "3", "--costs", "costs.json")
FEW_PLANS = ("--set", "cluster.nodes=1", "--set", "cluster.devices_per_node=2", "--search-seconds", "0")
OF_MODELS = options(tp=SMALL, cp=SMALL, ep=SMALL, micro_batch=SMALL, sequence=SMALL, recompute=JUNK, precision=JUNK)
OF_MODELS = st.tuples(OF_MODELS, st.just(["--output", "profile.json"])).map(lambda two: [*two[0], *two[1]])
OF_GRIDS = {"index_json": st.just(INDEX) | changed(INDEX), "result_json": changed(DONE)}
OF_GRIDS = {name: data.map(json.dumps) for name, data in OF_GRIDS.items()}
CASES = {
    "simulate": (60, command("simulate", sized(), options(**PRICED), "--json")),
    "show": (50, command("show", sized(), options(**PRICED), maybe("--output", "a.html", "a.json", "a.x", "a"))),
    "pareto": (
        30,
        command(
            *("pareto", "-p", st.sampled_from(["1", "2", "0", "x", "100000"])),
            *("-m", st.sampled_from(["1", "3", "-1", "100000000"])),
            options(**{key: PRICED[key] for key in ("costs", "p2p", "head_cost", "layers")}, caps=JUNK, output=JUNK),
            *("--seconds", st.sampled_from(["0", "0.01", "-1", "nan", "x"])),
        ),
    ),
    "check": (
        120,
        command(
            *("check", "given.csv", "--json"),
            options(m=SMALL, memory_cap=JUNK, dialect=st.sampled_from(["torch", "torch-old", "x"])),
            given_csv=tables(),
        ),
    ),
    "convert": (
        80,
        command(
            *("check", "given.csv", "--write"),
            st.sampled_from(["new.csv", "new.txt", "old.out", "new", "old.out/x.csv", "/proc/x.csv", "."]),
            *("--to", st.sampled_from(["pipemem", "torch", "torch-old", "x"])),
            given_csv=tables(),
        ),
    ),
    "costs": (80, command(*PRICED_1F1B, MORE_COSTS, "--json", costs_json=JSON_COSTS)),
    "texts that are no JSON": (20, command(*PRICED_1F1B, costs_json=NO_JSON)),
    "profile files": (40, command(*PRICED_1F1B, costs_json=changed(PROFILE).map(json.dumps))),
    "launch": (
        60,
        command(
            *("launch", "run.yaml", "--print"),
            options(set=SETS, nodes=SMALL, node_rank=SMALL, master_port=JUNK, master_addr=JUNK),
            run_yaml=runs(RUN),
        ),
    ),
    "plan": (
        12,
        command(
            *("plan", "run.yaml", *FEW_PLANS),
            options(set=SETS, memory=JUNK, only=JUNK, profile=JUNK, top=SMALL, output=JUNK),
            run_yaml=runs(RUN),
        ),
    ),
    "grid": (
        25,
        command(
            *("grid", "grid.yaml", "--launcher", "print"),
            options(set=SETS, output=JUNK, sbatch=JUNK),
            grid_yaml=runs(GRID),
            run_yaml=st.just(yaml.safe_dump(RUN)) | runs(RUN),
        ),
    ),
    "profile": (
        30,
        command(
            *("profile", "--model", "model.yaml", "--cluster", "cluster.yaml", "--formulas", OF_MODELS),
            model_yaml=runs(MODEL),
            cluster_yaml=st.just(yaml.safe_dump(CLUSTER)) | runs(CLUSTER),
        ),
    ),
    "files of a grid": (45, command("grid-result", "grid/points/000", "--exit-code", "1", **OF_GRIDS)),
    "report": (  # each may draw a picture
        4,
        command("report", "grid", maybe("--output", "x.html", "old.out/x.png"), "--json", **OF_GRIDS),
    ),
    "anything": (45, command(st.sampled_from(["schedules", "unfinished", "report"]), st.lists(JUNK, max_size=3))),
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
