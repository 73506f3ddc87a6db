"""Tensor, sequence and data parallelism beside the pipeline."""

from __future__ import annotations

import pytest
from lanes import rest_nightly

PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = (*PP2, "--tensor-model-parallel-size", "2")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000")
FUSION = ("+--no-gradient-accumulation-fusion",)
VARIANTS = {
    "tp2": TP2,
    "tp2-sequence-parallel": (*TP2, "--sequence-parallel"),
    "tp2-sequence-parallel-fusion": (*TP2, "--sequence-parallel", *FUSION),
    "dp2": PP2,
    "dp2-overlap": (*PP2, "--overlap-grad-reduce", "--ddp-bucket-size", "20000"),
    "dp2-distributed-optimizer": (*PP2, "--use-distributed-optimizer"),
    "dp2-distributed-optimizer-overlap": (*PP2, "--use-distributed-optimizer", *OVERLAP),
    "dp2-distributed-optimizer-overlap-fusion": (*PP2, "--use-distributed-optimizer", *OVERLAP, *FUSION),
    "dp2-distributed-optimizer-overlap-untied": (
        *PP2,
        "--use-distributed-optimizer",
        *OVERLAP,
        "--untie-embeddings-and-output-weights",
    ),
    "fusion": FUSION,
}
SCHEDULES = {
    "tp2": ("1f1b", "v-half"),
    "tp2-sequence-parallel": ("interleaved", "zb-h1", "v-half"),
    "dp2-distributed-optimizer-overlap-fusion": ("interleaved", "zb-h1", "v-half"),
    "dp2-distributed-optimizer-overlap": ("1f1b", "interleaved", "v-half"),
}


FULL_LANE = (
    *(("tp2", "v-half"), ("tp2-sequence-parallel-fusion", "v-half")),
    *(("dp2-overlap", "v-half"), ("dp2-distributed-optimizer-overlap-fusion", "zb-h1")),
)


@pytest.mark.parametrize(
    ("variant", "schedule"),
    rest_nightly(
        [(variant, schedule) for variant in VARIANTS for schedule in SCHEDULES.get(variant, ("zb-h1", "v-half"))],
        FULL_LANE,
        "the same flags with another family, or more flags with this one: interleaved in test_offload.py, sums without "
        "overlap in test_context_parallel.py, an untied v-half in test_checkpoints.py, zb-h1 with sequence parallelism in "
        "test_multi_token.py",
    ),
)
def test_trains_as_stock(train_small, assert_same_training, variant, schedule):
    run, stock = (train_small(name, *VARIANTS[variant], ranks=4) for name in (schedule, "stock"))
    assert_same_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks
