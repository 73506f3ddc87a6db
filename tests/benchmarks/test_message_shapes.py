"""The count of messages and waits: what the documentation says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]


def test_all_shapes_of_a_step_take_one_message_and_one_wait(benchmark, tmp_path):
    output = tmp_path / "counts.json"
    benchmark("message_shapes.py", "--output", output)
    rows = {(row["schedule"], row["engine"]): row for row in json.loads(output.read_text())}
    for schedule, payloads in (("1f1b", 2 * 3 * 16), ("interleaved", 2 * 7 * 16)):
        stock, headers, ours = (rows[schedule, engine] for engine in ("stock", "pipemem, headers", "pipemem"))
        assert (ours["messages"], ours["collectives"], ours["waits"]) == (payloads, 1, 1)
        assert (headers["messages"], headers["collectives"]) == (2 * payloads, 0)
        assert stock["messages"] == 2 * payloads and min(stock["waits"], headers["waits"]) > 30
    told = re.search(
        r"a host waits once in a step of 16 microbatches on 4 ranks, and (\d+) times by stock 1F1B",
        " ".join((ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split()),
    )
    assert int(told[1]) == rows["1f1b", "stock"]["waits"]
