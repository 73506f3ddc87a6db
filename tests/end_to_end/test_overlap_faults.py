"""Steps without a barrier between them, where something goes wrong: to the bit as with one, or all ranks end."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from model_flags import DISTRIBUTED
from ranks import CaseFailed, Ranks

ZBV = {"schedule": "zbv", "chunks": 2, "pp": 4, "microbatches": 4, "clean": 0, "steps": 3, "clip": "never"}
# With the steps that are taken back while it trains.
CASES = {
    "inf on one rank": ({"fault": "poisoned", "poison": {1: math.inf}}, 1),
    "two dirty in a row": ({"fault": "poisoned", "poison": {1: 3e7, 2: -2e7}, "steps": 4}, 2),
    "the limit": ({"fault": "at the margin", "over": 0.0}, 1),
    "disabled": ({"fault": "disabled", "clip": "spikes", "spikes": (0, 2)}, 1),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Iterator[Ranks]:
    ranks = Ranks("overlap_faults", tmp_path_factory.mktemp("faults"))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("name", CASES)
def test_trains_as_with_a_barrier(faulty, name):
    case = ZBV | CASES[name][0]
    for shown in faulty.run(case):
        synchronous, overlapped = shown["synchronous"], shown["overlapped"]
        assert (synchronous.pop("validated"), synchronous.pop("redone")) == (0, 0)
        del synchronous["late"], overlapped["late"]  # which norms were known when their steps ended
        assert overlapped.pop("validated") == case["steps"] - 1, "the last one is when it ends"
        assert overlapped.pop("redone") == CASES[name][1]
        for what, value in synchronous.items():
            assert overlapped[what] == value, what


def test_all_ranks_hear_of_a_forward_that_fails(faulty):
    seen = faulty.run(ZBV | {"fault": "raises", "steps": 4, "timeout_minutes": 0.05})
    assert "ArithmeticError this rank cannot go on" in seen[0]["failure"] and seen[0]["pending"]
    assert all("of schedule zbv" in rank["failure"] for rank in seen)


def test_all_ranks_end_with_one_that_is_killed(faulty):
    with pytest.raises(CaseFailed) as failed:
        faulty.run(ZBV | {"fault": "killed", "timeout_minutes": 0.05})
    text = str(failed.value)
    assert "rank 1: died" in text and "wait for something" not in text
    assert all(f"rank {rank}: Traceback" in text for rank in (0, 2, 3))


LOOP = (
    *("--train-iters", "6", "--log-interval", "3", "--eval-interval", "5"),
    *("--eval-iters", "1", "--rerun-mode", "disabled", "--lr-decay-style", "linear", "--save-interval", "4"),
)
GATHERED = (*DISTRIBUTED, "--bf16", "--global-batch-size", "8", "--train-iters", "4")
OVERLAPPED = "--pipemem-overlap-steps"
ALWAYS = ("--clip-grad", "0.01")


def logged(run) -> list[tuple[str, int, str]]:
    """What went to TensorBoard and does not depend on the clock."""
    names = ("lm loss", "grad-norm", "learning-rate")
    return sorted((name, at, value.hex()) for name, at, value in run.scalars if name.startswith(names))


def test_megatrons_loop_never_sees_a_step_that_was_wrong(train_small, tmp_path):
    """Every step is clipped: the first one that does not wait, logged ones, those before a save, an evaluation, the end."""
    writes = ("--tensorboard-dir", str(tmp_path / "scalars"))
    synchronous = train_small("zbv", *LOOP, *ALWAYS, *writes)
    ahead = train_small("zbv", *LOOP, *ALWAYS, *writes, OVERLAPPED, "--save", str(tmp_path), clean=0)
    assert ahead == synchronous and ahead.weights == synchronous.weights
    assert len(ahead.grad_norms) == 6 and len(ahead.validation) == len(synchronous.validation) > 0
    assert logged(ahead) == logged(synchronous) != []
    assert ahead.of_ranks("steps_ahead") == ahead.of_ranks("steps_taken_back") == [6] * 2
    assert min(ahead.of_ranks("rollback_bytes")) > 0
    load = ("--load", str(tmp_path), "--ckpt-step", "4")
    resumed = train_small("zbv", *LOOP, *ALWAYS, OVERLAPPED, *load, initialise=False, clean=0)
    assert resumed.losses == synchronous.losses[4:] and resumed.weights == synchronous.weights


def test_some_steps_are_clipped_while_parameters_are_gathered(train_small):
    norms = sorted(train_small("zbv", *LOOP, *GATHERED).grad_norms)
    clip = ("--clip-grad", repr((norms[1] + norms[2]) / 2))
    synchronous, ahead = (train_small("zbv", *LOOP, *GATHERED, *clip, *more, clean=0) for more in ((), (OVERLAPPED,)))
    assert ahead == synchronous and ahead.weights == synchronous.weights
    assert 0 < ahead.ranks[0]["steps_taken_back"] < ahead.ranks[0]["steps_ahead"] == 4
