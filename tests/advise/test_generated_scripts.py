"""The words of random scripts are those that bash passes to a program in its search path."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from generated_scripts import script

from megatron_pipemem.tools.advise.evaluation import evaluated

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
TOGETHER = 10
"""Scripts in one evaluation, each in a subshell, because most of the time is that of a start."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A folder with ``torchrun``, which prints its words, and the few programs that the scripts need."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "torchrun").write_text(
        f'#!{shutil.which("bash")}\nprintf \'%s\\0\' torchrun "$@" >>"$WORDS"; printf \'\\1\\0\' >>"$WORDS"\n'
    )
    (folder / "torchrun").chmod(0o755)
    (folder / "tee").symlink_to(shutil.which("tee"))
    return folder


def words_of_bash(text: str, programs: Path, folder: Path) -> list[list[str]]:
    """Return the words of every ``torchrun`` that bash starts."""
    words = folder / "words"
    environment = {"PATH": str(programs), "WORDS": str(words), "HOME": "/home", "LC_ALL": "C"}
    subprocess.run([shutil.which("bash"), "-c", text], cwd=folder, env=environment, capture_output=True, timeout=60)
    return [record.split("\0")[:-1] for record in words.read_text().split("\1\0")[:-1]]


@pytest.mark.parametrize("first", range(0, 200, TOGETHER))
def test_words_of_generated_scripts_are_those_of_bash(first, programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home")
    texts = [script(seed) for seed in range(first, first + TOGETHER)]
    text = "".join(f"(\n{text}\n)\n" for text in texts)
    expected = words_of_bash(text, programs, tmp_path)
    read = evaluated(text)
    assert [words for words in read.commands if words[0] == "torchrun"] == expected and len(expected) >= TOGETHER
    assert read.unfinished is None and not read.compared
