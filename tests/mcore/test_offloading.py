"""What users say about offload and recomputation, and the plans made of it. No process group."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from asked_programs import programs_of
from refusals import refused

from megatron_pipemem.choose.knowledge import Choice, Shape
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.features.offload import megatron as offloading
from megatron_pipemem.features.offload.megatron import Offloading
from megatron_pipemem.features.offload.runtime.host import ALIGNMENT, HostLink
from megatron_pipemem.mcore import agreement
from megatron_pipemem.mcore.model.stages import Tape, watch_batches
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.request import Request, TransferOptions
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.validator import validate_program

SHAPE = Shape(4, 2, 8)
MESSAGE = 3
LINK = HostLink(47.0, 94.0, True)


def counted(num_stages: int) -> dict[Kind, tuple[int, ...]]:
    """What a first step might show: 100 bytes saved by every forward, 94 of them movable."""
    sizes = {
        Kind.F: 100,
        Kind.I: -40,
        Kind.W: -60 - MESSAGE,
        Kind.RECV_F: MESSAGE,
        Kind.RECV_I: MESSAGE,
        Kind.SEND_I: -MESSAGE,
        Kind.WAIT_OFFLOAD: -94,
        Kind.RELOAD: 94,
    }
    return {kind: (size,) * num_stages for kind, size in sizes.items()}


# Of the 100 bytes of a forward, what is left without those that are cheap to make again.
SELECTIVE = 70


def plan_with_bytes(wanted: ProgramStore, shape: Shape) -> Choice:
    """The plan that follows the steps which count bytes."""
    stages, shown = shape.num_devices * shape.chunks, []
    while wanted.needs_bytes:
        schedule = wanted.plan(shape, "start").schedule
        validate_program(lower(schedule))
        again = set(schedule.recomputed.values())
        shown.append(again)
        part = {Kind.F: (SELECTIVE,) * stages} if again else {}
        wanted.set_measurements(None, counted(stages) | part)
    assert shown == [set(), {Kind.RS}][: len(shown)]
    return wanted.plan(shape, "bytes counted")


def source(schedule: str, cap=None, **settings) -> ProgramStore:
    return programs_of(schedule, cap, **settings)


def offloaded(schedule) -> list[Action]:
    return [action for order in schedule.orders for action in order if action.kind is Kind.OFFLOAD]


def test_settings_as_users_write_them():
    options = {"bandwidth": "2GiB", "min_bytes": 100, "guard": 1, "ratio": "0.5", "switches": [[0, 1], [2, 3]]}
    read = Request("v-half", offload="half", recompute="auto", host_memory="64GiB", offload_options=options)
    assert (read.offload, read.recompute, read.host_memory) == ("half", "auto", 64 * 2**30)
    assert read.offload_options == TransferOptions(2 * 2**30, 100, True, 0.5, ((0, 1), (2, 3)))
    assert replace(read) == read


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"offload": "most"}, ("bad-choice", "most")),
        ({"offload": "full", "recompute": "some"}, ("bad-choice", "--pipemem-recompute", "some")),
        ({"offload": "full", "host_memory": "0.5"}, ("bad-number", "--pipemem-host-memory", "0.5", "60GiB")),
        ({"offload": "full", "offload_options": {"speed": 1}}, ("unknown-option", "speed")),
        ({"offload": "full", "offload_options": {"ratio": 0}}, ("bad-number", 0)),
        ({"offload": "full", "offload_options": {"guard": 3}}, ("bad-choice", 0, 1)),
        ({"offload": "full", "offload_options": {"switches": "0,1"}}, ("bad-syntax",)),
        ({"offload": "full", "offload_options": {"switches": [0, 1]}}, ("bad-syntax",)),
        ({"offload": "full", "offload_options": {"switches": [[0, 1], [1, 2]]}}, ("bad-syntax",)),
    ],
)
def test_wrong_settings_are_refused_in_words(given, told):
    with refused(*told, kind=UnsupportedError):
        Request("v-half", **given)


def test_ranks_share_the_memory_of_their_node():
    nodes = [offloading._Node("a", 800), offloading._Node("a", 900), offloading._Node("b", 1000)]
    assert offloading._rank_budget(nodes, 600) == 300
    assert offloading._rank_budget(nodes, None) == 200
    with refused("host-memory", "800B", "900B", kind=UnsupportedError):
        offloading._rank_budget(nodes, 900)


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        ([("a", 0), ("a", 1), ("a", 2), ("a", 3)], ((0, 1), (2, 3))),
        # Two nodes, four places on each.
        ([("ab"[place // 4], place) for place in range(8)], ((0, 1), (2, 3), (4, 5), (6, 7))),
        # Two tensor-parallel ranks of each place: one place behind each switch.
        ([("a", 0), ("a", 0), ("a", 1), ("a", 1)], ()),
        # Two pipelines, of which the other shares 1 with 2.
        ([("a", 0), ("a", 1), ("b", 1), ("b", 2)], ((0, 1, 2),)),
        # World ranks dealt to nodes in turn.
        ([("a", 0), ("b", 1), ("a", 2), ("b", 3)], ((0, 2), (1, 3))),
    ],
)
def test_places_share_what_their_ranks_share(ranks, shared):
    assert offloading._shared_channels(ranks, [[0, 1], [2, 3]]) == shared


@pytest.mark.parametrize("channel", [{}, {"costs": "file"}])
def test_known_switches_reach_the_plan(channel, monkeypatch, tmp_path):
    monkeypatch.setattr(offloading, "gather", lambda own, groups: [("host", place) for place in range(4)])
    ratio = {"ratio": 1.0}
    if channel:
        (tmp_path / "costs.json").write_text('{"forward": 1, "channel": {"ratio": 1.0}}')
        channel, ratio = {"costs": str(tmp_path / "costs.json")}, {}
    alone = source("gis-h", offload="full", offload_options=ratio, **channel)
    sharing = source("gis-h", offload="full", offload_options={**ratio, "switches": [[0, 1], [2, 3]]}, **channel)
    shape = Shape(4, 2, 16)
    plan = sharing.plan(shape, "start")
    assert plan.costs.channel.switches == ((0, 1), (2, 3))
    # Four devices have two channels, so half as much leaves.
    assert 0 < len(offloaded(plan.schedule)) < len(offloaded(alone.plan(shape, "start").schedule))


def test_devices_that_share_a_channel_measure_it_in_turns(monkeypatch):
    """A plan that takes turns needs what a copy takes that is alone."""
    happened = []
    monkeypatch.setattr(offloading, "gather", lambda own, groups: [(0, LINK), own])
    monkeypatch.setattr(offloading, "_place", lambda: 1)
    monkeypatch.setattr(Offloading, "shared_links", lambda self: ((0, 1),))
    monkeypatch.setattr(Offloading, "engine", lambda self: SimpleNamespace(channel=None))
    monkeypatch.setattr(offloading, "measure_host_link", lambda channel: happened.append("measured") or LINK)
    monkeypatch.setattr(offloading, "run_on_all_ranks", lambda do, groups: (do(), happened.append("all have"))[0])
    monkeypatch.setattr(Offloading, "budget", lambda self: 0)
    assert Offloading(TransferOptions()).links(2) == (LINK, LINK)
    assert happened == ["all have", "all have", "measured", "all have"]


@pytest.mark.parametrize("stage", ["available_memory", "engine", "measure_host_link"])
def test_a_rank_that_fails_alone_tells_the_others(stage, monkeypatch):
    """They would wait for it in a collective."""

    def broken(*arguments):
        raise OSError("no such group")

    told = []
    monkeypatch.setattr(agreement, "gather", lambda own, groups: told.append(own) or [own])
    monkeypatch.setattr(offloading, "gather", lambda own, groups: [own])
    monkeypatch.setattr(Offloading, "engine", lambda self: SimpleNamespace(channel=None))
    monkeypatch.setattr(offloading, "measure_host_link", lambda channel: LINK)
    monkeypatch.setattr(*((Offloading, stage) if stage == "engine" else (offloading, stage)), broken)
    with pytest.raises(OSError) as raised:
        Offloading(TransferOptions()).links(1)
    assert told[-1] == ("other-rank-failed", f"rank 0 failed: {raised.value}")


@pytest.mark.parametrize("in_bytes", [False, True])
def test_host_memory_is_taken_before_the_step_where_the_plan_is_in_bytes(in_bytes):
    wanted = source("v-half", offload="full", offload_options={"ratio": 0.5})
    if in_bytes:
        wanted.set_measurements(None, counted(8))
    plan, host = wanted.plan(SHAPE, "start"), Offloading(TransferOptions())
    host._budget = 1 << 20
    for _ in range(2):
        step = SimpleNamespace(
            program=SimpleNamespace(schedule=plan.schedule),
            plan=plan,
            own_plan=None,
            pipeline=SimpleNamespace(device=1),
            excludes=[],
        )
        host.prepare(step)
    reserved, peak = host.engine().pool.reserved_bytes, plan.timeline.host_peaks[1]
    assert peak - ALIGNMENT < reserved <= peak if in_bytes else reserved == 0
    host.close(orderly=True)


def test_processors_are_those_of_before_again(monkeypatch):
    """The stand-in binds this process as Megatron's function does, or fails as it does without cuda-python."""
    before = os.sched_getaffinity(0)
    seen = []
    for bind in (lambda: os.sched_setaffinity(0, {min(before)}), lambda: 1 / 0):
        monkeypatch.setattr(offloading, "set_ideal_affinity_for_current_gpu", bind)
        with offloading._near_the_gpu(torch.device("cuda")):
            seen.append(os.sched_getaffinity(0))
        assert os.sched_getaffinity(0) == before
    assert seen == [{min(before)}, before]


def test_bytes_replace_a_plan_that_does_not_keep_them():
    wanted = source("v-half", cap="420B", offload="auto", offload_options={"ratio": 0.5})
    wanted.set_measurements(None, counted(8))
    everything = source("v-half").plan(SHAPE, "start")
    offload_plan = wanted.plan(SHAPE, "bytes counted", everything, minimum_gain=0.9)
    assert offload_plan.schedule != everything.schedule


def program_peaks(schedule, changes) -> list[int]:
    """The most every device holds after any action of its program."""
    peaks = []
    for actions in lower(schedule).actions:
        again = schedule.recomputed
        steps = []
        for kind, stage, _ in actions:
            change = changes.get(kind, (0,) * schedule.num_stages)[stage]
            if kind is Kind.B:
                change = changes[Kind.I][stage] + changes[Kind.W][stage]
            if again.get(stage) is Kind.RS:
                change = {Kind.F: SELECTIVE, Kind.RS: 100 - SELECTIVE}.get(kind, change)
            elif stage in again:
                after = schedule.placement.next_stage(stage)
                devices = schedule.placement.devices
                local = MESSAGE if after is not None and devices[after] == devices[stage] else 0
                change = {Kind.F: local, Kind.R: 100 - local}.get(kind, change)
            steps.append(change)
        peaks.append(max(accumulate(steps)))
    return peaks


@pytest.mark.parametrize(("schedule", "cap"), [("v-half", 460), ("1f1b", 330), ("zbv", 540)])
@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_a_cap_in_bytes_is_kept_by_the_whole_program(schedule, cap, recompute):
    wanted = source(schedule, f"{cap}B", offload="auto", recompute=recompute, offload_options={"ratio": 0.5})
    assert wanted.needs_bytes and not wanted.needs_seconds
    shape = Shape(4, wanted.request.chunks, 8)
    plan = plan_with_bytes(wanted, shape)
    validate_program(lower(plan.schedule))
    assert max(program_peaks(plan.schedule, counted(4 * wanted.request.chunks))) <= cap
    assert not plan.schedule.recomputed, "nothing is computed again where offload is enough"


def test_every_rank_may_have_a_cap_of_its_own():
    caps = (0.75, 0.7, 0.5, 0.3)
    for wanted in (
        source("1f1b", "0.75,0.7,0.5,0.3", offload="auto", offload_options={"ratio": 0.2}),
        source("auto", "0.75,0.7,0.5,0.3", offload="auto", offload_options={"ratio": 0.2}, options={"seconds": 0.3}),
        source("auto", "0.75,0.7,0.5,0.3", options={"seconds": 0.3}),
    ):
        plan = wanted.plan(Shape(4, wanted.request.chunks, 8), "start")
        assert all(peak <= cap * (1 + 1e-9) for peak, cap in zip(plan.timeline.peaks, caps, strict=True))
    with refused("wrong-count", 2, 4, kind=UnsupportedError):
        source("auto", "0.5,0.6").placement(4, 2)


def test_the_placement_is_that_of_the_fastest_plan_with_its_offload():
    settings = {"offload": "auto", "offload_options": {"ratio": 1.4}}
    wanted = source("auto", 0.5, options={"seconds": 0.3}, **settings)
    assert wanted.placement(3, 2).name == "interleaved"
    plan = wanted.plan(Shape(3, 2, 12), "start")
    assert plan.schedule.placement.name == "interleaved" and plan.timeline.peak <= 0.5 * (1 + 1e-9)
    over_a_v = source("auto", 0.5, options={"seconds": 0.3, "placement": "v"}, **settings)
    assert plan.timeline.makespan < over_a_v.plan(Shape(3, 2, 12), "start").timeline.makespan
    assert source("auto", options={"seconds": 0.3}).placement(3, 2).name == "v", "what is fastest without offload"


def test_a_cap_in_bytes_is_kept_by_what_is_cheap_to_make_again_first():
    peaks = {}
    for cap in (400, 330, 280, 130):
        plan = plan_with_bytes(source("1f1b", f"{cap}B", recompute="auto"), Shape(4, 1, 8))
        peaks[cap] = max(program_peaks(plan.schedule, counted(4)))
        assert peaks[cap] <= cap and set(plan.schedule.recomputed.values()) <= {Kind.R, Kind.RS}
        assert ("selective recomputation of stages" in plan.notes) == (Kind.RS in plan.schedule.recomputed.values())
        peaks[cap] = dict(plan.schedule.recomputed)
    assert peaks[400][0] is Kind.RS and 3 not in peaks[400]
    assert peaks[130][0] is Kind.R
    with refused("cap-unreachable", kind=UnsupportedError):
        plan_with_bytes(source("1f1b", "90B", recompute="auto"), Shape(4, 1, 8))


def test_what_runs_again_is_priced_without_the_message_that_its_forward_has_sent():
    wanted, shape = source("1f1b", "230B", recompute="full"), Shape(4, 1, 8)
    wanted.plan(shape, "start")
    wanted.set_measurements(None, counted(4) | {Kind.F: (100 + MESSAGE,) * 4, Kind.SEND_F: (-MESSAGE,) * 4})
    plan = wanted.plan(shape, "bytes counted")
    assert set(plan.schedule.recomputed.values()) == {Kind.R}
    memory = plan.costs.memory
    assert memory[Kind.R] == (100,) * 4 and memory[Kind.F] == (MESSAGE,) * 4


class Counter:
    def __init__(self):
        self.excluded = []

    def exclude(self, tensors):
        self.excluded += tensors


def test_a_tape_refuses_what_is_read_by_a_method_of_its_own():
    class Rollout:
        def get_next(self, keys): ...

    for data in (Rollout(), watch_batches(Rollout(), Counter().exclude)):
        with refused("data-iterator", "--pipemem-recompute", kind=UnsupportedError):
            Tape(data)
