"""The explorer's page: served to this machine alone, or exported as one file."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest
from commands import pipemem

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.tools.cli.explore import schedule_groups
from megatron_pipemem.tools.explore.answers import explore_json
from megatron_pipemem.tools.explore.serving import _OF_PYODIDE, PYODIDE_URL, ExplorerServer, explorer_page


def get(server: ExplorerServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = HTTPConnection(*server.server_address)
    connection.request("GET", path, headers={"Host": host or f"localhost:{server.server_port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_server_answers_like_the_function(server):
    status, page = get(server, "/")
    assert status == 200 and "<script" in page and "http" not in re.sub(r"http://www\.w3\.org\S*", "", page)
    for query in ("", "a=zbv&p=4&m=6", "p=0", "a=%3Cscript%3E", "cap=.1&b="):
        assert get(server, f"/data?{query}") == (200, explore_json(query))
    assert get(server, "/data/../../etc/passwd")[0] == 404


def test_only_this_machine_is_served(server):
    """Neither another machine nor a page of another site whose name leads to this machine."""
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/data", f"rebound.example:{server.server_port}")[0] == 403
    with pytest.raises(UnsupportedError) as refused:
        ExplorerServer(server.server_port, schedule_groups())
    assert refused.value.code == "busy"


def test_the_command_serves_until_it_is_interrupted():
    command = [sys.executable, "-m", "megatron_pipemem", "explore", "--json"]
    # A shell that runs the tests in the background lets them ignore the signal.
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=interruptible, **pipes) as process:
        told = "".join(process.stdout.readline() for _ in range(3))
        host, port = re.fullmatch(r"http://(.+):(\d+)/", json.loads(told)["url"]).groups()
        connection = HTTPConnection(host, int(port))
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.stderr.read() == ""


def call(*words: object) -> tuple[int, str]:
    done = pipemem("explore", *map(str, words))
    return done.exit_code, done.stderr


def test_a_page_leads_back_to_its_documentation():
    pages = [explorer_page({}, home=home) for home in (None, "../index.html")]
    assert ["Documentation</a>" in page for page in pages] == [False, True] and '<a href="../index.html">' in pages[1]


def test_an_exported_page_is_one_file(tmp_path: Path):
    assert call("--export", tmp_path / "site") == (0, "note: open it in a browser\n")
    (page,) = (tmp_path / "site").iterdir()
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s&\"']+", text)) == {PYODIDE_URL}
    assert page.stat().st_size < 1_000_000


def test_an_exported_page_can_bring_pyodide(tmp_path: Path):
    package = tmp_path / "pyodide"
    package.mkdir()
    status, error = call("--export", tmp_path / "site", "--pyodide", package)
    assert status == 2 and error.endswith("[wrong-file]\n") and not (tmp_path / "site").exists()
    for name in _OF_PYODIDE:
        (package / name).write_text(name)
    assert call("--export", tmp_path / "site", "--pyodide", package) == (0, "note: open it in a browser\n")
    assert sorted(path.name for path in (tmp_path / "site" / "pyodide").iterdir()) == sorted(_OF_PYODIDE)
    assert "https://" not in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert call("--pyodide", package)[1].endswith("[needs-option]\n")
