"""The explorer's server, for tests over HTTP and in a browser."""

from __future__ import annotations

import threading

import pytest
from browsers import browser  # noqa: F401 - a fixture

from megatron_pipemem.tools.cli.explore import schedule_groups
from megatron_pipemem.tools.explore.serving import ExplorerServer


@pytest.fixture(scope="module")
def server():
    with ExplorerServer(0, schedule_groups()) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()
