"""Write a run as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

One process per run; in it a track per device with slices named as torch names them (``PP:2F0``), a counter track
per device for what it holds, a track for its copies to and from the host, and a flow arrow per message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count

from megatron_pipemem.report.timeline import DrawnRun, held_steps
from megatron_pipemem.schedule.action import MEMORY
from megatron_pipemem.schedule.simulator import Timeline

_MICROSECONDS = 1e6


def trace(timelines: Sequence[Timeline]) -> dict[str, object]:
    """Return the trace as a JSON-ready object. One second of the costs is one second of the trace."""
    flow_ids = count(1)
    events: list[dict[str, object]] = []
    for process, timeline in enumerate(timelines):
        events += _process_events(process, timeline, flow_ids)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def to_json(timelines: Sequence[Timeline]) -> str:
    return json.dumps(trace(timelines), separators=(",", ":"), allow_nan=False)


def _process_events(process: int, timeline: Timeline, flow_ids: count[int]) -> list[dict[str, object]]:
    run = DrawnRun(timeline)
    rows, unit = run.rows, "units" if run.in_units else "bytes"
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": run.headline}}
    ]

    def name_track(number: int, name: str) -> None:
        track = {"pid": process, "tid": number}
        events.append({"ph": "M", "name": "thread_name", **track, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": number}})

    def add_slice(number: int, name: str, category: str, times: tuple[float, float], **told: object) -> None:
        start, end = times
        track = {"pid": process, "tid": number, "ts": start * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
        events.append({"ph": "X", "name": name, "cat": category, **track, "args": told})

    for device, row in enumerate(rows):
        name_track(device, f"device {device}")
        for box in row:
            if box.action.kind not in MEMORY:
                what = {"stage": box.action.stage, "chunk": box.chunk, "microbatch": box.action.microbatch}
                held_after = {f"held after ({unit})": box.held}
                name, category = f"PP:{box.action}", box.action.kind.spec.says
                add_slice(device, name, category, (box.start, box.end), **what, **held_after)
        for time, held in held_steps(row):
            counter = {"ph": "C", "name": f"held by device {device}", "pid": process, "tid": device}
            events.append({**counter, "ts": time * _MICROSECONDS, "args": {unit: held}})
    for device, lane in enumerate(run.host_transfers):
        if lane:
            name_track(len(rows) + device, f"copies of device {device}")
        for copy in lane:
            what = {"stage": copy.action.stage, "microbatch": copy.action.microbatch}
            category = copy.action.kind.spec.says
            add_slice(len(rows) + device, str(copy.action), category, (copy.start, copy.end), **what)
    if timeline.collectives:
        name_track(2 * len(rows), "collectives")
    for kind, microbatch, start, end in timeline.collectives:
        times = (start - run.origin, end - run.origin)
        add_slice(2 * len(rows), f"PP:{kind}{microbatch}", "collective", times, microbatch=microbatch)
    for message, flow in zip(run.messages, flow_ids, strict=False):
        for phase, box in (("s", message.producer), ("f", message.consumer)):
            # An arrow belongs to the slice that encloses its time: the middle is inside for certain.
            middle = (box.start + box.end) / 2 * _MICROSECONDS
            arrow = {"ph": phase, "name": "message", "cat": "message", "id": flow, "pid": process, "tid": box.device}
            events.append({**arrow, "ts": middle, **({"bp": "e"} if phase == "f" else {})})
    return events
