"""Training loops that use megatron.core without megatron.training, whenever they imported the dispatcher."""

from __future__ import annotations

import pytest
from ranks import Ranks

pytest.importorskip("megatron.core")

SCHEDULES = {"1f1b": 1, "zb-h1": 1, "v-half": 2, "1f1b-v": 2, "auto": 2}
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
def losses(tmp_path_factory) -> list[list[str]]:
    ranks = Ranks("plain_loop", tmp_path_factory.mktemp("plain_loop"))
    try:
        return [ranks.run(case)[-1]["losses"] for case in CASES]
    finally:
        ranks.stop()


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i].values())))
def test_trains_as_stock(losses, index):
    stock = CASES.index({**STOCK, "ddp": CASES[index]["ddp"]})
    assert len(set(losses[stock])) > 10
    assert losses[index] == losses[stock]
