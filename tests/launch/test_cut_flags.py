"""Flags that cut the model, against every family: they lead to the chunks that they say, or to one sentence with a way out."""

from __future__ import annotations

import re

import pytest

from megatron_pipemem.config import layout
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.launch.cut_flags import HYBRID, LAYERS_PER_STAGE, VIRTUAL_STAGES, cut_of
from megatron_pipemem.schedule.model_cut import known_chunks, placements_of
from megatron_pipemem.schedule.options import AUTO
from megatron_pipemem.schedule.registry import families

P, LAYERS = 4, 24
WAYS = {
    VIRTUAL_STAGES: str,
    LAYERS_PER_STAGE: lambda chunks: str(LAYERS // (P * chunks)) if chunks else "0",
    layout.FLAG: lambda chunks: layout.written(layout.spread(LAYERS, P * chunks or 1)),
    HYBRID[0]: lambda chunks: "|".join(["M*"] * (P * chunks or 1)),
}


@pytest.mark.parametrize("schedule", [*(family.name for family in families()), AUTO])
def test_every_family_runs_a_cut_or_says_which_it_runs(schedule):
    for flag, value in WAYS.items():
        for chunks in (0, 1, 2, 3, 6):
            flags = {flag: value(chunks)}
            cut = cut_of(flags, P, LAYERS)
            try:
                assert {known_chunks(each) for each in placements_of(schedule, {}, P, cut)} == {cut.chunks}
                continue
            except UnsupportedError as error:
                message = str(error)
            assert message.startswith(f"schedule {schedule} ") and f"--{flag}" in message
            found = re.search(
                rf"(?:write (\d+) (?:stages|segments).*|pass --{VIRTUAL_STAGES} (\d+) .*|leave it out)$", message
            )
            assert found, message
            needed = int(found[2] or int(found[1] or P) // P)
            way_out = placements_of(schedule, {}, P, cut_of({VIRTUAL_STAGES: needed}, P, LAYERS))
            assert known_chunks(way_out[0]) == needed


@pytest.mark.parametrize(
    ("flag", "number"), [(LAYERS_PER_STAGE, "0"), (LAYERS_PER_STAGE, "-2"), (LAYERS_PER_STAGE, "5")]
)
def test_layers_that_no_stages_come_of(flag, number):
    with pytest.raises(UnsupportedError, match=f"hanayo .* as by --{flag} {number} for 24 layers"):
        placements_of("hanayo", {}, P, cut_of({flag: number}, P, LAYERS))


def test_more_stages_than_layers_are_refused_before_any_schedule_is_built():
    with pytest.raises(
        UnsupportedError, match="4,000,000,000 stages on 4 pipeline ranks, more than 24 layers; pass a smaller"
    ):
        cut_of({VIRTUAL_STAGES: "1000000000"}, P, LAYERS)
    assert cut_of({VIRTUAL_STAGES: "1", "account-for-loss-in-pipeline-split": True}, P, 3).chunks == 1
