"""What observes a run: it says what it has seen, and never ends the run, whatever goes wrong. With one rank."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from refusals import refused

from megatron_pipemem import tools_by_flag
from megatron_pipemem.choose.knowledge import Choice as Plan
from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.errors import OutputError, UnsupportedError
from megatron_pipemem.mcore import plugin
from megatron_pipemem.mcore.programs import ProgramStore
from megatron_pipemem.mcore.report import recording
from megatron_pipemem.mcore.report.action_bytes import ActionBytes
from megatron_pipemem.mcore.report.recording import Recording
from megatron_pipemem.mcore.report.run_record import RunRecord
from megatron_pipemem.mcore.report.run_report import _costs
from megatron_pipemem.mcore.step.extension import Observation, OverlapStatistics, WeightBytes
from megatron_pipemem.request import Request
from megatron_pipemem.results import lines, measured_bubble
from megatron_pipemem.runtime.activation_ledger import ActivationLedger
from megatron_pipemem.runtime.trace import TracedAction
from megatron_pipemem.runtime.transport import MessageFormat, Pipeline
from megatron_pipemem.schedule.action import COMPUTE, Action, Kind
from megatron_pipemem.schedule.baseline import share_of_1f1b
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.lowering import lower
from megatron_pipemem.schedule.registry import build_schedule
from megatron_pipemem.tools.planner.explanation import case_of_report, explain
from megatron_pipemem.tools.report.run import explanation_lines, table


@pytest.fixture
def record(world, tmp_path) -> RunRecord:
    record = RunRecord(tmp_path / "out" / "report.json", tmp_path / "out" / "timelines")
    record.group = world
    return record


PLAN = ProgramStore(Request("zb-h1")).plan(Shape(1, 1, 2), "start")
PROGRAM = lower(PLAN.schedule)


def observed(fails: str | None = None, size: int = 1024, routed: tuple[int, int] = (0, 0)) -> Observation:
    """A step of one stage: every forward keeps ``size`` floats until its W, and one for each token that is ``routed`` in its
    microbatch. Every action takes a second.
    """
    ledger, kept, times = ActivationLedger(), {}, []
    for action in PROGRAM.actions[0]:
        if action.kind is Kind.F:
            kept[action.microbatch] = torch.empty(size + routed[action.microbatch])
            ledger.route(routed[action.microbatch], 0, 20 if any(routed) else 0)
            ledger.hold(kept[action.microbatch])
        elif action.kind is Kind.W:
            del kept[action.microbatch]
        ledger.record(action)
        if action.kind in COMPUTE:
            times.append(TracedAction(action, float(len(times)), len(times) + 1.0))
    if fails == "ledger":
        ledger.hold(torch.eye(2).to_sparse())

    def actions() -> list[TracedAction]:
        if fails == "trace":
            raise RuntimeError("the clock is gone")
        return times

    return Observation(ledger, SimpleNamespace(actions=actions), lambda: None, WeightBytes({0: 10}, 10, 1, 1), {0: 3})


def train(record: RunRecord, *steps: str | None, losses=(3.0, 2.0, 1.0)) -> dict:
    for fails, loss in zip(steps, losses, strict=False):
        record.add_step(PLAN, PROGRAM, 0, observed(fails))
        record.add_losses({"lm loss": loss}, 1.5)
    record.write()
    return json.loads(record.report.read_text())


def test_a_norm_that_is_not_known_yet_is_waited_for_at_the_end_only(record):
    class Late:
        value = None

        def __float__(self) -> float:
            assert self.value is not None, "the step waited for its norm"
            return self.value

    norm = Late()
    record.add_step(PLAN, PROGRAM, 0, observed(None))
    record.add_losses({"lm loss": 3.0}, norm)
    norm.value = 0.5
    record.overlap = lambda: OverlapStatistics(1, 1, 24, 0)
    record.write()
    report = json.loads(record.report.read_text())
    assert report["grad_norms"] == [0.5]
    assert [report["ranks"][0][name] for name in OverlapStatistics._fields] == [1, 1, 24, 0]


def test_a_run_is_told_and_written(record, caplog):
    with caplog.at_level(logging.INFO):
        report = train(record, None, None)
    (rank,) = report["ranks"]
    assert rank["predicted_peak_bytes"] == rank["counted_peak_bytes"] > 0 and rank["failure"] is None
    assert (report["steps"], report["losses"], report["grad_norms"]) == (2, [3.0, 2.0], [1.5, 1.5])
    assert [p["measured_makespan"] for p in report["plans"]] == [float(len(PLAN.schedule.orders[0]))]
    names = {f"{name}.{suffix}" for name in ("plan", "run") for suffix in ("html", "png", "json")}
    assert {path.name for path in record.trace.iterdir()} == names
    assert PLAN.costs.memory is None, "bytes of the picture are those that were counted"
    events = json.loads((record.trace / "run.json").read_text())["traceEvents"]
    held = [event["args"]["bytes"] for event in events if event.get("name") == "held by device 0"]
    assert max(held) == rank["counted_peak_bytes"] == report["bytes_of_1f1b"] == 4096
    case = case_of_report(report)
    shares = {
        share_of_1f1b(timeline) for timeline in (case.own_timeline, case.measured_timeline, case.planned_timeline)
    }
    assert shares == {1.0} and case.peaks == (4096,) == (max(case.held_bytes[0]),)
    for name in ("plan", "run"):
        assert "peak 0.00391 MiB (1 of 1F1B's)" in (record.trace / f"{name}.html").read_text()
    told = [record.getMessage() for record in caplog.records]
    assert told[: len(lines(report))] == lines(report)
    assert lines(report)[:2] == [
        "zb-h1, 1 pipeline rank with 1 chunk each, 2 microbatches: 2 steps measured",
        f"peak activations {rank['counted_peak_bytes'] / 2**20:.4g} MiB on the fullest rank, predicted = counted on every "
        "rank; 1 of 1F1B's bytes",
    ]
    assert any(str(record.report) in message for message in told) and len(table(report)._rows) == 1


def test_log_report_page_and_explain_name_one_bubble(record, caplog):
    """The first step is not typical, and the last one is drawn and explained but decides nothing."""
    for idle in (95.0, 2.0, 1.0, 4.0):
        seen = observed()
        first, *rest = seen.trace.actions()
        late = [TracedAction(traced.action, traced.start + idle, traced.end + idle) for traced in rest]
        seen.trace = SimpleNamespace(actions=lambda gathered=[first, *late]: gathered)
        record.begin(record.group)
        record.add_step(PLAN, PROGRAM, 0, seen)
    with caplog.at_level(logging.INFO):
        record.write()
    report = json.loads(record.report.read_text())
    work = len(PLAN.schedule.orders[0])
    assert report["ranks"][0]["measured_bubble_rate"] == measured_bubble(report) == 2 / (work + 2)
    told = f"{2 / (work + 2):.1%}"
    (logged,) = [record.getMessage() for record in caplog.records if "bubble (idle" in record.getMessage()]
    assert f"{told} measured" in logged and logged in lines(report)
    page = (record.trace / "run.html").read_text()
    assert f"bubble {told} " in page and f"bubble {4 / (work + 4):.1%}" not in page
    assert (facts := explain(case_of_report(report)))["bubble_rate"] == 4 / (work + 4)  # of the step that it explains
    assert all(words in explanation_lines(facts)[0] for words in ("the last step", "idles 40.0%"))
    assert report["plans"][-1]["measured_makespan"] == work + 2


def test_the_last_step_is_written_for_explain(record, world):
    record.trace = None
    for _ in range(3):
        record.begin(world)
        record.add_step(PLAN, PROGRAM, 0, observed())
    record.write()
    report = json.loads(record.report.read_text())
    last = report["last_step"]
    assert last["layers"] == [3] and last["memory"]["F"] == [4096] and 0 < last["iteration_seconds"] < 10
    case = case_of_report(report)
    assert case.schedule == PLAN.schedule and case.own_timeline.peak == record.peaks.counted_peak_bytes
    assert case.step.spans == (tuple((at * 10**9, (at + 1) * 10**9) for at in range(len(PLAN.schedule.orders[0]))),)
    assert explain(case)["idle"][0]["idle_ns"] == 0


def test_memory_of_a_gpu_is_predicted_from_what_was_allocated_at_the_start(record, monkeypatch):
    measured = {"max_memory_allocated": 9 << 30, "max_memory_reserved": 10 << 30}
    for name, nbytes in measured.items():
        monkeypatch.setattr(torch.cuda, name, lambda nbytes=nbytes: nbytes)
    for allocated in (1 << 30, 8 << 30):  # the optimizer has its state from the second step on
        seen = observed()
        seen.allocated, seen.opened_bytes, seen.bytes_of_message = allocated, 5 << 20, lambda action: 1 << 20
        record.add_step(PLAN, PROGRAM, 0, seen)
    record.write()
    report = json.loads(record.report.read_text())
    (rank,) = report["ranks"]
    assert rank["predicted_peak_with_messages"] == rank["predicted_peak_bytes"] == 4096
    assert rank["predicted_allocated_bytes"] == (8 << 30) + 4096 and rank["predicted_nccl_bytes"] == 0
    assert rank["nccl_bytes"] == 5 << 20
    assert (rank["allocated_bytes"], rank["reserved_bytes"]) == tuple(measured.values())
    (line,) = [line for line in lines(report) if "allocated" in line]
    assert all(
        number in line
        for number in ("allocated 9 GiB", "8 GiB were predicted", "reserved 10 GiB", "take 5 MiB, 0 predicted")
    )


def test_what_a_gpu_held_before_a_step_is_read_when_it_begins(record, world, monkeypatch):
    held = iter((3 << 30, 9 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(held))
    monkeypatch.setattr(recording, "device_of", lambda chunks: torch.device("cuda"))
    monkeypatch.setattr(recording, "count_layers", lambda chunks, stages: {0: 3})
    seen, pipeline = observed(), Pipeline(world, PROGRAM.placement, 0, [0], {}, opened_bytes=7)
    step = SimpleNamespace(
        pipeline=pipeline,
        program=PROGRAM,
        planned=PLAN,
        observation=seen,
        message=MessageFormat((2, 3), torch.bfloat16, 0),
        chunks=[],
        recorded_program=None,
        own_plan=None,
        overlaps=True,
        overlap=OverlapStatistics,
        counts_bytes=False,
        leaves_in_flight=False,
        offload_statistics=lambda: lambda: None,
        weight_bytes=lambda: seen.weights,
    )
    recorder = Recording(record)
    recorder.prepare(step)
    assert step.counts_bytes and step.times_actions
    recorder.after(step)
    assert (seen.allocated, seen.opened_bytes) == (3 << 30, 7)
    assert seen.bytes_of_message(Action(Kind.SEND_F, 0, 0)) == 12
    assert record.peaks.predicted_allocated_bytes == (3 << 30) + 4096 and record.is_whole


def test_sent_messages_add_to_the_predicted_peak():
    program, learnt = lower(build_schedule("1f1b", num_devices=4, num_microbatches=8)), ActionBytes()
    ledger, kept = ActivationLedger(), {}
    for action in program.actions[0]:
        if action.kind is Kind.F:
            kept[action.microbatch] = torch.empty(25)
            ledger.hold(kept[action.microbatch])
        elif action.kind is Kind.B:
            del kept[action.microbatch]
        ledger.record(action)
    learnt.learn(program, 0, ledger)
    peaks = learnt.predict(program, 0, ledger, lambda action: 7)
    assert (peaks.most_bytes, peaks.with_messages) == (400, 400 + 4 * 7)
    assert learnt.predict(program, 0, ledger).with_messages is None


def test_what_uneven_routing_may_hold_follows_what_the_run_has_shown(record):
    shown = []
    for routed in ((10, 30), (20, 20), (25, 90), (5, 40)):
        record.add_step(PLAN, PROGRAM, 0, observed(routed=routed))
        shown.append((record.peaks.predicted_least_peak_bytes, record.peaks.predicted_peak_bytes))
        assert shown[-1][0] <= record.peaks.counted_peak_bytes <= shown[-1][1]
    of = [4 * (1024 + tokens) for tokens in (10, 30, 90)]
    assert shown == [(of[0], of[1]), (of[0], of[1]), (of[0], of[2]), (of[0], of[2])]
    assert record.peaks.expert_load == 4.5


@pytest.mark.parametrize("fails", ["ledger", "trace"])
def test_a_step_that_cannot_be_measured_costs_numbers_and_nothing_else(record, caplog, fails):
    report = train(record, None, fails, None)
    assert report["losses"] == [3.0, 2.0, 1.0]
    assert "no measuring of steps: " in report["ranks"][0]["failure"]
    assert any("rank 0: no measuring of steps" in line for line in lines(report))
    warned = [
        record for record in caplog.records if record.levelno >= logging.WARNING and "the run goes on" in record.message
    ]
    assert len(warned) == 1


@pytest.mark.parametrize("loss", [torch.ones(2), "much", None, float("nan"), float("inf")], ids=repr)
def test_a_loss_that_is_no_number_is_null(record, loss):
    record.trace = None
    report = train(record, None, None, losses=(2.0, loss))
    assert report["losses"] == [2.0, None] and report["steps"] == 2


@pytest.mark.parametrize("what", ["report", "run.html"])
def test_what_cannot_be_written_at_the_end_is_warned_of_and_the_rest_is_written(record, caplog, what):
    lost = record.report if what == "report" else record.trace / what
    lost.mkdir(parents=True)
    record.add_step(PLAN, PROGRAM, 0, observed())
    record.write()
    assert any(str(lost) in record.message and "it is a folder" in record.message for record in caplog.records)
    assert record.report.is_file() == (what != "report")
    assert (record.trace / "run.html").is_file() == (what != "run.html") and (record.trace / "plan.png").is_file()


def test_a_folder_that_cannot_be_written_is_warned_of_once(record, caplog):
    record.report.parent.write_text("no folder")
    record.add_step(PLAN, PROGRAM, 0, observed())
    record.write()
    (warned,) = (record.getMessage() for record in caplog.records if "the run goes on" in record.getMessage())
    assert "without all of its files, which failed: OutputError: " in warned and str(record.report) in warned


def test_a_step_that_was_not_timed_as_planned_is_neither_drawn_nor_explained(record):
    schedule = ProgramStore(Request("1f1b")).plan(Shape(1, 1, 2), "another").schedule  # whose actions did not run
    record.add_step(Plan(schedule, PLAN.costs, "unit", "start"), PROGRAM, 0, observed())
    record.write()
    assert {path.name for path in record.trace.iterdir()} == {"plan.html", "plan.png", "plan.json"}
    assert json.loads(record.report.read_text())["last_step"] is None


def test_bytes_are_counted_until_two_steps_in_a_row_held_the_same(record):
    other = lower(PLAN.schedule)
    wanted = []
    for size in (512, 1024, 1024, 1024):
        wanted.append(record.counts(PROGRAM))
        step = observed(size=size)
        if not wanted[-1]:
            step.ledger = None
        record.add_step(PLAN, PROGRAM, 0, step)
    assert wanted == [True, True, True, False]
    assert record.counts(other) and not record.counts(PROGRAM)
    record.read()
    assert [step.peak_bytes for step in record.steps] == [2048, 4096, 4096, 4096]
    assert record.peaks.counted_peak_bytes == 4096


def test_a_run_without_a_step_has_a_report(record):
    assert train(record)["ranks"][0]["counted_peak_bytes"] is None


@pytest.mark.parametrize("output", ["report", "trace"])
def test_outputs_are_checked_before_anything_is_replaced(tmp_path, monkeypatch, output):
    (tmp_path / "file").write_text("")
    wrong = {output: str(tmp_path / "file" / "x")}
    with refused("cannot-write", kind=OutputError):
        plugin.enable("1f1b", **wrong)
    assert plugin._enabled is None
    monkeypatch.setenv("RANK", "1")  # rank 0 writes, perhaps where this rank cannot
    plugin.enable("1f1b", **wrong)
    plugin.disable()


def test_timelines_that_nothing_can_draw_are_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tools_by_flag, "find_spec", lambda name: None)
    with refused("not-installed", "--pipemem-trace", "matplotlib", kind=UnsupportedError):
        plugin.enable("1f1b", trace=str(tmp_path))
    assert plugin._enabled is None
    plugin.enable("1f1b", report=str(tmp_path / "report.json"))
    plugin.disable()


def test_all_ranks_hear_of_outputs_that_cannot_be_written(world, tmp_path):
    """When they compare their settings; a file that is lost later ends no run."""
    plugin.enable("1f1b", report=str(tmp_path))
    try:
        with refused("cannot-write", kind=OutputError):
            plugin._enabled.settings.join(SimpleNamespace(tp=world, cp=world, dp=world), world)
    finally:
        plugin.disable()


class Loop:
    """What Megatron's own training loop would have opened."""

    def __init__(self, monkeypatch, **arguments):
        self.written, self.logged = [], []
        self.tensorboard = SimpleNamespace(add_scalar=lambda *values: self.written.append(values), flush=lambda: None)
        self.wandb = SimpleNamespace(log=lambda *values: self.logged.append(values))
        module = SimpleNamespace(
            _GLOBAL_ARGS=SimpleNamespace(**arguments),
            get_tensorboard_writer=lambda: self.tensorboard,
            get_wandb_writer=lambda: self.wandb,
        )
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
        monkeypatch.setattr(recording.parallel_state, "get_pipeline_model_parallel_group", lambda: dist.group.WORLD)


def iterate(record: RunRecord, writer: Recording, steps: int) -> None:
    record.trace = None
    for iteration in range(1, steps + 1):
        record.add_step(PLAN, PROGRAM, 0, observed())
        writer.write_scalars(iteration)
    record.write()
    writer.write_scalars(None)


def test_scalars_go_where_megatron_writes_its_own(record, monkeypatch):
    loop = Loop(monkeypatch, tensorboard_dir="somewhere", tensorboard_log_interval=2)
    iterate(record, Recording(record), 5)
    peak = float(record.peaks.counted_peak_bytes)
    assert [(value, at) for name, value, at in loop.written if name.endswith("/peak-activation-bytes")] == [
        (peak, 2),
        (peak, 4),
    ]
    assert {name: value for name, value, at in loop.written if at == 2} == loop.logged[0][0]
    assert [at for _, at in loop.logged] == [2, 4]
    assert loop.logged[0][0]["pipemem/bubble-rate"] == 0 == loop.logged[0][0]["pipemem/planned-bubble-rate"]


def test_scalars_never_fail_a_run(record, monkeypatch, caplog):
    loop = Loop(monkeypatch, wandb_project="p")
    loop.tensorboard = None
    loop.wandb.log = None
    iterate(record, Recording(record), 3)
    assert len([record for record in caplog.records if "without scalars" in record.message]) == 1
    assert record.report.is_file()


def test_without_writers_nothing_is_gathered(record, monkeypatch):
    loop = Loop(monkeypatch, tensorboard_dir=None, wandb_project="")
    iterate(record, Recording(record), 2)
    assert not loop.written and not loop.logged


def test_prices_of_slices_are_told_per_stage():
    schedule = build_schedule("seq1f1b", num_devices=2, num_microbatches=2, slices=2)
    told = _costs(Plan(schedule, Costs((1, 2, 3, 4), 1.5, (0.5, 1), {(0, 1): 0.25, (1, 0): 0.25})))
    assert told["forward"] == [3, 7]
    assert (told["backward_input"], told["backward_weight"]) == ([1.5, 1.5], [0.5, 1])
    assert told["p2p"] == {"0-1": 0.25}
