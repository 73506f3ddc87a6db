"""Delayed weight gradients on Transformer Engine's own Python, three versions of it, to the bit."""

from __future__ import annotations

from pathlib import Path

import packages
import pytest
from lanes import rest_nightly

pytest.importorskip("megatron.core", reason="needs the [megatron] extra")

VERSIONS = rest_nightly(packages.VERSIONS, [packages.NEWEST], "the newest version")
NUMBER, WITH_FLASH = 2 * (2 + 2 * 2 * 2) + 4 + 2 + 3 + 3 + 2 * 9 + 3, 6 * 2


@pytest.mark.parametrize("version", VERSIONS)
def test_every_case_is_exact(contract, version):
    results = contract(version)
    assert results["version"] == version
    wrong = {name: result for name, result in results["cases"].items() if result != "exact"}
    assert not wrong, "\n".join(f"{name}: {result}" for name, result in wrong.items())
    assert len(results["cases"]) == NUMBER + WITH_FLASH * (version != packages.VERSIONS[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_quantised_weights_are_kept_where_the_count_of_activations_looks(version):
    package = Path(packages.folders(version)[0], "transformer_engine", "pytorch")
    assert "self._fp8_workspaces: Dict[str, " in (package / "module" / "base.py").read_text(encoding="utf-8")
    assert any("def get_data_tensors(self" in file.read_text() for file in package.rglob("float8_tensor_*.py"))
