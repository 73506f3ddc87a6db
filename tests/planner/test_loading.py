"""YAML into dataclasses: names, bases, overrides, errors that say where and what, and the shapes of public models."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
from refusals import refused

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model.arguments import arguments_of, model_of
from megatron_pipemem.model.counts import layer_parameters
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import (
    SHIPPED,
    _public_models,
    known_model,
    load,
    model_within,
    settings_of,
    typed,
    unpriced_part,
)
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.profile import from_formulas


@dataclass(frozen=True)
class Engine:
    config_folder: ClassVar[str] = "engines"

    power: int
    fuel: Literal["wood", "coal"] = "coal"
    shape: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.power < 1:
            raise ConfigError("bad-number", "has to be positive", key="power")


@dataclass(frozen=True)
class Train:
    engine: Engine
    spare: Engine | None = None
    flags: dict[str, Any] = field(default_factory=dict)


def total_parameters(model: Model) -> int:
    """Return the number of parameters of the whole model as its authors count them: a shared matrix once, no padding."""
    ends = model.hidden * (model.vocabulary * (1 if model.tied else 2) + (2 if model.norm == "layernorm" else 1))
    ends += model.hidden * model.sequence * (model.position == "learned")
    return sum(layer_parameters(model, Execution(), kind) for kind in model.all_kinds) + ends


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    write("engines/small.yaml", "power: 4\nshape: [[1, 2], [3]]")
    write("engines/broken.yaml", "power: strong")
    return write


def test_names_bases_and_overrides(write):
    write("engines/medium.yaml", "base: small\npower: 6")
    path = write("trains/local.yaml", "engine: small\nspare: {base: medium, fuel: wood}\nflags: {a: 1, b: [x]}")
    train = load(path, Train, ["engine.power=5", "flags.c={d: 1e3}"])
    assert train.engine == Engine(5, shape=((1, 2), (3,)))
    assert train.spare == Engine(6, "wood", ((1, 2), (3,)))
    assert train.flags == {"a": 1, "b": ["x"], "c": {"d": 1000.0}}


def test_a_path_of_the_repository_names_what_the_package_brings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("tiny-cpu", Run).parallelism.pp == 4
    with refused("no-file", "tiny-cpu", kind=ConfigError):
        load("configs/runs/tiny-cpu.yaml", Run)
    with refused("no-file", kind=ConfigError):
        load("configs/runs/mine.yaml", Run)


def test_a_file_changes_parts_of_its_base(write):
    write("trains/first.yaml", "engine: {base: small, fuel: wood}\nflags: {a: 1}")
    path = write("trains/second.yaml", "base: first.yaml\nengine: {power: 9}\nflags: {b: 2}")
    train = load(path, Train)
    assert train.engine == Engine(9, "wood", ((1, 2), (3,))) and train.flags == {"a": 1, "b": 2}
    replaced = write("trains/third.yaml", "base: first.yaml\nengine: small")
    assert load(replaced, Train).engine.fuel == "coal"


@pytest.mark.parametrize(
    ("text", "file", "key", "says"),
    [
        ("engine: smal", "trains/t.yaml", "engine", "did you mean 'small'"),
        ("engine: broken", "engines/broken.yaml", "power", "is 'strong'; give a whole number"),
        ("engine: {powr: 3}", "trains/t.yaml", "engine.powr", "did you mean 'power'"),
        ("engine: {power: 0}", "trains/t.yaml", "engine.power", "has to be positive"),
        ("engine: {power: 1, fuel: oil}", "trains/t.yaml", "engine.fuel", "give wood or coal"),
        ("engine: {power: 1}\nspare: 3", "trains/t.yaml", "spare", "give a name"),
        ("flags: {}", "trains/t.yaml", "engine", "is missing"),
        ("engine: {fuel: wood}", "trains/t.yaml", "engine.power", "is missing"),
        ("engine: no/such.yaml", "trains/t.yaml", "engine", "there is no file"),
        ("engine: {base: [1]}", "trains/t.yaml", "engine.base", "give the name of a file"),
        ("base: t.yaml", "trains/t.yaml", "base", "based on itself"),
        ("- engine", "trains/t.yaml", None, "not a mapping"),
        ("engine: [", "trains/t.yaml", None, "is not YAML"),
        ("engine: small\nengine: small", "trains/t.yaml", None, "duplicate"),
        ("flags: " + "[" * 3000, "trains/t.yaml", None, "is not YAML: line 1, column 57: nested more than 50 deep"),
        ("engine: null", "trains/t.yaml", "engine", "give a name or a mapping"),
        ("flags: [1]\nengine: small", "trains/t.yaml", "flags", "is [1]; give a mapping"),
        ("engine: {power: 1, shape: {a: 1}}", "trains/t.yaml", "engine.shape", "give a list of values"),
    ],
)
def test_errors_name_file_key_and_what_would_fit(write, tmp_path, text, file, key, says):
    with pytest.raises(ConfigError) as caught:
        load(write("trains/t.yaml", text), Train)
    assert Path(caught.value.file) == tmp_path / file
    assert caught.value.key == key and says in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("override", ["engine", "=3", "engine.=3", "engine=[1"])
def test_bad_overrides_are_named(write, override):
    with refused("not-yaml" if "[" in override else "bad-syntax", kind=ConfigError):
        load(write("trains/t.yaml", "engine: small"), Train, [override])


@pytest.mark.parametrize("kind", [Model, Cluster])
def test_shipped_files_load_and_name_their_sources(kind):
    assert len(sorted(path.stem for path in (SHIPPED / kind.config_folder).glob("*.yaml"))) >= 6
    for name in sorted(path.stem for path in (SHIPPED / kind.config_folder).glob("*.yaml")):
        loaded = load(name, kind)
        assert loaded.source if kind is Model else loaded.sources


# Billions of parameters as the papers and model cards name them. Papers round, and count the vocabulary in different ways.
SIZES = {
    "zb-1.5b": 1.5, "zb-6.2b": 6.2, "zb-14.6b": 14.6, "zb-28.3b": 28.3,
    "cm-9.6b": 9.6, "cm-21b": 21, "cm-38.5b": 38.5, "cm-98.5b": 98.5,
    "po-5.8b": 5.8, "po-10.5b": 10.5, "po-18.1b": 18.1, "po-42.9b": 42.9, "po-66.6b": 66.6, "po-83.8b": 83.8,
    "vocab-4b": 4, "vocab-10b": 10, "vocab-21b": 21, "vocab-7b": 7, "vocab-16b": 16, "vocab-30b": 30,
}  # fmt: skip
EXACT = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama3.1-405b": 405_853_388_800,
}
# In billions, and what the source counts: DeepSeek the model without multi-token prediction (arXiv 2412.19437), GLM without
# embedding and head (arXiv 2508.06471, table 1), the hub's files of Kimi-K2 with .06 of scales (the model's file tells why its
# report says 1040), OpenAI's and NVIDIA's cards everything.
PUBLISHED = {
    "deepseek-v3": (671, {"mtp_layers": 0}), "glm-4.5": (355, {"vocabulary": 1}), "kimi-k2": (1026.47, {}),
    "gpt-oss-120b": (116.83, {}), "nemotron-h-8b": (8.1, {}),
}  # fmt: skip


def test_shapes_have_the_parameters_they_are_named_after():
    for name, billions in SIZES.items():
        assert total_parameters(load(name, Model)) / 1e9 == pytest.approx(billions, rel=0.12), name
    for name, (billions, counted) in PUBLISHED.items():
        assert total_parameters(replace(load(name, Model), **counted)) / 1e9 == pytest.approx(billions, rel=0.005), name
    for name, count in EXACT.items():
        assert total_parameters(load(name, Model)) == count, name
    # What the report of Kimi-K2 says would be a layer of experts more, in place of the dense one.
    assert total_parameters(replace(load("kimi-k2", Model), moe_layer_freq=1)) / 1e12 == pytest.approx(1.04, abs=0.005)
    # Gemma has a second pair of norms per layer, which Megatron's layer has not.
    assert total_parameters(load("gemma2-9b", Model)) == 9_241_705_984 - 42 * 2 * 3584


NAMED = {name: float(said[1]) for name in _public_models()["shapes"] if (said := re.search(r"-(\d+(?:\.\d+)?)b", name))}


@pytest.mark.parametrize("name", NAMED)
def test_a_shape_has_the_parameters_of_its_name(name):
    model = known_model(name)
    parts = from_formulas(model, Execution(), load("h100-80g", Cluster))
    count = sum(parts.layers[kind].parameters for kind in model.kinds) + parts.first.parameters
    count += 0 if model.tied else parts.last.parameters
    assert 0.93 < count / 1e9 / NAMED[name] < 1.34  # names leave out embeddings, or round down


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", 94),
        ("/models/Meta-Llama-3.1-8B-Instruct/", 32),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32),
        ("deepseek-ai/DeepSeek-V3-0324", 61),
        ("someone/deepseek-v3-5layer", None),
        ("Qwen/Qwen3-VL-8B", 36),
        ("Qwen/Qwen3.5-9B-Base", 32),
        ("zai-org/GLM-5.2", 78),
        ("deepseek-ai/DeepSeek-V4-Flash", None),
    ],
)
def test_names_with_the_same_shape(name, layers):
    model = known_model(name)
    assert (model and model.layers) == layers


def test_parts_without_a_price_are_named():
    assert unpriced_part("zai-org/GLM-4.6V") == "a vision tower of another kind"
    assert unpriced_part("Qwen/Qwen3-VL-8B-Instruct") is unpriced_part("Qwen/Qwen3-8B") is None


@pytest.mark.parametrize("name", sorted(_public_models()["shapes"]))
def test_the_arguments_of_a_model_give_the_model(name):
    model = known_model(name)
    assert model is not None
    assert typed(settings_of(model), Model) == model
    arguments = {key: value for key, value in arguments_of(model).items() if value is not None}
    assert model_of(SimpleNamespace(**arguments), tower=model.tower, source=model.source).kinds == model.kinds


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("run_qwen3_30b_a3b_sft", "qwen3-30b-a3b"),
        ("run_moonlight16b_a3b_gsm8k", "moonlight-16b-a3b"),
        ("deepseek-v3-config-verl", "deepseek-v3"),
        ("Qwen2.5-7B-Instruct-ours", "qwen2.5-7b"),
        ("run_qwen3_8b_vl", None),
        ("qwen3-8b-pruned-6b", None),
        ("train_deepseek_v3", None),
        ("run_qwen30b", None),
        ("deepseek-v3-5layer", None),
        ("", None),
    ],
)
def test_a_model_in_a_longer_name(name, model):
    assert model_within(name) == model


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("layers: 16", "unknown-key", ("layers", "num_layers")),
        ("dense_layers: 1", "unknown-key", ("dense_layers", "moe_layer_freq")),
        ("num_layer: 16", "unknown-key", ("num_layers",)),
        ("num_layers: true", "bad-type", ("num_layers",)),
        ("num_layers: x", "bad-number", ("num_layers", "x")),
        ("num_layers: 0", "bad-number", ("num_layers",)),
        ("swiglu: 1", "bad-type", ("swiglu",)),
        ("normalization: L2", "bad-choice", ("normalization", "RMSNorm")),
        ("num_attention_heads: 3", "does-not-divide", ("num_attention_heads", "kv_channels")),
        ("attention_dropout: 0.1", "unsupported-setting", ("hidden_dropout",)),
        ("position_embedding_type: yarn", "unsupported-setting", ("position_embedding_type", "yarn", "rope")),
        ("kv_lora_rank: 8", "unsupported-setting", ("kv_lora_rank",)),
        ("hidden_size: null", "unknown-size", ("hidden_size",)),
        ("vocab_size: null", "unknown-size", ("vocab_size",)),
    ],
)
def test_a_wrong_argument_of_a_model_is_named(tmp_path, text, code, values):
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: tiny-gpt\n{text}\n")
    with refused(code, *values):
        load(path, Model)
