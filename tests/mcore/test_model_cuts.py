"""Models that are cut into another number of chunks than their schedule runs, and flags that then mean something else."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from asked_programs import programs_of
from refusals import refused

from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.mcore.model import whole_model
from megatron_pipemem.mcore.model.whole_model import check_whole_model, contents_of_chunk
from megatron_pipemem.model.cut_flags import remarks
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule

SIZES = ["--pipeline-model-parallel-size", "4", "--num-layers", "24", "--clip-grad", "0"]
CUTS = {
    "virtual stages": lambda chunks: ["--num-virtual-stages-per-pipeline-rank", str(chunks)],
    "layers per stage": lambda chunks: ["--num-layers-per-virtual-pipeline-stage", str(24 // (4 * chunks))],
    "layout": lambda chunks: [f"--pipeline-model-parallel-layout=Et{'|t' * (4 * chunks - 1)}L"],
    "pattern": lambda chunks: ["--hybrid-layer-pattern", "|".join(["M*"] * 4 * chunks) + "/M*/M*"],
}


def test_the_way_out_is_one(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(build_schedule("v-min", num_devices=4, num_microbatches=8).to_csv())
    for schedule in ("v-half", str(file)):
        settings, others = take_flags([*SIZES, *CUTS["layout"](1), "--pipemem-schedule", schedule])
        with refused("needs-chunks", 2, 1, 4, kind=UnsupportedError) as error:
            add_virtual_stages(settings, others)
        layout = re.search("'(.+)'$", str(error.value))[1]
        with_it = [*SIZES, "--pipeline-model-parallel-layout", layout]
        assert add_virtual_stages(settings, with_it) == with_it


@pytest.mark.parametrize(
    ("schedule", "pattern", "rank"),
    [
        ("1f1b", "*E|*-|*E|*E", 1),
        ("v-half", "*|E|*|-|*|E|*|E", 3),
        ("v-half", "*-*-*-*-*-*-*-*E", 1),
        ("gems", "*E|*E|*E|*", 3),
    ],
)
def test_a_rank_without_experts_is_refused_where_megatron_would_wait_for_its_losses(schedule, pattern, rank):
    sizes = "--pipeline-model-parallel-size 4 --hidden-size 64 --num-attention-heads 4 --num-experts 4".split()
    settings, others = take_flags([*sizes, "--hybrid-layer-pattern", pattern, "--pipemem-schedule", schedule])
    if schedule == "gems":  # whose ranks have a stage of either replica
        assert add_virtual_stages(settings, others) == others
        return
    with refused("bad-layout", rank, kind=UnsupportedError):
        add_virtual_stages(settings, others)
    assert add_virtual_stages(settings, [*others, "--moe-router-load-balancing-type", "none"])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "v-half", "hanayo", "chimera"])
def test_a_pattern_without_cuts_gets_such_that_every_rank_has_experts(schedule):
    sizes = ["--hidden-size", "64", "--num-attention-heads", "4", "--num-experts", "4", "--vocab-size", "100000"]
    flags = ["--pipeline-model-parallel-size", "4", *sizes, "--hybrid-layer-pattern", "*-*-*-*-E*E*E*E"]
    settings, others = take_flags([*flags, "--pipemem-schedule", schedule])
    segments = add_virtual_stages(settings, others)[-1].split("=")[1].split("|")
    placement = build_schedule(schedule, num_devices=4, num_microbatches=4).placement
    assert all(any("E" in segments[s % len(segments)] for s in held) for held in placement.stages)


def test_auto_is_held_to_the_chunks_that_it_was_asked_for():
    flags = [*SIZES, "--num-virtual-stages-per-pipeline-rank", "2"]
    settings, others = take_flags([*flags, "--pipemem-schedule", "auto", "--pipemem-option", "chunks=4"])
    with refused("needs-chunks", 4, "--num-virtual-stages-per-pipeline-rank", kind=UnsupportedError):
        add_virtual_stages(settings, others)
    # Also where no command line was seen.
    with refused("needs-chunks", 4, 2, kind=UnsupportedError):
        programs_of("auto", None, "unit", {"chunks": 4}).placement(4, 2)


@pytest.mark.parametrize(
    ("flags", "refused", "allowed", "way_out"),
    [
        (["--decoder-first-pipeline-num-layers", "6"], [], ["zb-h1", "chimera", "1f1b", "interleaved"], ""),
        (["--iterations-to-skip", "3", "4"], ["v-half", "interleaved", "auto"], ["zb-h1", "gems"], "zb-h1"),
        (["--full-validation"], ["v-min", "interleaved"], ["1f1b", "dualpipe"], "--eval-iters"),
        (["--multiple-validation-sets"], ["v-half", "interleaved"], ["1f1b", "gems"], "zb-h1"),
        (["--inprocess-restart"], ["1f1b", "v-half"], [], "torchrun --max-restarts"),
        (["--logits-save-dir", "x"], ["1f1b"], [], "without a pipeline"),
        (["--logits-load-dir", "x"], ["v-half"], [], "without a pipeline"),
        (["--perform-rl-step"], ["v-half", "chimera", "auto"], ["zb-h1", "interleaved"], "linear or interleaved"),
    ],
)
def test_flags_that_would_mean_something_else_are_refused(flags, refused, allowed, way_out):
    for schedule in (*refused, *allowed):
        settings, others = take_flags([*SIZES, *flags, "--pipemem-schedule", schedule])
        if schedule in allowed:
            assert add_virtual_stages(settings, others)[: len(others)] == others
            continue
        with pytest.raises(UnsupportedError) as error:
            add_virtual_stages(settings, others)
        assert str(error.value).startswith(f"{flags[0]} does not go with schedule {schedule}") and way_out in str(
            error.value
        )


def test_what_counts_as_a_layer_may_make_layers_divide():
    flags = ["--pipeline-model-parallel-size", "4", "--account-for-loss-in-pipeline-split", "--num-layers"]
    settings, others = take_flags([*flags, "15", "--pipemem-schedule", "v-half"])
    assert add_virtual_stages(settings, others)[-1] == "2"


def test_flags_without_effect_are_told_once(caplog, monkeypatch):
    flags = ["--ckpt-format", "torch", "--use-ring-exchange-p2p", "--no-overlap-p2p-communication"]
    flags += ["--microbatch-group-size-per-virtual-pipeline-stage", "4"]
    settings, others = take_flags([*SIZES, *flags, "--pipemem-schedule", "v-half"])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        add_virtual_stages(settings, others)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    assert any("--ckpt-format torch_dist" in line for line in told)
    assert sum("has no effect" in line for line in told) == 3
    assert not remarks({"microbatch-group-size-per-virtual-pipeline-stage": "4"}, "interleaved")


def test_a_state_that_only_this_placement_can_load_is_told():
    flags = {"save": "x", "use-distributed-optimizer": True}
    assert "pass --dist-ckpt-optim-fully-reshardable" in remarks(flags, "zb-h1")[0]
    for enough in ({"save": None}, {"dist-ckpt-optim-fully-reshardable": True}, {"no-save-optim": True}):
        assert not remarks(flags | enough, "zb-h1")


@pytest.mark.parametrize(("ranks", "is_told"), [("2", False), ("4", True)])
def test_a_mask_that_megatron_gives_to_the_end_ranks_only_is_told(ranks, is_told):
    flags = {"reset-attention-mask": True, "pipeline-model-parallel-size": ranks}
    assert any("reset-attention-mask" in line for line in remarks(flags, "zb-h1")) == is_told


def chunk(layers, embeds: bool, has_head: bool, of: int = 8, **more) -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    numbered = [SimpleNamespace(layer_number=number) for number in layers]
    module.decoder, module.config = SimpleNamespace(layers=numbered), SimpleNamespace(num_layers=of)
    module.pre_process, module.post_process = embeds, has_head
    for name, value in more.items():
        setattr(module, name, value)
    return module


def cut(*stages: range, **more) -> list[torch.nn.Module]:
    """The chunks of all stages."""
    last = len(stages) - 1
    return [chunk(layers, stage == 0, stage == last, **more) for stage, layers in enumerate(stages)]


def check(placement: Placement, stages: list, monkeypatch) -> None:
    """As rank 0 of a pipeline sees it."""

    def gather(own, groups):
        contents = [[contents_of_chunk(stages[stage]) for stage in held] for held in placement.stages]
        return [own, *contents[1:]]

    monkeypatch.setattr(whole_model, "gather", gather)
    check_whole_model([stages[stage] for stage in placement.stages[0]], placement, None)


EVEN = (range(1, 3), range(3, 5), range(5, 7), range(7, 9))


@pytest.mark.parametrize(
    ("placement", "stages"),
    [
        (Placement.linear(4), cut(*EVEN)),
        (Placement.v_shape(2), cut(*EVEN)),
        (Placement.interleaved(2, 2), cut(range(1, 1), range(1, 8), range(8, 9), range(9, 9))),
        (Placement.bidirectional(4), [*cut(*EVEN), *cut(*EVEN)]),
        (Placement.linear(2), cut(range(1, 3), range(3, 6), of=99, hybrid_layer_pattern="M*|M*M/M*/M*")),
    ],
)
def test_a_whole_model_passes(placement, stages, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        check(placement, stages, monkeypatch)
    assert f"are on {placement.model_stages} stages" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO):
        check(placement, stages, monkeypatch)
    assert not caplog.text, "hundreds of ranks would say it"


@pytest.mark.parametrize(
    ("placement", "stages", "words"),
    [
        (
            Placement.wave(2, 4),
            cut(*(range(n, n + 2) for n in range(1, 17, 2))),
            ("model-differs", 16, 8),
        ),
        (Placement.v_shape(2), cut(*(range(n, n + 1) for n in range(1, 5))), ("model-differs", 4, 8)),
        (Placement.linear(2), cut(range(1, 5), range(1, 5)), ("model-differs", 8, 0, 1, 4)),
        (Placement.linear(4), cut(EVEN[0], EVEN[2], EVEN[1], EVEN[3]), ("model-differs",)),
        (
            Placement.bidirectional(2),
            [*cut(range(1, 5), range(5, 9)), *cut(range(5, 9), range(1, 5))],
            ("model-differs",),
        ),
        (
            Placement.linear(2),
            [chunk(range(1, 5), True, False), chunk(range(5, 9), True, True)],
            ("model-differs", "[0, 1]"),
        ),
        (
            Placement.linear(2),
            [chunk(range(1, 5), True, False), chunk(range(5, 9), False, False)],
            ("model-differs", "[]"),
        ),
    ],
)
def test_what_is_not_the_model_is_refused(placement, stages, words, monkeypatch):
    with refused(*words, kind=UnsupportedError) as error:
        check(placement, stages, monkeypatch)
    assert "virtual_pipeline_model_parallel_size" in str(error.value) or "post_process" in str(error.value)


def test_models_of_another_kind_are_left_alone(monkeypatch, caplog):
    for stranger in (torch.nn.Linear(1, 1), chunk([None], False, True), chunk(range(3), False, True, of=None)):
        with caplog.at_level(logging.INFO):
            check(Placement.linear(2), [cut(*EVEN)[0], stranger], monkeypatch)
        assert "stages [1] have no numbered layers" in caplog.text
