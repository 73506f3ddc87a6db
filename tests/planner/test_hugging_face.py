"""Shapes of public models have as many parameters as their names say."""

from __future__ import annotations

import re

import pytest

from megatron_pipemem.config.cluster import Cluster
from megatron_pipemem.config.loading import _public_models, known_model, load, unpriced_part
from megatron_pipemem.config.model import Execution
from megatron_pipemem.planner.profile import from_formulas

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
    found = known_model(name)
    assert (found and found.layers) == layers


def test_parts_without_a_price_are_named():
    assert unpriced_part("zai-org/GLM-4.6V") == "a vision tower of another kind"
    assert unpriced_part("Qwen/Qwen3-VL-8B-Instruct") is unpriced_part("Qwen/Qwen3-8B") is None
