"""The source patches apply where they say and call the hook before the script does anything else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import REPOSITORY

PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))

# Stands in for the plugin: takes its flags off the command line, as megatron_pipemem.mcore.launch does.
HOOK = """
import sys
def enable_from_command_line():
    sys.argv[1:] = [argument for argument in sys.argv[1:] if not argument.startswith("--pipemem-")]
"""


def original_of(patch: str) -> str:
    """A script with the lines that the patch expects, where it expects them."""
    hunk = re.search(r"^@@ -(\d+),\d+ .*?\n(.*)", patch, re.MULTILINE | re.DOTALL)
    assert hunk is not None
    lines = [line[1:] for line in hunk[2].splitlines() if not line.startswith("+")]
    filler = ["import sys, time"] + ["# filler"] * (int(hunk[1]) - 2)
    return "\n".join([*filler, *lines, "    print(sys.argv[1:])", ""])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_applies_runs_and_comes_off(patch: Path, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(original_of(patch.read_text()))
    before = script.read_text()
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    package = tmp_path / "megatron_pipemem" / "mcore"
    package.mkdir(parents=True)
    (package / "launch.py").write_text(HOOK)
    command = [sys.executable, str(script), "--lr", "1", "--pipemem-schedule=v-half"]
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "['--lr', '1']"
    subprocess.run(["git", "apply", "-R", str(patch)], cwd=tmp_path, check=True)
    assert script.read_text() == before


def test_there_is_a_patch_for_each_version_the_readme_names() -> None:
    named = set(re.findall(r"`(pretrain_gpt-\S+\.patch)` \|", (REPOSITORY / "patches" / "README.md").read_text()))
    assert named == {patch.name for patch in PATCHES} != set()


def test_the_hook_exists() -> None:
    """By reading: importing it needs Megatron with CUDA or an activated process."""
    assert "def enable_from_command_line(" in (REPOSITORY / "megatron_pipemem" / "mcore" / "launch.py").read_text()
    assert all(
        "from megatron_pipemem.mcore.launch import enable_from_command_line" in patch.read_text() for patch in PATCHES
    )
