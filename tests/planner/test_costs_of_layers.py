"""FLOPs, bytes and k against what the papers print."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.model.activations import head_bytes, layer_bytes, layer_tensors, moved_bytes
from megatron_pipemem.model.counts import (
    head_flops,
    head_parameters,
    layer_flops,
    layer_parameters,
    model_flops,
)
from megatron_pipemem.model.model import Execution, Model
from megatron_pipemem.tools.config.cluster import Cluster, HostChannel
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.prices import (
    cheap_recompute,
    layer,
    offload_ratio,
)

ONE = Execution()
# PipeOffload's table of k, the column "from the formula": hidden size, then sequences of 4k, 8k, 16k and 32k.
PRINTED_K = {
    4096: (1.71, 1.49, 1.19, 0.85),
    5120: (1.40, 1.26, 1.04, 0.77),
    6144: (1.19, 1.09, 0.92, 0.70),
    7168: (1.04, 0.95, 0.82, 0.65),
    8192: (0.92, 0.85, 0.75, 0.60),
    10240: (0.75, 0.70, 0.63, 0.52),
}


def gpt(hidden: int = 4096, sequence: int = 4096, **changes) -> Model:
    shape = {"layers": 8, "hidden": hidden, "heads": hidden // 128, "vocabulary": 51200, "sequence": sequence}
    return Model(**(shape | changes))


def test_flops_of_the_papers():
    b, s, h = 3, 2048, 5120
    flops = layer_flops(gpt(h, s), Execution(micro_batch=b))
    assert flops.forward == b * s * h * (24 * h + 4 * s)
    assert flops.input == b * s * h * (24 * h + 8 * s)
    assert flops.weight == b * 24 * s * h * h
    assert flops.total == b * s * h * (72 * h + 12 * s)
    assert head_flops(gpt(h, s), Execution(micro_batch=b)).total == 6 * b * s * h * 51200
    assert model_flops(gpt(h, s)) == 8 * flops.total / b + 6 * s * h * 51200


def test_flops_of_a_gated_delta_net_are_megatrons():
    """As ``num_floating_point_operations`` of Megatron's training loop counts them, per token."""
    shape = gpt(linear_attention_freq=4, linear_num_key_heads=4, linear_num_value_heads=8)
    keys, values = 4 * 128, 8 * 128
    wanted = 4096 * (2 * keys + 2 * values + 2 * 8) + 4 * (2 * keys + values) + 8 * 128**2 * 4 + 4096 * values
    wanted += 8 * 4096**2  # the FFN
    assert layer_flops(shape, ONE, "G-").total == 6 * wanted * 4096
    assert shape.kinds[:4] == ("G-", "G-", "G-", "*-")


def test_sparse_attention_grows_with_the_chosen_tokens_and_an_index_with_all():
    def core(kind: str, sequence: int, chosen: int) -> float:
        shape = gpt(sequence=sequence, kv_lora_rank=512, dsa_indexer_topk=chosen)
        passes = layer_flops(shape, ONE, kind)
        return (passes.forward - passes.weight) / sequence

    reused, index = core("d", 4096, 1024), core("D", 4096, 1024) - core("d", 4096, 1024)
    assert core("d", 8192, 1024) == reused == core("d", 4096, 2048) / 2
    assert core("D", 8192, 1024) - reused == index + 2 * 4096 * 64 * 128
    assert core("d", 4096, 5000) == 4 * reused


def test_experts_in_a_latent_are_narrow_and_add_two_projections():
    shape = gpt(experts=8, experts_per_token=2, expert_ffn=512)
    narrow, whole = (layer_flops(model, ONE, "E").weight for model in (replace(shape, expert_latent=1024), shape))
    router = 2 * 4096 * 4096 * 8
    assert narrow - router == (whole - router) / 4 + 2 * 4096 * 2 * 4096 * 1024
    inputs = {tensor.name: tensor.nbytes for tensor in layer_tensors(replace(shape, expert_latent=1024), ONE, "E")}
    assert inputs["experts' inputs"] == 2 * 4096 * 1024 * 2 and inputs["experts' sum"] == 4096 * 1024 * 2


def test_adapters_have_a_small_w_and_no_gradients_of_the_layer():
    execution, cluster = Execution(adapters=16, frozen=("language",)), load("a100-80g", Cluster)
    adapted, whole = layer(gpt(), execution, cluster), layer(gpt(), ONE, cluster)
    assert adapted.seconds.forward > whole.seconds.forward and adapted.seconds.input > whole.seconds.input
    assert adapted.seconds.weight < 0.1 * whole.seconds.weight
    assert adapted.trained == (16 * (2 * 4096 + 4 * 4096 + 2 * 5 * 4096), 0)
    assert adapted.kept_bytes == whole.kept_bytes and adapted.frozen_parameters == whole.parameters


def test_vocabulary_papers_example_is_a_head_of_six_layers():
    shape = gpt(3072, 2048, vocabulary=262144)
    assert head_flops(shape, ONE).total / layer_flops(shape, ONE).total == pytest.approx(6.4, abs=0.2)
    assert head_parameters(shape, ONE) / layer_parameters(shape, ONE) == pytest.approx(7.1, abs=0.2)


def test_recomputation_takes_its_time_in_the_input_gradient():
    shape = gpt()
    plain, full = layer_flops(shape, ONE), layer_flops(shape, replace(ONE, recompute="full"))
    assert full.input == plain.input + plain.forward and full.weight == plain.weight
    core = layer_flops(shape, replace(ONE, recompute="selective"))
    assert core.input == plain.input + 4 * 4096**3


@pytest.mark.parametrize(
    ("dropout", "execution", "per_element"),
    [(0.0, ONE, 32), (0.1, ONE, 34), (0.1, cheap_recompute(ONE), 20), (0.0, replace(ONE, recompute="full"), 2)],
)
def test_bytes_per_element_of_the_papers(dropout, execution, per_element):
    shape = gpt(dropout=dropout)
    statistics = sum(tensor.nbytes for tensor in layer_tensors(shape, execution) if tensor.is_statistic)
    assert 0 <= layer_bytes(shape, execution).saved / 4096**2 - per_element <= statistics / 4096**2
    assert moved_bytes(shape, execution) == per_element * 4096**2


@pytest.mark.parametrize(
    ("model", "cluster", "flags", "channels"),
    [
        ("llama3-8b", "h100-80g", {}, 0),  # Transformer Engine's kernel rotates, also beside Megatron's own layers
        ("llama3-8b", "h100-80g", {"transformer-impl": "local"}, 0),
        ("llama3-8b", "h100-80g", {"no-rope-fusion": True}, 128),
        ("llama3-8b", "h100-80g", {"no-rope-fusion": True, "rotary-percent": 0.5}, 64),
        ("llama3-8b", "cpu", {}, 128),  # where there are no such kernels
        ("deepseek-v3", "h100-80g", {}, 0),
        ("deepseek-v3", "h100-80g", {"no-rope-fusion": True}, 64),
    ],
)
def test_tables_of_rotations_are_kept_unless_a_kernel_rotates(model, cluster, flags, channels):
    run = Run(load(model, Model), load(cluster, Cluster), flags=flags)
    tables = [
        tensor.nbytes for tensor in layer_tensors(run.model, run.execution) if tensor.name == "tables of rotations"
    ]
    assert sum(tables) == 4 * run.model.sequence * channels * run.execution.element


@pytest.mark.parametrize("hidden", PRINTED_K)
def test_k_of_the_paper(hidden):
    channel = HostChannel(15, 15)
    for sequence, printed in zip((4096, 8192, 16384, 32768), PRINTED_K[hidden], strict=True):
        k = offload_ratio(gpt(hidden, sequence), cheap_recompute(ONE), 220e12, channel)
        assert k == pytest.approx(10 / (3 * (6 * hidden + sequence)) * 220e12 / 15e9, rel=1e-9)
        assert abs(k - printed) <= 0.006
    assert round(offload_ratio(gpt(), cheap_recompute(ONE), 220e12, channel), 3) == 1.705


def _ratio_on(cluster):
    return offload_ratio(gpt(), cheap_recompute(ONE), cluster.flops, cluster.host, cluster.sharing(0))


def test_k_on_the_a100_cluster_is_the_papers_where_two_devices_take_turns():
    cluster = load("a100-80g", Cluster)
    k = _ratio_on(cluster)
    assert k == pytest.approx(1.705, rel=0.01)
    alone = _ratio_on(replace(cluster, switches=()))
    assert alone == pytest.approx(0.7 * k)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    micro_batch=st.integers(1, 4),
    sequence_parallel=st.booleans(),
    activation=st.sampled_from(["gelu", "swiglu"]),
)
def test_ranks_together_compute_what_one_alone_does(tp, cp, micro_batch, sequence_parallel, activation):
    shape = gpt(2048, 1024, activation=activation)
    cut = Execution(micro_batch=micro_batch, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    whole = Execution(micro_batch=micro_batch)
    assert layer_flops(shape, cut).total * tp * cp == pytest.approx(layer_flops(shape, whole).total)
    assert layer_bytes(shape, cut).saved * tp * cp >= layer_bytes(shape, whole).saved * (1 - 1e-9)
    if sequence_parallel or tp == 1:
        assert layer_bytes(shape, cut).saved * tp * cp == pytest.approx(layer_bytes(shape, whole).saved)
    assert head_bytes(shape, cut).saved < head_bytes(shape, whole).saved * 1.001


@pytest.mark.parametrize(
    ("changes", "execution", "key"),
    [
        ({}, Execution(tp=3), "tp"),
        ({"kv_heads": 8}, Execution(tp=3), "tp"),
        ({"sequence": 1001}, Execution(cp=2), "cp"),
        ({}, Execution(ep=2), "ep"),
        ({"experts": 6}, Execution(ep=4), "ep"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(changes, execution, key):
    with pytest.raises(ConfigError) as caught:
        execution.check(gpt(**changes))
    assert caught.value.key == key
