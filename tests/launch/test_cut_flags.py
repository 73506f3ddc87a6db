"""Flags that cut the model, against every family: they lead to the chunks that they say, or to one sentence with a way out."""

from __future__ import annotations

import re

import pytest
from refusals import refused

from megatron_pipemem.choose.model_cut import known_chunks, placements_of
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.model import layout
from megatron_pipemem.model.counts import layer_weights
from megatron_pipemem.model.cut_flags import (
    LAYERS_PER_STAGE,
    VIRTUAL_STAGES,
    check_layers,
    cut_of,
    cut_pattern,
    sizes_of,
)
from megatron_pipemem.model.model import grouped_layers
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.registry import families

P, LAYERS = 4, 24
WAYS = {
    VIRTUAL_STAGES: str,
    LAYERS_PER_STAGE: lambda chunks: str(LAYERS // (P * chunks)) if chunks else "0",
    layout.FLAG: lambda chunks: layout.written(layout.spread(LAYERS, P * chunks or 1)),
    layout.PATTERN_FLAGS[0]: lambda chunks: "|".join(["M*"] * (P * chunks or P - 1)),
}


@pytest.mark.parametrize("schedule", [*(family.name for family in families()), AUTO])
def test_every_family_runs_a_cut_or_says_which_it_runs(schedule):
    for flag, value in WAYS.items():
        for chunks in (0, 1, 2, 3, 6):
            flags = {flag: value(chunks)}
            cut = cut_of(flags, P, LAYERS)
            try:
                assert {known_chunks(placement) for placement in placements_of(schedule, {}, P, cut)} == {cut.chunks}
                continue
            except UnsupportedError as error:
                message = str(error)
            assert message.startswith(f"schedule {schedule} ") and f"--{flag}" in message
            match = re.search(
                rf"(?:write (\d+) (?:stages|segments).*|pass --{VIRTUAL_STAGES} (\d+) .*|leave it out)$", message
            )
            assert match, message
            needed = int(match[2] or int(match[1] or P) // P)
            way_out = placements_of(schedule, {}, P, cut_of({VIRTUAL_STAGES: needed}, P, LAYERS))
            assert known_chunks(way_out[0]) == needed


@pytest.mark.parametrize(
    ("flag", "number"), [(LAYERS_PER_STAGE, "0"), (LAYERS_PER_STAGE, "-2"), (LAYERS_PER_STAGE, "5")]
)
def test_layers_that_no_stages_come_of(flag, number):
    with refused("needs-chunks", flag, number, 24, kind=UnsupportedError):
        placements_of("hanayo", {}, P, cut_of({flag: number}, P, LAYERS))


def test_more_stages_than_layers_are_refused_before_any_schedule_is_built():
    with refused("too-few-layers", 4, "000", 24, kind=UnsupportedError):
        cut_of({VIRTUAL_STAGES: "1000000000"}, P, LAYERS)
    assert cut_of({VIRTUAL_STAGES: "1", "account-for-loss-in-pipeline-split": True}, P, 3).chunks == 1


SIZES = {"hidden-size": 64, "num-attention-heads": 4, "seq-length": 128, "num-experts": 8, "moe-router-topk": 2}


@pytest.mark.parametrize("schedule", [family.name for family in families()])
def test_a_pattern_without_cuts_is_cut_by_what_its_layers_compute(schedule):
    pattern = "MM*-MM*-MM*EMM*EMM*-MMM*"
    flags = SIZES | {"hybrid-layer-pattern": f"{pattern}/M*/M*", "vocab-size": "1000"}
    placement = placements_of(schedule, {}, P, cut_of(flags, P, None))[0]
    flag = cut_pattern(flags, placement, with_head=True)
    name, written = flag.removeprefix("--").split("=")
    assert layout.pattern_layers(written) == pattern and written.endswith("/M*/M*")
    assert placements_of(schedule, {}, P, cut_of({name: written}, P, None))[0] == placement
    sizes, segments = sizes_of(flags), written.split("/")[0].split("|")
    weights = dict(zip("M*-E", layer_weights(sizes, "M*-E", 128), strict=True))
    loads = [sum(weights[symbol] for symbol in segment) for segment in segments]
    loads[-1] += sizes.hidden_size * 1000
    devices = placement.devices[: len(loads)]
    per_device = [sum(load for load, own in zip(loads, devices, strict=True) if own == device) for device in range(P)]
    assert max(per_device) <= sum(per_device) / P + max(weights.values())
    # Equal numbers of layers would not do.
    assert len({len(segment) for segment in segments}) > 1


def test_layers_weigh_what_their_matrices_have_and_attention_and_scans_compute():
    def weights(symbols, sequence=10, **flags):
        sizes = sizes_of({"hidden-size": 64, "num-attention-heads": 4, "ffn-hidden-size": 96} | flags)
        return layer_weights(sizes, symbols, sequence)

    attention, ffn, mamba = weights("*-M")
    assert attention == 4 * 64 * 64 + 2 * 10 * 64
    assert ffn == 2 * 64 * 96
    # 2 heads of 64 channels, 8 groups of 128 states each.
    assert mamba == 64 * (2 * 128 + 2 * 8 * 128 + 2) + 128 * 64 + 3.5 * 128 * 128
    grouped = {"num-query-groups": "2", "kv-channels": "8"}
    assert weights("*", 1, **grouped) == [64 * (32 + 16 + 16) + 32 * 64 + 2 * 32]
    experts = {"num-experts": 8, "moe-ffn-hidden-size": 32, "swiglu": True, "moe-router-topk": 3}
    assert weights("E", **experts) == [64 * 8 + 3 * 3 * 64 * 32]
    shared = {"num-experts": 8, "moe-shared-expert-intermediate-size": 48, "ffn-hidden-size": None}
    assert weights("E", **shared) == [64 * 8 + 2 * 64 * (2 * 256 + 48)]
    latent = {"q-lora-rank": 16, "kv-lora-rank": 8, "qk-head-dim": 4, "qk-pos-emb-head-dim": 2, "v-head-dim": 3}
    projections = 64 * 16 + 16 * 4 * 6 + 64 * (8 + 2) + 8 * 4 * (4 + 3) + 4 * 3 * 64
    assert weights("+", **latent) == [projections + 10 * 4 * (6 + 3)]


def test_the_head_takes_layers_away_from_its_device_unless_the_vocabulary_is_cut():
    flags = SIZES | {"hybrid-layer-pattern": "*-" * 8, "vocab-size": 2000}
    placement = placements_of("1f1b", {}, P)[0]
    last = [len(cut_pattern(flags, placement, with_head=whole).split("|")[-1]) for whole in (True, False)]
    assert last[0] < last[1] == 4


FIRST, LAST = layout.FIRST_OR_LAST
# Flags of the first and last rank, and the layers of every stage of a pattern of 24 layers on four ranks.
ENDS = [
    ("1f1b", {FIRST: "9", LAST: "3"}, [9, 6, 6, 3]),
    ("chimera", {LAST: "3"}, [7, 7, 7, 3]),
    ("interleaved", {FIRST: "4"}, [2, 3, 4, 4, 2, 3, 3, 3]),
    ("interleaved", {FIRST: "2", LAST: "6"}, [1, 4, 4, 3, 1, 4, 4, 3]),
    ("v-half", {FIRST: "2"}, [1, 3, 4, 4, 3, 3, 3, 3]),
    ("zbv", {LAST: "2", FIRST: "6"}, [3, 3, 4, 4, 3, 3, 3, 1]),
]


@pytest.mark.parametrize(("schedule", "flags", "counts"), ENDS)
def test_layers_of_the_first_or_last_rank_cut_a_pattern(schedule, flags, counts):
    pattern = "M*-" * 8 + "/M*"
    text = cut_pattern(SIZES | {"hybrid-layer-pattern": pattern} | flags, placements_of(schedule, {}, P)[0], True)
    assert [*map(len, layout.segments(text.partition("=")[2]))] == counts
    assert text.replace("|", "") == f"--hybrid-layer-pattern={pattern}"


@pytest.mark.parametrize(
    ("schedule", "flags", "code"),
    [
        ("interleaved", {FIRST: "3"}, "does-not-divide"),
        ("v-half", {LAST: "40"}, "too-few-layers"),
        ("1f1b", {FIRST: "12", LAST: "12"}, "too-few-layers"),
    ],
)
def test_layers_of_the_ends_that_do_not_fit_a_pattern(schedule, flags, code):
    placement = placements_of(schedule, {}, P)[0]
    with refused(code, 24 if code == "too-few-layers" else 3, kind=UnsupportedError):
        cut_pattern(SIZES | {"hybrid-layer-pattern": "M*-" * 8} | flags, placement, with_head=True)
    with refused("does-not-divide", 24, kind=UnsupportedError):
        ends = {FIRST: "3", LAST: "4", "hybrid-layer-pattern": "M*-" * 8}
        cut_pattern(SIZES | ends, placements_of("1f1b", {}, 2)[0], with_head=True)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"hybrid-layer-pattern": "*-|*-|*-|*-"},
        {"hybrid-layer-pattern": ""},
    ],
)
def test_what_is_cut_already_or_is_no_pattern_stays(flags):
    assert cut_pattern(SIZES | flags, placements_of("1f1b", {}, P)[0], with_head=True) is None


def test_a_proposed_layout_has_what_predicts_ahead():
    """Megatron asserts that the layout has as many m as there are layers of it."""
    with refused("does-not-divide", 2, "2L", kind=UnsupportedError):
        check_layers({"mtp-num-layers": 2}, 5, 4, 1)
    with refused("does-not-divide", 2, kind=UnsupportedError):
        check_layers({"mtp-num-layers": "1"}, 5, 4, 1)
    check_layers({"pipemem-layout": "auto"}, 5, 4, 1)


def test_a_group_of_layers_stays_on_a_stage():
    pattern = "M[*-M-]" * 6 + "[*-]" * 2 + "/M*"
    flags = SIZES | {"hybrid-layer-pattern": pattern, "vocab-size": "1000"}
    for schedule in ("1f1b", "v-half"):
        text = cut_pattern(flags, placements_of(schedule, {}, P)[0], with_head=True).partition("=")[2]
        assert text.replace("|", "") == pattern and text.endswith("/M*")
        stages = layout.segments(text)
        assert len(stages) == (8 if schedule == "v-half" else 4)
        assert all(stage.count("[") == stage.count("]") for stage in stages)
    assert layout.pattern_layers("M|[*-]E/M") == "M*-E" and layout.without_cuts("M|[*-]E/M") == "M[*-]E/M"
    assert grouped_layers("M[*-E]E") == [False, False, True, True, False]
    assert layout.cut("[*E]M/[*E]", (2, 1)) == "[*E]|M/[*E]"
    with refused("bad-layout", "1, 2", "[*E]M", kind=UnsupportedError):
        layout.cut("[*E]M", (1, 2))
