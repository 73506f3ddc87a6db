"""The list of what is Megatron's and not public: whole, and true of the Megatron that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatron_pipemem
from megatron_pipemem.mcore import symbols
from megatron_pipemem.mcore.patching import Symbol

LISTED = {*symbols.USED, *(value for value in vars(symbols).values() if isinstance(value, Symbol))}


@pytest.mark.parametrize("symbol", sorted(LISTED, key=str), ids=str)
def test_is_as_expected(symbol):
    if symbol.of_program:
        pytest.importorskip(symbol.module, reason="the tests of the program find a change")
    assert callable(symbol.resolve())


def test_no_symbol_is_named_elsewhere():
    package = Path(megatron_pipemem.__file__).parent
    naming = {path.name for path in package.rglob("*.py") if " Symbol(" in path.read_text()}
    assert naming == {"symbols.py"}
