"""The explorer's page: served on this machine, or written as a file that computes in the browser."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import megatron_pipemem
from megatron_pipemem.errors import ConfigError, UnsupportedError
from megatron_pipemem.files import write_whole
from megatron_pipemem.tools.explore.answers import CONTROLS, NAMES, explore_data, explore_json, summary_of
from megatron_pipemem.tools.report.page import filled

HOST = "127.0.0.1"
PYODIDE_VERSION = "314.0.7"
PYODIDE_URL = f"https://cdn.jsdelivr.net/npm/pyodide@{PYODIDE_VERSION}/"
_OF_PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
_CORE = ("", "schedule/", "families/", "search/", "features/", "features/*/", "choose/")
_SOURCES = (*_CORE, "tools/", "tools/report/", "tools/explore/")
"""Folders whose modules answer queries. Those that run schedules are mostly in other folders."""
_TITLE = "Explore pipeline schedules"

Groups = Mapping[str, Sequence[str]]
"""Names of schedules by the heading under which the page lists them."""


def explorer_page(groups: Groups, pyodide: str | None = None, home: str | None = None) -> str:
    """Return the page as HTML. It asks its server, or computes in the browser if ``pyodide`` is given.

    ``pyodide`` is the URL of the folder with Pyodide, and ``home`` that of the documentation, to which the page then
    links. Both may be relative to the page.
    """
    engine: dict[str, object] = {"defaults": NAMES, "controls": [control._asdict() for control in CONTROLS]}
    if pyodide is not None:
        engine |= {"pyodide": pyodide, "package": base64.b64encode(_package()).decode(), "worker": _part("worker.js")}
    engine["groups"] = {heading: [(name, summary_of(name)) for name in names] for heading, names in groups.items()}
    controls = _part("explore.html").replace("@ENGINE@", escape(json.dumps(engine)))
    back = "" if home is None else f'<a href="{escape(home)}">&larr; Documentation</a>'
    controls = controls.replace("@HOME@", back)
    style, script = _part("explore.css"), _part("explore.js")
    return filled(explore_data({}), _TITLE, _TITLE, controls=controls, style=style, script=script)


def export(folder: Path, groups: Groups, pyodide: Path | None) -> Path:
    """Write a page that computes in the browser into a folder, and return the file of the page.

    ``pyodide`` is the local folder of Pyodide's package, which is copied. With ``None``, the page loads Pyodide from
    its public address. Raise a ConfigError if the folder lacks a file of Pyodide.
    """
    if pyodide is None:
        return write_whole(folder / "index.html", explorer_page(groups, PYODIDE_URL))
    if missing := [name for name in _OF_PYODIDE if not (pyodide / name).is_file()]:
        raise ConfigError(
            "wrong-file", f"has no {missing[0]}; give node_modules/pyodide of `npm install pyodide`", file=pyodide
        )
    for name in _OF_PYODIDE:
        write_whole(folder / "pyodide" / name, (pyodide / name).read_bytes())
    return write_whole(folder / "index.html", explorer_page(groups, "pyodide/"))


def _package() -> bytes:
    """Return the parts of this package that answer queries, as a zip archive with the same bytes every time."""
    root, archive = Path(megatron_pipemem.__file__).parent, io.BytesIO()
    with ZipFile(archive, "w", ZIP_DEFLATED) as written:
        for path in sorted(path for folder in _SOURCES for path in root.glob(f"{folder}*.py")):
            written.writestr(ZipInfo(str(path.relative_to(root.parent))), path.read_bytes(), ZIP_DEFLATED)
    return archive.getvalue()


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


class ExplorerServer(ThreadingHTTPServer):
    """Serve the page and its answers on the loopback interface, which other machines cannot reach.

    Port 0 takes a free port. A port that is in use raises an UnsupportedError.
    """

    daemon_threads = True

    def __init__(self, port: int, groups: Groups) -> None:
        self.page = explorer_page(groups)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UnsupportedError(
                "busy", f"cannot serve on port {port}: {error.strerror}; give another --port"
            ) from error

    def handle_error(self, request: object, client_address: object) -> None:
        """Report errors, except of browsers that close a connection early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        # A page of another site could reach this server under a name of its own that leads to 127.0.0.1.
        if self.headers.get("Host", "").removesuffix(f":{self.server.server_port}") not in (HOST, "localhost"):
            self.send_error(403)
        elif address.path == "/":
            self._send("text/html", self.server.page)
        elif address.path == "/data":
            self._send("application/json", explore_json(address.query))
        else:
            self.send_error(404)

    def _send(self, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the terminal is the user's."""
