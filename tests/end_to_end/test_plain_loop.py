"""Training loops that use megatron.core without megatron.training, whenever they imported the dispatcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

DEVICES = 4
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "v-half": 2, "1f1b-v": 2}
STOCK = {"schedule": "stock", "chunks": 1, "import_after": False}
CASES = [
    {**case, "ddp": ddp}
    for ddp in (True, False)
    for case in (
        STOCK,
        *(
            {"schedule": name, "chunks": chunks, "import_after": import_after}
            for name, chunks in SCHEDULES.items()
            for import_after in (False, True)
        ),
    )
]


@pytest.fixture(scope="module")
def losses() -> list[list[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("plain_loop.py")), json.dumps(CASES)]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(DEVICES)}
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(DEVICES)
    ]
    try:
        printed = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors[-3000:] for _, errors in printed)
    (line,) = [line for line in printed[-1][0].splitlines() if line.startswith("LOSSES ")]
    return json.loads(line.removeprefix("LOSSES "))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i].values())))
def test_trains_as_stock(losses, index):
    stock = CASES.index({**STOCK, "ddp": CASES[index]["ddp"]})
    assert len(set(losses[stock])) > 10
    assert losses[index] == losses[stock]
