"""The list of what is Megatron's and not public: whole, and true of the Megatron that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import megatron_pipemem
from megatron_pipemem.mcore import symbols
from megatron_pipemem.mcore.patching import Symbol

LISTED = {*symbols.USED, *(value for value in vars(symbols).values() if isinstance(value, Symbol))}
INSTALLED = [each for each in LISTED if find_spec(".".join(each.module.split(".")[:2])) is not None]


@pytest.mark.parametrize("symbol", sorted(INSTALLED, key=str), ids=str)
def test_is_as_expected(symbol):
    assert callable(symbol.resolve())


def test_no_symbol_is_named_elsewhere():
    package = Path(megatron_pipemem.__file__).parent
    naming = {path.name for path in package.rglob("*.py") if " Symbol(" in path.read_text()}
    assert naming == {"symbols.py"}
