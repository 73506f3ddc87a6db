"""Read what came of one point from the log and the report of its run, and keep it as JSON."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_pipemem.config.limits import check_magnitudes
from megatron_pipemem.config.loading import typed
from megatron_pipemem.config.runs import Run
from megatron_pipemem.errors import ConfigError
from megatron_pipemem.files import write_whole
from megatron_pipemem.reading import read_json

Status = Literal["done", "failed", "infeasible"]

_ITERATION = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")
_FAILURE = re.compile(r"rank \d+ failed: .*")


@dataclass(frozen=True)
class Result:
    """A point's result.

    Args:
        index: number of the point.
        settings: what it changed.
        status: ``infeasible`` points were never started.
        reason: why it is not ``done``.
        exit_code: of its training.
        devices: ranks it ran on.
        seconds_per_step: median of all steps but the first of a start, by the training script's clock.
        tokens_per_second: over all devices.
        predicted_peak_bytes: of activations, one for each rank; ``None`` where the schedule is not ours.
        counted_peak_bytes: likewise, as autograd held them.
        bytes_of_1f1b: the peak that 1F1B would have of the model; ``None`` if it is not known.
        predicted_bubble_rate: of each rank.
        measured_bubble_rate: of each rank.
        losses: of every step since the last start; ``None`` where one was no finite number.
    """

    index: int
    settings: dict[str, Any]
    status: Status
    reason: str | None = None
    exit_code: int | None = None
    devices: int | None = None
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    predicted_peak_bytes: tuple[int | None, ...] = ()
    counted_peak_bytes: tuple[int | None, ...] = ()
    bytes_of_1f1b: int | None = None
    predicted_bubble_rate: tuple[float | None, ...] = ()
    measured_bubble_rate: tuple[float | None, ...] = ()
    losses: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if len(self.predicted_peak_bytes) != len(self.counted_peak_bytes):
            raise ConfigError("wrong-file", "is not of as many ranks as predicted_peak_bytes", key="counted_peak_bytes")

    @property
    def peak_bytes(self) -> int | None:
        """Counted bytes of the rank that holds most."""
        return max((peak for peak in self.counted_peak_bytes if peak is not None), default=None)

    @property
    def share_of_1f1b(self) -> float | None:
        """Return the counted peak as a share of 1F1B's bytes."""
        return self.peak_bytes / self.bytes_of_1f1b if self.peak_bytes and self.bytes_of_1f1b else None

    @property
    def predicted_peak(self) -> int | None:
        """Predicted bytes of the rank that was to hold most."""
        return max((peak for peak in self.predicted_peak_bytes if peak is not None), default=None)

    @property
    def peaks_agree(self) -> bool | None:
        """Whether every rank held what was predicted; ``None`` where nothing was."""
        pairs = list(zip(self.predicted_peak_bytes, self.counted_peak_bytes, strict=True))
        known = [predicted == counted for predicted, counted in pairs if predicted is not None]
        return all(known) if known else None


def collect(index: int, settings: dict[str, Any], run: Run, log: Path, exit_code: int) -> Result:
    """Return the result of a point whose training has ended.

    Args:
        index: of the point.
        settings: of the point.
        run: with the folder its report is in.
        log: of all its starts.
        exit_code: of the last one.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    path = run.report
    if exit_code or not path.exists():
        reason = _why(text, exit_code)
        return Result(index, settings, "failed", reason, exit_code, run.parallelism.ranks)
    seconds = step_seconds(text)
    tokens = run.parallelism.global_batch * run.model.sequence
    speed = None if not seconds else tokens / seconds
    ran = Result(index, settings, "done", None, exit_code, run.parallelism.ranks, seconds, speed)
    try:
        return _read(asdict(ran) | _report(path), path)
    except ConfigError as error:
        return replace(ran, status="failed", reason=str(error), seconds_per_step=None, tokens_per_second=None)


@contextmanager
def report_of(path: Path) -> Iterator[Any]:
    """Give what ``--pipemem-report`` wrote to the block that takes out what it needs.

    Raises:
        ConfigError: the file holds no report, or lacks what the block needs.
    """
    report = read_json(path, "the report of a run")
    try:
        yield report
    except KeyError as error:
        raise ConfigError(
            "wrong-file", f"is no report of a run, it lacks the key {error}; train again", file=path
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError("wrong-file", f"is no report of a run, {error}; train again", file=path) from error


def _report(path: Path) -> dict[str, Any]:
    """Return what a result takes from the report of its run.

    Raises:
        ConfigError: the file holds no report.
    """
    keys = ("predicted_peak_bytes", "counted_peak_bytes", "predicted_bubble_rate", "measured_bubble_rate")
    with report_of(path) as report:
        of_run = {"losses": tuple(report["losses"]), "bytes_of_1f1b": report.get("bytes_of_1f1b")}
        return {key: tuple(rank[key] for rank in report["ranks"]) for key in keys} | of_run


def step_seconds(log: str) -> float | None:
    """Return the median time of a step; the first after every start opens channels and is left out where there are
    others.
    """
    steps = [(int(number), float(milliseconds)) for number, milliseconds in _ITERATION.findall(log)]
    later = [time for (before, _), (number, time) in zip(steps, steps[1:], strict=False) if number == before + 1]
    times = later or [time for _, time in steps]
    return statistics.median(times) / 1e3 if times else None


def write_result(result: Result, path: Path) -> None:
    """Raises OutputError when it cannot be kept."""
    write_whole(path, json.dumps(asdict(result), indent=2, allow_nan=False) + "\n")


def read_result(path: Path) -> Result | None:
    """``None`` where there is none.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.exists():
        return None
    return _read(read_json(path, "a result"), path)


def _read(raw: Any, path: Path) -> Result:
    """Return a result from what a file says.

    Raises:
        ConfigError: something in it is no result's.
    """
    try:
        if not isinstance(raw, dict):
            raise ConfigError("wrong-file", "is no result of a grid's point")
        check_magnitudes(raw)
        return typed(raw, Result)
    except ConfigError as error:
        raise ConfigError(
            error.code, f"{error.message}; delete the file, and train again", key=error.key, file=path
        ) from error


def _why(log: str, exit_code: int) -> str:
    """Return the end of a log in a sentence."""
    if told := _FAILURE.findall(log):
        return told[-1]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = f"; the log ends: {lines[-1]}" if lines else ""
    return f"exit code {exit_code}{last}" if exit_code else f"it ended without a report{last}"
