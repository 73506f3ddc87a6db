"""Add the pages that are not in docs/ to the site while MkDocs builds it (a hook of mkdocs.yml).

These pages are:

- the README, which becomes the start page, and the repository's other documents
- a page for each command, from its help, and the page of the Python API, from ``megatron_pipemem.__all__``
- a picture of every schedule, the explorer, and the executed example notebook
- the text of every other file that a document links to, so that the same links work in the repository and on the site
"""

from __future__ import annotations

import html
import inspect
import os
import re
import sys
from functools import lru_cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_pipemem.schedule.registry import build_schedule, families  # noqa: E402
from megatron_pipemem.schedule.simulator import Timeline, simulate  # noqa: E402
from megatron_pipemem.tools.cli.app import CommandWithExamples  # noqa: E402
from megatron_pipemem.tools.cli.explore import schedule_groups  # noqa: E402
from megatron_pipemem.tools.explore.serving import PYODIDE_URL, explorer_page  # noqa: E402
from megatron_pipemem.tools.report.browser import frame  # noqa: E402 - of this tree, even if another one is installed
from megatron_pipemem.tools.report.page import page as page_of_runs  # noqa: E402

DOCUMENTS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "patches/README.md": "patches.md",
    "examples/schedules.ipynb": "notebook.md",
    **{
        str(path.relative_to(ROOT)): str(path.relative_to(ROOT)).replace("README.md", "index.md")
        for path in sorted((ROOT / "benchmarks").rglob("*.md"))
    },
}
"""The site's page for each document of the repository that is not in docs/."""

_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all generated pages to the site's files, and expand the folders in the navigation.

    An entry of the navigation that ends in ``/`` is replaced by the pages of that folder.
    """
    documents = {page: (ROOT / document).read_text(encoding="utf-8") for document, page in DOCUMENTS.items()}
    runs = gallery_runs()
    pages = documents | command_pages() | {"python-api.md": python_api_page(), "gallery.md": gallery_page(runs)}
    pages["notebook.md"] = notebook_page(documents["notebook.md"])
    for name, run in runs.items():
        files.append(File.generated(config, f"gallery/{name}.html", content=page_of_runs([run])))
    explorer = explorer_page(schedule_groups(), PYODIDE_URL, home="index.html")
    files.append(File.generated(config, "explorer.html", content=explorer))
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "llms.txt", content=list_for_models(pages)))
    sources = {**DOCUMENTS, **{f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}}
    linked = {target for source in sources for target in _linked_files(source)}
    for target in sorted(linked):
        shown = File.generated(config, _page_of(target), content=file_page(target), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(shown)
    config.nav = _expanded(config.nav or [], sorted(pages, key=lambda page: (not page.endswith("/index.md"), page)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the Markdown of a page with links that work on the site, and with tables in the form that MkDocs reads."""
    documents = {page: document for document, page in DOCUMENTS.items()}
    source = documents.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_the_site(link: re.Match) -> str:
        target = _target(source, link[1])
        if target is None:
            return link[0]
        return f"]({os.path.relpath(_page_of(target), PurePosixPath(page.file.src_uri).parent)}{link[2] or ''})"

    markdown = re.sub(r"^<!--.*?-->\n", "\n", markdown, flags=re.MULTILINE)  # the next table would join the comment
    markdown = re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]*`", _plain_pipes, row[0]), markdown, flags=re.MULTILINE)
    return _LINK.sub(on_the_site, markdown)


def list_for_models(pages: dict[str, str]) -> str:
    """Return ``llms.txt``: a summary, and each page with its question, in the format of https://llmstxt.org."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))} | pages
    start = texts.pop("index.md")
    lines = ["# megatron_pipemem", "", f"> {_first_sentence(start.split('\n\n')[1])}", "", "## Pages", ""]
    for page, text in texts.items():
        title, _, body = text.partition("\n\n")
        lines.append(f"- [{title.lstrip('# ')}]({page.removesuffix('.md')}.html): {_first_sentence(body)}")
    return "\n".join(lines) + "\n"


def command_pages() -> dict[str, str]:
    """Return the Markdown of ``commands/index.md`` and of a page for each command, by path."""
    from megatron_pipemem.tools.cli.app import load_commands

    commands = {name: command for name, command in load_commands().items() if not command.hidden}
    lines = ["# Commands", "", "These pages are made from the `--help` of each command.", ""]
    lines += ["| command | purpose |", "|---|---|"]
    lines += [
        f"| [`pipemem {name}`]({name}.md) | {_first_sentence(command.help or '')} |"
        for name, command in commands.items()
    ]
    pages = {"commands/index.md": "\n".join(lines) + "\n"}
    return pages | {f"commands/{name}.md": command_page(name, command) for name, command in commands.items()}


def command_page(name: str, command: CommandWithExamples) -> str:
    """Return the Markdown of one command: its purpose, arguments, options and examples."""
    from megatron_pipemem.flags import flag_parser
    from megatron_pipemem.tools.cli.app import RunCommand

    context = command.make_context(name, [], resilient_parsing=True, help_option_names=["-h", "--help"])
    usage = " ".join(["pipemem", name, *command.collect_usage_pieces(context)])
    lines = [f"# pipemem {name}", "", inspect.cleandoc(command.help or ""), "", "```", usage, "```"]
    arguments = [parameter for parameter in command.get_params(context) if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.get_params(context) if parameter.param_type_name == "option"]
    for heading, parameters in (("Arguments", arguments), ("Options", options)):
        records = [record for parameter in parameters if (record := parameter.get_help_record(context))]
        lines += _table(heading, records)
    if isinstance(command, RunCommand):
        flags = [action for action in flag_parser()._actions if action.help]
        lines += _table("Flags after the script", [(_flag(flag), flag.help or "") for flag in flags])
    lines += ["", "## Examples", "", "```bash"]
    for line, purpose in command.examples:
        lines += [f"# {purpose}", line]
    return "\n".join([*lines, "```", ""])


def python_api_page() -> str:
    """Return the Markdown of the Python API page. mkdocstrings fills its entries from the docstrings."""
    import megatron_pipemem

    sections: dict[str, list[str]] = {"On Megatron": [], "Functions": [], "Classes": [], "Errors": []}
    for name in megatron_pipemem.__all__:
        if name in megatron_pipemem._NEEDS_MEGATRON:
            sections["On Megatron"].append(f"megatron_pipemem.mcore.plugin.{name}")
            if name == "enable":  # its keyword arguments are the fields of Request
                sections["On Megatron"].append("megatron_pipemem.request.Request")
            continue
        value = getattr(megatron_pipemem, name)
        kind = "Functions"
        if isinstance(value, type):
            kind = "Errors" if issubclass(value, Exception) else "Classes"
        sections[kind].append(f"megatron_pipemem.{name}")
    lines = [
        "# Python API",
        "",
        "Import these names from `megatron_pipemem`. The exception is `Request`, whose fields are the keyword arguments of "
        "`enable`.",
    ]
    for heading, names in sections.items():
        lines += ["", f"## {heading}"]
        for name in names:
            lines += ["", f"::: {name}"]
    return "\n".join(lines) + "\n"


def gallery_runs() -> dict[str, Timeline]:
    """Return the simulated timeline of every schedule, by name, for four devices and eight microbatches."""
    built = {family.name: build_schedule(family.name, num_devices=4, num_microbatches=8) for family in families()}
    return {name: simulate(schedule) for name, schedule in built.items()}


def gallery_page(runs: dict[str, Timeline]) -> str:
    """Return the Markdown of the page with a frame for each schedule. The picture in the frame is a file of its own."""
    lines = [
        "# Gallery",
        "",
        "Every schedule runs on four devices with eight microbatches. F, I and W take equally long, and messages no time.",
        "A peak of 1 is the peak of 1F1B's first device: equal stages, inputs kept for W not counted.",
        "Drag to move, press + and - to zoom, and point at an action.",
        "`pipemem show NAME -p 4 -m 8` draws the same.",
        "",
        "In the [explorer](explorer.html), sliders change sizes and prices. Your browser computes it. It gets Python for that",
        "from jsDelivr, 6 MB of Pyodide; `pipemem explore` is the same page without the network.",
    ]
    for family in families():
        run = runs[family.name]
        source = f"gallery/{family.name}.html"
        told = f"{family.summary.rstrip('.')} ({family.source})"
        lines += ["", f"## {family.name}", "", f"{told}. [On a page of its own]({source})", ""]
        lines += [f"<div>{frame(run, f"src='{source}' loading='lazy'")}</div>"]
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=1)
def notebook_page(text: str) -> str:
    """Execute a notebook, and return the Markdown of its cells and outputs. If a cell fails, its error is raised."""
    notebook = nbformat.reads(text, as_version=4)
    with TemporaryDirectory() as home:
        environment = {**os.environ, "IPYTHONDIR": home, "PYTHONPATH": str(ROOT)}
        quiet = ["--log-level=ERROR"]
        NotebookClient(notebook, kernel_name="python3", timeout=None, extra_arguments=quiet).execute(env=environment)
    lines: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            lines += [cell.source, ""]
            continue
        lines += ["```python", cell.source, "```", ""]
        for output in cell.outputs:
            shown = output.get("data", {})
            if "text/html" in shown:
                lines += [f"<div>{shown['text/html']}</div>", ""]
            else:
                lines += ["```text", shown.get("text/plain", output.get("text", "")).rstrip(), "```", ""]
    return "\n".join(lines)


def file_page(target: str) -> str:
    """Return the Markdown of a page that shows a text file of the repository, or all YAML files of a folder."""
    path = ROOT / target
    shown = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    lines = [f"# {target}"]
    for page in shown:
        if path.is_dir():
            lines += ["", f"## {page.name}"]
        language = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}.get(page.suffix, "text")
        lines += ["", f"````{language}", page.read_text(encoding="utf-8").rstrip(), "````"]
    return "\n".join(lines) + "\n"


def _target(source: str, link: str) -> str | None:
    """Return the file of the repository to which a relative link in document ``source`` leads.

    The result is None for a web address, and for a path outside of the repository or without a file.
    """
    if "://" in link:
        return None
    target = os.path.normpath(os.path.join(os.path.dirname(source), link))
    return None if target.startswith("..") or not (ROOT / target).exists() else target


def _linked_files(source: str) -> set[str]:
    """Return the files to which a document links and that are neither in ``docs/`` nor in ``DOCUMENTS``."""
    links = _LINK.findall((ROOT / source).read_text(encoding="utf-8"))
    targets = {target for link, _ in links if (target := _target(source, link)) is not None}
    return {target for target in targets if target not in DOCUMENTS and not target.startswith("docs/")}


def _page_of(target: str) -> str:
    """Return the path of the site's page that shows a file of the repository."""
    if target in DOCUMENTS:
        return DOCUMENTS[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}.md"


def _expanded(entries: list, pages: list[str]) -> list:
    """Return the navigation with each entry ``title: folder/`` replaced by the pages of that folder."""
    expanded = []
    for entry in entries:
        (title, value), *_ = entry.items()
        if isinstance(value, list):
            value = _expanded(value, pages)
        elif value.endswith("/"):
            value = [page for page in pages if page.startswith(value)]
        expanded.append({title: value})
    return expanded


def _first_sentence(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def _table(heading: str, records: list[tuple[str, str]]) -> list[str]:
    if not records:
        return []
    rows = [f"| {_code(names)} | {_cell(meaning)} |" for names, meaning in records]
    kind = "argument" if heading == "Arguments" else "option"
    return ["", f"## {heading}", "", f"| {kind} | meaning |", "|---|---|", *rows]


def _code(text: str) -> str:
    return f"<code>{_cell(text)}</code>"


def _cell(text: str) -> str:
    text = html.escape(" ".join(text.split()))
    return text.replace("|", "&#124;").replace("*", "&#42;").replace("[", "&#91;")


def _flag(action) -> str:
    return " ".join(filter(None, (", ".join(action.option_strings), action.metavar)))


def _plain_pipes(code: re.Match) -> str:
    """Return code of a table cell without backslashes: the repository's page needs ``\\|``, and MkDocs would show it."""
    return code[0].replace("\\|", "|")
