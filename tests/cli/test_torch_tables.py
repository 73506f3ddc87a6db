"""Tables of torch.distributed.pipelining itself: it loads what we write, and we judge what it writes.

Its interfaces here are private, so a torch that lacks them skips this module.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_pipemem.schedule.registry import build_schedule

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
pytestmark = pytest.mark.skipif(
    not all(hasattr(schedules, name) for name in ("_Action", "_simulate_comms_compute", "_PipelineScheduleRuntime")),
    reason="this torch has no schedule runtime",
)

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half"]


def runtime_for(schedule):
    """torch's runtime without stages or processes: only what loads and simulates files."""
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime.pp_group_size = schedule.num_devices
    runtime._num_stages = schedule.num_stages
    runtime._n_microbatches = schedule.num_microbatches
    runtime._defer_pp_recv = False
    runtime._stages = []
    return runtime


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("suffix", "form"), [("csv", "compute_only"), ("txt", "compute_comms")])
def test_torch_loads_what_check_writes(pipemem, tmp_path, name, suffix, form):
    """It validates the orders, keeps the messages as written, and its simulation of them ends."""
    target = tmp_path / f"table.{suffix}"
    assert pipemem("check", name, "--write", target, "-p", 4, "-m", 5, "--to", "torch").exit_code == 0
    schedule = build_schedule(name, num_devices=4, num_microbatches=5)
    runtime = runtime_for(schedule)
    runtime._load_csv(str(target), format=form)
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement.devices))
    loaded = runtime.pipeline_order_with_comms
    assert [[str(a) for a in row if a.is_compute_op] for row in loaded.values()] == [
        list(map(str, order)) for order in schedule.orders
    ]
    if form == "compute_comms":
        written = [line.split(",") for line in target.read_text().splitlines()]
        assert [list(map(str, row)) for row in loaded.values()] == written
    reducing = schedules._ComputationType.REDUCE_GRAD
    rows = {
        device: [a for a in row if a.computation_type not in (reducing, schedules.UNSHARD, schedules.RESHARD)]
        for device, row in loaded.items()
    }
    ran = schedules._simulate_comms_compute(rows, schedule.placement.devices.__getitem__, schedule.num_stages)
    assert {device: [a for a in steps if a is not None] for device, steps in ran.items()} == rows


def written(tmp_path, table):
    file = tmp_path / "table.csv"
    file.write_text("".join(",".join("" if a is None else str(a) for a in row) + "\r\n" for row in table.values()))
    return file


def hand_written(name: str, num_devices: int, num_microbatches: int):
    """The table that torch's single-stage schedules publish, which is not what their loops run."""
    shape = SimpleNamespace(_num_stages=num_devices, _n_microbatches=num_microbatches)
    return getattr(schedules, name)._get_pipeline_order(shape)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 4), (4, 8)])
def test_torchs_own_1f1b_table_is_off_by_one_on_the_last_rank(
    pipemem, refuses, tmp_path, num_devices, num_microbatches
):
    last = num_devices - 1
    gpipe = written(tmp_path, hand_written("ScheduleGPipe", num_devices, num_microbatches))
    assert pipemem("check", gpipe).exit_code == 0
    table = hand_written("Schedule1F1B", num_devices, num_microbatches)
    if str(next(a for a in table[last] if a)) == f"{last}F0":
        pytest.skip("this torch has mended its table")
    said = refuses("check", written(tmp_path, table), code=1)
    assert f"device {last}, position 0, action {last}F1: stage {last} numbers its {num_microbatches}" in said
    assert f"so that {last}F1 becomes {last}F0 (line {num_devices}, cell " in said
