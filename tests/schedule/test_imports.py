"""What the package imports, and what importing it does: nothing."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megatron_pipemem

PACKAGE = Path(megatron_pipemem.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
PUBLIC = {
    f"megatron_pipemem.{name}": f"megatron_pipemem.{module}.{name}"
    for name, module in megatron_pipemem._MODULE_OF.items()
}
"""Where it really is, what the package itself exports."""


def run(code: str) -> str:
    """Standard output of a fresh interpreter that finds this package and whatever is installed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def part_of(source: Path) -> str:
    """The top-level part a file belongs to: ``schedule``, ``mcore``, or the module itself.

    Features have three: what is pure Python (``features``), ``features/runtime`` and ``features/megatron``. Every folder
    of ``tools`` is a part.
    """
    first, *rest = source.relative_to(PACKAGE).with_suffix("").parts
    if first == "tools" and rest != ["__init__"]:
        return f"tools/{rest[0]}"
    return f"{first}/{rest[1]}" if first == "features" and rest[1:2] in (["runtime"], ["megatron"]) else first


def module_of(source: Path) -> str:
    """The full name of a file's module."""
    return ".".join(source.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def part_named(module: str) -> str:
    """The part of a module of this package, by its full name."""
    return part_of(PACKAGE.parent.joinpath(*module.split(".")))


@cache
def read(source: Path) -> tuple[set[str], set[str]]:
    """Full names of all that a file imports anywhere, also within functions, and all its strings."""
    names, strings = set(), set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    return {PUBLIC.get(name, name) for name in names}, strings


def imported(source: Path) -> set[str]:
    return read(source)[0]


def test_only_few_rooms_name_megatron():
    for source in SOURCES:
        if part_of(source) not in ("mcore", "tools/cpu", "tools/megatron", "features/megatron"):
            names = set.union(*read(source))
            assert not [name for name in names if name == "megatron" or name.startswith("megatron.")], source


BASE = {"errors", "files"}
CHOOSING = {*BASE, "schedule", "families", "search", "features", "request", "part_costs", "conflicts", "choose"}
CORE = {*CHOOSING, "values", "flags", "logs", "model", "refusals", "gates", "queues", "results"}


MAY_IMPORT = {
    "errors": set(),
    "files": {"errors"},
    "schedule": {*BASE, "schedule", "families"},  # the registry lists the families' modules
    "families": {"errors", "schedule", "families", "search", "features"},
    "search": {*BASE, "schedule", "search"},
    "features": {"errors", "schedule", "request", "features"},
    "request": {"errors", "schedule"},
    "part_costs": {*BASE, "schedule", "request"},
    "conflicts": {"errors", "schedule", "request", "part_costs"},
    "choose": CHOOSING,
    "values": {"errors", "schedule"},
    "flags": {"errors", "request"},
    "logs": {"errors"},
    "exits": {"errors"},
    "refusals": {"errors", "schedule"},
    "gates": {"errors", "schedule", "request", "conflicts", "refusals"},
    "queues": set(),
    "results": {"schedule"},
    "model": {*CHOOSING, "values", "model"},
    "runtime": {"errors", "schedule", "runtime"},
    "features/runtime": {"errors", "schedule", "features", "runtime", "features/runtime"},
    "tools_by_flag": {"errors", "files", "request"},
    "tools/config": {*CORE, "tools/config"},
    "tools/console": {"errors"},
    "tools/report": {*BASE, "results", "schedule", "search", "tools/console", "tools/report"},
    "tools/planner": {*CORE, "tools/config", "tools/planner", "tools/report"},
    "tools/cpu": {"errors", "flags", "logs", "mcore", "refusals", "tools/cpu"},
    "tools/launch": {*CORE, "tools/config", "tools/cpu", "tools/planner", "tools/report", "tools/launch"},
    "tools/advise": {
        *CORE,
        "tools/config",
        "tools/megatron",
        "tools/planner",
        "tools/report",
        "tools/launch",
        "tools/advise",
    },
    "tools/explore": {*CHOOSING, "tools/report", "tools/explore"},
}


def test_imports_point_one_way():
    for source in SOURCES:
        if (may_import := MAY_IMPORT.get(part_of(source))) is not None:
            parts = {part_named(n) for n in imported(source) if n.startswith("megatron_pipemem.")}
            assert parts <= may_import, source
    assert {part_of(source) for source in SOURCES} > MAY_IMPORT.keys()


def test_the_core_imports_no_tool():
    """Nor within functions. ``tools_by_flag`` has the names of those that a flag asks for."""
    of_tools = "megatron_pipemem.tools"
    for source in SOURCES:
        if not part_of(source).startswith("tools/") and source.stem != "tools_by_flag":
            names = set.union(*read(source))
            assert not [name for name in names if name == of_tools or name.startswith(f"{of_tools}.")], source


def test_the_core_imports_with_numpy_torch_and_megatron_alone():
    """Every module of it, where the packages of the tools cannot be found."""
    pytest.importorskip("megatron.core")
    modules = [module_of(source) for source in SOURCES if not part_of(source).startswith("tools")]
    code = f"""
import importlib, sys
for name in ("yaml", "rich", "typer", "matplotlib"):
    sys.modules[name] = None  # importing it raises
for name in {modules}:
    importlib.import_module(name)
print(*(name for name in sys.modules if name.startswith("megatron_pipemem.tools.")))
"""
    assert len(modules) > 100 and run(code) == "\n"


def test_the_kernel_imports_no_feature():
    """Nor within functions: it knows the table of features, which imports them by name when a run wants them."""
    folders = {path.name for path in (PACKAGE / "features").iterdir() if path.is_dir()}
    for source in SOURCES:
        if part_of(source) in ("schedule", "runtime", "mcore"):
            features = {n for n in imported(source) if n.startswith("megatron_pipemem.features.")}
            assert not {n for n in features if n.split(".")[2] in folders}, source


def test_no_module_imports_itself_through_others():
    """Nor within functions."""
    modules = {module_of(source): source for source in SOURCES}
    imports = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imported(source)} & modules.keys()
        for module, source in modules.items()
    }
    assert len([*TopologicalSorter(imports).static_order()]) == len(modules)  # raises a CycleError that names one


def test_the_package_requires_what_the_command_line_imports():
    """All but torch and numba, which come with extras, and without which commands work, and what notebooks bring."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = {requirement.split(">=")[0] for requirement in project["dependencies"]}
    tools = ("tools/cli", "tools/config", "tools/launch", "tools/planner", "tools/report")
    parts = (*tools, "schedule", "search", "families", "features", "choose")
    names = {name.split(".")[0] for source in SOURCES if part_of(source) in parts for name in imported(source)}
    others = names - set(sys.stdlib_module_names) - {"megatron_pipemem", "torch", "numba", "pandas", "IPython"}
    assert {{"yaml": "pyyaml", "PIL": "pillow"}.get(name, name) for name in others} == installed


def test_schedule_needs_no_third_party_module():
    """Every module of the kernel and of choosing imports where torch, megatron and numpy cannot be; some need numpy."""
    with_numpy = ("compiled", "periodic", "step_plan", "planner", "two_lanes")
    names = [
        module_of(source) for source in SOURCES if part_of(source) in CHOOSING - BASE and source.stem not in with_numpy
    ]
    code = f"""
import importlib, sys
for name in ("torch", "megatron", "numpy"):
    sys.modules[name] = None  # importing it raises
for name in {names}:
    importlib.import_module(name)
standard = set(sys.stdlib_module_names) | set(sys.builtin_module_names)
mains = {{name.split(".")[0] for name, module in sys.modules.items() if module is not None}}
print(sorted(m for m in mains - standard - {{"megatron_pipemem"}} if hasattr(sys.modules[m], "__path__")))
"""
    before = run(
        "import sys; print(sorted(n for n, m in sys.modules.items() if '.' not in n and hasattr(m, '__path__')))"
    )
    assert len(names) >= 10
    assert set(ast.literal_eval(run(code))) <= set(ast.literal_eval(before))


def test_public_names_are_imported_when_asked_for():
    """What type checkers are told of stands where it is looked up, and asking for one name imports no other's module."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    told = {
        (node.module, name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("megatron_pipemem.")
        for name in node.names
        if name.asname
    }
    assert told == {(f"megatron_pipemem.{module}", name) for name, module in megatron_pipemem._MODULE_OF.items()}
    for name in set(megatron_pipemem.__all__) - set(megatron_pipemem._NEEDS_MEGATRON):
        assert getattr(megatron_pipemem, name).__name__ == name
    code = """
import sys
import megatron_pipemem
print(*sorted(name for name in sys.modules if name.startswith("megatron_pipemem.")))
megatron_pipemem.ScheduleError
print(*sorted(name for name in sys.modules if name.startswith("megatron_pipemem.")))
"""
    assert run(code) == "\nmegatron_pipemem.errors\n"


def test_importing_changes_nothing():
    """No environment, hook, handler, filter or random state is touched, and nothing is printed."""
    code = """
import logging, os, random, signal, sys, threading, warnings
def state():
    return (
        dict(os.environ), list(sys.meta_path), list(sys.path), list(sys.path_hooks), sys.excepthook, sys.gettrace(),
        list(logging.root.handlers), logging.root.level, list(warnings.filters), random.getstate(),
        threading.enumerate(), [signal.getsignal(s) for s in signal.valid_signals()],
        sys.getrecursionlimit(), os.getcwd(),
    )
import ast, difflib, importlib.metadata, json  # their own side effects are not ours
before = state()
import megatron_pipemem
after = state()
assert before == after, [(b, a) for b, a in zip(before, after) if b != a]
"""
    assert run(code) == ""


def test_importing_leaves_megatron_alone(monkeypatch):
    """Every attribute of Megatron's pipeline modules is the same object after an import of the package."""
    pytest.importorskip("megatron.core")
    importlib.import_module("megatron.core.pipeline_parallel.schedules")
    names = [
        "megatron_pipemem",
        *(f"megatron_pipemem.{module}" for module in ("schedule.registry", "runtime", "mcore")),
    ]

    def state():
        return {
            (name, attribute): value
            for name, module in list(sys.modules.items())
            if name.split(".")[0] in ("megatron", "torch") and module is not None
            for attribute, value in vars(module).items()
        }

    for name in [name for name in sys.modules if name.split(".")[0] == "megatron_pipemem"]:
        monkeypatch.delitem(sys.modules, name)
    before = state()
    fresh = [importlib.import_module(name) for name in names]
    after = state()
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron_pipemem"]:
        monkeypatch.delitem(sys.modules, name)
    assert fresh[0] is not megatron_pipemem and len(before) > 1000
    assert before.keys() == after.keys() and all(before[key] is after[key] for key in before)


@pytest.mark.parametrize("missing", ["torch", "megatron"])
def test_what_needs_megatron_says_so_where_there_is_none(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
import megatron_pipemem
for name in ("enable", "disable", "write_report"):
    try:
        getattr(megatron_pipemem, name)
    except ImportError as error:
        assert isinstance(error, megatron_pipemem.PipememError)
        print(error)
"""
    lines = run(code).splitlines()
    assert len(lines) == 3 and all("pip install 'megatron-pipemem[megatron]'" in line for line in lines)


def test_the_planner_knows_all_its_variants_whoever_imports_it():
    code = "from megatron_pipemem.tools.planner.planning import variants; print([v.name for v in variants()])"
    assert run(code) == "['offload', 'vocabulary-1', 'vocabulary-2']\n"
