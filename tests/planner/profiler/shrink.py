"""Shrink what torch.profiler wrote of one rank to what ``pipemem trace`` reads: ``python shrink.py FROM.json.gz TO.json.gz``.

Of a trace with call stacks it keeps Megatron's schedules and the profiler's step. Names, threads and times stay as they were
recorded.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

KEPT = ("ph", "cat", "name", "tid", "ts", "dur")


def shrink(source: Path, target: Path) -> None:
    with gzip.open(source, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    groups = [each for each in trace["distributedInfo"]["pg_config"] if each["pg_size"] > 1]
    stacks = bool(trace.get("with_stack"))
    events = [
        {key: event[key] for key in KEPT}
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
        and (not stacks or "/schedules.py" in event["name"] or event["name"].startswith("ProfilerStep#"))
    ]
    told = {
        "distributedInfo": trace["distributedInfo"] | {"pg_config": groups},
        "baseTimeNanoseconds": trace["baseTimeNanoseconds"],
        "traceEvents": events,
    }
    with gzip.GzipFile(target, "wb", mtime=0) as packed:
        packed.write(json.dumps(told, separators=(",", ":")).encode())


if __name__ == "__main__":
    shrink(*map(Path, sys.argv[1:]))
