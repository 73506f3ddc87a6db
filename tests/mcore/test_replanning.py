"""When a run is planned anew, decided on one rank: with one rank there is nobody to disagree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from asked_programs import programs_of
from refusals import refused

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.errors import UnsupportedError
from megatron_pipemem.mcore import replanning
from megatron_pipemem.mcore.programs import MeasurementUpdate, ProgramStore
from megatron_pipemem.mcore.replanning import FIRST_STEPS, WINDOW, Replanner, merge_bytes
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.activation_ledger import LedgerEntry
from megatron_pipemem.runtime.trace import TracedAction
from megatron_pipemem.schedule.action import Action, Kind
from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.schedule.placement import Placement
from megatron_pipemem.schedule.units import WHOLE

ALONE = Shape(1, 1, 2)


class Trace:
    """One microbatch on the only stage."""

    def __init__(self, forward=1.0, backward=2.0):
        self._actions = [
            TracedAction(Action(Kind.F, 0, 0), 0.0, forward),
            TracedAction(Action(Kind.I, 0, 0), forward, forward + backward),
            TracedAction(Action(Kind.W, 0, 0), 10.0, 10.0 + backward),
        ]

    def actions(self):
        return self._actions


class Ledger:
    failure = None
    entries = [LedgerEntry(Action(kind, 0, 0), held) for kind, held in ((Kind.F, 100), (Kind.I, 70), (Kind.W, 0))]


def wishes(run: Run) -> tuple[bool, bool]:
    """Whether bytes are to be counted and actions to be timed in the coming step."""
    step = SimpleNamespace(counts_bytes=False, times_actions=False)
    run.replanner.prepare(step)
    return step.counts_bytes, step.times_actions


def stepped(ledger, trace):
    pipeline = SimpleNamespace(placement=Placement.linear(1))
    observation = SimpleNamespace(ledger=ledger, trace=trace)
    program = SimpleNamespace(schedule=SimpleNamespace(units=WHOLE, pairs=frozenset()))
    return SimpleNamespace(pipeline=pipeline, message=None, observation=observation, program=program)


class Run:
    """Steps of one rank, as ``ForwardBackward`` makes them."""

    def __init__(self, programs, profile=True):
        self.programs, self.links_measured = programs, 0
        self.replanner = Replanner(programs, profile)

    def step(self, trace=None):
        news = self.replanner.before_step(ALONE, 0, self._links)
        if news is not None:
            self.programs.renew(news)
        plan = self.programs.get(ALONE, lambda digest: None).plan
        ledger = Ledger() if self.programs.needs_bytes else None
        self.replanner.after(stepped(ledger, trace or Trace()))
        return news, plan

    def _links(self):
        self.links_measured += 1
        return {}


def steps_until_news(run, trace=None, limit=3 * WINDOW):
    for step in range(limit):
        news, plan = run.step(trace)
        if news is not None:
            return step, news, plan
    return None


def test_costs_are_measured_after_a_warm_up_and_read_one_step_late():
    run = Run(ProgramStore(Request("zb-h1")))
    news, plan = run.step(Trace(forward=50.0))
    assert news is None and plan.priced_by == "unit" and plan.why == "start"
    step, news, plan = steps_until_news(run)
    assert step == FIRST_STEPS + 1 and news.reason == "costs measured" and news.minimum_gain == 0
    assert (plan.costs.forward, plan.costs.backward_input, plan.costs.backward_weight) == ((1.0,), (2.0,), (2.0,))
    assert plan.priced_by == "measured" and plan.why == "costs measured"
    assert run.links_measured == 1


def test_steady_costs_change_nothing_and_drift_is_noticed_once():
    run = Run(ProgramStore(Request("zb-h1")))
    steps_until_news(run)
    assert steps_until_news(run) is None
    step, news, plan = steps_until_news(run, Trace(forward=1.5))
    assert step <= 2 * WINDOW and "F of stage 0" in news.reason and news.minimum_gain == 0.01
    assert plan.costs.forward == (1.5,)
    assert steps_until_news(run, Trace(forward=1.5)) is None
    assert run.links_measured == 1


def test_without_profile_only_bytes_are_counted_and_only_once():
    run = Run(programs_of("auto", "150B", "unit", {"seconds": 1, "placement": "linear"}), profile=False)
    _, first = run.step()
    assert wishes(run) == (True, False)
    news, plan = run.step()
    assert news.reason == "bytes counted" and news.costs is None
    assert news.changes == {Kind.F: (100,), Kind.I: (-30,), Kind.W: (-70,)}
    assert plan.timeline.peak <= 150 and plan.priced_by == "unit"
    assert wishes(run) == (False, False)
    assert steps_until_news(run) is None


def test_bytes_and_seconds_come_one_after_the_other():
    run = Run(programs_of("auto", "150B", "profile", {"seconds": 1, "placement": "linear"}))
    run.step()
    assert run.step()[0].reason == "bytes counted"
    _, news, plan = steps_until_news(run)
    assert news.reason == "costs measured" and plan.costs.forward == (1.0,)
    assert plan.timeline.peak <= 150, "counted bytes are kept"


def test_every_number_of_microbatches_is_planned_anew_when_it_comes():
    programs = ProgramStore(Request("zb-h1"))

    def plan(m):
        return programs.get(Shape(2, 1, m), lambda digest: None).plan

    first = [plan(4), plan(6)]
    assert [p.why for p in first] == ["start", "step of 6 microbatches"]
    assert plan(4) is first[0]
    programs.renew(MeasurementUpdate("costs measured", Costs(3.0), None, 0.0))
    assert [(p.why, p.costs.forward) for p in (plan(6), plan(4))] == [("costs measured", 3.0)] * 2
    assert plan(8).why == "step of 8 microbatches"


def test_bytes_of_replicas_that_differ_are_those_of_the_fullest():
    def seen(device, *changes):
        zeros = [0] * 4
        for stage, value in zip(Placement.v_shape(2).stages[device], changes, strict=True):
            zeros[stage] = value
        return replanning._RankMeasurements(device, {Kind.F: tuple(zeros), Kind.W: tuple(-z for z in zeros)}, {}, {})

    merged = merge_bytes([seen(0, 5, 6), seen(1, 9, 2), seen(0, 7, 1), seen(1, 3, 4)], Placement.v_shape(2))
    assert merged == {Kind.F: (7, 9, 4, 6), Kind.W: (-7, -9, -4, -6)}


class Broken(Trace):
    def actions(self):
        raise RuntimeError("the clock is gone")


def test_a_rank_that_cannot_measure_keeps_the_plan_of_all(caplog):
    run = Run(ProgramStore(Request("zb-h1")))
    _, first = run.step()
    assert steps_until_news(run, Broken()) is None
    assert sum("its plan stays" in record.message for record in caplog.records) >= 1
    assert run.step()[1] is first
    step, news, _ = steps_until_news(run)
    assert news.reason == "costs measured", "what can be measured again is"


def test_what_another_rank_could_not_measure_is_not_planned_with(monkeypatch):
    """Every rank gathers, also the one that has nothing to tell, and all decide alike."""
    gathered = []

    def gather(own, groups):
        gathered.append(own)
        return [own, replanning._RankMeasurements(1, None, {}, {}, failure="RuntimeError: the clock is gone")]

    monkeypatch.setattr(replanning, "gather", gather)
    run = Run(ProgramStore(Request("zb-h1")))
    assert steps_until_news(run) is None and gathered


def test_bytes_that_cannot_be_counted_leave_the_first_plan():
    class Uncountable(Ledger):
        failure = "NotImplementedError: no storage"
        entries = []

    run = Run(programs_of("auto", "150B", "unit", {"seconds": 1, "placement": "linear"}), profile=False)
    _, first = run.step()
    run.replanner.after(stepped(Uncountable(), None))
    assert run.step() == (None, first)


@pytest.mark.parametrize(
    "failure", [ZeroDivisionError("oops"), UnsupportedError("cap-unreachable", "nothing was found"), None]
)
def test_a_search_that_fails_in_the_middle_of_a_run_keeps_its_plan(monkeypatch, caplog, failure):
    run = Run(ProgramStore(Request("zb-h1")))
    _, first = run.step()

    def plan(*arguments):
        if failure is None:
            return None
        raise failure

    monkeypatch.setattr(run.programs, "plan", plan)
    _, news, plan = steps_until_news(run)
    assert news.reason == "costs measured" and plan is first
    assert "could not plan again (costs measured)" in caplog.text and "the schedule stays" in caplog.text


def test_a_cap_that_the_counted_bytes_break_is_still_refused():
    run = Run(programs_of("auto", "50B", "unit", {"seconds": 1, "placement": "linear"}), profile=False)
    run.step()
    with refused("cap-unreachable", "50B", kind=UnsupportedError):
        run.step()
