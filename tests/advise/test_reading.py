"""A run is read back from the command that starts it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

from megatron_pipemem.model.model import BY_ACTION, Model
from megatron_pipemem.tools.advise.programs import read_program
from megatron_pipemem.tools.advise.reading import Context, Reading, named_cluster
from megatron_pipemem.tools.config.arguments import UNKNOWN
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import known_model, load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import Nodes, all_flags, command, min_nodes, script_flags
from megatron_pipemem.tools.megatron.known_flags import known_flags
from tests.watching.refusals import refused

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "configs" / "runs").glob("*.yaml"))
MODELS = sorted(path.stem for path in (ROOT / "megatron_pipemem" / "tools" / "config" / "models").glob("*.yaml"))
NO_FLAG = {"gemma2-9b"}
"""Models with an activation that the training script has no flag for."""


def back(run: Run) -> Run:
    """The run that is read from the command of this one."""
    nodes = min_nodes(run)
    start = command(run, Nodes(count=nodes, rank=0, address="node0" if nodes > 1 else None))
    return read_program(start.words, Context(known_flags(), run.cluster)).run


def told(run: Run) -> dict[str, str]:
    """Its flags, without the folder of its output."""
    flags = all_flags(replace(run, output="out", trace=False))
    return {name: str(value) for name, value in flags.items() if value is not None and value is not False}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_is_read_back(path):
    run = load(path, Run)
    read_back = back(run)
    assert (told(read_back), read_back.parallelism, read_back.cluster.num_devices) == (
        told(run),
        run.parallelism,
        run.parallelism.ranks,
    )


PUBLIC = ("qwen3-next-80b-a3b", "glm-5.2", "nvidia-nemotron-3-super-120b-a12b")
"""Models with gated delta nets, with sparse attention, and with experts in a latent."""


@pytest.mark.parametrize("name", [*(name for name in MODELS if name not in NO_FLAG), *PUBLIC])
def test_every_model_is_read_back(name):
    run = load(ROOT / "configs" / "runs" / "llama3-70b-64xh100.yaml", Run)
    model = known_model(name) if name in PUBLIC else load(name, Model)
    run = replace(run, model=model, schedule=replace(run.schedule, name="stock"))
    assert told(back(run)) == told(run)


SMALL = "--num-layers 8 --hidden-size 96 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1"
START = "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py"


def read(flags: str = "", start: str = START, **settings) -> Reading:
    words = shlex.split(f"{start} {SMALL} {flags}")
    return read_program(words, Context(known_flags(), load("h100-80g", Cluster), **settings))


def test_sizes_follow_from_the_launcher():
    cut = read("--pipeline-model-parallel-size 4 --global-batch-size 64 --vocab-size 99").run.parallelism
    assert (cut.pp, cut.dp, cut.microbatches) == (4, 4, 16)


def test_flags_that_say_the_same_twice_are_both_read():
    run = read("--vocab-size 99 --use-rotary-position-embeddings --position-embedding-type rope").run
    assert run.model.position == "rope" and "position-embedding-type" not in run.flags


def test_recomputation_by_the_schedule_is_priced():
    run = read("--vocab-size 99 --pipemem-schedule v-half --pipemem-recompute selective").run
    assert run.schedule.recomputes_by_action and run.execution.recompute_modules == BY_ACTION
    assert "--pipemem-recompute selective" in " ".join(script_flags(run))


def test_with_a_number_of_devices_the_launcher_may_be_unknown():
    start = f"torchrun --nproc_per_node {UNKNOWN}GPUS{UNKNOWN} --nnodes {UNKNOWN}N{UNKNOWN} pretrain_gpt.py"
    assert read("--vocab-size 99", start, devices=32).run.parallelism.ranks == 32
    reading = read("--vocab-size 99 --pipeline-model-parallel-size 4", start)
    assert reading.run.parallelism.ranks == 4 and "GPUS" in reading.assumed[-2]


@pytest.mark.parametrize(
    ("start", "flags", "ranks"),
    [
        ("mpirun -np 64 --npernode 8 python a.py", "", 64),
        ("mpirun -N 4 -n 16 numactl -N 0 python a.py", "", 16),
        ("srun --ntasks=32 python a.py", "", 32),
        ("srun -n 32 -N4 --gres=gpu:a100:8 python a.py", "", 32),
        ("srun -N 4 --ntasks-per-node 8 python a.py", "", 32),
        ("srun -N 4 --ntasks-per-node 1 torchrun --nproc_per_node 8 a.py", "", 32),
        ("mpirun -np 4 torchrun --nproc-per-node 8 a.py", "", 32),
        ("--nodes=2 --gpus-per-node=4 srun python a.py", "", 8),
        ("deepspeed --num_nodes 2 --num_gpus 8 a.py", "", 16),
        ("accelerate launch --num_processes 16 --num_machines 2 a.py", "", 16),
        ("python -m torch.distributed.launch --nproc_per_node=8 --nnodes=2 a.py", "", 16),
        ("nohup timeout 9h env N=3 torchrun --nproc-per-node 8 --nnodes 2 a.py", "", 16),
        ("torchrun --nproc-per-node 8 --nnodes 1:4 a.py", "", 32),
        ("torchrun --nproc-per-node 8 a.py", "--pipeline-model-parallel-size 4", 8),
        ("torchrun --nproc-per-node 8 a.py", "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 3", 24),
        ("torchrun --nproc-per-node 8 a.py", "--expert-model-parallel-size 16 --num-experts 16", 16),
        ("torchrun --nproc-per-node gpu --nnodes 2 a.py", "", 16),
        ("python a.py", "--pipeline-model-parallel-size 4", 4),
    ],
)  # fmt: skip
def test_devices_follow_from_every_launcher(start, flags, ranks):
    assert read(f"--vocab-size 99 --global-batch-size 64 {flags}", start).run.parallelism.ranks == ranks


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50257),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /m/tokenizer.model", 32000),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /m/Qwen3-8B", 151936),
        ("--tokenizer-type Llama3Tokenizer", 128256),
        ("", 128256),
    ],
)
def test_a_vocabulary_follows_from_the_tokenizer(flags, tokens):
    reading = read(flags)
    assert reading.run.model.vocabulary == tokens and f"{tokens:,}" in reading.assumed[0]


def test_what_a_first_command_leaves_open_is_assumed():
    small = "--num-layers 8 --hidden-size 96 --num-attention-heads 4"
    words = shlex.split(f"python pretrain_gpt.py {small} --pipeline-model-parallel-size 4")
    reading = read_program(words, Context(known_flags(), load("h100-80g", Cluster)))
    cut = reading.run.parallelism
    assert (cut.ranks, cut.micro_batch, cut.global_batch, reading.run.model.sequence) == (4, 1, 1, 4096)
    assert len(reading.assumed) == 5


def test_everything_that_is_missing_is_asked_for_at_once():
    flags = "--tensor-model-parallel-size \0TP\0 --pipeline-model-parallel-size \0PP\0 --global-batch-size \0002\0 --lr \0LR\0"
    with refused("unknown-size", "TP=VALUE", "PP=VALUE", "argument 2") as raised:
        read(flags)
    assert "LR" not in str(raised.value)


def test_values_without_a_price_that_megatron_refuses_are_read_over():
    """They are those of forks, or of a script whose arguments are shifted."""
    reading = read("--vocab-size 9 --position-embedding-type rotary --train-iters 0 --save-interval none --lr x")
    assert reading.run.model.position == "rope" and not {"train-iters", "save-interval"} & reading.run.flags.keys()
    assert all(text in reading.not_read[0] for text in ("'rotary'", "--train-iters '0'", "--save-interval 'none'"))
    assert read("--vocab-size 9 --train-iters 5").not_read == ()


def test_flags_that_are_not_megatrons_are_named_and_read_over():
    reading = read(
        "--vocab-size 9 --noop-layers 3 --patch-size 14 --gemm-gradient-accumulation-fusion --hiden-size 9 --vision-tower clip"
    )
    (sentence,) = reading.not_read
    assert all(
        name in sentence
        for name in (
            "--patch-size",
            "--gemm",
            "--noop-layers (other layers",
            "--vision-tower (a vision tower)",
            "did you mean --hidden-size?",
        )
    )
    assert not read("--vocab-size 9").not_read


def test_interleaved_stages_of_all_three_flags():
    for flags in (
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-layers-per-virtual-pipeline-stage 1",
        "--pipeline-model-parallel-layout Et|(t|)*6tL",
    ):
        assert read(f"--pipeline-model-parallel-size 4 --vocab-size 99 {flags}").run.parallelism.chunks == 2


def test_megatrons_default_width_of_a_gated_ffn():
    assert read("--swiglu --vocab-size 99").run.model.ffn_width == 256  # 64 divides it, up to 4 x 96 x 2/3


@pytest.mark.parametrize(
    ("text", "kinds"),
    [("2", "E-" * 4), ("[0]*3+[1]*5", "---EEEEE"), ("([1]+[0])*4", "E-" * 4), ("[0]*2+[1]*3+[0]*3", "--EEE---")],
)
def test_layers_with_experts(text, kinds):
    model = read(f"--vocab-size 99 --num-experts 4 --moe-layer-freq '{text}'").run.model
    assert model.kinds == tuple(f"*{kind}" for kind in kinds)


def test_experts_on_tensor_parallel_ranks_need_sequence_parallelism():
    reading = read("--vocab-size 99 --num-experts 4 --tensor-model-parallel-size 2")
    assert reading.run.parallelism.sequence_parallel and "--sequence-parallel" in " ".join(reading.assumed)


@pytest.mark.parametrize("text", ["4", "([1]*3+[0])*2"])
def test_every_nth_layer_has_attention(text):
    flags = f"--vocab-size 9 --experimental-attention-variant gated_delta_net --linear-attention-freq '{text}'"
    assert read(flags).run.model.kinds == ("G-", "G-", "G-", "*-") * 2


@pytest.mark.parametrize(
    ("code", "flags", "start", "values"),
    [
        ("does-not-divide", "--vocab-size 9 --global-batch-size 4", START, ["--global-batch-size", 16]),
        ("unknown-size", "--vocab-size 9 --tensor-model-parallel-size \0TP\0", START, ["TP=VALUE"]),
        ("does-not-divide", "--vocab-size 9 --pipeline-model-parallel-size 3", START, ["16"]),
        ("unsupported-model", "--vocab-size 9 --decoder-seq-length 128", START, ["--decoder-seq-length"]),
        ("bad-number", "--vocab-size x", START, ["x"]),
        ("bad-number", "--vocab-size 9 --micro-batch-size 0", START, ["--micro-batch-size", 1]),
        ("bad-number", "--vocab-size 9 --num-layers --tensor-model-parallel-size 2", START, ["--num-layers"]),
        (
            "bad-syntax",
            "--vocab-size 9 --experimental-attention-variant gated_delta_net --linear-attention-freq [0]*4+[1]*5",
            START,
            ["--linear-attention-freq"],
        ),
        ("bad-syntax", "--vocab-size 9 --num-experts 4 --moe-layer-freq x", START, ["x"]),
    ],
)
def test_what_is_missing_or_wrong_is_named(code, flags, start, values):
    with refused(code, *values):
        read(flags, start)


@pytest.mark.parametrize("flag", ["freeze-vision-tower", "tokenizer-prompt-format", "data-path2"])
def test_flags_of_the_program_itself_do_not_hinder(flag):
    reading = read(f"--vocab-size 9 --{flag} x")
    assert flag in reading.flags and flag not in reading.run.flags


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("#SBATCH --gres=gpu:a100:8", "a100-80g"),
        ("glm52_pretrain_192gpu_gb200_bf16", "b200"),
        ("# 8xH100 or H800", "h100-80g"),
        ("srun -C mi300x train.py", "mi300x"),
        ("on A100 and H200", None),
        ("data100 h1000", None),
    ],
)
def test_devices_are_those_that_a_text_names(text, cluster):
    assert named_cluster(text) == cluster
