"""The comparison of host times: every engine runs, on ranks and played by one. No times."""

from __future__ import annotations

import json

import pytest
from lanes import nightly

pytest.importorskip("torch")
pytest.importorskip("megatron.core")


@nightly("end_to_end/test_families.py runs these engines, and test_emulated_devices.py one rank that plays all")
def test_every_engine_has_a_time_on_ranks_and_played_by_one(benchmark, tmp_path):
    output = tmp_path / "overhead.json"
    benchmark("overhead.py", "--quick", "--rounds", 1, "--output", output)
    rows = json.loads(output.read_text())
    engines = {(row["size"]["schedule"], row["size"]["played"], row["engine"]) for row in rows}
    assert engines == {
        (schedule, played, engine)
        for schedule in ("1f1b", "interleaved")
        for played in (None, 1)
        for engine in ("stock", "pipemem", "pipemem, recording", "pipemem, counting")
    }
    assert all(row["microseconds"] > 0 and row["ratio"] > 0 for row in rows)
