"""What cannot run is refused in one sentence that names the way out."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from refusals import refused

from megatron_pipemem import refusals as rows
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.asynchronous.megatron.training import StageOptimizer, check_asynchronous
from megatron_pipemem.features.overlap_steps.megatron.steps import check_overlapped
from megatron_pipemem.features.slices.megatron import SequenceSlices
from megatron_pipemem.gates import Wish, check_gates
from megatron_pipemem.mcore import loop_arguments, refusals
from megatron_pipemem.mcore.plugin import disable, enable
from megatron_pipemem.mcore.refusals import check_chunks, check_config, check_model, check_settings, check_sharing
from megatron_pipemem.refusals import OVERLAPPED, ROLLED_BACK, SCHEDULES
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule

OVERLAPS = Request("1f1b", overlap_steps=True)


def test_an_ordinary_configuration_passes():
    check_config(
        SimpleNamespace(mtp_num_layers=1, cuda_graph_impl="none", defer_embedding_wgrad_compute=False), SCHEDULES
    )
    check_chunks([torch.nn.Linear(2, 2)], 1, "1f1b")


def test_fused_rotary_embeddings_do_not_exclude_slices_but_those_of_latent_attention_do():
    fused, sliced = {"apply_rope_fusion": True}, Request("seq1f1b")
    check_gates(Wish(sliced, fused.get))
    with refused("slices-attention", kind=UnsupportedError):
        check_gates(Wish(sliced, {**fused, "multi_latent_attention": True}.get))


TABLES = {name: each for name, each in vars(rows).items() if isinstance(each, rows.Refusals)}
VALUES = {
    "rerun_mode": "validate_results",
    "optimizer": "muon",
    "grad_norm_skip_threshold": 10.0,
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_token_dispatcher_type": "flex",
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn", "moe"],
    "cuda_graph_impl": "local",
    "cuda_graph_warmup_steps": 0,
    "loss_scale": 128.0,
    "rampup_batch_size": ["4", "4", "100"],
    "step_batch_size_schedule": "0:4 100:8",
    **dict.fromkeys(("context_parallel_size", "num_distributed_optimizer_instances"), 2),
    **dict.fromkeys(("gtp_weight_remat_size", "expert_gtp_weight_remat_size"), 2),
}
"""Values that are refused, where ``True`` is none."""
GRAPHS = {"GRAPHS": "transformer_engine", "WHOLE_STEP": "full_iteration"}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_table_refuses_its_attribute_and_no_other(name):
    check_config(SimpleNamespace(moe_router_load_balancing_type="aux_loss", cuda_graph_impl="none"), TABLES[name])
    for attribute in TABLES[name].sentences:
        with refused("unsupported-setting", attribute, kind=UnsupportedError):
            check_config(SimpleNamespace(**{attribute: GRAPHS.get(name, VALUES.get(attribute, True))}), TABLES[name])


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "1f1b-v"])
def test_graphs_of_layers_go_with_whole_backwards_alone(name):
    graphs = SimpleNamespace(cuda_graph_impl="transformer_engine", cuda_graph_warmup_steps=3)
    check_settings(graphs, Request(name), None)
    for other in (Request(name, recompute="full"), Request(name, microbatch_costs="tokens"), Request("v-half")):
        with refused("unsupported-setting", "cuda_graph_impl", kind=UnsupportedError):
            check_settings(graphs, other, None)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
def test_a_step_is_captured_whole_with_one_stage_per_rank(name):
    whole = SimpleNamespace(cuda_graph_impl="full_iteration")
    check_settings(whole, Request(name), None)
    for other in (
        Request(name, offload="full"),
        Request(name, report="r.json"),
        Request("auto"),
        Request("interleaved"),
    ):
        with refused("unsupported-setting", "cuda_graph_impl", kind=UnsupportedError):
            check_settings(whole, other, None)


def test_steps_of_warm_up_matter_with_graphs_alone():
    config = SimpleNamespace(cuda_graph_impl="none", cuda_graph_warmup_steps=0)
    check_settings(config, Request("zb-h1"), None)
    config.cuda_graph_impl = "full_iteration"
    with refused("unsupported-setting", "cuda_graph_warmup_steps", kind=UnsupportedError):
        check_settings(config, Request("zb-h1"), None)


def test_layerwise_dropout_is_refused_in_slices():
    config = SimpleNamespace(hidden_dropout=0.1)
    step = SimpleNamespace(
        program=SimpleNamespace(schedule=build_schedule("seq1f1b", num_devices=2, num_microbatches=4)),
        context=SimpleNamespace(config=config),
    )
    with refused("unsupported-setting", "--hidden-dropout", kind=UnsupportedError):
        SequenceSlices(Request("seq1f1b", random="layerwise")).prepare(step)


def test_kernels_of_a_gpu_are_refused_on_cpu_ranks(monkeypatch):
    config = SimpleNamespace(moe_permute_fusion=True)
    monkeypatch.setattr(refusals, "on_cpu_ranks", lambda: False)
    check_model(config, Request("1f1b"))
    monkeypatch.setattr(refusals, "on_cpu_ranks", lambda: True)
    with refused("unsupported-setting", "--moe-permute-fusion", kind=UnsupportedError):
        check_model(config, Request("1f1b"))


def test_fsdp_is_refused():
    class FullyShardedDataParallel(torch.nn.Linear):
        pass

    with refused("unsupported-setting", "--use-megatron-fsdp", kind=UnsupportedError):
        check_chunks([FullyShardedDataParallel(2, 2)], 1, "1f1b")


def test_several_optimizer_instances_are_refused():
    chunk = torch.nn.Linear(2, 2)
    chunk.ddp_config = SimpleNamespace(num_distributed_optimizer_instances=2)
    with refused("unsupported-setting", "--num-distributed-optimizer-instances", 1, kind=UnsupportedError):
        check_chunks([chunk], 1, "1f1b")


@pytest.mark.parametrize(
    ("have", "need", "words"),
    [(1, 2, "--num-virtual-stages-per-pipeline-rank 2"), (2, 1, "drop the flags that ask for virtual pipeline stages")],
)
def test_a_wrong_number_of_chunks_says_how_to_get_the_right_one(have, need, words):
    with pytest.raises(UnsupportedError) as error:
        check_chunks([torch.nn.Linear(2, 2) for _ in range(have)], need, "v-half")
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_a_file_of_an_asynchronous_schedule_is_refused(name, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(build_schedule(name, num_devices=4, num_microbatches=8).to_csv())
    with refused("no-steps", kind=UnsupportedError):
        enable(str(file))
    disable()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"offload": "full"}, "--pipemem-offload off"),
        ({"vocab_parallel": "1"}, "--pipemem-vocab-parallel off"),
        ({"costs": "profile"}, "--pipemem-costs unit"),
        ({"options": {"update_every": 8}}, "--global-batch-size"),
    ],
)
def test_asynchronous_schedules_stand_alone(settings, words):
    with pytest.raises(UnsupportedError) as error:
        enable("pipedream-2bw", **settings)
    disable()
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("attribute", "on_ddp", "per_batch", "flag"),
    [
        ("use_distributed_optimizer", True, True, ("unsupported-setting", "--use-distributed-optimizer")),
        ("fp8", False, True, ("unsupported-setting", "--fp8-format")),
        ("moe_router_enable_expert_bias", False, True, ("unsupported-setting", "--moe-router-enable-expert-bias")),
        ("moe_router_load_balancing_type", False, True, ("unsupported-setting", "global_aux_loss")),
        ("overlap_grad_reduce", True, False, ("unsupported-setting", "--overlap-grad-reduce")),
        ("calculate_per_token_loss", False, False, ("unsupported-setting", "--calculate-per-token-loss")),
        (
            "share_embeddings_and_output_weights",
            None,
            False,
            ("tied-embedding", "--untie-embeddings-and-output-weights"),
        ),
    ],
)
def test_what_knows_no_versions_is_refused(attribute, on_ddp, per_batch, flag):
    chunk, config = torch.nn.Linear(2, 2), SimpleNamespace()
    chunk.pre_process, chunk.ddp_config = True, SimpleNamespace()
    request = Request("pipedream-2bw" if per_batch else "pipedream")
    check_asynchronous(request, config, [chunk])
    value = ["aux_loss", "global_aux_loss"] if attribute == "moe_router_load_balancing_type" else True
    setattr({True: chunk.ddp_config, False: config, None: chunk}[on_ddp], attribute, value)
    with refused(*flag, kind=UnsupportedError):
        check_asynchronous(request, config, [chunk])
    if not per_batch:
        check_asynchronous(Request("pipedream-2bw"), config, [chunk])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"clip_grad": 1.0}, ("unsupported-setting", "--clip-grad", 0)),
        ({"fp16": True}, ("unsupported-setting", "fp16")),
        ({"log_num_zeros_in_grad": True}, ("unsupported-setting", "--log-num-zeros-in-grad")),
    ],
)
def test_what_needs_all_stages_at_once_is_refused_when_the_optimizer_is_built(changed, words):
    built = SimpleNamespace(step=None)
    config = SimpleNamespace(**{"clip_grad": 0.0, "fp16": False, "log_num_zeros_in_grad": False, **changed})
    optimizer = StageOptimizer(Request("pipedream"))
    with refused(*words, kind=UnsupportedError):
        optimizer.catch(lambda config, chunks: built, config, [])
    with refused("enabled-too-late", kind=UnsupportedError):
        optimizer.require()


def chained(clip_grad: float = 1.0, groups: tuple[object, ...] = (None, None), **said) -> ChainedOptimizer:
    optimizer = object.__new__(ChainedOptimizer)
    optimizer.config = SimpleNamespace(clip_grad=clip_grad, **said)
    optimizer.chained_optimizers = []
    for group in groups:
        part = object.__new__(FP32Optimizer)
        part.grad_stats_parallel_group, part.optimizer, part.is_stub_optimizer = group, None, True
        optimizer.chained_optimizers.append(part)
    return optimizer


@pytest.mark.parametrize("attribute", [*OVERLAPPED.sentences, *ROLLED_BACK.sentences])
def test_what_needs_the_end_of_a_step_on_all_ranks_is_refused(monkeypatch, attribute):
    chunk = torch.nn.Linear(2, 2)
    said = {attribute: VALUES.get(attribute, True)}
    loop, config, chunk.ddp_config = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    monkeypatch.setattr(loop_arguments, "_arguments", lambda: loop)
    assert check_overlapped(OVERLAPS, config, [chunk], chained(grad_norm_skip_threshold=float("inf"))) == []
    for holder in (loop, config, chunk.ddp_config):
        vars(holder).update(said)
        with pytest.raises(UnsupportedError) as error:
            check_overlapped(OVERLAPS, config, [chunk], chained())
        table = next(asked for asked in (SCHEDULES, OVERLAPPED, ROLLED_BACK) if attribute in asked.sentences)
        assert f"{attribute} = {said[attribute]!r} is not supported{table.feature}: " in str(error.value)
        if table is ROLLED_BACK:
            assert check_overlapped(OVERLAPS, config, [chunk], chained(clip_grad=0.0)) == []
        vars(holder).clear()


def test_scales_that_forwards_move_cannot_be_taken_back(monkeypatch):
    monkeypatch.setattr(loop_arguments, "_arguments", lambda: None)
    tensorwise, delayed = (SimpleNamespace(fp8="e4m3", fp8_recipe=name) for name in ("tensorwise", "delayed"))
    check_overlapped(OVERLAPS, tensorwise, [], chained())
    check_overlapped(OVERLAPS, delayed, [], chained(clip_grad=0.0))
    with refused("fp8-delayed-scaling", "--fp8-recipe", "--clip-grad", 0, kind=UnsupportedError):
        check_overlapped(OVERLAPS, delayed, [], chained())


def test_norms_of_several_groups_are_refused_without_a_barrier(monkeypatch):
    monkeypatch.setattr(loop_arguments, "_arguments", lambda: None)
    for optimizer in (chained(groups=("dense", "experts")), SimpleNamespace(config=SimpleNamespace())):
        with refused(
            "unsupported-setting", "--use-distributed-optimizer", "--pipemem-overlap-steps", kind=UnsupportedError
        ):
            check_overlapped(OVERLAPS, SimpleNamespace(), [], optimizer)


def test_optimizers_that_keep_more_than_is_known_are_refused(monkeypatch):
    class Another(FP32Optimizer):
        pass

    monkeypatch.setattr(loop_arguments, "_arguments", lambda: None)
    for clip, optimizer in ((1.0, chained()), (0.0, chained(clip_grad=0.0))):
        optimizer.chained_optimizers[1].__class__ = Another
        with refused("no-rollback", kind=UnsupportedError) if clip else nullcontext():
            check_overlapped(OVERLAPS, SimpleNamespace(), [], optimizer)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"log_interval": 1}, "pass --log-interval 10"),
        ({"timing_log_level": 1, "barrier_with_L1_time": True}, "--no-barrier-with-level-1-timing"),
        ({"exit_duration_in_mins": 60}, "--exit-interval or a signal"),
        ({"num_experts": 8}, "with experts"),
        ({"mtp_num_layers": 1}, "with multi-token prediction"),
        ({"sft": True}, "with packed sequences"),
        ({"dataloader_inter_document_masking": True}, "with packed sequences"),
    ],
)
def test_what_joins_the_ranks_anyway_is_told(monkeypatch, said, words):
    asked = {"log_interval": 100, "timing_log_level": 0, "barrier_with_L1_time": True}
    for others in (asked, {"timing_log_level": 2, "barrier_with_L1_time": False}, asked | said):
        monkeypatch.setattr(loop_arguments, "_arguments", lambda others=others: SimpleNamespace(**others))
        told = check_overlapped(OVERLAPS, SimpleNamespace(), [], chained())
    assert len(told) == 1 and words in told[0]


def test_a_standalone_stage_is_refused_where_the_embedding_is_on_another_device():
    config = SimpleNamespace(mtp_standalone=True)
    check_sharing(config, "zb-h1", Placement.linear(4))
    with refused("unsupported-placement", "v-half", "--pipeline-model-parallel-layout", kind=UnsupportedError):
        check_sharing(config, "v-half", Placement.v_shape(4))


class TiedLast(torch.nn.Module):
    """A last stage with a copy of the embedding, and a head of its own that nobody uses."""

    pre_process, post_process, mtp_process, share_embeddings_and_output_weights = False, True, True, True

    def __init__(self, weight):
        super().__init__()
        self.output_layer = SimpleNamespace(weight=weight)


def test_a_tied_model_is_refused_where_checkpoints_are_kept(monkeypatch):
    whole, cut = TiedLast(torch.ones(1)), TiedLast(None)
    check_chunks([whole], 1, "zb-h1")
    monkeypatch.setattr(refusals, "keeps_checkpoints", lambda: True)
    check_chunks([cut], 1, "zb-h1")
    with refused("tied-embedding", "--untie-embeddings-and-output-weights", kind=UnsupportedError):
        check_chunks([whole], 1, "zb-h1")
