"""A GPT of Transformer Engine's own layers, with every weight gradient delayed, trains as on stock's schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations, product

import packages
import pytest
import test_unequal
from comparing import assert_close_training, assert_predicted_bytes, assert_same_training, bits
from lanes import nightly, rest_nightly
from model_flags import (
    BY_FLOPS,
    DISTRIBUTED,
    DROPOUT,
    EVALUATION,
    FUSION,
    LLAMA,
    OVERLAP,
    QUICK,
    RECOMPUTE,
    RECOMPUTED,
    RESUMED,
    ROPE,
    TP2,
    TP_AND_SP,
    UNTIED,
    VOCABULARY,
)
from ranks import CaseFailed, ConductedRanks

DEFAULTS = (*FUSION, *OVERLAP)  # what users start with, in addition to bias
NO_BIAS = "--disable-bias-linear"
# Four layers, and microbatches that fill a pipeline of two twice.
SMALL = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--global-batch-size", "4")
LANES = {
    "pp2": (),
    "tp2": TP_AND_SP,
    "dp2": ("--use-distributed-optimizer", "--global-batch-size", "8"),
}
TWO_RANKS_A_STAGE = {TP2[0], DISTRIBUTED[0], "--context-parallel-size"}
LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--normalization", "RMSNorm", "--qk-layernorm"),
)
GROUPED_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "[1,0,1,1]", "--moe-grouped-gemm"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "aux_loss"),
)
GROUPED = tuple(word for word in GROUPED_EXPERTS if word not in ("--moe-layer-freq", "[1,0,1,1]"))
EP2 = (
    *(*LANES["dp2"], "--overlap-param-gather", "--expert-model-parallel-size", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-shared-expert-intermediate-size", "64"),
)
DELTA_NETS = (
    *("--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "4"),
    *("--linear-key-head-dim", "8", "--linear-value-head-dim", "16", "--linear-num-key-heads", "4"),
    *("--linear-num-value-heads", "8", "--linear-conv-kernel-dim", "4"),
    *("--seq-length", "16"),  # which PyTorch goes through token by token
)
REPEATED = ("--mtp-num-layers", "2", "--mtp-use-repeated-layer")
SPARSE = (
    *("--experimental-attention-variant", "dsa", "--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "16"),
    *("--dsa-indexer-topk", "16", "--dsa-indexer-loss-coeff", "0.01", "--no-dsa-indexer-rotate-activation"),
)
FLASH = ("--attention-backend", "flash", "--bf16", "--no-gradient-accumulation-fusion")
CP2 = ("--context-parallel-size", "2", "--cp-comm-type")
OFFLOADED = ("--pipemem-offload", "full", "--pipemem-host-memory", "1GiB")
OVERLAP_OF_EXPERTS = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
OVERLAPPED = ("--train-iters", "4", "--log-interval", "10", "--rerun-mode", "disabled")

# A family per placement and kind of backward. The first two split nothing: their models are built as stock's.
FAMILIES = ("1f1b", "interleaved", "zb-h1", "gis", "v-half", "dualpipe")
# All families with all versions and flags would be many runs. Here every two values of these seven meet: family, version,
# lane, bias, fusion, overlap, bf16.
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
IN_FULL_LANE = ("1f1b", "interleaved", "zb-h1", "dualpipe")


@pytest.fixture(scope="module")
def train_te(train_with_transformer_engine) -> Callable:
    """Train on a pipeline of two ranks, or of two pairs of ranks where ``flags`` share a stage's work."""

    def run(schedule: str, *flags: str, size: int = 4, ranks: int | None = None, **how: object):
        ranks = ranks or (size if TWO_RANKS_A_STAGE & {*flags} else 2)
        return train_with_transformer_engine(schedule, *SMALL, *flags, size=size, ranks=ranks, **how)

    return run


@pytest.fixture
def equals(equals_stock, train_te) -> Callable:
    return partial(equals_stock, train=train_te)


@pytest.mark.parametrize(
    "case",
    [
        case if case[0] == NEW and case[-1] in IN_FULL_LANE else pytest.param(case, marks=nightly("the newest version"))
        for case in CASES
    ],
    ids=_name,
)
def test_trains_as_stock(equals, case):
    version, lane, switches, family = case
    # Of two copies of the model, a sum has another order.
    run, _ = equals(family, *_flags(lane, switches), version=version, close=family == "dualpipe", nbytes=None)
    for layers in run.layers:
        assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= set(layers)
    if None in run.counted_peaks:  # a whole backward of these versions cannot be watched
        assert switches[1] and version != NEW
        assert all("fails if its saved tensors are counted" in failure for failure in run.of_ranks("failure"))
    else:
        assert_predicted_bytes(run)


# name -> schedule, flags
MODELS = {
    "recompute-full-tp2": ("zb-h1", (*DEFAULTS, *TP_AND_SP, "--use-cpu-initialization")),  # which makes new biases
    "latent-experts-tp2": (
        *("v-half", (*DEFAULTS, NO_BIAS, *LATENT, *GROUPED_EXPERTS, "--moe-latent-size", "32", *TP_AND_SP)),
    ),
    "delta-nets-tp2": ("zb-h1", (*DEFAULTS, *LLAMA, *DELTA_NETS, *TP_AND_SP)),
    "grouped-experts-ep2": ("v-half", (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, *EP2, "--moe-shared-expert-overlap")),
    "grouped-experts-bias": ("zb-h1", (*OVERLAP, *GROUPED_EXPERTS)),  # without fusion
    "repeated-depth": ("zb-h1", (*DEFAULTS, *LLAMA, *REPEATED)),
    "repeated-depth-experts-bias": ("v-half", (*OVERLAP, *ROPE, UNTIED, *GROUPED_EXPERTS, *REPEATED)),  # without fusion
    "further-tokens": ("v-half", (*DEFAULTS, *LLAMA, "--mtp-num-layers", "1")),
    "delta-nets-experts": ("v-half", (*DEFAULTS, *LLAMA, *DELTA_NETS, *GROUPED_EXPERTS, "--attention-output-gate")),
    "sparse": ("zb-h1", (*DEFAULTS, NO_BIAS, *LATENT, *SPARSE, "--dsa-indexer-use-sparse-loss")),
    "sparse-tp2": ("v-half", (*DEFAULTS, NO_BIAS, *LATENT, *SPARSE, *TP_AND_SP)),
    "tp2": ("v-half", TP2),
}
NIGHTLY_MODELS = {"further-tokens", "repeated-depth", "delta-nets-experts", "sparse", "sparse-tp2", "tp2"}


@pytest.mark.parametrize(
    "model", rest_nightly(MODELS, MODELS.keys() - NIGHTLY_MODELS, "local layers, and tests/transformer_engine")
)
def test_other_models_train_as_stock(equals, model):
    schedule, flags = MODELS[model]
    again = RECOMPUTE if "recompute" in model else ()  # which changes no number
    run, _ = equals(schedule, *flags, ours=again, nbytes=None if "experts" in model else "exact")
    if "experts" in model:  # routing differs between microbatches
        assert any("TERowParallelGroupedLinear" in layers for layers in run.layers)


def test_layers_in_pieces_train_as_whole_ones(equals):
    """The pieces leave weight gradients to W."""
    flags = (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, *EP2, "--bf16")
    equals("v-half", *flags, ours=OVERLAP_OF_EXPERTS, nbytes=None)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputes_as_stock(equals, mode):
    equals("v-half", *DEFAULTS, ours=("--pipemem-recompute", mode))


KEPT = ("--pipemem-early-wgrad", "none")
"""Every W at its place: W would run earlier where gathered tensors wait."""
# The model predicts a further token, and all microbatches share a table of rotary embeddings.
SHARDED = (*DEFAULTS, *LLAMA, *TP_AND_SP, "+--no-rope-fusion", "--mtp-num-layers", "1")


def test_shards_wait_for_w_also_where_activations_leave(equals):
    # The guard fills the memory of tensors that are away.
    ours = (*OFFLOADED, "--pipemem-offload-option", "min_bytes=1B", "--pipemem-offload-option", "guard=1")
    run, _ = equals("v-half", *SHARDED, ours=ours)
    assert run.of_ranks("predicted_host_peak_bytes") == run.of_ranks("counted_host_peak_bytes")


def test_gathered_tensors_wait_for_w_if_a_run_asks_for_it(equals):
    gathered, _ = equals("zb-h1", *SHARDED, ours=("--pipemem-wgrad-inputs", "gathered", *KEPT))
    shards, _ = equals("zb-h1", *SHARDED, ours=KEPT)
    # Where the most waits for W.
    assert gathered.counted_peaks[-1] > 1.05 * shards.counted_peaks[-1]


BF16 = "--bf16"
USER_BUFFERS = ("--tp-comm-overlap", "--tp-comm-bootstrap-backend", "gloo")
GATHERED = ("--pipemem-wgrad-inputs", "gathered")
# Schedule, flags of ours: W gets copies or shards of the tensors that layers gather into the buffers.
BUFFERED = {"1f1b": (), "zb-h1": GATHERED, "v-half": ()}
BUFFERED_CASES = [*product([NEW], ["zb-h1", "v-half"]), (NEW, "1f1b"), *product([OLD, MIDDLE], BUFFERED)]


@pytest.mark.parametrize(
    ("version", "schedule"),
    rest_nightly(
        BUFFERED_CASES, BUFFERED_CASES[:2], "whole backwards, which are Transformer Engine's; the newest version"
    ),
)
def test_layers_with_user_buffers_train_as_others(equals, version, schedule):
    nbytes = None if schedule == "1f1b" else "exact"  # older versions cannot be watched with whole backwards
    ours = (*USER_BUFFERS, *BUFFERED[schedule])
    equals(schedule, *DEFAULTS, *TP_AND_SP, BF16, ours=ours, version=version, nbytes=nbytes)


def test_early_weights_of_grouped_experts_hold_less_for_w(equals):
    narrow = ("--moe-ffn-hidden-size", "32", "--moe-shared-expert-intermediate-size", "64")
    flags = (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, *narrow)
    peaks = []
    for early in ("none", "head,experts_fc1,experts_fc2"):
        run, _ = equals("zb-h1", *flags, ours=("--pipemem-early-wgrad", early), nbytes=None)
        peaks.append(max(run.counted_peaks))
    assert peaks[0] > peaks[1]


HYBRID = (
    *("--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    *("--mamba-num-heads", "8", "--mamba-head-dim", "16", "--mamba-num-groups", "2", "--mamba-state-dim", "16"),
    *DELTA_NETS[4:-2],
    "--hybrid-layer-pattern",
)


def test_a_hybrid_model_of_nvidias_layers_trains_as_stock(train_te):
    """With Mamba layers; where the user has not cut the pattern, we cut it."""
    run, stock = (
        train_te(name, *DEFAULTS, *HYBRID, pattern)
        for name, pattern in (("v-half", "M*-MM-M*"), ("stock", "M*-M|M-M*"))
    )
    assert_same_training(run, stock)
    assert_predicted_bytes(run)


# Of layers that carry a state along the sequence: schedule, pattern, flags of stock too, flags of ours
MAMBA = "M*-MM-M*"
MIXED = "M*-GM-G*"  # with gated delta nets, which need the activation function of LLAMA
GATED = ("--swiglu", "--no-bias-swiglu-fusion", NO_BIAS)
STATES = {
    "split backwards": ("gis", MIXED, LLAMA, ()),
    "interleaved": ("interleaved", MIXED, LLAMA, ()),
    "wave": ("hanayo", MIXED, LLAMA, ()),
    "two replicas": ("chimera", MIXED, LLAMA, ()),
    "tensor parallel": ("v-half", MIXED, (*LLAMA, *TP_AND_SP), ()),
    "distributed optimizer": ("v-half", MAMBA, LANES["dp2"], ()),
    "bf16": ("zbv", MIXED, (*LLAMA, "--bf16"), ()),
    "cut vocabulary": ("v-half", MIXED, (*LLAMA, UNTIED), (VOCABULARY, "2")),
    "offloaded": ("zbv", MAMBA, (), OFFLOADED),
    "recomputed": ("v-half", MIXED, LLAMA, RECOMPUTED),
    "selective": ("zb-h1", MIXED, LLAMA, ("--pipemem-recompute", "selective")),
    "Megatron's recomputation": ("v-half", MIXED, (*LLAMA, *RECOMPUTE), ()),
    "further tokens": ("v-half", f"{MIXED}/G*", (*LLAMA, *ROPE, UNTIED), ()),
    "random numbers": ("v-half", MIXED, (*LLAMA, *DROPOUT), ()),
    "profiled": ("v-half", MIXED, (*LLAMA, "--train-iters", "6"), ("--pipemem-costs", "profile")),
    "searched": ("auto", MIXED, LLAMA, QUICK),
    "weighed by FLOPs": ("1f1b", MIXED, LLAMA, ("--pipemem-microbatch-costs", "FLOPs")),
    "one hardware queue": ("v-half", MIXED, LLAMA, ("--pipemem-single-queue",)),
    "grouped queries": ("zb-h1", MIXED, (*LLAMA, "--calculate-per-token-loss"), ()),
    "latent attention": ("v-half", "M+-GM-G+", (*GATED, *LATENT), ()),
    "experts": ("v-half", "ME*EMEME", (NO_BIAS, *GROUPED, *EP2), ()),
    "pairs": ("v-half", "ME*EMEME", (NO_BIAS, *GROUPED, *EP2, "--bf16"), OVERLAP_OF_EXPERTS),
    "context parallel": ("v-half", MIXED, (*CP2, "a2a", *FLASH, *LLAMA), ()),
    "evaluation": ("v-half", MIXED, (*LLAMA, *EVALUATION), ()),
    "overlapped steps": ("zbv", MIXED, (*LLAMA, *OVERLAPPED), ("--pipemem-overlap-steps",)),
    "weighed by a function": ("1f1b", MIXED, LLAMA, test_unequal.BY_CONTENT),
    "layout": ("v-half", MIXED, LLAMA, ("--pipemem-layout", "auto")),
    "packed": ("v-half", MIXED, (*FLASH, *LLAMA), ()),
    # Steps of 2, 2, 2, 4, 4 and 4 microbatches.
    "another number of microbatches": (
        "v-half",
        MIXED,
        (*LLAMA, "--rampup-batch-size", "2", "2", "6", "--train-iters", "6"),
        (),
    ),
}
RESUMMED = {"two replicas", "cut vocabulary", "weighed by FLOPs", "weighed by a function"}


@pytest.mark.parametrize(
    "name", rest_nightly(STATES, ["cut vocabulary"], "test_twins.py; states of layers in a V above")
)
def test_layers_with_states_train_as_stock(equals, request, name):
    schedule, pattern, flags, ours = STATES[name]
    if name == "packed":  # in every microbatch other documents, and scans within these
        flags = (*request.getfixturevalue("packed"), *flags)
    uncounted = name == "packed" or "E" in pattern
    how = {"initialise": False} if name == "random numbers" else {"nbytes": None} if uncounted else {}
    run, stock = equals(schedule, *DEFAULTS, *flags, *HYBRID, pattern, ours=ours, close=name in RESUMMED, **how)
    assert run.packed == stock.packed


CUT = f"{MIXED[:4]}|{MIXED[4:]}"


@nightly("test_twins.py; states of layers in a V above")
def test_layers_with_states_train_late_as_the_formula_says(train_te):
    flags = (*LLAMA, "--train-iters", "3", *HYBRID)
    alone = ("--pipeline-model-parallel-size", "1", *flags)
    run = train_te("pipedream-2bw", *flags, CUT)
    late = train_te("stock", *alone, MIXED, ranks=1, emulate=("pipedream-2bw", 2, 1))
    assert bits(run.losses) == bits(late.losses)
    assert run.losses[2:] != train_te("stock", *flags, CUT).losses[2:], "nothing was late"
    assert_predicted_bytes(run)


@nightly("test_checkpoints.py; names and initial values of layers with states above")
def test_checkpoints_of_layers_with_states_go_to_another_cut(train_te, tmp_path):
    train_te("v-half", *LLAMA, "--save", str(tmp_path), "--save-interval", "2", *HYBRID, MIXED)
    resumed = train_te("stock", *LLAMA, *RESUMED, "--load", str(tmp_path), *HYBRID, CUT, initialise=False)
    whole = train_te("stock", *LLAMA, "--train-iters", "4", *HYBRID, CUT)
    assert bits(resumed.losses) == bits(whole.losses[2:])


@nightly("test_hybrid.py; layers with states above")
def test_layers_with_states_are_added_to_a_checkpoint_of_a_gpt(train_te, tmp_path):
    """They begin with random values, which depend on the layer alone."""
    train_te("stock", UNTIED, NO_BIAS, "--save", str(tmp_path), "--save-interval", "2")
    load = (UNTIED, NO_BIAS, *RESUMED, "--load", str(tmp_path), "--pipemem-rng", "layerwise", *HYBRID)
    losses = {
        tuple(bits(train_te(schedule, *load, pattern, initialise=False).losses))
        for schedule, pattern in (("stock", "M*-*-|M*-*-"), ("v-half", "M*-*-M*-*-"), ("zb-h1", "M*-*-|M*-*-"))
    }
    assert len(losses) == 1 and len({*losses.pop()}) == 2


@nightly("test_plain_loop.py; layers with states above")
def test_a_program_builds_chunks_of_layers_with_states(tmp_path):
    path = [*packages.folders(packages.NEWEST), packages.MAMBA]
    ranks = ConductedRanks("plain_loop", tmp_path, path, 2, preload=["te_stand_in", "plain_loop"])
    case = {"chunks": 1, "import_after": False, "ddp": True, "hybrid": "states"}
    try:
        stock, *others = (
            ranks.run({**case, **how})[-1]["losses"]
            for how in ({"schedule": "stock"}, {"schedule": "zb-h1"}, {"schedule": "v-half", "chunks": 2})
        )
    finally:
        ranks.stop()
    assert len({*stock}) > 10 and others == [stock, stock]


@pytest.mark.parametrize("pattern", ["M*-MM-M*", "*-G-*-G-"])
def test_a_state_is_not_handed_on_between_slices(train_te, pattern):
    with pytest.raises(CaseFailed) as failed:
        train_te("seq1f1b", *DEFAULTS, *LLAMA, *HYBRID, pattern)
    assert "[slices-model]" in str(failed.value)


def test_context_parallel_ranks_train_as_stock(equals):
    """Transformer Engine's own exchange of keys and values, over a stand-in of flash attention."""
    equals("v-half", *CP2, "all_gather", *FLASH, *LLAMA)


def test_microbatches_in_flight_share_tables(train_te):
    """Those of fused rotary embeddings, and the offsets of sequences that Transformer Engine caches."""
    run = train_te("pipedream-2bw", *CP2, "all_gather", *FLASH, *LLAMA, "+--no-rope-fusion")
    assert_predicted_bytes(run)


TP2_LLAMA = (*DEFAULTS, *LLAMA, *TP_AND_SP)
BALANCED_BY_BIAS = (
    *("--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)
# name -> schedule, number of slices, flags of ours, flags of stock too
SLICED = {
    "gradients added by the products": ("zb-h1", 2, (), DEFAULTS),
    "sliding window, fused rotary embeddings, tensor parallel, recomputed": (
        *("zb-h1", 2, RECOMPUTED),
        (*TP2_LLAMA, "+--no-rope-fusion", "--window-size", "24,0"),
    ),
    "latent attention, equal FLOPs": ("v-half", 4, BY_FLOPS, (*DEFAULTS, NO_BIAS, *LATENT, *TP_AND_SP)),
    "tensor parallel, cut vocabulary": ("zb-h1", 2, (VOCABULARY, "1"), TP2_LLAMA),
    "experts": ("v-half", 2, (), (*DEFAULTS, NO_BIAS, *GROUPED_EXPERTS, *BALANCED_BY_BIAS)),
    "offloaded": ("v-half", 4, OFFLOADED, LLAMA),
}


@pytest.mark.parametrize(
    "name",
    rest_nightly(SLICED, [*SLICED][:1], "the same mask and sums; other parts with local layers in test_slices.py"),
)
def test_slices_train_as_whole_sequences(equals, name):
    schedule, slices, ours, flags = SLICED[name]
    nbytes = "bounded" if name == "experts" else "exact"  # routing differs between slices
    equals(schedule, *flags, ours=("--pipemem-option", f"slices={slices}", *ours), close=True, nbytes=nbytes)


@pytest.mark.parametrize(
    "sequences",
    rest_nightly(["packed", "whole", "shared"], ["packed"], "other parts with local layers in test_slices.py"),
)
def test_slices_of_flash_attention_train_as_whole_sequences(train_te, packed, sequences):
    """Of packed documents, the first one of a slice has more keys than queries."""
    flags = (*FLASH, *LLAMA, *{"packed": packed, "shared": (*CP2, "all_gather"), "whole": ()}[sequences])
    run, stock = (train_te(*ours, *flags) for ours in (("v-half", "--pipemem-option", "slices=4"), ("stock",)))
    assert_close_training(run, stock, 2e-3, norms=2e-2)  # bf16, which flash attention needs
    assert_predicted_bytes(run)


@pytest.mark.parametrize(
    ("way", "schedule"),
    rest_nightly(
        [("p2p", "zb-h1"), ("a2a", "v-half"), (None, "interleaved")],
        [("p2p", "zb-h1")],
        "another exchange, of which this package sees nothing; without context parallelism in test_packed.py",
    ),
)
def test_packed_documents_train_as_stock(equals, packed, way, schedule):
    run, stock = equals(schedule, *packed, *FLASH, *LLAMA, *((*CP2, way) if way else ()), nbytes=None)
    assert run.packed == stock.packed
    for predicted, counted in zip(run.predicted_peaks, run.counted_peaks, strict=True):
        # With context parallelism every layer keeps where documents end, and a microbatch has more or fewer of them.
        assert abs(predicted - counted) < (512 if way else 1)


# Eight ranks from here on.
@nightly("two tensor-parallel ranks above; with local layers in test_variants.py")
@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_four_tensor_parallel_ranks_train_as_stock(equals, schedule):
    """Megatron sums the norms' gradients over tensor-parallel ranks in one buffer of all layers of a rank. Over more than two
    ranks the order of a sum depends on the place in the buffer, and a V puts other layers there.
    """
    four = ("--tensor-model-parallel-size", "4", "--sequence-parallel")
    equals(schedule, *four, close=schedule == "v-half", size=8)


@nightly("two of the three at a time; test_packed.py")
def test_tensor_and_context_parallel_ranks_train_as_stock(equals, packed):
    run, stock = equals("v-half", *packed, *LLAMA, *TP_AND_SP, *CP2, "p2p", *FLASH, nbytes=None, size=8)
    assert run.packed == stock.packed
