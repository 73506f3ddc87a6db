"""Bytes of weights, gradients and optimizer by flags, beside Megatron's own estimate and sums by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from refusals import refused

from megatron_pipemem.model.activations import message_bytes
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.tools.config.arguments import flags_of_attributes, frozen_flags
from megatron_pipemem.tools.config.cluster import GIB
from megatron_pipemem.tools.config.runs import Parallelism, Run, ScheduleChoice
from megatron_pipemem.tools.planner.memory import predicted_memory
from megatron_pipemem.tools.planner.parameter_bytes import DISTRIBUTED, parameter_bytes
from megatron_pipemem.tools.planner.step import price
from tests.planner.small_run import MODEL, RUN

SHARDED = {DISTRIBUTED: True}
AWARE = SHARDED | {"use-precision-aware-optimizer": True}


@pytest.mark.parametrize(
    ("precision", "flags", "gradient", "optimizer", "ends", "in_step"),
    [
        ("bf16", {}, 4, 12, 12, 0),
        ("bf16", {"grad-reduce-in-bf16": True}, 2, 12, 12, 4),
        ("bf16", {"optimizer": "lion"}, 4, 8, 8, 0),
        ("bf16", {"optimizer": "muon"}, 4, 8, 12, 0),
        ("bf16", {"optimizer": "muon", "muon-scalar-optimizer": "lion"}, 4, 8, 8, 0),
        ("bf16", {"optimizer": "adaptive_muon"}, 4, 12, 12, 0),
        ("bf16", AWARE, 4, 10, 10, 0),
        ("bf16", AWARE | {"exp-avg-dtype": "fp8", "exp-avg-sq-dtype": "fp16"}, 4, 5, 5, 8),
        ("bf16", AWARE | {"exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"}, 4, 6, 6, 0),
        ("bf16", AWARE | {"fp8-format": "hybrid", "fp8-recipe": "mxfp8", "main-grads-dtype": "bf16"}, 2, 12, 12, 4),
        ("bf16", AWARE | {"optimizer-cpu-offload": True}, 4, 0, 0, 0),
        ("bf16", AWARE | {"optimizer-cpu-offload": True, "optimizer-offload-fraction": "0.25"}, 4, 9, 9, 0),
        ("fp32", {"optimizer": "sgd"}, 4, 4, 4, 0),
    ],
)
def test_bytes_by_flags(precision, flags, gradient, optimizer, ends, in_step):
    of = parameter_bytes(precision, flags)
    assert (of.gradient, of.optimizer, of.ends_optimizer) == (gradient, optimizer, ends)
    assert of.extra_in_optimizer_step == in_step


@pytest.mark.parametrize(
    ("precision", "in_fp32", "gradient"), [("fp16", True, 4), ("fp16", False, 2), ("bf16", True, 4), ("bf16", False, 2)]
)
def test_gradients_of_a_configuration(precision, in_fp32, gradient):
    flags = dict(flags_of_attributes({"grad_reduce_in_fp32": in_fp32}, frozen_flags()))
    assert parameter_bytes(precision, flags).gradient == gradient


def test_an_optimizer_with_other_tensors_is_refused():
    with refused("unknown-optimizer"):
        parameter_bytes("bf16", {"optimizer": "soap"})


def static(flags: dict, **settings) -> float:
    cut = Parallelism(dp=4, global_batch=8)
    return price(replace(RUN, parallelism=cut, flags=flags, **settings), Placement.linear(1)).static_bytes[0]


def test_what_ranks_share():
    h = MODEL.hidden
    ends = 2 * 32000 * h + 1024 * h + 2 * h
    count = MODEL.layers * (12 * h * h + 13 * h) + ends
    instances = SHARDED | {"num-distributed-optimizer-instances": 2}
    assert static(SHARDED) == pytest.approx(count * (6 + 12 / 4))
    assert static(instances) == pytest.approx(count * (6 + 12 / 2))
    muon = {"optimizer": "muon"}
    assert static(SHARDED | muon) == pytest.approx(count * (6 + 8 / 4) + ends * 4 / 4)
    fsdp = {
        "use-megatron-fsdp": True,
        "megatron-fsdp-main-grads-dtype": "fp32",
        "data-parallel-sharding-strategy": "optim",
    }
    assert static(fsdp) == pytest.approx(static(SHARDED))
    assert static(fsdp | {"data-parallel-sharding-strategy": "optim_grads"}) == pytest.approx(count * (2 + 16 / 4))
    assert static(fsdp | {"data-parallel-sharding-strategy": "optim_grads_params"}) == pytest.approx(count * 18 / 4)


def test_weights_in_8_bits_replace_those_in_16():
    fp8 = SHARDED | {"fp8-format": "hybrid"}
    matrices = MODEL.layers * 12 * MODEL.hidden**2
    cluster = replace(RUN.cluster, fp8_tflops=2 * RUN.cluster.tflops)
    gathered = static(fp8 | {"fp8-param-gather": True}, cluster=cluster)
    assert static(fp8, cluster=cluster) - gathered == pytest.approx(2 * matrices, rel=0.01)


def on_host(**flags) -> Run:
    cut = Parallelism(pp=2, dp=2, global_batch=8)
    return replace(RUN, parallelism=cut, schedule=ScheduleChoice("1f1b"), flags=AWARE | flags)


def test_an_optimizer_on_the_host_is_counted_there():
    device, host = predicted_memory(on_host()), predicted_memory(on_host(**{"optimizer-cpu-offload": True}))
    step = price(on_host(), Placement.linear(2), (4, 4))
    updated = [weights / 2 / 2 for weights in step.weight_bytes]  # two bytes a parameter, two ranks
    saved = [before - after for before, after in zip(device.device_bytes, host.device_bytes, strict=True)]
    assert saved == pytest.approx([10 * count for count in updated])
    assert host.host_bytes == pytest.approx([16 * count for count in updated]) and not any(device.host_bytes)
    assert host.host_limit_bytes == RUN.cluster.host_memory_gib * GIB / RUN.cluster.devices_per_node


def test_copies_of_a_step_count_where_activations_do_not():
    """Gradients in 16 bits are copied when no activations are held, so the larger of the two counts."""
    step = price(on_host(**{"grad-reduce-in-bf16": True, "use-precision-aware-optimizer": False}), Placement.linear(2))
    none, much = step.held((0.0, 0.0)), step.held((1e12, 1e12))
    assert none == pytest.approx(
        [s + max(b, t) for s, b, t in zip(step.static_bytes, step.buffer_bytes, step.optimizer_step_bytes, strict=True)]
    )
    rows = zip(step.static_bytes, step.buffer_bytes, step.sent_share, strict=True)
    assert much == pytest.approx([static + buffers + 1e12 * (1 + sent) for static, buffers, sent in rows])
    assert step.room(much[1])[1] == pytest.approx(1e12)
    assert min(step.optimizer_step_bytes) > max(step.buffer_bytes)


def test_graphs_keep_the_memory_of_activations_during_the_optimizers_step():
    """They hold two messages more."""
    flags = {"grad-reduce-in-bf16": True, "use-precision-aware-optimizer": False}
    plain = price(on_host(**flags), Placement.linear(2))
    graphed = price(on_host(**flags, **{"cuda-graph-impl": "local"}), Placement.linear(2))
    kept = plain.room(1e12)
    added = [graphs - bytes for graphs, bytes in zip(graphed.held(kept), plain.held(kept), strict=True)]
    messages = 2 * message_bytes(RUN.model, on_host().execution)
    assert added == pytest.approx([nbytes + messages for nbytes in plain.optimizer_step_bytes])
    assert min(plain.optimizer_step_bytes) > 0


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("experts", [0, 8])
def test_megatrons_own_estimate_is_the_same(sharded, experts):
    """Megatron knows 16-bit weights with Adam only, and adds the final norm to each stage by a share."""
    estimate = pytest.importorskip("megatron.training.theoretical_memory_usage").compute_weight_and_optimizer_memory
    tp, pp, dp, ep = 2, 2, 4, 4 if experts else 1
    model = replace(MODEL, norm="rmsnorm", position="rope", bias="none", activation="swiglu", experts=experts)
    model = replace(model, ffn=4096, experts_per_token=2 if experts else 1, expert_ffn=1024 if experts else None)
    cut = Parallelism(tp=tp, pp=pp, dp=dp, ep=ep, etp=1 if experts else None, global_batch=8, sequence_parallel=True)
    run = replace(RUN, model=model, parallelism=cut, flags=SHARDED if sharded else {})
    args = SimpleNamespace(
        kv_channels=model.channels,
        num_attention_heads=model.heads,
        hidden_size=model.hidden,
        group_query_attention=False,
        num_experts=experts or None,
        swiglu=True,
        moe_shared_expert_intermediate_size=None,
        moe_layer_freq=1,
        num_layers=model.layers,
        moe_ffn_hidden_size=1024,
        moe_router_topk=2,
        moe_latent_size=None,
        mtp_num_layers=None,
        normalization="RMSNorm",
        multi_latent_attention=False,
        padded_vocab_size=run.execution.vocabulary_rows(model) * tp,
        untie_embeddings_and_output_weights=True,
        ffn_hidden_size=4096,
        add_bias_linear=False,
        expert_tensor_parallel_size=1 if experts else tp,
        expert_model_parallel_size=ep,
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=tp,
        world_size=tp * pp * dp,
        data_parallel_size=dp,
        use_distributed_optimizer=sharded,
    )
    norm = model.hidden * (6 + 12 / dp if sharded else 18)
    first = price(run, Placement.linear(pp), (4, 4)).static_bytes[0]
    assert first == pytest.approx(estimate(args) - norm / pp, rel=1e-9)


def test_settings_of_other_programs_have_the_same_meaning():
    """Megatron-Bridge and NeMo-RL write types as PyTorch does, and say when gradients are summed in fp32."""
    settings = {"exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "bfloat16", "grad_reduce_in_fp32": False}
    settings |= {
        "use_precision_aware_optimizer": True,
        "use_distributed_optimizer": True,
        "main_params_dtype": "float32",
    }
    of = parameter_bytes("bf16", dict(flags_of_attributes(settings, frozen_flags())))
    assert (of.gradient, of.optimizer, of.shards_optimizer) == (2, 6, True)
