"""Runs of programs that configure Megatron themselves, and the lines that each of them accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

from megatron_pipemem.model.model import Model
from megatron_pipemem.tools.advise.advice import advise
from megatron_pipemem.tools.advise.consumers import NEMO_RL, SLIME, SWIFT, VERL, call, changes
from megatron_pipemem.tools.advise.programs import read_program, read_settings
from megatron_pipemem.tools.advise.reading import Context, Reading
from megatron_pipemem.tools.advise.shell import training_command
from megatron_pipemem.tools.config.cluster import Cluster
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.megatron.known_flags import known_flags
from tests.watching.refusals import refused

CONTEXT = Context(known_flags(), load("h100-80g", Cluster))
BASE_YAML = """
policy:
  model_name: nobody/no-model
  train_global_batch_size: 64
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  make_sequence_length_divisible_by: ${policy.megatron_cfg.tensor_model_parallel_size}
  precision: bfloat16
  megatron_cfg:
    enabled: true
    activation_checkpointing: false
    recompute_granularity: full
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    context_parallel_size: 1
    expert_model_parallel_size: 1
    num_layers_in_first_pipeline_stage: null
    optimizer: {lr: 1.0e-6, use_distributed_optimizer: true}
    peft: {enabled: false}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
OWN_YAML = """
defaults: base.yaml
policy:
  model_name: Qwen/Qwen3-8B-Base
  megatron_cfg:
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 4
    num_layers_in_first_pipeline_stage: 8
    sequence_parallel: true
cluster: {num_nodes: 2}
"""
VERL_SCRIPT = """
N=2
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    data.max_prompt_length=1024 data.max_response_length=$((1024 * 3)) actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.model.path="${HOME_OF_MODELS}/Qwen3-8B" actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=8 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=$N
"""
SLIME_SCRIPT = """
MODEL_ARGS=(--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention
   --num-query-groups 8 --kv-channels 128 --swiglu --normalization RMSNorm --position-embedding-type rope --vocab-size 151936
   --disable-bias-linear --qk-layernorm --untie-embeddings-and-output-weights)
ray job submit --address=http://127.0.0.1:8265 -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 \\
   ${MODEL_ARGS[@]} --hf-checkpoint /models/Qwen3-8B --rollout-batch-size 32 --n-samples-per-prompt 4 \\
   --rollout-max-response-len 4096 --num-steps-per-rollout 1 --use-dynamic-batch-size --max-tokens-per-gpu 8192 \\
   --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 \\
   --decoder-first-pipeline-num-layers 8 --attention-dropout 0.0 --hidden-dropout 0.0
"""
SWIFT_SCRIPT = """
export NNODES=2
NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --tuner_type full --packing true --max_length 4096 \\
   --micro_batch_size 1 --global_batch_size 64 --tensor_model_parallel_size 2 --sequence_parallel true \\
   --pipeline_model_parallel_size 4 --decoder_first_pipeline_num_layers 8 --tp_comm_overlap false
"""


@pytest.fixture
def nemo(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE_YAML, encoding="utf-8")
    path = tmp_path / "own.yaml"
    path.write_text(OWN_YAML, encoding="utf-8")
    return path


def read(source: str, nemo: Path, *overrides: str) -> Reading:
    scripts = {"verl": VERL_SCRIPT, "slime": SLIME_SCRIPT, "swift": SWIFT_SCRIPT}
    if source == "nemo":
        return read_settings(nemo, overrides, CONTEXT)
    return read_program([*training_command(scripts[source]).words, *overrides], CONTEXT)


PROGRAMS = {"nemo": NEMO_RL, "verl": VERL, "slime": SLIME, "swift": SWIFT}


@pytest.mark.parametrize("source", PROGRAMS)
def test_the_same_run_is_read_from_every_program(source, nemo):
    reading = read(source, nemo)
    run, cut = reading.run, reading.run.parallelism
    assert replace(run.model, source="") == replace(load("qwen3-8b", Model), source="")
    micro, batch = (2, 128) if source in ("verl", "slime") else (1, 64)
    assert (cut.tp, cut.pp, cut.dp, cut.cp, cut.micro_batch, cut.global_batch) == (2, 4, 2, 1, micro, batch)
    assert cut.sequence_parallel and run.precision == "bf16" and run.flags["use-distributed-optimizer"] is True
    assert run.flags["decoder-first-pipeline-num-layers"] in (8, "8")
    assert run.schedule.recompute == ("selective" if source == "swift" else "none")
    assert reading.consumer is PROGRAMS[source] and "tp-comm-overlap" not in run.flags


LINES = {
    "nemo": (
        "++policy.megatron_cfg.model_overrides.pipeline_model_parallel_layout=",
        "++policy.megatron_cfg.num_layers_in_first_pipeline_stage=null",
    ),
    "verl": (
        "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=my_pipemem",
        "++actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_model_parallel_layout=",
        "++actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=null",
    ),
    "slime": ("--custom-megatron-init-path", "my_pipemem.init", "--pipeline-model-parallel-layout"),
    "swift": ("--external_plugins", "my_pipemem.py", "--pipeline_model_parallel_layout"),
}
GONE = {
    "slime": ["--decoder-first-pipeline-num-layers", "8"],
    "swift": ["--decoder_first_pipeline_num_layers"],
}


@pytest.mark.parametrize("source", PROGRAMS)
def test_the_line_is_one_that_the_program_accepts(source, nemo):
    reading = read(source, nemo)
    way = advise(reading.run, names=("1f1b", "zb-h1")).proposals["same memory"]
    added, gone = changes(reading.consumer, reading.run, way, reading.flags)
    starts = [word.partition("=")[0] + "=" * ("=" in word) for word in added]
    assert call(way) == 'megatron_pipemem.enable("zb-h1")'
    for line in LINES[source]:
        assert line in added or line in starts, (line, added)
    assert gone == GONE.get(source, [])
    assert not any("pipemem-" in word for word in added)


def test_programs_are_told_of_the_schedules_that_they_run(nemo):
    offered = {source: set(read(source, nemo).consumer.families) for source in PROGRAMS}
    assert offered["nemo"] == {"1f1b", "zb-h1"} and "v-half" not in offered["verl"]
    assert "v-half" not in offered["slime"] | offered["swift"] | offered["verl"]


def test_stages_of_a_hybrid_model_are_cut_in_its_pattern(nemo):
    further = ("num_layers_in_first_pipeline_stage=null",)
    name = "policy.model_name=nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    reading = read("nemo", nemo, name, *(f"policy.megatron_cfg.{override}" for override in further))
    advice = advise(reading.run, names=("1f1b",))
    assert advice.verdict == "layout" and advice.stock is not None
    (word,) = changes(reading.consumer, reading.run, advice.stock, reading.flags)[0]
    key, _, pattern = word.partition("=")
    assert key == "++policy.megatron_cfg.model_overrides.hybrid_layer_pattern" and pattern.count("|") == 3


def test_unknown_values_matter_only_if_sizes_follow_from_them(nemo):
    path = "actor_rollout_ref.actor.megatron.dist_checkpointing_path=\0CKPT\0"
    assert read("verl", nemo, path).run == read("verl", nemo).run
    assert read("slime", nemo, "--num-query-groups", "\0GROUPS\0").run.model.kv_heads == 8  # of the checkpoint's name
    with refused("unknown-size", "TP=VALUE"):
        read("verl", nemo, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=\0TP\0")


def test_recomputation_of_nemo_rl_needs_its_switch(nemo):
    run = read("nemo", nemo, "policy.megatron_cfg.activation_checkpointing=true", "cluster.num_nodes=4").run
    assert run.schedule.recompute == "full" and run.parallelism.dp == 4


def test_nodes_that_generate_do_not_train(nemo):
    apart = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.num_nodes=1"]
    assert read("nemo", nemo, *apart).run.parallelism.dp == 1


@pytest.mark.parametrize(
    ("source", "override", "rank"),
    [
        ("nemo", "policy.megatron_cfg.peft.enabled=true policy.megatron_cfg.peft.dim=4", 4),
        ("verl", "actor_rollout_ref.model.lora_rank=16", 16),
        ("swift", "--tuner_type=lora", 8),
    ],
)
def test_adapters_freeze_the_layers(source, override, rank, nemo):
    execution = read(source, nemo, *override.split()).run.execution
    assert (execution.adapters, execution.frozen) == (rank, ("language",))


@pytest.mark.parametrize(
    ("source", "override", "told"),
    [
        ("nemo", "policy.model_name=a/b", ("unknown-size", "a/b")),
        ("nemo", "policy.model_name=zai-org/GLM-4.6V", ("unsupported-model", "vision")),
        ("nemo", "policy.megatron_cfg.enabled=false", ("wrong-file",)),
        ("nemo", "policy.train_global_batch_size=many", ("bad-number", "many")),
        ("nemo", "cluster.num_nodes=null", ("does-not-divide", 8)),
        ("verl", "trainer.nnodes=\0NODES\0", ("unknown-size", "NODES=VALUE")),
        (
            "verl",
            "actor_rollout_ref.actor.use_dynamic_bsz=False",
            ("unknown-size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ),
        ("verl", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=x", ("bad-number", "x")),
        ("slime", "--normalization=x", ("bad-choice", "RMSNorm")),
        ("slime", "--hidden-dropout=x", ("bad-number", "x")),
        ("swift", "--max_length=long", ("bad-number", "long")),
    ],
)
def test_what_is_missing_or_wrong_is_named(source, override, told, nemo):
    if source == "nemo" and "num_nodes" in override:
        override += " policy.megatron_cfg.pipeline_model_parallel_size=3"
    with refused(*told):
        read(source, nemo, *override.split())


SFT_SCRIPT = """
torchrun --nnodes=2 --nproc-per-node=${NUM_TRAINERS:-8} -m verl.trainer.sft_trainer data.train_batch_size=96 \\
    data.max_length=2048 data.use_dynamic_bsz=$DYNAMIC data.max_token_len_per_gpu=8192 data.micro_batch_size_per_gpu=3 \\
    model.path=/models/Qwen3-8B engine=megatron optim=megatron engine.tensor_model_parallel_size=2 \\
    engine.pipeline_model_parallel_size=4 engine.virtual_pipeline_model_parallel_size=null \\
    engine.override_transformer_config.recompute_granularity=full trainer.nnodes=7
"""


def test_layers_of_slime_that_have_no_flag_are_those_of_the_checkpoint():
    spec = SLIME_SCRIPT.replace("/models/Qwen3-8B", '/models/NAME --spec "slime_plugins.models.qwen3_5" "get_spec"')
    checkpoint_layers = read_program(training_command(spec.replace("NAME", "Qwen3.5-9B")).words, CONTEXT)
    assert checkpoint_layers.run.model.linear_attention_freq == 4 and not any(
        "--spec" in sentence for sentence in checkpoint_layers.not_read
    )
    other = read_program(training_command(spec.replace("NAME", "our-own")).words, CONTEXT)
    assert other.run.model.linear_attention_freq == 1 and any("--spec (other layers)" in s for s in other.not_read)


@pytest.mark.parametrize(("dynamic", "micro", "batch"), [("True", 4, 96), ("False", 3, 96)])
def test_verls_trainer_for_fine_tuning_is_read(dynamic, micro, batch):
    reading = read_program(training_command(SFT_SCRIPT, {"DYNAMIC": dynamic}).words, CONTEXT)
    run, cut = reading.run, reading.run.parallelism
    assert replace(run.model, source="") == replace(load("qwen3-8b", Model), sequence=2048, source="")
    assert (cut.tp, cut.pp, cut.dp, cut.micro_batch, cut.global_batch, cut.chunks) == (2, 4, 2, micro, batch, None)
    assert cut.sequence_parallel and run.precision == "bf16" and run.schedule.recompute == "full"
    added, _ = changes(reading.consumer, run, advise(run).proposals["same memory, chunks"], reading.flags)
    assert any(word.startswith("++engine.") for word in added)


def test_another_engine_of_verl_is_refused():
    words = training_command(SFT_SCRIPT.replace("engine=megatron", "engine=fsdp"), {"DYNAMIC": "True"}).words
    with refused("wrong-file", "fsdp", "engine=megatron"):
        read_program(words, CONTEXT)


def test_a_length_that_swift_is_not_given_is_told():
    words = training_command(SWIFT_SCRIPT.replace("--max_length 4096", "--max_completion_length 9")).words
    assert any("no --seq-length" in sentence for sentence in read_program(words, CONTEXT).assumed)


def test_settings_of_swift_in_a_file_are_under_its_flags(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "sft.yaml").write_text(
        "model: Qwen/Qwen3-8B\nmax_length: 2048\nglobal_batch_size: 8\ntrain: {gpus: 4, pipeline_model_parallel_size: 4}\n"
    )
    script = tmp_path / "train.sh"
    for words in ("conf/sft.yaml", "--use_ray true --config conf/sft.yaml", "--config elsewhere/conf/sft.yaml"):
        command = training_command(f"megatron sft {words} --global_batch_size 16", folder=tmp_path)
        reading = read_program(command.words, replace(CONTEXT, source=str(script)))
        cut = reading.run.parallelism
        assert (reading.run.model.sequence, cut.pp, cut.ranks, cut.global_batch) == (2048, 4, 4, 16)
        assert any("is not there" in sentence for sentence in reading.not_read)


def test_settings_based_on_themselves_are_refused(nemo):
    (nemo.parent / "base.yaml").write_text("defaults: own.yaml\n", encoding="utf-8")
    with refused("based-on-itself"):
        read("nemo", nemo)
    (nemo.parent / "base.yaml").unlink()
    with refused("no-file", "base.yaml"):
        read("nemo", nemo)
