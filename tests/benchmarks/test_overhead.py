"""The comparison of host times: every engine runs, on ranks and played by one. No times."""

from __future__ import annotations

import json

import packages
import pytest
from lanes import nightly

pytest.importorskip("torch")
pytest.importorskip("megatron.core")


@nightly("end_to_end/test_families.py runs these engines, and test_emulated_devices.py one rank that plays all")
def test_every_engine_has_a_time_on_ranks_and_played_by_one(benchmark, tmp_path):
    packages.folders(packages.NEWEST)  # skips the test if Transformer Engine cannot be installed
    output = tmp_path / "overhead.json"
    benchmark("overhead.py", "--quick", "--rounds", 1, "--output", output)
    rows = json.loads(output.read_text())
    layers = {row["engine"]: row for row in rows if row["size"]["layers"]}
    assert {row["size"]["schedule"] for row in layers.values()} == {"zb-h1"}
    assert layers["stock"]["calls_ratio"] == 1 and not layers["stock"]["most_calls"]
    # The same layers, and a W for each backward: some more calls than stock's, but no other order of magnitude.
    assert 1 < layers["pipemem"]["calls_ratio"] < 2 and len(layers["pipemem"]["most_calls"]) == 5
    engines = {
        (row["size"]["schedule"], row["size"]["played"], row["engine"]) for row in rows if row not in layers.values()
    }
    assert engines == {
        (schedule, played, engine)
        for schedule in ("1f1b", "interleaved")
        for played in (None, 1)
        for engine in ("stock", "pipemem", "pipemem, recording", "pipemem, counting")
    }
    assert all(row["microseconds"] > 0 and row["ratio"] > 0 for row in rows)
