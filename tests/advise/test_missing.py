"""All values that a script lacks are asked for in one list, and with exactly these the script is read."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("megatron.training")

from megatron_pipemem.tools.advise.reading import Reading
from megatron_pipemem.tools.cli.advise import _read
from megatron_pipemem.tools.config.cluster import DEFAULT_CLUSTER
from tests.watching.refusals import refused

POSITIONAL = """
ENV=$1
SIZE=$2
TP=${3}
PP=${4}
if [ $ENV = one ]; then
    NODES=1
elif [ $ENV = many ]; then
    NODES=${WORLD_SIZE}
fi
case $SIZE in
small) LAYERS=8; HIDDEN=512 ;;
large) LAYERS=16; HIDDEN=1024 ;;
esac
torchrun --nproc-per-node 8 --nnodes $NODES pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN \\
    --num-attention-heads 8 --vocab-size 999 --seq-length $SEQUENCE --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size $PP --lr $LR --save ${5:-none}
"""
VERL = """
python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL trainer.nnodes=$NODES \\
    actor_rollout_ref.actor.use_dynamic_bsz=False {} actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text: str, *words: str, name: str = "train.sh", **variables: str) -> Reading:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return _read([name, *words], variables, DEFAULT_CLUSTER, None, None, None)

    return read


def remedies(message: str) -> list[str]:
    return re.search(r"give (.*?)(?:, or write|;|$)", message)[1].split(", ")


def test_arguments_are_asked_for_with_their_names_and_values(script):
    with refused("unknown-size") as raised:
        script(POSITIONAL)
    message = str(raised.value)
    for text in ("argument 1 ENV (one, many)", "argument 2 SIZE (small, large)", "argument 3 TP", "argument 4 PP"):
        assert text in message
    assert "--env SEQUENCE=VALUE" in message and "--env LAYERS" not in message and "LR" not in message
    run = script(POSITIONAL, "one", "large", "2", "4", SEQUENCE="512").run
    assert (run.model.layers, run.model.hidden, run.parallelism.tp, run.parallelism.pp) == (16, 1024, 2, 4)


def test_a_comment_that_starts_the_script_is_shown(script):
    with refused("unknown-size") as raised:
        script("# sh train.sh one large 2 4\n" + POSITIONAL)
    assert str(raised.value).count("one large 2 4") == 1


def test_settings_and_variables_are_asked_for_together(script):
    text = VERL.format("")
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    with refused("unknown-size") as raised:
        script(text)
    words = remedies(str(raised.value))
    assert {*words} == {"--env NODES=VALUE", "actor_rollout_ref.model.path=MODEL", f"{micro}=NUMBER"}
    run = script(text, "actor_rollout_ref.model.path=Qwen/Qwen3-8B", f"{micro}=2", NODES="2").run
    assert (run.model.layers, run.parallelism.ranks, run.parallelism.micro_batch) == (36, 16, 2)


def test_a_model_that_is_only_in_the_script_s_name_is_assumed(script):
    text = VERL.format("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1").replace(
        "$MODEL", "$HOME/path_to_model"
    )
    reading = script(text, name="run_qwen2.5_7b_ppo.sh", NODES="1")
    assert reading.run.model.hidden == 3584
    assert any("qwen2.5-7b" in sentence and "run_qwen2.5_7b_ppo.sh" in sentence for sentence in reading.assumed)
    with refused("unknown-size", "actor_rollout_ref.model.path"):
        script(text.replace("path_to_model", "our-13b"), name="run_qwen2.5_7b_ppo.sh", NODES="1")


def test_a_size_that_is_missing_is_given_after_the_script(script):
    text = "torchrun --nproc-per-node 4 pretrain_gpt.py --vocab-size 99 --pipeline-model-parallel-size 4"
    with refused("unknown-size") as raised:
        script(text)
    assert [word.partition("=")[0] for word in remedies(str(raised.value))] == [
        *("--num-layers", "--hidden-size", "--num-attention-heads")
    ]
    run = script(text, "--num-layers=8", "--hidden-size=64", "--num-attention-heads=4").run
    assert (run.model.layers, run.model.hidden, run.model.heads) == (8, 64, 4)


def test_a_file_that_is_sourced_has_the_arguments_of_the_script(script, tmp_path):
    (tmp_path / "sizes.sh").write_text('SIZE=$1\nset_layers() { source ./layers.sh; }\nset_layers "${1}0"\n')
    (tmp_path / "layers.sh").write_text("LAYERS=$1\n")
    text = "source ./sizes.sh\ntorchrun --nproc-per-node 4 pretrain_gpt.py --vocab-size 99 --num-layers $LAYERS"
    text += " --hidden-size 64 --num-attention-heads 4 --pipeline-model-parallel-size 4"
    assert script(text, "4").run.model.layers == 40


def test_more_devices_than_the_script_has_are_assumed_if_the_sizes_need_them(script):
    text = "torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py --vocab-size 99 --num-layers 16 --hidden-size 64"
    text += " --num-attention-heads 8 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
    reading = script(text)
    assert reading.run.parallelism.ranks == 32 and any("32 devices" in sentence for sentence in reading.assumed)


def test_devices_of_a_node_that_has_more_are_the_first(script):
    text = "# A100\nexport NPROC_PER_NODE=3\nmegatron sft --model Qwen/Qwen3-8B --pipeline_model_parallel_size 3"
    script(text)
    cluster = _read(["train.sh"], {}, "a100-80g", None, None, None).run.cluster
    assert cluster.devices_per_node == 3 and cluster.switches == ((0, 1), (2,))


@pytest.mark.parametrize(
    "program", ["run_text_generation.py", "tools/checkpoint/convert.py", "-m megatron.inference.server"]
)
def test_a_program_that_does_not_train_is_refused(script, program):
    with refused("no-command", "does not train"):
        script(f"torchrun --nproc-per-node 8 {program} --num-layers 16 --hidden-size 64 --num-attention-heads 8")
