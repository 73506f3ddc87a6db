"""HybridModels, cut by ``|`` in their pattern, train as on stock Megatron."""

from __future__ import annotations

import pytest

SPEC = ("--spec", "megatron_pipemem.cpu.hybrid_layers", "hybrid_stack_spec")
ONE, TWO = "*-*|-*|*--|*-", "*-|*||-|*|*-|-*|-"


def flags(pattern: str, *more: str) -> tuple[str, ...]:
    return (*SPEC, "--hybrid-layer-pattern", pattern, *more)


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_trains_as_stock(train, assert_same_training, schedule):
    pattern = ONE if schedule == "zb-h1" else TWO
    run = train(schedule, *flags(pattern))
    assert_same_training(run, train("stock", *flags(ONE)))
    assert run.predicted_peaks == run.counted_peaks
