"""Flags of Megatron that several tests pass. Runs with equal flags share one run of stock's schedule."""

from __future__ import annotations

import json
import re

from megatron_pipemem.flags import values_by_flag

PP2 = ("--pipeline-model-parallel-size", "2")
PP4 = ("--pipeline-model-parallel-size", "4")
TP2 = ("--tensor-model-parallel-size", "2")
TP_AND_SP = (*TP2, "--sequence-parallel")
CP2 = ("--context-parallel-size", "2")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
DISTRIBUTED = ("--use-distributed-optimizer", *OVERLAP, "--overlap-param-gather")
FUSION = ("+--no-gradient-accumulation-fusion",)

UNTIED = "--untie-embeddings-and-output-weights"
EMBEDDINGS = {"tied": (), "untied": (UNTIED,)}
LAYOUT = "--pipeline-model-parallel-layout"
ROPE = ("--position-embedding-type", "rope")
GROUPED = (*ROPE, UNTIED, "--group-query-attention", "--num-query-groups", "2")
LLAMA = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-swiglu-fusion", *GROUPED)
LATENT = (
    *("--multi-latent-attention", "--kv-lora-rank", "16", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8"),
    *("--v-head-dim", "12", *ROPE),
)
LATENT_QUERIES = (*LATENT, "--q-lora-rank", "24")
UNTIED_LATENT = (*LATENT_QUERIES, "--rope-type", "rope", UNTIED)
MULTI_TOKEN = (*ROPE, UNTIED, "--mtp-num-layers", "2")

# Megatron's own local experts cannot add a bias: they modify a view in place.
EXPERTS = ("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2")
AUX_LOSS = ("--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "aux_loss")
MOE = (*EXPERTS, *AUX_LOSS, "--moe-layer-freq", "[1,0,1,1]")  # for four layers
EP2 = (*EXPERTS, "--expert-model-parallel-size", "2")
ALL_TO_ALL = (*EP2, "--moe-token-dispatcher-type", "alltoall")
SHARED_EXPERTS = ("--moe-shared-expert-intermediate-size", "64")
CAPACITY = ("--moe-expert-capacity-factor", "1.0")
PADDED = (*CAPACITY, "--moe-pad-expert-input-to-capacity")

EVALUATION = ("--eval-iters", "1", "--eval-interval", "2", "--split", "50,30,20", "--train-iters", "3")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SELECTIVE = ("--recompute-granularity", "selective")
DROPOUT = ("--pipemem-rng", "layerwise", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
RESUMED = ("--train-iters", "4", "--override-opt_param-scheduler")
SIX = ("--global-batch-size", "6")  # three microbatches of each of two data-parallel ranks

# The plugin's.
BY_FLOPS = ("--pipemem-slice-cut", "flops")
VOCABULARY = "--pipemem-vocab-cut"
RECOMPUTED = ("--pipemem-recompute", "full")
SMALL_TENSORS = ("--pipemem-offload-option", "min_bytes=1KiB")
OFFLOADED = ("--pipemem-offload", "full", *SMALL_TENSORS)
QUICK = ("--pipemem-option", "seconds=0.3")


def hybrid(pattern: str, *more: str) -> tuple[str, ...]:
    """Return flags of a HybridModel of local layers."""
    spec = ("--spec", "megatron_pipemem.tools.cpu.hybrid_layers", "hybrid_stack_spec")
    return (*spec, f"--hybrid-layer-pattern={pattern}", *more)


def as_hybrid(flags: tuple[str, ...], layers: int) -> tuple[str, ...]:
    """Return the flags of the HybridModel with the same layers as the GPT that ``flags`` describe.

    ``layers`` is the number of layers without ``--num-layers``. A layer of a GPT is two of a HybridModel. Stages of a
    layout become segments of the pattern.
    """
    values = {name: str(value) for name, value in values_by_flag(flags).items()}
    layers = int(values.get("num-layers", layers))
    attention = "+" if "multi-latent-attention" in values else "*"
    has_experts = json.loads(values.get("moe-layer-freq", str([1] * layers)))
    blocks = [attention + ("E" if "num-experts" in values and chosen else "-") for chosen in has_experts]
    stages = re.sub("[EL]", "", values.get(LAYOUT.removeprefix("--"), "t" * layers))
    assert stages.count("t") == layers and not {*stages} - {*"t|"}, f"{stages} is no layout of {layers} layers"
    remaining = iter(blocks)
    pattern = "".join(next(remaining) if symbol == "t" else symbol for symbol in stages)
    ahead = [blocks[-1]] * int(values.get("mtp-num-layers", 0))
    gone = ("--num-layers", "--moe-layer-freq", "--mtp-num-layers", LAYOUT)
    kept, drops = [], False
    for word in flags:
        drops = word in gone if word.startswith(("--", "+--")) else drops
        kept += [] if drops else [word]
    return hybrid("/".join([pattern, *ahead]), "+--num-layers", *kept)
