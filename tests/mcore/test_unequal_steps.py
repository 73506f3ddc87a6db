"""One rank's view of steps with unequal microbatches: what is planned, dealt, refused and kept."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.errors import MemoryCapError, PipememError, UnsupportedError
from megatron_pipemem.features.unequal import megatron as unequal
from megatron_pipemem.features.unequal.megatron import UnequalMicrobatches, weigher_of
from megatron_pipemem.mcore.plugin import programs_for
from megatron_pipemem.mcore.step.extension import FullMicrobatch
from megatron_pipemem.request import Request
from megatron_pipemem.schedule.action import Kind
from megatron_pipemem.schedule.prices import MicrobatchFactors

WEIGHTS = (1.0, 4.0, 0.5, 2.0, 3.0, 0.25)


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ALONE = Alone()


class Run:
    """A pipeline of which this is rank 0. Whatever is read from its iterators is its own weight."""

    def __init__(self, schedule: str, **settings):
        self.programs = programs_for(Request(schedule, **settings))
        self.extension = UnequalMicrobatches(self.programs, weigher_of(float))

    def step(self, *iterators, chunks: int = 1, m: int = len(WEIGHTS)) -> SimpleNamespace:
        shape = Shape(4, chunks, m)
        placement = self.programs.placement(4, chunks)
        return SimpleNamespace(
            shape=shape,
            program_store=self.programs,
            groups=SimpleNamespace(tp=ALONE, cp=ALONE, dp=ALONE),
            pipeline=SimpleNamespace(group=ALONE, device=0, stages=placement.stages[0], placement=placement),
            iterators=list(iterators),
            chunks=[torch.nn.Module()] * chunks,
            context=SimpleNamespace(order=None, config=SimpleNamespace(expert_model_parallel_size=1)),
            full_microbatch=FullMicrobatch(1, 8),
            single_queue=False,
        )

    def begin(self, step: SimpleNamespace) -> list[list[float]]:
        """What every chunk's iterator yields."""
        step.program, step.plan, *_ = self.extension.choose(step)
        self.extension.prepare(step)
        return [[next(iterator) for _ in range(step.shape.num_microbatches)] for iterator in step.iterators]


def _agree(digest: str, group: object = None) -> None:
    """There is nobody else."""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(unequal, "agree", _agree)
    monkeypatch.setattr(unequal, "LEAST_SECONDS", 0.2)  # whatever else the machine does
    monkeypatch.setattr(unequal, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("v-half", 2), ("chimera", 2)])
def test_every_chunk_reads_the_batches_in_the_order_of_its_forwards(schedule, chunks):
    run = Run(schedule)
    known = 1 if schedule == "chimera" else chunks
    step = run.step(*(iter(WEIGHTS) for _ in range(known)), chunks=chunks)
    read = run.begin(step)
    order = step.context.order
    assert sorted(order) == list(range(len(WEIGHTS))) and (order != tuple(sorted(order)) or schedule == "v-half")
    if known < chunks:  # the replicas share the positions of one stream
        assert read == [[WEIGHTS[microbatch] for microbatch in order]]
    else:
        for stage, batches in zip(step.pipeline.stages, read, strict=True):
            actions = (a for a in step.program.schedule.orders[0] if a.kind is Kind.F and a.stage == stage)
            assert batches == [WEIGHTS[order[action.microbatch]] for action in actions]
    plan = step.own_plan
    assert plan.costs.microbatch.time == tuple(WEIGHTS[microbatch] for microbatch in order)
    assert plan.timeline.makespan < plan.arrival_makespan and plan.bound <= plan.timeline.makespan
    assert step.plan.costs.microbatch is None, "the plan of the run is of equal microbatches"


def test_equal_microbatches_run_the_program_that_they_would_run_anyway():
    run = Run("1f1b")
    step = run.step(iter([2.0] * 6))
    assert run.begin(step) == [[2.0] * 6]
    assert step.context.order is None
    assert step.program is run.programs.get(step.shape, _agree, ALONE).program


def test_programs_of_steps_are_kept_for_a_while():
    run = Run("1f1b")
    first, again = run.step(iter(WEIGHTS)), run.step(iter(WEIGHTS))
    run.begin(first), run.begin(again)
    assert first.program is again.program
    base = run.programs.get(first.shape, _agree, ALONE)
    for m in range(1, 20):
        shape = Shape(4, 1, m)
        other = run.programs.get(shape, _agree, ALONE).program.schedule
        run.programs.step_program(replace(other, name="another"), base, run.programs.costs, False)
    assert len(run.programs._of_steps) == 16 and first.program not in run.programs._of_steps.values()


@pytest.mark.parametrize("broken", ["plan_step", "lowering"])
def test_a_planner_that_fails_leaves_the_step_in_arrival_order_and_says_so_once(monkeypatch, caplog, broken):
    run = Run("1f1b")

    def fail(*_):
        raise ZeroDivisionError("no time")

    if broken == "plan_step":
        monkeypatch.setattr(unequal, "plan_step", fail)
    else:
        run.programs.step_program = fail
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            step = run.step(iter(WEIGHTS))
            assert run.begin(step) == [list(WEIGHTS)]
    (told,) = (record.getMessage() for record in caplog.records)
    assert told == ("could not plan for unequal microbatches (ZeroDivisionError: no time); they run in arrival order")


def test_what_no_order_can_keep_is_refused_under_a_cap():
    run = Run("1f1b", memory_cap=1.0)
    for heavy in (lambda batch: (batch, 100 * batch)), (lambda batch: (1.0, 100.0)):
        run.extension = UnequalMicrobatches(run.programs, weigher_of(heavy))
        with refused("cap-unreachable"):
            run.begin(run.step(iter(WEIGHTS)))
    assert issubclass(MemoryCapError, PipememError)


def test_a_step_that_is_refused_loses_no_batch():
    run = Run("1f1b")
    stream = iter([*WEIGHTS[:2], float("nan"), *WEIGHTS[3:], 7.0])
    with refused("bad-type", 2):
        run.begin(run.step(stream))
    run.extension._weigh = weigher_of(lambda batch: 1.0)
    (read,) = run.begin(run.step(stream))
    assert [*read[:2], *read[3:]] == [*WEIGHTS[:2], *WEIGHTS[3:]] and next(stream) == 7.0


def test_an_iterator_that_cannot_be_dealt_or_ends_early_is_refused():
    run = Run("1f1b")
    with refused("data-iterator", kind=UnsupportedError):
        run.begin(run.step(list(WEIGHTS)))
    with refused("data-iterator", 2, 6, kind=UnsupportedError):
        run.begin(run.step(iter(WEIGHTS[:2])))
    with refused("data-iterator", kind=UnsupportedError):
        run.begin(run.step(None))


def test_weights_travel_whole():
    rows = (1.0, 2.0), (0.5, 1.0)
    for weights in (
        MicrobatchFactors(rows[0]),
        MicrobatchFactors(rows[0], rows[1]),
        MicrobatchFactors(rows[0], None, {Kind.W: rows[1], Kind.RS: rows[0]}),
        MicrobatchFactors(rows[0], None, {Kind.OFFLOAD: rows[1], Kind.LOSS: rows[0]}),
    ):
        assert unequal._unpacked(unequal._packed(weights), 2) == weights


def test_measured_costs_are_those_of_the_median_microbatch():
    weights = MicrobatchFactors((1.0, 2.0, 4.0), (1.0, 1.0, 2.0), {Kind.W: (1.0, 2.0, 2.0)})
    ratios = unequal._relative_to_median(weights)
    assert ratios == MicrobatchFactors((0.5, 1.0, 2.0), (1.0, 1.0, 2.0), {Kind.W: (0.5, 1.0, 1.0)})
    assert unequal._relative_to_median(MicrobatchFactors((0.0, 0.0, 1.0))).time == (0.0, 0.0, 1.0)


def test_pipelines_that_sum_gradients_with_each_other_end_their_stages_in_one_order():
    """A plan that ends them otherwise keeps its order of microbatches, in the schedule that all have."""
    run = Run("zbv")
    step = run.step(iter(WEIGHTS), iter(WEIGHTS), chunks=2)
    base = run.programs.get(step.shape, _agree, ALONE).plan
    weights = MicrobatchFactors(WEIGHTS)
    costs = replace(base.costs, microbatch=weights)
    step_plan = run.extension._planned(base.schedule, costs, weights, has_peers=True)
    assert unequal._ends_of_stages(step_plan.schedule) == unequal._ends_of_stages(base.schedule)
    assert step_plan.makespan <= step_plan.arrival_makespan
