"""Megatron's functions that are not public: all are listed, exist in the installed version, and are replaced together."""

from __future__ import annotations

import inspect
import re
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest

import megatron_pipemem
from megatron_pipemem.errors import UpstreamError
from megatron_pipemem.mcore import symbols
from megatron_pipemem.mcore.symbols import PatchSet, Symbol

LISTED = {
    *symbols.USED,
    *symbols.MODEL_INITS,
    *symbols.PROCESS_MTP_LOSS,
    *(value for value in vars(symbols).values() if isinstance(value, Symbol)),
}
INSTALLED = [
    symbol
    for symbol in LISTED
    if find_spec(".".join(symbol.module.split(".")[:2])) is not None and (symbol.of is None or symbol.of.find())
]


@pytest.mark.parametrize("symbol", sorted(INSTALLED, key=str), ids=str)
def test_is_as_expected(symbol):
    assert callable(symbol.resolve())


def test_a_function_is_called_or_says_what_it_is_replaced_for():
    """The documents list the second kind."""
    sources = [path.read_text() for path in Path(megatron_pipemem.__file__).parent.rglob("*.py")]
    for name, value in vars(symbols).items():
        if isinstance(value, Symbol) and not value.purposes:
            used = [text for text in sources if f"{name}.resolve()" in text]
            assert used and not any(re.search(rf"\(\s*{name},", text) for text in used), name
    assert all(symbol.purposes for symbol in LISTED - {*symbols.USED})
    assert {symbol for symbol in LISTED if symbol.purposes} <= {*symbols.REPLACED}


def test_no_symbol_is_named_elsewhere():
    package = Path(megatron_pipemem.__file__).parent
    naming = {path.name for path in package.rglob("*.py") if " Symbol(" in path.read_text()}
    assert naming == {"symbols.py"}


@pytest.fixture
def upstream(monkeypatch):
    module = types.ModuleType("fake_upstream")

    def step(model, microbatches):
        return "stock step"

    class Model:
        def build(self, config):
            return "stock model"

    module.step, module.Model = step, Model
    monkeypatch.setitem(sys.modules, "fake_upstream", module)
    return module


STEP = Symbol("fake_upstream", "step", ("model",))
BUILD = Symbol("fake_upstream", "Model.build", ("self", "config"))


def test_a_function_that_others_import_by_name_is_replaced_wherever_it_is_held(upstream, monkeypatch):
    step = upstream.step
    early, late = types.ModuleType("fake_early"), types.ModuleType("fake_late")
    for module in (early, late):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    early.renamed = step
    patches = PatchSet()
    by_name = Symbol("fake_upstream", "step", ("model",), by_name=True)
    patches.install([(by_name, lambda original, *args: f"ours over {original(*args)}")] * 2)
    late.step = upstream.step
    assert early.renamed(None, 1) == late.step(None, 1) == "ours over ours over stock step"
    patches.remove()
    assert upstream.step is early.renamed is late.step is step


@pytest.mark.parametrize(
    ("symbol", "words"),
    [
        (Symbol("fake_upstream", "gone"), ("fake_upstream.gone", "0.19.2")),
        (Symbol("fake_upstream", "Gone.build"), ("fake_upstream.Gone.build",)),
        (Symbol("fake_upstream", "step", ("model", "p2p_communicator")), ("fake_upstream.step", "p2p_communicator")),
    ],
)
def test_a_missing_or_changed_symbol_is_named_and_nothing_is_touched(upstream, symbol, words):
    step = upstream.step
    with pytest.raises(UpstreamError) as error:
        PatchSet().install([(STEP, lambda original: None), (symbol, lambda original: None)])
    for word in words:
        assert word in str(error.value)
    assert upstream.step is step


def test_a_compiled_function_is_found_though_it_has_no_signature(upstream):
    """As Transformer Engine's, which on CPU ranks are Python."""
    upstream.norm = max
    with pytest.raises(ValueError):
        inspect.signature(upstream.norm)
    assert Symbol("fake_upstream", "norm").resolve() is max


def test_a_replacement_has_the_attributes_of_the_original_and_its_own(upstream):
    def ours(original, *args):
        return original(*args)

    upstream.step.warned, upstream.step.kept, ours.warned = False, 1, True
    patches = PatchSet()
    patches.install([(STEP, ours)])
    assert (upstream.step.warned, upstream.step.kept) == (True, 1)
    patches.remove()
    assert not upstream.step.warned


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_replacement_that_fails_leaves_nothing_replaced(upstream, error):
    class Frozen(type):
        def __setattr__(cls, name, value):
            raise error

    class Model(metaclass=Frozen):
        def build(self, config):
            return "stock model"

    upstream.Model = Model
    step, build = upstream.step, upstream.Model.build
    patches = PatchSet()
    with pytest.raises(error):
        patches.install([(STEP, lambda original, *args: "ours"), (BUILD, lambda original, *args: None)])
    assert upstream.step is step and upstream.Model.build is build
    patches.remove()  # nothing is left to put back
    assert upstream.step is step
