"""One function asks all tables of conflicts and refusals, for a start by flags and for Megatron's configurations alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from refusals import refused

from megatron_pipemem import gates as room
from megatron_pipemem import refusals
from megatron_pipemem.gates import GateQuestion, StepGates, check_gates, gates
from megatron_pipemem.mcore import refusals as refusals_of_models
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.mcore.refusals import check_model
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule

TABLES = {name: table for name, table in vars(refusals).items() if isinstance(table, refusals.Refusals | refusals.Rule)}
ENGINE = {"transformer_impl": "transformer_engine"}
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
EXPERTS = {"num_moe_experts": 8, "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"]}
LATE_SCALES = {"fp8": "e4m3", "fp8_recipe": "delayed"}
BUFFERS = {"tp_comm_overlap": True, "tensor_model_parallel_size": 2}
DELTA_NET = {"experimental_attention_variant": "gated_delta_net"}
SELECTIVE = {"recompute_granularity": "selective"}
V = Placement.v_shape(4)
# By the table that refuses: a question that it is for, another that takes the same settings, and the settings.
QUESTIONS = {
    "SCHEDULES": (Request("1f1b"), Request("stock"), {"use_megatron_fsdp": True}),
    "UNCAPTURED": (Request("v-half"), Request("1f1b"), GRAPHS),
    "GRAPHED": (Request("v-half", graphs=True), Request("v-half"), {"qk_clip": True}),
    "GRAPHED_DELTA_NETS": (
        Request("zb-h1", graphs=True),
        Request("zb-h1"),
        DELTA_NET | {"deterministic_mode": True},
    ),
    "GRAPHED_MODULES": (Request("zb-h1", graphs=True), Request("zb-h1"), SELECTIVE | {"recompute_modules": ["moe"]}),
    "GRAPHED_FP8": (Request("v-half", graphs=True), Request("v-half"), LATE_SCALES),
    "GRAPHED_FP4": (Request("v-half", graphs=True), Request("v-half"), {"fp4": "e2m1", "fp4_param": True}),
    "GRAPHED_RECOMPUTATION": (
        Request("v-half", graphs=True),
        Request("v-half"),
        {"recompute_granularity": "full", "hidden_dropout": 0.1},
    ),
    "EXPERT_MODULES": (Request("v-half", graphs=True), Request("v-half"), {"num_moe_experts": 8}),
    "GRAPHED_EXPERTS": (Request("zb-h1", graphs=True), Request("zb-h1"), EXPERTS | {"moe_expert_capacity_factor": 1.0}),
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
    "REPEATED_AGAIN": (
        Request("zb-h1"),
        Request("1f1b"),
        {
            **{
                "mtp_use_repeated_layer": True,
                "recompute_granularity": "selective",
                "recompute_modules": ["mla_up_proj"],
            },
            "gradient_accumulation_fusion": False,
        },
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
    "DELAYED_PAIRS": (
        Request("1f1b", pairs=True),
        Request("1f1b"),
        LATE_SCALES | {"recompute_granularity": "selective"},
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
        Request("1f1b", vocab_cut="1"),
        Request("1f1b", vocab_cut="auto"),
        {"fp32_residual_connection": True},
    ),
    "SLICED": (
        Request("seq1f1b"),
        Request("auto", options={"slices": "1,2"}),
        {"moe_expert_capacity_factor": 1.0},
    ),
    "SHARED_SLICES": (
        Request("seq1f1b"),
        Request("1f1b"),
        {"context_parallel_size": 2, "cp_comm_type": ["p2p"]},
    ),
    "AVERAGED_PARTS": (
        Request("seq1f1b"),
        Request("1f1b"),
        {"context_parallel_size": 2, "cp_comm_type": ["all_gather"], "sft": True},
    ),
    "FUSED_ROTARY": (Request("seq1f1b"), Request("1f1b"), {"multi_latent_attention": True, "apply_rope_fusion": True}),
    "VOCABULARY_SLICED": (
        Request("seq1f1b", vocab_cut="1"),
        Request("seq1f1b"),
        {"mtp_num_layers": 1},
    ),
    "LAYERWISE": (Request("stock", rng="layerwise"), Request("stock"), {"use_te_rng_tracker": True}),
    "LAYERWISE_SLICED": (Request("seq1f1b", rng="layerwise"), Request("seq1f1b"), {"hidden_dropout": 0.1}),
    "DELAYED_SCALING": (Request("1f1b", recompute="full"), Request("1f1b"), ENGINE | LATE_SCALES),
    "WHOLE_BACKWARD": (Request("1f1b"), Request("v-half"), {"defer_embedding_wgrad_compute": True}),
    "SPLIT_BACKWARD": (Request("v-half"), Request("1f1b"), ENGINE | {"use_transformer_engine_op_fuser": True}),
    "QUANTISED_USER_BUFFERS": (
        Request("v-half"),
        Request("1f1b"),
        ENGINE | BUFFERS | {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    ),
    "PAIRED_USER_BUFFERS": (Request("1f1b", pairs=True), Request("1f1b"), BUFFERS),
    "SLICED_USER_BUFFERS": (Request("seq1f1b"), Request("1f1b"), BUFFERS),
}


VALUES = {
    "rerun_mode": "validate_results",
    "optimizer": "muon",
    "grad_norm_skip_threshold": 10.0,
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss", "sinkhorn"],
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "ncclep",
    "fp8_recipe": "delayed",
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn", "moe"],
    "cuda_graph_impl": "local",
    "cuda_graph_warmup_steps": 0,
    "experimental_attention_variant": "dsa",
    "cp_comm_type": "a2a",
    "loss_scale": 128.0,
    "rampup_batch_size": ["4", "4", "100"],
    "iterations_to_skip": [3],
    "step_batch_size_schedule": "0:4 100:8",
    **dict.fromkeys(("context_parallel_size", "num_distributed_optimizer_instances"), 2),
    "tensor_model_parallel_size": 2,
    **dict.fromkeys(("gtp_weight_remat_size", "expert_gtp_weight_remat_size"), 2),
}
"""Values that are refused, where ``True`` is none."""
BESIDE = {
    "CAPTURED": GRAPHS,
    "GRAPHED_DELTA_NETS": DELTA_NET,
    "GRAPHED_MODULES": SELECTIVE,
    "GRAPHED_EXPERTS": EXPERTS,
    "GRAPHED_FP8": LATE_SCALES,
    "GRAPHED_FP4": {"fp4": "e2m1"},
    "GRAPHED_RECOMPUTATION": {"recompute_granularity": "full"},
    "WHOLE_STEP": {"cuda_graph_impl": "full_iteration"},
    "ROLLED_BACK": {"clip_grad": 1.0},
    "SPLIT_BACKWARD": ENGINE,
    "SHARED_SLICES": {"context_parallel_size": 2},
}
"""Settings with which a table is asked, or that it refuses itself."""


def sentences(table: refusals.Refusals | refusals.Rule) -> list[str]:
    return [table.sentence] if isinstance(table, refusals.Rule) else [*table.sentences.values()]


def test_every_table_is_asked_once():
    asked = [table for _, table in room._GATES]
    assert sorted(map(id, asked)) == sorted(map(id, TABLES.values()))
    assert {*QUESTIONS, "CPU"} == {*TABLES}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_table_is_for_the_runs_that_its_feature_is_in(name):
    closed, open_to, settings = QUESTIONS[name]
    own = sentences(TABLES[name])
    assert any(str(error).endswith(tuple(own)) for error in gates(GateQuestion(closed, settings.get)))
    assert not any(str(error).endswith(tuple(own)) for error in gates(GateQuestion(open_to, settings.get)))
    assert [
        *gates(GateQuestion(closed, {"moe_router_load_balancing_type": "aux_loss", "cuda_graph_impl": "none"}.get))
    ] == []


@pytest.mark.parametrize("name", [name for name in TABLES if isinstance(TABLES[name], refusals.Refusals)])
def test_every_row_of_a_table_refuses_its_attribute(name):
    request, on_cpu = (Request("1f1b"), True) if name == "CPU" else (QUESTIONS[name][0], False)
    for attribute, sentence in TABLES[name].sentences.items():
        settings = {attribute: VALUES.get(attribute, True)} | BESIDE.get(name, {})
        errors = [*gates(GateQuestion(request, settings.get, on_cpu=on_cpu))]
        (message,) = [str(error) for error in errors if str(error).endswith(f"{TABLES[name].feature}: {sentence}")]
        assert message.startswith(f"{attribute} = ") and {error.code for error in errors} == {"unsupported-setting"}


@pytest.mark.parametrize(
    ("impl", "captured", "refused_by"),
    [
        (
            "transformer_engine",
            [Request(name) for name in ("1f1b", "interleaved", "1f1b-v")],
            [Request("1f1b", recompute="full"), Request("interleaved", microbatch_costs="tokens"), Request("v-half")],
        ),
        (
            "full_iteration",
            [Request(name) for name in ("1f1b", "gpipe", "zb-h1", "zb-h2")],
            [Request("1f1b", offload="full"), Request("zb-h1", report="r"), Request("auto"), Request("interleaved")],
        ),
    ],
)
def test_graphs_go_with_the_schedules_that_they_can_hold(impl, captured, refused_by):
    """Those of layers with whole backwards alone, and those of a step with one stage per rank."""
    settings = {"cuda_graph_impl": impl, "cuda_graph_warmup_steps": 3}
    for request in captured:
        check_gates(GateQuestion(request, settings.get))
        check_gates(GateQuestion(request, {"cuda_graph_impl": "none", "cuda_graph_warmup_steps": 0}.get))
    for request in refused_by:
        with refused("unsupported-setting", "cuda_graph_impl"):
            check_gates(GateQuestion(request, settings.get))


def test_a_chosen_schedule_says_more_than_the_request():
    """A search may find whole backwards, slices or another placement."""
    request = Request("auto", options={"slices": "1,2"})
    sliced = build_schedule("seq1f1b", num_devices=4, num_microbatches=8)
    dropout = {"attention_dropout": 0.1}.get
    check_gates(GateQuestion(request, dropout))
    with refused("unsupported-setting", "--attention-dropout"):
        check_gates(GateQuestion(request, dropout, sliced))
    splits, whole = (build_schedule(name, num_devices=4, num_microbatches=8) for name in ("zb-h1", "1f1b"))
    overlapped = {**ENGINE, **BUFFERS, "fp4": "e2m1"}.get
    check_gates(GateQuestion(request, overlapped, whole))
    with refused("unsupported-setting", "--tp-comm-overlap"):
        check_gates(GateQuestion(request, overlapped, splits))
    replayed = {"moe_enable_routing_replay": True}.get
    check_gates(GateQuestion(Request("auto"), replayed, placement=Placement.linear(4)))
    check_gates(GateQuestion(Request("interleaved"), replayed, placement=Placement.interleaved(4, 2)))
    with refused("unsupported-setting", "--pipemem-microbatch-costs"):
        check_gates(GateQuestion(Request("auto"), replayed, placement=V))


def test_one_tensor_parallel_rank_has_no_user_buffers():
    alone = {**ENGINE, **BUFFERS, "tensor_model_parallel_size": 1, "fp4": "e2m1"}.get
    for request in (Request("v-half"), Request("seq1f1b")):
        check_gates(GateQuestion(request, alone))


def test_features_that_exclude_each_other_come_first():
    request = Request("pipedream", overlap_steps=True)
    codes = [error.code for error in gates(GateQuestion(request, {"overlap_grad_reduce": True}.get))]
    assert codes == ["conflicting-features", "unsupported-setting"]


# One start for every gate: by flags, when a model is built, and in each of its steps.


SIZES = "--pipeline-model-parallel-size 4 --num-layers 24 --micro-batch-size 1"
PARTS, CUT = "--cuda-graph-modules", "attn moe_router moe_preprocess"
FLEX = "--moe-token-dispatcher-type flex"
FREE = "--pipemem-overlap-steps --rerun-mode disabled"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("v-half --pipemem-vocab-cut 1 --fp32-residual-connection", "unsupported-setting", ()),
        ("chimera --qk-clip", "unsupported-setting", ("qk_clip",)),
        ("pipedream-2bw --use-distributed-optimizer", "unsupported-setting", ("--use-distributed-optimizer",)),
        ("pipedream", "unsupported-setting", ("--clip-grad", 0)),
        ("seq1f1b --attention-dropout 0.1", "unsupported-setting", ("--attention-dropout", 0)),
        ("1f1b --pipemem-rng layerwise --te-rng-tracker", "unsupported-setting", ("use_te_rng_tracker",)),
        ("zb-h2 --pipemem-overlap-steps", "unsupported-setting", ("--rerun-mode",)),
        (f"zb-h2 {FREE}", None, ()),
        (f"zb-h2 {FREE} --qk-clip --clip-grad 0", None, ()),
        (f"zb-h2 {FREE} --fp16", "unsupported-setting", ("fp16",)),
        (f"zb-h2 {FREE} --qk-clip", "unsupported-setting", ("--qk-clip",)),
        (f"zb-h2 {FREE} --fp8-format hybrid", "fp8-delayed-scaling", ("--fp8-recipe", "--clip-grad", 0)),
        ("zb-h1 --sft", None, ()),
        ("zb-h1 --sft --context-parallel-size 2", None, ()),
        ("zb-h1 --sft --micro-batch-size 2", "unsupported-setting", ("--micro-batch-size",)),
        (
            "zb-h1 --dataloader-inter-document-masking --micro-batch-size 2",
            "unsupported-setting",
            ("--micro-batch-size",),
        ),
        (
            "zb-h1 --dataloader-inter-document-masking --context-parallel-size 2",
            "unsupported-setting",
            ("--context-parallel-size",),
        ),
        (
            "zb-h1 --recompute-granularity selective --recompute-modules mlp",
            "unsupported-setting",
            ("--disable-bias-linear",),
        ),
        ("zb-h1 --recompute-granularity selective --recompute-modules mlp --disable-bias-linear", None, ()),
        ("zb-h1 --overlap-moe-expert-parallel-comm --recompute-granularity full", "unsupported-setting", ()),
        ("zb-h1 --cuda-graph-impl local --num-experts 8", "unsupported-setting", ("--cuda-graph-modules",)),
        (f"zb-h1 --cuda-graph-impl local --num-experts 8 {PARTS} attn moe_router", "unsupported-setting", ()),
        (f"zb-h1 --cuda-graph-impl local --num-experts 8 {PARTS} {CUT}", None, ()),
        (f"zb-h1 --cuda-graph-impl local --num-experts 8 --cuda-graph-scope {CUT}", None, ()),
        (f"zb-h1 --cuda-graph-impl local --num-experts 8 {PARTS} {CUT} {FLEX}", None, ()),
        (
            f"zb-h1 --cuda-graph-impl local --num-experts 8 {PARTS} {CUT} {FLEX} --moe-flex-dispatcher-backend ncclep",
            "unsupported-setting",
            ("--moe-flex-dispatcher-backend", "hybridep"),
        ),
        (
            "zb-h1 --cuda-graph-impl local --recompute-granularity selective",
            "unsupported-setting",
            ("recompute_modules", "core_attn"),
        ),
        (
            "zb-h1 --cuda-graph-impl local --recompute-granularity selective --recompute-modules moe_act layernorm",
            None,
            (),
        ),
        ("zb-h1 --cuda-graph-impl local --experimental-attention-variant gated_delta_net", None, ()),
        ("zb-h1 --cuda-graph-impl local --experimental-attention-variant dsa", "unsupported-setting", ("dsa",)),
        ("zb-h1 --cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 0", "unsupported-setting", (1,)),
    ],
)
def test_a_start_by_flags_asks_before_anything_is_built(flags, code, words):
    """What follows is refused when the model or the optimizer is built, if there are no flags."""
    request, others = take_flags([*SIZES.split(), "--pipemem-schedule", *flags.split()])
    if code is None:
        assert add_virtual_stages(request, others) == others
    else:
        with refused(code, *words):
            add_virtual_stages(request, others)


def test_a_model_asks_before_it_is_built_also_whether_its_kernels_need_a_gpu(monkeypatch):
    config = SimpleNamespace(moe_permute_fusion=True)
    for name in ("stock", "1f1b"):
        monkeypatch.setattr(refusals_of_models, "on_cpu_ranks", lambda: False)
        check_model(config, Request(name))
        monkeypatch.setattr(refusals_of_models, "on_cpu_ranks", lambda: True)
        with refused("unsupported-setting", "--moe-permute-fusion"):
            check_model(config, Request(name))


def test_a_step_asks_again_if_a_value_has_changed_and_only_then(monkeypatch):
    counted, ask = [], check_gates
    monkeypatch.setattr(room, "check_gates", lambda question: (counted.append(question), ask(question)))
    config = SimpleNamespace(recompute_granularity="selective", recompute_modules=[], init_method_std=0.02)
    ddp = SimpleNamespace(use_megatron_fsdp=False)
    request = Request("pipedream-2bw")
    step = StepGates()

    def asks(*changed) -> bool:
        request_of_step, *others = changed or (request,)
        return step.check(request_of_step, [config, ddp], *others)

    assert [asks(), asks()] == [True, False] and len(counted) == 1
    config.init_method_std = 1.0  # no gate reads it
    assert not asks()
    config.recompute_modules.append("core_attn")
    assert [asks(), asks()] == [True, False]
    for question in ((Request("1f1b"),), (request, None, V), (request,)):
        assert [asks(*question), asks(*question)] == [True, False]
    assert step.check(request, [config])
    for holder, attribute in ((ddp, "use_distributed_optimizer"), (config, "fp8"), (ddp, "use_megatron_fsdp")):
        setattr(holder, attribute, "hybrid")
        for _ in range(2):
            with refused("unsupported-setting", attribute):
                asks()
        setattr(holder, attribute, None)
    assert asks()


def test_the_value_of_several_objects_is_the_first_true_one_else_the_first():
    value_of = refusals.of_several(SimpleNamespace(a=0, b=None, c=0), SimpleNamespace(a=2, b=0), SimpleNamespace(a=3))
    assert [value_of(name) for name in "abcd"] == [2, 0, 0, None]


@pytest.mark.parametrize(
    ("impl", "captures"),
    [("local", ("v-half", "zb-h1", "1f1b")), ("transformer_engine", ("v-half", "zb-h1"))],
)
def test_passes_are_captured_where_megatron_is_asked_for_graphs_of_layers_that_it_cannot_capture(impl, captures):
    """Megatron then does not get the flag, without which it captures nothing."""
    modules = [*SIZES.split(), "--cuda-graph-scope", "attn", "mlp", "--seed", "1"]
    flags = [*modules, "--cuda-graph-impl", impl]
    for name in ("v-half", "zb-h1", "1f1b"):
        request, others = take_flags([*flags, "--pipemem-schedule", name])
        assert request.graphs == (name in captures)
        assert others == (modules if request.graphs else flags)
    with refused("conflicting-features", "--pipemem-offload"):
        add_virtual_stages(*take_flags([*flags, *"--pipemem-schedule 1f1b --pipemem-offload full".split()]))
