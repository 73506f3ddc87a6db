"""Steps without a barrier between them train as those with one, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from lanes import rest_nightly
from ranks import Ranks

ZBV = {"schedule": "zbv", "chunks": 2, "pp": 4, "microbatches": 4, "clean": 1}
SPIKES = {"clip": "spikes", "spikes": (2, 3, 5), "steps": 8, "evaluates": (3,), "clean": 1, "dtype": "bfloat16"}
# With the steps that are taken before their norm is known, and how many of them are taken back before the training ends.
CASES = {
    "delayed": (
        {
            **{"schedule": "pipedream-2bw", "pp": 4, "ahead": True, "microbatches": 4},
            **{"clip": "spikes", "spikes": (1, 4)},
        },
        *(0, 0),
    ),
    "never clipped": ({**ZBV, "clip": "never", "runs_ahead": 1, "steps": 4}, 2, 0),
    "spikes": (
        {**ZBV, "clip": "spikes", "spikes": (1, 4, 5), "evaluates": (4,), "dropout": True, "steps": 8},
        *(3, 2),
    ),
    "1f1b": (
        {**ZBV, **SPIKES, "schedule": "1f1b", "chunks": 1, "spikes": (2,), "steps": 4, "evaluates": ()},
        *(2, 1),
    ),
    "data parallel, gathers that overlap": (
        {**SPIKES, "schedule": "v-half", "chunks": 2, "pp": 2, "distributed": True, "gather": True},
        *(None, None),
    ),
    "tensor parallel, distributed optimizer, tied": (
        {**SPIKES, "schedule": "zb-h2", "pp": 2, "tp": 2, "distributed": True, "tied": True},
        *(None, None),
    ),
}


@pytest.fixture(scope="module")
def run_pair(tmp_path_factory) -> Iterator[Callable[[dict], list[dict]]]:
    """Run the same training on ranks of their own, with and without a barrier between steps."""
    ranks = Ranks("overlapping", tmp_path_factory.mktemp("overlapping"))
    yield ranks.run
    ranks.stop()


@pytest.mark.parametrize(
    "name", rest_nightly(CASES, [*CASES][:4], "test_overlap_faults.py, which gathers in Megatron's loop")
)
def test_trains_as_with_a_barrier(run_pair, name):
    """With ``runs_ahead``, a rank that waited for another one at a step's end would hang."""
    case, validated, redone = CASES[name]
    for shown in run_pair(case):
        synchronous, overlapped = shown["synchronous"], shown["overlapped"]
        assert (synchronous.pop("validated"), synchronous.pop("redone")) == (0, 0)
        counts = overlapped.pop("validated"), overlapped.pop("redone")
        assert counts == (validated, redone) if validated is not None else counts[0] > counts[1] > 0
        late = synchronous.pop("late"), overlapped.pop("late")
        assert late == (0, 6) if case.get("ahead") else late[0] == 0
        for what, value in synchronous.items():
            assert overlapped[what] == value, what
