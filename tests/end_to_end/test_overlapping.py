"""Steps without a barrier between them train as those with one, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from lanes import nightly, rest_nightly
from ranks import Ranks

ZBV = {"schedule": "zbv", "chunks": 2, "pp": 4, "microbatches": 4}
EAGER = {"clean": 1}
# With the steps that are taken before their norm is known, and how many of them are taken back before the training ends.
AHEAD = {"schedule": "pipedream-2bw", "pp": 4, "ahead": True}
CASES = {
    "delayed": ({**AHEAD}, 0, 0),
    "delayed and always clipped": ({**AHEAD, "clip": "always", "dtype": "bfloat16", "evaluates": (2, 3)}, 0, 0),
    "delayed and clipped at times": ({**AHEAD, "clip": "spikes", "spikes": (1, 4), "microbatches": 4}, 0, 0),
    "unclipped": ({**ZBV, "runs_ahead": 0, "steps": 3}, 0, 0),
    "never clipped": ({**ZBV, **EAGER, "clip": "never", "runs_ahead": 1, "steps": 4}, 2, 0),
    "always clipped": ({**ZBV, "clip": "always", "clean": 0, "steps": 3}, 2, 2),
    "spikes": (
        {**ZBV, **EAGER, "clip": "spikes", "spikes": (1, 4, 5), "evaluates": (4,), "dropout": True, "steps": 8},
        3,
        2,
    ),
    "1f1b": (
        {
            "schedule": "1f1b",
            "pp": 4,
            "microbatches": 4,
            **EAGER,
            "clip": "spikes",
            "spikes": (2,),
            "dtype": "bfloat16",
            "steps": 4,
        },
        2,
        1,
    ),
}
FLAGS = (
    *("--global-batch-size", "8", "--rerun-mode", "disabled", "--train-iters", "9"),
    *("--log-interval", "4", "--eval-interval", "5", "--eval-iters", "1", "--lr", "1e-2"),
)


@pytest.fixture(scope="module")
def run_pair(tmp_path_factory) -> Iterator[Callable[[dict], list[dict]]]:
    """Run the same training on ranks of their own, with and without a barrier between steps."""
    ranks = Ranks("overlapping", tmp_path_factory.mktemp("overlapping"))
    yield ranks.run
    ranks.stop()


# test_overlap_faults.py clips every step of Megatron's loop, and has the faults.
NIGHTLY = {"delayed", "delayed and always clipped", "unclipped", "always clipped"}


@pytest.mark.parametrize("name", rest_nightly(CASES, CASES.keys() - NIGHTLY, "a case that clips at times"))
def test_trains_as_with_a_barrier(run_pair, name):
    """With ``runs_ahead``, a rank that waited for another one at a step's end would wait for ever."""
    case, validated, redone = CASES[name]
    for shown in run_pair(case):
        synchronous, overlapped = shown["synchronous"], shown["overlapped"]
        assert (synchronous.pop("validated"), synchronous.pop("redone")) == (0, 0)
        assert (overlapped.pop("validated"), overlapped.pop("redone")) == (validated, redone)
        late = synchronous.pop("late"), overlapped.pop("late")
        assert late == (0, 6) if case.get("ahead") else late[0] == 0
        for what, value in synchronous.items():
            assert overlapped[what] == value, what


@nightly(
    "test_overlap_faults.py: the loop that clips every step, with its log and checkpoints, and the one that clips some"
)
@pytest.mark.parametrize("clips", [False, True])
def test_megatrons_loop_shows_and_saves_the_same(train, tmp_path, clips):
    """Its log lines, evaluations and checkpoints come in between, and TensorBoard has the norm of every step."""

    def run(*flags: str):
        return train("zbv", *FLAGS, *flags, "--clip-grad", limit, clean=1)

    limit = "0"
    if clips:
        norms = run().grad_norms
        limit = str(sorted(norms)[len(norms) // 2])
    folders = [tmp_path / "synchronous", tmp_path / "overlapped"]
    synchronous, overlapped = (
        run(*flags, "--save", str(folder), "--save-interval", "6", "--tensorboard-dir", str(folder))
        for folder, flags in zip(folders, ((), ("--pipemem-overlap-steps",)), strict=True)
    )
    assert min(overlapped.of_ranks("steps_ahead")) > 0
    assert overlapped.weights == synchronous.weights
    assert overlapped.grad_norms == synchronous.grad_norms
    assert overlapped.losses == synchronous.losses
    assert overlapped.validation == synchronous.validation
    assert _logged(overlapped) == _logged(synchronous)


def _logged(run) -> set[tuple[str, int, float]]:
    """What Megatron itself writes, without times."""
    return {each for each in run.scalars if not each[0].startswith("pipemem/") and "time" not in each[0]}
