"""The lines that ``advise`` prints run: Megatron's own parser and our start accept the command that they make.

Commands are random, and of those that Megatron accepts as they are.
"""

from __future__ import annotations

import random
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest
from lanes import rest_nightly

pytest.importorskip("megatron.training")

import torch
from megatron.training.arguments import parse_args, validate_args

from megatron_pipemem.errors import PipememError
from megatron_pipemem.flags import words, words_by_flag
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.model.layout import FIRST_OR_LAST, PATTERN_FLAGS
from megatron_pipemem.tools.advise.advice import advise
from megatron_pipemem.tools.advise.consumers import changes
from megatron_pipemem.tools.advise.programs import read_program
from megatron_pipemem.tools.advise.reading import Context
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import all_flags
from megatron_pipemem.tools.megatron.known_flags import known_flags

LLAMA = {"swiglu": True, "normalization": "RMSNorm", "disable-bias-linear": True, "position-embedding-type": "rope"}
EXPERTS = {
    **{"num-experts": 8, "moe-router-topk": 2, "moe-ffn-hidden-size": 2048, "moe-grouped-gemm": True},
    "moe-token-dispatcher-type": "alltoall",
}
RECOMPUTED = (
    {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1},
    {"recompute-granularity": "selective"},
)
RARE = (
    *({"enable-cuda-graph": True}, {"external-cuda-graph": True}, {"cuda-graph-impl": "local"}),
    *({"no-overlap-p2p-communication": True}, {"defer-embedding-wgrad-compute": True}, {"fp8-format": "hybrid"}),
    {"untie-embeddings-and-output-weights": True},
)


def random_command(seed: int, hybrids: float) -> tuple[int, dict[str, object]]:
    """A number of devices, and the flags of a run with a pipeline, of which a share of ``hybrids`` are hybrid models."""
    draw = random.Random(seed)
    p, tp, cp, dp = draw.choice((2, 4, 8)), draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 1, 2)), draw.choice((1, 2, 4))
    layers = p * draw.choice((2, 4, 6, 8, 12))
    flags: dict[str, object] = {
        **{"hidden-size": draw.choice((2048, 4096)), "num-attention-heads": 32, "micro-batch-size": 1, "bf16": True},
        **{"seq-length": 4096, "max-position-embeddings": 4096, "vocab-size": draw.choice((32000, 128256))},
        **{"pipeline-model-parallel-size": p, "tensor-model-parallel-size": tp, "context-parallel-size": cp},
        **{"tokenizer-type": "NullTokenizer", "lr": 1e-4, "train-iters": 10, "mock-data": True},
        "no-gradient-accumulation-fusion": True,
        "global-batch-size": dp * draw.choice((3, p, 2 * p, 2 * p + 1, 4 * p)),
    }
    if draw.random() < hybrids:
        pattern = draw.choice(("*-", "M*-", "M-M*-")) * (layers // 2)
        size = len(pattern) // p
        is_cut = len(pattern) % p == 0 and draw.random() < 0.5
        stages = [pattern[stage * size : (stage + 1) * size] for stage in range(p)]
        flags[draw.choice(PATTERN_FLAGS)] = "|".join(stages) if is_cut else pattern
        flags |= {} if is_cut else draw.choice(({}, {}, *({name: size} for name in FIRST_OR_LAST)))
    else:
        flags |= {"num-layers": layers} | _cut(draw, layers, p)
        flags |= EXPERTS if draw.random() < 0.25 else {}
        flags |= {"mtp-num-layers": 1, **LLAMA} if draw.random() < 0.1 else {}
    if tp > 1:
        flags |= {"sequence-parallel": True} | ({"tp-comm-overlap": True} if draw.random() < 0.2 else {})
    if draw.random() < 0.6:
        flags |= {"use-distributed-optimizer": True}
        flags |= {"overlap-grad-reduce": True, "overlap-param-gather": True} if draw.random() < 0.5 else {}
    flags |= LLAMA if draw.random() < 0.5 else {}
    flags |= draw.choice(RECOMPUTED) if draw.random() < 0.4 else {}
    for rare in RARE:
        flags |= rare if draw.random() < 0.12 else {}
    return p * tp * cp * dp, flags


def _cut(draw: random.Random, layers: int, p: int) -> dict[str, object]:
    chunks = draw.choice([count for count in (1, 2, 3, 4, 6) if layers // p % count == 0])
    ways: list[dict[str, object]] = [{}]
    if chunks > 1:
        ways += [{"num-virtual-stages-per-pipeline-rank": chunks}]
        ways += [{"num-layers-per-virtual-pipeline-stage": layers // p // chunks}] * 2
    if (layers - 1) % (p - 1) == 0:
        ways += [{"decoder-first-pipeline-num-layers": 1}]
    return draw.choice(ways)


def refused_by_megatron(command: list[str], devices: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why Megatron's parser or its check of arguments stops a command; ``None`` if neither does."""
    card = SimpleNamespace(major=9, minor=0, total_memory=80 << 30)
    with monkeypatch.context() as patch, redirect_stderr(StringIO()) as printed, redirect_stdout(StringIO()):
        for variable, value in {"RANK": 0, "WORLD_SIZE": devices, "CUDA_DEVICE_MAX_CONNECTIONS": 1}.items():
            patch.setenv(variable, str(value))
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(sys, "argv", ["pretrain_gpt.py", *command])
        try:
            validate_args(parse_args())
        except SystemExit:
            return printed.getvalue()
        except (AssertionError, ValueError, RuntimeError) as error:
            return repr(error)
    return None


def flags_of(run: Run) -> dict[str, object]:
    return {flag: value for flag, value in all_flags(run).items() if value not in (None, False)}


def changed(command: list[str], added: list[str], gone: list[str]) -> list[str]:
    """A command with the words of a line: ``add ..., without ...``."""
    names = words_by_flag(gone)
    assert {*names} <= {*words_by_flag(command)}, f"without {gone}, which is not in the command"
    kept, drops = [], False
    for word in command:
        drops = word in names if word.startswith("--") else drops
        kept += [] if drops else [word]
    return [*kept, *added]


SEEDS = [(first, hybrids) for first in range(0, 300, 10) for hybrids in (0.2, 1.0)]


@pytest.mark.parametrize(("first", "hybrids"), rest_nightly(SEEDS, SEEDS[:2], "the same for other seeds"))
def test_lines_run(first, hybrids, monkeypatch):
    context, lines = Context(known_flags(), load("h100-80g", Cluster)), 0
    for seed in range(first, first + 10):
        devices, flags = random_command(seed, hybrids)
        command = words(flags)
        if refused_by_megatron(command, devices, monkeypatch):
            continue
        launcher = ["torchrun", "--nnodes", "1", "--nproc-per-node", str(devices), "pretrain_gpt.py"]
        try:
            reading = read_program([*launcher, *command], context)
            advice = advise(
                reading.run, None, reading.consumer.families, reading.consumer.slices, reading.consumer.pairs
            )
        except PipememError:
            continue
        for way in filter(None, (advice.stock, *advice.proposals.values())):
            added, gone = changes(reading.consumer, reading.run, way, reading.flags)
            line = changed(command, added, gone)
            expected = {flag: value for flag, value in flags_of(way.run).items() if f"--{flag}" not in gone}
            assert flags_of(read_program([*launcher, *line], context).run) == expected, f"seed {seed}, {way.name}"
            request, others = take_flags(line)
            started = others if request is None else add_virtual_stages(request, others)
            refused = refused_by_megatron([*started], devices, monkeypatch)
            assert refused is None, f"seed {seed}, {way.name}: {refused}\n{shlex.join(started)}"
            lines += 1
    assert lines > 5


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "v-half", "hanayo", "chimera"])
@pytest.mark.parametrize("name", PATTERN_FLAGS)
def test_layers_of_the_first_and_last_rank_start_with_a_pattern(schedule, name, monkeypatch):
    flags = {**LLAMA, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 512, "max-position-embeddings": 512}
    flags |= {"micro-batch-size": 1, "global-batch-size": 8, "pipeline-model-parallel-size": 4, "vocab-size": 1000}
    flags |= {"tokenizer-type": "NullTokenizer", "bf16": True, name: "*-" * 16, FIRST_OR_LAST[0]: 4}
    command = [*words(flags), f"--{FIRST_OR_LAST[1]}=8"]
    started = add_virtual_stages(*take_flags([*command, "--pipemem-schedule", schedule]))
    assert refused_by_megatron(started, 4, monkeypatch) is None
    assert not any(flag in word for flag in FIRST_OR_LAST for word in started) and started[-1].count("|") % 4 == 3
