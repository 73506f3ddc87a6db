"""What the public objects print: one short line, whatever their size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_pipemem import Costs, build_schedule, search_schedule, simulate
from megatron_pipemem.features.offload.orders import plan_offload
from megatron_pipemem.features.vocabulary.choice import choose_vocabulary
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Channel
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import families
from megatron_pipemem.schedule.vocabulary import VocabularyCosts
from megatron_pipemem.search.result import ResultCache
from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.planner.planning import plan
from megatron_pipemem.tools.planner.space import Limits

RUN = Path(__file__).parents[2] / "configs" / "runs" / "tiny-cpu.yaml"
PER_STAGE = Costs(
    *(tuple(1 + stage / 7 for stage in range(64)) for _ in range(3)),
    p2p={(device, device + 1): 0.1 for device in range(31)},
    memory={Kind.F: tuple(float(1 << 30) for _ in range(64))},
    channel=Channel(tuple(1 / 3 for _ in range(64)), switches=(tuple(range(32)),)),
    vocabulary=VocabularyCosts(score=tuple(range(32))),
    recompute=tuple(1 + stage / 9 for stage in range(64)),
    copy_sum=tuple(1 + stage / 9 for stage in range(64)),
)


def public_objects() -> dict[str, object]:
    schedule = build_schedule("v-half", num_devices=16, num_microbatches=64)
    small = build_schedule("1f1b", num_devices=4, num_microbatches=8)
    result = search_schedule(num_devices=4, num_microbatches=8, seconds=0)
    limits = Limits({"schedule": ["1f1b"], "tp": [1], "recompute": ["none"], "variant": ["plain"]})
    planned = plan(load(RUN, Run), limits=limits, top=2, search_seconds=0)
    return {
        "schedule": schedule,
        "schedule with a long name": replace(schedule, name="a very long name\n" * 50),
        "program": lower(schedule),
        "timeline": simulate(schedule),
        "search": result,
        "candidate": result.best,
        "offload plan": plan_offload(schedule, Costs(channel=Channel(0.5)), "half"),
        "plan": planned.plans[0],
        "plans": planned,
        "placement": Placement.wave(128, 8),
        "replicas": Placement.bidirectional(4),
        "vocabulary": choose_vocabulary(small, Costs(), 1.0),
        "costs": PER_STAGE,
        "channel": PER_STAGE.channel,
        **{family.name: family for family in families()},
    }


def test_everything_public_prints_as_one_short_line():
    for what, shown in public_objects().items():
        text = repr(shown)
        assert len(text) < 200 and text.isprintable(), (what, text)


def test_costs_that_print_alike_are_still_searched_for_one_by_one(tmp_path):
    """Kept searches are found by what was asked in full."""
    cache = ResultCache(tmp_path)
    other = replace(PER_STAGE, backward_input=tuple(reversed(PER_STAGE.backward_input)))
    assert repr(other) == repr(PER_STAGE) and other != PER_STAGE
    assert cache._path((8, PER_STAGE)) != cache._path((8, other)) and cache._path((8, other)) == cache._path((8, other))
    far, near = Placement.linear(20), Placement.from_devices((*range(1, 20), 0))
    assert cache._path((far,)) != cache._path((near,))
