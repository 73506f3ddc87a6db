"""Every pass in a CUDA graph of its own, captured and replayed over ``cuda_graphs``, trains as the same step without graphs."""

from __future__ import annotations

import pytest

STEPS = ("--train-iters", "4", "--bf16")
GRAPHS = ("--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1")
REPLAYED = 3
"""Of four steps: all but the first. The second one captures every pass, and replays it at once."""


@pytest.mark.parametrize(("schedule", "passes"), [("zb-h1", 3 * 4), ("v-half", 2 * 3 * 4)])
def test_trains_as_without_graphs(train_small, schedule, passes):
    run = train_small(schedule, *STEPS, *GRAPHS, report=None)
    assert run.weights == train_small(schedule, *STEPS, report=None).weights
    assert run.replays == [REPLAYED * passes] * 2
