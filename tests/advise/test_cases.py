"""Commands whose answers were wrong, or had no reason: what ``advise`` says of each now."""

from __future__ import annotations

import shlex

import pytest
from refusals import refused

from megatron_pipemem.tools.advise.advice import ROOM, advise
from megatron_pipemem.tools.advise.programs import read_program
from megatron_pipemem.tools.advise.reading import Context
from megatron_pipemem.tools.config.arguments import frozen_flags
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.pricing import as_it_stands

DENSE = """torchrun --nproc-per-node 8 --nnodes {nodes} pretrain_gpt.py --num-layers 24 --hidden-size 4096
    --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --vocab-size 50000
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --bf16 --use-distributed-optimizer"""
EXPERTS = """torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --num-layers 64 --hidden-size 6144
    --num-attention-heads 48 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --seq-length 4096
    --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 256 --tensor-model-parallel-size 8
    --sequence-parallel --pipeline-model-parallel-size 4 --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1 --bf16 --vocab-size 120000 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
NAMES = ("1f1b", "zb-h1", "zbv", "v-half")


def run_of(command: str, *words: str, nodes: int = 1) -> Run:
    context = Context(frozen_flags(), load("h100-80g", Cluster))
    return read_program([*shlex.split(command.format(nodes=nodes)), *words], context).run


def peak(run: Run) -> float:
    return as_it_stands(run).peak


def test_an_optimizer_on_the_host_leaves_the_device():
    """Twelve bytes for each expert's parameter on the fullest rank, of which one rank holds each, and for a share of others."""
    whole = run_of(EXPERTS)
    away = run_of(EXPERTS, "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    of_experts = 64 / 4 * 128 / 16 * 3 * 6144 * 2048
    others = (16 * 4 * 6144**2 / 8 + 120000 * 6144 / 8) / 2
    assert peak(whole) - peak(away) == pytest.approx(12 * (of_experts + others), rel=0.03)
    assert peak(whole) > whole.cluster.memory_bytes > peak(away)


def test_a_run_that_does_not_fit_is_compared_all_the_same():
    advice = advise(run_of(EXPERTS), names=("1f1b", "interleaved", "zbv"))
    assert advice.excess > 0 and advice.stock is not None
    assert all(way.gain(advice.today) > 0 for kind, way in advice.proposals.items() if kind != "fits")


@pytest.mark.parametrize("flag", [("--attention-backend", "unfused"), ("--transformer-impl", "local")])
def test_scores_of_unfused_attention_are_in_the_peak(flag):
    """Two bytes of softmax, two and a mask of dropout, and no sums of flash attention, for four microbatches of six layers."""
    batch = ("--global-batch-size", "64")
    scores = 32 / 2 * 4096 * (5 * 4096 - 4)
    assert peak(run_of(DENSE, *batch, *flag, nodes=4)) - peak(run_of(DENSE, *batch, nodes=4)) == pytest.approx(
        4 * 6 * scores, rel=0.02
    )
    without = (*batch, "--attention-dropout", "0", "--hidden-dropout", "0")
    assert peak(run_of(DENSE, *without, *flag, nodes=4)) - peak(run_of(DENSE, *without, nodes=4)) == pytest.approx(
        4 * 6 * 32 / 2 * 4096 * (2 * 4096 - 4), rel=0.02
    )


def test_the_answer_is_the_fastest_row():
    run = run_of(DENSE, "--global-batch-size", "6")
    advice = advise(run, names=NAMES)
    rows = [way for way in (advice.stock, *advice.proposals.values()) if way is not None]
    assert (
        advice.best.gain(advice.today) == max(way.gain(advice.today) for way in rows)
        and advice.best.order.name == "zbv"
    )
    assert "less memory" not in advice.proposals and advice.best.peak < run.cluster.memory_bytes * (1 - ROOM)


def test_megatron_refuses_these_microbatches():
    flags = ("--global-batch-size", "6", "--num-virtual-stages-per-pipeline-rank", "2")
    advice = advise(run_of(DENSE, *flags), names=NAMES)
    assert "6 microbatches" in advice.fails and advice.today.order.name == "1f1b"


def test_a_batch_is_smaller_than_its_ranks():
    with refused("does-not-divide", "4 is less than micro batch x dp = 1 x 8"):
        advise(run_of(DENSE, "--global-batch-size", "4", nodes=8))


@pytest.mark.parametrize(("method", "layers", "recomputed"), [("block", 2, 2), ("block", 9, 6), ("uniform", 1, 6)])
def test_recomputed_layers_of_a_stage_are_priced(method, layers, recomputed):
    """Time and bytes of a stage of six layers are those of so many recomputed layers."""
    flags = ("--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", str(layers))
    batch = ("--global-batch-size", "64")
    plain, whole, run = (
        as_it_stands(run_of(DENSE, *batch, *words, nodes=4)).step
        for words in ((), ("--recompute-granularity", "full"), flags)
    )
    share = recomputed / 6
    for values in ("saved_bytes", "recompute_seconds"):
        none, every, some = (getattr(step, values)[1] for step in (plain, whole, run))
        assert some == pytest.approx(none + share * (every - none))
