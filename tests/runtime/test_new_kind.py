"""A kind of action that this file adds: its row, its price and its handler, and not a line of the package.

CONTRIBUTING tells how; the recipe's example is the row below.
"""

from __future__ import annotations

import gc
import json
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from measured_steps import as_measured
from refusals import refused

import megatron_pipemem
from megatron_pipemem import Action, Costs, Kind, KindSpec, Need, Schedule, register_kind, simulate, validate
from megatron_pipemem.errors import CostsError, ScheduleError, UnsupportedError
from megatron_pipemem.runtime.executor import Executor, Handlers
from megatron_pipemem.runtime.trace import Trace, TracedAction
from megatron_pipemem.runtime.transport import MessageFormat, Transport
from megatron_pipemem.schedule import action as kinds
from megatron_pipemem.schedule.dependencies import needs_of
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.measured import costs_from
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.simulator import peaks
from megatron_pipemem.schedule.validator import validate_program
from megatron_pipemem.tools.report.browser import trace
from megatron_pipemem.tools.report.measured_step import NANOSECONDS
from megatron_pipemem.tools.report.page import page

SPEC = KindSpec(
    "CHECKSUM", "checksum", (90, 200, 200), needs=(Need("F"),), prepares=("I", "B"), shares={"F": 0.25}, units=2
)


@pytest.fixture(autouse=True)
def checksum():
    """The kind, which other tests do not see."""
    kind = register_kind(SPEC)
    yield kind
    forget(kind)


def forget(kind: Kind) -> None:
    """Take a kind out of the table."""
    kinds._KINDS.pop(kind.value)
    delattr(Kind, kind.value)
    for _, members in kinds._QUERIES:
        members.pop(kind, None)


def with_checksums(schedule: Schedule, before: tuple[Kind, ...] = (Kind.I, Kind.B)) -> Schedule:
    orders = (
        tuple(action for a in order for action in ([a._replace(kind=Kind.CHECKSUM), a] if a.kind in before else [a]))
        for order in schedule.orders
    )
    return replace(schedule, orders=tuple(orders))


def checked(name: str = "zb-h1", devices: int = 2, microbatches: int = 3) -> Schedule:
    return with_checksums(build_schedule(name, num_devices=devices, num_microbatches=microbatches))


class Checksums:
    """The handler: adds up what the forward of the stage and microbatch has kept."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], float] = {}

    def extend(self, executor: Executor) -> Handlers:
        def check(instruction):
            with executor.measured(instruction.action):
                self.seen[instruction.key] = sum(float(tensor.sum()) for tensor in executor.kept_tensors(instruction))

        return {Kind.CHECKSUM: check}


def test_it_is_a_kind_like_all_others(checksum):
    assert checksum is Kind.CHECKSUM is Kind("CHECKSUM") is pickle.loads(pickle.dumps(checksum))
    assert Action.parse("2CHECKSUM0") == Action(checksum, 2, 0) and str(Action(checksum, 2, 0)) == "2CHECKSUM0"
    assert register_kind(SPEC) is checksum, "the same row once more"
    assert needs_of(
        Action(checksum, 1, 2), build_schedule("1f1b", num_devices=2, num_microbatches=3).placement, ()
    ) == (Action(Kind.F, 1, 2),)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved"])
def test_it_is_validated_lowered_written_and_read(name):
    schedule = checked(name, 2, 4)
    validate(schedule)
    program = lower(schedule)
    validate_program(program)
    assert [[a for a in row if a.kind in kinds.ORDERED] for row in program.actions] == [*map(list, schedule.orders)]
    for single_queue in (False, True):
        validate_program(lower(schedule, single_queue=single_queue), single_queue=single_queue)
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name).orders == schedule.orders
    assert all(a.kind is Kind.F for order in schedule.forward_only().orders for a in order)


@given(st.data())
def test_missing_and_badly_placed_ones_are_refused(data):
    """Of one that is taken away, moved in front of its forward or behind its backward, the validator says which."""
    schedule = checked()
    device = data.draw(st.integers(0, 1))
    order = list(schedule.orders[device])
    action = data.draw(st.sampled_from([a for a in order if a.kind is Kind.CHECKSUM]))
    forward, backward = (order.index(action._replace(kind=kind)) for kind in (Kind.F, Kind.I))
    at = data.draw(st.sampled_from([None, *range(forward + 1), *range(backward, len(order))]))
    order.remove(action)
    if at is not None:
        order.insert(at, action)
    orders = tuple(tuple(order) if d == device else actions for d, actions in enumerate(schedule.orders))
    with pytest.raises(ScheduleError) as error:
        validate(replace(schedule, orders=orders))
    early = at is not None and at <= forward
    assert (error.value.device, error.value.action) == (
        device,
        str(action._replace(kind=action.kind if early else Kind.I)),
    )


def test_one_that_nothing_uses_is_refused():
    forwards = build_schedule("1f1b", num_devices=2, num_microbatches=2).forward_only()
    with pytest.raises(ScheduleError) as error:
        validate(replace(forwards, orders=((*forwards.orders[0], Action(Kind.CHECKSUM, 0, 0)), forwards.orders[1])))
    assert error.value.action == "0CHECKSUM0"


def test_one_that_must_be_followed_is_refused_alone():
    following = register_kind(KindSpec("SAMPLE", needs=(Need("F"),), followed_by="AVERAGE"))
    followed = register_kind(KindSpec("AVERAGE", needs=(Need("SAMPLE"),)))
    try:
        schedule = build_schedule("1f1b", num_devices=1, num_microbatches=1)
        forward, backward = schedule.orders[0]
        sample, average = (forward._replace(kind=kind) for kind in (following, followed))
        validate(replace(schedule, orders=((forward, sample, average, backward),)))
        with refused("missing-action", "0SAMPLE0", "0AVERAGE0", kind=ScheduleError):
            validate(replace(schedule, orders=((forward, sample, backward),)))
        with refused("missing-action", "0AVERAGE0", "0SAMPLE0", kind=ScheduleError):
            validate(replace(schedule, orders=((forward, average, backward),)))
    finally:
        forget(following)
        forget(followed)


def test_the_simulator_takes_its_price_from_the_row_or_the_costs(tmp_path):
    schedule = checked("zb-h1", 1, 3)
    assert simulate(schedule, Costs(4, 1, 1)).makespan == 3 * (4 + 1 + 1 + 4 * 0.25)
    assert simulate(schedule, Costs(4, 1, 1, further={Kind.CHECKSUM: 10})).makespan == 3 * 16
    (tmp_path / "costs.json").write_text(json.dumps({"forward": 4, "further": {"CHECKSUM": [10]}}))
    assert simulate(schedule, Costs.from_json(tmp_path / "costs.json")).makespan == 3 * 16
    with pytest.raises(CostsError):
        Costs(further={"F": 1})
    assert peaks(schedule) == (1 + 3 * 2,), "every one takes two units and none gives them back"
    assert peaks(schedule, Costs(memory={"F": 8, "W": -8, "CHECKSUM": 1})) == (8 + 3,)


def test_measured_seconds_are_priced_again():
    schedule = checked("zb-h1", 2, 1)
    medians = {(kind, stage): 2.0 + stage for kind in (Kind.F, Kind.I, Kind.W, Kind.CHECKSUM) for stage in (0, 1)}
    costs = costs_from(medians, {}, schedule.placement, Costs())
    assert costs.further == {Kind.CHECKSUM: (2.0, 3.0)}


def test_costs_of_a_measured_step_have_it():
    schedule = checked()
    step = as_measured(schedule, Costs(further={Kind.CHECKSUM: (3, 5)}))
    assert step.costs().further == {Kind.CHECKSUM: (3.0, 5.0)}
    assert simulate(schedule, step.costs()).makespan == pytest.approx(step.length_ns / NANOSECONDS)


def test_it_is_drawn():
    timeline = simulate(checked())
    assert '"0CHECKSUM"' in page([timeline]) and '"CHECKSUM checksum"' in page([timeline])
    names = {(event["name"], event["cat"]) for event in trace([timeline])["traceEvents"] if event["ph"] == "X"}
    assert ("PP:1CHECKSUM2", "checksum") in names


def test_an_executor_that_cannot_be_made_leaves_no_circle():
    program = lower(checked("zb-h1", 1, 3))
    message = MessageFormat((toy.ROWS, toy.WIDTH), torch.float32, torch.device("cpu"))

    def make() -> None:
        with suppress(UnsupportedError):
            Executor(program, 0, {0: toy.Runner(0, 1)}, Transport(toy.alone(program.placement), message))

    make()
    gc.collect()
    gc.disable()
    try:
        make()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_executor_runs_its_handler():
    program = lower(checked("zb-h1", 1, 3))
    validate_program(program)
    runners = {0: toy.Runner(0, 1)}
    message = MessageFormat((toy.ROWS, toy.WIDTH), torch.float32, torch.device("cpu"))
    transport = Transport(toy.alone(program.placement), message)
    with refused("no-handler", kind=UnsupportedError):
        Executor(program, 0, runners, transport)
    assert not transport.pipeline.unfinished
    feature, times = Checksums(), Trace()
    Executor(program, 0, runners, transport, [feature], trace=times).run()
    assert set(feature.seen) == {(0, microbatch) for microbatch in range(3)}
    ran = [action.action for action in times.actions() if isinstance(action, TracedAction)]
    assert ran == list(program.schedule.orders[0])


@pytest.mark.parametrize("spec", [KindSpec("F"), KindSpec("Noise"), KindSpec("2X"), replace(SPEC, units=0)])
def test_names_that_are_taken_or_unreadable_are_refused(spec):
    with pytest.raises(UnsupportedError):
        register_kind(spec)


def test_this_file_edits_nothing_of_the_package():
    home = Path(megatron_pipemem.__file__).parent
    assert not [path for path in home.rglob("*.py") if "CHECKSUM" in path.read_text()]
