"""scripts/setup.sh on machines that have the wrong Python, none, or everything already."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from launching import REPOSITORY

TOOLS = ("bash", "env", "dirname", "cat", "cksum", "ls", "rm", "mkdir", "sed", "chmod")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A clone of what setup.sh reads, and a ``bin`` that is all of PATH: basic tools, and no Python yet."""
    for name in ("scripts/setup.sh", "requirements.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    for tool in TOOLS:
        path = shutil.which(tool)
        assert path is not None
        (tmp_path / "bin" / tool).symlink_to(path)
    return tmp_path


def install(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    path.chmod(0o755)


# An interpreter that has everything: it makes a virtual environment that contains itself, and writes down its calls.
GOOD_PYTHON = """
echo "$0 $*" >>"$CALLS"
case "$1 ${2:-}" in
"--version ") echo "Python 3.12.0" ;;
"-m venv") mkdir -p .venv/bin && cat "$0" >.venv/bin/python && chmod +x .venv/bin/python ;;
esac
"""


def set_up(machine: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine / "bin"), "HOME": str(machine / "home"), "CALLS": str(machine / "calls")}
    return subprocess.run(
        [str(machine / "bin" / "bash"), str(machine / "scripts" / "setup.sh")],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_python_it_says_what_to_install(machine: Path) -> None:
    result = set_up(machine)
    assert result.returncode != 0
    assert result.stderr.count("\n") == 1
    for way_out in ("Python >= 3.12", "apt-get install", "pyenv install", "uv python install", "PIPEMEM_PYTHON"):
        assert way_out in result.stderr
    assert not (machine / ".venv").exists()


def test_a_python_that_is_too_old_is_no_python(machine: Path) -> None:
    install(machine / "bin" / "python3", "exit 1")
    result = set_up(machine)
    assert result.returncode != 0 and "Python >= 3.12" in result.stderr


@pytest.mark.parametrize(
    "place", ["bin/python3.12", "bin/python3", "bin/python", "home/.pyenv/versions/3.13.0/bin/python3"]
)
def test_finds_python(machine: Path, place: str) -> None:
    """Past a shim that does not run, as pyenv leaves them for versions that are not selected."""
    install(machine / "bin" / "python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127")
    install(machine / place, GOOD_PYTHON)
    result = set_up(machine)
    assert result.returncode == 0, result.stderr
    assert str(machine / place) in result.stdout
    calls = (machine / "calls").read_text()
    assert "-r requirements.txt" in calls and "--editable ." in calls


def test_finds_python_of_uv(machine: Path) -> None:
    install(machine / "far" / "python3", GOOD_PYTHON)
    install(machine / "bin" / "uv", f'[ "$1 $2" = "python find" ] && echo "{machine / "far" / "python3"}"')
    result = set_up(machine)
    assert result.returncode == 0, result.stderr
    assert str(machine / "far" / "python3") in result.stdout


def test_a_chosen_python_is_the_only_candidate(machine: Path) -> None:
    install(machine / "bin" / "python3.12", GOOD_PYTHON)
    assert set_up(machine, PIPEMEM_PYTHON="/nowhere/python").returncode != 0
    install(machine / "mine" / "python", GOOD_PYTHON)
    assert str(machine / "mine") in set_up(machine, PIPEMEM_PYTHON=str(machine / "mine" / "python")).stdout


def test_is_fast_when_nothing_changed_and_works_again_when_something_did(machine: Path) -> None:
    install(machine / "bin" / "python3.12", GOOD_PYTHON)
    assert set_up(machine).returncode == 0
    calls = (machine / "calls").read_text()
    start = os.times()
    again = set_up(machine)
    assert (again.returncode, again.stdout) == (0, "")
    took = [after - before for before, after in zip(start, os.times(), strict=True)]
    assert took[2] + took[3] < 1  # seconds of the processor, of what has been started
    assert (machine / "calls").read_text() == calls
    with (machine / "requirements.txt").open("a") as pins:
        pins.write("rich==15.0.0\n")
    assert "installing" in set_up(machine).stdout


def test_an_interrupted_setup_is_taken_up_again(machine: Path) -> None:
    install(machine / "bin" / "python3.12", GOOD_PYTHON.replace("esac", '"-m pip") exit 1 ;;\nesac'))
    assert set_up(machine).returncode != 0
    install(machine / "bin" / "python3.12", GOOD_PYTHON)
    install(machine / ".venv" / "bin" / "python", GOOD_PYTHON)
    result = set_up(machine)
    assert result.returncode == 0 and "ready" in result.stdout


def test_scripts_are_executable() -> None:
    for name in ("scripts/setup.sh", "scripts/test.sh", ".ci/run"):
        assert os.access(REPOSITORY / name, os.X_OK), name
