"""One function asks all tables of conflicts and refusals, for a start by flags and for Megatron's configurations alike."""

from __future__ import annotations

import pytest
from refusals import refused

from megatron_pipemem import gates as room
from megatron_pipemem import refusals
from megatron_pipemem.gates import Wish, check_gates, gates
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule

TABLES = {name: each for name, each in vars(refusals).items() if isinstance(each, refusals.Refusals | refusals.Rule)}
ENGINE = {"transformer_impl": "transformer_engine"}
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
LATE_SCALES = {"fp8": "e4m3", "fp8_recipe": "delayed"}
V = Placement.v_shape(4)
# By the table that refuses: a wish that it is for, another that takes the same settings, and the settings.
WISHES = {
    "SCHEDULES": (Request("1f1b"), Request("stock"), {"use_megatron_fsdp": True}),
    "GRAPHS": (Request("v-half"), Request("1f1b"), GRAPHS),
    "WHOLE_STEP": (Request("v-half"), Request("zb-h1"), {"cuda_graph_impl": "full_iteration"}),
    "CAPTURED": (Request("1f1b"), Request("stock"), GRAPHS | {"cuda_graph_warmup_steps": 0}),
    "UNPAIRED": (Request("1f1b"), Request("1f1b", pairs=True), {"overlap_moe_expert_parallel_comm": True}),
    "PAIRS": (Request("1f1b", pairs=True), Request("1f1b"), {"mtp_num_layers": 1}),
    "PACKED": (Request("1f1b"), Request("stock"), {"sft": True, "micro_batch_size": 2}),
    "BIASED_MLPS": (
        Request("1f1b"),
        Request("stock"),
        {"recompute_granularity": "selective", "recompute_modules": "core_attn mlp", "add_bias_linear": True},
    ),
    "SHARED_DOCUMENTS": (
        Request("1f1b"),
        Request("stock"),
        {"dataloader_inter_document_masking": True, "context_parallel_size": 2},
    ),
    "OVERLAPPED": (Request("1f1b", overlap_steps=True), Request("1f1b"), {"log_params_norm": True}),
    "DELAYED": (
        Request("pipedream-2bw", overlap_steps=True),
        Request("1f1b", overlap_steps=True),
        {"save_params_interval": 5},
    ),
    "ROLLED_BACK": (
        Request("1f1b", overlap_steps=True),
        Request("pipedream-2bw", overlap_steps=True),
        {"optimizer": "muon", "clip_grad": 1.0},
    ),
    "DELAYED_SCALES": (
        Request("1f1b", overlap_steps=True),
        Request("1f1b"),
        LATE_SCALES | {"clip_grad": 1.0},
    ),
    "REORDERED": (Request("1f1b", microbatch_costs="tokens"), Request("1f1b"), {"moe_enable_routing_replay": True}),
    "ASYNCHRONOUS": (Request("pipedream-2bw"), Request("1f1b"), {"use_distributed_optimizer": True}),
    "PER_MICROBATCH": (Request("pipedream"), Request("pipedream-2bw"), {"overlap_grad_reduce": True}),
    "REPLICAS": (Request("chimera"), Request("1f1b"), {"qk_clip": True}),
    "VOCABULARY": (
        Request("1f1b", vocab_parallel="1"),
        Request("1f1b", vocab_parallel="auto"),
        {"fp32_residual_connection": True},
    ),
    "SLICED": (
        Request("seq1f1b"),
        Request("auto", options={"slices": "1,2"}),
        {"moe_aux_loss_coeff": 0.01},
    ),
    "FUSED_ROTARY": (Request("seq1f1b"), Request("1f1b"), {"multi_latent_attention": True, "apply_rope_fusion": True}),
    "LAYERWISE": (Request("stock", random="layerwise"), Request("stock"), {"use_te_rng_tracker": True}),
    "LAYERWISE_SLICED": (Request("seq1f1b", random="layerwise"), Request("seq1f1b"), {"hidden_dropout": 0.1}),
    "DELAYED_SCALING": (Request("1f1b", recompute="full"), Request("1f1b"), ENGINE | LATE_SCALES),
    "SPLIT_BACKWARD": (Request("v-half"), Request("1f1b"), ENGINE | {"tp_comm_overlap": True}),
}


def sentences(table: refusals.Refusals | refusals.Rule) -> list[str]:
    return [table.sentence] if isinstance(table, refusals.Rule) else [*table.sentences.values()]


def test_every_table_is_asked_once():
    asked = [table for _, table in room._GATES]
    assert sorted(map(id, asked)) == sorted(map(id, TABLES.values()))
    assert {*WISHES, "CPU"} == {*TABLES}


@pytest.mark.parametrize("name", WISHES)
def test_a_table_is_for_the_runs_that_its_feature_is_in(name):
    closed, open_to, settings = WISHES[name]
    own = sentences(TABLES[name])
    assert any(str(error).endswith(tuple(own)) for error in gates(Wish(closed, settings.get)))
    assert not any(str(error).endswith(tuple(own)) for error in gates(Wish(open_to, settings.get)))
    assert [*gates(Wish(closed, {}.get))] == []


def test_kernels_of_a_gpu_are_refused_on_cpu_ranks_under_every_schedule():
    settings = {"moe_permute_fusion": True}
    for name in ("stock", "1f1b"):
        check_gates(Wish(Request(name), settings.get))
        with refused("unsupported-setting", "--moe-permute-fusion"):
            check_gates(Wish(Request(name), settings.get, on_cpu=True))


def test_a_chosen_schedule_says_more_than_the_request():
    """A search may find whole backwards, slices or another placement."""
    request = Request("auto", options={"slices": "1,2"})
    sliced = build_schedule("seq1f1b", num_devices=4, num_microbatches=8)
    dropout = {"attention_dropout": 0.1}.get
    check_gates(Wish(request, dropout))
    with refused("unsupported-setting", "--attention-dropout"):
        check_gates(Wish(request, dropout, sliced))
    splits, whole = (build_schedule(name, num_devices=4, num_microbatches=8) for name in ("zb-h1", "1f1b"))
    overlapped = {**ENGINE, "tp_comm_overlap": True}.get
    check_gates(Wish(request, overlapped, whole))
    with refused("unsupported-setting", "--tp-comm-overlap"):
        check_gates(Wish(request, overlapped, splits))
    replayed = {"moe_enable_routing_replay": True}.get
    check_gates(Wish(Request("auto"), replayed, placement=Placement.linear(4)))
    check_gates(Wish(Request("interleaved"), replayed, placement=Placement.interleaved(4, 2)))
    with refused("unsupported-setting", "--pipemem-microbatch-costs"):
        check_gates(Wish(Request("auto"), replayed, placement=V))


def test_features_that_exclude_each_other_come_first():
    request = Request("pipedream", overlap_steps=True)
    codes = [error.code for error in gates(Wish(request, {"overlap_grad_reduce": True}.get))]
    assert codes == ["conflicting-features", "unsupported-setting"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("v-half --pipemem-vocab-parallel 1 --fp32-residual-connection", ("fp32_residual_connection",)),
        ("chimera --qk-clip", ("qk_clip",)),
        ("pipedream-2bw --use-distributed-optimizer", ("--use-distributed-optimizer",)),
        ("pipedream", ("--clip-grad", 0)),
        ("seq1f1b --attention-dropout 0.1", ("--attention-dropout", 0)),
        ("1f1b --pipemem-random layerwise --te-rng-tracker", ("use_te_rng_tracker",)),
    ],
)
def test_a_start_by_flags_asks_for_all_features_before_anything_is_built(flags, words):
    """What follows is refused when the model or the optimizer is built, if there are no flags."""
    sizes = ["--pipeline-model-parallel-size", "4", "--num-layers", "24"]
    request, others = take_flags([*sizes, "--pipemem-schedule", *flags.split()])
    with refused("unsupported-setting", *words):
        add_virtual_stages(request, others)
