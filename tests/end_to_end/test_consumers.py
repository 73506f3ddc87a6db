"""Programs that build and train models of Megatron-Core by themselves: their own packages, and the shapes of their calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import packages
import pytest
from consumer_models import write_model
from lanes import nightly, rest_nightly
from ranks import WARM, ConductedRanks

SCHEDULES = {"zb-h1": {}, "interleaved": {"chunks": 2}, "v-half": {"chunks": 2, "placed": True}}
STOCK = {"schedule": "stock", "chunks": None, "placed": False, "ranks": 2}
RECIPES = {"pretrain": "own_recipe:small_llama", "finetune": "bridge_recipe:llama"}
HYBRID = {"loop": "pretrain", "recipe": "own_recipe:small_hybrid", "weights": None, "steps": 3}
STATEMENTS = {
    "zb-h1": 'megatron_pipemem.enable("zb-h1")',
    "v-half": "import bridge_recipe; bridge_recipe.change(config)",
}
PACKAGES = [str(Path(__file__).parents[up] / folder) for up, folder in ((1, "advise/bridge_packages"), (2, "examples"))]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Callable[..., dict]]:
    """``run(program, case)``: what the last rank returns; equal requests are served from memory."""
    folder, path = tmp_path_factory.mktemp("consumers"), [*PACKAGES, *packages.consumers(), packages.MAMBA]
    preload = ("sitecustomize", *WARM, "consumer_programs")
    ranks = ConductedRanks("consumer_programs", folder, path, preload=preload)
    results: dict[str, dict] = {}

    def call(program: str, **case) -> dict:
        case = {"program": program, **STOCK, **case}
        if repr(case) not in results:
            results[repr(case)] = ranks.run(case, size=case["ranks"])[-1]
        return results[repr(case)]

    yield call
    ranks.stop()


@pytest.fixture
def verl(tmp_path) -> Iterator[Callable[..., dict]]:
    """``verl(case)``: what the last rank of verl's worker returns."""
    preload = ("sitecustomize", *WARM)
    ranks = ConductedRanks("consumer_programs", tmp_path, [*PACKAGES, *packages.verl()], size=2, preload=preload)
    yield lambda **case: ranks.run({"program": "verl-worker", **STOCK, **case})[-1]
    ranks.stop()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("weights")
    made = {kind: write_model(folder / kind, kind, tied) for kind, tied in (("llama", False), ("qwen2", True))}
    return made | {"llama-80": write_model(folder / "80", "llama", False, 80)}


@pytest.mark.parametrize(
    ("schedule", "kind"), [("zb-h1", "llama"), ("v-half", "llama"), ("interleaved", "qwen2"), ("v-half", "qwen2")]
)
def test_mbridge_loads_trains_and_exports_as_under_stock(run, models, schedule, kind):
    """Log-probabilities and weights to the bit, with another number of microbatches, of other lengths, in every step."""
    stock = run("mbridge", **models[kind])
    ours = run("mbridge", schedule=schedule, **SCHEDULES[schedule], **models[kind])
    assert stock["wrong"] == ours["wrong"] == []
    assert [len(seen) for seen in ours["seen"]] == [6, 6, 2, 2, 4, 4]
    assert ours == stock


def test_chunks_that_were_not_placed_are_refused_in_the_first_step(run, models):
    failure = run("mbridge", schedule="v-half", chunks=2, **models["llama"])["failure"]
    assert "was not built for placement v" in failure and "place_model_chunks()" in failure


@pytest.mark.parametrize(("schedule", "kind"), [("zb-h1", "qwen2"), ("v-half", "llama")])
def test_megatron_bridge_loads_trains_and_exports_as_under_stock(run, models, schedule, kind):
    stock = run("megatron-bridge", by_provider=True, **models[kind])
    how = SCHEDULES[schedule] | {"placed": False}
    ours = run("megatron-bridge", schedule=schedule, by_provider=schedule != "v-half", **how, **models[kind])
    assert stock["wrong"] == ours["wrong"] == []
    assert ours == stock


def test_adapters_train_as_under_stock(run, models):
    """W computes the weight gradients of the adapters alone."""
    how = {"adapters": True, "by_provider": True, **models["llama"]}
    stock, whole = run("megatron-bridge", **how), run("megatron-bridge", by_provider=True, **models["llama"])
    assert stock["wrong"] != whole["wrong"] == [] and stock["trained"] != whole["trained"]
    assert run("megatron-bridge", **how, schedule="zb-h1") == stock


def bridge_loop(run, loop: str, model: dict, statements: str = "", steps: int = 3, ranks: int = 2) -> dict:
    case = {"loop": loop, "recipe": RECIPES[loop], "statements": statements, "steps": steps, "ranks": ranks}
    return run("bridge-loop", **case, **model)


@pytest.mark.parametrize(
    ("loop", "schedule"),
    rest_nightly(
        [("finetune", "v-half"), ("pretrain", "zb-h1")],
        [("finetune", "v-half")],
        "the other loop, which is the same but for its data",
    ),
)
def test_megatron_bridges_own_loops_train_as_under_stock(run, models, loop, schedule):
    """From weights of Hugging Face. A batch of ``finetune`` has its own length; both loops evaluate."""
    stock = bridge_loop(run, loop, models["llama"])
    assert len(stock["training"]) == 3 and len(set(map(repr, stock["training"]))) == 3 and stock["evaluation"]
    assert bridge_loop(run, loop, models["llama"], STATEMENTS[schedule]) == stock


@pytest.mark.parametrize(
    ("schedule", "cut"), [("zb-h1", ""), ("gis", 'config.model.hybrid_layer_pattern = "M*-GM-|G*"; ')]
)
def test_a_hybrid_provider_trains_as_under_stock(run, schedule, cut):
    """Layers with states, in Megatron-Bridge's own loop, also cut by a statement like those that advise prints."""
    stock = run("bridge-loop", statements=cut, **HYBRID)
    assert len(set(map(repr, stock["training"]))) == 3 and stock["evaluation"]
    assert run("bridge-loop", statements=f'{cut}megatron_pipemem.enable("{schedule}")', **HYBRID) == stock


@nightly("test_megatron_bridges_own_loops_train_as_under_stock, with statements in the same form")
def test_statements_that_advise_prints_for_a_recipe_train(run, models):
    """All 80 layers of the recipe, each of them narrow."""
    path = os.pathsep.join([*PACKAGES, *packages.consumers(), os.environ.get("PYTHONPATH", "")])
    command = "-W ignore -m megatron_pipemem advise bridge:llama31_70b_sft --json".split()
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    advice = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
    added = [[*filter(None, [way["call"]]), *way["add"]] for way in json.loads(advice.stdout)["ways"].values() if way]
    ways = ["; ".join(statements) for statements in added if statements]
    names = " ".join(ways)
    assert len(ways) == 4 and all(name in names for name in ("zb-h1", "gis", "zbv", "parallel_layout"))
    stock = bridge_loop(run, "finetune", models["llama-80"], steps=2, ranks=4)
    for statements in ways:
        assert bridge_loop(run, "finetune", models["llama-80"], statements, steps=2, ranks=4) == stock, statements


BOTH = ("freeze_language_model", "freeze_vision_model")
VISION = {"tied": False, "deepstack": 1, "frozen": ()}


@pytest.mark.parametrize(
    ("schedule", "case"),
    rest_nightly(
        [
            ("zb-h1", {}),
            ("v-half", {}),
            ("zb-h1", {"deepstack": 2, "tied": True}),
            ("v-half", {"frozen": BOTH}),
            ("zbv", {"settings": {"offload": "full"}}),
        ],
        [("zb-h1", {}), ("v-half", {})],
        "the same model with another schedule, or test_consumers with a language model",
    ),
)
def test_a_vision_language_model_trains_as_under_stock(run, schedule, case):
    """Qwen3-VL of Megatron-Bridge: losses, weights and gradients to the bit, with a microbatch without an image.

    Stock cannot build it with several chunks, because its provider keeps the chunk's number to itself.
    """
    model = VISION | case
    settings = model.pop("settings", {})
    stock = run("vision", **model)
    assert len(set(stock["losses"])) == 16
    trained = [gradient for name, (_, gradient) in stock["weights"].items() if "vision_model" in name]
    assert trained and ("zeros" not in trained)
    chunks = None if schedule == "zb-h1" else 2
    ours = run("vision", **model, schedule=schedule, chunks=chunks, settings=settings)
    assert ours == stock


@pytest.mark.parametrize(
    ("schedule", "settings", "code"),
    [
        ("zb-h1", {"vocab_cut": 1}, "vocabulary-model"),
        ("seq1f1b", {"options": {"slices": 2}}, "slices-model"),
    ],
)
@nightly("planner/test_tower.py, which refuses both before ranks start")
def test_a_vision_language_model_stays_whole(run, schedule, settings, code):
    assert run("vision", **VISION, schedule=schedule, settings=settings)["code"] == code


@pytest.mark.parametrize(
    ("program", "schedule"),
    [
        *(("verl", "v-half"), ("slime", "interleaved"), ("ms_swift", "v-half")),
        ("nemo_rl", "zb-h1"),  # it passes one model and one iterator
    ],
)
def test_calls_as_programs_make_them_bring_what_stock_brings(run, program, schedule):
    stock = run(program)
    assert len(stock["seen"]) == (2 if program == "slime" else 4) and all(stock["seen"])
    assert run(program, schedule=schedule, **SCHEDULES[schedule]) == stock


@nightly("test_calls_as_programs_make_them_bring_what_stock_brings, with the calls of this worker")
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", None), ("gis", 2)])
def test_verls_own_worker_trains_as_under_stock(verl, models, schedule, chunks):
    """Packed sequences in dynamic microbatches, in bf16: log-probabilities, metrics and exported weights to the bit."""
    stock = verl(chunks=chunks, **models["llama"])
    assert len(set(map(repr, stock["seen"]))) == 4
    assert verl(schedule=schedule, chunks=chunks, **models["llama"]) == stock
