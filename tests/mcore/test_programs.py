"""Compiling programs for the number of microbatches at hand."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from asked_programs import programs_of
from megatron.core.timers import Timers
from refusals import refused
from torch.distributed import ProcessGroup

from megatron_pipemem import queues as queue_settings
from megatron_pipemem.choose.knowledge import Knowledge, Shape
from megatron_pipemem.errors import ScheduleError, UnsupportedError
from megatron_pipemem.mcore import loop_arguments
from megatron_pipemem.mcore import programs as run_programs
from megatron_pipemem.mcore.launch import add_virtual_stages, take_flags
from megatron_pipemem.mcore.plugin import programs_for
from megatron_pipemem.mcore.programs import MeasurementUpdate, ProgramStore
from megatron_pipemem.mcore.step.extension import LaunchKind, LaunchOrders
from megatron_pipemem.request import Request
from megatron_pipemem.schedule import registry, validator
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.family import Family
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.validator import validate_program


def compile(programs, m=8, chunks=2, forward_only=False, agree=lambda digest: None, group_size=None):
    return programs.get(Shape(4, chunks, m, group_size, forward_only), agree).program


def family(name, **settings):
    return ProgramStore(Request(name, **settings))


def test_compiles_once_per_shape_and_asks_for_agreement_each_time_it_does():
    programs, digests = family("v-half"), []
    first = compile(programs, agree=digests.append)
    assert compile(programs, agree=digests.append) is first and len(digests) == 1
    compile(programs, m=5, agree=digests.append)
    compile(programs, forward_only=True, agree=digests.append)
    assert len(set(digests)) == 3
    again = []
    compile(family("v-half"), agree=again.append)
    assert again == digests[:1], "every rank builds the same program"


@dataclass
class Counts:
    """The sizes for which a family was built, and the schedules and programs that were proved."""

    built: list[tuple[int, int]] = field(default_factory=list)
    schedules: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)


@pytest.fixture
def counts(monkeypatch) -> Callable[[str], Counts]:
    counted, prove, prove_program = Counts(), validator._prove, run_programs.validate_program

    def counted_prove(schedule, *order):
        counted.schedules.append(schedule.name)
        prove(schedule, *order)

    def counted_program(program, **queue):
        counted.programs.append(program.schedule.name)
        prove_program(program, **queue)

    def of(name: str) -> Counts:
        known = registry.family(name)

        def build(p, m, **options):
            counted.built.append((p, m if isinstance(m, int) else m.num_microbatches))
            return known.build(p, m, **options)

        monkeypatch.setitem(registry._FAMILIES, name, replace(known, build=build))
        return counted

    monkeypatch.setattr(validator, "_prove", counted_prove)
    monkeypatch.setattr(run_programs, "validate_program", counted_program)
    return of


RUN = [known.name for known in registry.synchronous_families() if known.name not in ("zb-auto", "hanayo")]


@pytest.mark.parametrize("name", RUN)
def test_from_flags_to_evaluation_a_family_is_built_once_and_each_program_is_proved_once(name, counts, monkeypatch):
    """Also where the start compares the schedule with a memory cap."""
    counted = counts(name)
    monkeypatch.setenv("WORLD_SIZE", "4")
    sizes = "--pipeline-model-parallel-size 4 --num-layers 24 --micro-batch-size 1 --global-batch-size 8".split()
    request, others = take_flags([*sizes, "--pipemem-schedule", name, "--pipemem-memory-cap", "4"])
    add_virtual_stages(request, others)
    programs = programs_for(request)
    chunks = programs.placement(4, None).num_chunks
    for forward_only in (False, True, False):
        compile(programs, chunks=chunks, forward_only=forward_only)
    assert counted.built.count((4, 8)) == 1
    trials = {(1, 1), (4, 1)} if "chunks" in registry.family(name).options else set()
    assert set(counted.built) == {(4, 8), *trials}, "of one microbatch, to see whether the family takes the options"
    schedules = [name, f"{name} (forward only)"]
    assert counted.schedules == counted.programs == schedules


def test_orders_for_both_kinds_of_queues_share_the_proof_of_their_schedule(counts):
    counted, programs = counts("v-half"), family("v-half")
    programs.queues = (False, True)
    compile(programs)
    assert counted.schedules == ["v-half"] and counted.programs == ["v-half", "v-half"]


def test_the_schedule_of_a_file_is_proved_when_it_is_read_and_not_again(counts, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(build_schedule("v-half", num_devices=4, num_microbatches=8).to_csv())
    counted = counts("v-half")
    compile(programs_of(str(path)))
    assert counted.schedules == counted.programs == ["mine.csv"]


def test_an_invalid_program_of_any_source_reaches_no_executor(monkeypatch):
    """A family that is registered, the result of a search, and a schedule that was made for one step."""

    def broken(p, m):
        schedule = build_schedule("v-half", num_devices=p, num_microbatches=m)
        if m == 1:  # a trial
            return schedule
        *others, (*order, one, between, two) = schedule.orders
        assert one.kind is two.kind is Kind.W and one.stage == two.stage
        return replace(schedule, orders=(*others, (*order, two, between, one)))

    monkeypatch.setitem(registry._FAMILIES, "mine", Family("mine", broken, "weight gradients in the wrong order"))
    with refused("wrong-order", kind=ScheduleError):
        compile(programs_of("mine"))
    searching = programs_of("auto", options={"seconds": 0, "placement": "v"})
    base = searching.get(Shape(4, 2, 8), lambda digest: None)
    with refused("wrong-order", kind=ScheduleError):
        searching.step_program(broken(4, 8), base, Costs(), False)
    searching.clear()
    monkeypatch.setattr(searching, "plan", lambda *shape: replace(base.plan, schedule=broken(4, 8)))
    with refused("wrong-order", kind=ScheduleError):
        compile(searching)


def test_a_family_whose_placement_depends_on_the_microbatches_is_refused(monkeypatch):
    def build(p, m):
        return build_schedule("v-half" if m > 1 else "interleaved", num_devices=p, num_microbatches=m)

    monkeypatch.setitem(registry._FAMILIES, "mine", Family("mine", build, "another placement for one microbatch"))
    with refused("family-declaration", 8, "interleaved", kind=UnsupportedError):
        compile(programs_of("mine"))


def test_every_pipeline_compares_its_programs_once():
    """A rank of two pipelines, which need not take the same steps."""
    programs, seen = family("1f1b"), []
    first, second = ProcessGroup(0, 1), ProcessGroup(0, 1)
    for pipeline in (first, second, first):
        programs.get(Shape(4, 1, 8), lambda digest, pipeline=pipeline: seen.append((pipeline, digest)), pipeline)
    assert [pipeline for pipeline, _ in seen] == [first, second] and len({digest for _, digest in seen}) == 1


def test_a_program_that_ranks_disagree_on_is_not_kept():
    programs = family("1f1b")

    def disagree(digest):
        raise UnsupportedError("ranks-differ", "ranks differ")

    with pytest.raises(UnsupportedError):
        compile(programs, chunks=1, agree=disagree)
    seen = []
    compile(programs, chunks=1, agree=seen.append)
    assert seen


def test_evaluation_runs_nothing_but_forwards_and_messages():
    program = compile(family("v-min"), forward_only=True)
    kinds = {action.kind for actions in program.actions for action in actions}
    assert kinds == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_megatrons_group_size_is_used_unless_the_user_set_one():
    by_megatron = compile(family("interleaved"), m=12, group_size=6)
    by_user = compile(family("interleaved", options={"group_size": 6}), m=12, group_size=4)
    assert by_megatron.schedule.orders == by_user.schedule.orders
    assert compile(family("interleaved"), m=12).schedule.orders != by_user.schedule.orders
    by_default = compile(family("gis-h"), m=12, group_size=4).schedule
    assert by_default == build_schedule("gis-h", num_devices=4, num_microbatches=12), "that is Megatron's default"


@pytest.mark.parametrize("enabled", [True, False])
def test_planning_pauses_the_garbage_collector_and_leaves_it_as_it_was(monkeypatch, enabled):
    seen = []
    monkeypatch.setattr(run_programs, "validate_program", lambda *_, **__: seen.append(gc.isenabled()))
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        compile(family("zb-h1"))
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_programs_for_a_single_queue_are_proved_for_it():
    programs = family("v-half")
    usual = compile(programs)
    with refused("deadlock", kind=ScheduleError):
        validate_program(usual, single_queue=True)
    programs.queues = (True,)
    queued = compile(programs)
    assert queued.schedule == usual.schedule and queued.actions != usual.actions
    validate_program(queued, single_queue=True)
    programs.queues = (True,)
    assert compile(programs) is queued


def test_where_first_launches_wait_both_orders_are_compiled_and_agreed_on_at_once():
    programs, digests = family("v-half"), []
    alone = [compile(programs, agree=digests.append)]
    programs.queues = (True,)
    alone.append(compile(programs, agree=digests.append))
    programs.queues = (False, True)
    both = programs.get(Shape(4, 2, 8), digests.append)
    assert [both.order(False).actions, both.order(True).actions] == [choice.actions for choice in alone]
    assert both.order(False).schedule is both.order(True).schedule and len(set(digests)) == len(digests) == 3
    assert programs.get(Shape(4, 2, 8), digests.append) is both
    other = ProgramStore(Request("zb-h1")).plan(Shape(4, 1, 8), "test").schedule
    asked = [programs.step_program(other, both, Costs(), single_queue) for single_queue in (False, True, False)]
    assert asked[0] is asked[2] and asked[0].actions != asked[1].actions
    assert programs.step_program(both.program.schedule, both, Costs(), True) is both.in_one_queue


@pytest.mark.parametrize(
    ("name", "value", "single"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", False),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", True),
        ("NV_SANITIZER_INJECTION_PORT_BASE", "49152", True),
        ("NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN", "49152", True),
    ],
)
def test_what_puts_all_launches_of_a_gpu_into_one_queue(monkeypatch, name, value, single):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    config = SimpleNamespace(timers=None)
    assert LaunchOrders().queues(gpu, config) == (False, True)
    assert LaunchOrders(forced=True).queues(cpu, config) == (True,)
    monkeypatch.setenv(name, value)
    assert LaunchOrders().queues(gpu, config) == ((True,) if single else (False, True))
    assert LaunchOrders().queues(cpu, config) == (False,)


def test_timers_around_every_pass_need_the_order_for_one_queue(monkeypatch, caplog):
    """The log says once that all steps run by this order, and why. Timers of level 1 run between steps."""
    caplog.set_level(logging.INFO)
    cpu, gpu, orders = torch.device("cpu"), torch.device("cuda"), LaunchOrders()
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    levels = [SimpleNamespace(timers=Timers(log_level=level, log_option="max")) for level in range(3)]
    untimed = SimpleNamespace(timers=None)
    assert [orders.queues(gpu, config) for config in levels] == [(False, True), (False, True), (True,)]
    assert orders.queues(gpu, levels[2]) == (True,) and orders.queues(cpu, levels[2]) == (False,)
    assert orders.queues(gpu, untimed) == (True,), "loops evaluate without timers"
    assert ["--timing-log-level 2" in message for message in caplog.messages] == [False, True]
    for level, queues in ((1, (False, True)), (2, (True,))):
        monkeypatch.setattr(loop_arguments, "_arguments", lambda level=level: SimpleNamespace(timing_log_level=level))
        assert LaunchOrders().queues(gpu, untimed) == queues


def test_one_connection_where_launches_only_start_in_order(monkeypatch):
    """The usual order runs after the first steps where it is proved for that. No GPU has shown that it suffices."""
    gpu, config = torch.device("cuda"), SimpleNamespace(timers=None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert LaunchOrders(proves_starts=True).queues(gpu, config) == (True,)
    monkeypatch.setattr(queue_settings, "ORDERED_STARTS_SUFFICE", True)
    assert LaunchOrders(proves_starts=True).queues(gpu, config) == (False, True)
    assert LaunchOrders(proves_starts=False).queues(gpu, config) == (True,)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert LaunchOrders(proves_starts=True).queues(gpu, config) == (True,)
    for name, chunks, is_usual in (("zbv", 2, True), ("gis", 2, False)):
        programs, alone = family(name), family(name)
        programs.queues, alone.queues = (False, True), (True,)
        compiled = programs.get(Shape(4, chunks, 8), lambda digest: None)
        queued = alone.get(Shape(4, chunks, 8), lambda digest: None).program
        assert compiled.order(True).actions == queued.actions
        assert (compiled.order(False).actions != queued.actions) is is_usual


def test_the_first_two_steps_of_a_kind_run_for_one_queue():
    orders, both = LaunchOrders(), (False, True)
    usual = LaunchKind(False, False, Shape(4, 2, 8), (4, 1, 8), 0)

    def ran(count, **kind):
        told = []
        for _ in range(count):
            told.append(orders.is_single_queue(both, usual._replace(**kind)))
            orders.ended(usual._replace(**kind))
        return told

    first = [True, True, False]
    kinds = (
        {},
        {"shape": Shape(4, 2, 5)},
        {"message": (2, 1, 8)},
        {"forward_only": True},
        {"logits": True},
        {"renewals": 1},
    )
    for kind in kinds:
        assert ran(3, **kind) == first
    assert ran(1) == [False]
    assert ran(4, message=None) == [True] * 4, "another length in every step"
    failed = usual._replace(shape=Shape(4, 2, 3))
    assert [orders.is_single_queue(both, failed) for _ in range(3)] == [True] * 3, (
        "a step that did not end may not have launched all"
    )
    assert [orders.is_single_queue((single,), usual._replace(renewals=2)) for single in (False, True)] == [False, True]


def test_a_new_plan_may_launch_something_new():
    programs = family("v-half")
    programs.renew(MeasurementUpdate("costs measured", Costs(3.0), None, 0.0))
    assert programs.renewals == 1


def test_a_cap_holds_for_both_orders():
    changes = {Kind.F: (4, 4), Kind.B: (-4, -4), Kind.RECV_F: (0, 3), Kind.RECV_I: (3, 0), Kind.SEND_F: (0, 0)}
    changes |= {Kind.SEND_I: (0, -3), Kind.I: (0, 0), Kind.W: (-4, -4)}
    known = replace(Knowledge(), counted_bytes=changes)
    schedule = build_schedule("1f1b", num_devices=2, num_microbatches=6)
    costs = known.counted_costs(schedule.placement, in_bytes=True)
    held = {
        queues: replace(known, queues=queues).device_peaks(schedule, costs)
        for queues in ((False,), (True,), (False, True))
    }
    assert list(held[False, True]) == [max(levels) for levels in zip(held[False,], held[True,], strict=True)]
