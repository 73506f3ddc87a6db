"""Train many combinations with and without a barrier between steps, and compare all bits: more than the suite has time for.

.venv/bin/python tests/end_to_end/overlap_matrix.py zbv zb-h2 1f1b v-half    # about two minutes each
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "watching"))

from ranks import CaseFailed, Ranks

CHUNKS = {"zbv": 2, "v-half": 2, "1f1b": 1, "zb-h2": 1}
SPIKES = {"clip": "spikes", "spikes": (2, 3, 5), "steps": 8, "evaluates": (3,), "clean": 1}
AT_ONCE = {"clean": 0}
BF16, GATHER = {"dtype": "bfloat16"}, {"distributed": True, "gather": True}


def cases(schedule: str) -> Iterator[tuple[str, dict]]:
    """Yield the combinations of a schedule, by name."""
    four = {"schedule": schedule, "chunks": CHUNKS[schedule], "pp": 4}
    two = {**four, "pp": 2}
    late = {"clip": "spikes", "spikes": (12, 13), "clean": 10}
    yield "20 steps, no clipping", {**four, "steps": 20}
    yield "20 steps, clipped twice behind a gate of 10", {**four, **late, "steps": 20}
    yield "dropout", {**four, **SPIKES, "dropout": True}
    yield "bf16, tied", {**four, **SPIKES, **BF16, "tied": True}
    yield "always clipped", {**four, **AT_ONCE, "clip": "always"}
    yield "dp2, bf16, distributed optimizer", {**two, **SPIKES, **BF16, "distributed": True}
    yield "dp2, bf16, gathers that overlap", {**two, **SPIKES, **BF16, **GATHER}
    yield "dp2, gathers that overlap, always clipped", {**two, **AT_ONCE, **GATHER, "clip": "always"}
    yield "dp2, gathers that overlap, no clipping", {**two, **GATHER}
    yield "tp2, dropout", {**two, **SPIKES, "tp": 2, "dropout": True}
    yield (
        "tp2, bf16, distributed optimizer, tied",
        {**two, **SPIKES, **BF16, "tp": 2, "distributed": True, "tied": True},
    )
    yield "dp2", {**two, **SPIKES}
    yield "dp2, bf16, no clipping", {**two, **BF16}


def main(schedules: list[str]) -> int:
    """Run the combinations of these schedules, print what came of each, and return how many differ or fail."""
    ranks, bad = Ranks("overlapping", Path(tempfile.mkdtemp())), 0
    for name, case in [(f"{schedule}: {name}", case) for schedule in schedules for name, case in cases(schedule)]:
        try:
            shown = ranks.run(case)
        except CaseFailed as error:
            print("FAILED", name, error, flush=True)
            bad += 1
            continue
        counted = {"validated", "redone", "late"}
        differ = {
            what
            for each in shown
            for what, value in each["synchronous"].items()
            if what not in counted and value != each["overlapped"][what]
        }
        found = shown[0]["overlapped"]
        print("DIFFERS" if differ else "equal", name, f"redone {found['redone']} of {found['validated']}", *differ)
        bad += bool(differ)
    ranks.stop()
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CHUNKS)))
