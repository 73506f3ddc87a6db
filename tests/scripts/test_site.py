"""The documentation builds as a site, without one warning, and holds every command and every public name."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_pipemem
from megatron_pipemem.flags import flag_parser
from megatron_pipemem.schedule.registry import families
from megatron_pipemem.tools.cli.app import load_commands
from megatron_pipemem.tools.cli.explore import schedule_groups
from megatron_pipemem.tools.explore.serving import PYODIDE_URL, explorer_page

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "mkdocstrings", "nbclient", "ipykernel")),
    reason="needs what builds the documentation: pip install '.[docs]'",
)

COMMANDS = {name: command for name, command in load_commands().items() if not command.hidden}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text(page: Path) -> str:
    """What a reader sees of a page."""
    article = re.search(r"<article.*</article>", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    return html.unescape(re.sub(r"<[^>]+>", "", article))


def test_every_command_has_a_page_with_all_its_options(site):
    listed = text(site / "commands" / "index.html")
    for name, command in COMMANDS.items():
        page = text(site / "commands" / f"{name}.html")
        options = [
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option[0] == "-"
        ]
        assert [option for option in options if option not in page] == [], name
        assert f"pipemem {name}" in listed
    flags = [option for action in flag_parser()._actions for option in action.option_strings if action.help]
    page = text(site / "commands" / "run.html")
    assert len(flags) > 10 and [flag for flag in flags if flag not in page] == []


def test_the_python_api_has_every_public_name(site):
    page = text(site / "python-api.html")
    names = re.findall(r"^\s*(?:class|func)?\s*(\w+)\s*¶?\s*$", page, re.MULTILINE)
    assert [name for name in megatron_pipemem.__all__ if name not in names] == []
    assert names.count("show") == 3 and "to_dataframe" in names


def test_the_readme_is_the_start_page(site):
    start = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="search.html"' in start and 'href="notebook.html"' in start
    assert len(re.findall("<table", start)) == 3
    assert "off|half|full|auto" in text(site / "start.html")
    assert "global_batch" in text(site / "files" / "configs" / "runs.html")


def test_models_get_a_list_of_the_pages_with_their_questions(site):
    lines = (site / "llms.txt").read_text(encoding="utf-8").splitlines()
    linked = {match[2]: match[3] for line in lines if (match := re.fullmatch(r"- \[(.+)\]\((.+)\): (.+)", line))}
    assert [page for page in linked if not (site / page).is_file()] == []
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= linked.keys()
    assert "less activation memory" in linked["offload.html"]


def test_the_gallery_has_a_picture_of_every_schedule(site):
    gallery = (site / "gallery.html").read_text(encoding="utf-8")
    for family in families():
        assert f"src='gallery/{family.name}.html'" in gallery or f'src="gallery/{family.name}.html"' in gallery
        assert f"{family.name}: p=4, m=8" in (site / "gallery" / f"{family.name}.html").read_text(encoding="utf-8")


def test_the_gallery_leads_to_the_explorer(site):
    assert 'href="explorer.html"' in (site / "gallery.html").read_text(encoding="utf-8")
    assert explorer_page(schedule_groups(), PYODIDE_URL, home="index.html") == (site / "explorer.html").read_text(
        encoding="utf-8"
    )


def test_the_notebook_was_executed(site):
    """Its page has what its cells show: pictures, tables and text. A cell that raises fails the build."""
    page = (site / "notebook.html").read_text(encoding="utf-8")
    assert page.count("<iframe") == page.count("srcdoc=") == 4
    assert len(re.findall("<table", page)) == 4  # of pandas three, and one of a search
    assert "shorter than v-half" in text(site / "notebook.html")


def test_a_link_to_nowhere_is_left_for_mkdocs_to_find():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    site_pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site_pages)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="planning.md"))
    shown = site_pages.on_page_markdown("[a](missing.md) [b](../README.md#start) [c](offload.md)", page)
    assert shown == "[a](missing.md) [b](index.md#start) [c](offload.md)"
