"""Read what torch.profiler recorded of the pipeline ranks of stock Megatron: when every forward and backward ran.

Megatron marks them in no way that torch.profiler records, unless call stacks are collected
(``--pytorch-profiler-collect-callstack``), which name ``forward_step`` and ``backward_step``. Without stacks, what a rank
computes between two messages is a forward, or a backward where autograd's engine runs it. Stages follow from the order of
the passes, which is that of Megatron's 1F1B or interleaved 1F1B. Where kernels ran on a GPU, their times count and not those
of their launches.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_pipemem.errors import ConfigError, PipememError
from megatron_pipemem.planner.replay import family_schedule
from megatron_pipemem.reading import read_json
from megatron_pipemem.schedule.core.action import Kind
from megatron_pipemem.schedule.core.schedule import Schedule
from megatron_pipemem.schedule.measured import MeasuredStep

_STEP = "ProfilerStep#"
_STACK = re.compile(r"pipeline_parallel/schedules\.py\(\d+\): (forward_step|backward_step)$")
_MESSAGE = re.compile(r"(c10d::|gloo:|nccl:)(batch_isend_irecv|coalesced|send|recv)")
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"
_PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
_STRAY = 10
"""Times as long as a stray operation is a forward or a backward."""
_MOST_CHUNKS, _MOST_STEPS = 16, 16


class Pass(NamedTuple):
    """A forward or a backward of a rank, in nanoseconds of its clock."""

    kind: Kind
    start: int
    end: int


class _Event(NamedTuple):
    name: str
    category: str
    thread: Any
    start: int
    end: int
    correlation: Any


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded.

    Args:
        path: of the file.
        rank: of the world.
        pipeline: the ranks of its pipeline, in order; ``None`` where the file does not say.
        passes: of its last whole step that was recorded.
    """

    path: Path
    rank: int
    pipeline: tuple[int, ...] | None
    passes: tuple[Pass, ...]


def read_rank(path: Path, number: int) -> RankTrace:
    """Read the file of one rank.

    Args:
        path: Chrome trace as ``torch.profiler`` exports it, plain or compressed (``.gz``).
        number: rank, where the file does not say.

    Raises:
        ConfigError: it cannot be read, or holds no forwards and backwards.
    """
    trace = _read(path)
    try:
        told = trace.get("distributedInfo") or {}
        rank = int(told.get("rank", number))
        groups = (each for each in told.get("pg_config") or () if isinstance(each, Mapping))
        pipeline = next(
            (tuple(map(int, each["ranks"])) for each in groups if str(each.get("pg_desc")) == _PIPELINE), None
        )
        base = int(trace.get("baseTimeNanoseconds") or 0)
        events = sorted(_events(trace["traceEvents"], base), key=lambda event: (event.start, -event.end))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            "wrong-file", f"is no trace of torch.profiler ({error}); record it anew", file=path
        ) from error
    is_first = rank == pipeline[0] if pipeline else number == 0
    passes = _on_device(_passes(_of_last_step(events), is_first), events)
    if not passes:
        raise ConfigError(
            "wrong-file",
            "holds no forwards and backwards between messages of a pipeline; record a training step of every rank, with CPU "
            "activities",
            file=path,
        )
    return RankTrace(path, rank, pipeline, tuple(passes))


def measured_step(traces: Sequence[RankTrace]) -> MeasuredStep:
    """Return the step that the ranks of a pipeline recorded. Of several pipelines, it is that of the first rank.

    Args:
        traces: of all ranks of a pipeline, at least.

    Raises:
        ConfigError: a rank is missing, or the passes come in no order of Megatron's schedules.
    """
    by_rank = {trace.rank: trace for trace in traces}
    if len(by_rank) < len(traces):
        raise ConfigError(
            "wrong-file", "two of the traces are of one rank; give one file per rank", file=traces[0].path
        )
    members = by_rank[min(by_rank)].pipeline or tuple(sorted(by_rank))
    if missing := [rank for rank in members if rank not in by_rank]:
        raise ConfigError(
            "wrong-file",
            f"is of a pipeline of ranks {', '.join(map(str, members))}, and rank {missing[0]} has no trace here; record all",
            file=traces[0].path,
        )
    pipeline = [by_rank[rank] for rank in members]
    schedule, steps = _schedule_of(pipeline)
    last = [trace.passes[-(len(trace.passes) // steps) :] for trace in pipeline]
    return MeasuredStep(schedule, _aligned(schedule, last))


def _read(path: Path) -> Any:
    if path.suffix != ".gz":
        return read_json(path, "a trace")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(
            "cannot-read", f"cannot be read as a compressed trace: {error}; record it again", file=path
        ) from error


def _events(events: Iterable[Mapping[str, Any]], base: int) -> Iterator[_Event]:
    for each in events:
        if each.get("ph") == "X" and "dur" in each:
            start = base + round(float(each["ts"]) * 1000)
            arguments = each.get("args") or {}
            end = start + round(float(each["dur"]) * 1000)
            yield _Event(
                str(each.get("name")), str(each.get("cat")), each.get("tid"), start, end, arguments.get("correlation")
            )


def _of_last_step(events: list[_Event]) -> list[_Event]:
    """Return the events of the last step that the profiler told of; all events where it told of none."""
    steps = [event for event in events if event.name.startswith(_STEP) and event.category == "user_annotation"]
    if not steps:
        return events
    last = steps[-1]
    return [event for event in events if last.start <= event.start < last.end]


def _passes(events: list[_Event], is_first: bool) -> list[Pass]:
    stacks = [(match[1], event) for event in events if (match := _STACK.search(event.name))]
    if stacks:
        kinds = {"forward_step": Kind.F, "backward_step": Kind.B}
        return [Pass(kinds[name], event.start, event.end) for name, event in stacks]
    return _between_messages(events, is_first)


def _between_messages(events: list[_Event], is_first: bool) -> list[Pass]:
    """Return what a rank computed between two messages, forwards and backwards apart.

    Args:
        events: of a step.
        is_first: whether the rank begins without waiting for a message; what others do before their first one is no pass.
    """
    messages = [event for event in events if _MESSAGE.match(event.name)]
    if not messages:
        return []
    thread, until = messages[0].thread, 0 if is_first else messages[0].start
    found: list[Pass] = []
    is_open = False
    for event in events:
        if event.category not in ("cpu_op", "user_annotation") or event.start < until:
            continue
        is_backward = event.name.startswith(_BACKWARD)  # on a GPU in a thread of autograd's own
        if _MESSAGE.match(event.name) or event.name.startswith(_OPTIMIZER):
            is_open, until = False, event.end
        elif event.category == "cpu_op" and (is_backward or event.thread == thread):
            kind = Kind.B if is_backward else Kind.F
            if is_open and found[-1].kind is kind:
                found[-1] = found[-1]._replace(end=event.end)
            else:
                found.append(Pass(kind, event.start, event.end))
            is_open, until = True, event.end
    return _without_strays(found)


def _without_strays(found: list[Pass]) -> list[Pass]:
    """Return the passes without what comes behind the last backward, and without what is much shorter than others of its kind:
    single operations beside the messages.
    """
    last = max((at for at, each in enumerate(found) if each.kind is Kind.B), default=-1)
    found = found[: last + 1]
    typical = {kind: _typical([each for each in found if each.kind is kind]) for kind in (Kind.F, Kind.B)}
    return [each for each in found if (each.end - each.start) * _STRAY > typical[each.kind]]


def _typical(passes: Sequence[Pass]) -> float:
    """Return the median length of the longer half of some passes: strays are short, and may be many."""
    lengths = sorted((each.end - each.start for each in passes), reverse=True)
    return median(lengths[: -(-len(lengths) // 2)]) if lengths else 0.0


def _on_device(passes: list[Pass], events: list[_Event]) -> list[Pass]:
    """Return the passes with the times of their kernels, where there are any."""
    kernels = {
        event.correlation: event for event in events if event.category == "kernel" and "nccl" not in event.name.lower()
    }
    if not kernels:
        return passes
    launches = [
        event for event in events if event.category in ("cuda_runtime", "cuda_driver") and event.correlation in kernels
    ]
    starts, found, free = [event.start for event in launches], [], 0
    for each in passes:
        own = launches[bisect_left(starts, each.start) : bisect_left(starts, each.end)]
        ran = [kernels[event.correlation] for event in own]
        start = max(free, min((kernel.start for kernel in ran), default=each.start))
        free = max(start, *(kernel.end for kernel in ran)) if ran else max(start, each.end)
        found.append(Pass(each.kind, start, free))
    return found


def _schedule_of(pipeline: Sequence[RankTrace]) -> tuple[Schedule, int]:
    """Return Megatron's schedule that has these passes, and how many steps of it there are."""
    p = len(pipeline)
    forwards = sum(each.kind is Kind.F for each in pipeline[0].passes)
    kinds = [[each.kind for each in trace.passes] for trace in pipeline]
    for chunks in range(1, _MOST_CHUNKS + 1):
        for steps in range(1, _MOST_STEPS + 1):
            if forwards % (chunks * steps) or p < 2:
                continue
            name, options = ("1f1b", None) if chunks == 1 else ("interleaved", chunks)
            try:
                schedule = family_schedule(name, p, forwards // (chunks * steps), options)
            except PipememError:
                continue
            if kinds == [[action.kind for action in order] * steps for order in schedule.orders]:
                return schedule, steps
    counts = ", ".join(
        f"rank {trace.rank} {sum(k is Kind.F for k in own)} and {sum(k is Kind.B for k in own)}"
        for trace, own in zip(pipeline, kinds, strict=True)
    )
    raise ConfigError(
        "wrong-file",
        f"forwards and backwards ({counts}) come in no order of Megatron's 1F1B or interleaved 1F1B on {p} pipeline ranks; "
        "record whole steps of every pipeline rank, with --pytorch-profiler-collect-callstack",
        file=pipeline[0].path,
    )


def _aligned(schedule: Schedule, passes: Sequence[Sequence[Pass]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the spans of all ranks from the beginning of the step on. Where a message would come before it was sent, clocks
    disagree: the rank's are moved so that messages take as long one way as the other.
    """
    when = {
        action: each
        for order, own in zip(schedule.orders, passes, strict=True)
        for action, each in zip(order, own, strict=True)
    }
    moved = [0]
    for device in range(1, schedule.num_devices):
        there = _least_lag(when, schedule, device - 1, device)
        back = _least_lag(when, schedule, device, device - 1)
        apart = (back - there) // 2 if min(there, back) < 0 else 0
        moved.append(moved[-1] + apart)
    origin = min(own[0].start + shift for own, shift in zip(passes, moved, strict=True))
    return tuple(
        tuple((each.start + shift - origin, each.end + shift - origin) for each in own)
        for own, shift in zip(passes, moved, strict=True)
    )


def _least_lag(when: Mapping[Any, Pass], schedule: Schedule, source: int, destination: int) -> int:
    """Return the shortest time from the end of an action on one device to the start of what needs it on another."""
    placement, lags = schedule.placement, []
    for action, each in when.items():
        before = placement.previous_stage(action.stage) if action.kind is Kind.F else placement.next_stage(action.stage)
        if before is not None and (placement.devices[before], placement.devices[action.stage]) == (source, destination):
            lags.append(each.start - when[action._replace(stage=before)].end)
    return min(lags, default=0)
