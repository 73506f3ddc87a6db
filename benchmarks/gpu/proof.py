"""What the experiments of the one-GPU proof share: where they run and how they report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import needs

from megatron_pipemem.files import write_whole
from megatron_pipemem.mcore import on_cpu_ranks


@dataclass(frozen=True)
class Row:
    """What one case showed.

    Args:
        case: its name.
        values: what was measured; numbers carry their unit in the name.
        missed: what was claimed and does not hold, one sentence each.
    """

    case: str
    values: Mapping[str, object]
    missed: tuple[str, ...] = ()


@dataclass
class Report:
    """The rows of one experiment, in a file that is whole after every row. A later run goes on with the rows that are missing.

    Args:
        path: JSON file.
        rehearsal: on CPU and tiny; its numbers mean nothing.
    """

    path: Path
    rehearsal: bool
    rows: list[Row] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        earlier = unfinished(self.path, self.rehearsal).get("rows", [])
        self.rows += [Row(row["case"], row["values"], tuple(row["missed"])) for row in earlier]

    def has(self, case: str) -> bool:
        """Return whether an earlier run that was cut short has measured the case on this machine."""
        return any(row.case == case for row in self.rows)

    def measure(self, case: str, work: Callable[[], tuple[Mapping[str, object], list[str]]]) -> None:
        """Add a case that is missing. ``work`` returns the values and what was missed."""
        if self.has(case):
            say(f"{case}: done already")
        else:
            say(case)
            self.add(case, *work())

    def add(self, case: str, values: Mapping[str, object], missed: list[str] | tuple[str, ...] = ()) -> None:
        self.rows.append(Row(case, values, tuple(missed)))
        self._write()

    def amend(self, case: str, values: Mapping[str, object]) -> None:
        """Add values to a row."""
        self.rows = [replace(row, values={**row.values, **values}) if row.case == case else row for row in self.rows]
        self._write()

    def finish(self) -> int:
        """Mark the experiment as complete. Returns the exit status: 1 if a claim was missed."""
        self.complete = True
        self._write()
        return int(any(row.missed for row in self.rows))

    def _write(self) -> None:
        data = {"machine": machine(self.rehearsal), "rehearsal": self.rehearsal, "complete": self.complete}
        write_whole(self.path, json.dumps(data | {"rows": [asdict(row) for row in self.rows]}, indent=1) + "\n")


def unfinished(path: Path, rehearsal: bool) -> dict[str, Any]:
    """Return the results of an earlier run on this machine that did not end, or nothing."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found if found.get("machine") == machine(rehearsal) and not found["complete"] else {}


def machine(rehearsal: bool) -> str:
    """The device and the versions that decide what a number means."""
    import torch

    name = "CPU" if rehearsal else torch.cuda.get_device_name()
    nccl = (
        ""
        if rehearsal or not torch.distributed.is_nccl_available()
        else f", NCCL {'.'.join(map(str, needs.nccl_version()))}"
    )
    return f"{name}, torch {torch.__version__}{nccl}"


def arguments(description: str | None, experiment: str, parts: Sequence[str] = ()) -> argparse.Namespace:
    """``--rehearse`` and ``--output`` of an experiment that runs by itself too. Activates the CPU lane to rehearse.

    Exits with status 2 where the machine lacks what the experiment needs. ``parts`` are the values of ``--part``, the
    default first.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on CPU, to see that the program works")
    parser.add_argument("--output", type=Path, default=Path(f"out/benchmarks/prove/{experiment}.json"))
    if parts:
        parser.add_argument("--part", choices=parts, default=parts[0], help="rows to measure (default: %(default)s)")
    options = parser.parse_args()
    # Megatron warns of every package it misses, in every process.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")
    if options.rehearse:
        from megatron_pipemem.tools.cpu import activate

        activate()
        return options
    if (fault := needs.fault(experiment)) is not None:
        sys.stderr.write(f"{fault}\n")
        sys.exit(2)
    return options


def kinds_of_layers() -> tuple[str, ...]:
    """Of the models: Megatron's own layers, and Transformer Engine's where it is installed."""
    return ("local", "te") if importlib.util.find_spec("transformer_engine") else ("local",)


def say(text: str) -> None:
    """Print at once: the last line says where a run stands."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


HEAD_START = 5_000_000
"""Cycles, about 3 ms, by which the host is ahead of the device when a measurement begins."""


class Taken(NamedTuple):
    """Seconds of work on the device, and of its launches on the host."""

    device: float
    host: float


def taken(work: Callable[[], object]) -> Taken:
    """Return the times of work. As in training, the host launches ahead, so its time is no part of the device's."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if not on_cpu_ranks():
        torch.cuda._sleep(HEAD_START)
    begin.record()
    start = time.perf_counter()
    work()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return Taken(begin.elapsed_time(end) / 1e3, host)


def seconds(work: Callable[[], object]) -> float:
    """Return the time of work on the device."""
    return taken(work).device
