"""One room knows Megatron's classes of language models, and either class may be missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lanes import rest_nightly
from refusals import refused

import megatron_pipemem
from megatron_pipemem.errors import UpstreamError
from megatron_pipemem.mcore.model.language_model import (
    count_layers,
    kinds_of,
    kinds_of_chunk,
    layers_in,
    layers_with_states,
    mean_weight,
    model_of_chunk,
    predicts_in_piece,
)
from megatron_pipemem.mcore.symbols import GPT_MODELS, HYBRID_MODELS, ModelClass, PatchSet, Symbol

PACKAGE = Path(megatron_pipemem.__file__).parent
NAMES = {"GPTModel", "HybridModel", "hybrid_layer_pattern"}
SYMBOLS = "mcore/symbols.py"
# Whose imports of Megatron's modules for one class are all that they are for: layers of either class.
LAYERS = {"tools/cpu/hybrid_layers.py", "tools/cpu/upstream.py", "tools/megatron/profiling.py"}


def named_in(path: Path) -> set[str]:
    """Names, attributes, arguments and strings of a file, without words within a sentence."""
    words: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        values = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")]
        words |= {value for value in values if isinstance(value, str)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            words |= {node.value, *node.value.split(".")}
    return words


def test_one_room_names_a_class_of_models():
    words = {path.relative_to(PACKAGE).as_posix(): named_in(path) for path in PACKAGE.rglob("*.py")}
    assert {path for path, named in words.items() if named & NAMES} == {SYMBOLS}
    classes = ("megatron.core.models.gpt", "megatron.core.models.hybrid")
    importing = {path for path, named in words.items() if any(word.startswith(classes) for word in named)}
    assert importing == {SYMBOLS, *LAYERS}


def chunk(numbers: tuple[int, ...], pattern: str | None = None, **more: object) -> SimpleNamespace:
    """A chunk with the layers of these numbers, of a GPT of four layers or with a pattern."""
    config = dict(hidden_size=64, num_attention_heads=4, kv_channels=16, num_query_groups=None, ffn_hidden_size=96)
    config |= dict(gated_linear_unit=False, num_layers=4, num_moe_experts=None, mtp_num_layers=1) | more
    model = SimpleNamespace(config=SimpleNamespace(**config), max_sequence_length=10, mtp_process=True)
    model.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=number) for number in numbers])
    if pattern is not None:
        model.hybrid_layer_pattern = pattern
    return model


ATTENTION, FFN = 4 * 64 * 64 + 2 * 10 * 64, 2 * 64 * 96


def test_layers_of_both_classes_have_kinds():
    experts = dict(
        num_moe_experts=4, num_experts=4, moe_layer_freq=[0, 1, 0, 1], moe_ffn_hidden_size=32, moe_router_topk=2
    )
    gpt, hybrid = chunk((2, 3), **experts), chunk((4, 5, 6), "*-|*E*-|*E/*-", **experts)
    assert kinds_of(gpt) == ("*-", "*E", "*-", "*E") and kinds_of_chunk(gpt) == ["*E", "*-"]
    assert kinds_of(hybrid) == tuple("*-*E*-*E") and kinds_of_chunk(hybrid) == ["E", "*", "-"]
    assert (count_layers(gpt), count_layers(hybrid)) == (4, 8)
    assert predicts_in_piece(gpt) and not predicts_in_piece(hybrid)
    assert (model_of_chunk(gpt).pieces, model_of_chunk(hybrid).pieces) == (5, 8)
    # A layer of the GPT is two of the hybrid model.
    assert mean_weight(gpt) == pytest.approx(2 * mean_weight(hybrid))


def test_layers_count_by_what_they_compute():
    assert mean_weight(chunk((1,))) == pytest.approx(ATTENTION + FFN) and layers_in(chunk((1, 2))) == pytest.approx(2)
    mean = (2 * ATTENTION + 2 * FFN) / 4
    for numbers, weight in (((1, 2, 3), ATTENTION + 2 * FFN), ((4,), ATTENTION), ((), 0)):
        assert layers_in(chunk(numbers, "*--|*/*")) == pytest.approx(weight / mean)


def test_layers_as_objects_are_not_taken_for_those_of_a_gpt():
    """Megatron's pull requests 6235 and 7555 have no pattern. Slices would run through layers with states, and bytes would be
    those of another model."""
    model = HYBRID_MODELS.get().__new__(HYBRID_MODELS.get())
    vars(model).update(vars(chunk((1, 2))))
    for ask in (kinds_of, layers_with_states, layers_in, model_of_chunk):
        with refused("unsupported-model", "--hybrid-layer-pattern"):
            ask(model)


def test_a_class_that_is_missing_is_left_out_and_a_function_that_is_missing_is_not():
    gone, whole = ModelClass("megatron.core.models.gone", "GoneModel"), PatchSet()
    assert gone.find() is None and ModelClass(GPT_MODELS.module, "GoneModel").find() is None
    with pytest.raises(UpstreamError) as refused:
        gone.get()
    assert refused.value.code == "other-version" and "GoneModel" in str(refused.value)
    whole.install([(Symbol(gone.module, "GoneModel.__init__", of=gone), lambda original: None)])
    assert whole.names == []
    with pytest.raises(UpstreamError):
        whole.install([(Symbol(HYBRID_MODELS.module, "gone", of=HYBRID_MODELS), lambda original: None)])


def test_a_class_whose_module_cannot_import_another_one_is_an_error(tmp_path, monkeypatch):
    """Else a broken installation would look like a version without the class."""
    (tmp_path / "broken_models.py").write_text("import another_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        ModelClass("broken_models", "Model").find()


ENABLED = """
import importlib, sys
from pkgutil import walk_packages
module, name = {missing!r}.rsplit(".", 1)
package = module.rsplit(".", 1)[0]
if {whole}:
    sys.modules[module] = None
else:
    delattr(importlib.import_module(module), name)
    vars(importlib.import_module(package)).pop(name, None)

import megatron_pipemem as pipemem
from megatron_pipemem import features
needing = {needing!r}
for found in walk_packages(pipemem.__path__, "megatron_pipemem."):
    if not found.name.endswith(("__main__", ".warm")) and found.name not in needing:
        importlib.import_module(found.name)
for schedule, settings in (
    ("v-half", {{"rng": "layerwise"}}),
    ("1f1b", {{"vocab_cut": "2"}}),
    ("chimera", {{"offload": "full"}}),
    ("seq1f1b", {{}}),
    ("pipedream-2bw", {{}}),
    ("zb-h1", {{"microbatch_costs": "FLOPs"}}),
    ("interleaved", {{"costs": "profile"}}),
):
    pipemem.enable(schedule, **settings)
    pipemem.disable()
print("enabled")
"""


HYBRID_LAYERS = ("megatron_pipemem.tools.cpu.hybrid_layers",)
# The class that is missing, whether its module is too, and the modules that can then not be imported.
MISSING = [
    (GPT_MODELS, False, ()),
    (GPT_MODELS, True, ()),
    (HYBRID_MODELS, False, ()),
    (HYBRID_MODELS, True, HYBRID_LAYERS),
]


@pytest.mark.parametrize(
    ("models", "whole", "needing"),
    rest_nightly(MISSING, [MISSING[0], MISSING[-1]], "one class, and the other's module"),
)
def test_the_package_imports_and_enables_without_one_of_the_classes(models, whole, needing):
    code = ENABLED.format(missing=f"{models.module}.{models.name}", needing=needing, whole=whole)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["enabled"], done.stderr
