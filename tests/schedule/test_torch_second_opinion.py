"""torch.distributed.pipelining judges our schedules: its validator, its lowering, its simulator and its CSV.

Its interfaces here are private, so a torch that lacks them skips this module.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from lanes import examples, rest_nightly
from random_schedules import EXECUTED, random_schedules
from refusals import refused

from megatron_pipemem.errors import ScheduleError
from megatron_pipemem.features.pairs.orders import with_pairs
from megatron_pipemem.schedule.action import MESSAGES, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.csv_format import write_table
from megatron_pipemem.schedule.lowering import lower, lower_paired
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.schedule.schedule import Schedule
from megatron_pipemem.schedule.simulator import simulate
from megatron_pipemem.schedule.validator import validate, validate_program

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
pytestmark = pytest.mark.skipif(
    not all(
        hasattr(schedules, name)
        for name in (
            "_Action",
            "_validate_schedule",
            "_add_send_recv",
            "_simulate_comms_compute",
            "_PipelineScheduleRuntime",
        )
    ),
    reason="this torch has no schedule lowering",
)

SHAPES = rest_nightly([(2, 4), (3, 7), (4, 2), (8, 16)], [(2, 4), (3, 7), (4, 2)], "fewer devices")


def torch_action(action):
    """Ours as torch's; torch calls the messages that carry gradients ``SEND_B`` and ``RECV_B``."""
    kind = {Kind.SEND_I: "SEND_B", Kind.RECV_I: "RECV_B"}.get(action.kind, action.kind.value)
    return schedules._Action(action.stage, schedules._ComputationType(kind), action.microbatch)


def torch_orders(orders):
    return {device: [torch_action(action) for action in order] for device, order in enumerate(orders)}


def judge(schedule: Schedule) -> None:
    """torch accepts the schedule, finds the same placement, derives the same messages, and sees its lowering end."""
    placement = schedule.placement
    devices = schedules._validate_schedule(
        torch_orders(schedule.orders), placement.num_devices, placement.num_stages, schedule.num_microbatches
    )
    assert devices == dict(enumerate(placement.devices))
    theirs = schedules._add_send_recv(
        torch_orders(schedule.orders), placement.devices.__getitem__, placement.num_stages
    )
    program = lower(schedule)
    messages = {
        device: {torch_action(action) for action in actions if action.kind in MESSAGES}
        for device, actions in enumerate(program.actions)
    }
    assert messages == {device: {a for a in actions if not a.is_compute_op} for device, actions in theirs.items()}
    simulate_in_torch(theirs, placement)


def simulate_in_torch(actions, placement) -> None:
    """Run torch's simulation, which raises if a device never ends."""
    simulated = schedules._simulate_comms_compute(actions, placement.devices.__getitem__, placement.num_stages)
    ran = {device: [a for a in steps if a is not None] for device, steps in simulated.items()}
    assert ran == {device: list(order) for device, order in actions.items()}


@pytest.mark.parametrize(("num_devices", "num_microbatches"), SHAPES)
@pytest.mark.parametrize("name", sorted(EXECUTED))
def test_torch_agrees_on_every_family(name, num_devices, num_microbatches):
    judge(build_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches))


@examples(60)
@given(random_schedules(max_microbatches=4))
def test_torch_agrees_on_random_schedules(schedule):
    judge(schedule)


# ----------------------------------------------------------------------------------------------------------------- CSV


def torch_runtime(placement: Placement, num_microbatches: int):
    """torch's runtime without stages or processes: only what reads and writes files."""
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime.pp_group_size = placement.num_devices
    runtime._num_stages = placement.num_stages
    runtime._n_microbatches = num_microbatches
    runtime._defer_pp_recv = False
    runtime._stages = []
    return runtime


@pytest.mark.parametrize("name", sorted(EXECUTED))
def test_torch_reads_our_csv_and_we_read_its(name, tmp_path):
    schedule = build_schedule(name, num_devices=4, num_microbatches=6)
    (tmp_path / "ours.csv").write_text(schedule.to_csv())
    runtime = torch_runtime(schedule.placement, schedule.num_microbatches)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    assert runtime.pipeline_order == torch_orders(schedule.orders)
    with_messages = {
        device: [a for a in actions if a.is_compute_op or a.computation_type.value[:4] in ("SEND", "RECV")]
        for device, actions in runtime.pipeline_order_with_comms.items()
    }
    simulate_in_torch(with_messages, schedule.placement)
    for written in ("compute_only", "compute_comms"):
        file = tmp_path / f"{written}.csv"
        runtime._dump_csv(str(file), format=written)
        read = Schedule.from_csv(file.read_text(), dialect="torch")
        assert read.orders == schedule.orders
        assert read.placement == schedule.placement


@pytest.mark.parametrize("name", sorted(EXECUTED))
def test_torch_keeps_the_messages_that_we_write_for_it_and_ends(name, tmp_path):
    schedule = build_schedule(name, num_devices=4, num_microbatches=6)
    program = lower_paired(schedule)
    (tmp_path / "ours.txt").write_text(write_table(program.actions, "torch-new"))
    runtime = torch_runtime(schedule.placement, schedule.num_microbatches)
    runtime._load_csv(str(tmp_path / "ours.txt"), format="compute_comms")
    orders = [tuple(a for a in actions if a.kind is not Kind.REDUCE_GRAD) for actions in program.actions]
    added = (schedules._ComputationType.REDUCE_GRAD, schedules.UNSHARD, schedules.RESHARD)
    loaded = runtime.pipeline_order_with_comms.items()
    rows = {device: [a for a in row if a.computation_type not in added] for device, row in loaded}
    assert rows == torch_orders(orders)
    simulate_in_torch(rows, schedule.placement)


def torch_table(generator: str, num_devices: int, num_microbatches: int):
    """What one of torch's own generators writes for two stages per device, without a process group."""
    rounds = max(1, num_microbatches // num_devices)
    self = SimpleNamespace(
        pp_group_size=num_devices,
        n_local_stages=2,
        _stages=[None, None],
        num_stages=2 * num_devices,
        _num_stages=2 * num_devices,
        _n_microbatches=num_microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=num_microbatches // rounds,
    )
    generate = getattr(schedules, generator)._calculate_single_rank_operations
    return {rank: generate(self, rank) for rank in range(num_devices)}


def read_table(table) -> Schedule:
    text = "".join(",".join("" if a is None else str(a) for a in row) + "\r\n" for row in table.values())
    return Schedule.from_csv(text, dialect="torch")


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 4), (4, 8), (4, 16)])
@pytest.mark.parametrize("generator", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_we_validate_what_torch_generates(generator, num_devices, num_microbatches):
    table = torch_table(generator, num_devices, num_microbatches)
    schedule = read_table(table)
    assert schedule.num_microbatches == num_microbatches
    assert torch_orders(schedule.orders) == {d: [a for a in row if a is not None] for d, row in table.items()}
    validate_program(lower(schedule))


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 4), (3, 9), (4, 10), (8, 16)])
@pytest.mark.parametrize(("name", "generator"), [("dualpipe-v", "ScheduleDualPipeV"), ("zbv", "ScheduleZBVZeroBubble")])
def test_we_write_what_torch_generates(name, generator, num_devices, num_microbatches):
    ours = build_schedule(name, num_devices=num_devices, num_microbatches=num_microbatches)
    assert ours.orders == read_table(torch_table(generator, num_devices, num_microbatches)).orders


def test_we_run_nothing_that_adds_gradients_in_another_order():
    """torch's looped breadth-first schedule runs backwards from the last microbatch to the first."""
    schedule = read_table(torch_table("ScheduleLoopedBFS", 2, 4))
    with refused("wrong-order", kind=ScheduleError):
        validate(schedule)
    validate_program(lower(schedule), microbatch_order=False)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 10), (4, 8), (8, 20)])
def test_torchs_own_dualpipe_v_is_valid_with_its_pairs_and_ours_has_as_many(tmp_path, p, m):
    """What torch pairs with a forward may run as one action. Our choice of pairs makes a step that is as short."""
    stages = [SimpleNamespace(stage_index=stage, num_stages=2 * p, group_rank=0, group_size=p, is_first=not stage,
                              is_last=bool(stage), has_backward=True, group=None, device="cpu", submod=None,
                              stage_index_to_group_rank={}) for stage in (0, 2 * p - 1)]  # fmt: skip
    schedules.ScheduleDualPipeV(stages, n_microbatches=m, loss_fn=max)._dump_csv(
        str(tmp_path / "v.csv"), "compute_only"
    )
    theirs = Schedule.from_csv((tmp_path / "v.csv").read_text(), dialect="torch")
    validate_program(lower(theirs))
    costs = Costs().with_exchanges(0.4)
    ours = with_pairs(build_schedule("dualpipe-v", num_devices=p, num_microbatches=m), costs).schedule
    assert len(ours.pairs) >= len(theirs.pairs) > m
    assert simulate(ours, costs).makespan <= simulate(theirs, costs).makespan
