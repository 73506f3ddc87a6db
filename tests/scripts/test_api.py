"""The public surface is that of the last snapshot: names and parameters, commands, flags, and keys of YAML and JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("griffe")

ROOT = Path(__file__).parents[2]


def test_the_public_surface_is_that_of_the_snapshot(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import freeze_api

    frozen, today = freeze_api.SNAPSHOT.read_text(encoding="utf-8").splitlines(), freeze_api.surface()
    gone, new = sorted({*frozen} - {*today}), sorted({*today} - {*frozen})
    assert gone == [], "this breaks users: say in CHANGELOG.md how to change, and run python scripts/freeze_api.py"
    assert new == [], "run python scripts/freeze_api.py; with the next release these names stay"
