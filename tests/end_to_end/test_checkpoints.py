"""A checkpoint does not remember the placement it was saved under."""

from __future__ import annotations

import pytest

EMBEDDINGS = {"tied": (), "untied": ("--untie-embeddings-and-output-weights",)}
INTERCHANGES = [
    *(("stock", after) for after in ("stock", "v-half", "interleaved")),
    *(("v-half", after) for after in ("stock", "v-half", "interleaved")),
    *(("interleaved", after) for after in ("stock", "v-half")),
]


# The tied end is one more parameter to place; which placements exchange it makes no other difference.
CASES = [
    *((*pair, "untied") for pair in INTERCHANGES),
    *(
        (*pair, "tied")
        for pair in (("stock", "stock"), ("stock", "v-half"), ("v-half", "stock"), ("interleaved", "v-half"))
    ),
]


@pytest.fixture(scope="module")
def checkpoint(train, tmp_path_factory):
    """``checkpoint(schedule, embeddings)``: the folder of a model trained for two steps, saved once."""
    saved = {}

    def save(schedule: str, embeddings: str) -> str:
        key = (schedule, embeddings)
        if key not in saved:
            folder = tmp_path_factory.mktemp("checkpoint")
            train(
                schedule, *EMBEDDINGS[embeddings], "--train-iters", "2", "--save", str(folder), "--save-interval", "2"
            )
            saved[key] = str(folder)
        return saved[key]

    return save


@pytest.fixture(scope="module")
def resume(train, checkpoint):
    """``resume(before, after, embeddings)``: two more steps with their optimizer state."""

    def run(before: str, after: str, embeddings: str):
        folder = checkpoint(before, embeddings)
        flags = ("--train-iters", "4", "--load", folder, "--override-opt_param-scheduler")
        return train(after, *EMBEDDINGS[embeddings], *flags, initialise=False)

    return run


@pytest.mark.parametrize(("before", "after", "embeddings"), CASES)
def test_checkpoints_are_interchangeable(train, resume, assert_same_training, before, after, embeddings):
    resumed = resume(before, after, embeddings)
    assert_same_training(resumed, resume("stock", "stock", embeddings))
    uninterrupted = train("stock", *EMBEDDINGS[embeddings], "--train-iters", "4")
    assert resumed.losses == uninterrupted.losses[2:]
