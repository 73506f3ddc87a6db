"""Every schedule family trains a GPT as stock Megatron does, and its peak bytes are known beforehand."""

from __future__ import annotations

import pytest

from megatron_pipemem.schedule.registry import families

NAMES = [family.name for family in families()]
EMBEDDINGS = {"tied": (), "untied": ("--untie-embeddings-and-output-weights",)}

every_case = pytest.mark.parametrize(
    ("name", "embeddings"), [(name, embeddings) for embeddings in EMBEDDINGS for name in NAMES]
)


def test_a_run_does_not_depend_on_earlier_runs(train):
    first = train("stock")
    train("v-half")
    again = train("stock", "--seed", "1234")
    assert again == first


@every_case
def test_trains_as_stock(train, assert_same_training, name, embeddings):
    assert_same_training(train(name, *EMBEDDINGS[embeddings]), train("stock", *EMBEDDINGS[embeddings]))


@every_case
def test_peak_bytes_are_foretold(train, name, embeddings):
    run = train(name, *EMBEDDINGS[embeddings])
    assert all(peak > 0 for peak in run.counted_peaks)
    assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize(
    ("name", "flags"), [("1f1b", ()), ("interleaved", ("--num-virtual-stages-per-pipeline-rank", "2"))]
)
def test_holds_the_bytes_that_stock_holds(train, name, flags):
    assert train(name, *flags).counted_peaks == train("stock", *flags).counted_peaks
