"""What cannot run is refused in one sentence that names the way out."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.asynchronous.megatron.training import StageOptimizer, check_untied
from megatron_pipemem.features.overlap_steps.megatron.steps import check_overlapped
from megatron_pipemem.features.slices.megatron.step import SequenceSlices
from megatron_pipemem.mcore import loop_arguments, refusals
from megatron_pipemem.mcore.plugin import disable, enable
from megatron_pipemem.mcore.refusals import check_chunks, check_sharing
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule

OVERLAPS = Request("1f1b", overlap_steps=True)


def test_layerwise_dropout_is_refused_in_slices():
    config = SimpleNamespace(hidden_dropout=0.1)
    step = SimpleNamespace(
        program=SimpleNamespace(schedule=build_schedule("seq1f1b", num_devices=2, num_microbatches=4)),
        context=SimpleNamespace(config=config),
    )
    with refused("unsupported-setting", "--hidden-dropout", kind=UnsupportedError):
        SequenceSlices(Request("seq1f1b", rng="layerwise")).prepare(step)


def test_capacity_by_position_does_not_keep_the_first_tokens():
    """So no slice can tell which of its tokens are dropped before the later ones are known."""
    torch.manual_seed(0)
    visits = torch.zeros(64, 4, dtype=torch.bool).scatter(1, torch.rand(64, 4).topk(2).indices, True)
    _, kept = apply_router_token_dropping(visits.float(), visits, 2, 0.8, drop_policy="position")
    first = visits & (visits.cumsum(dim=0) <= get_capacity(2 * 64, 4, 0.8))
    assert kept.sum() == first.sum() and not torch.equal(kept, first)


class FullyShardedDataParallel(torch.nn.Linear):
    pass


@pytest.mark.parametrize(
    ("chunks", "needed", "replicas", "code", "words"),
    [
        (1, 1, 1, None, ()),
        (1, 2, 1, "needs-chunks", ("--num-virtual-stages-per-pipeline-rank 2",)),
        (2, 1, 1, "needs-chunks", ("drop the flags that ask for virtual pipeline stages",)),
        (1, 2, 2, "needs-chunks", (2,)),
    ],
)
def test_a_wrong_number_of_chunks_says_how_to_get_the_right_one(chunks, needed, replicas, code, words):
    built = [torch.nn.Linear(2, 2) for _ in range(chunks)]
    with refused(code, *words) if code else nullcontext():
        check_chunks(built, needed, "v-half", replicas)


def test_fsdp_is_refused():
    with refused("unsupported-setting", "--use-megatron-fsdp"):
        check_chunks([FullyShardedDataParallel(2, 2)], 1, "1f1b")


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_a_file_of_an_asynchronous_schedule_is_refused(name, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(build_schedule(name, num_devices=4, num_microbatches=8).to_csv())
    with refused("no-steps", kind=UnsupportedError):
        enable(str(file))
    disable()


def test_an_asynchronous_schedule_refuses_a_tied_model_and_an_optimizer_that_needs_all_stages():
    chunk, config = torch.nn.Linear(2, 2), SimpleNamespace(clip_grad=1.0, fp16=False)
    chunk.pre_process = chunk.share_embeddings_and_output_weights = True
    check_untied(Request("pipedream-2bw"), [chunk])
    with refused("tied-embedding", "--untie-embeddings-and-output-weights"):
        check_untied(Request("pipedream"), [chunk])
    optimizer = StageOptimizer(Request("pipedream"))
    with refused("unsupported-setting", "--clip-grad", 0):
        optimizer.catch(lambda config, chunks: SimpleNamespace(step=None), config, [])
    with refused("enabled-too-late"):
        optimizer.require()


def chained(clip_grad: float = 1.0, groups: tuple[object, ...] = (None, None), **others) -> ChainedOptimizer:
    optimizer = object.__new__(ChainedOptimizer)
    optimizer.config = SimpleNamespace(clip_grad=clip_grad, **others)
    optimizer.chained_optimizers = []
    for group in groups:
        part = object.__new__(FP32Optimizer)
        part.grad_stats_parallel_group, part.optimizer, part.is_stub_optimizer = group, None, True
        optimizer.chained_optimizers.append(part)
    return optimizer


@pytest.mark.parametrize("place", range(3))
def test_what_needs_the_end_of_a_step_on_all_ranks_is_refused_wherever_it_is_set(monkeypatch, place):
    """In the arguments of Megatron's loop, in the model's configuration, and in that of DDP."""
    chunk = torch.nn.Linear(2, 2)
    loop, config, chunk.ddp_config = holders = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    monkeypatch.setattr(loop_arguments, "_arguments", lambda: loop)
    assert check_overlapped(OVERLAPS, config, [chunk], chained(grad_norm_skip_threshold=float("inf"))) == []
    for settings, clips_alone in (({"log_params_norm": True}, False), ({"qk_clip": True}, True)):
        vars(holders[place]).update(settings)
        with refused("unsupported-setting", *settings):
            check_overlapped(OVERLAPS, config, [chunk], chained())
        with nullcontext() if clips_alone else refused("unsupported-setting", *settings):
            check_overlapped(OVERLAPS, config, [chunk], chained(clip_grad=0.0))
        vars(holders[place]).clear()


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
    ("settings", "words"),
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
def test_what_joins_the_ranks_anyway_is_told(monkeypatch, settings, words):
    usual = {"log_interval": 100, "timing_log_level": 0, "barrier_with_L1_time": True}
    sentences = []
    for others in (usual, {"timing_log_level": 2, "barrier_with_L1_time": False}, usual | settings):
        monkeypatch.setattr(loop_arguments, "_arguments", lambda others=others: SimpleNamespace(**others))
        sentences.append(check_overlapped(OVERLAPS, SimpleNamespace(), [], chained()))
    *free, (sentence,) = sentences
    assert free == [[], []] and words in sentence


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
