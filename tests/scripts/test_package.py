"""What pip installs: built as an index would hold it, and used where nothing else is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from lanes import nightly
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_pipemem"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = {
    "setup.py",
    "pyproject.toml",
    PROJECT["readme"],
    *PROJECT["license-files"],
    "configs",
    "scripts",
    PACKAGE.name,
}
"""What the package is built from."""
SCRIPTS = [
    *(ROOT / "scripts" / name for name in ("gpt_pretraining.py", "pipemem.sh", "pretrain_gpt.py", "pretrain_gpt.sh")),
    *(ROOT / "scripts" / "slurm").iterdir(),
]
"""What starts runs, of all scripts."""
OUTSIDE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS")}
"""Environment in which only an installed package is found."""


def call(*command: object, cwd: Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=OUTSIDE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(hook: str, source: Path, into: Path) -> Path:
    """Build as a front end of PEP 517 does, with the setuptools that is there, so that no index is needed."""
    call(sys.executable, "-c", f"from setuptools import build_meta; build_meta.{hook}({str(into)!r})", cwd=source)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source / name)
        else:  # the package links to the others
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return build("build_sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, which must have all that it needs."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


def required(names: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions that these requirements need, with their own, by their names."""
    distributions: dict[str, Distribution] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and (name := canonicalize_name(requirement.name)) not in distributions:
            distributions[name] = distribution(name)
            waiting += map(Requirement, distributions[name].requires or ())
    return distributions


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel and links to its dependencies, which pip checks."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/*/site-packages")
    for requirement in required(PROJECT["dependencies"]).values():
        for name in {file.parts[0] for file in requirement.files} - {"..", "__pycache__"}:
            if not (packages / name).exists():  # some share a folder
                (packages / name).symlink_to(requirement.locate_file(name))
    call(*PIP, "--python", folder / "bin" / "python", "install", "-q", "--no-index", "--no-compile", wheel, cwd=folder)
    return folder / "bin"


@nightly("the tests in an environment of links, in which pip finds that all requirements are met")
def test_an_index_has_what_the_wheel_requires(wheel: Path, tmp_path: Path) -> None:
    """In the versions of requirements.txt."""
    versions = tmp_path / "constraints.txt"
    versions.write_text(re.sub(r"\[.*?\]", "", (ROOT / "requirements.txt").read_text(encoding="utf-8")))
    venv.create(tmp_path / "bare", symlinks=True)
    pip = [*PIP, "--python", tmp_path / "bare" / "bin" / "python", "install", "-q", "--dry-run", "--retries", "1"]
    pip += ["--timeout", "10", "--only-binary", ":all:", "--constraint", versions]
    done = subprocess.run([*pip, wheel], env=OUTSIDE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        names = {text.split(">=")[0] for text in PROJECT["dependencies"]}
        pinned = [line for line in versions.read_text().splitlines() if line.split("==")[0] in names]
        alone = subprocess.run([*pip, *pinned], env=OUTSIDE, capture_output=True, text=True, check=False)
        if re.search("No matching distribution|ResolutionImpossible", alone.stderr):
            pytest.skip("needs a package index that pip reaches")
    assert done.returncode == 0, done.stderr


def members(archive: Path) -> dict[str, str]:
    """What a wheel holds, as text."""
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name).decode() for name in opened.namelist()}


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert "megatron_pipemem/py.typed" in files
    runs = {f"tools/config/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").glob("*/*.yaml")}
    scripts = {f"scripts/{path.relative_to(ROOT / 'scripts')}" for path in SCRIPTS}
    assert "tools/config/grids/tiny-cpu.yaml" in runs and "scripts/slurm/training.sh" in scripts
    files |= {f"megatron_pipemem/{name}" for name in runs | scripts}
    held = members(wheel)
    assert {name for name in held if ".dist-info/" not in name} == files
    assert {Path(name).parts[0] for name in held} == {PACKAGE.name, f"megatron_pipemem-{PROJECT['version']}.dist-info"}


def test_setup_py_goes_with_the_source_and_says_nothing_of_its_own(sdist: Path, tmp_path: Path) -> None:
    """Tools from before PEP 517 find it. What it would say is in pyproject.toml."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert (source / "setup.py").read_text(encoding="utf-8") == (ROOT / "setup.py").read_text(encoding="utf-8")
    told = call(sys.executable, "-W", "ignore", "setup.py", "--name", "--version", cwd=source)
    assert told.split() == [PROJECT["name"], PROJECT["version"]]


def test_the_metadata_is_what_an_index_takes(wheel: Path) -> None:
    (text,) = [text for name, text in members(wheel).items() if name.endswith(".dist-info/METADATA")]
    metadata = Metadata.from_email(text, validate=True)  # raises a group of all that is wrong
    assert (metadata.name, str(metadata.version)) == (PROJECT["name"], PROJECT["version"])
    assert metadata.license_expression == "Apache-2.0" and str(metadata.requires_python) == ">=3.12"
    assert metadata.description_content_type.startswith("text/markdown")
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata.summary and metadata.keywords and metadata.author and "Typing :: Typed" in metadata.classifiers


def test_the_license_goes_with_it(wheel: Path) -> None:
    held = members(wheel)
    for name in PROJECT["license-files"]:
        (text,) = [text for path, text in held.items() if path.endswith(f".dist-info/licenses/{name}")]
        assert text == (ROOT / name).read_text(encoding="utf-8")
    assert "Copyright the megatron_pipemem authors" in (ROOT / "NOTICE").read_text(encoding="utf-8")


def test_the_changelog_begins_with_the_version() -> None:
    """``0.2.0.devN`` is on the way to ``0.2.0 (unreleased)``; what is released has neither."""
    version = Version(PROJECT["version"])
    heading = re.search(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading[1] == version.base_version and len(version.release) == 3
    assert heading[2] == (" (unreleased)" if version.is_devrelease else "")


def test_an_empty_environment_has_a_version_and_plans_without_torch(bare: Path, tmp_path: Path) -> None:
    assert call(bare / "pipemem", "--version", cwd=tmp_path) == f"pipemem {PROJECT['version']}\n"
    find = "import importlib.util; print([importlib.util.find_spec(name) for name in ('torch', 'megatron')])"
    assert call(bare / "python", "-c", find, cwd=tmp_path) == "[None, None]\n"
    assert "0.625" in call(bare / "pipemem", "simulate", "v-half", "-p", 8, "-m", 33, cwd=tmp_path)
    assert "'Et*4|(t*4|)*14tmL'" in call(bare / "pipemem", "layout", "deepseek-v3", "-p", 16, cwd=tmp_path)
    call(bare / "pipemem", "show", "zbv", "-p", 4, "-m", 8, "--output", "page.html", cwd=tmp_path)
    assert "<script" in (tmp_path / "page.html").read_text(encoding="utf-8")  # made from tools/report/page.*
    few = ("--only", "tp=1", "--only", "pp=4", "--only", "schedule=1f1b,v-half", "--search-seconds", 0)
    assert "v-half" in call(bare / "pipemem", "plan", "tiny-cpu", *few, cwd=tmp_path)


def test_an_empty_environment_starts_runs(bare: Path, tmp_path: Path) -> None:
    """As far as that goes without Megatron: commands are printed, whose files are there."""
    call(bare / "pipemem", "init", "llama3-70b", "-p", 4, "--tp", 8, cwd=tmp_path)
    printed = call(bare / "pipemem", "launch", "llama3-70b.yaml", "--print", cwd=tmp_path)
    (script,) = re.findall(r"run (\S+/pretrain_gpt\.py)", printed)
    assert Path(script).is_relative_to(bare.parent) and Path(script).with_name("gpt_pretraining.py").is_file()
    started = [bare / "pipemem", "launch", "tiny-cpu"]
    done = subprocess.run(started, cwd=tmp_path, env=OUTSIDE, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install 'megatron-pipemem[megatron]'" in done.stderr.splitlines()[-1]
    submitted = ("grid", "tiny-cpu", "--launcher", "slurm", "--print", "--json")
    batch_file = Path(json.loads(call(bare / "pipemem", *submitted, cwd=tmp_path))["script"])
    assert batch_file.read_text() == (ROOT / "scripts" / "slurm" / "grid.sbatch").read_text()
    start = str(batch_file.parents[1] / "pretrain_gpt.sh")  # which the batch files start by its name
    python = OUTSIDE | {"PYTHON": str(bare / "python")}
    done = subprocess.run(
        [start, "nowhere.yaml"], cwd=tmp_path, env=python, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "") and "there is no file nowhere.yaml" in done.stderr


CONTAINERS = ROOT / "containers"


def checker(name: str) -> Path:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"needs {name}: pip install '.[test]' (there is none for every machine)")
    return path


def sections(definition: str) -> dict[str, str]:
    """The parts of an Apptainer definition: its header under ``""``, and what stands below every %name."""
    header, *others = re.split(r"^%", definition, flags=re.MULTILINE)
    return {"": header} | {name: body for name, _, body in (other.partition("\n") for other in others)}


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    """It looks at the file's syntax, at what is known to go wrong, and with shellcheck at what it runs."""
    done = subprocess.run([checker("hadolint"), CONTAINERS / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_shellcheck_finds_nothing_in_what_the_apptainer_definition_runs() -> None:
    """There is no linter for these files: the sections are those that Apptainer knows, and its scripts are checked."""
    parts = sections((CONTAINERS / "pipemem.def").read_text(encoding="utf-8"))
    assert list(parts) == ["", "files", "post", "test", "help"]
    for name in ("post", "test"):
        done = subprocess.run(
            [checker("shellcheck"), "--shell=sh", "-"], input=parts[name], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"%{name}: {done.stdout}"


def test_both_containers_build_the_package_from_all_its_sources() -> None:
    docker = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
    parts = sections((CONTAINERS / "pipemem.def").read_text(encoding="utf-8"))
    copied = [line.split()[1:-1] for line in docker.splitlines() if line.startswith("COPY ")]
    assert {name for names in copied for name in names} == SOURCES
    assert {tuple(line.split()) for line in parts["files"].splitlines() if line} == {
        (name, "/opt/megatron_pipemem/") for name in SOURCES
    }
    header = dict(line.split(": ") for line in parts[""].splitlines() if re.match("[A-Z]", line))
    assert header == {"Bootstrap": "docker", "From": re.search("^FROM (.*)$", docker, re.MULTILINE)[1]}
    (install,) = re.findall(r"pip install .*(?= \\$)", docker, re.MULTILINE)
    assert install == parts["post"].strip().splitlines()[-1].strip()
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert shlex.split(install)[-2:] == [
        "/opt/megatron_pipemem[megatron]",
        *(line for line in pinned if "megatron-core" in line),
    ]
