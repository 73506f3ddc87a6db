"""Write a run as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

One process per run; in it a track per device with slices named as torch names them (``PP:2F0``), a counter track
per device for what it holds, a track for its copies to and from the host, and a flow arrow per message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count

from megatron_pipemem.report.timeline import (
    KIND_NAMES,
    TRANSFER_NAMES,
    boxes,
    headline,
    held_steps,
    host_transfers,
    messages,
)
from megatron_pipemem.schedule.core.action import MEMORY
from megatron_pipemem.schedule.core.simulator import Timeline

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
    rows = boxes(timeline)
    unit = "units" if timeline.costs.memory is None else "bytes"
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": headline(timeline)}}
    ]
    for device, row in enumerate(rows):
        track = {"pid": process, "tid": device}
        events.append({"ph": "M", "name": "thread_name", **track, "args": {"name": f"device {device}"}})
        events.append({"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": device}})
        for box in row:
            if box.action.kind in MEMORY:
                continue
            events.append(
                {
                    "ph": "X",
                    "name": f"PP:{box.action}",
                    "cat": KIND_NAMES[box.action.kind],
                    **track,
                    "ts": box.start * _MICROSECONDS,
                    "dur": box.seconds * _MICROSECONDS,
                    "args": {
                        "stage": box.action.stage,
                        "chunk": box.chunk,
                        "microbatch": box.action.microbatch,
                        f"held after ({unit})": box.held,
                    },
                }
            )
        for time, held in held_steps(row):
            name = f"held by device {device}"
            events.append({"ph": "C", "name": name, **track, "ts": time * _MICROSECONDS, "args": {unit: held}})
    for device, lane in enumerate(host_transfers(timeline)):
        if not lane:
            continue
        track = {"pid": process, "tid": len(rows) + device}
        events.append({"ph": "M", "name": "thread_name", **track, "args": {"name": f"copies of device {device}"}})
        events.append({"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": len(rows) + device}})
        for copy in lane:
            events.append(
                {
                    "ph": "X",
                    "name": str(copy.action),
                    "cat": TRANSFER_NAMES[copy.action.kind],
                    **track,
                    "ts": copy.start * _MICROSECONDS,
                    "dur": (copy.end - copy.start) * _MICROSECONDS,
                    "args": {"stage": copy.action.stage, "microbatch": copy.action.microbatch},
                }
            )
    if timeline.collectives:
        track = {"pid": process, "tid": 2 * len(rows)}
        events.append({"ph": "M", "name": "thread_name", **track, "args": {"name": "collectives"}})
        events.append({"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": 2 * len(rows)}})
        origin = min(spans[0][0] for spans in timeline.spans if spans)
        for kind, microbatch, start, end in timeline.collectives:
            times = {"ts": (start - origin) * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
            name = f"PP:{kind}{microbatch}"
            events.append(
                {"ph": "X", "name": name, "cat": "collective", **track, **times, "args": {"microbatch": microbatch}}
            )
    for message, flow in zip(messages(timeline, rows), flow_ids, strict=False):
        for phase, box in (("s", message.producer), ("f", message.consumer)):
            # An arrow belongs to the slice that encloses its time: the middle is inside for certain.
            middle = (box.start + box.end) / 2 * _MICROSECONDS
            arrow = {"ph": phase, "name": "message", "cat": "message", "id": flow, "pid": process, "tid": box.device}
            events.append({**arrow, "ts": middle, **({"bp": "e"} if phase == "f" else {})})
    return events
