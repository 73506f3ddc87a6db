"""Recipes of Megatron-Bridge are read as runs: as the real package evaluated them once, and does so nightly."""

from __future__ import annotations

import json
import os
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.training")

import packages
from consumer_models import HIDDEN, INNER, LAYERS, VOCABULARY, configuration
from lanes import nightly

from megatron_pipemem.model import layout
from megatron_pipemem.model.model import Model
from megatron_pipemem.tools.advise import programs
from megatron_pipemem.tools.advise.advice import advise
from megatron_pipemem.tools.advise.consumers import BRIDGE
from megatron_pipemem.tools.advise.programs import evaluate, run_of
from megatron_pipemem.tools.advise.reading import Context
from megatron_pipemem.tools.advise.shell import training_command
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import known_model, load
from megatron_pipemem.tools.megatron import bridge_recipe
from megatron_pipemem.tools.megatron.bridge_recipe import _change, _changed, _provider, evaluated
from megatron_pipemem.tools.megatron.known_flags import known_flags
from megatron_pipemem.tools.planner.pricing import as_it_stands
from tests.watching.refusals import refused

H100 = load("h100-80g", Cluster)
OWN = "own_recipe:small_llama"
RECORDED = Path(__file__).parent / "recipes.json"


@pytest.fixture
def recipes() -> dict[str, dict]:
    return {facts["asked"]: facts for facts in json.loads(RECORDED.read_text())}


@nightly("the tests below read what is recorded")
def test_the_real_package_says_what_is_recorded(tmp_path, monkeypatch, recipes):
    """If the recipes of a newer one differ: ``RECORDED.write_text(json.dumps(found, indent=1))``."""
    configuration("llama", tied=False).save_pretrained(tmp_path)
    path = [str(Path(__file__).parent / "bridge_packages"), *packages.consumers(), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MODEL_FOLDER", str(tmp_path))
    recipe_facts = [*evaluate(recipes)]
    for facts in recipe_facts:
        facts.get("values", {}).pop("hf_model_id", None)
        if "names" in facts:
            facts["names"] = [name for name in facts["names"] if name.startswith("llama31_405b")]
    assert recipe_facts == [*recipes.values()]


def run(facts: dict, devices: int | None = None):
    return run_of(facts, Context(known_flags(), H100, devices)).run


def test_sizes_of_a_known_model_come_from_its_file_and_the_cut_from_the_recipe(recipes):
    reading = run(recipes["llama31_405b_sft_config"])
    cut = reading.parallelism
    assert reading.model == replace(load("llama3.1-405b", Model), sequence=2048, source="")
    assert (cut.tp, cut.pp, cut.dp, cut.cp, cut.chunks, cut.microbatches) == (8, 16, 1, 1, None, 16)
    assert cut.sequence_parallel and reading.precision == "bf16" and reading.parallelism.ranks == 128


def test_chunks_and_context_parallel_ranks_are_read(recipes):
    cut = run(recipes["llama3_70b_pretrain_config"]).parallelism
    assert (cut.tp, cut.pp, cut.dp, cut.cp, cut.chunks, cut.microbatches) == (4, 4, 1, 2, 5, 512)


def test_whole_experts_are_read(recipes):
    cut = run(recipes["qwen3_235b_a22b_sft_64gpu_h100_bf16_config"]).parallelism
    assert (cut.tp, cut.pp, cut.ep, cut.etp) == (4, 16, 4, 1)


def test_a_layout_is_written_as_its_flag(recipes):
    flag = run(recipes["deepseek_v3_pretrain_config"]).flags[layout.FLAG]
    assert layout.read(flag) == (4,) * 15 + (2,)  # a layer and one of multi-token prediction
    assert flag.startswith("Etttt|tttt|") and flag.endswith("|tmL")


def test_a_recipe_of_a_user_has_the_sizes_that_megatron_bridge_reads(recipes):
    reading = run(recipes[OWN], devices=4)
    model, cut = reading.model, reading.parallelism
    assert (model.layers, model.hidden, model.ffn, model.vocabulary) == (LAYERS, HIDDEN, INNER, VOCABULARY)
    assert (model.heads, model.kv_heads, model.activation, model.norm, model.tied) == (4, 2, "swiglu", "rmsnorm", False)
    assert (model.position, model.bias, model.sequence) == ("rope", "none", 32)
    assert (cut.pp, cut.dp, cut.microbatches) == (2, 2, 4)


def test_defaults_of_a_provider_are_sizes(recipes):
    """A hybrid model's class has no biases, no positions, RMSNorm and an output layer of its own; the recipe names none."""
    facts = recipes["nemotron_3_nano_pretrain_config"]
    known = known_model(facts["tokenizer"])
    one_group = {"router_groups": 1, "router_groups_per_token": 1}
    assert run(facts).model == replace(known, sequence=8192, source="", **one_group)
    assert (known.bias, known.position, known.norm, known.tied) == ("none", "none", "rmsnorm", False)


def test_settings_are_what_differs_from_megatron():
    """Only a provider whose sizes are in a file of this package has no others."""
    megatrons = make_dataclass("Config", [("bias", bool, True), ("heads", int, 1)], module="megatron.core.config")
    provider = make_dataclass("Provider", [("bias", bool, False), ("position", str, "none")], bases=(megatrons,))
    settings = provider(heads=2)
    assert _changed(settings) == {"bias": False, "heads": 2, "position": "none"}
    settings.known_model = "llama"
    assert _changed(settings) == {"heads": 2}


def test_defaults_of_a_mixed_precision_are_not_those_of_megatron():
    """Megatron-Bridge's default recipe of fp8 is tensorwise, Megatron's is delayed, and both leave it out."""
    fields = [("fp8", str, None), ("fp8_recipe", str, "tensorwise"), ("num_layers_at_end_in_bf16", int, 0)]
    precision = make_dataclass("Precision", fields)
    for fp8, expected in (("hybrid", {"fp8": "hybrid", "fp8_recipe": "tensorwise", fields[2][0]: 0}), (None, {})):
        config = recipe_config()
        config.mixed_precision = precision(fp8=fp8)
        values = evaluated(lambda config=config: config)["values"]
        assert {name: value for name, value in values.items() if name != "seq_length"} == expected


def test_a_vision_tower_is_priced_with_the_images_of_the_recipe(recipes):
    reading = run_of(recipes["qwen25_vl_72b_sft_32gpu_h100_bf16_config"], Context(known_flags(), H100))
    tower = reading.run.model.tower
    assert (tower.layers, tower.images, tower.patches, reading.run.execution.frozen) == (32, 1, 1024, ())
    assert "--images" in " ".join(reading.assumed)
    counts = advise(reading.run, names=("zb-h1",)).proposals["same memory"].step.layers
    assert counts[0] < 20 and sum(counts) == 80


def test_mock_images_and_frozen_parts_are_those_of_the_recipe(recipes):
    facts = recipes["qwen3_vl_235b_a22b_pretrain_256gpu_h100_bf16_mock_config"]
    reading = run_of(facts, Context(known_flags(), H100, images=3))
    tower = reading.run.model.tower
    assert (tower.images, tower.patches, reading.run.execution.frozen) == (3, 256 * 256 // 16**2, ("language", "tower"))
    assert "--images" not in " ".join(reading.assumed)
    assert reading.run.parallelism.etp == 1  # Megatron-Bridge's default where experts are spread


def test_a_tower_is_read_from_the_sizes_of_hugging_face(recipes):
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 24, "patch": 4, "frames": 2, "merge": 4, "deepstack": 1}
    facts = recipes[OWN] | {"tower": sizes}
    tower = run(facts, devices=4).model.tower
    assert (tower.layers, tower.deepstack, tower.shared) == (2, 1, False)
    with refused("unsupported-model", "tower.patch"):
        run(facts | {"tower": {name: size for name, size in sizes.items() if name != "patch"}}, devices=4)


def test_adapters_leave_w_almost_nothing(recipes):
    facts = recipes["llama31_70b_peft_config"]
    reading = run(facts, 32)
    assert (reading.execution.adapters, reading.execution.frozen) == (16, ("language",))
    costs = as_it_stands(replace(reading, parallelism=replace(reading.parallelism, pp=4, tp=2))).step.costs
    assert 0 < costs.backward_weight[1] < 0.1 * costs.backward_input[1]
    with refused("unsupported-model", "Prompts"):
        run(facts | {"adapters": "Prompts", "rank": None})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama31_405b_sft_confg", ("unknown-recipe", "bridge:llama31_405b_sft_config")),
    ],
)
def test_recipes_that_are_no_run_are_refused(recipes, name, told):
    with refused(*told):
        run(recipes[name])


def recipe_config() -> SimpleNamespace:
    def layout(ranks: int, chunks: int | None) -> str:
        return f"{ranks}x{chunks}"

    model = SimpleNamespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, seq_length=8)
    model.pipeline_model_parallel_layout, model._pipeline_model_parallel_layout_builder = "4x2", layout
    dataset, train = SimpleNamespace(seq_length=8), SimpleNamespace(global_batch_size=1, micro_batch_size=1)
    return SimpleNamespace(mixed_precision=None, model=model, dataset=dataset, train=train)


@pytest.mark.parametrize(
    ("name", "module"),
    [("llama3-8b", "gpt_provider"), ("deepseek-v3", "mla_provider"), ("nemotron-h-8b", "hybrid_provider")],
)
def test_a_known_model_has_the_provider_of_its_class(monkeypatch, name, module):
    def imported(path: str) -> SimpleNamespace:
        classes = (class_name for _, class_name in bridge_recipe._PROVIDERS.values())
        return SimpleNamespace(**{kind: partial(SimpleNamespace, path=path) for kind in classes})

    monkeypatch.setattr(bridge_recipe, "import_module", imported)
    model = load(name, Model)
    provider = _provider(model)
    assert provider.path.endswith(module)
    assert getattr(provider, layout.PATTERN_ARGUMENT, None) == model.pattern


def test_a_hybrid_model_gets_no_virtual_stages(recipes):
    """Megatron-Bridge's provider refuses them."""
    facts = recipes["llama3_70b_pretrain_config"]
    patterned = facts | {"values": facts["values"] | {layout.PATTERN_ARGUMENT: "*-" * 80, "num_layers": 160}}
    gpt, hybrid = (run_of(own, Context(known_flags(), H100)) for own in (facts, patterned))
    assert gpt.consumer is BRIDGE and hybrid.run.model.pattern == "*-" * 80
    assert hybrid.consumer.families == ("1f1b", "zb-h1", "gis")


def test_files_and_overrides_change_a_recipe(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("train: {global_batch_size: 32, micro_batch_size: 2}\ndataset: {seq_length: 16}\n")
    config = recipe_config()
    _change(config, [str(file), "train.global_batch_size=64", "++model.pipeline_model_parallel_size=8"])
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.model.seq_length) == (64, 2, 16)
    assert config.model.pipeline_model_parallel_layout == "8x2"
    _change(config, ["model.pipeline_model_parallel_layout=Et|tL", "model.virtual_pipeline_model_parallel_size=null"])
    assert config.model.pipeline_model_parallel_layout == "Et|tL"
    with pytest.raises(AttributeError, match="train.batch"):
        _change(config, ["train.batch=3"])


RUN_RECIPE = """
torchrun --nproc_per_node=8 --nnodes=$N scripts/training/run_recipe.py --model llama31_405b --mode sft -pp 8 --lr 1e-4 \\
    --seq_length=1024 train.global_batch_size=64 checkpoint.save=$SAVE --dry-run
"""


def test_a_script_that_runs_a_recipe_is_read(recipes, monkeypatch):
    asked = []

    def evaluate(names, changes):
        asked.extend([*names, *changes])
        return [recipes["llama31_405b_sft_config"]]

    monkeypatch.setattr(programs, "evaluate", evaluate)
    context = Context(known_flags(), H100)
    command = training_command(RUN_RECIPE, {"N": "32"})
    reading = programs.read_program(command.words, context)
    assert asked == [
        "llama31_405b_sft_config",
        *("model.pipeline_model_parallel_size=8", "dataset.seq_length=1024", "train.global_batch_size=64"),
    ]
    assert reading.run.parallelism.ranks == 256 and reading.consumer is BRIDGE
    with refused("unknown-size", "--recipe", "WHICH=VALUE"):
        text = RUN_RECIPE.replace("--model llama31_405b", "--recipe $WHICH")
        programs.read_program(training_command(text).words, context)


def test_what_cannot_change_a_recipe_is_refused(tmp_path):
    context = Context(known_flags(), H100)
    with refused("no-file", "none.yaml"):
        programs.read_recipe("llama31_405b_sft", context, [str(tmp_path / "none.yaml")])
    with refused("bad-syntax", "tp4"):
        programs.read_recipe("llama31_405b_sft", context, ["tp4"])
