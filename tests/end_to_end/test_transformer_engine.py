"""A GPT of Transformer Engine's own layers, with every weight gradient delayed, trains as on stock's schedule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product

import packages
import pytest
from lanes import nightly, rest_nightly

from megatron_pipemem.schedule.registry import families

FUSION = ("+--no-gradient-accumulation-fusion",)
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
DEFAULTS = (*FUSION, *OVERLAP)  # what users start with, beside bias
NO_BIAS = "--disable-bias-linear"
# Four layers, and microbatches that fill a pipeline of two twice.
SMALL = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--global-batch-size", "4")
TP2 = ("--tensor-model-parallel-size", "2")
TP2_SEQUENCE = (*TP2, "--sequence-parallel")
TP4_SEQUENCE = ("--tensor-model-parallel-size", "4", "--sequence-parallel")
LANES = {
    "pp2": (),
    "tp2": TP2_SEQUENCE,
    "dp2": ("--use-distributed-optimizer", "--global-batch-size", "8"),
}
TWO_RANKS_A_STAGE = {*TP2[:1], *LANES["dp2"][:1], "--context-parallel-size"}
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", NO_BIAS, "--no-bias-swiglu-fusion"),
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2"),
)
LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--normalization", "RMSNorm", "--qk-layernorm"),
)
GROUPED_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "[1,0,1,1]", "--moe-grouped-gemm"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "aux_loss"),
)
DELTA_NETS = (
    *("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "4"),
    *("--linear-key-head-dim", "8", "--linear-value-head-dim", "16", "--linear-num-key-heads", "4"),
    *("--linear-num-value-heads", "8", "--linear-conv-kernel-dim", "4"),
    *("--seq-length", "16"),  # which PyTorch goes through token by token
)
SPARSE = (
    *("--experimental-attention-variant", "dsa", "--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "16"),
    *("--dsa-indexer-topk", "16", "--dsa-indexer-loss-coeff", "0.01", "--no-dsa-indexer-rotate-activation"),
)
FLASH = ("--attention-backend", "flash", "--bf16", "--no-gradient-accumulation-fusion")
CP2 = ("--context-parallel-size", "2", "--cp-comm-type")
OFFLOADED = ("--pipemem-offload", "full", "--pipemem-host-memory", "1GiB")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")

SPLIT = ("zb-h1", "v-half")
# The first two split nothing: their models are built as stock's.
FAMILIES = ("1f1b", "interleaved", *(family.name for family in families() if family.splits_backward))

# All families with all versions and flags would be thousands of runs. Here every two values of these seven meet: family,
# version, lane, bias, fusion, overlap, bf16.
#
# There are nine settings: every version in every lane, the four switches spread over them. Each group has three of the nine,
# with all versions, all lanes and both positions of every switch, and in one of them what users start with. A family trains
# under the settings of one group. ``test_every_two_values_meet`` counts. How the switches of one layer go together on every
# version is tested whole in ``tests/transformer_engine``.
OLD, MIDDLE, NEW = packages.VERSIONS
# version, lane, (bias, fusion, overlap, bf16)
GROUPS = (
    ((OLD, "pp2", (1, 1, 1, 1)), (MIDDLE, "tp2", (0, 0, 0, 1)), (NEW, "dp2", (0, 1, 0, 0))),
    ((OLD, "tp2", (0, 0, 0, 0)), (MIDDLE, "dp2", (1, 1, 1, 0)), (NEW, "pp2", (0, 0, 1, 1))),
    ((OLD, "dp2", (0, 0, 1, 1)), (MIDDLE, "pp2", (1, 0, 0, 0)), (NEW, "tp2", (1, 1, 1, 0))),
)
CASES = sorted(
    ((*setting, family) for number, family in enumerate(FAMILIES) for setting in GROUPS[number % len(GROUPS)]),
    key=lambda case: (packages.VERSIONS.index(case[0]), case[1]),  # ranks of one version and lane at a time
)


OTHERS = "the newest version with another family of the same placement and kind of backward"


def _flags(lane: str, switches: tuple[int, ...]) -> tuple[str, ...]:
    bias, fusion, overlap, bf16 = switches
    return (
        *(FUSION if fusion else ()),
        *(OVERLAP if overlap else ()),
        *(() if bias else (NO_BIAS,)),
        *LANES[lane],
        *(("--overlap-param-gather",) if overlap and lane == "dp2" else ()),
        *(("--bf16",) if bf16 else ()),
    )


def _name(case: tuple) -> str:
    version, lane, switches, family = case
    on = [name for name, switch in zip(("bias", "fusion", "overlap", "bf16"), switches, strict=True) if switch]
    return "-".join((family, version, lane, *on))


def test_every_two_values_meet():
    values = [packages.VERSIONS, tuple(LANES), *[(0, 1)] * 4, FAMILIES]
    rows = [(version, lane, *switches, family) for version, lane, switches, family in CASES]
    for one, other in combinations(range(len(values)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(values[one], values[other]))
    for family in FAMILIES:
        assert any(case[2][:3] == (1, 1, 1) for case in CASES if case[-1] == family)


# Every setting of the newest version, a family per kind of backward, and two replicas; other models train in a V.
FULL_LANE = [case for case in CASES if case[0] == NEW and case[-1] in ("1f1b", "interleaved", "zb-h1", "dualpipe")]


@pytest.fixture(scope="module")
def train(train_with_transformer_engine) -> Callable:
    """Train on a pipeline of two ranks, or of two pairs of ranks where ``flags`` share a stage's work."""

    def run(schedule: str, *flags: str, size: int = 4, ranks: int | None = None, **how: object):
        ranks = ranks or (size if TWO_RANKS_A_STAGE & {*flags} else 2)
        return train_with_transformer_engine(schedule, *SMALL, *flags, size=size, ranks=ranks, **how)

    return run


@pytest.mark.parametrize(
    "case",
    [case if case in FULL_LANE else pytest.param(case, marks=nightly(OTHERS)) for case in CASES],
    ids=_name,
)
def test_trains_as_stock(train, assert_same_training, assert_close_training, case):
    version, lane, switches, family = case
    flags = _flags(lane, switches)
    run, stock = (train(name, *flags, version=version) for name in (family, "stock"))
    if family == "dualpipe":  # two copies of the model: a sum in another order
        assert_close_training(run, stock)
    else:
        assert_same_training(run, stock)
    for layers in run.layers:
        assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= set(layers)
    if None in run.counted_peaks:  # a whole backward of these versions cannot be watched
        assert switches[1] and version != NEW
        assert all("fails if its saved tensors are counted" in said for said in run.of_ranks("failure"))
        return
    assert run.counted_peaks == run.predicted_peaks and min(run.counted_peaks) > 0


# name -> flags
MODELS = {
    "tp2": TP2,
    "recompute-full": DEFAULTS,
    "llama": (*DEFAULTS, *LLAMA),
    "further-tokens": (*DEFAULTS, *LLAMA, "--mtp-num-layers", "1"),
    "llama-tp2": (*DEFAULTS, *LLAMA, *TP2_SEQUENCE),
    "latent-tp2": (*DEFAULTS, NO_BIAS, *LATENT, *TP2_SEQUENCE),
    "delta-nets-tp2": (*DEFAULTS, *LLAMA, *DELTA_NETS, *TP2_SEQUENCE),
    "delta-nets-experts": (*DEFAULTS, *LLAMA, *DELTA_NETS, *GROUPED_EXPERTS, "--attention-output-gate"),
    "sparse": (*DEFAULTS, NO_BIAS, *LATENT, *SPARSE, "--dsa-indexer-use-sparse-loss"),
    "sparse-tp2": (*DEFAULTS, NO_BIAS, *LATENT, *SPARSE, *TP2_SEQUENCE),
    "narrow-experts": (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, "--moe-latent-size", "32"),
    "latent-experts-tp2": (*DEFAULTS, NO_BIAS, *LATENT, *GROUPED_EXPERTS, "--moe-latent-size", "32", *TP2_SEQUENCE),
    "recompute-full-tp2": (*DEFAULTS, *TP2_SEQUENCE, "--use-cpu-initialization"),  # which makes new biases
    "grouped-experts-tp2": (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, *TP2_SEQUENCE),
    "grouped-experts": (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS),
    "grouped-experts-bias": (*OVERLAP, *GROUPED_EXPERTS),  # without fusion
    "grouped-experts-ep2": (
        *(*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, *LANES["dp2"], "--overlap-param-gather"),
        *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
        *("--moe-shared-expert-intermediate-size", "64", "--moe-shared-expert-overlap"),
    ),
}
FULL_LANE_MODELS = (
    *("recompute-full-tp2", "latent-experts-tp2"),
    *("delta-nets-tp2", "grouped-experts-ep2", "grouped-experts-bias"),
)


@pytest.mark.parametrize(
    ("model", "schedule"),
    rest_nightly(
        product(MODELS, SPLIT),
        [(model, SPLIT[number % 2]) for number, model in enumerate(FULL_LANE_MODELS)],
        "a model with more of its parts, or another placement",
    ),
)
def test_other_models_train_as_stock(train, assert_same_training, model, schedule):
    again = RECOMPUTE if "recompute" in model else ()  # which changes no number
    run = train(schedule, *MODELS[model], *again)
    assert_same_training(run, train("stock", *MODELS[model]))
    if "experts" in model:  # routing differs between microbatches
        assert any("TERowParallelGroupedLinear" in layers for layers in run.layers)
    else:
        assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize("schedule", rest_nightly(("v-half", "1f1b"), ("v-half",), "v-half, whose backwards are split"))
def test_layers_in_pieces_train_as_whole_ones(train, assert_same_training, schedule):
    """The pieces leave weight gradients to W, or compute them in the backward."""
    flags = (*(each for each in MODELS["grouped-experts-ep2"] if each != "--moe-shared-expert-overlap"), "--bf16")
    run = train(schedule, *flags, "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
    assert_same_training(run, train("stock", *flags))


@pytest.mark.parametrize(
    "flags",
    [
        ("--pipemem-recompute", "full"),
        ("--pipemem-recompute", "selective"),
        pytest.param(OFFLOADED, marks=nightly("below, with TP2_SEQUENCE")),
    ],
    ids=lambda flags: "-".join(flags[:2]).removeprefix("--pipemem-"),
)
@pytest.mark.parametrize("schedule", rest_nightly(SPLIT, ["v-half"], "the same flags with another placement"))
def test_recomputes_and_offloads_as_stock(train, assert_same_training, schedule, flags):
    run = train(schedule, *DEFAULTS, *flags)
    assert_same_training(run, train("stock", *DEFAULTS))
    assert run.predicted_peaks == run.counted_peaks


KEPT = ("--pipemem-early-weights", "none")
"""Every W at its place: W would run earlier where gathered tensors wait."""


@pytest.mark.parametrize(
    ("way", "schedule"),
    rest_nightly(
        [("gathered", "zb-h1"), *(("offload", schedule) for schedule in SPLIT)],
        [("gathered", "zb-h1"), ("offload", "v-half")],
        "the same flags with another placement",
    ),
)
def test_shards_wait_unless_told_otherwise(train, assert_same_training, way, schedule):
    """And also where activations were on the host in between.

    The model predicts a further token, and all microbatches share a table of rotary embeddings.
    """
    flags = (*DEFAULTS, *LLAMA, *TP2_SEQUENCE, "+--no-rope-fusion", "--mtp-num-layers", "1")
    more = {
        "gathered": ("--pipemem-weight-inputs", "gathered", *KEPT),
        # The guard fills the memory of tensors that are away.
        "offload": (*OFFLOADED, "--pipemem-offload-option", "min_bytes=1B", "--pipemem-offload-option", "guard=1"),
    }
    run = train(schedule, *flags, *more[way])
    assert_same_training(run, train("stock", *flags))
    assert run.predicted_peaks == run.counted_peaks
    assert run.of_ranks("predicted_host_peak_bytes") == run.of_ranks("counted_host_peak_bytes")
    if way == "gathered":
        shards = train(schedule, *flags, *KEPT)
        assert_same_training(shards, train("stock", *flags))
        assert shards.predicted_peaks == shards.counted_peaks
        # Where the most waits for W.
        assert run.counted_peaks[-1] > 1.05 * shards.counted_peaks[-1]


@pytest.mark.parametrize("schedule", rest_nightly(["zb-h1", "v-half"], ["zb-h1"], "zb-h1"))
def test_early_weights_of_grouped_experts_hold_less_for_w(train, assert_same_training, schedule):
    narrow = ("--moe-ffn-hidden-size", "32", "--moe-shared-expert-intermediate-size", "64")
    flags = (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, *narrow)
    stock = train("stock", *flags)
    everything = "head,experts_fc1,experts_fc2"
    runs = [train(schedule, *flags, "--pipemem-early-weights", early) for early in ("none", everything)]
    for run in runs:
        assert_same_training(run, stock)
    peaks = [max(run.counted_peaks) for run in runs]
    assert peaks[0] > peaks[1]


HYBRID = (
    *("--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    *("--mamba-num-heads", "8", "--mamba-head-dim", "16", "--mamba-num-groups", "2", "--mamba-state-dim", "16"),
)


@pytest.mark.parametrize("schedule", rest_nightly(SPLIT, ["v-half"], "test_hybrid.py"))
def test_a_hybrid_model_of_nvidias_layers_trains_as_stock(train, assert_same_training, schedule):
    """With Mamba layers; where the user has not cut the pattern, we cut it."""
    run = train(
        schedule,
        *DEFAULTS,
        *HYBRID,
        "--hybrid-layer-pattern",
        "M*-M|M-M*" if schedule == "zb-h1" else "M*-MM-M*",
    )
    assert_same_training(run, train("stock", *DEFAULTS, *HYBRID, "--hybrid-layer-pattern", "M*-M|M-M*"))
    assert run.predicted_peaks == run.counted_peaks


# Eight ranks from here on.
@nightly("two tensor-parallel ranks above; with local layers in test_parallelism.py")
@pytest.mark.parametrize("layers", ["transformer_engine", "local"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_four_tensor_parallel_ranks_train_as_stock(
    train, assert_same_training, assert_close_training, schedule, layers
):
    """Megatron sums the norms' gradients over tensor-parallel ranks in one buffer of all layers of a rank. Over more than two
    ranks the order of a sum depends on the place in the buffer, and a V puts other layers there.
    """
    flags = (*TP4_SEQUENCE, "--transformer-impl", layers)
    run, stock = (train(name, *flags, size=8) for name in (schedule, "stock"))
    (assert_same_training if schedule == "zb-h1" else assert_close_training)(run, stock)
    assert run.predicted_peaks == run.counted_peaks


@nightly("two of the three at a time; test_packed.py")
@pytest.mark.parametrize("layers", ["transformer_engine", "local"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_tensor_and_context_parallel_ranks_train_as_stock(train, assert_same_training, packed, schedule, layers):
    flags = (*packed, *LLAMA, *TP2_SEQUENCE, *CP2, "p2p")
    flags = (*flags, *FLASH) if layers == "transformer_engine" else (*flags, "--transformer-impl", layers)
    run, stock = (train(name, *flags, size=8) for name in (schedule, "stock"))
    assert_same_training(run, stock)
    assert run.packed == stock.packed


# The most of 1F1B's bytes on four ranks. In units it is 1, 1, .75 and .5; the head makes the rest.
SHARES = {"zb-h1": 1.05, "zbv": 1.05, "v-half": 0.8, "v-min": 0.55}


@nightly("contract.py counts what waits for W; bytes are predicted; tests/schedule has the units")
@pytest.mark.parametrize("schedule", SHARES)
def test_schedules_hold_their_share_of_1f1bs_bytes(train, schedule):
    sizes = ("--hidden-size", "128", "--vocab-size", "300")
    long = ("--pipeline-model-parallel-size", "4", "--num-layers", "8", "--global-batch-size", "6")
    flags = (*DEFAULTS, *LLAMA, *sizes, *long, *TP2_SEQUENCE)
    run, first = (train(name, *flags, size=8) for name in (schedule, "1f1b"))
    assert max(run.counted_peaks) <= SHARES[schedule] * max(first.counted_peaks)
    assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize(
    ("way", "schedule"),
    rest_nightly(
        product(("all_gather", "a2a", "p2p"), ("v-half", "interleaved", "zb-h1")),
        [("all_gather", "v-half")],
        "the same attention in another placement, or another exchange, of which this package sees nothing; p2p with packed "
        "documents below",
    ),
)
def test_context_parallel_ranks_train_as_stock(train, assert_same_training, way, schedule):
    """Transformer Engine's own exchange of keys and values, over a stand-in of flash attention."""
    flags = (*CP2, way, *FLASH, *LLAMA)
    run, stock = (train(name, *flags) for name in (schedule, "stock"))
    assert_same_training(run, stock)
    assert run.predicted_peaks == run.counted_peaks


def test_microbatches_in_flight_share_tables(train):
    """Those of fused rotary embeddings, and the offsets of sequences that Transformer Engine caches."""
    run = train("pipedream-2bw", *CP2, "all_gather", *FLASH, *LLAMA, "+--no-rope-fusion")
    assert run.predicted_peaks == run.counted_peaks


BY_FLOPS = ("--pipemem-slice-cut", "flops")
CUT_VOCABULARY = ("--pipemem-vocab-parallel", "1")
TP2_LLAMA = (*DEFAULTS, *LLAMA, *TP2_SEQUENCE)
BALANCED_BY_BIAS = (
    *("--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)
# name -> schedule, number of slices, flags of ours, flags of stock too
SLICED = {
    "gradients added by the products": ("zb-h1", 2, (), DEFAULTS),
    "sliding window, fused rotary embeddings, tensor parallel, recomputed": (
        *("zb-h1", 2, ("--pipemem-recompute", "full")),
        (*TP2_LLAMA, "+--no-rope-fusion", "--window-size", "24,0"),
    ),
    "latent attention, equal FLOPs": ("v-half", 4, BY_FLOPS, (*DEFAULTS, NO_BIAS, *LATENT, *TP2_SEQUENCE)),
    "cut vocabulary": ("v-half", 2, CUT_VOCABULARY, LLAMA),
    "tensor parallel, cut vocabulary": ("zb-h1", 2, CUT_VOCABULARY, TP2_LLAMA),
    "learned positions, data parallel": ("seq1f1b", 4, (), LANES["dp2"]),
    "experts": ("v-half", 2, (), (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, *BALANCED_BY_BIAS)),
    "offloaded": ("v-half", 4, OFFLOADED, LLAMA),
    "recomputed by Megatron": ("slimpipe", 4, (), (*LLAMA, *RECOMPUTE)),
}


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        SLICED, [next(iter(SLICED))], "the same mask and sums; other parts with local layers in test_slices.py"
    ),
)
def test_slices_train_as_whole_sequences(train, assert_close_training, name):
    schedule, slices, ours, flags = SLICED[name]
    run = train(schedule, "--pipemem-option", f"slices={slices}", *ours, *flags)
    assert_close_training(run, train("stock", *flags))
    if name == "experts":  # routing differs between slices
        least, most = run.of_ranks("predicted_least_peak_bytes"), run.predicted_peaks
        assert all(low <= held <= high for low, held, high in zip(least, run.counted_peaks, most, strict=True))
    elif name != "recomputed by Megatron":  # which is never predicted to the byte
        assert run.predicted_peaks == run.counted_peaks and min(run.counted_peaks) > 0


@nightly("unfused attention above, with the same mask")
def test_slices_of_flash_attention_train_as_whole_sequences(train):
    flags = (*FLASH, *LLAMA)
    stock, run = (train(*each, *flags) for each in (("stock",), ("v-half", "--pipemem-option", "slices=4")))
    assert run.losses == pytest.approx(stock.losses, rel=2e-3)  # bf16, which flash attention needs
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=2e-2)
    assert run.predicted_peaks == run.counted_peaks


@pytest.mark.parametrize(
    ("way", "schedule"),
    rest_nightly(
        [*product((None, "p2p"), ("v-half", "interleaved", "zb-h1")), ("a2a", "zb-h1")],
        [("p2p", "zb-h1")],
        "the same documents in another placement; without context parallelism in test_packed.py",
    ),
)
def test_packed_documents_train_as_stock(train, assert_same_training, packed, way, schedule):
    flags = (*packed, *FLASH, *LLAMA, *((*CP2, way) if way else ()))
    run, stock = (train(name, *flags) for name in (schedule, "stock"))
    assert_same_training(run, stock)
    assert run.packed == stock.packed
    for predicted, counted in zip(run.predicted_peaks, run.counted_peaks, strict=True):
        # With context parallelism every layer keeps where documents end, and a microbatch has more or fewer of them.
        assert abs(predicted - counted) < (512 if way else 1)


@nightly("the same bits as stock's")
@pytest.mark.parametrize("way", ["p2p", "a2a"])
def test_shared_documents_train_as_whole_ones(train, packed, way):
    """Within the rounding of bf16. Without per-token losses each rank would average over its own tokens."""
    flags = (*packed, *FLASH, *LLAMA, "--calculate-per-token-loss")
    run = train("stock", *flags, *CP2, way)
    whole = train("stock", *flags)
    assert run.losses == pytest.approx(whole.losses, rel=5e-4)
    assert run.grad_norms == pytest.approx(whole.grad_norms, rel=5e-3)
