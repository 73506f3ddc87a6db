"""Programs that build and train models of Megatron-Core by themselves: their own packages, and the shapes of their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import packages
import pytest
from consumer_models import write_model
from lanes import rest_nightly
from ranks import WARM, ConductedRanks

LINEAR = {"placement": "linear", "seconds": 0.2}
SCHEDULES = {
    "1f1b": {},
    "zb-h1": {},
    "zb-auto": {},
    "auto": {"settings": {"options": LINEAR}},
    "interleaved": {"chunks": 2},
    "v-half": {"chunks": 2, "placed": True},
}
STOCK = {"schedule": "stock", "chunks": None, "placed": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Callable[..., dict]]:
    """``run(program, case)``: what the last of two ranks returns; equal requests are served from memory."""
    folder = tmp_path_factory.mktemp("consumers")
    preload = (*WARM, "consumer_programs")
    ranks = ConductedRanks("consumer_programs", folder, packages.consumers(), size=2, preload=preload)
    known: dict[str, dict] = {}

    def call(program: str, **case) -> dict:
        case = {"program": program, **STOCK, **case}
        if repr(case) not in known:
            known[repr(case)] = ranks.run(case)[-1]
        return known[repr(case)]

    yield call
    ranks.stop()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("weights")
    return {kind: write_model(folder / kind, kind, tied) for kind, tied in (("llama", False), ("qwen2", True))}


@pytest.mark.parametrize(
    ("schedule", "kind"),
    rest_nightly(
        [*((name, "llama") for name in SCHEDULES), *((name, "qwen2") for name in ("zb-h1", "interleaved", "v-half"))],
        [("zb-h1", "llama"), ("auto", "llama"), ("v-half", "llama"), ("interleaved", "qwen2"), ("v-half", "qwen2")],
        "the other model, or a schedule of the same placement",
    ),
)
def test_mbridge_loads_trains_and_exports_as_under_stock(run, models, schedule, kind):
    """Log-probabilities and weights to the bit, with another number of microbatches, of other lengths, in every step."""
    stock = run("mbridge", **models[kind])
    ours = run("mbridge", schedule=schedule, **SCHEDULES[schedule], **models[kind])
    assert stock["wrong"] == ours["wrong"] == []
    assert [len(seen) for seen in ours["seen"]] == [6, 6, 2, 2, 4, 4]
    assert ours == stock


def test_chunks_that_were_not_placed_are_refused_in_the_first_step(run, models):
    told = run("mbridge", schedule="v-half", chunks=2, **models["llama"])["told"]
    assert "was not built for placement v" in told and "place_model_chunks()" in told


@pytest.mark.parametrize(
    ("schedule", "kind"),
    rest_nightly(
        [("zb-h1", "qwen2"), ("interleaved", "llama"), ("v-half", "llama")],
        [("zb-h1", "qwen2"), ("v-half", "llama")],
        "the same with mbridge",
    ),
)
def test_megatron_bridge_loads_trains_and_exports_as_under_stock(run, models, schedule, kind):
    """It tells the ends of the model by the real ranks, so chunks of a V are built by its provider, one by one."""
    stock = run("megatron-bridge", by_provider=True, **models[kind])
    how = SCHEDULES[schedule] | {"placed": False}
    ours = run("megatron-bridge", schedule=schedule, by_provider=schedule != "v-half", **how, **models[kind])
    assert stock["wrong"] == ours["wrong"] == []
    assert ours == stock


def test_chunks_whose_ends_the_program_tells_by_real_ranks_are_refused(run, models):
    told = run("megatron-bridge", schedule="v-half", by_provider=True, **SCHEDULES["v-half"], **models["llama"])["told"]
    assert "where schedule v-half has" in told and "build_model_chunks()" in told


@pytest.mark.parametrize(
    ("program", "schedule"),
    rest_nightly(
        [
            *((name, each) for name in ("verl", "slime", "ms_swift") for each in ("zb-h1", "interleaved", "v-half")),
            ("verl", "auto"),  # a search has nothing to do with who calls
            ("nemo_rl", "zb-h1"),  # it passes one model and one iterator
        ],
        [("verl", "v-half"), ("slime", "interleaved"), ("ms_swift", "v-half"), ("nemo_rl", "zb-h1")],
        "the same calls with another placement",
    ),
)
def test_calls_as_programs_make_them_bring_what_stock_brings(run, program, schedule):
    stock = run(program)
    assert len(stock["seen"]) == (2 if program == "slime" else 4) and all(stock["seen"])
    assert run(program, schedule=schedule, **SCHEDULES[schedule]) == stock
