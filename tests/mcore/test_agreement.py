"""What ranks agree on arrives on every rank: 2 x 3 ranks in threads, two hops. One rank of a pipeline proves its programs."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_pipemem.choose.knowledge import Shape
from megatron_pipemem.errors import CostsError, PipememError, ScheduleError, UnsupportedError
from megatron_pipemem.mcore import agreement
from megatron_pipemem.mcore import programs as run_programs
from megatron_pipemem.mcore.programs import ProgramStore, digest_of
from megatron_pipemem.request import Request
from megatron_pipemem.runtime.executor import rank_program
from megatron_pipemem.schedule.lowering import lower, rows_of_rank

TP, PP = 2, 3


@dataclass
class _Line:
    """Ranks of one group, in threads, which exchange one object each at a time."""

    members: list[int]
    barrier: threading.Barrier = field(init=False)
    mail: dict[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(len(self.members))

    def exchange(self, rank: int, contribution: object) -> list:
        self.mail[rank] = contribution
        self.barrier.wait(10)
        seen = [self.mail[member] for member in self.members]
        self.barrier.wait(10)
        return seen


@dataclass(eq=False)
class _Group:
    """A line as one of its ranks sees it."""

    line: _Line
    world_rank: int

    def size(self) -> int:
        return len(self.line.members)

    def rank(self) -> int:
        return self.line.members.index(self.world_rank)

    def exchange(self, contribution: object) -> list:
        return self.line.exchange(self.world_rank, contribution)


@pytest.fixture
def on_all_ranks(monkeypatch):
    """``on_all_ranks(act)``: what ``act(rank, groups)`` returned or raised on every rank. World rank is ``pp * TP + tp``."""

    def reduce(tensor, op, group):
        tensor.copy_(torch.stack([passes.clone() for passes in group.exchange(tensor.clone())]).max(0).values)

    def gather(gathered, told, group):
        gathered[:] = group.exchange(told)

    def broadcast(payload, src, group):
        payload[:] = group.exchange(list(payload))[group.line.members.index(src)]

    monkeypatch.setattr(agreement.dist, "all_reduce", reduce)
    monkeypatch.setattr(agreement.dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(agreement.dist, "get_global_rank", lambda group, rank: group.line.members[rank])
    monkeypatch.setattr(agreement.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: int(threading.current_thread().name))
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda group: group.size())
    monkeypatch.setattr(agreement.dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")

    def run(act) -> list:
        tensor = [_Line([pp * TP + tp for tp in range(TP)]) for pp in range(PP)]
        pipeline = [_Line([pp * TP + tp for pp in range(PP)]) for tp in range(TP)]

        results: list = [None] * (TP * PP)

        def on(rank: int) -> None:
            groups = [_Group(tensor[rank // TP], rank), _Group(pipeline[rank % TP], rank)]
            try:
                results[rank] = act(rank, groups)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=on, args=(rank,), name=f"{rank}") for rank in range(TP * PP)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    return run


FIRST, LAST = 0, TP * (PP - 1)


def _agreed(told):
    return lambda rank, groups: agreement.agreed_numbers("weights", lambda: told(rank), 2, groups)


def test_those_who_read_tell_all_others(on_all_ranks):
    """To the bit, negative and large numbers included."""
    numbers = (-1.0, 0.1 + 0.2)
    assert on_all_ranks(_agreed(lambda rank: numbers if rank in (FIRST, LAST) else None)) == [numbers] * (TP * PP)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (lambda rank: None, "no rank of this pipeline reads data"),
        (lambda rank: (1.0, float(rank)) if rank in (FIRST, LAST) else None, "number 1 is 0 on one and 4 on another"),
        (lambda rank: (1.0,) if rank == LAST else None, "this rank has 1 weights"),
    ],
)
def test_what_is_wrong_is_told_on_every_rank(on_all_ranks, told, words):
    outcomes = on_all_ranks(_agreed(told))
    assert all(isinstance(outcome, UnsupportedError) and words in str(outcome) for outcome in outcomes), outcomes


def test_a_rank_that_fails_says_why_everywhere(on_all_ranks):
    def fail(rank):
        if rank == LAST:
            raise CostsError("bad-number", "time[3] is negative")

    outcomes = on_all_ranks(_agreed(fail))
    assert all("time[3] is negative" in str(outcome) for outcome in outcomes)
    assert [isinstance(outcome, CostsError) for outcome in outcomes] == [rank == LAST for rank in range(TP * PP)]


def test_the_first_rank_decides(on_all_ranks):
    def refuse(rank):
        raise CostsError("no-time", f"no by {rank}")

    def decided(decide):
        return on_all_ranks(lambda rank, groups: agreement.decide_on_first_rank(lambda: decide(rank), groups))

    assert decided(lambda rank: f"by {rank}") == ["by 0"] * (TP * PP)
    assert {(type(decision), str(decision)) for decision in decided(refuse)} == {(CostsError, "no by 0")}


def test_a_crash_of_the_first_rank_leaves_nobody_waiting(on_all_ranks):
    def crash():
        raise ZeroDivisionError("oops")

    first, *others = on_all_ranks(lambda rank, groups: agreement.decide_on_first_rank(crash, groups))
    assert isinstance(first, ZeroDivisionError)
    assert {other.code for other in others} == {"other-rank-failed"} and all("oops" in str(other) for other in others)


def test_a_lone_process_decides_for_itself():
    assert agreement.decide_on_first_rank(lambda: 7) == 7
    assert agreement.gather("mine") == ["mine"]


def test_contributions_of_all_ranks_arrive_in_one_order(on_all_ranks):
    assert on_all_ranks(agreement.gather) == [[*range(TP * PP)]] * (TP * PP)


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (ZeroDivisionError(), "other-rank-failed", "rank 3 failed: ZeroDivisionError"),
        (CostsError("no-time", "no time"), "no-time", "no time"),
    ],
)
def test_a_failure_of_one_rank_is_an_error_on_all(on_all_ranks, failure, code, words):
    def act(rank):
        if rank == 3:
            raise failure
        return rank

    outcomes = on_all_ranks(lambda rank, groups: agreement.run_on_all_ranks(lambda: act(rank), groups))
    assert outcomes.pop(3) is failure
    assert {(type(outcome), outcome.code, str(outcome)) for outcome in outcomes} == {(UnsupportedError, code, words)}
    assert on_all_ranks(lambda rank, groups: agreement.run_on_all_ranks(lambda: rank, groups)) == [*range(TP * PP)]


def test_a_lone_process_needs_nobody():
    assert agreement.run_on_all_ranks(lambda: 7) == 7


def test_groups_of_a_model_reach_its_copies():
    tp, cp, pp, dp, dp_cp = (SimpleNamespace(size=lambda: 2) for _ in range(5))
    groups = SimpleNamespace(tp=tp, cp=SimpleNamespace(size=lambda: 1), dp=dp, dp_cp=dp_cp)
    assert agreement.groups_of_model(groups, pp) == [tp, pp, dp]
    assert agreement.groups_of_model(SimpleNamespace(tp=None, cp=cp, dp=None, dp_cp=dp_cp), pp) == [cp, pp, dp_cp]


def _own_rank() -> int:
    return int(threading.current_thread().name)


def _compiled(rank: int, groups: list[_Group], queues: tuple[bool, ...] = (False,), again: bool = False):
    """Return the program of a rank's steps, and as ``again`` the one after a new plan."""
    programs = ProgramStore(Request("1f1b"))
    programs.join(groups)
    programs.queues = queues
    call = Shape(PP, 1, 9), partial(agreement.agree, group=groups[1]), groups[1]
    compiled = programs.get(*call)
    if again:
        programs.renew(run_programs.MeasurementUpdate("costs measured", None, None, 0.0))
        return programs.get(*call)
    return compiled


@pytest.mark.parametrize("again", [False, True])
def test_one_rank_of_a_pipeline_proves_and_every_rank_lowers_what_it_reads(on_all_ranks, monkeypatch, again) -> None:
    proved, prove = [], run_programs.validate_program

    def counted(program, **queue):
        proved.append(_own_rank())
        prove(program, **queue)

    monkeypatch.setattr(run_programs, "validate_program", counted)
    results = on_all_ranks(partial(_compiled, again=again))
    assert Counter(proved) == {0: 1 + again, 1: 1 + again}
    expected = lower(results[0].program.schedule)
    for rank, compiled in enumerate(results):
        device = rank // TP
        assert compiled.digest == digest_of(expected)
        assert rank_program(compiled.program, device) == rank_program(expected, device)
        lowered = set(compiled.program.actions._lowered)
        assert lowered == (set(range(PP)) if device == 0 else set(rows_of_rank(expected.placement, device)))
        assert tuple(compiled.program.actions) == tuple(expected.actions)


def test_a_rank_that_cannot_plan_again_keeps_all_from_it(on_all_ranks, monkeypatch) -> None:
    def failing(self, shape, why, *before):
        if before and _own_rank() == 3:
            raise ZeroDivisionError
        return plan(self, shape, why, *before)

    plan = ProgramStore.plan
    monkeypatch.setattr(ProgramStore, "plan", failing)
    digests = {compiled.digest for compiled in on_all_ranks(partial(_compiled, again=True))}
    assert len(digests) == 1


def test_a_proof_that_fails_on_one_rank_ends_all(on_all_ranks, monkeypatch) -> None:
    def refuse(program, **queue):
        assert _own_rank() in (0, 1)
        raise ScheduleError("queue-order", "hangs", at=(1, 0, program.actions[1][0]))

    monkeypatch.setattr(run_programs, "validate_program", refuse)
    results = on_all_ranks(_compiled)
    assert all(isinstance(error, PipememError) for error in results)
    assert {error.code for error in results} == {"queue-order"}


@pytest.mark.parametrize("queues", [(False,), (True,), (False, True)])
def test_a_rank_with_another_program_than_the_proved_one_ends_its_pipeline(on_all_ranks, monkeypatch, queues) -> None:
    """World rank 3 is device 1 of the second pipeline."""

    def other(schedule, **how):
        program = lower(schedule, **how)
        if _own_rank() != 3:
            return program
        rows = [*program.actions]
        rows[1] = (*rows[1][:-2], *reversed(rows[1][-2:]))
        return replace(program, actions=tuple(rows))

    monkeypatch.setattr(run_programs, "lower", other)
    results = on_all_ranks(partial(_compiled, queues=queues))
    for rank, result in enumerate(results):
        assert (getattr(result, "code", None) == "ranks-differ") is (rank % TP == 1)


def test_all_ranks_take_the_order_for_one_queue_where_the_usual_one_is_not_proved(on_all_ranks, monkeypatch) -> None:
    monkeypatch.setattr(run_programs, "starts_in_order", lambda environment: True)
    both = partial(_compiled, queues=(False, True))
    expected = lower(on_all_ranks(both)[0].program.schedule, single_queue=True)

    def refuse(program, ordered_starts=False, **queue):
        if ordered_starts:
            raise ScheduleError("queue-order", "hangs")

    monkeypatch.setattr(run_programs, "validate_program", refuse)
    for compiled in on_all_ranks(both):
        assert compiled.program is compiled.in_one_queue and compiled.program.actions == expected.actions
