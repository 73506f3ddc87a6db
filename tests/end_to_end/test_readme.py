"""The bytes in the documents' table of the quickstart are those of its model. The rest: tests/scripts/test_readme.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lanes import nightly
from quickstart import MICROBATCHES, MODEL, TWO_CHUNKS, UNTIED

from megatron_pipemem.schedule.registry import family

ROOT = Path(__file__).parents[2]
QUICKSTART = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
TABLE = re.search(r"<!-- quickstart -->(.*?)<!-- end of quickstart -->", QUICKSTART, re.DOTALL)[1]
ROWS = [line.split() for line in TABLE.splitlines() if "%" in line]
SHAPE = [str(part) for pair in MODEL.items() for part in pair]


FULL_LANE = ("1f1b", "v-half")


@pytest.mark.parametrize(
    "row",
    [
        row if row[0] in FULL_LANE else pytest.param(row, marks=nightly("the same model, with bytes as predicted"))
        for row in ROWS
    ],
    ids=lambda row: "-".join(row[:2]),
)
def test_bytes_of_the_quickstart(train, row):
    name, engine, _, _, _, counted, _, megabytes, _, _ = row
    flags = [*SHAPE, "--global-batch-size", str(MICROBATCHES), "--train-iters", "1", "--clip-grad", "0"]
    if engine == "stock":
        flags += TWO_CHUNKS if name == "interleaved" else ()
        name = "stock"
    elif family(name).asynchronous:
        flags += UNTIED
    run = train(name, *flags, initialise=False)
    assert max(run.counted_peaks) == int(counted)
    assert f"{max(run.of_ranks('counted_weight_bytes')) / 1e6:.1f}" == megabytes
